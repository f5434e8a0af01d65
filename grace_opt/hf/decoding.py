"""Which code decodes on pruned keys: a kernel where one suits, and is faster, else the two-segment attention in torch.

On a GPU Triton's kernel, on the CPU the compiled one; both compute what
:func:`grace_opt.hf.pruned_attention.pruned_attention` defines, which does the work where attention weights, dropout or
gradients are asked for, and while ``torch.compile`` is tracing. What is quantised is read where it lies, unless it is
packed in 3 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import decode as on_cpu
from ..kernels.dispatch import DEVICE_TYPE, use_triton
from ..kernels.packed import Packed
from .pruned_attention import decoding_mask, pruned_attention
from .quantization import QuantizedTokens
from .storage import Compressed

#: The GPU's kernel is for few new tokens, the CPU's for one: more are better off with a library's matrix products.
MAX_KERNEL_QUERIES = 8
#: On the CPU, fewer stored tokens than this are read as fast by torch, which has less to set up, or, in few bits, in so
#: little time that nobody should wait for a compiler because of them.
CPU_MIN_TOKENS, CPU_MIN_TOKENS_IN_FEW_BITS = 2048, 256


def fused_attention(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: Compressed,
    want_weights: bool,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of new tokens over what is compressed and the dense tail.

    Parameters
    ----------
    module, query, tail, value, attention_mask, old
        As in :func:`~grace_opt.hf.pruned_attention.pruned_attention`.
    want_weights : bool
        Whether the attention weights are needed.
    **kwargs
        Of transformers' attention functions.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``.
    weights : Tensor or None
        ``(B, H_q, L, stored tokens)`` if they were asked for.
    """
    if not want_weights and not kwargs.get("dropout") and query.shape[2] <= MAX_KERNEL_QUERIES:
        output = _by_kernel(module, query, tail, value, attention_mask, old, **kwargs)
        if output is not None:
            return output, None
    output, weights = pruned_attention(module, query, tail, value, attention_mask, old, **kwargs)
    return output, weights if want_weights else None


def _by_kernel(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: Compressed,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> Tensor | None:
    """The output, or None if no kernel suits."""
    if torch.compiler.is_compiling():
        return None
    on_gpu = query.device.type == DEVICE_TYPE
    few_bits = any(isinstance(part, QuantizedTokens) for part in (old.pruned_keys, old.values))
    least = CPU_MIN_TOKENS_IN_FEW_BITS if few_bits else CPU_MIN_TOKENS
    # Before anything is packed: a table that no kernel reads would only take memory.
    if not on_gpu and (query.shape[2] > 1 or query.dtype != torch.float32 or old.stored + tail.shape[2] < least):
        return None
    keys, values = (
        part.packed if isinstance(part, QuantizedTokens) else part for part in (old.pruned_keys, old.values)
    )
    if keys is None or values is None:
        return None
    stored: tuple[Any, ...] = query, keys, old.sink_keys, tail, values, value
    if on_gpu:
        if (decode := _triton_decode(*stored)) is None:
            return None
    elif on_cpu.objection(*stored) is not None:
        return None
    else:
        decode = on_cpu.decode_attention
    if attention_mask is not None:
        attention_mask = decoding_mask(module, attention_mask, old, tail.shape[2], query.shape[1])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output: Tensor = decode(
        query, keys, old.kept_indices, old.sink_keys, tail, values, value, attention_mask, scaling, softcap, causal
    )
    return output


def _triton_decode(*stored: Any) -> Any:
    device, few_bits = stored[0].device, any(isinstance(part, Packed) for part in stored)
    kernel = "decoding in few bits" if few_bits else "decoding"
    if torch.is_grad_enabled() and any(part.requires_grad for part in stored):
        return None
    if not use_triton(kernel, device):
        return None
    from ..kernels.triton import decode

    return decode.decode_attention if use_triton(kernel, device, decode.objection(*stored)) else None
