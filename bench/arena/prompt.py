"""A prompt that was read once, and what every method needs of it; its classes of tokens, for what is not our cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.arena.stored import Layer
from grace_opt.hf import capture_attention
from grace_opt.hf.bases.classes import class_sizes, token_weights
from grace_opt.hf.bases.importance import attention_moments, observed_queries
from grace_opt.hf.models.projection import PROJECTION_NAMES, output_projection
from grace_opt.hf.tools.filling import dense_cache


class Prompt:
    """What the attention of every layer received while a model read some tokens.

    Parameters
    ----------
    model : PreTrainedModel
    ids : Tensor
        ``(1, T)``.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.model = model
        self.captured = capture_attention(model, ids)

    def dense(self) -> DynamicCache:
        """Return transformers' cache of the prompt."""
        return dense_cache(self.model, self.captured)

    @cached_property
    def layers(self) -> list[Layer]:
        """What a `Method` sees."""
        modules = attention_modules(self.model)
        found = []
        for index, layer in self.captured.items():
            keys, values, queries = (part[0].float() for part in (layer.keys, layer.values, layer.queries))
            heads, length, width = keys.shape
            grouped = queries.reshape(heads, -1, length, width)
            output = head_outputs(modules[index], heads, grouped.shape[1], values.shape[-1])
            found.append(Layer(index, keys, values, grouped, layer.scaling, output))
        return found


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the attention module of every layer by its number."""
    return {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx") and any(hasattr(module, name) for name in PROJECTION_NAMES)
    }


@torch.no_grad()
def head_outputs(module: nn.Module, heads: int, group: int, width: int) -> Tensor:
    """Return how the output of each query head enters the layer's, ``(H, G, d_v, D)``, without the bias."""
    projection: Any = output_projection(module)
    features = heads * group * width
    answer = projection(torch.cat([torch.eye(features), torch.zeros(1, features)]))
    return (answer[:-1] - answer[-1:]).view(heads, group, width, -1)


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
