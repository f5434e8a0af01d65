"""A prompt's classes of tokens as `bits=` makes them, for what is not our cache: crossings, and the reference line."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.arena.stored import Layer
from grace_opt.hf.bits.classes import class_sizes, token_weights
from grace_opt.hf.bits.importance import attention_moments, observed_queries


@dataclass(frozen=True)
class Classes:
    """Which tokens of a layer are in which class, and how much they count.

    Attributes
    ----------
    order : Tensor
        ``(H, n)``: places of the tokens, most important first.
    weights : (Tensor, Tensor)
        ``(H, n)``, in that order: how much a squared error in each token's key and in its value counts.
    sizes : tuple of int
        Number of tokens in each class.
    """

    order: Tensor
    weights: tuple[Tensor, Tensor]
    sizes: tuple[int, ...]

    def sorted(self, tokens: Tensor) -> list[Tensor]:
        """Return the tokens ``(H, n, d)`` of each class."""
        return list(torch.split(tokens.gather(1, self._index(tokens)), list(self.sizes), 1))

    def restored(self, parts: list[Tensor]) -> Tensor:
        """Return the tokens of all classes in their places."""
        tokens = torch.cat(parts, 1)
        return torch.empty_like(tokens).scatter_(1, self._index(tokens), tokens)

    def split(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Return the weights ``(H, n)`` of each class."""
        return torch.split(weights, list(self.sizes), 1)

    def _index(self, tokens: Tensor) -> Tensor:
        return self.order[..., None].expand(-1, -1, tokens.shape[-1])


def classes_of(layer: Layer, inner: slice) -> Classes:
    """Return the classes of the tokens in some places, by the attention that they receive in this prompt."""
    counts = observed_queries(layer.keys.shape[1])
    places = torch.nonzero(counts)[:, 0]
    observed = layer.queries.flatten(0, 1)[:, places]
    received = attention_moments(observed, counts[places], layer.keys, layer.scaling)
    first, second = (moment[:, inner] for moment in received)
    order = first.argsort(dim=-1, descending=True, stable=True)
    weights = token_weights(first, second)
    return Classes(order, (weights[0].gather(1, order), weights[1].gather(1, order)), class_sizes(order.shape[1]))
