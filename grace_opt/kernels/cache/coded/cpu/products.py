"""Products of a few rows with numbers of a few bits: logits from keys, sums from values; one loop for each width.

Each loop takes channels of one width and `BLOCK` tokens at a time: their codes are turned into numbers once, for all
rows, and the sums stay in registers. How many rows there are, three or four, is in the type of the sums: a loop is
compiled for the number it is called with. Its body is one instruction to numba, whose own work on many small ones would
take longer than LLVM's.

When: as for :mod:`grace_opt.kernels.cache.coded.cpu.levels`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...._shared.jit import inlined
from ...._shared.lanes import WIDEST, load_place, multiply_add_vectors, widest
from ...._shared.memory import start_of
from ..forms import ROWS, WIDTHS
from .levels import STEP, number_at, reading, vector_at
from .levels import VECTORS as VECTORS

#: Bytes of a float32, of an int64 and of a vector; tokens taken at once, and the bytes of their bits in a plane.
BYTES, PLACE, WHOLE = 4, 8, 4 * WIDEST
BLOCK, BLOCK_STEP = VECTORS * WIDEST, VECTORS * STEP
_INDEX = ir.IntType(32)


def sums_of(rows):
    """The type of sums in registers: of each row with the first vector's tokens, then of each with the next one's."""
    return types.UniTuple(widest, VECTORS * rows)


def _no_sums(rows):
    @intrinsic
    def no_sums(typing_context):
        def generate(context, builder, signature, arguments):
            return context.get_constant_null(signature.return_type)

        return sums_of(rows)(), generate

    return no_sums


#: Sums of three rows, and of four, that are all 0.
no_sums_of_three, no_sums_of_four = _no_sums(3), _no_sums(4)


def adding(width, factors, **how):
    """Return a function that adds to the sums the products of a block's numbers of some bits, which it reads, with the
    rows' factors: (address of their first plane's bits, bytes to the next plane, address of the numbers that codes
    stand for, address of the first row's factors, bytes to the next row's, sums). `how` as for `reading`."""
    read = reading(width, **how)

    @intrinsic
    def add(typing_context, address, step, table, shares, share_step, sums):
        rows = sums.count // VECTORS

        def generate(context, builder, signature, arguments):
            address, step, table, shares, share_step, sums = arguments
            numbers = read(builder, address, step, table)
            for row in range(rows):
                for vector, (number, factor) in enumerate(zip(numbers, factors(builder, shares), strict=True)):
                    place = row + vector * rows
                    added = multiply_add_vectors(builder, factor, number, builder.extract_value(sums, place))
                    sums = builder.insert_value(sums, added, place)
                shares = builder.add(shares, share_step)
            return sums

        return sums(types.intp, types.intp, types.intp, types.intp, types.intp, sums), generate

    return add


def of_channel(builder, address):
    """The query's entry, for the tokens of all vectors."""
    return [number_at(builder, address)] * VECTORS


def _of_tokens(builder, address):
    """The tokens' shares."""
    return [vector_at(builder, address, number) for number in range(VECTORS)]


_keys1, _keys2, _keys3, _keys4, _keys5, _keys6, _keys8 = (adding(width, of_channel) for width in WIDTHS[1:])
_values1, _values2, _values3, _values4, _values5, _values6, _values8 = (
    adding(width, _of_tokens) for width in WIDTHS[1:]
)
_keys7, _values7 = adding(7, of_channel), adding(7, _of_tokens)


@intrinsic
def add_to_rows(typing_context, numbers, sums):
    """Add to all sums of each row its number; the numbers stand from an address on."""
    rows = sums.count // VECTORS

    def generate(context, builder, signature, arguments):
        numbers, sums = arguments
        for row in range(rows):
            number = number_at(builder, numbers, row)
            for place in range(row, VECTORS * rows, rows):
                sums = builder.insert_value(sums, builder.fadd(builder.extract_value(sums, place), number), place)
        return sums

    return sums(types.intp, sums), generate


