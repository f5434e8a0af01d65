"""The inner loops of greedy, of exchanges and of the checks of W: hand-made LLVM, or plain with ``GRACE_OPT_LLVM=0``.

docs/adr/0009-hand-made-llvm.md has what the former gain, and which versions take them.
"""

from __future__ import annotations

from .switches import LLVM, is_off

if is_off(LLVM):
    from .plain import SIDE, add_twice, ask_for, differ, first_place, largest_bits, least, least_exchange
else:
    from .vectors import SIDE, add_twice, ask_for, differ, first_place, largest_bits, least, least_exchange

__all__ = ["SIDE", "add_twice", "ask_for", "differ", "first_place", "largest_bits", "least", "least_exchange"]
