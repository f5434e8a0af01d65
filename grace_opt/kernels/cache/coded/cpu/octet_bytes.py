"""The bytes of eight bit planes, an *octet*: one for each token, whose bits are the planes'.

They are made for as many tokens as a vector has bits, so that whole vectors of each plane are read. GFNI turns eight
planes' bits by a product of matrices. Elsewhere pairs of planes exchange half of their bits, three times: then a plane
has the bytes of every eighth token, and is put in order. Codes of a trellis get their further plane on the way
(:mod:`grace_opt.kernels.cache.coding.trellis`).

When: `grace_opt.kernels.cache.coded.cpu.octet_lists`. Source: Warren, Hacker's Delight (2nd ed. 2012), section 7-3, for
transposing bits by exchanges, here of whole vectors.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...._shared.lanes import TRANSPOSING, WIDEST
from .levels import VECTORS, call, ordered, transposed

#: Planes of an octet, and those of each channel where two share one; bytes of an address.
PLANES, HALF, PLACE = 8, 4, 8
#: Bytes of a plane that octets are made of at once, and of the tokens that are side by side then: a whole vector.
LINE = 4 * WIDEST
#: Numbers of what is said of an octet: addresses of its planes, then, as `TABLES`, of what its lowest bits stand for,
#: and the four above these; as `LONGER`, a bit for each two planes that are made of one, a trellis' lowest one, whose
#: address both have.
ENTRY, TABLES, LONGER = 11, PLANES, PLANES + 2
#: Bytes at whose multiples memory may end.
PAGE = 4096
_INT, _SHORT, _BITS = ir.IntType(64), ir.IntType(32), ir.IntType(PLANES)
#: A line as bytes, and as longer integers: shifted by 64 bits, and of which each of the eight has one of each plane.
_BYTES, _LONGS = ir.VectorType(ir.IntType(8), LINE), ir.VectorType(_INT, LINE // 8)
_EIGHTHS = ir.VectorType(ir.IntType(LINE), 8)


def place_at(builder, address, number):
    """The address that stands at a place of what is said of an octet."""
    pointer = builder.inttoptr(builder.add(address, ir.Constant(_INT, number * PLACE)), _INT.as_pointer())
    return builder.load(pointer, align=PLACE)


def _shuffled(builder, one, other, lanes):
    """Lanes of two vectors, of which those of the other one are counted from the first one's number on."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_SHORT, len(lanes)), lanes))


def _spread(builder, value, kind):
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_SHORT, 0))
    return _shuffled(builder, first, first, [0] * kind.count)


def _gathered_in_pairs(builder, planes):
    """Eight vectors' eighths, those of one place in each, for registers of which a shuffle takes any lane of two."""
    gathered = [ir.Constant(_EIGHTHS, ir.Undefined)] * PLANES
    for odd in range(2):
        lanes = [lane + odd + side * PLANES for lane in range(0, PLANES, 2) for side in range(2)]
        pairs = [_shuffled(builder, planes[i], planes[i + 1], lanes) for i in range(0, PLANES, 2)]
        # Halves, then quarters of vectors.
        halves = [[], []]
        for a, b in (pairs[:2], pairs[2:]):
            for number, lanes in enumerate(([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])):
                halves[number].append(_shuffled(builder, a, b, lanes))
        for number, (a, b) in enumerate(halves):
            for quarter, lanes in enumerate(([0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15])):
                gathered[4 * number + 2 * quarter + odd] = _shuffled(builder, a, b, lanes)
    return gathered


def _gathered_in_halves(builder, planes):
    """The same, for registers whose halves a shuffle does not mix, but for a last one."""
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    firsts, seconds = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    fours = []
    for i in range(0, PLANES, 4):
        pairs = [(planes[i], planes[i + 1]), (planes[i + 2], planes[i + 3])]
        for lanes in (low, high):
            a, b = (_shuffled(builder, *pair, lanes) for pair in pairs)
            fours += [_shuffled(builder, a, b, firsts), _shuffled(builder, a, b, seconds)]
    halves = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    return [_shuffled(builder, a, b, lanes) for lanes in halves for a, b in zip(fours[:4], fours[4:], strict=True)]


