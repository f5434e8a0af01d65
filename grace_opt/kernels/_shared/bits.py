"""`Bits`: a numba type for 256 bits, such as one bit of each of 256 tokens, and counters that add up many of them.

Counters are stored as bits too, the ones of all tokens in one vector, the twos in the next: adding sixteen vectors
takes fifteen full adders, each a handful of logical operations for all tokens at once.

When: bits of many tokens are compared, and equal ones counted. LLVM splits vectors where registers are narrower.
Source: the adders are Harley's and Seal's; Warren, "Hacker's Delight" (2012), section 5-1.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from .limits import BITS, BITS_AT_ONCE

#: Bytes and words of a vector, and counters that stay in registers: of ones, twos, fours and eights.
BYTES, WORDS, SUMS = BITS // 8, BITS // 32, BITS_AT_ONCE.bit_length() - 1
_WORD = ir.IntType(32)
_WORDS = ir.VectorType(_WORD, WORDS)


class Bits(types.Type):
    """256 bits, in eight words."""

    def __init__(self):
        super().__init__(name="Bits256")


bits = Bits()


@register_model(Bits)
class _BitsModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _WORDS)


def _spread(builder, word):
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, [0] * WORDS))


def _load(builder, address, kind=_WORDS):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _differing(builder, address, words, place):
    """Return where a vector, one of those from an address on, is not the int32 of the same place."""
    vector = _load(builder, builder.add(address, ir.Constant(address.type, place * BYTES)))
    word = _load(builder, builder.add(words, ir.Constant(words.type, place * 4)), _WORD)
    return builder.xor(vector, _spread(builder, word))


@intrinsic
def load_bits(typing_context, address):
    """The bits from an address on."""

    def generate(context, builder, signature, arguments):
        return _load(builder, arguments[0])

    return bits(types.intp), generate


@intrinsic
def spread_bits(typing_context, word):
    """The same int32 in all words."""

    def generate(context, builder, signature, arguments):
        return _spread(builder, arguments[0])

    return bits(types.int32), generate


def _logical(method):
    @intrinsic
    def compute(typing_context, a, b):
        def generate(context, builder, signature, arguments):
            return getattr(builder, method)(*arguments)

        return a(a, a), generate

    def choose(a, b):
        return (lambda a, b: compute(a, b)) if isinstance(a, Bits) and a == b else None

    return choose


for _operator, _method in ((operator.and_, "and_"), (operator.or_, "or_"), (operator.xor, "xor")):
    overload(_operator)(_logical(_method))


def _comparing(count):
    @intrinsic
    def compare(typing_context, differences, address, words):
        def generate(context, builder, signature, arguments):
            differences, address, words = arguments
            for place in range(count):
                differences = builder.or_(differences, _differing(builder, address, words, place))
            return differences

        return differences(differences, types.intp, types.intp), generate

    return compare


#: `differences`, and where some of the vectors from an address on, one or four, are not those of as many int32.
differing, four_differing = _comparing(1), _comparing(4)


@intrinsic
def add_differing(typing_context, sums, address, words):
    """The counters of ones, twos, fours and eights, and what is carried on, after where each of sixteen vectors from an
    address on is not one of as many int32 has been added."""

    def generate(context, builder, signature, arguments):
        counters, address, words = cgutils.unpack_tuple(builder, arguments[0]), arguments[1], arguments[2]
        waiting = [[] for _ in range(SUMS + 1)]

        def add(level, carry):
            waiting[level].append(carry)
            if level == SUMS or len(waiting[level]) < 2:
                return
            (a, b), waiting[level] = waiting[level], []
            either = builder.xor(counters[level], a)
            carried = builder.or_(builder.and_(counters[level], a), builder.and_(either, b))
            counters[level] = builder.xor(either, b)
            add(level + 1, carried)

        for place in range(BITS_AT_ONCE):
            add(0, _differing(builder, address, words, place))
        return context.make_tuple(builder, signature.return_type, [*counters, *waiting[SUMS]])

    return types.UniTuple(bits, SUMS + 1)(sums, types.intp, types.intp), generate


@intrinsic
def append_bits(typing_context, numbers, word, first):
    """Eight numbers times two, plus eight bits of an int32 from the `first` one on: of eight tokens side by side."""

    def generate(context, builder, signature, arguments):
        numbers, word, first = arguments
        places = builder.add(_spread(builder, builder.trunc(first, _WORD)), ir.Constant(_WORDS, list(range(WORDS))))
        ones = ir.Constant(_WORDS, [1] * WORDS)
        return builder.or_(builder.shl(numbers, ones), builder.and_(builder.lshr(_spread(builder, word), places), ones))

    return numbers(numbers, types.int32, types.intp), generate
