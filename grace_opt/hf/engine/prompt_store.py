"""`PromptStore`: compressed prompts in a folder, found by their tokens, up to a number of bytes.

A folder for each model with its settings, a file for each prompt: what `CompressedCache.save` writes, and the tokens.
Prompts are compared token by token, so no two are ever mistaken for each other. A file has its name, and all of its
bytes, at once; its time is that of its last use. So readers and writers need no locks: whoever finds a file gone, or
damaged, reads the prompt again.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ..._util.files import make_folder, os_error_advice
from ..._util.parameters import shown
from ..._util.sizes import byte_count
from ..._util.warning import warn
from ...errors import CacheError, OptionError
from ..bases.basis_folder import assets_folder
from .saving import FILE_FORMAT, TOKENS, Tokens

#: What is read of a stored prompt is at least this share of it, as the codes of the rest take memory all the same.
LEAST_SHARE = 0.5
#: Prompts with no more tokens are read again in less time than it takes to look for them.
FEWEST = 128
#: Seconds after which a writer's unfinished file is taken for that of a killed one.
ABANDONED = 3600.0
#: Names of what is a store's, whatever else is in the folder: folders, files, and files that are being written.
_FOLDER = re.compile(r".+-[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{16}\.safetensors")


@dataclass(frozen=True)
class KeptPrompt:
    """A prompt in a store.

    Attributes
    ----------
    path : Path
        Its file, which `CompressedCache.load` reads as well.
    model : str
        The folder: the model's type, and which model and settings of this type.
    tokens, bytes : int
        Number of its tokens, and bytes of the file.
    used : float
        Time of the last use, in seconds since 1970.
    """

    path: Path
    model: str
    tokens: int
    bytes: int
    used: float


class PromptStore:
    """Compressed prompts on disk, from which `attach` takes what a prompt begins with.

    Parameters
    ----------
    path : path, optional
        The folder, which is made if it is missing; by default one among Hugging Face's cached assets. A ``~`` is the
        home folder.
    max_bytes : int or str
        What all files together take at most, such as ``"20GiB"``: the least recently used go.

    Raises
    ------
    CacheError
        If the folder cannot be made, or not be written to.
    OptionError
        If ``path`` is no name, or ``max_bytes`` no number of bytes.

    Notes
    -----
    Several threads and processes may use one folder. Looking for a prompt takes time for every file of the same model
    and settings: about a tenth of a millisecond each, the first time.

    Examples
    --------
    >>> import tempfile
    >>> store = PromptStore(tempfile.mkdtemp(), max_bytes="2GiB")
    >>> store.max_bytes, store.prompts()
    (2147483648, [])
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, max_bytes: int | str = "20GiB") -> None:
        self.max_bytes = byte_count("max_bytes", max_bytes)
        if path is not None and (not isinstance(path, str | os.PathLike) or not os.fspath(path)):
            raise OptionError(f"path={shown(path)}: give the name of a folder, as text or a Path")
        # Wherever the process goes later on.
        self.path = assets_folder("prompts", CacheError) if path is None else Path(path).expanduser().absolute()
        _private_folder(self.path)
        self._known: dict[Path, Tokens] = {}
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"PromptStore({str(self.path)!r}, max_bytes={self.max_bytes})"

    def prompts(self) -> list[KeptPrompt]:
        """Return all prompts, the most recently used first; files that are no prompts are left out."""
        found = [kept for path in self._files() if (kept := self._kept(path)) is not None]
        return sorted(found, key=lambda kept: kept.used, reverse=True)

    def longest(self, key: str, tokens: Tokens) -> tuple[KeptPrompt, int] | None:
        """Return the stored prompt that begins with as many of the tokens as possible, and their number.

        Parameters
        ----------
        key : str
            Which model and settings: text that ends in a dash and 32 hexadecimal digits.
        tokens : array (n,)
            All of them but the last are looked for.

        Returns
        -------
        (KeptPrompt, int) or None
            Of two that are as good, the shorter one. None if none has `FEWEST`, and `LEAST_SHARE` of its own tokens.
        """
        best: tuple[int, int, Path] | None = None
        for path in self._files(key):
            if (own := self._tokens(path)) is None:
                continue
            count = _common(own, tokens[:-1])
            if count >= max(FEWEST, LEAST_SHARE * len(own)) and (best is None or (-count, len(own)) < best[:2]):
                best = -count, len(own), path
        if best is None:
            return None
        with suppress(OSError):
            os.utime(best[2])  # first, so that it is among the last to go
        kept = self._kept(best[2])
        return None if kept is None else (kept, -best[0])

    def add(self, key: str, tokens: Tokens, write: Callable[[Path], None]) -> Path | None:
        """Store a prompt, unless it is there.

        Parameters
        ----------
        key : str
            As in `longest`.
        tokens : array (n,)
        write : callable
            Writes the file that it is given, at once, and raises `CacheError` if that fails.

        Returns
        -------
        Path or None
            None if the prompt could not be stored, which a warning says, once for each reason.
        """
        folder = self.path / key
        path = folder / f"{hashlib.sha256(tokens.tobytes()).hexdigest()[:32]}.safetensors"
        try:
            _private_folder(folder)
            if self._tokens(path) is not None and path.exists():
                os.utime(path)
                return path
            try:
                write(path)
            except CacheError:
                if folder.exists():
                    raise
                _private_folder(folder)  # somebody has just cleared the store
                write(path)
            size = path.stat().st_size
        except (CacheError, OSError) as failure:
            said = str(failure) if isinstance(failure, CacheError) else os_error_advice(failure)
            self._say("unwritable", f"a prompt was not stored in {self.path}: {said}")
            return None
        if size > self.max_bytes:
            self.drop(path)
            self._say(
                "too large",
                f"a prompt of {len(tokens)} tokens was not stored: it takes {size} bytes, and the store has "
                f"max_bytes={self.max_bytes}",
            )
            return None
        self._make_room(path)
        return path

    def drop(self, path: Path) -> None:
        """Remove a prompt; nothing if it is gone."""
        with self._lock:
            self._known.pop(path, None)
        with suppress(OSError):  # somebody else was faster, or has it open on Windows: it goes the next time
            path.unlink()

    def verify(self) -> list[Path]:
        """Read all files, remove those that are not as they were written, and return these."""
        damaged = []
        for path in self._files():
            try:
                _, tensors = FILE_FORMAT.read(path, mapped=True)
            except CacheError:
                tensors = {}
            if TOKENS not in tensors and path.exists():
                damaged.append(path)
                self.drop(path)
        return damaged

    def clear(self) -> int:
        """Remove all prompts, and return how many there were."""
        every = list(self._files())
        for path in every:
            self.drop(path)
        self._sweep(0.0)
        for folder in self._folders():
            with suppress(OSError):  # not empty: somebody is writing
                folder.rmdir()
        return len(every)

    def _make_room(self, newest: Path) -> None:
        """Remove the least recently used beyond the limit, and what killed writers have left."""
        self._sweep(ABANDONED)
        every = []
        for path in self._files():
            with suppress(OSError):
                status = path.stat()
                every.append((path == newest, status.st_mtime_ns, status.st_size, path))
        left = sum(size for *_, size, _ in every) - self.max_bytes
        for is_newest, _, size, path in sorted(every):
            if left <= 0 or is_newest:
                return
            self.drop(path)
            left -= size

    def _sweep(self, seconds: float) -> None:
        for folder in self._folders():
            for path in _entries(folder):
                if _UNFINISHED.fullmatch(path.name):
                    with suppress(OSError):
                        if time.time() - path.stat().st_mtime >= seconds:
                            path.unlink()

    def _folders(self) -> Iterator[Path]:
        found = (path for path in _entries(self.path) if _FOLDER.fullmatch(path.name))
        return (path for path in found if path.is_dir() and not path.is_symlink())

    def _files(self, key: str | None = None) -> Iterator[Path]:
        """Yield the files of one folder, or of all."""
        for folder in self._folders() if key is None else [self.path / key]:
            yield from (path for path in _entries(folder) if _FILE.fullmatch(path.name))

    def _kept(self, path: Path) -> KeptPrompt | None:
        tokens = self._tokens(path)
        try:
            status = path.stat()
        except OSError:
            return None
        if tokens is None:
            return None
        return KeptPrompt(path, path.parent.name, len(tokens), status.st_size, status.st_mtime)

    def _tokens(self, path: Path) -> Tokens | None:
        """Return the tokens of a file, which are read once; None if it is gone, or no prompt."""
        with self._lock:
            found = self._known.get(path)
        if found is not None:
            return found
        try:
            with safe_open(str(path), framework="numpy") as file:
                found = np.asarray(file.get_tensor(TOKENS))
        except (SafetensorError, OSError):
            return None
        if found.ndim != 1 or found.dtype != np.int64:
            return None
        with self._lock:
            self._known[path] = found
        return found

    def _say(self, kind: str, what: str) -> None:
        """Warn, once for each kind."""
        if kind not in self._told:
            self._told.add(kind)
            warn(what)


def _private_folder(path: Path) -> None:
    """Make a folder that only its owner can read, unless it is there; raise `CacheError` if it cannot be used."""
    if make_folder(path, CacheError):
        path.chmod(0o700)
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise CacheError(f"{path} is no folder that prompts can be written to; give another one as prompts=")


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing if it is gone."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _common(one: Tokens, other: Tokens) -> int:
    """Return how many first tokens are the same.

    Examples
    --------
    >>> _common(np.array([1, 2, 3]), np.array([1, 2, 4, 5])), _common(np.array([1]), np.array([1, 2]))
    (2, 1)
    """
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
