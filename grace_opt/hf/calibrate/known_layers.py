"""Decoder layers whose outputs are known are not computed again.

When: `calibrate.budgets` feeds the same tokens hundreds of times, each time with another layer's cache changed: the
layers before that one give what they gave before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..models.prunable import text_config


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder's layers in order; none if they cannot be told, or read each other's keys.

    Examples
    --------
    >>> from grace_opt.hf.models import load_pocket
    >>> len(decoder_layers(load_pocket()[0]))
    3
    """
    config = text_config(model, "decoder_layers")
    if getattr(config, "num_kv_shared_layers", 0):
        return []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            numbers = [
                {part.layer_idx for part in layer.modules() if isinstance(getattr(part, "layer_idx", None), int)}
                for layer in module
            ]
            if numbers == [{number} for number in range(len(module))]:
                return list(module)
    return []


@contextmanager
def outputs_recorded(layers: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Record what the layers return in one forward pass, in a list that is filled inside the context."""
    found: list[Any] = []
    hooks = [layer.register_forward_hook(lambda _, __, output: found.append(output)) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def returning(layers: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Let the first layers return these outputs, whatever they are given; they touch no cache."""
    before = [layer.__dict__.get("forward") for layer in layers[: len(outputs)]]  # accelerate has put one there
    try:
        for layer, output in zip(layers, outputs, strict=False):
            layer.__dict__["forward"] = lambda *_, known=output, **__: known
        yield
    finally:
        for layer, forward in zip(layers, before, strict=False):
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = forward
