"""The inner loops of greedy, exchanges and checks of W: hand-written LLVM, or plain loops with ``GRACE_OPT_LLVM=0``.

docs/adr/0009-hand-made-llvm.md says what the LLVM version gains and which library versions support it.
"""

from __future__ import annotations

from .switches import LLVM, is_off

if is_off(LLVM):
    from . import plain
    from .jit import part

    SIDE = plain.SIDE
    add_twice, ask_for, differ = part(plain.add_twice), part(plain.ask_for), part(plain.differ)
    first_place, largest_bits = part(plain.first_place), part(plain.largest_bits)
    least, least_exchange = part(plain.least), part(plain.least_exchange)
else:
    from .vectors import SIDE, add_twice, ask_for, differ, first_place, largest_bits, least, least_exchange

__all__ = ["SIDE", "add_twice", "ask_for", "differ", "first_place", "largest_bits", "least", "least_exchange"]
