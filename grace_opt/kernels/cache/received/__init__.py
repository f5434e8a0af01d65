"""Attention that keys receive from many queries: weighted sums of p and of p², without causality.

In torch, or compiled for the CPU: there, logits never leave the processor's cache. Both agree to float32's rounding.
"""

from __future__ import annotations

from torch import Tensor

from ..._shared.operation import Compiled, Operation, trial_of
from ..._shared.switches import LLVM, is_off
from ..._shared.threads import COMPILE_FROM, worth_compiling
from . import reference

OPERATION = Operation(
    "received",
    "attention that a prompt's keys receive",
    cpu=Compiled(
        f"once a process has made {COMPILE_FROM:,} logits, without softcap", trial_of(__name__, "cpu"), "torch"
    ),
)


def attention_received(
    queries: Tensor, weights: Tensor, keys: Tensor, scaling: float, softcap: float | None, most: int
) -> tuple[Tensor, Tensor]:
    """Return the sums of p and of p² over queries, times their weights, ``(H, S)`` float32 each.

    Parameters
    ----------
    queries : Tensor (H, R, d)
    weights : Tensor (R,), float32
    keys : Tensor (H, S, d)
    scaling : float
        Logits are products times this.
    softcap : float or None
        Logits x become ``softcap * tanh(x / softcap)``.
    most : int
        Largest number of logits that the reference makes at once.
    """
    if (
        keys.device.type == "cpu"
        and softcap is None
        and not is_off(LLVM)
        and worth_compiling(queries.shape[:2].numel() * keys.shape[1])
    ):
        from .host import attention_received as compiled

        return compiled(queries, weights, keys, scaling)
    return reference.attention_received(queries, weights, keys, scaling, softcap, most)
