"""Attention of a few new queries over tokens coded in a few bits, read where they lie. Compiled for the CPU.

Elsewhere callers make keys and values dense, which defines the result and takes many times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._shared.operation import Compiled, Operation, trial_of
from .host import coded_attention, unsupported_reason
from .table import CodedSequence as CodedSequence

#: Fewer coded tokens are made dense in less time than compiling would take.
CPU_MIN_TOKENS = 256

OPERATION = Operation(
    "coded",
    "decoding on coded keys and values",
    reference=False,
    cpu=Compiled(
        f"from {CPU_MIN_TOKENS} coded tokens on, not float64", trial_of(__name__, "cpu"), "torch, on dense copies"
    ),
)


def kernel_for(query: Tensor, tail_keys: Tensor, tail_values: Tensor, stored: int) -> Callable[..., Any] | None:
    """Return `coded_attention` if it supports these tensors and may be faster over `stored` coded tokens, or None."""
    if torch.compiler.is_compiling() or stored < CPU_MIN_TOKENS:
        return None
    return coded_attention if unsupported_reason(query, tail_keys, tail_values) is None else None
