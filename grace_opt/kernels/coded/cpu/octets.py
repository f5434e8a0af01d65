"""Instructions for eight bit planes at a time, an *octet*: a byte for each token, and products with what stands for it.

An octet is planes of one channel, of two channels of up to four bits, or of channels of one and two bits, whose numbers
are sums over their bits (`grace_opt.kernels.coded.cpu.octet_lists`). Its bytes are made before the octet in front of it
is multiplied: making them is a chain of instructions that wait for each other, products are many that do not, and a
processor looks ahead for less than both.

When: processors with AVX-512 and GFNI. Source: T-MAC (Wei et al., arXiv 2407.00088) for looking up sums of several
channels, here of float32 numbers in registers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..._shared.lanes import WIDEST, multiply_add_vectors, prefetch, widest
from ..forms import ROWS
from .levels import EVEN, VECTORS, call, number_at, transposed, vector_at

#: Planes of an octet, bits that a register is looked up in by, and numbers of what is said of one: addresses of its
#: planes, then, as `TABLES`, of what its lowest bits stand for, and the four above these.
PLANES, HALF, ENTRY = 8, 4, 10
TABLES = PLANES
#: What a cursor has: addresses of the octet to read, of the first one and of what is behind the last; its place in each
#: plane, and the last one; of what is asked for, a line's place in a plane, the bytes, the plane, the bytes of a plane.
OCTET, AT, LINE, PLANE, CURSOR = 0, 3, 5, 7, 9
CACHE_LINE = 64
PLACE, WHOLE = 8, 4 * WIDEST
_INT, _WHOLES = ir.IntType(64), ir.VectorType(ir.IntType(32), WIDEST)
_VECTOR, _TRUTHS = ir.VectorType(ir.FloatType(), WIDEST), ir.VectorType(ir.IntType(1), WIDEST)


def _behind(builder, address, count):
    return builder.add(address, ir.Constant(address.type, count))


def _place_at(builder, address, number):
    pointer = builder.inttoptr(_behind(builder, address, number * PLACE), _INT.as_pointer())
    return builder.load(pointer, align=PLACE)


def _read(builder, octet, at):
    """The bytes of sixty-four tokens: those of four tokens, each of another vector, side by side."""
    addresses = [builder.add(_place_at(builder, octet, place), at) for place in range(PLANES)]
    found = transposed(builder, addresses)
    order = [WIDEST * vector + lane for lane in range(WIDEST) for vector in range(VECTORS)]
    places = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return builder.bitcast(builder.shuffle_vector(found, found, places), _VECTOR)


@intrinsic
def read_next(typing_context, cursor):
    """Read the octet that a cursor, some int64 at an address, is at, and move it; ask for a line of what comes later.

    After the last octet the first one of the next tokens follows; of the last tokens some are read for nothing.
    """

    def generate(context, builder, signature, arguments):
        (cursor,) = arguments

        def put(number, value):
            pointer = builder.inttoptr(_behind(builder, cursor, number * PLACE), _INT.as_pointer())
            builder.store(value, pointer, align=PLACE)

        octet, first, last, at, end, line, size, plane, stride = (_place_at(builder, cursor, n) for n in range(CURSOR))
        found = _read(builder, octet, at)
        octet, later = _behind(builder, octet, ENTRY * PLACE), _behind(builder, at, PLANES)
        over = builder.icmp_signed("==", octet, last)
        later = builder.select(builder.icmp_signed("<", later, end), later, end)
        put(OCTET, builder.select(over, first, octet))
        put(AT, builder.select(over, later, at))
        prefetch(builder, builder.add(plane, line))
        line = _behind(builder, line, CACHE_LINE)
        over = builder.icmp_signed(">=", line, size)
        put(LINE, builder.select(over, ir.Constant(_INT, 0), line))
        put(PLANE, builder.select(over, builder.add(plane, stride), plane))
        return found

    return widest(types.intp), generate


def _codes(builder, octet, first=0):
    """Of each vector's tokens, the bits from the first on; what stands above them is of no account."""
    octet = builder.bitcast(octet, _WHOLES)
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
            for numbers in _numbers(builder, entry, octet, width):
                for row in range(rows):
                    query = vector_at(builder, queries, row)
                    for vector, number in enumerate(numbers):
                        place = row + vector * rows
                        found = multiply_add_vectors(builder, query, number, builder.extract_value(sums, place))
                        sums = builder.insert_value(sums, found, place)
                queries = _behind(builder, queries, rows * WHOLE)
            return sums

        return sums(types.intp, octet, types.intp, sums), generate

    return add


