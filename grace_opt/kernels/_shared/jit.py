"""`jit`, `inlined` and `c_function`: numba's compilers for all our loops.

Compiled loops are cached on disk (`disk_cache`), say so if compiling takes long (`compiling`), and may run as plain
Python while they are not compiled and have little to do (`interpreted`). What is made of each function, and why, is in
docs/adr/0015-the-first-call.md.

When: every compiled loop, ``@jit`` or ``@jit(fastmath=...)``; ``@inlined`` for functions that only such loops call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numba  # noqa: F401 - before its modules: threads that begin with different ones block each other
import numpy as np
from numba.core import compiler, config
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.sigutils import normalize_signature

from . import ahead
from .compiling import compiling
from .disk_cache import cache_of
from .interpreted import interpreted_values, interpreted_version
from .limits import SMALL as SMALL
from .precompiled import PrecompiledLoop
from .switches import PLAIN, is_off
from .threads import CALLED, always

#: Seconds of a processor that a loop may run in Python, all calls together: less than compiling most of them takes.
INTERPRETED_SECONDS = 0.2
#: No loop needs what C would call but those of `c_function`.
_LOOP = {"nopython": True, "nogil": True, "no_cfunc_wrapper": True}


def jit(
    function: Callable[..., Any] | None = None, *, ahead: Sequence[Any] = (), small: int = 0, **options: Any
) -> Any:
    """Compile a function that releases the interpreter; cache it on disk if possible.

    Parameters
    ----------
    function : callable
    ahead : sequence of numba signatures
        Those for which a wheel has machine code (`grace_opt.kernels._shared.precompiled`).
    small : int
        If its first array has no more entries than this (`SMALL`, or none), and its numbers are float64, Python itself
        may run it, until that has taken `INTERPRETED_SECONDS`, unless a wheel has it or compiled code is on disk. Only
        for loops that give the same results then, bit for bit: without ``fastmath``.
    **options
        Those of ``numba.njit``.
    """
    if function is None:
        return lambda later: jit(later, ahead=ahead, small=small, **options)
    return function if _off() else Loop(function, options, ahead, small)


def inlined(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function into the compiled loops that call it.

    It is optimised, and turned into machine code, only there, which makes the first call of a loop with many such
    functions much shorter. If Python calls it, as tests do, it is compiled once more, by `jit`.
    """
    if function is None:
        return lambda later: inlined(later, **options)
    return function if _off() else _Inlined(function, options)


def c_function(signature: str) -> Callable[[Callable[..., Any]], CFunction]:
    """As ``numba.cfunc``, but compile at first use; cache it on disk if possible."""
    return lambda function: CFunction(function, signature)


class CFunction:
    """A compiled function for C to call.

    Parameters
    ----------
    function : callable
    signature : str
        Types of its result and arguments.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self.function, self._signature = function, signature
        self._compiled: Any = None
        self._address = 0

    def __call__(self, address: int) -> None:
        """Call ``void f(void *address)``; other threads may use the interpreter meanwhile."""
        self._from_python(address)

    @cached_property
    def _from_python(self) -> Callable[[int], None]:
        return CALLED(self.address)

    @property
    def address(self) -> int:
        """The address of the function, which is loaded from a wheel or from disk, or compiled, at first."""
        if not self._address:
            with global_compiler_lock:
                name = ahead.name_of(self.function)
                self._address = self._address or ahead.address_of(name) or self.compiled().address
        return self._address

    def compiled(self) -> Any:
        """Return what numba makes of it here, or has made earlier."""
        with global_compiler_lock:
            if self._compiled is None:
                self._compiled = self.compile(cache_of(self.function))
            return self._compiled

    def compile(self, cache: Any = None) -> Any:
        """Return what numba makes of it now, unless the cache has it."""
        made: Any = CFunc(self.function, normalize_signature(self._signature), locals={}, options={})
        if cache is not None:
            made._cache = cache
        _timed(made._compiler)
        made.compile()
        return made


def _off() -> bool:
    """Return whether numba itself is turned off, to debug."""
    return bool(getattr(config, "DISABLE_JIT", False))


def _timed(made: Any) -> None:
    """Have a compiler of numba's say what it does, if that takes long."""
    compile_core = made._compile_core

    def compile_and_say(args: Any, return_type: Any) -> Any:
        with compiling():
            return compile_core(args, return_type)

    made._compile_core = compile_and_say


class Loop(CPUDispatcher):
    """What `jit` returns."""

    _compiler: Any

    def __init__(
        self, function: Callable[..., Any], options: dict[str, Any], signatures: Sequence[Any], small: int
    ) -> None:
        super().__init__(function, targetoptions=_LOOP | options)
        self.options = options
        self.precompiled = [PrecompiledLoop(function, each, place) for place, each in enumerate(signatures)]
        self._cache, self._small, self._interpreted_seconds = cache_of(function), small, 0.0
        _timed(self._compiler)

    def _compile_for_args(self, *arguments: Any, **named: Any) -> Any:
        """Return what runs; called if nothing that was compiled here, now or earlier, takes such arguments."""
        for one in self.precompiled:
            if (call := one.prepared(arguments)) is not None:
                return call
        may = self._small and self._interpreted_seconds < INTERPRETED_SECONDS and not always() and not is_off(PLAIN)
        if may and self._is_little(arguments):
            return self._run_interpreted
        return super()._compile_for_args(*arguments, **named)  # type: ignore[misc]

    def _is_little(self, arguments: tuple[Any, ...]) -> bool:
        arrays = [each for each in arguments if isinstance(each, np.ndarray)]
        numbers = (each for each in arrays if each.dtype.kind == "f")
        little = arrays[0].size <= self._small and all(each.dtype == np.float64 for each in numbers)
        return little and not self._is_on_disk

    @cached_property
    def _is_on_disk(self) -> bool:
        return bool(self._cache.is_on_disk())

    def _run_interpreted(self, *arguments: Any) -> Any:
        began = time.thread_time()
        with np.errstate(all="ignore"):
            result = interpreted_values(interpreted_version(self.py_func)(*arguments))
        self._interpreted_seconds += time.thread_time() - began
        return result


class _InlinedLibrary(JITCodeLibrary):
    """Code that is optimised, and turned into machine code, only in the libraries that it is linked into."""

    class _NoEnvironment:
        @staticmethod
        def set_env(name: str, env: Any) -> None:
            """Do nothing: the code has no address."""

    @property
    def codegen(self) -> Any:
        return self._NoEnvironment

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _Inlined(CPUDispatcher):
    """What `inlined` returns."""

    _compiler: Any

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions=_LOOP | {"no_cpython_wrapper": True} | options)
        self._compiler._compile_core = self._compile_core
        self._options = options

    def _compile_core(self, args: Any, return_type: Any) -> Any:
        """As numba's, into a library of ours."""
        made = self._compiler
        target, flags = made.targetdescr.target_context, compiler.Flags()
        made.targetdescr.options.parse_as_flags(flags, made.targetoptions)
        return compiler.compile_extra(
            made.targetdescr.typing_context,
            target,
            self.py_func,
            args=args,
            return_type=return_type,
            flags=flags,
            locals=made.locals,
            library=_InlinedLibrary(target.codegen(), self.py_func.__qualname__),
            pipeline_class=made.pipeline_class,
        )

    def add_overload(self, cres: Any) -> None:
        """Keep it from Python, which has no address to call."""
        self.overloads[tuple(cres.signature.args)] = cres

    def _compile_for_args(self, *arguments: Any, **named: Any) -> Any:
        return self._alone

    @cached_property
    def _alone(self) -> Any:
        return jit(self.py_func, **self._options)
