"""Environment variables that turn code off: each costs speed, and changes answers by rounding at most.

``GRACE_OPT_TRITON=0``: no GPU kernels. ``GRACE_OPT_LLVM=0``: no hand-written LLVM; plain loops or torch compute the
same. ``GRACE_OPT_OPENMP=0``: compiled decoding, sums of attention and codes of heads run in our own threads instead of
torch's. ``GRACE_OPT_PLAIN=0``: loops that are not compiled yet never run as plain Python, however little they have to
do. ``GRACE_OPT_AHEAD=0``: machine code that a wheel has is left alone, and loops are compiled here. Set them before
the library is imported: they do not change a loop that is already loaded, and each is looked up once.

With ``read=`` and a tolerance, rounding may decide whether one more unit of tokens is read.
"""

from __future__ import annotations

import os
from functools import cache

TRITON, LLVM, OPENMP = "GRACE_OPT_TRITON", "GRACE_OPT_LLVM", "GRACE_OPT_OPENMP"
PLAIN, AHEAD = "GRACE_OPT_PLAIN", "GRACE_OPT_AHEAD"


@cache  # every layer looks it up in every step, and os.environ takes some microseconds to say that it has no such name
def is_off(switch: str) -> bool:
    """Return whether the environment turns this off.

    Examples
    --------
    >>> is_off("GRACE_OPT_NOTHING")
    False
    """
    return os.environ.get(switch) == "0"
