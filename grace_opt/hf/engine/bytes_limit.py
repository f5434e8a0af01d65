"""What can be said of ``max_bytes=`` before any token is read: what other layers take, and whether it can be kept."""

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


def bytes_elsewhere(
    model: PreTrainedModel | PreTrainedConfig,
    shape: Mapping[str, Any],
    layers: Sequence[Any],
    coded: Sequence[int],
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
    if budget.limit is None:
        return
    assert config.tail_block is not None
    heads, width = int(shape["num_key_value_heads"]), int(shape["head_dim"])
    room = Room(
        budget.limit, 1, heads, width, width, _itemsize(model), config.recent_window, config.tail_block, turned=False
    )
    sinks = config.sink_tokens or 0
    room.mean_bits([], sinks, sinks + config.recent_window + config.tail_block)


def check_rows(budget: BitBudget | None, config: CacheConfig, new: Tensor, shape: Mapping[str, Any]) -> None:
    """Raise `CacheError` if the dense tokens of so many sequences do not fit, before the first of them come.

    `new` ``(B, H, n, d)`` are the first keys.
    """
    assert budget is not None
    assert budget.limit is not None
    assert config.tail_block is not None
    heads, width = int(shape["num_key_value_heads"]), int(shape["head_dim"])
    left = None if budget.limit.until is None else budget.limit.until
    room = Room(
        *(budget.limit, len(new), heads, width, width, new.element_size(), config.recent_window, config.tail_block),
        turned=False,
        left=left,
    )
    room.first_bits(0, config.sink_tokens or 0, new.shape[-2])


def _itemsize(model: PreTrainedModel | PreTrainedConfig) -> int:
    """Return the bytes of a number of keys; of a configuration that does not say, those of 16 bits."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    given = model.dtype if isinstance(model, PreTrainedModel) else config.get_text_config(decoder=True).dtype
    return given.itemsize if isinstance(given, torch.dtype) else 2


def check_dense_prompt(limit: ByteLimit, new: Tensor, length: int, query_heads: int) -> None:
    """Raise `CacheError` if a prompt that is read in parts would be too large before its end, where it is coded.

    `new` ``(B, H, n, d)`` are the keys that come; `length` tokens are there. Until the end, queries are kept as well.
    """
    rows, heads, count, width = new.shape
    tokens = length + count
    queries = min(tokens, -(-tokens // KEPT) + max(LAST))
    share = (2 * heads * (tokens + TAIL_GROWTH) + query_heads * queries) * width * new.element_size()
    needed = limit.whole(share, rows)
    if needed > limit.nbytes:
        raise CacheError(
            f"max_bytes={limit.nbytes}: a prompt that is read in parts stays dense until its end, and its first "
            f"{tokens} tokens take {needed:.0f} bytes; write max_bytes={needed:.0f} or more, or read it at "
            "once (generation_config.prefill_chunk_size=None)"
        )
