"""Cache compiled loops on disk, in one place for all of ours that can never make a call fail.

With its own cache, numba refuses to compile if no folder can be written to, and fails if a cached file is damaged or
the disk is full. Ours compiles anyway; one warning per process says what is wrong. The names of cached files contain a
hash of all sources that may be compiled into a function, so files of another version are never used. Numba itself
checks only the file that defines the function, not the files of the functions it calls.

When: `grace_opt.kernels._shared.jit` uses it. Built on numba's own cache.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.core.sigutils import normalize_signature

from ..._util.warning import warn
from .switches import LLVM, is_off

_lock = threading.Lock()
_said = False


def cache_folder() -> Path | None:
    """Return where compiled loops are cached, or None; ``**`` stands for their folders if next to each module."""
    try:
        folder = Path(_Cache(cache_folder).cache_path)
    except (RuntimeError, OSError):
        return None
    own = Path(__file__).parent
    if folder.parent == own:
        return own.parent / "**" / folder.name
    return folder.parent if folder.name.startswith(f"{own.name}_") else folder  # one folder per module


class _Nowhere(NullCache):
    """No folder can be written to, which is said once something was compiled."""

    def __init__(self, why: str) -> None:
        self._why = why

    def is_on_disk(self) -> bool:
        """Return False."""
        return False

    def save_overload(self, sig: Any, data: Any) -> None:
        _say(self._why)


class _Files(CompileResultCacheImpl):
    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"{super().get_filename_base(fullname, abiflags)}-{_stamp(Path(self.locator._py_file))}"


class _Cache(FunctionCache):
    """numba's cache, except that no file problem raises."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            loaded = super().load_overload(sig, target_context)
        except Exception:  # unpickling or linking a damaged file may raise anything: it is replaced
            self._guarded(self.flush)
            return None
        # Two processes that save at the same time can assign one file to two signatures.
        fits = loaded is None or tuple(loaded.signature.args) == tuple(normalize_signature(sig)[0])
        return loaded if fits else None

    def is_on_disk(self) -> bool:
        """Return whether the function has been compiled before, for whatever types."""
        return Path(self._cache_file._index_path).exists()

    def save_overload(self, sig: Any, data: Any) -> None:
        self._guarded(super().save_overload, sig, data)

    def _guarded(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except Exception as error:  # full, now read-only, or gone: the function itself is compiled
            self.disable()
            _say(f"{self.cache_path} cannot be written to ({error})")


def cache_of(function: Callable[..., Any]) -> Any:
    try:
        return _Cache(function)
    except (RuntimeError, OSError):  # numba found no folder, or we found no source
        beside = Path(inspect.getfile(function)).parent / "__pycache__"
        folder = getattr(config, "CACHE_DIR", "")
        setting = f"NUMBA_CACHE_DIR={folder}, " if folder else ""
        return _Nowhere(f"neither {setting}{beside} nor the user's cache folder can be written to")


@cache
def stamp_of_sources() -> str:
    """Return a hash of numba's version, the switch and the sources of all kernels."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _hash([f"{numba.__version__} {is_off(LLVM)}".encode(), *(file.read_bytes() for file in sources)])


@cache
def _stamp(own: Path) -> str:
    """Return a hash of the same, and of the function's own file."""
    return _hash([own.read_bytes(), stamp_of_sources().encode()])[:12]


def _hash(texts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()


def _say(why: str) -> None:
    """Warn once per process."""
    global _said
    with _lock:
        first, _said = not _said, True
    if first:
        warn(
            f"compiled loops cannot be kept: {why}. Everything works, but each process compiles what it needs, which "
            f"takes some seconds: set NUMBA_CACHE_DIR in the environment to a folder that can be written to.",
            RuntimeWarning,
        )
