"""Read numbers of a few bits from bit planes into vectors: a plane's bits are the lanes' truths.

Bit p of the code of every token stands in plane p, eight tokens to a byte (:mod:`grace_opt.hf.stores.coded.bitplanes`),
so sixteen tokens take two bytes per plane, which AVX-512 loads as a mask. Codes of 1, 2 and 8 bits stand for numbers
that are sums over their bits: one masked addition per plane. The others (3 to 7 bits) are looked up: with AVX-512 by a
permutation of registers, elsewhere number by number. Newer processors (Intel's since Ice Lake, AMD's since Zen 4) turn
the planes of sixty-four tokens into codes at once, which takes fewer instructions from 3 bits on.

When: processors lack the instructions that :mod:`grace_opt.kernels.cache.coded.cpu.octets` takes.

Source: BitWeaving (Li & Patel, SIGMOD 2013) for bits in planes; Intel,
"Galois Field New Instructions" (2021), for transposing bits by a product with a matrix.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...._shared.lanes import TRANSPOSING, WIDEST

_NUMBER, _WHOLE = ir.FloatType(), ir.IntType(32)
_VECTOR, _WHOLES = ir.VectorType(_NUMBER, WIDEST), ir.VectorType(_WHOLE, WIDEST)
#: Vectors of tokens that loops take at once: as many as leave registers for the numbers of each.
VECTORS = 4 if WIDEST == 16 else 2
_BYTES, EIGHT = ir.VectorType(ir.IntType(8), 64), ir.VectorType(ir.IntType(64), 8)
_BITS, _TRUTHS = ir.IntType(WIDEST), ir.VectorType(ir.IntType(1), WIDEST)
#: Bytes of one plane that hold the bits of one vector's tokens.
STEP = WIDEST // 8
#: Widths whose numbers are sums over their bits, because they are symmetric or evenly spaced.
_SUMS = (1, 2, 8)
#: The one whose numbers are evenly spaced.
EVEN = 8
_FLOAT_BYTES = 4


def _address(builder, start, offset):
    return builder.add(start, ir.Constant(start.type, offset))


def number_at(builder, table, place=0):
    """The number at a place of a table, in all lanes."""
    pointer = builder.inttoptr(_address(builder, table, place * _FLOAT_BYTES), _NUMBER.as_pointer())
    return _spread(builder, builder.load(pointer, align=4))


def _spread(builder, value):
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_WHOLE, 0))
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_WHOLES, [0] * WIDEST))


def _truths(builder, address, step, width):
    """Return whether each bit is set, plane by plane."""
    truths = []
    for _ in range(width):
        bits = builder.load(builder.inttoptr(address, _BITS.as_pointer()), align=1)
        truths.append(builder.bitcast(bits, _TRUTHS))
        address = builder.add(address, step)
    return truths


def _summed(builder, truths, table):
    base = number_at(builder, table, 0)
    sums = base
    for place, truth in enumerate(truths):
        more = builder.fsub(number_at(builder, table, 1 << place), base)
        sums = builder.select(truth, builder.fadd(sums, more), sums)
    return sums


def _codes(builder, truths):
    codes = ir.Constant(_WHOLES, [0] * WIDEST)
    for place, truth in enumerate(truths):
        codes = builder.select(truth, builder.or_(codes, ir.Constant(_WHOLES, [1 << place] * WIDEST)), codes)
    return codes


def vector_at(builder, table, number=0):
    """One vector of a table."""
    start = _address(builder, table, number * WIDEST * _FLOAT_BYTES)
    return builder.load(builder.inttoptr(start, _VECTOR.as_pointer()), align=4)


def call(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def _permuted(builder, truths, codes, table):
    """Two registers of sixteen numbers at a time are looked up in; further bits choose between two results."""

    def of_two(first):
        parts = vector_at(builder, table, first), vector_at(builder, table, first + 1)
        return call(builder, "llvm.x86.avx512.vpermi2var.ps.512", _VECTOR, parts[0], codes, parts[1])

    if len(truths) <= 4:
        return call(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, vector_at(builder, table, 0), codes)
    if len(truths) == 5:
        return of_two(0)
    if len(truths) == 6:
        return builder.select(truths[5], of_two(2), of_two(0))
    low, high = (builder.select(truths[5], of_two(first + 2), of_two(first)) for first in (0, 4))
    return builder.select(truths[6], high, low)


def _gathered(builder, addresses):
    """The bits of sixty-four tokens of each of up to eight planes, which begin at some addresses."""
    planes = ir.Constant(EIGHT, [0] * 8)
    for place, address in enumerate(addresses):
        bits = builder.load(builder.inttoptr(address, EIGHT.element.as_pointer()), align=1)
        planes = builder.insert_element(planes, bits, ir.Constant(_WHOLE, place))
    return planes


def ordered(builder, vector, order):
    """Bytes of a vector in another order, by one instruction: LLVM, if it knew the order, would join it with what comes
    before and after, to many that take longer."""
    order = builder.asm(ir.FunctionType(_BYTES, [_BYTES]), "", "=v,0", [ir.Constant(_BYTES, order)], False)
    return call(builder, "llvm.x86.avx512.permvar.qi.512", _BYTES, vector, order)


def transposed(builder, planes):
    """The codes of sixty-four tokens, a byte each: bit p is that of plane p of eight. A product of bits with each eight
    of them transposes 8 x 8 bits."""
    planes = builder.bitcast(planes, _BYTES)
    # The byte for bit i of eight tokens' codes is the eighth last but i.
    matrices = ordered(builder, planes, [8 * (7 - i) + eight for eight in range(8) for i in range(8)])
    tokens = ir.Constant(_BYTES, [1 << token % 8 for token in range(64)])
    return call(builder, "llvm.x86.vgf2p8affineqb.512", _BYTES, tokens, matrices, ir.Constant(ir.IntType(8), 0))


def _codes_of_vector(builder, codes, number):
    """Those of one vector's tokens, in all bytes of its lanes: only the lowest bits are looked at."""
    places = [WIDEST * number + lane for lane in range(WIDEST) for _ in range(4)]
    chosen = builder.shuffle_vector(codes, codes, ir.Constant(ir.VectorType(_WHOLE, 64), places))
    return builder.bitcast(chosen, _WHOLES)


