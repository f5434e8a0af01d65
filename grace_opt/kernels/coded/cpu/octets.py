"""Instructions for eight bit planes at a time, an *octet*: a byte for each token, and products with what stands for it.

An octet is planes of one channel, of two channels of up to four bits, or of channels of one and two bits, whose numbers
are sums over their bits (`grace_opt.kernels.coded.cpu.octet_lists`). Its bytes are made for as many tokens as a vector
has bits, 512, and wait in the nearest cache until they are multiplied. Codes of a trellis get their further plane on
the way (:mod:`grace_opt.kernels.coding.trellis`).

When: processors with AVX-512 and GFNI. Source: T-MAC (Wei et al., arXiv 2407.00088) for looking up sums of several
channels, here of float32 numbers in registers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..._shared.lanes import WIDEST, multiply_add_vectors, prefetch
from ..forms import ROWS
from .levels import EIGHT, EVEN, VECTORS, call, number_at, ordered, transposed, vector_at

#: Planes of an octet, bits that a register is looked up in by, and numbers of what is said of one: addresses of its
#: planes, then, as `TABLES`, of what its lowest bits stand for, and the four above these; as `LONGER`, a bit for each
#: two planes that are made of one, a trellis' lowest one, whose address both have.
PLANES, HALF, ENTRY = 8, 4, 11
TABLES, LONGER = PLANES, PLANES + 2
PLACE, BYTES, WHOLE = 8, 4, 4 * WIDEST
#: Bytes of a plane that octets are made of at once.
LINE = 64
_INT, _WHOLES = ir.IntType(64), ir.VectorType(ir.IntType(32), WIDEST)
_LINE = ir.VectorType(ir.IntType(8), LINE)
_VECTOR, _TRUTHS = ir.VectorType(ir.FloatType(), WIDEST), ir.VectorType(ir.IntType(1), WIDEST)


def _behind(builder, address, count):
    return builder.add(address, ir.Constant(address.type, count))


def _place_at(builder, address, number):
    pointer = builder.inttoptr(_behind(builder, address, number * PLACE), _INT.as_pointer())
    return builder.load(pointer, align=PLACE)


def _interleaved(builder, one, other, lanes):
    """Lanes of two vectors, of which those of the other one are counted from `PLANES` on."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), PLANES), lanes))


def _turned(builder, planes):
    """Eight planes of 512 tokens, as eight vectors with sixty-four tokens of each plane."""
    found = [ir.Constant(EIGHT, ir.Undefined)] * PLANES
    for odd in range(2):
        lanes = [lane + odd + side * PLANES for lane in range(0, PLANES, 2) for side in range(2)]
        pairs = [_interleaved(builder, planes[i], planes[i + 1], lanes) for i in range(0, PLANES, 2)]
        # Halves, then quarters of vectors.
        halves = [[], []]
        for a, b in (pairs[:2], pairs[2:]):
            for number, lanes in enumerate(([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])):
                halves[number].append(_interleaved(builder, a, b, lanes))
        for number, (a, b) in enumerate(halves):
            for quarter, lanes in enumerate(([0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15])):
                found[4 * number + 2 * quarter + odd] = _interleaved(builder, a, b, lanes)
    return found


def _line_at(builder, address, some):
    """Those bytes of a line at an address that are in `some`; no others are read."""
    pointer = builder.inttoptr(address, _LINE.as_pointer())
    one, zeros = ir.Constant(ir.IntType(32), 1), ir.Constant(_LINE, [0] * LINE)
    found = call(builder, f"llvm.masked.load.v{LINE}i8.p0", _LINE, pointer, one, some, zeros)
    return builder.bitcast(found, EIGHT)


def _shifted(builder, own, before, count):
    """The bits of as many tokens before."""
    return call(builder, "llvm.fshl.v8i64", EIGHT, own, before, ir.Constant(EIGHT, [count] * PLANES))


