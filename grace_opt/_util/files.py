"""Write files atomically (under another name, synced to disk, then renamed), and read complete text files.

A reader never sees half a file. A failure leaves the old file in place and no other file behind, and a file that has
its final name survives a loss of power. Otherwise this behaves like `open`: symbolic links are followed, a new file's
mode follows the umask, an existing file keeps its mode, and a read-only file is not written. Devices, pipes and folders
are refused. Other hard links keep the old content, because the file is a new one.

When: for every file that the library writes; tests/test_files.py checks that no other module writes any.
`os.replace` is atomic within one folder on every system that Python runs on.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FileError, GraceError, OptionError
from .parameters import shown

if TYPE_CHECKING:
    from torch import Tensor

#: UTF-8; Excel's CSV begins with a byte-order mark.
TEXT = "utf-8-sig"
#: Names of streams that the shell has opened; never replaced, even if they are files.
STREAM_PATHS = ("/dev/std", "/dev/fd/", "/proc/")
#: Error numbers that mean that no space is left.
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a name stands for a stream that the shell has opened."""
    return os.path.abspath(path).startswith(STREAM_PATHS)


@contextmanager
def atomic_write(path: str | os.PathLike[str], error: type[GraceError] = FileError) -> Iterator[Path]:
    """Yield an empty temporary file next to `path`, with its suffix; it becomes `path` if the block succeeds.

    Parameters
    ----------
    path : path
        The final name of the file.
    error : type
        What to raise where the system refuses: the `GraceError` of what is being written.

    Yields
    ------
    Path
        The temporary file to write to. It is removed if the block raises.

    Raises
    ------
    GraceError
        Of type `error`, if the folder does not exist, space or permission is missing, or `path` is not a file.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with atomic_write(path) as name:
    ...     _ = name.write_text("hello")
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('hello', 1)
    """
    name = None
    try:
        target, mode = _target(path)
        # Not tempfile: its files can be read only by their owner, even after renaming.
        name = target.with_name(f".{target.stem[:32]}.{secrets.token_hex(8)}{target.suffix[-16:]}")
        fresh = _create(name)
        yield name
        _sync(name)
        name.chmod(fresh if mode is None else mode)  # a library may have replaced the file, with another mode
        os.replace(name, target)
        with suppress(OSError):  # not every system can sync a folder; the file is complete in any case
            _sync(target.parent, os.O_RDONLY)
    except BaseException as failure:
        if name is not None:
            with suppress(OSError):  # a read-only file system refuses this too; report the first error
                name.unlink()
        if isinstance(failure, OSError) and not isinstance(failure, GraceError):
            raise error(f"cannot write {os.fspath(path) or repr('')}: {os_error_advice(failure)}") from failure
        raise


def make_folder(path: Path, error: type[GraceError]) -> list[Path]:
    """Make a folder and its parents where they are missing; those that were made, the innermost first.

    Parameters
    ----------
    path : Path
    error : type
        What to raise where the system refuses.

    Examples
    --------
    >>> import tempfile
    >>> [made.name for made in make_folder(Path(tempfile.mkdtemp()) / "a" / "b", FileError)]
    ['b', 'a']
    """
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as failure:
        raise error(f"cannot make the folder {path}: it is a file. Choose another place.") from failure
    except OSError as failure:
        raise error(f"cannot make the folder {path}: {os_error_advice(failure)}") from failure
    except ValueError:
        raise error(f"cannot make the folder {str(path)!r}: there is a null character in the name.") from None
    return missing


@contextmanager
def new_folder(path: Path, error: type[GraceError] = FileError) -> Iterator[None]:
    """Make a folder if it is missing; if the block raises, remove what was made and is still empty.

    Parameters
    ----------
    path : Path
    error : type
        What to raise where the system refuses.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a" / "b"
    >>> with suppress(ValueError), new_folder(path):
    ...     raise ValueError("something failed")
    >>> list(path.parent.parent.iterdir())
    []
    """
    made = make_folder(path, error)
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # not empty
                folder.rmdir()
        raise


def path_text(path: Any) -> str:
    """Return the name of a file as text; raise OptionError if it is neither text nor a Path.

    Examples
    --------
    >>> path_text(Path("w.npy"))
    'w.npy'
    >>> path_text(None)
    Traceback (most recent call last):
    grace_opt.errors.OptionError: path=None: give the name of a file, as text or a Path.
    """
    try:
        return os.fsdecode(path)
    except TypeError:
        raise OptionError(f"path={shown(path)}: give the name of a file, as text or a Path.") from None


