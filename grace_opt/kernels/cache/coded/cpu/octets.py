"""Products with the numbers that an *octet*'s bytes stand for: those of eight bit planes, one for each token.

An octet is planes of one channel, of two channels of up to four bits, or, with registers of sixteen numbers, of
channels of one and two bits, whose numbers are sums over their bits (`grace_opt.kernels.cache.coded.cpu.octet_lists`).
Its bytes (`grace_opt.kernels.cache.coded.cpu.octet_bytes`) wait in the nearest cache until they are multiplied.

When: processors with AVX2 or AVX-512. Source: T-MAC (Wei et al., arXiv 2407.00088) for looking up sums of several
channels, here of float32 numbers in registers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...._shared.lanes import WIDEST, multiply_add_vectors, prefetch_instruction
from ..forms import ROWS
from .levels import EVEN, VECTORS, call, number_at, vector_at
from .octet_bytes import HALF, PLANES, TABLES, place_at

#: Bits by which one register of eight numbers is looked up in; numbers that the bits of half an octet stand for.
FEW, SIXTEEN = 3, 2**HALF
BYTES, WHOLE = 4, 4 * WIDEST
_INT, _WHOLES = ir.IntType(64), ir.VectorType(ir.IntType(32), WIDEST)
_VECTOR, _TRUTHS = ir.VectorType(ir.FloatType(), WIDEST), ir.VectorType(ir.IntType(1), WIDEST)


def _behind(builder, address, count):
    return builder.add(address, ir.Constant(address.type, count))


@intrinsic
def prefetch_line(typing_context, address):
    """Have the processor fetch the line of an address, but not to the nearest cache; any address will do."""

    def generate(context, builder, signature, arguments):
        prefetch_instruction(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _octet_at(builder, address):
    return builder.load(builder.inttoptr(address, _WHOLES.as_pointer()), align=VECTORS)


def _codes(builder, octet, first=0):
    """Return, for each vector's tokens, the bits from the first on; what stands above them is of no account."""
    shifts = [PLANES * vector + first for vector in range(VECTORS)]
    return [builder.lshr(octet, ir.Constant(_WHOLES, [shift] * WIDEST)) if shift else octet for shift in shifts]