def _spaced(builder, codes, number, width, table):
    """Evenly spaced numbers of one vector's tokens."""
    least, most = number_at(builder, table), number_at(builder, table, 2**width - 1)
    step = builder.fmul(builder.fsub(most, least), ir.Constant(_VECTOR, [1 / (2**width - 1)] * WIDEST))
    own = list(range(WIDEST * number, WIDEST * (number + 1)))
    chosen = builder.shuffle_vector(codes, codes, ir.Constant(_WHOLES, own))
    places = builder.uitofp(builder.zext(chosen, _WHOLES), _VECTOR)
    return builder.fadd(least, builder.fmul(places, step))


def _looked_up(builder, truths, codes, table):
    vector = ir.Constant(_VECTOR, ir.Undefined)
    for lane in range(WIDEST):
        place = ir.Constant(_WHOLE, lane)
        code = builder.zext(builder.extract_element(codes, place), table.type)
        start = builder.add(table, builder.mul(code, ir.Constant(table.type, _FLOAT_BYTES)))
        number = builder.load(builder.inttoptr(start, _NUMBER.as_pointer()), align=4)
        vector = builder.insert_element(vector, number, place)
    return vector


def reading(width, sums=_SUMS, transposing=TRANSPOSING):
    """Return what makes the instructions that read `VECTORS` vectors of numbers: (builder, address of the first plane's
    bits, bytes from one plane to the next, address of the numbers that the codes stand for). Those of a width in `sums`
    are sums over their bits."""
    look_up = _permuted if WIDEST == 16 else _looked_up

    def read(builder, address, step, table):
        starts = [_address(builder, address, number * STEP) for number in range(VECTORS)]
        truths = [_truths(builder, start, step, width) for start in starts]
        if width in sums and not (transposing and width == EVEN):
            return [_summed(builder, each, table) for each in truths]
        if not transposing:
            return [look_up(builder, each, _codes(builder, each), table) for each in truths]
        addresses = [address]
        while len(addresses) < width:
            addresses.append(builder.add(addresses[-1], step))
        together = transposed(builder, _gathered(builder, addresses))
        if width in sums:
            return [_spaced(builder, together, number, width, table) for number in range(VECTORS)]
        codes = [_codes_of_vector(builder, together, number) for number in range(VECTORS)]
        return [look_up(builder, *each, table) for each in zip(truths, codes, strict=True)]

    return read


@intrinsic
def load_half(typing_context, address):
    """The float16 at an address, which is neither infinite nor NaN, as float32."""

    def generate(context, builder, signature, arguments):
        bits = builder.load(builder.inttoptr(arguments[0], ir.IntType(16).as_pointer()), align=2)
        bits = builder.zext(bits, _WHOLE)
        # Exponents of float16 are 112 too small, also where numbers are subnormal.
        size = builder.shl(builder.and_(bits, ir.Constant(_WHOLE, 0x7FFF)), ir.Constant(_WHOLE, 13))
        size = builder.fmul(builder.bitcast(size, _NUMBER), ir.Constant(_NUMBER, 2.0**112))
        sign = builder.shl(builder.and_(bits, ir.Constant(_WHOLE, 0x8000)), ir.Constant(_WHOLE, 16))
        return builder.bitcast(builder.or_(builder.bitcast(size, _WHOLE), sign), _NUMBER)

    return types.float32(types.intp), generate
