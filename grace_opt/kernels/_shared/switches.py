"""What the environment can turn off: each switch costs speed, not answers.

``GRACE_OPT_TRITON=0``: no kernels for the GPU. ``GRACE_OPT_LLVM=0``: no loop that is written as LLVM instructions;
plain loops, or torch, do the same. ``GRACE_OPT_OPENMP=0``: compiled decoding runs in threads of our own, not in
torch's. Set them before the library is imported: a loop that is loaded stays as it is.
"""

from __future__ import annotations

import os

TRITON, LLVM, OPENMP = "GRACE_OPT_TRITON", "GRACE_OPT_LLVM", "GRACE_OPT_OPENMP"


def is_off(switch: str) -> bool:
    """Whether the environment turns this off.

    Examples
    --------
    >>> is_off("GRACE_OPT_NOTHING")
    False
    """
    return os.environ.get(switch) == "0"
