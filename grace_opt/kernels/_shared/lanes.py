"""`Lanes`: a numba type for vectors of eight or sixteen float32 numbers, or int32, and memory access by address.

For loops whose numbers must stay in registers (sums in `grace_opt.kernels.cache.decode.cpu`, costs in
`grace_opt.kernels.cache.coding.cpu.trellis`). They run on every processor: LLVM splits vectors if registers are
narrower. Where they are, sixteen lanes need too many registers; `WIDEST` says whether to use them.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable
from numba.np.arrayobj import make_array

from .limits import LANES

_NUMBER, _COUNT = ir.FloatType(), ir.IntType(32)
_VECTOR, _COUNTS = (ir.VectorType(kind, LANES) for kind in (_NUMBER, _COUNT))


#: What processors that numba compiles for have, as its settings may limit it.
FEATURES = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


def decided(features):
    """Return `WIDEST`, `OCTETS` and `TRANSPOSING` of a processor with some features: all that loops depend on."""
    wide = "+avx512f" in features
    octets = "+avx512bw" in features if wide else "+avx2" in features
    return (16 if wide else LANES), octets, wide and {"+avx512bw", "+gfni", "+avx512vbmi"} <= features


#: Lanes of the widest vectors; whether there are instructions that look numbers up in registers, and make codes of
#: eight bit planes at a time; and whether one of them, of GFNI, turns bits, and AVX-512 moves single bytes.
WIDEST, OCTETS, TRANSPOSING = decided(FEATURES)


class Lanes(types.Type):
    """Some float32 numbers, or int32."""

    def __init__(self, count=LANES, whole=False):
        super().__init__(name=f"{'Int' if whole else 'Float'}32x{count}")
        self.count, self.whole = count, whole
        self.vector = ir.VectorType(_COUNT if whole else _NUMBER, count)


lanes, widest, four, wholes = Lanes(), Lanes(WIDEST), Lanes(4), Lanes(WIDEST, whole=True)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, kind.vector)


def _constant(value, kind=_VECTOR):
    return ir.Constant(kind, [value] * kind.count)


def _call(builder, name, result, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _first(builder, count):
    """The first `count` of eight truths."""
    limit = _spread(builder, builder.trunc(count, _COUNT), _COUNTS)
    return builder.icmp_signed("<", ir.Constant(_COUNTS, list(range(LANES))), limit)


def _loading(kind):
    @intrinsic
    def load_vector(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.load(builder.inttoptr(arguments[0], kind.vector.as_pointer()), align=4)

        return kind(types.intp), generate

    return load_vector


#: The eight, `WIDEST` or four numbers from an address on, or `WIDEST` int32.
load, load_widest, load_four, load_wholes = (_loading(kind) for kind in (lanes, widest, four, wholes))


@intrinsic
def load_some(typing_context, address, count):
    """The first `count` of the eight numbers from an address on, and zeros; nothing behind them is read."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _VECTOR.as_pointer())
        name, exists = f"llvm.masked.load.v{LANES}f32.p0", _first(builder, arguments[1])
        return _call(builder, name, _VECTOR, [pointer, ir.Constant(_COUNT, 4), exists, _constant(0.0)])

    return lanes(types.intp, types.intp), generate


def _levels(builder, words, shift, bits):
    """Numbers of a few bits out of eight bytes or int32, of which `shift` bits stand before them."""
    shift, bits = (_spread(builder, builder.trunc(number, _COUNT), _COUNTS) for number in (shift, bits))
    one = ir.Constant(_COUNTS, [1] * LANES)
    mask = builder.sub(builder.shl(one, bits), one)
    if words.type != _COUNTS:
        words = builder.zext(words, _COUNTS)
    return builder.sitofp(builder.and_(builder.lshr(words, shift), mask), _VECTOR)


def _loading_levels(element):
    """Return what reads levels out of integers of a type: all of a vector, and some."""
    elements = ir.VectorType(element, LANES)

    @intrinsic
    def load_levels(typing_context, address, shift, bits):
        def generate(context, builder, signature, arguments):
            address, shift, bits = arguments
            pointer = builder.inttoptr(address, elements.as_pointer())
            return _levels(builder, builder.load(pointer, align=1), shift, bits)

        return lanes(types.intp, types.intp, types.intp), generate

    @intrinsic
    def load_some_levels(typing_context, address, count, shift, bits):
        def generate(context, builder, signature, arguments):
            address, count, shift, bits = arguments
            pointer = builder.inttoptr(address, elements.as_pointer())
            operands = [pointer, ir.Constant(_COUNT, 1), _first(builder, count), _constant(0, elements)]
            words = _call(builder, f"llvm.masked.load.v{LANES}i{element.width}.p0", elements, operands)
            return _levels(builder, words, shift, bits)

        return lanes(types.intp, types.intp, types.intp, types.intp), generate

    return load_levels, load_some_levels


#: Eight numbers from 0 to ``2**bits - 1``: of each byte, or int32, from an address on, the bits above the first
#: `shift`; or those of the first `count`, and zeros: nothing behind them is read.
load_byte_levels, load_some_byte_levels = _loading_levels(ir.IntType(8))
load_int_levels, load_some_int_levels = _loading_levels(_COUNT)


@intrinsic
def store(typing_context, address, value):
    """Write a vector's numbers from an address on."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], arguments[1].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, value), generate


def _interleaved(builder, vectors):
    """Alternate, lane by lane, the first half of some vectors with the second half."""
    count = len(vectors)
    made = []
    for one, other in zip(vectors[: count // 2], vectors[count // 2 :], strict=True):
        for start in (0, count // 2):
            lanes_of_both = [start + lane // 2 + lane % 2 * count for lane in range(count)]
            made.append(builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_COUNT, count), lanes_of_both)))
    return made


@intrinsic
def transpose_widest(typing_context, places, offset, to, step):
    """Write a square of `WIDEST` rows of as many numbers as columns.

    Rows are `offset` bytes behind the addresses that stand, as int64, from `places` on; columns go to `to`, each `step`
    bytes behind the one before.
    """

    def generate(context, builder, signature, arguments):
        places, offset, to, step = arguments
        address, vector = ir.IntType(64), ir.VectorType(_NUMBER, WIDEST)
        rows = []
        for number in range(WIDEST):
            place = builder.add(places, ir.Constant(places.type, 8 * number))
            row = builder.add(builder.load(builder.inttoptr(place, address.as_pointer()), align=8), offset)
            rows.append(builder.load(builder.inttoptr(row, vector.as_pointer()), align=4))
        for _ in range(WIDEST.bit_length() - 1):  # a perfect shuffle of all numbers, as often as halving leaves one
            rows = _interleaved(builder, rows)
        for column in rows:
            builder.store(column, builder.inttoptr(to, vector.as_pointer()), align=4)
            to = builder.add(to, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def store_some(typing_context, address, value, count):
    """Write the first `count` of eight numbers from an address on."""

    def generate(context, builder, signature, arguments):
        address, value, count = arguments
        pointer, name = builder.inttoptr(address, _VECTOR.as_pointer()), f"llvm.masked.store.v{LANES}f32.p0"
        _call(builder, name, ir.VoidType(), [value, pointer, ir.Constant(_COUNT, 4), _first(builder, count)])
        return context.get_dummy_value()

    return types.void(types.intp, lanes, types.intp), generate


@intrinsic
def load_one(typing_context, address):
    """The number at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _NUMBER.as_pointer()), align=4)

    return types.float32(types.intp), generate


@intrinsic
def add_one(typing_context, counter):
    """Return what stood in the first entry of an array of int64, to which 1 is added; for one thread at a time."""
    return types.int64(counter), _adding(1)


@intrinsic
def count_now(typing_context, counter):
    """The first entry of an array of int64, as `add_one` of any thread has left it, and all that was written before."""
    return types.int64(counter), _adding(0)


def _adding(number):
    """Return what generates the addition of a number to the first entry of an array, in one step for all threads."""

    def generate(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), number), "seq_cst")

    return generate


@intrinsic
def load_byte(typing_context, address):
    """The byte at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()), align=1)

    return types.uint8(types.intp), generate


@intrinsic
def load_place(typing_context, address):
    """The int64 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=8)

    return types.int64(types.intp), generate


@intrinsic
def store_one(typing_context, address, value):
    """Write a number to an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], _NUMBER.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


def prefetch_instruction(builder, address, near=2):
    """The instruction of `prefetch`, for others that are written as LLVM instructions; 2: not to the nearest cache."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    # To read (0), how near, data and not instructions (1).
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *(ir.Constant(_COUNT, n) for n in (0, near, 1))])


@intrinsic
def prefetch(typing_context, address):
    """Have the processor fetch the cache line of an address without waiting for it; any address will do."""

    def generate(context, builder, signature, arguments):
        prefetch_instruction(builder, arguments[0], near=3)
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def compute(typing_context, number):
    """Have the processor compute an int64, for what that brings into its caches; nothing is done with it."""

    def generate(context, builder, signature, arguments):
        taking = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.asm(taking, "", "r", arguments, side_effect=True)  # no instruction at all
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _spread(builder, value, kind):
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_COUNT, 0))
    places = ir.Constant(ir.VectorType(_COUNT, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), places)


def _spreading(kind):
    @intrinsic
    def spread_number(typing_context, value):
        def generate(context, builder, signature, arguments):
            return _spread(builder, arguments[0], kind.vector)

        return kind(types.int32 if kind.whole else types.float32), generate

    return spread_number


#: The same number in all of eight, `WIDEST` or four lanes, or int32 in `WIDEST`.
spread, spread_widest, spread_four, spread_whole = (_spreading(kind) for kind in (lanes, widest, four, wholes))


@intrinsic
def load_short(typing_context, address):
    """The int32 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _COUNT.as_pointer()), align=4)

    return types.int32(types.intp), generate


def multiply_add_vectors(builder, a, b, c):
    """The instruction of `multiply_add`, for others that are written as LLVM instructions."""
    return _call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, [a, b, c])


@intrinsic
def multiply_add(typing_context, a, b, c):
    """Return ``a * b + c``, rounded once where the processor can."""

    def generate(context, builder, signature, arguments):
        return multiply_add_vectors(builder, *arguments)

    return a(a, a, a), generate


def _arithmetic(operation, floating, whole):
    """Define what an operator does with two vectors; numba compiles no function for it, as it would for an overload."""

    @type_callable(operation)
    def of_two(_):
        return lambda a, b: a if isinstance(a, Lanes) and a == b and (whole if a.whole else floating) else None

    @lower_builtin(operation, Lanes, Lanes)
    def generate(context, builder, signature, arguments):
        return getattr(builder, whole if signature.args[0].whole else floating)(*arguments)


_arithmetic(operator.add, "fadd", "add")
_arithmetic(operator.sub, "fsub", "sub")
_arithmetic(operator.mul, "fmul", None)
_arithmetic(operator.truediv, "fdiv", None)
_arithmetic(operator.and_, None, "and_")
_arithmetic(operator.or_, None, "or_")
_arithmetic(operator.xor, None, "xor")
_arithmetic(operator.lshift, None, "shl")
_arithmetic(operator.rshift, None, "lshr")


def _selecting(comparison):
    @intrinsic
    def choose(typing_context, a, b):
        def generate(context, builder, signature, arguments):
            a, b = arguments
            return builder.select(builder.fcmp_ordered(comparison, b, a), b, a)

        return a(a, a), generate

    return choose


#: Lane by lane; where `a` is NaN so is the result, where only `b` is, the result is `a`.
greater, smaller = _selecting(">"), _selecting("<")


@intrinsic
def where_less(typing_context, a, b, one, other):
    """Return, lane by lane, `one` where ``a < b``, and `other` elsewhere; both numbers or both int32."""

    def generate(context, builder, signature, arguments):
        a, b, one, other = arguments
        return builder.select(builder.fcmp_ordered("<", a, b), one, other)

    return one(a, a, one, one), generate


def _folding(combine):
    @intrinsic
    def fold(typing_context, value):
        def generate(context, builder, signature, arguments):
            vector, width = arguments[0], value.count
            while width > 1:
                width //= 2
                low, high = (
                    builder.shuffle_vector(
                        vector, vector, ir.Constant(ir.VectorType(_COUNT, width), list(range(start, start + width)))
                    )
                    for start in (0, width)
                )
                vector = combine(builder, low, high)
            return builder.extract_element(vector, ir.Constant(_COUNT, 0))

        return types.float32(value), generate

    return fold


#: Of all lanes, always in the same order.
total = _folding(lambda builder, a, b: builder.fadd(a, b))
greatest = _folding(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a))

# 2^f on [-1/2, 1/2]: the interpolating polynomial at Chebyshev nodes, highest power first; off by less than 3e-9.
_POWERS = (
    0.00015461444724808513,
    0.0013400428177711937,
    0.00961805667843204,
    0.05550327226669895,
    0.24022650922289554,
    0.6931472067028329,
    1.0,
)


@intrinsic
def exp2(typing_context, value):
    """Return 2 to the power of each lane: 0 below -126, never more than 2^126, NaN for NaN."""

    def generate(context, builder, signature, arguments):
        x = arguments[0]
        vector, whole = x.type, ir.VectorType(_COUNT, x.type.count)
        highest, lowest, magic = (_constant(number, vector) for number in (126.0, -126.0, 1.5 * 2.0**23))
        x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
        # Adding and taking away 1.5 * 2^23 rounds to an integer, which then stands in the sum's lowest bits.
        rounded = builder.fadd(x, magic)
        fraction = builder.fsub(x, builder.fsub(rounded, magic))
        power = _constant(_POWERS[0], vector)
        for coefficient in _POWERS[1:]:
            power = multiply_add_vectors(builder, power, fraction, _constant(coefficient, vector))
        exponent = builder.shl(builder.bitcast(rounded, whole), _constant(23, whole))
        power = builder.bitcast(builder.add(builder.bitcast(power, whole), exponent), vector)
        power = builder.select(builder.fcmp_ordered("<", x, lowest), _constant(0.0, vector), power)
        return builder.select(builder.fcmp_unordered("uno", x, x), x, power)

    return value(value), generate