def _looked_up(builder, table, code, width):
    """Numbers of a table in registers by the last bits of codes."""
    if WIDEST == 8:
        return _of_eights(builder, table, code, width)
    if width <= HALF:
        return call(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, vector_at(builder, table), code)
    vectors = []
    for first in range(0, 2**width // WIDEST, 2):
        parts = vector_at(builder, table, first), vector_at(builder, table, first + 1)
        vectors.append(call(builder, "llvm.x86.avx512.vpermi2var.ps.512", _VECTOR, parts[0], code, parts[1]))
    return _chosen(builder, vectors, code, HALF + 1)


def _of_eights(builder, table, code, width):
    """The same by registers of eight numbers. Of tables of five bits and more, which are symmetric, the first half is
    looked up in: the highest bit is a sign, and turns the others around."""
    if width > HALF:
        width -= 1
        above = builder.shl(code, ir.Constant(_WHOLES, [31 - width] * WIDEST))
        above = builder.ashr(above, ir.Constant(_WHOLES, [31] * WIDEST))
        numbers = builder.bitcast(_of_eights_alone(builder, table, builder.xor(code, above), width), _WHOLES)
        sign = builder.and_(above, ir.Constant(_WHOLES, [-(2**31)] * WIDEST))
        return builder.bitcast(builder.xor(numbers, sign), _VECTOR)
    return _of_eights_alone(builder, table, code, width)


def _of_eights_alone(builder, table, code, width):
    parts = [vector_at(builder, table, number) for number in range(max(2**width // WIDEST, 1))]
    vectors = [call(builder, "llvm.x86.avx2.permps", _VECTOR, part, code) for part in parts]
    return _chosen(builder, vectors, code, FEW)


def _chosen(builder, vectors, code, bit):
    """Choose among vectors, for each lane the one that a code's bits from one on say."""
    while len(vectors) > 1:
        # The bit as a sign, by which instructions choose.
        moved = builder.shl(code, ir.Constant(_WHOLES, [31 - bit] * WIDEST))
        is_set = builder.icmp_signed("<", moved, ir.Constant(_WHOLES, [0] * WIDEST))
        vectors = [builder.select(is_set, b, a) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        bit += 1
    return vectors[0]


def _spaced(builder, table, code):
    """Evenly spaced numbers."""
    least, most, last = number_at(builder, table), number_at(builder, table, 2**EVEN - 1), 2**EVEN - 1
    step = builder.fmul(builder.fsub(most, least), ir.Constant(_VECTOR, [1 / last] * WIDEST))
    places = builder.sitofp(builder.and_(code, ir.Constant(_WHOLES, [last] * WIDEST)), _VECTOR)
    return multiply_add_vectors(builder, places, step, least)


def _numbers(builder, entry, octet, width):
    """Yield, for each channel of an octet, two of up to four bits or one of `width`, its numbers, a vector each."""
    tables = [place_at(builder, entry, TABLES + half) for half in range(2)]
    if width == EVEN:
        yield [_spaced(builder, tables[0], code) for code in _codes(builder, octet)]
    elif width > HALF:
        yield [_looked_up(builder, tables[0], code, width) for code in _codes(builder, octet)]
    else:
        for half, table in enumerate(tables):
            yield [_looked_up(builder, table, code, width) for code in _codes(builder, octet, half * HALF)]


def _for_keys(width):
    @intrinsic
    def add(typing_context, entry, octet, queries, sums):
        rows = sums.count // VECTORS

        def generate(context, builder, signature, arguments):
            entry, octet, queries, sums = arguments
            for numbers in _numbers(builder, entry, _octet_at(builder, octet), width):
                for row in range(rows):
                    query = number_at(builder, queries, row)
                    for vector, number in enumerate(numbers):
                        place = row + vector * rows
                        added = multiply_add_vectors(builder, query, number, builder.extract_value(sums, place))
                        sums = builder.insert_value(sums, added, place)
                queries = _behind(builder, queries, rows * BYTES)
            return sums

        return sums(types.intp, types.intp, types.intp, sums), generate

    return add


def _for_values(width):
    @intrinsic
    def add(typing_context, entry, octet, shares, step, sums):
        rows = sums.count // VECTORS

        def generate(context, builder, signature, arguments):
            entry, octet, shares, step, sums = arguments
            channels = list(_numbers(builder, entry, _octet_at(builder, octet), width))
            for row in range(rows):
                for vector in range(VECTORS):
                    share = vector_at(builder, shares, vector)
                    for half, numbers in enumerate(channels):
                        place = _place_of(row, half, vector, rows, len(channels))
                        added = multiply_add_vectors(
                            builder, share, numbers[vector], builder.extract_value(sums, place)
                        )
                        sums = builder.insert_value(sums, added, place)
                shares = builder.add(shares, step)
            return sums

        return sums(types.intp, types.intp, types.intp, types.intp, sums), generate

    return add


def _place_of(row, half, vector, rows, channels):
    """Return where, among sums, what an octet's channel has of a row is: one channel has as many vectors as are
    multiplied at once, two have half of them each."""
    count = VECTORS // channels
    return row + rows * (half * count + vector % count)


def _adding_to_totals(channels):
    @intrinsic
    def add(typing_context, sums, to, first):
        rows = sums.count // VECTORS

        def generate(context, builder, signature, arguments):
            sums, to, first = arguments
            before = builder.icmp_signed("!=", first, ir.Constant(first.type, 0))
            before = builder.insert_element(ir.Constant(_TRUTHS, ir.Undefined), before, ir.Constant(ir.IntType(32), 0))
            before = builder.shuffle_vector(before, before, ir.Constant(_WHOLES, [0] * WIDEST))
            zeros = ir.Constant(_VECTOR, [0.0] * WIDEST)
            for half in range(channels):
                for row in range(rows):
                    places = sorted({_place_of(row, half, vector, rows, channels) for vector in range(VECTORS)})
                    every = [builder.extract_value(sums, place) for place in places]
                    while len(every) > 1:
                        every = [builder.fadd(a, b) for a, b in zip(every[::2], every[1::2], strict=True)]
                    address = _behind(builder, to, (row + half * ROWS) * WHOLE)
                    pointer = builder.inttoptr(address, _VECTOR.as_pointer())
                    operands = pointer, ir.Constant(ir.IntType(32), 4), before, zeros
                    known = call(builder, f"llvm.masked.load.v{WIDEST}f32.p0", _VECTOR, *operands)
                    builder.store(builder.fadd(known, every[0]), pointer, align=4)
            return context.get_dummy_value()

        return types.void(sums, types.intp, types.intp), generate

    return add


#: Add what `values_of_two`, or another, has added up to an octet's totals, `ROWS` for each of its channels; to zeros at
#: place 0.
add_to_two, add_to_one = _adding_to_totals(2), _adding_to_totals(1)
#: Add to sums what `VECTORS` vectors of an octet's tokens make, of keys with rows' queries, or of values with rows'
#: shares: of two channels of up to three bits, or four, or of one.
keys_of_few, keys_of_two, keys_of_five, keys_of_six, keys_of_eight, keys_of_seven = map(
    _for_keys, (FEW, HALF, 5, 6, EVEN, 7)
)
values_of_few, values_of_two, values_of_five, values_of_six, values_of_eight, values_of_seven = map(
    _for_values, (FEW, HALF, 5, 6, EVEN, 7)
)


@intrinsic
def add_sums_of_signs(typing_context, entry, octet, tables, sums):
    """Add to sums of logits what an octet's first four bits, and last four, stand for: sixteen numbers for each row.

    The first are added by multiplying them by one, which other parts of the processor do than additions.
    """
    rows = sums.count // VECTORS

    def generate(context, builder, signature, arguments):
        entry, octet, tables, sums = arguments
        one = number_at(builder, place_at(builder, entry, TABLES))  # a constant would be taken away
        octet = _octet_at(builder, octet)
        for half in range(2):
            for row in range(rows):
                table = _behind(builder, tables, (row + half * rows) * WHOLE)
                for vector, code in enumerate(_codes(builder, octet, half * HALF)):
                    place = row + vector * rows
                    number, added = _looked_up(builder, table, code, HALF), builder.extract_value(sums, place)
                    added = builder.fadd(added, number) if half else multiply_add_vectors(builder, number, one, added)
                    sums = builder.insert_value(sums, added, place)
        return sums

    return sums(types.intp, types.intp, types.intp, sums), generate


@intrinsic
def store_sums_of_signs(typing_context, weights, to):
    """Write the sixteen sums of four numbers at an address, each with a sign: plus where its bit is set."""

    def generate(context, builder, signature, arguments):
        weights, to = arguments
        sums = ir.Constant(_VECTOR, [0.0] * WIDEST)
        for place in range(HALF):
            signs = ir.Constant(_VECTOR, [1.0 if code >> place & 1 else -1.0 for code in range(WIDEST)])
            sums = multiply_add_vectors(builder, signs, number_at(builder, weights, place), sums)
        builder.store(sums, builder.inttoptr(to, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def store_tables(typing_context, books, step, to):
    """Write what four bits stand for, sixteen numbers each, from an address on: zeros; numbers of the lowest one, two,
    three and four bits, of which `books` has a row each, `step` bytes apart; ones."""

    def generate(context, builder, signature, arguments):
        books, step, to = arguments
        numbers = ir.VectorType(ir.FloatType(), SIXTEEN)

        def put(table, number):
            pointer = builder.inttoptr(_behind(builder, to, number * SIXTEEN * BYTES), numbers.as_pointer())
            builder.store(table, pointer, align=4)

        put(ir.Constant(numbers, [0.0] * SIXTEEN), 0)
        for width in range(1, HALF + 1):
            book = builder.add(books, builder.mul(step, ir.Constant(step.type, width)))
            levels = builder.load(builder.inttoptr(book, numbers.as_pointer()), align=4)
            codes = [code % 2**width for code in range(SIXTEEN)]
            put(
                builder.shuffle_vector(levels, levels, ir.Constant(ir.VectorType(ir.IntType(32), SIXTEEN), codes)),
                width,
            )
        put(ir.Constant(numbers, [1.0] * SIXTEEN), HALF + 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _pairs_added(builder, one, other, first, second):
    """Two vectors' lanes, of which `first` and `second` list those of both that are added."""
    parts = [
        builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), WIDEST), lanes))
        for lanes in (first, second)
    ]
    return builder.fadd(*parts)


@intrinsic
def store_totals(typing_context, address, to):
    """Write what the lanes of each of `WIDEST` vectors sum up to, side by side."""

    def generate(context, builder, signature, arguments):
        address, to = arguments
        vectors = [vector_at(builder, address, number) for number in range(WIDEST)]
        # Neighbours in each quarter of sixteen, twice: then a lane of each quarter belongs to one of four vectors.
        even = [start + lane for start in range(0, WIDEST, 4) for lane in (0, 2, WIDEST, WIDEST + 2)]
        for _ in range(2):
            odd = [lane + 1 for lane in even]
            vectors = [_pairs_added(builder, a, b, even, odd) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        # Then whole quarters, until there is one vector.
        low = [start + lane for start in range(0, 2 * WIDEST, 8) for lane in range(4)]
        high = [lane + 4 for lane in low]
        while len(vectors) > 1:
            vectors = [_pairs_added(builder, a, b, low, high) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        builder.store(vectors[0], builder.inttoptr(to, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate
