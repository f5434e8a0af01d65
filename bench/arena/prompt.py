"""A prompt that was read once, and what every method needs of it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.arena.stored import Layer
from grace_opt.hf import capture_attention
from grace_opt.hf.engine.filling import dense_cache
from grace_opt.hf.models.projection import PROJECTION_NAMES, output_projection
from grace_opt.hf.models.prunable import prunable_layers


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
        """What a `Method` sees: the layers with full attention, as others stay dense in our caches too."""
        modules, found = attention_modules(self.model), []
        for index in full_layers(self.model):
            layer = self.captured[index]
            keys, values, queries = (part[0].float() for part in (layer.keys, layer.values, layer.queries))
            heads, length, width = keys.shape
            grouped = queries.reshape(heads, -1, length, width)
            output = head_outputs(modules[index], heads, grouped.shape[1], values.shape[-1])
            found.append(Layer(index, keys, values, grouped, layer.scaling, output))
        return found


def full_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the numbers of the layers that attend to all tokens."""
    return prunable_layers(model.config.get_text_config(decoder=True))


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