def _for_values(width):
    @intrinsic
    def add(typing_context, entry, octet, totals, shares, first):
        rows = shares.count // VECTORS

        def generate(context, builder, signature, arguments):
            entry, octet, totals, shares, first = arguments
            before = builder.icmp_signed("!=", first, ir.Constant(first.type, 0))
            ones = builder.insert_element(ir.Constant(_TRUTHS, ir.Undefined), before, ir.Constant(ir.IntType(32), 0))
            ones = builder.shuffle_vector(ones, ones, ir.Constant(_WHOLES, [0] * WIDEST))
            for numbers in _numbers(builder, entry, octet, width):
                for row in range(rows):
                    pointer = builder.inttoptr(_behind(builder, totals, row * WHOLE), _VECTOR.as_pointer())
                    name, zero = f"llvm.masked.load.v{WIDEST}f32.p0", ir.Constant(_VECTOR, [0.0] * WIDEST)
                    found = call(builder, name, _VECTOR, pointer, ir.Constant(ir.IntType(32), 4), ones, zero)
                    for vector, number in enumerate(numbers):
                        share = builder.extract_value(shares, row + vector * rows)
                        found = multiply_add_vectors(builder, share, number, found)
                    builder.store(found, pointer, align=4)
                totals = _behind(builder, totals, ROWS * WHOLE)
            return context.get_dummy_value()

        return types.void(types.intp, octet, types.intp, shares, types.intp), generate

    return add


#: Add to sums what an octet of keys makes with rows' queries, each in all lanes; or to totals what an octet of values
#: makes with rows' shares: of two channels of up to four bits, or of one.
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
        for half in range(2):
            for row in range(rows):
                table = vector_at(builder, tables, row + half * rows)
                for vector, code in enumerate(_codes(builder, octet, half * HALF)):
                    place = row + vector * rows
                    number, found = _of_sixteen(builder, table, code), builder.extract_value(sums, place)
                    found = builder.fadd(found, number) if half else multiply_add_vectors(builder, number, one, found)
                    sums = builder.insert_value(sums, found, place)
        return sums

    return sums(types.intp, octet, types.intp, sums), generate


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
def put_planes(typing_context, to, place, step, width):
    """Write `HALF` addresses of planes: a channel's first, and those that follow; of fewer the last one repeatedly."""

    def generate(context, builder, signature, arguments):
        to, place, step, width = arguments
        four = ir.VectorType(_INT, HALF)
        place, step, last = (
            builder.shuffle_vector(
                builder.insert_element(ir.Constant(four, ir.Undefined), each, ir.Constant(ir.IntType(32), 0)),
                ir.Constant(four, ir.Undefined),
                ir.Constant(ir.VectorType(ir.IntType(32), HALF), [0] * HALF),
            )
            for each in (place, step, builder.sub(width, ir.Constant(width.type, 1)))
        )
        planes = ir.Constant(four, list(range(HALF)))
        planes = builder.select(builder.icmp_signed("<", planes, last), planes, last)
        found = builder.add(place, builder.mul(planes, step))
        builder.store(found, builder.inttoptr(to, four.as_pointer()), align=PLACE)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


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


@intrinsic
def load_shares(typing_context, at, step, none):
    """The shares of a block's tokens, of as many rows as in `none`: of each the first vector, then of each the next."""
    rows = none.count // VECTORS

    def generate(context, builder, signature, arguments):
        at, step, found = arguments
        for row in range(rows):
            for vector in range(VECTORS):
                found = builder.insert_value(found, vector_at(builder, at, vector), row + vector * rows)
            at = builder.add(at, step)
        return found

    return none(types.intp, types.intp, none), generate


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
