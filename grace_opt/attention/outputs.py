r"""`output_matrix`: W of queries, keys and values, by which pruned channels change the attention's output least.

Dropping the key channels P changes the logits of query t by :math:`\delta_{ts} = \sum_{i \in P} q_{ti} k_{si}`, and to
first order its output by :math:`\sum_s p_{ts} \delta_{ts} (v_s - o_t)`: a sum of one vector per channel. The squared
lengths of all such sums are :math:`1_P^\top W 1_P`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._util.arrays import backend_of, to_float_tensor, working_dtype
from .._util.parameters import number
from ..errors import ProblemError
from .weights import check_shapes, valid_tokens

#: A query's own last keys do not count: they stay dense in a cache (``recent_window``), for later queries too.
NEAR = 32
#: Numbers that are held at once: products of keys and values, and outputs per channel.
MAX_NUMBERS = 2**24


def output_matrix(
    queries: Any, keys: Any, values: Any, attention_mask: Any = None, *, scaling: float | None = None
) -> Any:
    r"""Compute W of every KV head, by the first-order change of the attention's output.

    .. math::
        W_{ij} = \sum_t \langle a_{ti}, a_{tj} \rangle, \qquad
        a_{ti} = \tau\, q_{ti} \sum_s p_{ts}\, k_{si}\, (v_s - o_t)

    over the queries t of a group and the keys s at least `NEAR` tokens before them, with the attention p, its output o
    and the scaling τ.

    Parameters
    ----------
    queries : array (..., H_q, L_obs, d)
        Observed queries after RoPE, at the last L_obs positions.
    keys : array (..., H_kv, L, d)
        Cached keys after RoPE; H_q is a multiple of H_kv.
    values : array (..., H_kv, L, d_v)
        Cached values.
    attention_mask : array (..., L), optional
        True (or 1) for real tokens. Padding is left out.
    scaling : float, optional
        τ, by which the model multiplies the logits; by default 1/√d.

    Returns
    -------
    array (..., H_kv, d, d)
        float32 (float64 if an input is), symmetric, positive semidefinite up to rounding.

    Raises
    ------
    OptionError
        If `scaling` is not positive.
    ProblemError
        If shapes do not fit, as for `interaction_matrix`, or if numbers are not finite, too large or too small.

    Notes
    -----
    O(H_q L_obs L d d_v). Rows of at most `NEAR` real tokens have no key that is so far from all queries: all of their
    keys count. A soft cap of the logits is not taken into account.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(4, 8, 16)), rng.normal(size=(2, 64, 16)), rng.normal(size=(2, 64, 24))
    >>> output_matrix(q, k, v).shape
    (2, 16, 16)
    """
    backend = backend_of(queries, keys, values, attention_mask)
    given = (to_float_tensor(each, name) for each, name in zip((queries, keys, values), _NAMES, strict=True))
    q, k, v = given
    check_shapes(q, k)
    if v.shape[:-1] != k.shape[:-1] or not v.shape[-1]:
        raise ProblemError(f"values has shape {tuple(v.shape)}: expected {tuple(k.shape[:-1])} and at least one entry.")
    factor = k.shape[-1] ** -0.5 if scaling is None else number("scaling", scaling, above=0)
    dtype = torch.promote_types(torch.promote_types(*(working_dtype(each.dtype) for each in (q, k))), v.dtype)
    valid = None if attention_mask is None else valid_tokens(attention_mask, k)
    q, k, v = (each.to(working_dtype(dtype)) for each in (q, k, v))
    if valid is not None:
        k, v = (each.masked_fill(~valid[..., None, :, None], 0.0) for each in (k, v))
        q = q.masked_fill(~valid[..., None, -q.shape[-2] :, None], 0.0)
    W = _output_matrix(q, k, v, valid, factor)
    if W.device.type == "cpu":  # on other devices this would wait
        _refuse_out_of_range(v, W)
    return backend.export(W)


_NAMES = ("queries", "keys", "values")


def _output_matrix(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, scaling: float) -> Tensor:
    """Return W of numbers of one type, padding zeroed."""
    (length, d), observed, width = k.shape[-2:], q.shape[-2], v.shape[-1]
    heads = k.shape[:-2].numel()
    grouped = q.reshape(heads, -1, observed, d)
    key, value = k.reshape(heads, length, d), v.reshape(heads, length, width)
    seen, far = (each.expand(*k.shape[:-2], observed, length).reshape(heads, 1, observed, length)
                 for each in _counted(valid, length, observed, k.device))  # fmt: skip
    padding = ~seen.any(-1, keepdim=True)  # queries whose keys all are padding: none of them counts
    few = max(MAX_NUMBERS // (heads * d * width), 1)
    W = k.new_zeros(heads, d, d)
    for part in torch.split(torch.arange(observed, device=k.device), max(few // grouped.shape[1], 1)):
        rows = grouped[:, :, part]
        logits = torch.einsum("hgtd,hsd->hgts", rows, key) * scaling
        p = logits.masked_fill(~seen[:, :, part], -torch.inf).masked_fill(padding[:, :, part], 0.0).softmax(-1)
        p, counted = (each.flatten(1, 2) for each in (p, p * far[:, :, part]))
        outputs = p @ value
        sums = -(counted @ key)[..., None] * outputs[:, :, None]  # (heads, queries, d, d_v)
        for at in range(0, length, few):
            of_keys = key[:, at : at + few, :, None] * value[:, at : at + few, None]
            sums += (counted[..., at : at + few] @ of_keys.flatten(2)).reshape(sums.shape)
        changes = (sums * (scaling * rows.flatten(1, 2))[..., None]).transpose(1, 2).flatten(2)
        W += changes @ changes.mT
    return ((W + W.mT) / 2).reshape(*k.shape[:-2], d, d)


def _counted(valid: Tensor | None, length: int, observed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which keys each observed query attends to, and which of them count: ``(..., 1, L_obs, L)`` each."""
    place = torch.arange(length, device=device)
    before = place[length - observed :, None] - place
    if valid is None:
        return before >= 0, before >= (NEAR if length > NEAR else 0)
    near = (valid.sum(-1) > NEAR)[..., None, None, None] * NEAR
    seen = (before >= 0) & valid[..., None, None, :] & valid[..., None, length - observed :, None]
    return seen, seen & (before >= near)


def _refuse_out_of_range(v: Tensor, W: Tensor) -> None:
    """Raise if W is not finite, or if values are so small that it loses its digits."""
    name, limits, largest = str(W.dtype).removeprefix("torch."), torch.finfo(W.dtype), v.abs().flatten(-2).amax(-1)
    if not bool(W.isfinite().all()):
        raise ProblemError(
            f"queries, keys or values hold numbers that are not finite, or so large that W leaves {name}: look for "
            "NaN, or divide the values by a power of two."
        )
    if bool(((largest > 0) & (largest < (limits.tiny / limits.eps) ** 0.5)).any()):
        raise ProblemError(f"values are so small that W loses its digits in {name}: multiply them by a power of two.")