@intrinsic
def store_rows(typing_context, place, step, sums):
    """Write the sums of each row side by side, from an address on, each row `step` bytes behind the one before."""
    rows = sums.count // VECTORS

    def generate(context, builder, signature, arguments):
        place, step, sums = arguments
        for row in range(rows):
            for vector in range(VECTORS):
                address = builder.add(place, ir.Constant(place.type, vector * WHOLE))
                row_sums = builder.extract_value(sums, row + vector * rows)
                builder.store(row_sums, builder.inttoptr(address, row_sums.type.as_pointer()), align=4)
            place = builder.add(place, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, sums), generate


def _folded(builder, one, other, count):
    """Sums of neighbouring lanes of a vector, followed by those of another: the first `count` of them."""
    parts = []
    for first in (0, 1):
        places = ir.Constant(ir.VectorType(_INDEX, count), list(range(first, 2 * count, 2)))
        parts.append(builder.shuffle_vector(one, other, places))
    return builder.fadd(*parts)


@intrinsic
def add_totals(typing_context, products, sums):
    """Add what the lanes of each row's vectors sum up to, always in the same order, to `ROWS` numbers at an address."""
    rows = products.count // VECTORS

    def generate(context, builder, signature, arguments):
        products, sums = arguments
        vectors = []
        for row in range(rows):
            every = [builder.extract_value(products, place) for place in range(row, VECTORS * rows, rows)]
            while len(every) > 1:
                every = [builder.fadd(a, b) for a, b in zip(every[::2], every[1::2], strict=True)]
            vectors += every
        vectors += [ir.Constant(vectors[0].type, [0.0] * WIDEST)] * (ROWS - rows)
        while len(vectors) > 1:
            vectors = [_folded(builder, a, b, WIDEST) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        (total,) = vectors
        while total.type.count > ROWS:  # neighbours: those of one row
            total = _folded(builder, total, total, total.type.count // 2)
        pointer = builder.inttoptr(sums, total.type.as_pointer())
        builder.store(builder.fadd(builder.load(pointer, align=4), total), pointer, align=4)
        return context.get_dummy_value()

    return types.void(products, types.intp), generate


@inlined
def add_logits(
    places, starts, offset, step, count, queries, query_step, constants, books, book_step, out, out_step, none,
    workspace, longer,
):  # fmt: skip
    """Write the logits of some rows with `count` keys, a multiple of `BLOCK`: their constants, and products with codes.

    `places` has the address of each channel's first plane, channels in the order of their widths, of which width number
    w has those from ``starts[w]`` to ``starts[w + 1]``; `offset` is that of the first token, `step` that of the next
    plane. `queries` are in the same order; `books` has a row of numbers for each width. `none` are sums of no terms, of
    as many rows. `workspace` is not used here: loops that take these' place need it. `longer` is None if no channel has
    seven bits; these come last.
    """
    for t in range(0, count, BLOCK):
        sums = add_to_rows(start_of(constants), none)
        byte = offset + t // 8
        for i in range(starts[1], starts[2]):
            place, query = load_place(places + i * PLACE) + byte, queries + i * BYTES
            sums = _keys1(place, step, books + 1 * book_step, query, query_step, sums)
        for i in range(starts[2], starts[3]):
            place, query = load_place(places + i * PLACE) + byte, queries + i * BYTES
            sums = _keys2(place, step, books + 2 * book_step, query, query_step, sums)
        for i in range(starts[3], starts[4]):
            place, query = load_place(places + i * PLACE) + byte, queries + i * BYTES
            sums = _keys3(place, step, books + 3 * book_step, query, query_step, sums)
        for i in range(starts[4], starts[5]):
            place, query = load_place(places + i * PLACE) + byte, queries + i * BYTES
            sums = _keys4(place, step, books + 4 * book_step, query, query_step, sums)
        for i in range(starts[5], starts[6]):
            place, query = load_place(places + i * PLACE) + byte, queries + i * BYTES
            sums = _keys5(place, step, books + 5 * book_step, query, query_step, sums)
        for i in range(starts[6], starts[7]):
            place, query = load_place(places + i * PLACE) + byte, queries + i * BYTES
            sums = _keys6(place, step, books + 6 * book_step, query, query_step, sums)
        for i in range(starts[7], starts[8]):
            place, query = load_place(places + i * PLACE) + byte, queries + i * BYTES
            sums = _keys8(place, step, books + 8 * book_step, query, query_step, sums)
        if longer is not None:
            for i in range(starts[8], starts[9]):
                place, query = load_place(places + i * PLACE) + byte, queries + i * BYTES
                sums = _keys7(place, step, books + 7 * book_step, query, query_step, sums)
        store_rows(out + t * BYTES, out_step, sums)


@inlined
def add_values(
    places, starts, offset, step, count, shares, share_step, books, book_step, sums, none, workspace, longer
):
    """Add to `ROWS` sums per channel the shares of some rows times `count` numbers, a multiple of `BLOCK`.

    Parameters as for `add_logits`; `sums` is the address of `ROWS` numbers for each channel, in the order of widths.
    """
    for i in range(starts[1], starts[2]):
        place, share, products = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, BLOCK):
            products = _values1(place, step, books + 1 * book_step, share, share_step, products)
            place, share = place + BLOCK_STEP, share + VECTORS * WHOLE
        add_totals(products, sums + ROWS * i * BYTES)
    for i in range(starts[2], starts[3]):
        place, share, products = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, BLOCK):
            products = _values2(place, step, books + 2 * book_step, share, share_step, products)
            place, share = place + BLOCK_STEP, share + VECTORS * WHOLE
        add_totals(products, sums + ROWS * i * BYTES)
    for i in range(starts[3], starts[4]):
        place, share, products = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, BLOCK):
            products = _values3(place, step, books + 3 * book_step, share, share_step, products)
            place, share = place + BLOCK_STEP, share + VECTORS * WHOLE
        add_totals(products, sums + ROWS * i * BYTES)
    for i in range(starts[4], starts[5]):
        place, share, products = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, BLOCK):
            products = _values4(place, step, books + 4 * book_step, share, share_step, products)
            place, share = place + BLOCK_STEP, share + VECTORS * WHOLE
        add_totals(products, sums + ROWS * i * BYTES)
    for i in range(starts[5], starts[6]):
        place, share, products = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, BLOCK):
            products = _values5(place, step, books + 5 * book_step, share, share_step, products)
            place, share = place + BLOCK_STEP, share + VECTORS * WHOLE
        add_totals(products, sums + ROWS * i * BYTES)
    for i in range(starts[6], starts[7]):
        place, share, products = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, BLOCK):
            products = _values6(place, step, books + 6 * book_step, share, share_step, products)
            place, share = place + BLOCK_STEP, share + VECTORS * WHOLE
        add_totals(products, sums + ROWS * i * BYTES)
    for i in range(starts[7], starts[8]):
        place, share, products = load_place(places + i * PLACE) + offset, shares, none
        for _ in range(0, count, BLOCK):
            products = _values8(place, step, books + 8 * book_step, share, share_step, products)
            place, share = place + BLOCK_STEP, share + VECTORS * WHOLE
        add_totals(products, sums + ROWS * i * BYTES)
    if longer is not None:
        for i in range(starts[8], starts[9]):
            place, share, products = load_place(places + i * PLACE) + offset, shares, none
            for _ in range(0, count, BLOCK):
                products = _values7(place, step, books + 7 * book_step, share, share_step, products)
                place, share = place + BLOCK_STEP, share + VECTORS * WHOLE
            add_totals(products, sums + ROWS * i * BYTES)
