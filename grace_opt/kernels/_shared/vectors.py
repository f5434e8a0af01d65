"""Vector instructions where the compiler finds none: the inner loops of greedy, exchanges and the checks of W.

Each function is a loop over blocks of ``LANES`` numbers, written as LLVM vector operations, which every processor
supports in some width, followed by a plain loop over the rest.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

#: Numbers per block: four registers of eight float32 each.
LANES = 32
#: Side of the squares that `differ` transposes, in entries.
SIDE = 8
_INDEX = ir.IntType(64)


@intrinsic
def prefetch(typing_context, array, place):
    """Have the processor fetch the cache line of ``array[place]`` without waiting for it."""

    def generate(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # To read (0), to be kept in every cache (3), data and not instructions (1).
        builder.call(fetch, [address, *(ir.Constant(number, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def add_twice(typing_context, scores, row):
    """Add ``2 * row`` to the scores, exactly rounded (doubling is exact); return the least score."""

    def generate(context, builder, signature, arguments):
        wide, narrow = (context.get_value_type(a.dtype) for a in signature.args)
        target, count = _data(context, builder, signature.args[0], arguments[0])
        source, _ = _data(context, builder, signature.args[1], arguments[1])

        def added(place, lanes):
            change = _load(builder, source, place, narrow, lanes)
            if narrow != wide:
                change = builder.fpext(change, ir.VectorType(wide, lanes))
            sums = builder.fadd(_load(builder, target, place, wide, lanes), builder.fadd(change, change))
            builder.store(sums, _place(builder, target, place, wide, lanes), align=_bytes(wide))
            return sums

        return _least(builder, wide, count, added)

    return scores.dtype(scores, row), generate


@intrinsic
def least(typing_context, scores):
    """Return the smallest score."""

    def generate(context, builder, signature, arguments):
        kind = context.get_value_type(signature.args[0].dtype)
        data, count = _data(context, builder, signature.args[0], arguments[0])
        return _least(builder, kind, count, lambda place, lanes: _load(builder, data, place, kind, lanes))

    return scores.dtype(scores), generate


@intrinsic
def least_exchange(typing_context, row, enter, leave):
    """Return the least of ``(leave + enter) - 2 * row``, in the precision of `enter` and in exactly this order."""

    def generate(context, builder, signature, arguments):
        wide, narrow = (context.get_value_type(a.dtype) for a in (signature.args[1], signature.args[0]))
        source, count = _data(context, builder, signature.args[0], arguments[0])
        costs, _ = _data(context, builder, signature.args[1], arguments[1])

        def change(place, lanes):
            twice = _load(builder, source, place, narrow, lanes)
            if narrow != wide:
                twice = builder.fpext(twice, ir.VectorType(wide, lanes))
            moved = builder.fadd(_splat(builder, arguments[2], lanes), _load(builder, costs, place, wide, lanes))
            return builder.fsub(moved, builder.fadd(twice, twice))

        return _least(builder, wide, count, change)

    return enter.dtype(row, enter, enter.dtype), generate


@intrinsic
def first_place(typing_context, scores, value):
    """Return the lowest index of `value`; the last index if there is none (`value` is NaN)."""

    def generate(context, builder, signature, arguments):
        kind = context.get_value_type(signature.args[0].dtype)
        data, count = _data(context, builder, signature.args[0], arguments[0])
        lowest = cgutils.alloca_once_value(builder, builder.sub(count, _INDEX(1)))

        def look(place, lanes):
            bits = ir.IntType(lanes)
            target = _splat(builder, arguments[1], lanes)
            equal = builder.fcmp_ordered("==", _load(builder, data, place, kind, lanes), target)
            hits = builder.bitcast(equal, bits)
            first = builder.add(place, _widened(builder, builder.cttz(hits, ir.IntType(1)(0))))
            better = builder.and_(
                builder.icmp_unsigned("!=", hits, bits(0)), builder.icmp_signed("<", first, builder.load(lowest))
            )
            builder.store(builder.select(better, first, builder.load(lowest)), lowest)

        _blocks(builder, count, look)
        return builder.load(lowest)

    return types.intp(scores, scores.dtype), generate


@intrinsic
def largest_bits(typing_context, row):
    """Return the bits of max |w| as an integer; at least those of infinity if a number is not finite."""
    number = types.Integer.from_bitwidth(row.dtype.bitwidth, True)

    def generate(context, builder, signature, arguments):
        kind = ir.IntType(number.bitwidth)
        data, count = _data(context, builder, signature.args[0], arguments[0])
        data = builder.bitcast(data, kind.as_pointer())
        without_sign = ir.Constant(kind, (1 << number.bitwidth - 1) - 1)

        def sizes(place, lanes):
            mask = ir.Constant(ir.VectorType(kind, lanes), [without_sign] * lanes)
            return builder.and_(_load(builder, data, place, kind, lanes), mask)

        return _reduced(builder, kind(0), count, sizes, lambda a, b: _chosen(builder, ">", a, b))

    return number(row), generate


@intrinsic
def differ(typing_context, W, row, column):
    """Return whether the square of side ``SIDE`` at (row, column) of a contiguous W differs from its mirror image."""

    def generate(context, builder, signature, arguments):
        kind = context.get_value_type(signature.args[0].dtype)
        data, n = _data(context, builder, signature.args[0], arguments[0])
        squares = []
        for top, left in (arguments[1:], reversed(arguments[1:])):
            first = builder.add(builder.mul(top, n), left)
            starts = [builder.add(first, builder.mul(n, _INDEX(i))) for i in range(SIDE)]
            squares.append([_load(builder, data, place, kind, SIDE) for place in starts])
        here, mirrored = squares
        apart = SIDE
        while apart > 1:  # interleaving the upper half of the rows with the lower, log2(SIDE) times, transposes
            apart //= 2
            pairs = zip(mirrored[: SIDE // 2], mirrored[SIDE // 2 :], strict=True)
            low, high = (
                [place for i in range(start, start + SIDE // 2) for place in (i, i + SIDE)] for start in (0, SIDE // 2)
            )
            mirrored = [_shuffled(builder, a, b, order) for a, b in pairs for order in (low, high)]
        unequal = [builder.fcmp_unordered("!=", a, b) for a, b in zip(here, mirrored, strict=True)]
        difference = functools.reduce(builder.or_, unequal)
        return builder.icmp_unsigned("!=", builder.bitcast(difference, ir.IntType(SIDE)), ir.IntType(SIDE)(0))

    return types.boolean(W, types.intp, types.intp), generate


def _least(builder, kind, count, numbers):
    """Return the least of ``numbers(place, lanes)`` over all blocks and the rest."""
    infinity = ir.Constant(kind, float("inf"))
    return _reduced(builder, infinity, count, numbers, lambda a, b: _chosen(builder, "<", a, b))


def _reduced(builder, neutral, count, numbers, join):
    """Reduce ``numbers(place, lanes)`` by ``join`` over all blocks and the rest: first per lane, then by halves."""
    parts = {
        lanes: cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(neutral.type, lanes), [neutral] * lanes))
        for lanes in (LANES, 1)
    }

    def take(place, lanes):
        builder.store(join(numbers(place, lanes), builder.load(parts[lanes])), parts[lanes])

    _blocks(builder, count, take)
    result, lanes = builder.load(parts[LANES]), LANES
    while lanes > 1:
        lanes //= 2
        result = join(*(_shuffled(builder, result, result, range(place, place + lanes)) for place in (0, lanes)))
    return builder.extract_element(join(result, builder.load(parts[1])), ir.IntType(32)(0))


def _blocks(builder, count, body):
    """Emit ``body(place, LANES)`` for every full block, then ``body(place, 1)`` for every remaining number."""
    whole = builder.mul(builder.sdiv(count, _INDEX(LANES)), _INDEX(LANES))
    with cgutils.for_range_slice(builder, _INDEX(0), whole, _INDEX(LANES), inc=True) as (place, _):
        body(place, LANES)
    with cgutils.for_range_slice(builder, whole, count, _INDEX(1), inc=True) as (place, _):
        body(place, 1)


def _data(context, builder, kind, array):
    view = make_array(kind)(context, builder, array)
    return view.data, builder.extract_value(view.shape, 0)


def _place(builder, data, place, kind, lanes):
    return builder.bitcast(builder.gep(data, [place]), ir.VectorType(kind, lanes).as_pointer())


def _load(builder, data, place, kind, lanes):
    return builder.load(_place(builder, data, place, kind, lanes), align=_bytes(kind))


def _chosen(builder, relation, a, b):
    """Choose `a` where the relation holds between `a` and `b`, else `b`."""
    whole = isinstance(a.type.element, ir.IntType)
    compare = builder.icmp_signed if whole else builder.fcmp_ordered
    return builder.select(compare(relation, a, b), a, b)


def _shuffled(builder, a, b, order):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order)))


def _splat(builder, value, lanes):
    empty = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(empty, value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _widened(builder, number):
    return number if number.type.width == _INDEX.width else builder.zext(number, _INDEX)


def _bytes(kind):
    return 4 if isinstance(kind, ir.FloatType) or getattr(kind, "width", 64) == 32 else 8
