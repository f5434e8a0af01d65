"""`table_function`: a loop as a C function that takes one address, whose machine code a wheel has.

The address is that of a table, as `grace_opt.kernels._shared.precompiled` has it, which says when it is called and by
whom.
When: `python -m bench.wheel` compiles it, and tests do.
"""

from __future__ import annotations

from typing import Any

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
from numba.core import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from .jit import CFunction, Loop, inlined
from .memory import array_value
from .precompiled import HEAD, leaves


def table_function(loop: Loop, signature: Any) -> CFunction:
    """Return a C function that runs the loop with the arguments in a table, and puts the results there."""
    arguments, run = types.Tuple(signature.args), inlined(loop.py_func, **loop.options)
    count = 1 + len(list(leaves(arguments)))

    @intrinsic
    def arguments_at(typing_context, address):
        def generate(context, builder, _, values):
            table = _pointer(context, builder, values[0])
            entries = (_load(context, builder, table, place) for place in range(1, count))
            return _value(context, builder, arguments, entries)

        return arguments(address), generate

    @intrinsic
    def done(typing_context, address, result):
        if result != signature.return_type:
            raise TypingError(f"{loop.py_func.__qualname__} returns {result}, and is said to: {signature}")

        def generate(context, builder, _, values):
            table = _pointer(context, builder, values[0])
            for place, entry in enumerate(_entries(context, builder, result, values[1]), count):
                builder.store(entry, _place(context, builder, table, place))
            builder.store(context.get_constant(types.intp, 1), table)
            return context.get_dummy_value()

        return types.none(address, result), generate

    def call(address):
        done(address, run(*arguments_at(address)))

    return CFunction(call, "void(intp)")


def _pointer(context: Any, builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, context.get_value_type(types.intp).as_pointer())


def _place(context: Any, builder: Any, table: Any, place: int) -> Any:
    return builder.gep(table, [context.get_constant(types.intp, place)])


def _load(context: Any, builder: Any, table: Any, place: int) -> Any:
    return builder.load(_place(context, builder, table, place))


def _value(context: Any, builder: Any, kind: Any, entries: Any) -> Any:
    """The value of a type that the next entries of a table stand for."""
    if isinstance(kind, types.BaseTuple):
        return context.make_tuple(builder, kind, [_value(context, builder, element, entries) for element in kind])  # type: ignore[attr-defined]
    entry = next(entries)
    if isinstance(kind, types.Array):
        fields = _pointer(context, builder, entry)
        first = HEAD // 8
        data = builder.inttoptr(_load(context, builder, fields, first), context.get_data_type(kind.dtype).as_pointer())
        shape = _pointer(context, builder, _load(context, builder, fields, first + 2))
        lengths = [_load(context, builder, shape, place) for place in range(kind.ndim)]
        return array_value(context, builder, kind, lengths, data)
    if kind == types.float64:
        return builder.bitcast(entry, context.get_value_type(kind))
    return context.cast(builder, entry, types.intp, kind)


def _entries(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return what a table has of a result."""
    many = isinstance(kind, types.BaseTuple)
    values = [builder.extract_value(value, place) for place in range(len(kind))] if many else [value]
    for element, one in zip(leaves(kind), values, strict=False):
        if element == types.float64:
            yield builder.bitcast(one, context.get_value_type(types.intp))
        else:
            yield context.cast(builder, one, element, types.intp)
