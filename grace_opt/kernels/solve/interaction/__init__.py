"""The interaction matrix W of queries and keys: a Triton kernel reads the keys once on a GPU; torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ...._util.arrays import working_dtype
from ..._shared.dispatch import use_triton
from ..._shared.limits import LARGEST_ON_CHIP
from ..._shared.operation import Operation, Triton, trial_of
from . import reference
from .reference import Check

KERNEL = Triton("weights", f"heads up to {LARGEST_ON_CHIP} wide, not float64", trial_of(__name__, "gpu"))
OPERATION = Operation("interaction", "W from queries and keys", gpu=(KERNEL,))


def interaction_matrix(
    queries: Tensor, keys: Tensor, valid: Tensor | None = None, check: Check | None = None
) -> Tensor:
    """Compute W (..., H_kv, d, d) of queries (..., H_q, L_obs, d) and keys (..., H_kv, L, d).

    Parameters
    ----------
    queries, keys : Tensor
        Tensors of matching shapes.
    valid : Tensor (..., L), bool, optional
        False for padding.
    check : callable, optional
        As in the reference; called only on the CPU, because on other devices it would wait.
    """
    if use_triton(KERNEL, keys.device, unsupported_reason(queries, keys)):
        from .gpu import interaction_matrix as on_chip

        q, k = (part.reshape(-1, *part.shape[-3:]) for part in (queries, keys))
        W = on_chip(q, k, None if valid is None else valid.reshape(-1, keys.shape[-2]))
        return W.reshape(*keys.shape[:-2], *W.shape[-2:])
    dtype = torch.promote_types(working_dtype(queries.dtype), working_dtype(keys.dtype))
    on_cpu = keys.device.type == "cpu"
    return reference.interaction_matrix(queries.to(dtype), keys.to(dtype), valid, check if on_cpu else None)


def unsupported_reason(queries: Tensor, keys: Tensor) -> str | None:
    """Return why the GPU's kernel does not support these, or None."""
    if torch.float64 in (queries.dtype, keys.dtype):
        return "it computes in float32, and the inputs are float64"
    if keys.shape[-1] > LARGEST_ON_CHIP:
        return f"heads are wider than {LARGEST_ON_CHIP}"
    return None
