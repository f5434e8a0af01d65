"""`export_static`: a model's basis, widths, means and scales, fixed for all tokens, for other people's servers.

When: somebody builds a cache of few bits into a server, whose memory is divided into blocks of tokens of equal size.
The bases, and each head's share of the bits, are those of the calibrated basis; within a head, widths are divided by
what coordinates cost and how far they spread over the calibration texts, all of whose tokens count alike. Scales are
fitted to errors to the fourth, as in a cache with ``bits=``.

Rotary embeddings turn keys by their positions, some coordinates so slowly that the first thousands of positions show
only a part of a turn. So texts are read at the start of a sequence, and again at later positions.

Source: Lagrangian bit allocation (Shoham and Gersho, IEEE Trans. ASSP 36, 1988), with one class of tokens.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._util.parameters import integer, number
from ...errors import CalibrationError, OptionError
from ...kernels.coding import fitted
from ...kernels.steps import lower_hulls, within_budget
from ..arguments import require_model
from ..fingerprint import fingerprint
from ..placement import input_device
from ..prunable import text_config
from ..recording import AttentionCall, record
from ..texts import shipped_texts, token_ids
from .at_hand import basis_for, tokenizer_of
from .basis import Basis
from .calibrate import FEWEST_TOKENS, TOKENS, refuse_parts
from .calibrated import CalibratedBasis
from .classes import SINKS
from .codebooks import EVEN_WIDTH, WIDTHS, codebooks, distortions
from .rates import MOST_BITS
from .settings import CALIBRATED
from .static import StaticCoder, StaticCoders

#: About how many tokens, evenly spaced over the texts, scales are fitted to; they are kept meanwhile.
FITTED_TO = 2048
#: The longest sequence, in tokens, unless another is asked for or the model's context is shorter.
CONTEXT = 8192
#: How often texts are read at later positions, in all; at least once each.
LATER_READINGS = 6


@dataclass
class _Spread:
    """What the coordinates of one layer's keys, or values, are like: sums over tokens, ``(H, d)`` float64, and some of
    them, ``(H, n, d)`` float32."""

    sums: Tensor
    squares: Tensor
    lowest: Tensor
    highest: Tensor
    some: list[Tensor] = field(default_factory=list)
    tokens: int = 0

    @classmethod
    def empty(cls, basis: Basis) -> _Spread:
        zeros = torch.zeros_like(basis.energy)
        return cls(zeros, zeros, zeros + torch.inf, zeros - torch.inf)

    def add(self, coordinates: Tensor, each: int = 1) -> None:
        """Add ``(H, n, d)``, and keep one token of `each`."""
        self.some.append(coordinates[:, -self.tokens % each :: each].float())
        self.sums = self.sums + coordinates.sum(1)
        self.squares = self.squares + coordinates.square().sum(1)
        self.lowest = torch.minimum(self.lowest, coordinates.amin(1))
        self.highest = torch.maximum(self.highest, coordinates.amax(1))
        self.tokens += coordinates.shape[1]

    def coder(self, basis: Basis, bits: Tensor) -> StaticCoder:
        """Return the coder of heads that have so many bits per element, ``(H,)``."""
        means = self.sums / self.tokens
        variances = (self.squares / self.tokens - means.square()).clamp(min=0)
        largest = torch.maximum(self.highest - means, means - self.lowest)
        # What rounding leaves of a coordinate that never varies is no spread.
        variances = torch.where(largest > 1e-6 * means.abs(), variances, 0)
        widths = _divided(variances * basis.energy, bits).masked_fill(variances == 0, 0)
        scales = torch.where(widths == EVEN_WIDTH, largest, self._fitted(means, variances.sqrt(), widths))
        order = widths.argsort(dim=-1, descending=True, stable=True)
        heads, width = order.shape
        return StaticCoder(
            encode=basis.encode.gather(2, order[:, None].expand(heads, width, width)),
            decode=basis.decode.gather(1, order[..., None].expand(heads, width, width)),
            means=means.gather(1, order).float(),
            scales=scales.gather(1, order).float(),
            widths=widths.gather(1, order).to(torch.uint8),
        )

    def _fitted(self, means: Tensor, spreads: Tensor, widths: Tensor) -> Tensor:
        """Return the scales with little error to the fourth, ``(H, d)``; the spread where the tokens kept show none."""
        unit = torch.where(spreads > 0, spreads, 1)  # whatever a model's numbers are, those in 16 bits fit
        some = (torch.cat(self.some, 1) - means[:, None]) / unit[:, None]
        found = fitted(some.mT.flatten(0, 1).float(), widths.flatten(), codebooks(some.device)).view(widths.shape)
        return torch.where(found > 0, found, 1) * spreads


def _divided(losses: Tensor, bits: Tensor) -> Tensor:
    """Return the widths of the channels of each head ``(H, d)``, by what each loses without bits."""
    (heads, channels), here = losses.shape, losses.device
    costs = torch.tensor(WIDTHS, dtype=torch.float64, device=here).expand(heads, channels, -1)
    problem = (
        losses[..., None] * torch.tensor(distortions(), dtype=torch.float64, device=here),
        costs,
        torch.ones_like(costs, dtype=torch.bool),
    )
    levels, _ = within_budget(*problem, bits.clamp(max=MOST_BITS) * channels, lower_hulls(*problem))
    return torch.tensor(WIDTHS, dtype=torch.int64, device=here)[levels]


def export_static(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    bits: float = 2.25,
    *,
    key_bits: float | None = None,
    value_bits: float | None = None,
    tokenizer: Any = None,
    texts: Sequence[str | Tensor] | None = None,
    basis: str | os.PathLike[str] | CalibratedBasis = CALIBRATED,
    tokens: int = TOKENS,
    context: int | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> StaticCoders:
    """Write a model's basis, widths, means and scales, the same for every token, to a safetensors file.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder that computes attention through transformers' attention interface.
    path : path
        The file to write; docs/howto/servers.md describes it.
    bits : float
        Mean number of bits per element over all layers and heads, at most 8; at most so many are used.
    key_bits, value_bits : float, optional
        The same for keys and for values apart, instead of ``bits``.
    tokenizer : callable, optional
        By default the one that belongs to the model.
    texts : sequence of str or Tensor, optional
        What means, scales and widths come from; by default the texts that ship with grace_opt.
    basis : str, path or CalibratedBasis
        The model's calibrated basis: as for ``bits=`` in a cache, or the object itself.
    tokens : int
        Number of first tokens of each text that are used.
    context : int, optional
        Number of tokens of the longest sequence that will be stored: texts are read at positions all over it. By
        default that of the model, at most 8,192. Keys far beyond it may be coded badly; a longer one than is needed
        costs a little.
    advance : callable
        Called with the number of texts done so far, for a progress bar.

    Returns
    -------
    StaticCoders
        What was written. Its ``keys[layer]`` and ``values[layer]`` code and restore tensors.

    Raises
    ------
    OptionError
        If an argument has the wrong type or range.
    CalibrationError
        If there is no basis for this model, the numbers are not finite, or the file cannot be written.

    Notes
    -----
    Two forward passes per text, seven if there is only one; d² operations per element of keys and values.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from grace_opt.hf import calibrate_basis
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> texts = ["the quiet river runs past a late singer " * 40]
    >>> basis = calibrate_basis(model, tokenizer, texts)
    >>> file = Path(tempfile.mkdtemp()) / "static.safetensors"
    >>> made = export_static(model, file, bits=2.25, tokenizer=tokenizer, texts=texts, basis=basis)
    >>> 2.2 < made.bits <= 2.25, made.keys[0].widths.shape
    (True, torch.Size([2, 64]))
    """
    model = require_model(model, "export_static")
    if (key_bits is None) != (value_bits is None):
        raise OptionError("write bits= alone, or key_bits= and value_bits= together")
    asked = {"bits": bits} if key_bits is None else {"key_bits": key_bits, "value_bits": value_bits}
    means = [number(name, value, at_least=0, at_most=MOST_BITS) for name, value in asked.items()]
    if isinstance(texts, str | Tensor):
        raise OptionError("texts must be a list; write export_static(model, path, texts=[text, ...])")
    given = shipped_texts() if texts is None else list(texts)
    here = fingerprint(model)
    refuse_parts(here)
    if tokenizer is None and any(isinstance(text, str) for text in given):
        tokenizer = tokenizer_of(model)
    config = text_config(model, "export_static")
    positions = getattr(config, "max_position_embeddings", None)
    if context is None:
        context = min(positions or CONTEXT, CONTEXT)
    longest = min(integer("tokens", tokens, at_least=1), integer("context", context, at_least=1), positions or tokens)
    every = [token_ids(text, tokenizer, n, "export_static")[:, :longest] for n, text in enumerate(given, 1)]
    if context > (positions or context):
        raise OptionError(f"context={context}: the model has {positions} positions; give at most as many")
    every = [ids for ids in every if ids.shape[1] > SINKS]
    known = sum(ids.shape[1] - SINKS for ids in every)
    if known < FEWEST_TOKENS:
        raise CalibrationError(
            f"the texts have {known} tokens, without {SINKS} of each, which stay dense; at least {FEWEST_TOKENS} are "
            "needed: give more or longer ones"
        )
    found = basis_for(model, basis)  # when nothing is wrong with the rest: it may have to be made
    starts = _starts(model, [ids.shape[1] for ids in every], context)
    known = sum((ids.shape[1] - SINKS) * len(places) for ids, places in zip(every, starts, strict=True))
    spreads = {layer: (_Spread.empty(found.keys[layer]), _Spread.empty(found.values[layer])) for layer in found.layers}

    def take(call: AttentionCall) -> None:
        layer = getattr(call.module, "layer_idx", None)
        if layer not in spreads:
            return
        bases = found.keys[layer], found.values[layer]
        for spread, basis, tensor in zip(spreads[layer], bases, (call.key, call.value), strict=True):
            coordinates = tensor[0, :, SINKS:].cpu().double() @ basis.encode.double()
            if not coordinates.isfinite().all():
                raise CalibrationError(
                    f"layer {layer}: keys or values are not finite numbers; load the model in bfloat16 or float32"
                )
            spread.add(coordinates, -(-known // FITTED_TO))

    device = input_device(model)
    for done, (ids, places) in enumerate(zip(every, starts, strict=True), 1):
        for start in places:
            record(
                model, ids.to(device), None, take, positions=torch.arange(start, start + ids.shape[1], device=device)
            )
        advance(done)
    shares = found.shares(means[0], means[-1])
    made = StaticCoders(
        keys={layer: spreads[layer][0].coder(found.keys[layer], shares[layer][0]) for layer in found.layers},
        values={layer: spreads[layer][1].coder(found.values[layer], shares[layer][1]) for layer in found.layers},
        fingerprint=here,
        sinks=SINKS,
        texts=len(every),
        tokens=known,
        context=max(start + ids.shape[1] for ids, places in zip(every, starts, strict=True) for start in places),
    )
    if not made.bits:
        said = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise OptionError(f"{said}: no channel gets any bits, so the file would say nothing; write more")
    made.save(path)
    return made


def _starts(model: PreTrainedModel, lengths: Sequence[int], context: int) -> list[list[int]]:
    """Return the positions at which each text begins: 0, and later ones, evenly spread over all readings.

    0 alone, if the model cannot be told at which positions tokens are.
    """
    told = "position_ids" in inspect.signature(model.base_model.forward).parameters
    each = -(-LATER_READINGS // len(lengths)) if told else 0
    count = each * len(lengths)
    later = [[(n + 1 + turn * len(lengths)) / count for turn in range(each)] for n in range(len(lengths))]
    return [
        sorted({0, *(round(part * (context - length)) for part in parts)})
        for length, parts in zip(lengths, later, strict=True)
    ]
