"""Which layers of a model can be compressed: those with full attention over all of the prompt.

DynamicCache of transformers decides what each layer needs; layers with sliding windows or linear attention stay as
they are.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ...errors import CacheError, OptionError

#: Types of layers that have states in place of keys. Versions of transformers that know no cache for them in general
#: give them a plain DynamicLayer.
STATEFUL = ("linear_attention", "conv", "mamba")


def text_config(model: PreTrainedModel | PreTrainedConfig, call: str) -> PreTrainedConfig:
    """Return the configuration of the text decoder; refuse encoder-decoder models.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
    call : str
        Name of the called function, for the message.
    """
    config = model.config if isinstance(model, PreTrainedModel) else model
    if not isinstance(config, PreTrainedConfig):
        raise OptionError(
            f"model must be a transformers model or its configuration, not {type(model).__name__}; write "
            f"{call}(model, ...)"
        )
    if config.is_encoder_decoder:
        raise CacheError(f"{config.model_type} is an encoder-decoder model; use {call} with decoder-only models")
    return config.get_text_config(decoder=True)


def prunable_layers(config: PreTrainedConfig, layers: list[Any] | None = None) -> tuple[int, ...]:
    """Return the full-attention layers: each a plain DynamicLayer, and of no other type in the configuration.

    Parameters
    ----------
    config : PreTrainedConfig
        The text decoder's.
    layers : list, optional
        The layers of ``DynamicCache(config=config)``, if they are at hand.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> prunable_layers(LlamaConfig(num_hidden_layers=3))
    (0, 1, 2)
    """
    layers = list(DynamicCache(config=config).layers) if layers is None else layers
    # Old versions of transformers give even models without attention a plain DynamicLayer.
    differing = getattr(config, "per_layer_attributes", None) or ()  # refused if asked of the model as a whole
    attends = "num_attention_heads" in differing or hasattr(config, "num_attention_heads")
    types = getattr(config, "layer_types", None) or ["full_attention" if attends else "none"] * len(layers)
    plain = [type(layer) is DynamicLayer for layer in layers]
    if stateful := sorted({kind for kind, own in zip(types, plain, strict=False) if own and kind in STATEFUL}):
        raise CacheError(
            f"{config.model_type} has layers with states ({', '.join(stateful)}), for which this transformers has a "
            "cache of the model's own; update transformers"
        )
    crossing = getattr(config, "cross_attention_layers", None) or ()  # Mllama's image layers: never extended
    found = tuple(
        index
        for index in range(len(layers))
        if plain[index] and types[index] == "full_attention" and index not in crossing
    )
    if not found:
        kinds = sorted({type(layer).__name__ for layer in layers}) if attends else ["layers without attention heads"]
        raise CacheError(
            f"{config.model_type} has no full-attention layer whose keys could be pruned, only {', '.join(kinds)}; "
            f"use transformers' own DynamicCache"
        )
    return found
