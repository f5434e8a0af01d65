"""Attention of a few new queries over tokens coded in a few bits, read in place: by Triton on a GPU, by compiled loops
on the CPU.

Elsewhere callers make keys and values dense, which defines the result and takes many times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._shared import dispatch
from ..._shared.operation import Compiled, Operation, Triton, trial_of
from ..decode import MAX_KERNEL_QUERIES
from .host import coded_attention, unsupported_reason
from .table import CodedSequence as CodedSequence
from .turned import turned_products as turned_products

#: Fewer coded tokens are made dense in less time than compiling would take.
CPU_MIN_TOKENS = 256

IN_PLACE = Triton(
    "decoding on coded tokens",
    f"up to {MAX_KERNEL_QUERIES} new tokens, heads up to 256 wide, not float64",
    trial_of(__name__, "gpu"),
)
OPERATION = Operation(
    "coded",
    "decoding on coded keys and values",
    reference=False,
    cpu=Compiled(
        f"from {CPU_MIN_TOKENS} coded tokens on, not float64", trial_of(__name__, "cpu"), "torch, on dense copies"
    ),
    gpu=(IN_PLACE,),
)


def kernel_for(query: Tensor, tail_keys: Tensor, tail_values: Tensor, stored: int) -> Callable[..., Any] | None:
    """Return the `coded_attention` that supports these tensors, or None.

    None as well if making `stored` coded tokens dense may be faster.
    """
    if torch.compiler.is_compiling():
        return None
    if query.device.type == dispatch.DEVICE_TYPE:
        return _on_gpu(query, tail_keys, tail_values)
    if stored < CPU_MIN_TOKENS:
        return None
    return coded_attention if unsupported_reason(query, tail_keys, tail_values) is None else None


def _on_gpu(query: Tensor, tail_keys: Tensor, tail_values: Tensor) -> Callable[..., Any] | None:
    tensors = query, tail_keys, tail_values
    if query.shape[2] > MAX_KERNEL_QUERIES or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return None
    if not dispatch.use_triton(IN_PLACE, query.device):
        return None
    from . import gpu

    usable = dispatch.use_triton(IN_PLACE, query.device, gpu.unsupported_reason(*tensors))
    return gpu.coded_attention if usable else None
