r"""From attention to a problem: the interaction matrix of queries and keys, and the channels to protect.

Dropping the key channels P changes the logits by :math:`\sum_{i \in P} q_i k_i^\top`, whose squared Frobenius norm is
:math:`1_P^\top W 1_P` with :math:`W = (Q^\top Q) \circ (K^\top K)`.
Source: GRACE (arXiv 2604.16983), sections 3.1 to 3.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._util.array_like import as_tensor
from .._util.arrays import backend_of, to_float_tensor, working_dtype
from .._util.parameters import integer, number
from ..errors import OptionError, ProblemError
from ..kernels.solve.interaction import interaction_matrix as kernel

#: Our bounds [a, b] on the protected proportion; the paper states none.
PROTECT_LOW, PROTECT_HIGH = 0.05, 0.15


def prune_count(ratio: float, d: int) -> int:
    """Return how many of d channels a ratio prunes: ⌈ratio · d⌉, as in the paper.

    Parameters
    ----------
    ratio : float
        In [0, 1).
    d : int
        Number of channels.

    Raises
    ------
    OptionError
        If `ratio` is outside [0, 1), or `d` is negative or no integer.

    Examples
    --------
    >>> prune_count(0.6, 128), prune_count(0.7, 10)
    (77, 7)
    """
    d = integer("d", d, at_least=0, hint="the number of channels")
    ratio = number("ratio", ratio, at_least=0, below=1, hint="the share of channels to prune, for instance 0.6")
    # .7 * 10 is 7.000000000000001 in floating point: round away the error.
    return math.ceil(round(ratio * d, 9))


def interaction_matrix(queries: Any, keys: Any, attention_mask: Any = None) -> Any:
    r"""Compute the interaction matrix of every KV head, :math:`W = (Q^\top Q) \circ (K^\top K)`.

    Parameters
    ----------
    queries : array (..., H_q, L_obs, d)
        Observed queries after RoPE, at the last L_obs positions. The query heads of a group are stacked, so
        grouped-query attention is treated exactly.
    keys : array (..., H_kv, L, d)
        Cached keys after RoPE; H_q is a multiple of H_kv.
    attention_mask : array (..., L), optional
        True (or 1) for real tokens. Padding is excluded from the keys and, at the last L_obs positions, from the
        queries.

    Returns
    -------
    array (..., H_kv, d, d)
        float32 (float64 if the inputs are), symmetric, positive semidefinite up to rounding.

    Raises
    ------
    ProblemError
        If shapes do not fit (L_obs > L, H_q not a multiple of H_kv, different d or leading dimensions), or if numbers
        are not finite, or their products too large.

    Notes
    -----
    O(H_q L_obs d² + H_kv L d²). Half-precision inputs are accumulated in float32. On a GPU, for d up to 256, a Triton
    kernel reads the keys once, without a copy; otherwise they are copied to float32.

    References
    ----------
    GRACE, arXiv 2604.16983, equations 5 to 7.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> W = interaction_matrix(rng.normal(size=(4, 8, 16)), rng.normal(size=(2, 32, 16)))
    >>> W.shape
    (2, 16, 16)
    """
    backend = backend_of(queries, keys, attention_mask)
    q, k = to_float_tensor(queries, "queries"), to_float_tensor(keys, "keys")
    check_shapes(q, k)
    valid = None if attention_mask is None else valid_tokens(attention_mask, k)
    return backend.export(kernel(q, k, valid, _refuse_out_of_range))


def _refuse_infinite(norms: Tensor) -> None:
    if not bool(norms.isfinite().all()):
        raise ProblemError("keys hold numbers that are not finite, or so large that their norms are not: look for NaN.")


def _refuse_out_of_range(q: Tensor, k: Tensor, of_queries: Tensor, of_keys: Tensor) -> None:
    """Raise if W would overflow, or lose its digits near zero."""
    limits = torch.finfo(of_queries.dtype)
    # W is positive semidefinite: its largest entry is on the diagonal.
    diagonals = [product.diagonal(dim1=-2, dim2=-1).to(torch.float64) for product in (of_queries, of_keys)]
    reach = (diagonals[0] * diagonals[1]).amax(-1)
    if not bool(reach.isfinite().all()) or bool((reach > limits.max).any()):
        raise ProblemError(
            "queries or keys hold numbers that are not finite, or so large that W leaves "
            f"{str(of_queries.dtype).removeprefix('torch.')}: look for NaN, or divide them by a power of two."
        )
    small = reach < limits.tiny / limits.eps
    if bool(small.any()) and bool((small & (q != 0).any(-1).any(-1) & (k != 0).any(-1).any(-1)).any()):
        raise ProblemError(
            f"queries and keys are so small that W, at most {float(reach.min()):.3g} in a head, loses its digits in "
            f"{str(of_queries.dtype).removeprefix('torch.')}: multiply them by a power of two."
        )


def salient_channels(
    keys: Any, low: float = PROTECT_LOW, high: float = PROTECT_HIGH, attention_mask: Any = None
) -> Any:
    r"""Return the channels that must not be pruned: those with an unusually large key column.

    A channel is salient if its L2 norm over the tokens exceeds mean + one standard deviation (ddof 0) of its head's
    channels. The proportion p of salient channels is clamped to [low, high]; the top ⌊p d + ½⌋ channels by norm are
    protected.

    Parameters
    ----------
    keys : array (..., L, d)
        Cached keys after RoPE.
    low, high : float
        0 <= low <= high <= 1.
    attention_mask : array, optional
        True for real tokens, shape (..., L) without the head dimension of `keys` (..., H_kv, L, d); (L,) for keys
        (L, d).

    Returns
    -------
    array (..., d), bool
        True = protected.

    Raises
    ------
    OptionError
        Unless 0 <= low <= high <= 1.
    ProblemError
        If shapes do not fit, or keys are not finite.

    Notes
    -----
    O(L d) per head. Ties go to the lowest index.

    References
    ----------
    GRACE, arXiv 2604.16983, section 3.4. The paper does not state [a, b]; the defaults are ours.

    Examples
    --------
    >>> import numpy as np
    >>> keys = np.ones((10, 20)); keys[:, 3] = 50.0
    >>> salient_channels(keys).nonzero()[0]
    array([3])
    """
    check_protection((low, high))
    backend = backend_of(keys, attention_mask)
    k = to_float_tensor(keys, "keys")
    if k.ndim < 2:
        raise ProblemError(f"keys has shape {tuple(k.shape)}: expected (..., L, d).")
    k = k.to(working_dtype(k.dtype))
    if attention_mask is not None:
        valid = valid_tokens(attention_mask, k)[..., None]
        k = k.masked_fill(~(valid if k.ndim == 2 else valid.unsqueeze(-3)), 0.0)
    norms = torch.linalg.vector_norm(k, dim=-2)
    if norms.device.type == "cpu":  # on other devices this would wait
        _refuse_infinite(norms)
    d = norms.shape[-1]
    salient = norms > norms.mean(-1, keepdim=True) + norms.std(-1, correction=0, keepdim=True)
    proportion = salient.to(norms.dtype).mean(-1, keepdim=True).clamp(low, high)
    count = (proportion * d + 0.5).floor()
    rank = norms.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return backend.export(rank < count)


def check_protection(protect: Any) -> tuple[float, float]:
    """Return the validated bounds (low, high) of the protected proportion."""
    try:
        low, high = (number("protect", bound) for bound in protect)
    except (TypeError, ValueError):  # an OptionError is both
        raise OptionError(
            f"protect={protect!r}: give (low, high), for instance ({PROTECT_LOW}, {PROTECT_HIGH})."
        ) from None
    if not 0 <= low <= high <= 1:
        raise OptionError(f"protection bounds low={low}, high={high}: must satisfy 0 <= low <= high <= 1.")
    return low, high


def check_shapes(q: Tensor, k: Tensor) -> None:
    """Raise unless queries and keys fit each other."""
    for name, t, heads in (("queries", q, "H_q, L_obs"), ("keys", k, "H_kv, L")):
        if t.ndim < 3 or t.numel() == 0:
            raise ProblemError(
                f"{name} has shape {tuple(t.shape)}: expected (..., {heads}, d), none of them empty. "
                f"For a single head, write {name}[None]."
            )
    if q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise ProblemError(
            f"queries {tuple(q.shape)} and keys {tuple(k.shape)} differ in head_dim (last) or in leading dimensions."
        )
    if q.shape[-3] % k.shape[-3]:
        raise ProblemError(f"{q.shape[-3]} query heads are not a multiple of {k.shape[-3]} KV heads.")
    if q.shape[-2] > k.shape[-2]:
        raise ProblemError(
            f"L_obs = {q.shape[-2]} queries are more than L = {k.shape[-2]} keys: "
            f"pass the last queries only, queries[..., -{k.shape[-2]}:, :]."
        )


def valid_tokens(attention_mask: Any, keys: Tensor) -> Tensor:
    """Return a checked mask as a bool tensor ``(..., L)``, True for real tokens."""
    expected = (*keys.shape[:-3], keys.shape[-2])
    wanted = f"a mask of shape {expected}: True (or 1) for real tokens, False for padding"
    given = as_tensor(attention_mask, "attention_mask", wanted).to(keys.device)
    valid = given != 0
    if given.dtype.is_floating_point and not bool((given >= 0).all()):
        raise ProblemError(
            "attention_mask holds negative numbers or NaN: give True (or 1) for real tokens, False for padding. In "
            "a mask that is added to logits 0 stands for real tokens: write attention_mask == 0."
        )
    if valid.shape != expected:
        raise ProblemError(f"attention_mask has shape {tuple(valid.shape)}: expected {expected}, True for real tokens.")
    return valid
