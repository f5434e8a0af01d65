"""A pruned prompt as a file: prefill once, decode in another process, bit for bit.

One safetensors file: every stored tensor under ``<layer>.<part>``, and JSON metadata with the settings, the model's
fingerprint and what the tensors mean. Source: ours; what kvpress' users ask for (a saved compressed prefill).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import CacheError
from ..files import aside
from .layer import PrunedKeyLayer
from .quantization import QuantizedTokens
from .storage import Compressed, Stored, Tail

FORMAT, VERSION = "grace_opt.pruned_key_cache", 1


def save_layers(path: str | os.PathLike[str], layers: list[Any], about: Mapping[str, Any]) -> None:
    """Write the layers of a cache.

    Parameters
    ----------
    path : path
        Written aside and renamed.
    layers : list
        All layers of the cache.
    about : mapping
        JSON-able; what `load_layers` returns besides.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise CacheError(f"cannot save to {path}: there is no folder {path.parent}.")
    tensors: dict[str, Tensor] = {}
    described = []
    for number, layer in enumerate(layers):
        parts, description = _taken_apart(number, layer)
        for name, part in parts.items():
            if isinstance(part, QuantizedTokens):
                description.setdefault("quantized", {})[name] = part.meta()
                tensors.update({f"{number}.{name}.{key}": t for key, t in part.tensors().items()})
            else:
                tensors[f"{number}.{name}"] = part
        described.append(description)
    metadata = {"format": FORMAT, "version": str(VERSION), "about": json.dumps({**about, "layers": described})}
    # Copies on the CPU: views share memory with others, which the format does not have.
    owned = {key: t.detach().cpu().clone().contiguous() for key, t in tensors.items()}
    try:
        with aside(path) as written:
            save_file(owned, written, metadata)
    except (SafetensorError, OSError) as error:
        raise CacheError(f"cannot save to {path}: {error}") from error


def load_about(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_layers` wrote: the metadata, and the tensors on the CPU.

    Raises
    ------
    CacheError
        If the file is missing, truncated, something else, or of a later version.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CacheError(f"{path} is a safetensors file, but not a saved PrunedKeyCache.")
            if metadata.get("version") != str(VERSION):
                raise CacheError(
                    f"{path} has format version {metadata.get('version')}; this grace_opt reads {VERSION}: update "
                    "grace_opt, or save the cache again."
                )
            return json.loads(metadata["about"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CacheError(f"no saved cache at {path}.") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CacheError(f"{path} cannot be read as a saved cache (truncated or not safetensors): {error}") from error


def restore_layers(
    layers: list[Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    device: torch.device | str | Mapping[int, torch.device],
) -> None:
    """Fill the new layers of a cache with what was saved.

    Parameters
    ----------
    layers : list
        Of a cache that was made for the same model with the same settings.
    about, tensors
        From `load_about`.
    device : device, or mapping from layer number to device
        Where the layers go.
    """
    for number, (layer, description) in enumerate(zip(layers, about["layers"], strict=True)):
        if description["kind"] != type(layer).__name__:
            raise CacheError(
                f"layer {number} was saved as {description['kind']} and is {type(layer).__name__} in this "
                "transformers; load the cache with the version that saved it"
            )
        home = device[number] if isinstance(device, Mapping) else torch.device(device)
        found = {name: t.to(home) for key, t in tensors.items() if (name := _local(number, key)) is not None}
        try:
            _put_together(layer, description, found)
        except KeyError as error:
            raise CacheError(f"the file lacks {number}.{error.args[0]}; save the cache again") from None


def _local(number: int, key: str) -> str | None:
    start = f"{number}."
    return key[len(start) :] if key.startswith(start) else None


def _taken_apart(number: int, layer: Any) -> tuple[dict[str, Stored], dict[str, Any]]:
    description: dict[str, Any] = {"kind": type(layer).__name__, "filled": bool(layer.is_initialized)}
    if isinstance(layer, PrunedKeyLayer):
        description["declared"] = layer.prompt.declared
    if not layer.is_initialized:
        return {}, description
    if isinstance(layer, PrunedKeyLayer):
        if layer.tail is None:
            return {}, {**description, "filled": False}
        if layer.prompt.waiting:
            raise CacheError("the prompt is still coming in chunks; save the cache when it is over")
        parts: dict[str, Stored] = {"tail_keys": layer.tail.keys, "tail_values": layer.tail.values}
        if layer.compressed is not None:
            parts.update(layer.compressed.parts())
            description["length"] = layer.compressed.length
        return parts, description
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        description["cumulative_length"] = getattr(layer, "cumulative_length", None)
        return {"keys": layer.keys, "values": layer.values}, description
    raise CacheError(
        f"layer {number} is a {type(layer).__name__}, which can not be saved; only full and sliding attention can"
    )


def _put_together(layer: Any, description: Mapping[str, Any], found: Mapping[str, Tensor]) -> None:
    if isinstance(layer, PrunedKeyLayer):
        layer.prompt.declared = description["declared"]
    if not description["filled"]:
        return
    if not isinstance(layer, PrunedKeyLayer):
        layer.lazy_initialization(found["keys"], found["values"])
        layer.keys, layer.values = found["keys"], found["values"]
        if description["cumulative_length"] is not None:
            layer.cumulative_length = description["cumulative_length"]
        return
    tail = Tail(found["tail_keys"], found["tail_values"])
    layer.lazy_initialization(tail.keys, tail.values)
    layer.tail = tail
    if "length" in description:
        quantized = {
            name: QuantizedTokens.from_tensors(
                {key[len(name) + 1 :]: t for key, t in found.items() if key.startswith(f"{name}.")}, meta
            )
            for name, meta in description.get("quantized", {}).items()
        }
        parts: dict[str, Any] = {**found, **quantized}
        layer.compressed = Compressed(
            length=description["length"],
            sink_keys=parts["sink_keys"],
            pruned_keys=parts["pruned_keys"],
            kept_indices=parts["kept_indices"],
            values=parts["old_values"],
            positions=parts.get("positions"),
        )