def os_error_advice(failure: OSError) -> str:
    """Return the system's message and a remedy, as the end of a sentence.

    Examples
    --------
    >>> os_error_advice(OSError(errno.EROFS, "Read-only file system"))
    'Read-only file system. Choose another place.'
    """
    said = failure.strerror or str(failure)
    if failure.errno in (errno.EINVAL, errno.ENOENT):
        return f"{said}."
    return f"{said}. {'Make room, or choose' if failure.errno in NO_SPACE_ERRORS else 'Choose'} another place."


def write_file(path: str | os.PathLike[str], content: str | bytes, error: type[GraceError] = FileError) -> None:
    """Write text (UTF-8, line ends unchanged) or bytes to a file, as `atomic_write` does.

    Parameters
    ----------
    path : path
    content : str or bytes
    error : type
        What to raise where the system refuses.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_file(path, "λ")
    >>> path.read_bytes()
    b'\\xce\\xbb'
    """
    with atomic_write(path, error) as name, name.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    error: type[GraceError] = FileError,
) -> None:
    """Write a safetensors file, as `atomic_write` does.

    Parameters
    ----------
    path : path
    tensors : mapping of Tensor
        Contiguous, on the CPU, none of them sharing memory.
    metadata : mapping of str
    error : type
        What to raise where the system refuses.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_write(path, error) as name:
        try:
            save_file(dict(tensors), name, dict(metadata))
        except SafetensorError as failure:
            code = re.search(r"os error (\d+)", str(failure))  # on Windows, of its own numbering
            raise OSError(int(code[1]) if code and os.name == "posix" else None, str(failure)) from failure


def read_lines(path: Path, error: type[GraceError]) -> list[str]:
    """Return the lines of a text file, which may be gzipped (.gz); raise if the last one may be cut short.

    Parameters
    ----------
    path : Path
    error : type
        What to raise if the file is empty, not in UTF-8, or does not end with a newline: ``12`` may be the rest of
        ``123``.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "w.csv"
    >>> path.write_text("1,2\\n3,4")
    7
    >>> read_lines(path, FileError)
    Traceback (most recent call last):
    grace_opt.errors.FileError: ...w.csv: the last line, '3,4', does not end. Was the file cut short (truncated)? ...
    """
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", encoding=TEXT) as file:
        try:
            text = file.read()
        except UnicodeDecodeError as failure:
            byte, line = failure.object[failure.start], failure.object.count(b"\n", 0, failure.start) + 1
            raise error(
                f"{path} cannot be read as {path.suffix}: it is not in UTF-8 (byte 0x{byte:02x} in line {line}). "
                "Save it as UTF-8; in a spreadsheet, as CSV UTF-8."
            ) from None
    if not text.strip():
        raise error(f"{path} cannot be read as {path.suffix}: it is empty. The first line is missing.")
    lines = text.split("\n")
    if last := lines.pop():
        raise error(
            f"{path}: the last line, {last[-40:]!r}, does not end. Was the file cut short (truncated)? If it is whole, "
            "end it with a newline."
        )
    return lines


def _target(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Return the file with links followed, and its mode if it exists; raise OSError if it cannot be written."""
    text = path_text(path)
    if "\0" in text:
        raise OSError(errno.EINVAL, "there is a null character in the name")
    target = Path(os.path.realpath(text))
    try:
        status = os.stat(text)
    except FileNotFoundError:
        if not target.parent.is_dir():
            hint = "; ~ is not expanded here, write Path(...).expanduser()" if text.startswith("~") else ""
            raise OSError(errno.ENOENT, f"there is no folder {target.parent}{hint}") from None
        return target, None
    if not stat.S_ISREG(status.st_mode) or is_stream(text):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, a pipe or the like"
        raise OSError(errno.EINVAL, f"it is {kind}, which a file cannot replace; give the name of a file")
    os.close(os.open(target, os.O_WRONLY))  # raises if it may not be written
    return target, stat.S_IMODE(status.st_mode)


def _create(name: Path) -> int:
    """Create the file, private until it is complete, and return the mode that the umask gives it."""
    file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(file).st_mode)
    finally:
        os.close(file)
    name.chmod(0o600)
    return mode


def _sync(path: Path, flags: int = os.O_RDWR) -> None:
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)