@intrinsic
def make_octet(typing_context, octet, at, size, to, step):
    """Write an octet's bytes of up to 512 tokens, whose bits are `size` bytes from a place of each plane on: those of
    four tokens, each of another vector, side by side; `step` bytes from sixty-four tokens to the next ones."""

    def generate(context, builder, signature, arguments):
        octet, at, size, to, step = arguments
        zero = ir.Constant(_INT, 0)
        line, before = ir.Constant(_INT, LINE), ir.Constant(_INT, PLACE)
        bits = builder.lshr(ir.Constant(_INT, -1), builder.sub(line, size))
        # From eight bytes before on, but nothing is before the first token.
        earlier = builder.or_(builder.shl(bits, before), ir.Constant(_INT, (1 << PLACE) - 1))
        begins = builder.icmp_signed("==", at, zero)
        earlier = builder.select(begins, builder.shl(bits, before), earlier)
        some, known = (builder.bitcast(each, ir.VectorType(ir.IntType(1), LINE)) for each in (bits, earlier))
        places = [builder.add(_place_at(builder, octet, number), at) for number in range(PLANES)]
        planes = [_line_at(builder, place, some) for place in places]
        longer = _place_at(builder, octet, LONGER)
        for pair in range(PLANES // 2):
            plain, low = builder.block, 2 * pair
            flag = builder.and_(longer, ir.Constant(_INT, 1 << pair))
            with builder.if_then(builder.icmp_signed("!=", flag, zero)):
                own, before = planes[low], _line_at(builder, _behind(builder, places[low], -PLACE), known)
                shifted = [_shifted(builder, own, before, count) for count in (1, 2, 3)]
                made, block = (shifted[0], builder.xor(own, builder.xor(shifted[1], shifted[2]))), builder.block
            for number, found in enumerate(made):
                either = builder.phi(EIGHT)
                either.add_incoming(planes[low + number], plain)
                either.add_incoming(found, block)
                planes[low + number] = either
        order = [WIDEST * vector + lane for lane in range(WIDEST) for vector in range(VECTORS)]

        def write(found, to):
            found = ordered(builder, transposed(builder, found), order)
            builder.store(found, builder.inttoptr(to, _LINE.as_pointer()), align=1)
            return builder.add(to, step)

        first, *others = _turned(builder, planes)
        to = write(first, to)
        with builder.if_then(builder.icmp_signed(">", size, ir.Constant(_INT, PLACE))):
            for found in others:
                to = write(found, to)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def ask_for_line(typing_context, address):
    """Have the processor fetch the line of an address, but not to the nearest cache; any address will do."""

    def generate(context, builder, signature, arguments):
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _octet_at(builder, address):
    return builder.load(builder.inttoptr(address, _WHOLES.as_pointer()), align=4)


def _codes(builder, octet, first=0):
    """Of each vector's tokens, the bits from the first on; what stands above them is of no account."""
    shifts = [PLANES * vector + first for vector in range(VECTORS)]
    return [builder.lshr(octet, ir.Constant(_WHOLES, [shift] * WIDEST)) if shift else octet for shift in shifts]


def _of_sixteen(builder, table, code):
    return call(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, table, code)


def _of_more(builder, table, code, width):
    """Two registers at a time are looked up in; further bits choose between two results."""
    found = []
    for first in range(0, 2**width // WIDEST, 2):
        parts = vector_at(builder, table, first), vector_at(builder, table, first + 1)
        found.append(call(builder, "llvm.x86.avx512.vpermi2var.ps.512", _VECTOR, parts[0], code, parts[1]))
    place = 2 * WIDEST
    while len(found) > 1:
        bit = builder.and_(code, ir.Constant(_WHOLES, [place] * WIDEST))
        is_set = builder.icmp_unsigned("!=", bit, ir.Constant(_WHOLES, [0] * WIDEST))
        found = [builder.select(is_set, b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
        place *= 2
    return found[0]


def _spaced(builder, table, code):
    """Evenly spaced numbers."""
    least, most, last = number_at(builder, table), number_at(builder, table, 2**EVEN - 1), 2**EVEN - 1
    step = builder.fmul(builder.fsub(most, least), ir.Constant(_VECTOR, [1 / last] * WIDEST))
    places = builder.uitofp(builder.and_(code, ir.Constant(_WHOLES, [last] * WIDEST)), _VECTOR)
    return multiply_add_vectors(builder, places, step, least)


def _numbers(builder, entry, octet, width):
    """For each channel of an octet, two of up to four bits or one of `width`: its numbers, a vector each."""
    tables = [_place_at(builder, entry, TABLES + half) for half in range(2)]
    if width == EVEN:
        yield [_spaced(builder, tables[0], code) for code in _codes(builder, octet)]
    elif width > HALF:
        yield [_of_more(builder, tables[0], code, width) for code in _codes(builder, octet)]
    else:
        for half, table in enumerate(tables):
            found = vector_at(builder, table)
            yield [_of_sixteen(builder, found, code) for code in _codes(builder, octet, half * HALF)]


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
                        found = multiply_add_vectors(builder, query, number, builder.extract_value(sums, place))
                        sums = builder.insert_value(sums, found, place)
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
                        found = multiply_add_vectors(
                            builder, share, numbers[vector], builder.extract_value(sums, place)
                        )
                        sums = builder.insert_value(sums, found, place)
                shares = builder.add(shares, step)
            return sums

        return sums(types.intp, types.intp, types.intp, types.intp, sums), generate

    return add


def _place_of(row, half, vector, rows, channels):
    """Where, among sums, what an octet's channel has of a row is: two channels have two vectors each, one has four."""
    return row + rows * (half * (VECTORS // 2) + vector % 2 if channels == 2 else vector)


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
                    at = _behind(builder, to, (row + half * ROWS) * WHOLE)
                    pointer = builder.inttoptr(at, _VECTOR.as_pointer())
                    given = pointer, ir.Constant(ir.IntType(32), 4), before, zeros
                    known = call(builder, f"llvm.masked.load.v{WIDEST}f32.p0", _VECTOR, *given)
                    builder.store(builder.fadd(known, every[0]), pointer, align=4)
            return context.get_dummy_value()

        return types.void(sums, types.intp, types.intp), generate

    return add


#: Add what `values_of_two`, or another, has added up to an octet's totals, `ROWS` for each of its channels; to zeros at
#: place 0.
add_to_two, add_to_one = _adding_to_totals(2), _adding_to_totals(1)
#: Add to sums what sixty-four tokens of an octet make, of keys with rows' queries, or of values with rows' shares: of
#: two channels of up to four bits, or of one.
keys_of_two, keys_of_five, keys_of_six, keys_of_eight, keys_of_seven = map(_for_keys, (HALF, 5, 6, EVEN, 7))
values_of_two, values_of_five, values_of_six, values_of_eight, values_of_seven = map(_for_values, (HALF, 5, 6, EVEN, 7))


@intrinsic
def add_sums_of_signs(typing_context, entry, octet, tables, sums):
    """Add to sums of logits what an octet's first four bits, and last four, stand for: sixteen numbers for each row.

    The first are added by multiplying them by one, which other parts of the processor do than additions.
    """
    rows = sums.count // VECTORS

    def generate(context, builder, signature, arguments):
        entry, octet, tables, sums = arguments
        one = number_at(builder, _place_at(builder, entry, TABLES))  # a constant would be taken away
        octet = _octet_at(builder, octet)
        for half in range(2):
            for row in range(rows):
                table = vector_at(builder, tables, row + half * rows)
                for vector, code in enumerate(_codes(builder, octet, half * HALF)):
                    place = row + vector * rows
                    number, found = _of_sixteen(builder, table, code), builder.extract_value(sums, place)
                    found = builder.fadd(found, number) if half else multiply_add_vectors(builder, number, one, found)
                    sums = builder.insert_value(sums, found, place)
        return sums

    return sums(types.intp, types.intp, types.intp, sums), generate


@intrinsic
def store_sums_of_signs(typing_context, weights, to):
    """Write the sixteen sums of four numbers at an address, each with a sign: plus where its bit is set."""

    def generate(context, builder, signature, arguments):
        weights, to = arguments
        found = ir.Constant(_VECTOR, [0.0] * WIDEST)
        for place in range(HALF):
            signs = ir.Constant(_VECTOR, [1.0 if code >> place & 1 else -1.0 for code in range(WIDEST)])
            found = multiply_add_vectors(builder, signs, number_at(builder, weights, place), found)
        builder.store(found, builder.inttoptr(to, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def put_planes(typing_context, to, place, step, width, longer):
    """Write `HALF` addresses of planes: a channel's first, twice if `longer` is 1 and not 0, and those that follow, of
    `width` planes as they are read; of fewer the last one repeatedly."""

    def generate(context, builder, signature, arguments):
        to, place, step, width, longer = arguments
        four = ir.VectorType(_INT, HALF)
        place, step, last, longer = (
            builder.shuffle_vector(
                builder.insert_element(ir.Constant(four, ir.Undefined), each, ir.Constant(ir.IntType(32), 0)),
                ir.Constant(four, ir.Undefined),
                ir.Constant(ir.VectorType(ir.IntType(32), HALF), [0] * HALF),
            )
            for each in (place, step, builder.sub(width, ir.Constant(width.type, 1)), longer)
        )
        planes, none = ir.Constant(four, list(range(HALF))), ir.Constant(four, [0] * HALF)
        planes = builder.sub(builder.select(builder.icmp_signed("<", planes, last), planes, last), longer)
        planes = builder.select(builder.icmp_signed(">", planes, none), planes, none)
        found = builder.add(place, builder.mul(planes, step))
        builder.store(found, builder.inttoptr(to, four.as_pointer()), align=PLACE)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def store_tables(typing_context, books, step, to):
    """Write what four bits stand for, sixteen numbers each, from an address on: zeros; numbers of the lowest one, two,
    three and four bits, of which `books` has a row each, `step` bytes apart; ones."""

    def generate(context, builder, signature, arguments):
        books, step, to = arguments
        tables = [ir.Constant(_VECTOR, [0.0] * WIDEST)]
        for width in range(1, HALF + 1):
            found = vector_at(builder, builder.add(books, builder.mul(step, ir.Constant(step.type, width))))
            codes = ir.Constant(_WHOLES, [code % 2**width for code in range(WIDEST)])
            tables.append(builder.shuffle_vector(found, found, codes))
        tables.append(ir.Constant(_VECTOR, [1.0] * WIDEST))
        for number, table in enumerate(tables):
            builder.store(table, builder.inttoptr(_behind(builder, to, number * WHOLE), _VECTOR.as_pointer()), align=4)
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
def store_totals(typing_context, at, to):
    """Write what the lanes of each of `WIDEST` vectors sum up to, side by side."""
    quarter = WIDEST // 4

    def generate(context, builder, signature, arguments):
        at, to = arguments
        found = [vector_at(builder, at, number) for number in range(WIDEST)]
        # Neighbours in each quarter, twice: then a lane of each quarter belongs to one of four vectors.
        even = [start + lane for start in range(0, WIDEST, 4) for lane in (0, 2, WIDEST, WIDEST + 2)]
        for _ in range(2):
            odd = [lane + 1 for lane in even]
            found = [_pairs_added(builder, a, b, even, odd) for a, b in zip(found[::2], found[1::2], strict=True)]
        # Then whole quarters, twice.
        low = [start + lane for start in (0, 8, WIDEST, WIDEST + 8) for lane in range(quarter)]
        for _ in range(2):
            high = [lane + quarter for lane in low]
            found = [_pairs_added(builder, a, b, low, high) for a, b in zip(found[::2], found[1::2], strict=True)]
        builder.store(found[0], builder.inttoptr(to, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate
