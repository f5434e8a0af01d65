"""`jit` and `c_function`: numba's compilers with one cache for all our loops, which never stands in a result's way.

numba refuses to compile a function to be cached where no folder can be written to, and fails where a cached file is
damaged or the disk is full. Here the loops are compiled all the same; one warning per process says what is wrong. Files
are named after the text of all that may be compiled into a function, so that another version's are never taken for its
own: numba itself looks at the file that a function stands in, and at none that it calls functions of.

When: every compiled loop, ``@jit`` or ``@jit(fastmath=...)``. Built on numba's own cache.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from .switches import LLVM, is_off

_lock = threading.Lock()
_said = False


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The compiled function, kept on disk where possible; it releases the interpreter.

    Options are those of ``numba.njit``.
    """
    if function is None:
        return lambda later: jit(later, **options)
    compiled = numba.njit(nogil=True, **options)(function)
    compiled._cache = _cache_of(function)
    return compiled


def c_function(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """As ``numba.cfunc``: compiled at once, with an ``address`` for C to call; kept on disk where possible."""

    def compiled(function: Callable[..., Any]) -> Any:
        made: Any = CFunc(function, normalize_signature(signature), locals={}, options={})
        made._cache = _cache_of(function)
        made.compile()
        return made

    return compiled


def cache_folder() -> Path | None:
    """Where compiled loops are kept; None if nowhere. Beside each module, ``*`` stands for the operation."""
    try:
        folder = Path(_Cache(cache_folder).cache_path)
    except (RuntimeError, OSError):
        return None
    own = Path(__file__).parent
    if folder.parent == own:
        return own.parent / "*" / folder.name
    return folder.parent if folder.name.startswith(f"{own.name}_") else folder  # a folder for each module


class _Files(CompileResultCacheImpl):
    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        own = Path(self.locator._py_file)
        return f"{super().get_filename_base(fullname, abiflags)}-{_stamp(own)}"


class _Cache(FunctionCache):
    """numba's cache, for which nothing that goes wrong with a file is a reason to fail."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # whatever unpickling and linking make of a damaged file: it is replaced
            self._guarded(self.flush)
            return None
        # Two processes that save at once can give one file to two signatures.
        fits = found is None or tuple(found.signature.args) == tuple(normalize_signature(sig)[0])
        return found if fits else None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._guarded(super().save_overload, sig, data)

    def _guarded(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except Exception as error:  # full, read-only by now, gone: the function itself is compiled
            self.disable()
            _say(f"{self.cache_path} cannot be written to ({error})")


def _cache_of(function: Callable[..., Any]) -> Any:
    try:
        return _Cache(function)
    except (RuntimeError, OSError):  # numba found no folder, or we no source
        beside = Path(inspect.getfile(function)).parent / "__pycache__"
        folder = getattr(config, "CACHE_DIR", "")
        given = f"NUMBA_CACHE_DIR={folder}, " if folder else ""
        _say(f"neither {given}{beside} nor the user's cache folder can be written to")
        return NullCache()


@cache
def _stamp(own: Path) -> str:
    """Of numba's version, of the switch, and of the sources of all kernels and of the function's own file."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    versions = f"{numba.__version__} {is_off(LLVM)}".encode()
    texts = [versions, *(file.read_bytes() for file in (own, *sources))]
    return hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()[:12]


def _say(why: str) -> None:
    """Once per process, whoever comes first."""
    global _said
    with _lock:
        first, _said = not _said, True
    if first:
        warnings.warn(
            f"compiled loops cannot be kept: {why}. Everything works, but each process compiles what it needs, some "
            "ten seconds: set NUMBA_CACHE_DIR in the environment to a folder that can be written to.",
            RuntimeWarning,
            stacklevel=2,
        )
