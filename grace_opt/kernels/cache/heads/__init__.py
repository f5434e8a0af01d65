"""Code whole heads of keys or values: coordinates, weighted squares, the division of bits, codes. Compiled for the CPU
only; callers import `host` where they use it, and elsewhere take these steps one by one (`coding`, `steps`).

A head is done by one thread, in one pass over its tokens, where torch would start some fifty operations.
"""

from __future__ import annotations

from torch import Tensor

from ..._shared.operation import Compiled, Operation, trial_of
from ..._shared.switches import LLVM, is_off
from ..._shared.threads import COMPILE_FROM, enough_steps
from .parts import Coded as Coded
from .parts import Heads as Heads
from .parts import Tables as Tables

#: Numbers that a head has, at least, for its coding to be compiled: decided per head, so that ranks choose alike.
HEAD_FROM = COMPILE_FROM // 4

OPERATION = Operation(
    "heads",
    "coding of whole heads of keys and values",
    reference=False,
    cpu=Compiled(f"float32, from {HEAD_FROM:,} numbers per head on", trial_of(__name__, "cpu"), "torch, step by step"),
)


def is_compiled(*tensors: Tensor) -> bool:
    """Return whether heads ``(H, n, d)`` like these are coded by the compiled loop."""
    return not is_off(LLVM) and all(
        tensor.device.type == "cpu"
        and str(tensor.dtype) == "torch.float32"
        and tensor.stride(2) == 1
        and enough_steps(tensor[0].numel() * (COMPILE_FROM // HEAD_FROM))
        for tensor in tensors
    )
