"""`ByteKeeper`: keeps a cache within ``max_bytes=``, and says beforehand what cannot be kept.

Before every step it lets all layers store what has left their recent windows, or none of them. What a step of several
tokens needs shows only after the attention of the first layer; it is then taken back in all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import CacheError, OptionError
from ..bases.budget import BitBudget
from ..bases.byte_limit import ByteLimit
from ..bases.importance import KEPT
from ..models.foreign_layers import EMPTY
from ..settings.bits import LAST
from ..settings.config import CacheConfig
from ..stores.coded.room import Room
from ..stores.tail import TAIL_GROWTH
from .in_step import all_or_none, undo_of
from .layer import PrunedKeyLayer
from .report import measure


class ByteKeeper:
    """Keeps the layers of one cache within a limit.

    Parameters
    ----------
    limit : ByteLimit
    config : CacheConfig
    shape : mapping
        The model's fingerprint.
    layers : sequence of layers
        All of the cache's.
    """

    def __init__(self, limit: ByteLimit, config: CacheConfig, shape: Mapping[str, Any], layers: Sequence[Any]) -> None:
        self.limit = limit
        self._config, self._shape, self._layers = config, shape, layers

    @classmethod
    def of(
        cls, budget: BitBudget | None, config: CacheConfig, shape: Mapping[str, Any], layers: Sequence[Any]
    ) -> ByteKeeper | None:
        """Return that of a cache; None if its budget has no limit."""
        return None if budget is None or budget.limit is None else cls(budget.limit, config, shape, layers)

    @property
    def _coded(self) -> list[PrunedKeyLayer]:
        return [layer for layer in self._layers if isinstance(layer, PrunedKeyLayer)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(self, new: Tensor, query_heads: int | None) -> None:
        """Make room for new keys ``(B, H, n, d)``; raise `CacheError` if there is none, and nothing has changed.

        What needs a prompt's numbers, or those of several tokens, is raised after the first layer's attention.
        """
        layers = self._coded
        for layer in layers:
            layer.settle()
        first, (rows, _, count, _) = layers[0], new.shape
        length = first.get_seq_length()
        if not length:
            self._check_rows(new)
        if first.compressed is None and first.prompt.goes_on(count, length):
            self._check_dense(new, length, query_heads or new.shape[1])
        with all_or_none(self._layers):
            if self.limit.until is not None and length + count > self.limit.until:
                self.limit.until = None  # more than were known
                for layer in layers:
                    layer.fit_rows(rows)
            for layer in layers:
                layer.keep_within()
        first.undo = undo_of(self._layers) if count > 1 else None
        self.note()

    def fit_rows(self, rows: int) -> None:
        """Code again, in all layers or none, if so many sequences would otherwise take too many bytes."""
        layers = self._coded
        first = layers[0]
        if first.compressed is None and first.tail is not None and rows > first.rows:
            self._check_rows(first.tail.keys[:1].expand(rows, -1, -1, -1))
        with all_or_none(self._layers):
            for layer in layers:
                layer.fit_rows(rows)
        self.note()

    def note(self) -> None:
        """Take down the cache's bytes at the bits that were chosen last."""
        chosen = self.limit.chosen
        if chosen and not chosen[-1].nbytes:
            found = measure(self._layers).allocated_bytes
            self.limit.chosen = [each if each.nbytes else each._replace(nbytes=found) for each in chosen]

    def _check_rows(self, keys: Tensor) -> None:
        """Raise if the dense tokens of so many sequences do not fit, whose keys these are, or the first of them."""
        room = _room(self.limit, len(keys), self._shape, keys.element_size(), self._config, self.limit.until)
        room.first_bits(0, self._config.sink_tokens or 0, keys.shape[-2])

    def _check_dense(self, new: Tensor, length: int, query_heads: int) -> None:
        """Raise if a prompt that is read in parts would be too large before its end, where it is coded.

        `length` tokens are there before. Until the end, queries are kept as well.
        """
        rows, heads, count, width = new.shape
        tokens = length + count
        queries = min(tokens, -(-tokens // KEPT) + max(LAST))
        share = (2 * heads * (tokens + TAIL_GROWTH) + query_heads * queries) * width * new.element_size()
        needed = self.limit.whole(share, rows)
        if needed > self.limit.nbytes:
            raise CacheError(
                f"max_bytes={self.limit.nbytes}: a prompt that is read in parts stays dense until its end, and its "
                f"first {tokens} tokens take {needed:.0f} bytes; write max_bytes={needed:.0f} or more, and as much "
                "again for more tokens, or read it at once (generation_config.prefill_chunk_size=None)"
            )


def bytes_elsewhere(
    model: PreTrainedModel | PreTrainedConfig, shape: Mapping[str, Any], layers: Sequence[Any], coded: Sequence[int]
) -> int:
    """Return the most bytes that the layers which are not coded take, for each sequence.

    Raises
    ------
    OptionError
        If these grow with the text, or keep states whose size nobody knows beforehand.
    """
    token, found = 2 * int(shape["num_key_value_heads"]) * int(shape["head_dim"]) * _itemsize(model), 0
    for number, layer in enumerate(layers):
        if number in coded or isinstance(layer, EMPTY):
            continue
        window = getattr(layer, "sliding_window", None)
        if not isinstance(window, int):
            raise OptionError(
                f"max_bytes= is for models whose layers are all coded or have sliding windows, and layer {number} is "
                f"neither ({type(layer).__name__}): its bytes are not known beforehand, or grow with the text; leave "
                "out dense_layers=, or write bits="
            )
        found += window * token
    return found


def check_limit(
    budget: BitBudget, config: CacheConfig, model: PreTrainedModel | PreTrainedConfig, shape: Mapping[str, Any]
) -> None:
    """Raise `CacheError` if not even one sequence's dense tokens fit into the bytes."""
    if budget.limit is not None:
        room = _room(budget.limit, 1, shape, _itemsize(model), config, None)
        sinks = config.sink_tokens or 0
        room.mean_bits([], sinks, sinks + room.recent + room.block)


def _room(
    limit: ByteLimit, rows: int, shape: Mapping[str, Any], itemsize: int, config: CacheConfig, left: int | None
) -> Room:
    """Return the room of a layer as far as a model's fingerprint tells it, of which nothing is stored."""
    assert config.tail_block is not None
    heads, width = int(shape["num_key_value_heads"]), int(shape["head_dim"])
    windows = config.recent_window, config.tail_block
    return Room(limit, rows, heads, width, width, itemsize, *windows, turned=False, left=left)


def _itemsize(model: PreTrainedModel | PreTrainedConfig) -> int:
    """Return the bytes of a number of keys; of a configuration that does not say, those of 16 bits."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    given = model.dtype if isinstance(model, PreTrainedModel) else config.get_text_config(decoder=True).dtype
    return given.itemsize if isinstance(given, torch.dtype) else 2
