"""What a layer hands to the attention function with its keys: itself, and what it has compressed.

`with_context` puts a `LayerContext` on the keys and values that ``update`` returns, `context_of` reads it off them.
Between the two stands transformers' attention interface, which passes tensors and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from .plan import LayerPlan
from .prompt import Observation, Prompt
from .storage import Compressed


class LayerProtocol(Protocol):
    """What the attention function needs of a layer: :class:`grace_opt.hf.layer.PrunedKeyLayer` is one."""

    plan: LayerPlan
    prompt: Prompt
    compressed: Compressed | None

    def attended(self) -> None:
        """Note that the attention function has received what ``update`` handed out."""

    def observe(self, now: Observation, keys: Tensor, values: Tensor, at_once: bool = True) -> None:
        """Take in what the attention function saw, and compress if the prompt is over."""


# The attribute by which a key tensor carries its LayerContext from the cache's update to the attention function.
_ATTRIBUTE = "_grace_layer_context"


class LayerContext(NamedTuple):
    """What the keys that ``update`` returns carry with them.

    The compressed part stands here, besides the layer, because an offloading cache moves the layer's own away between
    ``update`` and the attention.
    """

    layer: LayerProtocol
    compressed: Compressed | None


def with_context(tensor: Tensor, context: LayerContext) -> Tensor:
    """A view of keys or values that carries the context; a view, so that the stored tensor itself never does."""
    view = tensor.view_as(tensor)
    setattr(view, _ATTRIBUTE, context)
    return view


def context_of(tensor: Tensor) -> LayerContext | None:
    """The context that these keys or values carry, or None."""
    return getattr(tensor, _ATTRIBUTE, None)
