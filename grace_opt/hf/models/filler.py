"""`Filler`: which model has filled a layer of a cache, so that no other of the same shape goes on with its keys.

Shapes are compared when tokens are appended; two fine-tunes of a model differ in none. The cache's ``update`` does not
know who calls it, but the attention function knows its module. As long as that module is alive, another one is compared
with it: by identity, which costs nothing, and by a sample of the weights if it is another object, as after a copy.
What never reaches our attention function is not seen: steps on keys that ``fused=False`` has widened, and traced code.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ...errors import CacheError
from .fingerprint import has_all_weights, weights_digest


class Filler:
    """The attention module whose keys and values a layer holds; it is not kept alive."""

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None

    def check(self, module: nn.Module, index: int) -> None:
        """Record who fills layer `index`, or raise if that was a module with other weights.

        Raises
        ------
        CacheError
            If both modules are alive, have all of their weights here, and differ in them.
        """
        if torch.compiler.is_compiling():
            return
        known = None if self._module is None else self._module()
        if known is module:
            return
        if known is not None and _differ(known, module):
            raise CacheError(
                f"layer {index} of the cache was filled by a model with other weights than the one that reads it now; "
                "use a new cache for every model, or call reset() before another model's prompt"
            )
        self._module = weakref.ref(module)


def _differ(one: nn.Module, other: nn.Module) -> bool:
    """Whether samples of the weights differ; False if some weights are elsewhere, and nobody can tell."""
    return has_all_weights(one) and has_all_weights(other) and weights_digest(one) != weights_digest(other)
