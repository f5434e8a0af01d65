"""The inner loops of greedy, exchanges and checks of W: hand-written LLVM, or plain loops with ``GRACE_OPT_LLVM=0``.

docs/adr/0009-hand-made-llvm.md says what the LLVM version gains and which library versions support it.
"""

from __future__ import annotations

from .switches import LLVM, is_off

if is_off(LLVM):
    from . import stand_ins
    from .jit import inlined

    SIDE = stand_ins.SIDE
    add_twice, prefetch, differ = inlined(stand_ins.add_twice), inlined(stand_ins.prefetch), inlined(stand_ins.differ)
    first_place, largest_bits = inlined(stand_ins.first_place), inlined(stand_ins.largest_bits)
    least, least_exchange = inlined(stand_ins.least), inlined(stand_ins.least_exchange)
else:
    from .vectors import SIDE, add_twice, differ, first_place, largest_bits, least, least_exchange, prefetch

__all__ = ["SIDE", "add_twice", "differ", "first_place", "largest_bits", "least", "least_exchange", "prefetch"]
