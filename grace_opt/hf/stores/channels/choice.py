"""Choose a layer's channels for one prompt, and check that its queries, keys and values are usable numbers.

When: :mod:`grace_opt.hf.stores.channels.compress` has the keys and queries. If every channel stays, nothing is checked:
"prune nothing" works with any numbers. On a GPU the check does not wait for the device; its result is read one step
later (`check_numbers`, `raise_for_verdict`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...._util.arrays import working_dtype
from ....attention.masks import ChannelMask
from ....attention.provider import MaskProvider
from ....errors import CacheError, ProblemError
from ...models.observation import Observation
from ..plan import LayerPlan, MaskSource
from .static_masks import StaticMask

#: Device types that give a number without waiting.
_SYNCHRONOUS_DEVICES = ("cpu",)


def choose_channels(
    plan: LayerPlan, queries: Tensor, keys: Tensor, valid: Tensor | None, values: Tensor | None, scaling: float
) -> ChannelMask:
    """Return the mask of the layer's source; if nothing is to be pruned, the source is not called.

    `values` are None unless the source needs them.

    Raises
    ------
    CacheError
        If a method cannot choose from these numbers; the message names the layer.
    """
    if prunes_nothing(plan.source, keys):
        return mask_that_prunes_nothing(keys)
    try:
        if isinstance(plan.source, MaskProvider) and plan.source.needs_values:
            return plan.source(queries, keys, valid, values, scaling)
        return plan.source(queries, keys, valid)
    except ProblemError as error:
        if not isinstance(plan.source, MaskProvider):
            raise
        if bool(_in_range(queries, keys, valid)):
            raise CacheError(f"the channels of layer {plan.index} cannot be chosen: {error}") from error
        raise _out_of_range(plan.index) from error


@torch.no_grad()
def check_numbers(plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Tensor | None:
    """Raise if keys, queries or values that channels are chosen from are not finite.

    Returns
    -------
    Tensor or None
        Whether all is finite, and whether W stays in the range of its type, if only the device knows it yet; pass it to
        `raise_for_verdict` later. None if everything was checked.
    """
    if isinstance(plan.source, StaticMask) or not keys.is_floating_point() or prunes_nothing(plan.source, keys):
        return None  # nothing is chosen
    read = (keys, over.queries, *((values,) if needs_values(plan.source) else ()))
    ends = [end for tensor in read if tensor.numel() for end in torch.aminmax(tensor)]
    finite = torch.stack([end.to(keys.device).isfinite() for end in ends]).all()
    if keys.device.type not in _SYNCHRONOUS_DEVICES:
        if not isinstance(plan.source, MaskProvider):
            return torch.stack([finite, torch.ones_like(finite)])
        observed = over.queries[:, :, -plan.config.channels.observation_window :].to(keys.device)
        return torch.stack([finite, _in_range(observed, keys, over.valid)])
    raise_for_verdict(plan.index, [bool(finite), True])
    return None


def raise_for_verdict(layer: int, verdict: Iterable[bool]) -> None:
    """Raise with the usual cause of keys that are not finite, or the remedy for huge and tiny ones."""
    finite, in_range = verdict
    if not finite:
        raise CacheError(
            f"keys or queries of layer {layer} are not finite (inf or NaN), so no channels can be chosen from them, "
            f"and the model's own output is useless too. Usually float16 has overflowed: load the model with "
            "dtype=torch.bfloat16 or torch.float32"
        )
    if not in_range:
        raise _out_of_range(layer)


def check_usable(layer: int, queries: Tensor, keys: Tensor) -> None:
    """Raise unless channels can be chosen from these tokens, none of them padding; waits for the device."""
    finite = bool(queries.isfinite().all()) and bool(keys.isfinite().all())
    raise_for_verdict(layer, [finite, finite and bool(_in_range(queries, keys, None))])


def needs_values(source: MaskSource) -> bool:
    """Return whether channels are chosen by values too."""
    return isinstance(source, MaskProvider) and source.needs_values


def prunes_nothing(source: MaskSource, keys: Tensor) -> bool:
    """Return whether a method prunes no channel of these keys, which leaves nothing to choose."""
    return isinstance(source, MaskProvider) and source.count(keys.shape[-1]) == 0


def mask_that_prunes_nothing(keys: Tensor) -> ChannelMask:
    """Return the mask that prunes nothing from keys ``(B, H, S, d)``."""
    shape = keys.shape[0], keys.shape[1], keys.shape[3]
    return ChannelMask(torch.zeros(shape, dtype=torch.bool, device=keys.device), pruned_per_head=0)


def _in_range(queries: Tensor, keys: Tensor, valid: Tensor | None) -> Tensor:
    """Return whether the largest (diagonal) entry of every head's W neither overflows nor loses its digits."""
    dtype = torch.promote_types(working_dtype(queries.dtype), working_dtype(keys.dtype))
    if valid is not None:
        keys = keys.masked_fill(~valid[:, None, :, None], 0.0)
        queries = queries.masked_fill(~valid[:, None, -queries.shape[2] :, None], 0.0)
    grouped = queries.reshape(*keys.shape[:2], -1, keys.shape[-1])
    squares = [torch.linalg.vector_norm(part, dim=2, dtype=dtype).double().square() for part in (grouped, keys)]
    limits, reach = torch.finfo(dtype), (squares[0] * squares[1]).amax(-1)
    nonzero = (grouped != 0).flatten(2).any(-1) & (keys != 0).flatten(2).any(-1)
    right: Tensor = ((reach <= limits.max) & ((reach >= limits.tiny / limits.eps) | ~nonzero)).all()
    return right


def _out_of_range(layer: int) -> CacheError:
    return CacheError(
        f"keys or queries of layer {layer} are finite, but so large or small that their squares, by which channels are "
        "chosen, leave the range of float32 (of float64 for a model in float64); load the model with "
        "dtype=torch.float64, or prune nothing in this layer: write one ratio per layer with 0 here, ratio=[...], or "
        "ratio=0 for all"
    )
