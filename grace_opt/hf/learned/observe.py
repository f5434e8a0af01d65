"""What learning sees of a model: windows of text, some queries of each, and the keys and values they attend to.

When: `grace_opt.hf.learned.learn_masks` has token numbers. Windows are read by the dense model; only observed queries
stay, and only those layers whose gates are learned next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import CacheError, CalibrationError
from ..bits.projection import projection_weights
from ..capture import AttentionCall, record
from .objective import LayerSample, sample_of

#: Largest difference, as a share of the output's largest number, between a model's attention and what we recompute.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a text, ``(1, L)``, and the positions ``(n,)`` of the queries that are observed."""

    ids: Tensor
    positions: Tensor


@dataclass
class _Seen:
    """Per window: queries, keys, values and the attention's own output."""

    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    projection: Tensor | None = None
    softcap: float | None = None


def cut(
    texts: Sequence[Tensor], tokens: int, count: int, queries: int, dense: int, generator: torch.Generator
) -> list[Window]:
    """Return windows of the texts, which take turns, and which queries of each are observed.

    Parameters
    ----------
    texts : sequence of Tensor
        Token numbers, ``(1, L)`` each.
    tokens, count, queries : int
        Most tokens of a window, most windows, and queries of each; those of a short window count several times.
    dense : int
        Number of tokens that every query sees dense; queries of earlier tokens see nothing pruned.
    generator : Generator
        Chooses windows and queries.

    Examples
    --------
    >>> windows = cut([torch.arange(25)[None]], 10, 9, 4, 3, torch.Generator().manual_seed(0))
    >>> sorted(len(window.ids[0]) for window in windows), int(min(window.positions.min() for window in windows))
    ([5, 10, 10], 3)
    """
    pieces = [[piece for piece in torch.split(ids, tokens, dim=1) if piece.shape[1] > dense] for ids in texts]
    mixed = [[each[place] for place in torch.randperm(len(each), generator=generator).tolist()] for each in pieces]
    turns = range(max(map(len, mixed), default=0))
    found = []
    for ids in [each[turn] for turn in turns for each in mixed if turn < len(each)][:count]:
        places = dense + torch.randperm(ids.shape[1] - dense, generator=generator)
        found.append(Window(ids, places.repeat(-(-queries // len(places)))[:queries].sort().values))
    return found


def observe(
    model: PreTrainedModel, windows: Sequence[Window], layers: Collection[int], recent: int, sinks: int
) -> dict[int, LayerSample]:
    """Read the windows by the dense model, and return the samples of some layers.

    Parameters
    ----------
    model : PreTrainedModel
    windows : sequence of Window
    layers : collection of int
    recent, sinks : int
        Number of last and of first tokens that a query sees dense.

    Raises
    ------
    CacheError
        If a layer does not call the attention interface, or its attention is more than softmax of its logits.
    CalibrationError
        If its numbers are not finite, or its output projection is unknown.
    """
    device = model.get_input_embeddings().weight.device
    seen = {index: _Seen() for index in layers}
    for number, window in enumerate(windows, 1):

        def take(call: AttentionCall, window: Window = window) -> None:
            index = getattr(call.module, "layer_idx", None)
            if index in seen:
                _add(seen[index], index, call, window)

        record(model, window.ids.to(device), None, take)
        if missing := sorted(index for index, each in seen.items() if len(each.parts) < number):
            raise CacheError(
                f"layers {missing} of {type(model).__name__} did not call the attention interface, so their masks "
                "cannot be learned; leave them out of what is pruned"
            )
    places = torch.stack([window.positions for window in windows])[..., None]
    token = torch.arange(max(window.ids.shape[1] for window in windows))
    visible, far = token <= places, (token <= places - recent) & (token >= sinks)
    return {index: _sample(index, seen.pop(index), visible, far) for index in list(seen)}


def _add(seen: _Seen, index: int, call: AttentionCall, window: Window) -> None:
    heads, places = call.key.shape[1], window.positions.to(call.query.device)
    queries = call.query[0][:, places].reshape(heads, -1, call.query.shape[-1]).float() * call.scaling
    output = call.output[0, places].transpose(0, 1).reshape(heads, -1, call.output.shape[-1]).float()
    parts = queries, call.key[0].float(), call.value[0].float(), output
    if not all(bool(part.isfinite().all()) for part in parts):
        raise CalibrationError(
            f"queries, keys or values of layer {index} are not finite (inf or NaN), so nothing can be learned from "
            "them: load the model with dtype=torch.bfloat16 or torch.float32"
        )
    seen.parts.append(parts)
    if seen.projection is None:
        seen.projection, seen.softcap = projection_weights(call.module, call.output), call.softcap


def _sample(index: int, seen: _Seen, visible: Tensor, far: Tensor) -> LayerSample:
    queries, keys, values, output = zip(*seen.parts, strict=True)
    length, device = visible.shape[-1], keys[0].device
    all_keys, all_values = (
        torch.stack([nn.functional.pad(each, (0, 0, 0, length - each.shape[1])) for each in parts])
        for parts in (keys, values)
    )
    assert seen.projection is not None
    sample = sample_of(
        torch.stack(queries), all_keys, all_values, visible.to(device), far.to(device), seen.projection, seen.softcap
    )
    own = torch.stack(output)
    if float((sample.target - own).abs().max()) > TOLERANCE * float(own.abs().max()):
        raise CacheError(
            f"the attention of layer {index} is more than the softmax of its causal logits (it may add terms to them), "
            "so masks cannot be learned here; write calibrate(...) for static masks"
        )
    return sample
