"""`PrecompiledLoop`: a loop's machine code for one signature, from a wheel; Python calls it with a table.

What numba makes for Python to call is tied to a version of Python. So `grace_opt.kernels._shared.table_function` makes
a C function of the loop, which takes the address of a table of 8 bytes an entry: whether it is done, its arguments, and
its results. An argument is a number, or the address of a numpy array, whose fields numpy's C interface has at the same
place in all versions; a tuple is what it holds.

When: `grace_opt.kernels._shared.jit` looks here before it compiles a loop. A call takes some five microseconds longer
than one by numba. Why: docs/adr/0020-compiled-ahead-of-time.md.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock
from numba.np.numpy_support import as_dtype

from . import ahead
from .threads import CALLED

#: Bytes that an object begins with, before what it is; of an array: its data (8), their dimensions' number (8), these.
HEAD = 16
_INT64 = range(-(2**63), 2**63)


def leaves(kind: Any) -> Iterator[Any]:
    """Yield the types of numbers and arrays that a type is made of, in order: an entry of the table for each."""
    if isinstance(kind, types.BaseTuple):
        for element in kind:  # type: ignore[attr-defined]
            yield from leaves(element)
    elif kind is not types.none:
        yield kind


class PrecompiledLoop:
    """A loop for one signature, if the wheel that is installed has machine code of it for this processor.

    Parameters
    ----------
    function : callable
        The loop.
    signature : numba signature
        Of C-contiguous arrays of numbers, int64, float64, bool, and named tuples of these.
    place : int
        Which of the loop's signatures it is.
    """

    def __init__(self, function: Callable[..., Any], signature: Any, place: int) -> None:
        self.name, self.signature = f"{ahead.name_of(function)} {place}", signature
        self._looked_for = False
        self._call: Callable[[Any], None] | None = None

    def prepared(self, values: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return what calls it with these values; None: there is no machine code, or not for such values."""
        self._look_for_it()
        if self._call is None:
            return None
        entries: list[Any] = []
        if len(values) != len(self._kinds) or not all(map(_enter, values, self._kinds, [entries] * len(values))):
            return None
        return lambda *values, **_: self._run(entries, values)

    def _look_for_it(self) -> None:
        if self._looked_for:
            return
        with global_compiler_lock:
            if not self._looked_for and object.__basicsize__ == HEAD:  # more in a Python without its global lock
                address = ahead.address_of(self.name)
                self._call = CALLED(address) if address else None
            self._looked_for = True

    @cached_property
    def _kinds(self) -> list[Any]:
        return [_kind_of(each) for each in self.signature.args]

    @cached_property
    def _formats(self) -> tuple[struct.Struct, struct.Struct]:
        """The formats of the arguments, and of the results."""
        arguments, results = leaves(types.Tuple(self.signature.args)), leaves(self.signature.return_type)
        return struct.Struct("=q" + "".join(map(_letter, arguments))), struct.Struct(
            "=" + "".join(map(_letter, results))
        )

    def _run(self, entries: Sequence[Any], alive: Any) -> Any:
        """Call it; other threads may use the interpreter meanwhile, and the arguments are kept alive."""
        assert self._call is not None
        arguments, results = self._formats
        table = ctypes.create_string_buffer(arguments.size + results.size)
        arguments.pack_into(table, 0, 0, *entries)
        self._call(table)
        if not table[0][0]:  # a C function cannot raise: it has written to stderr what is wrong
            raise MemoryError(f"{self.name} ended early; the lines above say why")
        values = results.unpack_from(table, arguments.size)
        if isinstance(self.signature.return_type, types.BaseTuple):
            return values
        return values[0] if values else None


def _letter(kind: Any) -> str:
    """Return how `struct` writes an entry."""
    return {types.float64: "d", types.boolean: "?7x"}.get(kind, "q")


def _kind_of(kind: Any) -> Any:
    """Return what `_enter` compares with: a type, an array's dtype and dimensions, or a tuple's class and kinds."""
    if isinstance(kind, types.Array):
        return as_dtype(kind.dtype), kind.ndim
    if isinstance(kind, types.BaseNamedTuple):
        return [kind.instance_class, [_kind_of(each) for each in kind]]  # type: ignore[attr-defined]
    return {types.float64: float, types.int64: int, types.boolean: bool}[kind]


def _enter(value: Any, kind: Any, entries: list[Any]) -> bool:
    """Append what the table has of a value; return whether it is of that kind."""
    if type(kind) is tuple:
        dtype, ndim = kind
        entries.append(id(value))
        if not isinstance(value, np.ndarray):
            return False
        contiguous = value.flags.carray  # and aligned, and to be written to
        return value.dtype == dtype and value.ndim == ndim and contiguous
    if type(kind) is list:
        same, kinds = kind
        return isinstance(value, same) and all(map(_enter, value, kinds, [entries] * len(kinds)))
    entries.append(value)
    if kind is int:
        return (type(value) is int and value in _INT64) or type(value) is np.int64
    return isinstance(value, kind) or (kind is bool and isinstance(value, np.bool_))
