"""Attention of one new token over few of the tokens coded in a few bits: the high bits of all keys say which, and bound
the attention of the others.

On the CPU compiled loops, which read codes where they lie. Elsewhere callers unpack all codes for
`grace_opt.kernels.reading.reference`, which defines the result and takes many times as long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._shared.operation import Compiled, Operation, trial_of
from ..coded import CPU_MIN_TOKENS
from .host import FewCoded as FewCoded
from .host import few_coded_attention, unsupported_reason
from .table import Lying as Lying

OPERATION = Operation(
    "few_coded",
    "attention over few of the coded tokens",
    reference=False,
    cpu=Compiled(
        f"from {CPU_MIN_TOKENS} coded tokens on, not float64", trial_of(__name__, "cpu"), "torch, on dense copies"
    ),
)


def kernel_for(query: Tensor, tail_keys: Tensor, tail_values: Tensor, stored: int) -> Callable[..., FewCoded] | None:
    """Return the `few_coded_attention` that supports these tensors, of one new token, or None.

    None as well if torch may be faster, with `stored` coded tokens.
    """
    if torch.compiler.is_compiling() or stored < CPU_MIN_TOKENS:
        return None
    return few_coded_attention if unsupported_reason(query, tail_keys, tail_values) is None else None
