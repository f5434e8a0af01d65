"""What learning sees of a model: windows of text, some queries of each, and the keys and values they attend to.

When: `grace_opt.hf.tools.learned.learn_masks` has token numbers. Windows are read by the dense model; only observed
queries stay, and only those layers whose gates are learned next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....errors import CacheError, CalibrationError
from ...models.placement import input_device
from ...models.projection import projection_weights
from ...models.recording import AttentionCall, record
from .objective import LayerSample, sample_of

#: Largest difference, as a share of the output's largest number, between a model's attention and what we recompute.
TOLERANCE = 0.05


@dataclass(frozen=True)
class ObservedWindow:
    """Consecutive tokens of a text, ``(1, L)``, and the positions ``(n,)`` of the queries that are observed."""

    ids: Tensor
    positions: Tensor


@dataclass
class LayerObservation:
    """What one layer's attention was called with, window after window.

    Attributes
    ----------
    layer : int
    visible, far : Tensor (N, n, L), bool
        As in `LayerSample`.
    parts : list
        Per window: observed queries ``(H, G · n, d)``, times the factor of the logits, keys and values.
    answer : Tensor (H, G · n, d_v)
        The attention's own output in the first window.
    projection : Tensor
        Weights of the output projection.
    softcap : float or None
    """

    layer: int
    visible: Tensor
    far: Tensor
    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    answer: Tensor | None = None
    projection: Tensor | None = None
    softcap: float | None = None

    def add(self, call: AttentionCall, window: ObservedWindow) -> None:
        """Take one window's call."""
        heads, places = call.key.shape[1], window.positions.to(call.query.device)
        queries = call.query[0][:, places].reshape(heads, -1, call.query.shape[-1]).float() * call.scaling
        answer = call.output[0, places].transpose(0, 1).reshape(heads, -1, call.output.shape[-1]).float()
        parts = queries, call.key[0].float(), call.value[0].float()
        if not all(bool(part.isfinite().all()) for part in (*parts, answer)):
            raise CalibrationError(
                f"queries, keys or values of layer {self.layer} are not finite (inf or NaN), so nothing can be learned "
                "from them: load the model with dtype=torch.bfloat16 or torch.float32"
            )
        self.parts.append(parts)
        if self.answer is None:
            self.answer, self.softcap = answer, call.softcap
            self.projection = projection_weights(call.module, call.output)

    def sample(self) -> LayerSample:
        """Return the sample, after checking that the model's attention is what it is taken for.

        Raises
        ------
        CacheError
            If it is more than a softmax of causal logits.
        """
        assert self.answer is not None
        assert self.projection is not None
        queries, keys, values = zip(*self.parts, strict=True)
        length, device = self.visible.shape[-1], keys[0].device
        all_keys, all_values = (
            torch.stack([nn.functional.pad(each, (0, 0, 0, length - each.shape[1])) for each in parts])
            for parts in (keys, values)
        )
        masks = self.visible.to(device), self.far.to(device)
        sample = sample_of(torch.stack(queries), all_keys, all_values, *masks, self.projection, self.softcap)
        if float((sample.target[0] - self.answer).abs().max()) > TOLERANCE * float(self.answer.abs().max()):
            raise CacheError(
                f"the attention of layer {self.layer} is more than the softmax of its causal logits (it may add terms "
                "to them), so masks cannot be learned here; write calibrate.masks(...) for static masks"
            )
        return sample


def cut(
    texts: Sequence[Tensor], tokens: int, count: int, queries: int, dense: int, generator: torch.Generator
) -> list[ObservedWindow]:
    """Return windows of the texts, which take turns, and which queries of each are observed.

    Parameters
    ----------
    texts : sequence of Tensor
        Token numbers, ``(1, L)`` each.
    tokens, count, queries : int
        Most tokens of a window, most windows, and most queries of each; those of a window shorter than the longest
        count several times.
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
    mixed = [
        [each[place] for place in torch.randperm(len(each), generator=generator, device="cpu").tolist()]
        for each in pieces
    ]
    turns = range(max(map(len, mixed), default=0))
    found, chosen = [], [each[turn] for turn in turns for each in mixed if turn < len(each)][:count]
    queries = min(queries, max((ids.shape[1] - dense for ids in chosen), default=0))  # no window has more to observe
    for ids in chosen:
        places = dense + torch.randperm(ids.shape[1] - dense, generator=generator, device="cpu")
        found.append(ObservedWindow(ids, places.repeat(-(-queries // len(places)))[:queries].sort().values))
    return found


def observe(
    model: PreTrainedModel, windows: Sequence[ObservedWindow], layers: Collection[int], recent: int, sinks: int
) -> dict[int, LayerObservation]:
    """Read the windows by the dense model, and return what some layers were called with.

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
        If a layer does not call the attention interface.
    CalibrationError
        If its numbers are not finite, or its output projection is unknown.
    """
    places = torch.stack([window.positions for window in windows])[..., None]
    token = torch.arange(max(window.ids.shape[1] for window in windows), device=places.device)
    visible, far = token <= places, (token <= places - recent) & (token >= sinks)
    found = {index: LayerObservation(index, visible, far) for index in layers}
    device = input_device(model)
    for number, window in enumerate(windows, 1):

        def take(call: AttentionCall, window: ObservedWindow = window) -> None:
            index = getattr(call.module, "layer_idx", None)
            if index in found:
                found[index].add(call, window)

        record(model, window.ids.to(device), None, take)
        if missing := sorted(index for index, each in found.items() if len(each.parts) < number):
            raise CacheError(
                f"layers {missing} of {type(model).__name__} did not call the attention interface, so their masks "
                "cannot be learned"
            )
    return found
