"""`LayerContext`: what a layer passes to the attention function along with its keys.

It holds the layer and its store. `with_context` attaches it to the keys and values that ``update`` returns,
and `context_of` reads it from them, because transformers' attention interface in between passes only tensors.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ..models.observation import Observation
from ..stores.maker import StoreMaker
from ..stores.plan import LayerPlan
from ..stores.store import Store
from ..stores.tally import ReadTally
from .prompt import Prompt


class LayerProtocol(Protocol):
    """What the attention function needs from a layer: :class:`grace_opt.hf.engine.layer.PrunedKeyLayer` is one."""

    plan: LayerPlan
    maker: StoreMaker
    prompt: Prompt
    compressed: Store | None
    tally: ReadTally

    def attended(self) -> bool:
        """Record that the attention function has received what ``update`` returned; say if it is the first to."""

    def check_filled_by(self, module: nn.Module) -> None:
        """Raise if the layer was filled by a model with other weights."""

    def attention_over(self, new: int) -> None:
        """Take note that attention over the store has been computed for so many new tokens."""

    def observe(self, now: Observation, keys: Tensor, values: Tensor, at_once: bool = True) -> None:
        """Receive the attention function's queries, and compress if the prompt is over."""


# The attribute of a key tensor that carries its LayerContext from the cache's update to the attention function.
_ATTRIBUTE = "_grace_layer_context"


class LayerContext(NamedTuple):
    """The layer and its compressed part, attached to the keys that ``update`` returns.

    The compressed part is kept here too, because an offloading cache moves the layer's own away between ``update`` and
    the attention.
    """

    layer: LayerProtocol
    compressed: Store | None


def with_context(tensor: Tensor, context: LayerContext) -> Tensor:
    """Attach the context to a view of keys or values, which nobody else has: a stored tensor never carries one."""
    setattr(tensor, _ATTRIBUTE, context)
    return tensor


def context_of(tensor: Tensor) -> LayerContext | None:
    """Return the context that these keys or values carry, or None."""
    return getattr(tensor, _ATTRIBUTE, None)
