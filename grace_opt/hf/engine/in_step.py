"""Layers of a cache in step: those that grow hold equally many tokens, and change together or not at all.

When: a forward pass ended in the middle (an error, Ctrl-C), or one of the layers cannot be cropped. A cache whose
layers are a token apart would give wrong logits without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ...errors import CacheError
from .layer import PrunedKeyLayer


class InStep:
    """Notices that some forward pass did not reach the last layer.

    Parameters
    ----------
    layers : sequence of layers
        All layers of the cache.
    config : PreTrainedConfig
        The text model's, which says which layers hold an image, and never grow.
    """

    def __init__(self, layers: Sequence[Any], config: PreTrainedConfig) -> None:
        crossing = getattr(config, "cross_attention_layers", None) or ()
        growing = (i for i, layer in enumerate(layers) if isinstance(layer, DynamicLayer) and i not in crossing)
        self._growing = frozenset(growing)
        self._first = min(self._growing, default=-1)
        self.forget()

    def forget(self) -> None:
        """Begin again, after a reset."""
        self._updated, self._before = -1, 0  # which layer was updated last, and how many tokens it had before

    def check_update(self, layers: Sequence[Any], index: int) -> None:
        """Raise if the layer that is about to grow has more or fewer tokens than the one before it had."""
        if index not in self._growing:
            return
        if index == self._first:
            _check_compressed(layers)
        count = layers[index].get_seq_length()
        if 0 <= self._updated < index and count != self._before:
            raise _interrupted(count, self._before)
        self._updated, self._before = index, count

    def check_all(self, layers: Sequence[Any]) -> None:
        """Raise if the last forward pass did not reach the last layer."""
        counts = {layers[index].get_seq_length() for index in self._growing}
        if len(counts) > 1:
            raise _interrupted(*counts)
        _check_compressed(layers)


_AGAIN = "by an error or Ctrl-C; call reset(), or make a new cache, and read the text again"


def _interrupted(*counts: int) -> CacheError:
    return CacheError(
        f"layers of the cache hold different numbers of tokens ({', '.join(map(str, sorted(counts)))}): a forward pass "
        f"ended in the middle, {_AGAIN}"
    )


def _check_compressed(layers: Sequence[Any]) -> None:
    """Raise if a layer has all tokens of the prompt, and would keep them dense for good."""
    for index, layer in enumerate(layers):
        if isinstance(layer, PrunedKeyLayer) and layer.interrupted:
            raise CacheError(f"the prompt's compression ended in the middle of layer {index}, {_AGAIN}")


@contextmanager
def all_or_none(layers: Sequence[Any]) -> Iterator[None]:
    """Give all layers what they held before, if one cannot be changed (cropping replaces parts, and edits none)."""
    before = [(layer, _state(layer)) for layer in layers]
    try:
        yield
    except BaseException:
        for layer, state in before:
            vars(layer).update(state)
        raise


def undo_of(layers: Sequence[Any]) -> Callable[[], None]:
    """Return what gives all layers back what they hold now, their dense tails as long as they are."""
    before = [(layer, _state(layer)) for layer in layers]
    ours = [layer for layer in layers if isinstance(layer, PrunedKeyLayer)]
    forget = [part.remembered() for layer in ours for part in (layer.tail, layer.compressed) if part is not None]

    def undo() -> None:
        for layer, state in before:
            vars(layer).clear()
            vars(layer).update(state)
        for one in forget:
            one()

    return undo


def _state(layer: Any) -> dict[str, Any]:
    state = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
    if isinstance(layer, PrunedKeyLayer):
        state["prompt"] = copy.copy(layer.prompt)
    return state
