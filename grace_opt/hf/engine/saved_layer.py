"""Check one layer of a saved cache before it is used.

When: `grace_opt.hf.engine.saving.restore_layers`. Every field and tensor must be one that a layer can hold and must fit
all others; otherwise a `CacheError` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...errors import CacheError
from ..models.foreign_layers import EMPTY, RECURRENT, restore_states, state_names
from ..stores.saved import LayerCheck, at_least
from ..stores.store import Store
from ..stores.tail import Tail
from .layer import PrunedKeyLayer

_FIELDS, _TAIL = {"kind", "filled"}, ("tail_keys", "tail_values")


@dataclass(frozen=True)
class SavedLayer:
    """The saved parts of one layer, checked to fit together.

    Attributes
    ----------
    number : int
    description : mapping
    parts : dict
        Tensors by name; of a layer of ours, those of the tail.
    batch, tokens : int
        Number of sequences, and number of tokens that each has seen; 0 if the layer is empty. Recurrent states do not
        tell their number of tokens: None.
    put : callable, optional
        Puts the store of the older tokens on a device.
    """

    number: int
    description: Mapping[str, Any]
    parts: dict[str, Tensor]
    batch: int
    tokens: int | None
    put: Callable[[torch.device], Store] | None = None

    @staticmethod
    def of(number: int, layer: Any, description: Any, found: dict[str, Tensor]) -> SavedLayer:
        """Check a layer's description and tensors.

        Parameters
        ----------
        number : int
            For messages.
        layer : cache layer
            An empty layer of the expected kind.
        description : Any
            The layer's entry in the metadata.
        found : dict of Tensor
            The layer's tensors.

        Raises
        ------
        CacheError
            Naming what is wrong.
        """
        return _Check(number).layer(layer, description, found)

    def restore(self, layer: Any, device: torch.device) -> None:
        """Fill the empty layer."""
        parts: dict[str, Any] = {name: part.to(device) for name, part in self.parts.items()}
        if isinstance(layer, PrunedKeyLayer):
            layer.prompt.declared = self.description["declared"]
        if not self.description["filled"]:
            return
        if isinstance(layer, RECURRENT):
            restore_states(layer, parts)
            return
        if not isinstance(layer, PrunedKeyLayer):
            layer.lazy_initialization(parts["keys"], parts["values"])
            layer.keys, layer.values = parts["keys"], parts["values"]
            if self.description["cumulative_length"] is not None:
                layer.cumulative_length = self.description["cumulative_length"]
            return
        layer.lazy_initialization(parts["tail_keys"], parts["tail_values"])
        layer.tail = Tail(parts["tail_keys"], parts["tail_values"])
        if self.put is not None:
            layer.compressed = self.put(device)


@dataclass(frozen=True)
class _Check(LayerCheck):
    """The checks of one layer of any kind."""

    def layer(self, layer: Any, said: Any, found: dict[str, Tensor]) -> SavedLayer:
        self.require(isinstance(said, dict) and set(said) >= _FIELDS, "its description lacks a kind, or what is filled")
        if said["kind"] != type(layer).__name__:
            raise CacheError(
                f"layer {self.number} was saved as {said['kind']} and is {type(layer).__name__} in this "
                "transformers; load the cache with the version that saved it"
            )
        self.require(type(said["filled"]) is bool, f"filled={said['filled']!r} is not true or false")
        if isinstance(layer, PrunedKeyLayer):
            declared = said.get("declared", "missing")
            self.require(
                declared is None or at_least(declared, 1), f"declared={declared!r} is not the length of a prompt"
            )
            return self.stored(layer, said, found)
        return (self.states if isinstance(layer, (*RECURRENT, *EMPTY)) else self.plain)(layer, said, found)

    def states(self, layer: Any, said: dict[str, Any], found: dict[str, Tensor]) -> SavedLayer:
        """Check a layer that has states in place of keys, or nothing."""
        expected = said.get("states")
        fits = isinstance(expected, list) and all(name in sorted(state_names(layer)) for name in expected)
        self.require(fits and said["filled"] == bool(expected), f"states={expected!r}, filled={said['filled']!r}")
        self.names(said, {*_FIELDS, "states"}, found, tuple(expected or ()))
        for name, state in found.items():
            fits = state.is_floating_point() and state.dim() >= 3 and state.numel() > 0
            self.require(fits, f"{name} is {state.dtype} {tuple(state.shape)} and no state of a batch")
        batches = {state.shape[0] for state in found.values()}
        self.require(len(batches) < 2, f"its states are of {' and of '.join(map(str, sorted(batches)))} sequences")
        return SavedLayer(self.number, said, dict(found), *((batches.pop(), None) if batches else (0, 0)))

    def plain(self, layer: Any, said: dict[str, Any], found: dict[str, Tensor]) -> SavedLayer:
        kind = type(layer)
        fields = _FIELDS | ({"cumulative_length"} if said["filled"] else set())
        self.names(said, fields, found, ("keys", "values") if said["filled"] else ())
        if not said["filled"]:
            return SavedLayer(self.number, said, {}, 0, 0)
        keys, values = found["keys"], found["values"]
        self.tokens_of("keys", keys, keys.shape[:3])
        self.tokens_of("values", values, keys.shape[:3], keys.dtype)
        length = said["cumulative_length"]
        if kind is DynamicSlidingWindowLayer:
            self.require(at_least(length, keys.shape[2]), f"cumulative_length={length!r} for {keys.shape[2]} tokens")
        else:
            self.require(
                kind is DynamicLayer and length is None, f"cumulative_length={length!r} but the layer has none"
            )
        return SavedLayer(self.number, said, dict(found), keys.shape[0], keys.shape[2] if length is None else length)

    def stored(self, layer: PrunedKeyLayer, said: dict[str, Any], found: dict[str, Tensor]) -> SavedLayer:
        """Check a layer of ours: its tail, and by its own kind of store the older tokens."""
        about = {name: value for name, value in said.items() if name not in (*_FIELDS, "declared")}
        if not said["filled"]:
            self.names(about, set(), found, ())
            return SavedLayer(self.number, said, {}, 0, 0)
        compressed = "length" in said
        older = {name: tensor for name, tensor in found.items() if name not in _TAIL}
        tails = {name: tensor for name, tensor in found.items() if name in _TAIL}
        if not compressed:
            self.names(about, set(), found, _TAIL)
        self.names({}, set(), tails, _TAIL)
        keys, values = found["tail_keys"], found["tail_values"]
        self.tokens_of("tail_keys", keys, keys.shape[:3])
        self.tokens_of("tail_values", values, keys.shape[:3], keys.dtype)
        if not compressed:
            return SavedLayer(self.number, said, tails, keys.shape[0], keys.shape[2])
        put = layer.maker.of_file(self, layer.plan, about, older, Tail(keys, values))
        return SavedLayer(self.number, said, tails, keys.shape[0], said["length"] + keys.shape[2], put)
