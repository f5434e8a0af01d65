"""Static masks as mask sources: the same channels for every prompt, which observe no queries and solve nothing.

When: a cache is made with ``masks=``. :func:`static_sources` splits a mask with one entry per layer into the sources of
its layers.

Source: static masks per head as in LeanK (arXiv 2508.02215).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ....attention.masks import ChannelMask
from ....errors import MaskError
from ...models.placement import own_heads, ranks


@dataclass(frozen=True)
class StaticMask:
    """A mask source that ignores queries and keys: the same channels for every prompt.

    Attributes
    ----------
    mask : ChannelMask
        The mask of one layer, ``(H, d)``, or ``(B, H, d)`` with a batch dimension. Under tensor parallelism ``H`` may
        be this rank's share of the KV heads or all heads of all ranks.
    """

    mask: ChannelMask

    def __call__(self, queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> ChannelMask:
        """Return the mask, repeated for every sequence of the batch."""
        pruned, batch = self.mask.pruned, keys.shape[0]
        if pruned.dim() == 3 and pruned.shape[0] != batch:
            raise MaskError(
                f"the static mask was made for {pruned.shape[0]} sequences but the batch has {batch}; to use one "
                f"prompt's mask for all of them, remove its batch dimension: ChannelMask(mask.pruned[:, 0])"
            )
        if pruned.shape[-2] == ranks() * keys.shape[1]:
            pruned = pruned[..., own_heads(pruned.shape[-2], keys.shape[1]), :]
        return replace(self.mask, pruned=pruned.expand(batch, *pruned.shape[-2:]))


def static_sources(
    masks: ChannelMask, model: Mapping[str, int | str], prunable: Sequence[int]
) -> dict[int, StaticMask]:
    """Check a mask of a whole model against a model's fingerprint and split it into layers.

    Parameters
    ----------
    masks : ChannelMask
        The first dimension is the layer (all layers of the model, or only the prunable ones); a batch dimension may
        follow.
    model : mapping
        The model's `fingerprint`.
    prunable : sequence of int
        The layers that the cache prunes.

    Returns
    -------
    dict
        One source per prunable layer.

    Raises
    ------
    MaskError
        If the mask was made for another model; the message names the differences.
    """
    shape = tuple(masks.pruned.shape)
    if len(shape) not in (3, 4):
        raise MaskError(
            f"masks= has shape {shape}; give one entry per layer, (layers, KV heads, head_dim), for example with "
            f"ChannelMask.stack"
        )
    known = {"num_key_value_heads": masks.kv_heads, "head_dim": masks.head_dim, **masks.fingerprint}
    ChannelMask(masks.pruned, known).require_fit(model)
    if shape[0] not in (len(prunable), model["num_hidden_layers"]):
        raise MaskError(
            f"the mask was made for another model: it has {shape[0]} layers, the model has "
            f"{model['num_hidden_layers']}, of which {len(prunable)} can be pruned; make one for this model"
        )
    rows = range(len(prunable)) if shape[0] == len(prunable) else prunable
    return {layer: StaticMask(masks.layer(row).counted()) for layer, row in zip(prunable, rows, strict=True)}