def _eighths(builder, planes):
    gathered = _gathered_in_pairs if WIDEST == 16 else _gathered_in_halves
    return gathered(builder, [builder.bitcast(plane, _EIGHTHS) for plane in planes])


def _exchanged(builder, planes):
    """Planes of which number b has the bytes of all tokens that are number b of eight."""
    planes, distance = list(planes), PLANES // 2
    while distance:
        # Bits whose place lacks that of the distance.
        mask = sum(1 << bit for bit in range(8) if not bit & distance) * 0x0101010101010101
        mask, shift = (ir.Constant(_LONGS, [number] * _LONGS.count) for number in (mask, distance))
        for low in (plane for plane in range(PLANES) if not plane & distance):
            high = low + distance
            change = builder.and_(builder.xor(builder.lshr(planes[low], shift), planes[high]), mask)
            planes[high] = builder.xor(planes[high], change)
            planes[low] = builder.xor(planes[low], builder.shl(change, shift))
        distance //= 2
    return planes


def _lines(builder, planes):
    """Eight lines of tokens' bytes: those of `LINE` tokens each, and of four of them, one of each quarter, side by
    side."""
    if TRANSPOSING:
        order = [WIDEST * vector + lane for lane in range(WIDEST) for vector in range(VECTORS)]
        return [ordered(builder, transposed(builder, lines), order) for lines in _eighths(builder, planes)]
    planes = _exchanged(builder, planes)
    if WIDEST == 8:
        return _eighths(builder, planes)
    # Of each eight bytes, every other one belongs to the tokens of another vector.
    inside = [eight + byte for eight in range(0, LINE, 8) for byte in (0, 2, 4, 6, 1, 3, 5, 7)]
    planes = [_shuffled(builder, each, each, inside) for each in (builder.bitcast(p, _BYTES) for p in planes)]
    lines = [builder.bitcast(each, ir.VectorType(_SHORT, WIDEST)) for each in _eighths(builder, planes)]
    return [_shuffled(builder, each, each, [*range(0, WIDEST, 2), *range(1, WIDEST, 2)]) for each in lines]


def _shifted(builder, own, before):
    """The bits of one, two and three tokens before, where `before` is the same plane, eight bytes before."""
    return [
        call(builder, f"llvm.fshl.v{_LONGS.count}i64", _LONGS, own, before, ir.Constant(_LONGS, [count] * _LONGS.count))
        for count in (1, 2, 3)
    ]


def _some_of_line(builder, address, mask):
    """Those bytes of a line at an address that are in `mask`; no others are read."""
    one, zeros = ir.Constant(_SHORT, 1), ir.Constant(_BYTES, [0] * LINE)
    pointer = builder.inttoptr(address, _BYTES.as_pointer())
    return builder.bitcast(call(builder, f"llvm.masked.load.v{LINE}i8.p0", _BYTES, pointer, one, mask, zeros), _LONGS)


def _reading_some(builder, offset, size):
    """Return what reads `size` bytes of a plane, and those eight bytes before; `offset` as for `make_octet`."""
    bits = builder.lshr(ir.Constant(_INT, -1), builder.sub(ir.Constant(_INT, LINE), size))
    # From eight bytes before on, but nothing is before the first token.
    later = builder.shl(bits, ir.Constant(_INT, PLACE))
    earlier = builder.or_(later, ir.Constant(_INT, (1 << PLACE) - 1))
    earlier = builder.select(builder.icmp_signed("==", offset, ir.Constant(_INT, 0)), later, earlier)
    inside, known = (builder.bitcast(each, ir.VectorType(ir.IntType(1), LINE)) for each in (bits, earlier))

    def before(place, own):
        return _some_of_line(builder, builder.sub(place, ir.Constant(_INT, PLACE)), known)

    return lambda place: _some_of_line(builder, place, inside), before


