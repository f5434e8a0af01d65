"""Save and load a pruned cache: prefill once, decode in another process, bit for bit.

The format is one safetensors file: every stored tensor under ``<layer>.<part>``, and JSON metadata with the settings,
the model's fingerprint and the meaning of the tensors. Version 2 has coded tokens as well (``bits=``); version 1 is
still read. A calibrated basis belongs to the model and is not in the file, only its digest. A file is checked before it
is used (:mod:`grace_opt.hf.engine.saved_layer`): a damaged or edited one raises when it is loaded, not in the middle of
generating.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..._util.tensor_files import TensorFormat
from ...attention.masks import is_fingerprint
from ...errors import CacheError
from ..models.foreign_layers import EMPTY, RECURRENT, states_of, window_of
from ..settings.bits import BUDGETS
from .layer import PrunedKeyLayer
from .saved_layer import SavedLayer

FILE_FORMAT = TensorFormat("grace_opt.pruned_key_cache", "2", "a saved cache", CacheError, older=("1",))
Tokens = npt.NDArray[np.int64]
CHOSEN_BY = ("method", "provider or masks")


#: Name of the prompt's tokens among a file's tensors, where they are known.
TOKENS = "tokens"


def save_layers(
    path: str | os.PathLike[str], layers: list[Any], about: Mapping[str, Any], tokens: Tokens | None = None
) -> None:
    """Write the layers of a cache.

    Parameters
    ----------
    path : path
        The file, written atomically.
    layers : list
        All layers of the cache.
    about : mapping
        Values for JSON, which `load_about` returns again.
    tokens : array (n,), optional
        What it was made of, for a `PromptStore`.
    """
    tensors: dict[str, Tensor] = {} if tokens is None else {TOKENS: torch.from_numpy(tokens)}
    described = []
    for number, layer in enumerate(layers):
        parts, description = _taken_apart(number, layer)
        tensors |= {f"{number}.{name}": part for name, part in parts.items()}
        described.append(description)
    FILE_FORMAT.write(path, tensors, {**about, "layers": described})


def load_about(path: str | os.PathLike[str], mapped: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `save_layers` wrote: the metadata, and the layers' tensors on the CPU.

    Parameters
    ----------
    path : path
    mapped : bool
        Whether the tensors are the file itself, or copies.

    Raises
    ------
    CacheError
        If the file is missing, truncated, changed, of another kind, or of a later version.
    """
    about, tensors = FILE_FORMAT.read(path, mapped)
    tensors.pop(TOKENS, None)
    kinds = {
        "fingerprint": is_fingerprint,
        "pruning": _is_dict,
        "chosen_by": CHOSEN_BY.__contains__,
        "layers": _is_list,
        "basis": _is_digest,
    }
    about.setdefault("basis", None)  # version 1 has none
    if "store" in about:
        kinds["store"] = _is_name
    wrong = [name for name, fits in kinds.items() if name not in about or not fits(about[name])]
    wrong += sorted(set(about) - set(kinds))
    if wrong:
        raise CacheError(
            f"{path}: {wrong[0]!r} in the metadata is missing, unknown or of the wrong type; save it again"
        )
    if any(about["pruning"].get(name) is not None for name in BUDGETS):
        about["pruning"].setdefault("trellis", False)  # from before there were trellises
    return about, tensors


def restore_layers(
    layers: list[Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    device: torch.device | str | Mapping[int, torch.device],
) -> None:
    """Fill the new layers of a cache from a saved file.

    Parameters
    ----------
    layers : list
        Layers of a cache made for the same model with the same settings.
    about, tensors
        From `load_about`.
    device : device, or mapping from layer number to device
        Where the layers are put.

    Raises
    ------
    CacheError
        If the saved state does not fit these layers.
    """
    if len(about["layers"]) != len(layers):
        raise CacheError(f"the file describes {len(about['layers'])} layers and the model has {len(layers)}")
    left = set(tensors)
    saved = []
    for number, (layer, description) in enumerate(zip(layers, about["layers"], strict=True)):
        start = f"{number}."
        found = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
        left -= {start + key for key in found}
        saved.append(SavedLayer.of(number, layer, description, found))
    if left:
        raise CacheError(f"the file has a tensor {min(left)!r} that belongs to no layer; save the cache again")
    filled = [one for one in saved if one.batch]
    if len({one.batch for one in filled}) > 1 or len({one.tokens for one in filled if one.tokens is not None}) > 1:
        sizes = ", ".join(f"{one.number}: {one.batch} x {one.tokens}" for one in filled)
        raise CacheError(
            f"the layers of the file differ in their number of sequences or tokens ({sizes}); save the cache again"
        )
    for one, layer in zip(saved, layers, strict=True):
        one.restore(layer, device[one.number] if isinstance(device, Mapping) else torch.device(device))


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_digest(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _taken_apart(number: int, layer: Any) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    if not isinstance(layer, PrunedKeyLayer):
        return _foreign_taken_apart(number, layer)
    description: dict[str, Any] = {
        "kind": type(layer).__name__,
        "filled": layer.tail is not None,
        "declared": layer.prompt.declared,
    }
    if layer.tail is not None:
        if layer.prompt.waiting:
            raise CacheError("the prompt is still coming in chunks; save the cache after the last chunk")
        parts = {"tail_keys": layer.tail.keys, "tail_values": layer.tail.values}
        if layer.compressed is not None:
            stored, about = layer.compressed.to_file()
            parts |= stored
            description |= about
        return parts, description
    return {}, description


def _foreign_taken_apart(number: int, layer: Any) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    kind = type(layer)
    if kind in (*RECURRENT, *EMPTY):
        states = states_of(layer)
        return states, {"kind": kind.__name__, "filled": bool(states), "states": sorted(states)}
    if kind not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise CacheError(
            f"layer {number} is a {kind.__name__}, which cannot be saved; layers with full attention, sliding windows "
            "and recurrent states can. Keep the cache in memory (copy.deepcopy(cache) makes another), or read the text "
            "again where it is needed"
        )
    if not layer.is_initialized:
        return {}, {"kind": kind.__name__, "filled": False}
    keys, values = window_of(layer)
    about = {"kind": kind.__name__, "filled": True, "cumulative_length": getattr(layer, "cumulative_length", None)}
    return {"keys": keys, "values": values}, about
