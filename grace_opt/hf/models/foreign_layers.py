"""Layers of a cache that are transformers' own: sliding windows, recurrent states, and layers without anything.

When: the cache copies, crops, saves or counts all of its layers, and some are not ours. Versions of transformers differ
in what such a layer has (its states are tensors in 5.6, and dicts of tensors later), so each attribute is looked up
here, and nowhere else.

Source: ``transformers/cache_utils.py`` of 5.2.0, 5.6.2, 5.12.1, 5.23.0 and 5.24.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .compat import crop_is_relative

#: What versions that know no such layers have in their place: no class.
RECURRENT: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "LinearAttentionLayer", None)]))
EMPTY: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
_CONVOLUTION, _RECURRENCE = "conv_states", "recurrent_states"


def states_of(layer: Any) -> dict[str, Tensor]:
    """Return what a layer needs of the past in place of keys and values, by name; nothing if it has read no token.

    Names are ``conv_states.N``, the last inputs of a convolution, and ``recurrent_states.N``, sums over all tokens.
    """
    found = {}
    for name in (_CONVOLUTION, _RECURRENCE):
        for number, state in _numbered(getattr(layer, name, None)).items():
            if isinstance(state, Tensor) and _numbered(getattr(layer, "has_previous_state", True)).get(number):
                found[f"{name}.{number}"] = _last_inputs(layer, state, number) if name == _CONVOLUTION else state
    return found


def state_names(layer: Any) -> set[str]:
    """Return the names that `states_of` may give for a layer."""
    names = (_CONVOLUTION, _RECURRENCE)
    return {f"{name}.{number}" for name in names for number in _numbered(getattr(layer, name, None))}


def restore_states(layer: Any, states: Mapping[str, Tensor]) -> None:
    """Fill an empty layer with what `states_of` returned for another."""
    for name in sorted(states):  # convolutions first: they tell some versions the type and the device
        kind, number = name.split(".")
        held = getattr(layer, kind)
        if isinstance(held, dict):
            layer.lazy_initialization(**{kind: states[name]}, state_idx=int(number))
            held[int(number)].copy_(states[name])
            layer.has_previous_state[int(number)] = True
        else:
            layer.lazy_initialization(**{kind: states[name]})
            getattr(layer, kind).copy_(states[name])
            layer.has_previous_state = True


def window_of(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a layer of full or sliding attention needs for the next token.

    A sliding layer that may be cropped has kept more.
    """
    seen = slice(-layer.sliding_window + 1, None) if _slides(layer) else slice(None)
    return layer.keys[:, :, seen], layer.values[:, :, seen]


def own_window(layer: Any) -> None:
    """Copy the keys and values of a layer, which were a slice that kept all of a prompt alive."""
    if isinstance(layer, DynamicLayer) and isinstance(layer.keys, Tensor):
        shared = layer.values is layer.keys
        layer.keys = layer.keys.clone()
        layer.values = layer.keys if shared else layer.values.clone()


def keeps_slice_of(layer: Any, keys: Tensor) -> bool:
    """Return whether a layer with a sliding window has kept the last of these keys alone."""
    held = layer.keys if isinstance(layer, DynamicSlidingWindowLayer) else None
    return isinstance(held, Tensor) and held.dim() == keys.dim() and held.shape[-2] < keys.shape[-2]


def crop_layer(number: int, layer: Any, tokens_to_remove: int) -> None:
    """Drop the newest tokens of a layer.

    Raises
    ------
    ValueError
        With a sentence that says what keeps this layer from it.
    """
    kind, records = type(layer).__name__, bool(getattr(layer, "record_past", False))
    if tokens_to_remove == 0 and crop_is_relative() and not records:
        return  # nothing is to be removed
    states = {name.partition(".")[0] for name in states_of(layer)}
    if _RECURRENCE in states:
        raise ValueError(f"layer {number} ({kind}) has recurrent states, from which no token can be taken out again")
    if states and not records:
        raise ValueError(f"layer {number} ({kind}) has the last inputs of a convolution alone, and not those before")
    if not hasattr(layer, "crop"):
        raise ValueError(f"layer {number} ({kind}) cannot be cropped")
    try:
        layer.crop(tokens_to_remove)
    except (ValueError, RuntimeError) as error:
        what = (
            "a layer with a sliding window, which transformers keeps," if _slides(layer) else f"layer {number} ({kind})"
        )
        raise ValueError(f"{what} cannot be cropped: {str(error).rstrip('.')}") from error
    if tokens_to_remove:
        own_window(layer)


def _slides(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def _numbered(part: Any) -> dict[int, Any]:
    """Return the states of a layer by number: versions that know only one have no dict."""
    return part if isinstance(part, dict) else {0: part}


def _last_inputs(layer: Any, state: Tensor, number: int) -> Tensor:
    """Return as many inputs of a convolution as its next step needs: a layer that may be cropped has kept others."""
    size = _numbered(getattr(layer, "conv_kernel_size", None)).get(number)
    if size is None or state.shape[-1] == size:
        return state
    return functional.pad(state[..., -size:], (max(size - state.shape[-1], 0), 0))
