r"""The interaction matrix :math:`W = (Q^\top Q) \circ (K^\top K)` in torch operations, for any device.

Source: GRACE (arXiv 2604.16983), equations 5 to 7.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

#: Checks the stacked queries, the keys, and the Gram matrix of each; raises if W would be unusable.
Check = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def interaction_matrix(
    queries: Tensor, keys: Tensor, valid: Tensor | None = None, check: Check | None = None
) -> Tensor:
    """Compute W (..., H_kv, d, d) of queries (..., H_q, L_obs, d) and keys (..., H_kv, L, d) of one floating type.

    Parameters
    ----------
    queries, keys : Tensor
    valid : Tensor (..., L), bool, optional
        False for padding, which is left out of the keys and, at the last L_obs positions, of the queries.
    check : callable, optional
        Called with the factors of W.
    """
    q, k = queries, keys
    if valid is not None:
        k = k.masked_fill(~valid[..., None, :, None], 0.0)
        q = q.masked_fill(~valid[..., None, -q.shape[-2] :, None], 0.0)
    stacked = q.reshape(*k.shape[:-2], q.shape[-3] // k.shape[-3] * q.shape[-2], q.shape[-1])
    of_queries, of_keys = stacked.mT @ stacked, k.mT @ k
    if check is not None:
        check(stacked, k, of_queries, of_keys)
    W = of_queries * of_keys
    return (W + W.mT) / 2  # matrix products are symmetric only up to rounding