def _reading_all(builder, offset):
    """The same for whole lines, of processors that cannot read some bytes of a vector."""
    first = builder.icmp_signed("==", offset, ir.Constant(_INT, 0))
    back = builder.select(first, ir.Constant(_INT, 0), ir.Constant(_INT, 1))
    mask = builder.select(first, ir.Constant(ir.IntType(8), 0), ir.Constant(ir.IntType(8), 255))

    def load(place):
        return builder.load(builder.inttoptr(place, _LONGS.as_pointer()), align=1)

    def before(place, own):
        last = builder.load(builder.inttoptr(builder.sub(place, back), mask.type.as_pointer()), align=1)
        last = builder.shl(builder.zext(builder.and_(last, mask), _INT), ir.Constant(_INT, 56))
        last = builder.insert_element(ir.Constant(_LONGS, ir.Undefined), last, ir.Constant(_SHORT, 0))
        return _shuffled(builder, own, last, [_LONGS.count, *range(_LONGS.count - 1)])

    return load, before


@intrinsic
def put_planes(typing_context, to, place, step, width, longer):
    """Write `HALF` addresses of planes: a channel's first, twice if `longer` is 1 and not 0, and those that follow, of
    `width` planes as they are read; of fewer the last one repeatedly."""

    def generate(context, builder, signature, arguments):
        to, place, step, width, longer = arguments
        four = ir.VectorType(_INT, HALF)
        last = builder.sub(width, ir.Constant(width.type, 1))
        place, step, last, longer = (_spread(builder, each, four) for each in (place, step, last, longer))
        planes, none = ir.Constant(four, list(range(HALF))), ir.Constant(four, [0] * HALF)
        planes = builder.sub(builder.select(builder.icmp_signed("<", planes, last), planes, last), longer)
        planes = builder.select(builder.icmp_signed(">", planes, none), planes, none)
        addresses = builder.add(place, builder.mul(planes, step))
        builder.store(addresses, builder.inttoptr(to, four.as_pointer()), align=PLACE)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def make_octet(typing_context, octet, offset, size, to, step):
    """Write an octet's bytes of up to eight lines of tokens, whose bits are `size` bytes from a place `offset` of each
    plane on; `step` bytes from a line to the next one."""

    def generate(context, builder, signature, arguments):
        octet, offset, size, to, step = arguments
        zero = ir.Constant(_INT, 0)
        read, read_before = _reading_some(builder, offset, size) if WIDEST == 16 else _reading_all(builder, offset)
        places = [builder.add(place_at(builder, octet, number), offset) for number in range(PLANES)]
        planes = [read(place) for place in places]
        longer = place_at(builder, octet, LONGER)
        for pair in range(PLANES // 2):
            plain, low = builder.block, 2 * pair
            flag = builder.and_(longer, ir.Constant(_INT, 1 << pair))
            with builder.if_then(builder.icmp_signed("!=", flag, zero)):
                own = planes[low]
                shifted = _shifted(builder, own, read_before(places[low], own))
                made, block = (shifted[0], builder.xor(own, builder.xor(shifted[1], shifted[2]))), builder.block
            for number, line in enumerate(made):
                either = builder.phi(_LONGS)
                either.add_incoming(planes[low + number], plain)
                either.add_incoming(line, block)
                planes[low + number] = either

        def write(line, to):
            line = builder.bitcast(line, _BYTES)
            builder.store(line, builder.inttoptr(to, _BYTES.as_pointer()), align=1)
            return builder.add(to, step)

        first, *others = _lines(builder, planes)
        to = write(first, to)
        with builder.if_then(builder.icmp_signed(">", size, ir.Constant(_INT, LINE // PLANES))):
            for line in others:
                to = write(line, to)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def leaves_page(typing_context, octet, offset):
    """Return whether a line of any plane, from a place on, ends in another page of memory than it begins in."""

    def generate(context, builder, signature, arguments):
        octet, offset = arguments
        every = ir.VectorType(_INT, PLANES)
        places = builder.load(builder.inttoptr(octet, every.as_pointer()), align=PLACE)
        inside = builder.and_(
            builder.add(places, _spread(builder, offset, every)), ir.Constant(every, [PAGE - 1] * PLANES)
        )
        leaving = builder.icmp_signed(">", inside, ir.Constant(every, [PAGE - LINE] * PLANES))
        return builder.icmp_unsigned("!=", builder.bitcast(leaving, _BITS), ir.Constant(_BITS, 0))

    return types.boolean(types.intp, types.intp), generate
