"""`jit` and `c_function`: numba's compilers, with one cache for all our loops that can never make a call fail.

With its own cache, numba refuses to compile if no folder can be written to, and fails if a cached file is damaged or
the disk is full. These compilers compile anyway; one warning per process says what is wrong. The names of cached files
contain a hash of all sources that may be compiled into a function, so files of another version are never used. Numba
itself checks only the file that defines the function, not the files of the functions it calls.

When: every compiled loop, ``@jit`` or ``@jit(fastmath=...)``. Built on numba's own cache.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
import warnings
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numba
from numba.core import compiler, config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.dispatcher import _FunctionCompiler
from numba.core.registry import CPUDispatcher
from numba.core.sigutils import normalize_signature

from .switches import LLVM, is_off

_lock = threading.Lock()
_said = False


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function that releases the interpreter; keep it on disk if possible.

    Options are those of ``numba.njit``.
    """
    if function is None:
        return lambda later: jit(later, **options)
    # What C would call is made for `c_function` alone.
    compiled = numba.njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
    compiled._cache = _cache_of(function)
    return compiled


def part(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function as a part of the compiled loops that call it.

    It is optimised, and turned into machine code, only there, which makes the first call of a loop with many parts
    several times shorter. If Python calls it, as tests do, it is compiled once more, by `jit`.
    """
    if function is None:
        return lambda later: part(later, **options)
    return jit(function, **options) if config.DISABLE_JIT else _Part(function, options)


def c_function(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """As ``numba.cfunc``: compile at once, with an ``address`` for C to call; keep it on disk if possible."""

    def compiled(function: Callable[..., Any]) -> Any:
        made: Any = CFunc(function, normalize_signature(signature), locals={}, options={})
        made._cache = _cache_of(function)
        made.compile()
        return made

    return compiled


def cache_folder() -> Path | None:
    """Return where compiled loops are kept, or None; ``*`` stands for the operation if next to each module."""
    try:
        folder = Path(_Cache(cache_folder).cache_path)
    except (RuntimeError, OSError):
        return None
    own = Path(__file__).parent
    if folder.parent == own:
        return own.parent / "*" / folder.name
    return folder.parent if folder.name.startswith(f"{own.name}_") else folder  # one folder per module


class _PartLibrary(JITCodeLibrary):
    """Code that is optimised, and turned into machine code, only in the libraries that it is linked into."""

    class _NoEnvironment:
        @staticmethod
        def set_env(name: str, env: Any) -> None:
            """Nothing: the code has no address."""

    @property
    def codegen(self) -> Any:
        return self._NoEnvironment

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _PartCompiler(_FunctionCompiler):
    def _compile_core(self, args: Any, return_type: Any) -> Any:
        target, flags = self.targetdescr.target_context, compiler.Flags()
        self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
        return compiler.compile_extra(
            self.targetdescr.typing_context,
            target,
            self.py_func,
            args=args,
            return_type=return_type,
            flags=flags,
            locals=self.locals,
            library=_PartLibrary(target.codegen(), self.py_func.__qualname__),
            pipeline_class=self.pipeline_class,
        )


class _Part(CPUDispatcher):
    """What `part` returns."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        uncalled = {"nopython": True, "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        super().__init__(function, targetoptions=uncalled | options)
        made = self._compiler
        self._compiler = _PartCompiler(
            function, made.targetdescr, made.targetoptions, made.locals, made.pipeline_class
        )
        self._options = options

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres  # not among those that Python may call: it has no address

    def _compile_for_args(self, *arguments: Any, **named: Any) -> Any:
        return self._alone

    @cached_property
    def _alone(self) -> Any:
        return jit(self.py_func, **self._options)


class _Files(CompileResultCacheImpl):
    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        own = Path(self.locator._py_file)
        return f"{super().get_filename_base(fullname, abiflags)}-{_stamp(own)}"


class _Cache(FunctionCache):
    """numba's cache, except that no file problem raises."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # unpickling or linking a damaged file may raise anything: it is replaced
            self._guarded(self.flush)
            return None
        # Two processes that save at the same time can assign one file to two signatures.
        fits = found is None or tuple(found.signature.args) == tuple(normalize_signature(sig)[0])
        return found if fits else None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._guarded(super().save_overload, sig, data)

    def _guarded(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except Exception as error:  # full, now read-only, or gone: the function itself is compiled
            self.disable()
            _say(f"{self.cache_path} cannot be written to ({error})")


def _cache_of(function: Callable[..., Any]) -> Any:
    try:
        return _Cache(function)
    except (RuntimeError, OSError):  # numba found no folder, or we found no source
        beside = Path(inspect.getfile(function)).parent / "__pycache__"
        folder = getattr(config, "CACHE_DIR", "")
        given = f"NUMBA_CACHE_DIR={folder}, " if folder else ""
        _say(f"neither {given}{beside} nor the user's cache folder can be written to")
        return NullCache()


@cache
def _stamp(own: Path) -> str:
    """Return a hash of numba's version, the switch, the sources of all kernels and the function's own file."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    versions = f"{numba.__version__} {is_off(LLVM)}".encode()
    texts = [versions, *(file.read_bytes() for file in (own, *sources))]
    return hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()[:12]


def _say(why: str) -> None:
    """Warn once per process."""
    global _said
    with _lock:
        first, _said = not _said, True
    if first:
        warnings.warn(
            f"compiled loops cannot be kept: {why}. Everything works, but each process compiles what it needs, about "
            f"ten seconds: set NUMBA_CACHE_DIR in the environment to a folder that can be written to.",
            RuntimeWarning,
            stacklevel=2,
        )
