"""`fingerprint`: which model a mask, a basis or a saved cache was made for.

When: something is kept for a model, and used again later: channels, bits and coded keys of another model, or of other
weights, give wrong tokens without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import CacheError
from .placement import is_tensor_parallel, rank, ranks


def fingerprint(model: PreTrainedModel | PreTrainedConfig) -> dict[str, int | str]:
    """Return what a mask (or a saved cache) and a model must agree on.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
        The model, or only its configuration. For a composite model, the text decoder's is read.

    Returns
    -------
    dict
        ``model_type``, ``num_hidden_layers``, ``num_key_value_heads`` and ``head_dim``, of all ranks together, and
        ``rope``, its rotary embedding, if it has one. A model also has ``weights``, a digest of a sample of every
        parameter, equal in every floating-point type that holds bfloat16; it is missing if some weights are elsewhere
        (sharded over ranks, offloaded to disk). One with adapters has ``adapters``, the active ones. A tensor-parallel
        model has ``tensor_parallel``, because its masks and caches hold only the KV heads of this rank.
    """
    config = model.config if isinstance(model, PreTrainedModel) else model
    text = config.get_text_config(decoder=True)
    heads = int(_of_layers(text, "num_attention_heads") or 0)
    found: dict[str, int | str] = {
        "model_type": str(text.model_type),
        "num_hidden_layers": int(text.num_hidden_layers),
        "num_key_value_heads": int(_of_layers(text, "num_key_value_heads") or heads),
        "head_dim": int(_of_layers(text, "head_dim") or text.hidden_size // heads),
    }
    if rope := rope_of(text):
        found["rope"] = rope
    if isinstance(model, PreTrainedModel):
        if (adapters := adapters_of(model)) is not None:
            found["adapters"] = adapters
        if is_tensor_parallel(model):
            found["tensor_parallel"] = f"rank {rank()} of {ranks()}"
        elif has_all_weights(model):
            found["weights"] = weights_digest(model)
    return found


#: What a fingerprint may lack: of a configuration alone, or written by an older version.
OPTIONAL = ("weights", "adapters", "rope")


def rope_of(text: PreTrainedConfig) -> str:
    """Return a model's rotary embedding in words: keys of another one belong to other positions.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> rope_of(LlamaConfig())
    'default, rope_theta=10000.0'
    """
    given = getattr(text, "rope_parameters", None) or {}
    kinds = given if given and all(isinstance(each, Mapping) for each in given.values()) else {"": given}
    words = []
    for layers, each in kinds.items():
        if not isinstance(each, Mapping) or not each:
            continue
        kind = str(each.get("rope_type", "default"))
        names = ("rope_theta",) if kind == "default" else sorted(set(each) - {"rope_type", "type"})
        values = [f"{name}={_in_words(each[name])}" for name in names if each.get(name) is not None]
        words.append(", ".join([f"{layers} {kind}".strip(), *values]))
    return "; ".join(words)


def _in_words(value: Any) -> str:
    """Return the same text for 10000 and 10000.0, and a short one for a list of factors."""
    if isinstance(value, list | tuple):
        every = ", ".join(map(_in_words, value))
        return f"{len(value)} numbers #{hashlib.sha256(every.encode()).hexdigest()[:8]}"
    return str(float(value)) if isinstance(value, int | float) else str(value)


def adapters_of(model: nn.Module) -> str | None:
    """Return the names of active adapters, as peft's layers say them; "" if they are switched off, None without any.

    Their weights are the model's whether they are active or not.
    """
    states = set()
    for layer in model.modules():
        active = getattr(layer, "active_adapters", None)
        if isinstance(active, list | tuple):  # a method of transformers' models has this name, too
            states.add("" if getattr(layer, "disable_adapters", False) is True else "+".join(map(str, active)))
    return "; ".join(sorted(states)) if states else None


def _of_layers(text: PreTrainedConfig, name: str) -> int | None:
    """Return a size that all layers with full attention share, which are those that are pruned.

    Raises
    ------
    CacheError
        If they differ in it.
    """
    if name not in (getattr(text, "per_layer_attributes", None) or ()):
        found: int | None = getattr(text, name, None)
        return found
    each = [text.per_layer_config[layer] for layer in range(text.num_hidden_layers)]
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(each)
    full = [one for one, kind in zip(each, kinds, strict=True) if kind == "full_attention"] or each
    sizes = {getattr(one, name, None) for one in full}
    if len(sizes) > 1:
        raise CacheError(
            f"{text.model_type} has layers of full attention with {name} of {sorted(map(str, sizes))}: only models "
            "whose layers of full attention are alike are supported"
        )
    return sizes.pop()


def fingerprint_differences(what: str, made_for: Mapping[str, int | str], here: Mapping[str, int | str]) -> list[str]:
    """Return, in words, how a model differs from the one that something was made for; empty if it fits.

    Parameters
    ----------
    what : str
        What was made, for the words.
    made_for, here : mapping
        Fingerprints. What one of them lacks is not compared; weights are if nothing else differs.

    Examples
    --------
    >>> fingerprint_differences("basis", {"head_dim": 64}, {"head_dim": 128, "weights": "0"})
    ['head_dim: basis 64, model 128']
    """
    differences = [
        f"{name}: {what} {made_for[name]}, model {here[name]}"
        for name in here
        if name != "weights" and name in made_for and here[name] != made_for[name]
    ]
    weights = here.get("weights"), made_for.get("weights")
    if not differences and None not in weights and weights[0] != weights[1]:
        differences.append("the weights differ, as after fine-tuning")
    return differences


def has_all_weights(module: nn.Module) -> bool:
    """Return whether all parameters are in this process: none is sharded over ranks, or offloaded to disk."""
    return not any(parameter.is_meta or _is_sharded(parameter) for parameter in module.parameters())


def _is_sharded(parameter: Tensor) -> bool:
    """Return whether it is a DTensor, judged by its attributes: some builds of torch lack the class."""
    return hasattr(parameter, "placements")


DIGEST_ENTRIES_PER_PARAMETER = 16


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of names, shapes and some evenly spread entries of every parameter, as bfloat16."""
    sampled = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sampled.update(f"{name} {tuple(parameter.shape)}".encode())
        count = min(DIGEST_ENTRIES_PER_PARAMETER, flat.numel())
        # In integers: float32 cannot count the entries of a large embedding.
        places = torch.from_numpy(np.arange(count, dtype=np.int64) * (flat.numel() - 1) // max(count - 1, 1))
        entries = flat.index_select(0, places.to(flat.device)).to(torch.bfloat16)
        sampled.update(entries.view(torch.int16).cpu().numpy().tobytes())
    return sampled.hexdigest()
