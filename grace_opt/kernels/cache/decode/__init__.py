"""Choose the kernel for attention of a few new queries over a pruned key cache, dense or in a few bits.

On a GPU it is Triton's, on the CPU the compiled one. `reference` runs if none fits, if weights, dropout or gradients
are needed, and while ``torch.compile`` is tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._shared import dispatch
from ..._shared.operation import Compiled, Operation, Triton, trial_of
from . import host
from .packed import Packed, PackedKeys, PackedValues

#: The GPU's kernel takes few new tokens, the CPU's one: for more, a library's matrix products are faster.
MAX_KERNEL_QUERIES = 8
#: On the CPU, torch reads fewer stored tokens than this as fast, because it has less to set up. In few bits, reading
#: fewer takes so little time that compiling would not pay off.
CPU_MIN_TOKENS, CPU_MIN_TOKENS_IN_FEW_BITS = 2048, 256

_ON_GPU = f"up to {MAX_KERNEL_QUERIES} new tokens, heads up to 256 wide, not float64"
DENSE = Triton("decoding", _ON_GPU, trial_of(__name__, "gpu"))
IN_FEW_BITS = Triton("decoding in few bits", _ON_GPU, trial_of(__name__, "gpu_in_few_bits"))
OPERATION = Operation(
    "decode",
    "decoding on pruned keys",
    cpu=Compiled(
        f"float32, one new token, from {CPU_MIN_TOKENS:,} stored ones on, or {CPU_MIN_TOKENS_IN_FEW_BITS} in few bits",
        trial_of(__name__, "cpu"),
        "torch",
    ),
    gpu=(DENSE, IN_FEW_BITS),
)


def worth_a_kernel(query: Tensor, stored: int, few_bits: bool) -> bool:
    """Return whether a kernel may be faster for queries ``(B, H_q, L, d)`` over `stored` tokens.

    Called before anything is packed: a table that no kernel reads would only waste memory.
    """
    if torch.compiler.is_compiling() or query.shape[2] > MAX_KERNEL_QUERIES:
        return False
    if query.device.type == dispatch.DEVICE_TYPE:
        return True
    return query.shape[2] == 1 and query.dtype == torch.float32 and stored >= _least(few_bits)


def _least(few_bits: bool) -> int:
    return CPU_MIN_TOKENS_IN_FEW_BITS if few_bits else CPU_MIN_TOKENS


def kernel_for(
    query: Tensor,
    pruned_keys: Tensor | PackedKeys,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor | PackedValues,
    tail_values: Tensor,
) -> Callable[..., Any] | None:
    """Return the ``decode_attention`` that supports these tensors, or None.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, L, d)``, floating.
    pruned_keys : Tensor or PackedKeys
        ``(B, H, S_p, d')``.
    sink_keys, tail_keys : Tensor
        ``(B, H, s, d)`` and ``(B, H, S_t, d)``.
    old_values : Tensor or PackedValues
        ``(B, H, s + S_p, d_v)``.
    tail_values : Tensor
        ``(B, H, S_t, d_v)``.
    """
    stored = query, pruned_keys, sink_keys, tail_keys, old_values, tail_values
    if query.device.type != dispatch.DEVICE_TYPE:
        return host.decode_attention if host.unsupported_reason(*stored) is None else None
    kernel = IN_FEW_BITS if any(isinstance(tensor, Packed) for tensor in stored) else DENSE
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in stored):
        return None
    if not dispatch.use_triton(kernel, query.device):
        return None
    from . import gpu

    usable = dispatch.use_triton(kernel, query.device, gpu.unsupported_reason(*stored))
    return gpu.decode_attention if usable else None
