"""Arrays in compiled loops: at an address, new, or as other numbers; and their addresses.

``numba.carray``, ``np.empty``, ``np.zeros`` and ``view`` are functions that numba compiles by themselves, for every
type and number of dimensions, before it compiles the loop; these are a few instructions of the loop
(docs/adr/0015-the-first-call.md). Arrays are contiguous, and nothing checks their sizes. Where hand-made LLVM is turned
off, what other loops need is numba's own.
"""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from .jit import inlined
from .switches import LLVM, is_off

#: Bytes at a multiple of which new arrays begin: a line of the processor's caches, which holds a whole vector.
ALIGNED = 64


def _bytes_of(context, kind):
    return context.get_abi_sizeof(context.get_data_type(kind.dtype))


def array_value(context, builder, kind, lengths, data, meminfo=None):
    """The array of a type that begins where `data` points to; `meminfo` owns the memory, or nobody does."""
    size = context.get_constant(types.intp, _bytes_of(context, kind))
    strides = [size]
    for length in reversed(lengths[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    made = make_array(kind)(context, builder)
    data = builder.bitcast(data, made.data.type)
    populate_array(made, data=data, shape=lengths, strides=strides, itemsize=size, meminfo=meminfo)
    return made._getvalue()


@intrinsic
def array_at(typing_context, address, shape, kind):
    """The array of numbers of a kind, such as ``np.float32``, with a shape, a tuple, at an address."""
    made = types.Array(kind.dtype, len(shape), "C")

    def generate(context, builder, signature, arguments):
        data = builder.inttoptr(arguments[0], context.get_data_type(kind.dtype).as_pointer())
        return array_value(context, builder, made, cgutils.unpack_tuple(builder, arguments[1], made.ndim), data)

    return made(types.intp, shape, kind), generate


@intrinsic
def start_of(typing_context, array):
    """The address of an array's first number, as an int64.

    ``array.ctypes.data`` has no sign: a variable that is such a number first, and later its sum with another, is a
    float64 to numba.
    """

    def generate(context, builder, signature, arguments):
        data = make_array(array)(context, builder, arguments[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), generate


def _making(value):
    @intrinsic
    def new_array(typing_context, shape, kind):
        made = types.Array(kind.dtype, len(shape), "C")

        def generate(context, builder, signature, arguments):
            lengths = cgutils.unpack_tuple(builder, arguments[0], made.ndim)
            size = context.get_constant(types.intp, _bytes_of(context, made))
            for length in lengths:
                size = builder.mul(size, length)
            memory = context.nrt.meminfo_alloc_aligned(builder, size, context.get_constant(types.uint32, ALIGNED))
            data = context.nrt.meminfo_data(builder, memory)
            if value is not None:
                cgutils.memset(builder, data, size, value)
            return array_value(context, builder, made, lengths, data, memory)

        return made(shape, kind), generate

    return new_array


#: New arrays with a shape, a tuple, of a kind such as ``np.float32``: of whatever the memory holds, and of zeros.
empty, zeros = _making(None), _making(0)


@intrinsic
def view(typing_context, array, kind):
    """Return ``array.view(kind)``: the same memory as other numbers."""
    if array.layout != "C":
        return None
    seen = types.Array(kind.dtype, array.ndim, "C")

    def generate(context, builder, signature, arguments):
        source = make_array(array)(context, builder, arguments[0])
        *lengths, last = cgutils.unpack_tuple(builder, source.shape, array.ndim)
        before, after = (context.get_constant(types.intp, _bytes_of(context, each)) for each in (array, seen))
        last = builder.sdiv(builder.mul(last, before), after)
        made = array_value(context, builder, seen, [*lengths, last], source.data, source.meminfo)
        context.nrt.incref(builder, seen, made)
        return made

    return seen(array, kind), generate


if is_off(LLVM):

    @inlined
    def empty(shape, kind):
        return np.empty(shape, kind)

    @inlined
    def zeros(shape, kind):
        return np.zeros(shape, kind)

    @inlined
    def view(array, kind):
        return array.view(kind)
