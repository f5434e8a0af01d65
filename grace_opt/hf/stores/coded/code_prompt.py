"""Code a prompt's keys and values: importance, classes, coordinates, bits, codes; one sequence after the other.

On a GPU, the sequences of a batch take turns: what is done before bits are divided, then the division for all of them,
which has to wait for the device, then the rest. What numbers and sizes of queries and tokens depend on, padding and
places, is copied to the CPU once.

The losses that `grace_opt.allocate` divides a head's budget by are those of a Gaussian: the distortion of a width times
the weighted variance of the channel in the class, times what an error there costs.

Source: the separable loss is the second-order change of logits and outputs; Lagrangian allocation as in Shoham and
Gersho, IEEE Trans. ASSP 36 (1988).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...._util.arrays import to_device
from ...bases.basis import Basis, energy_in, identity_basis
from ...bases.classes import class_sizes, token_weights
from ...bases.divergence import LOOKED_AT, Divergence, divergence
from ...bases.importance import KEPT, ObservedQueries, attention_moments, queries_of_row
from ...bases.rotary import positions_of
from ...models.observation import Observation
from ...models.placement import rank
from ..plan import LayerPlan
from .bitplanes import PER_BYTE, pack_bits
from .coded import CodedTokens
from .codes import PARAMETER_BITS, Codes
from .heads import StoredHeads, code_heads
from .room import Room
from .row import CodedRow
from .segment import Segment, class_of_tokens, class_weights, packed_classes, segment_bits
from .short import MIN_TOKENS

#: Bytes of the position of a token that eviction has left.
POSITION_BYTES = 4


@dataclass(frozen=True)
class _Row:
    """One sequence: what is coded, and what is known about it."""

    keys: Tensor  # (H, n, d), sinks first
    values: Tensor
    every: Tensor  # (H, old + recent, d): the prompt's keys
    old: int
    observed: ObservedQueries
    present: Tensor | None  # (places,) bool, on the CPU
    columns: Tensor  # (n,) or, with eviction, (H, n): where the keys are in the sequence
    padding: int
    bits: tuple[float, float] = (0.0, 0.0)  # of tokens to come, if none of these is coded

    @property
    def seen(self) -> Tensor:
        """All keys that are left, ``(H, n + recent, d)``: made when needed, as they may be copies."""
        if self.keys.shape[1] == self.old:
            return self.every
        return torch.cat([self.keys, self.every[:, self.old :]], dim=1)

    @property
    def places(self) -> int:
        """Number of tokens, padding included."""
        return self.keys.shape[1] if self.present is None else len(self.present)

    @property
    def packed(self) -> Tensor | None:
        """Which places are not padding, in bits."""
        return None if self.present is None else to_device(pack_bits(self.present), self.keys.device)


def code_prompt(
    plan: LayerPlan,
    over: Observation,
    keys: Tensor,
    values: Tensor,
    kept: Tensor | None,
    places: tuple[int, ...] | None = None,
) -> CodedTokens | None:
    """Code all of a prompt but its sink tokens and its recent window.

    Parameters
    ----------
    plan : LayerPlan
        With ``bits``.
    over : Observation
        The prompt's observed queries, and its padding.
    keys, values : Tensor
        ``(B, H, S, d)`` and ``(B, H, S, d_v)``, of exactly the prompt.
    kept : Tensor or None
        ``(B, H, n)``, ascending: the positions before the recent window that eviction has left; None for all.
    places : tuple of int, optional
        How many of these each of the budget's layers has; by default as many as this one.

    Returns
    -------
    CodedTokens or None
        None if every sequence is too short, and nothing is evicted: what an eviction has left may be all dense.
    """
    config, budget = plan.config, plan.bits
    assert budget is not None
    sinks, old = config.sink_tokens, over.length - config.recent_window
    if kept is None and old - sinks < MIN_TOKENS:
        budget.check(1, keys.nbytes + values.nbytes, True)
        return None
    heads = keys.shape[1]
    if budget.limit is not None and plan.index == budget.layers[0]:
        budget.limit.chosen.clear()
    if places is None or len({*places}) == 1:  # one stands for all
        places = (old if kept is None else kept.shape[-1],)
    over, left = _on_cpu(over), None if kept is None or over.valid is None else kept[:, 0].cpu()
    real = [old] * len(keys) if over.valid is None else over.valid[:, :old].sum(1).tolist()
    needs = [[_needs(plan, keys, values, each, count) for each in places] for count in real]
    if budget.total_bytes is not None:
        # Before any is coded, and for the most demanding one: the error names what will do for all of them.
        least = [(sum(each.least for each in row), not any(each.coded for each in row)) for row in needs]
        budget.check(len(keys), *max(least), len(places))

    @functools.cache
    def bases() -> tuple[Basis, Basis] | None:
        """Return the model's, which may have to be made now: not for a prompt that stays dense."""
        found = budget.bases(plan.index, heads, rank())
        return None if found is None else (found[0].to(keys.device), found[1].to(keys.device))

    # Of other layers it is predicted; this one's rows are there to be counted.
    own = 0 if len(places) == 1 else budget.layers.index(plan.index)

    def ready(number: int) -> _Ready | _Row:
        row = _row(over, keys, values, kept, left, number, old)
        needs[number][own] = _needs(plan, keys, values, row.places, row.keys.shape[1])
        made = _ready(plan, over, row, bases, needs[number])
        if made is None and budget.limit is not None:
            bits = _first_bits(plan, over, row, 0, row.keys.shape[1])
            return replace(row, bits=(bits, bits))
        return made or row

    rows: list[CodedRow] = []
    unlike: list[Tensor] = []
    at_once = 1 if keys.device.type == "cpu" else len(keys)
    for first in range(0, len(keys), at_once):
        some = [ready(number) for number in range(first, first + at_once)]
        unlike += [each.unlike for each in some if isinstance(each, _Ready) and each.unlike is not None]
        rows += _coded(some)
        del some  # before the next ones are made
    if kept is None and not any(row.tokens for row in rows):
        budget.check(1, keys.nbytes + values.nbytes, True)
        return None
    positions = None if kept is None else kept.to(torch.int32)
    found = Divergence(*torch.stack(unlike).amax(0).tolist()) if unlike else None
    if found is not None and budget.guard.check(plan.index, found):
        rows = [_all_dense(_row(over, keys, values, kept, left, number, old)) for number in range(len(keys))]
    used = bases() if any(row.tokens for row in rows) else None
    return CodedTokens(old, tuple(rows), used, positions, divergence=found)


@dataclass(frozen=True)
class _Needs:
    """What a layer of a sequence takes whatever the widths are."""

    coded: int  # number of tokens; 0 if there are too few
    dense: int  # bytes of what stays dense, and of what says which tokens there are
    fixed: tuple[float, float]  # bits per head that coded keys, and values, take in any case
    heads: int

    @property
    def least(self) -> float:
        """Bytes without any bits."""
        return self.dense + self.heads * sum(self.fixed) / 8


def _needs(plan: LayerPlan, keys: Tensor, values: Tensor, places: int, real: int) -> _Needs:
    """Return the needs of a layer with these shapes, ``(..., H, S, d)``, that keeps `places` of the tokens before the
    recent window, of which `real` are not padding."""
    budget, config = plan.bits, plan.config
    assert budget is not None
    heads, length, width = keys.shape[-3:]
    depth, old = values.shape[-1], length - config.recent_window
    count = min(places, real)
    token = heads * (width + depth) * keys.element_size()
    beside = -(-places // PER_BYTE) * (count < places) + heads * places * POSITION_BYTES * (places < old)
    coded = count - config.sink_tokens
    if coded < MIN_TOKENS:
        return _Needs(0, (count + config.recent_window) * token + beside, (0.0, 0.0), heads)
    # Whatever the widths are. Which places are padding is not counted: a padded row has the widths it would have alone.
    classes, gain = len(class_sizes(coded)), 0 if budget.source is None else PARAMETER_BITS
    fixed = segment_bits(coded, classes, width) + gain, segment_bits(coded, classes, depth)
    return _Needs(coded, (config.sink_tokens + config.recent_window) * token + beside, fixed, heads)


def _on_cpu(over: Observation) -> Observation:
    """Copy places and padding, as numbers of tokens depend on them."""
    valid, places = (None if each is None else each.cpu() for each in (over.valid, over.places))
    return over._replace(valid=valid, places=places)


def _row(
    over: Observation,
    keys: Tensor,
    values: Tensor,
    kept: Tensor | None,
    left: Tensor | None,
    number: int,
    old: int,
) -> _Row:
    """Return a sequence; `left` ``(B, n)``, on the CPU, is what `kept` says of any head, if there is padding."""
    own_keys, own_values = keys[number], values[number]
    valid = None if over.valid is None else over.valid[number]
    if valid is not None and bool(valid.all()):
        valid = None
    padding = 0 if valid is None else int((~valid).sum())
    stored_keys, stored_values = own_keys[:, :old], own_values[:, :old]
    present = None if valid is None else valid[:old]
    if kept is not None:
        place = kept[number][..., None]
        stored_keys = stored_keys.gather(1, place.expand(-1, -1, keys.shape[-1]))
        stored_values = stored_values.gather(1, place.expand(-1, -1, values.shape[-1]))
        present = None if present is None or left is None else present[left[number]]
        present = None if present is not None and bool(present.all()) else present
    columns = torch.arange(old, device="cpu") if kept is None else kept[number]
    if present is not None:
        real = to_device(torch.nonzero(present)[:, 0], keys.device)
        stored_keys, stored_values = stored_keys[:, real], stored_values[:, real]
        columns = torch.nonzero(present)[:, 0] if kept is None else columns[:, real]
    return _Row(stored_keys, stored_values, own_keys, old, queries_of_row(over, number), present, columns, padding)


@dataclass(frozen=True)
class _Ready:
    """One sequence, of which only the codes are missing."""

    row: _Row
    sinks: int
    classes: Tensor  # (H, n)
    stored: list[StoredHeads]  # keys and values
    bits: tuple[float, float]
    gain: Tensor | None
    origin: int
    unlike: Tensor | None  # what a Divergence consists of
    again: bool  # whether it may be coded again

    def coded(self, keys: Codes, values: Codes) -> CodedRow:
        """Return the row with these codes."""
        weights = [each.weights for each in self.stored]
        of_classes = class_weights(weights, self.stored[0].sizes) if self.again else None
        return CodedRow(
            segments=(Segment(keys, values, packed_classes(self.classes), of_classes),),
            waiting=None,
            sink_keys=self.row.keys[:, : self.sinks].clone(),
            sink_values=self.row.values[:, : self.sinks].clone(),
            length=self.row.places,
            present=self.row.packed,
            bits=self.bits,
            gain=self.gain,
            origin=self.origin,
        )


def _coded(rows: list[_Ready | _Row]) -> list[CodedRow]:
    """Return sequences that were made ready, coded, and the others dense."""
    stored = [each for row in rows if isinstance(row, _Ready) for each in row.stored]
    codes = iter(code_heads(stored) if stored else ())
    return [row.coded(next(codes), next(codes)) if isinstance(row, _Ready) else _all_dense(row) for row in rows]


def _ready(
    plan: LayerPlan,
    over: Observation,
    row: _Row,
    bases: Callable[[], tuple[Basis, Basis] | None],
    needs: list[_Needs],
) -> _Ready | None:
    """Make a row ready; None if it is too short, or means and widths alone would take more than the budget."""
    budget, sinks = plan.bits, plan.config.sink_tokens
    assert budget is not None
    heads, count, width = row.keys.shape
    coded, depth = max(count - sinks, 0), row.values.shape[-1]
    if coded < MIN_TOKENS:
        return None
    sizes = class_sizes(coded)
    tokens = tuple(each.coded for each in needs)
    elements, fixed = heads * sum(tokens), [sum(each.fixed[kind] for each in needs) for kind in (0, 1)]
    if budget.limit is not None:
        key_bits = value_bits = _first_bits(plan, over, row, coded, sinks)
    else:
        key_bits, value_bits = budget.means(
            len(over.queries),
            elements * (width + depth),
            sum(each.dense for each in needs),
            heads * sum(fixed) / 8,
            len(needs),
        )
    # What every head takes is no matter of shares, so that no head's share is less than that.
    mean = key_bits - fixed[0] / (sum(tokens) * width), value_bits - fixed[1] / (sum(tokens) * depth)
    if min(mean) < 0:
        return None
    found = bases()
    shares = budget.head_bits(plan.index, heads, rank(), mean, tokens if len(tokens) > 1 else None)
    observed = row.observed
    first, second = attention_moments(
        observed.queries, observed.weights, row.seen, over.scaling, over.softcap, observed.whole
    )
    inner = slice(sinks, sinks + coded)
    first, weights = first[:, inner], token_weights(first[:, inner], second[:, inner])
    classes = class_of_tokens(first, sizes)
    order = classes.argsort(dim=-1, stable=True)
    spread = to_device(torch.nonzero(observed.spread)[:, 0], observed.queries.device)
    moment = _moment(observed.queries[:, spread].reshape(heads, -1, width))
    stored = []
    inner_keys, gain, origin = row.keys[:, sinks:], None, 0
    rotary = None if found is None else found[0].rotary
    if rotary is not None:
        columns, origin = row.columns[..., sinks:], row.padding
        gain, saved = rotary.gain(inner_keys, moment, positions_of(columns, origin))
        if row.padding:  # `generate` counts positions from the first real token on, a model by itself from the padding
            other, more = rotary.gain(inner_keys, moment, positions_of(columns, 0))
            if more > saved:
                gain, origin = other, 0
        inner_keys = rotary.taken_off(inner_keys, gain, positions_of(columns, origin))
    for number, tensor in enumerate((inner_keys, row.values[:, sinks:])):
        own = tensor.shape[2]
        basis = identity_basis(heads, own, device=tensor.device) if found is None else found[number]
        energy, encoding = basis.energy if number else energy_in(basis, moment), None if found is None else basis.encode
        bits, by_class = shares[number] * coded * own, weights[number].gather(1, order)
        stored.append(StoredHeads(tensor, order, encoding, by_class, energy, sizes, bits, budget.trellis))
    unlike = None
    if found is not None and not budget.guard.is_off:
        early, asked = spread[: LOOKED_AT // KEPT], stored[0].energy
        if len(early) < len(spread):
            asked = energy_in(found[0], _moment(observed.queries[:, early].reshape(heads, -1, width)))
        unlike = divergence(found, inner_keys, row.values[:, sinks:], asked * over.scaling**2)
    again = budget.limit is not None
    return _Ready(row, sinks, classes, stored, (key_bits, value_bits), gain, origin, unlike, again)


def _first_bits(plan: LayerPlan, over: Observation, row: _Row, coded: int, sinks: int) -> float:
    """Return the bits of a row under a limit of bytes, of which some tokens are coded and some are dense."""
    budget = plan.bits
    assert budget is not None
    assert budget.limit is not None
    turned = budget.calibrated is not None and budget.calibrated.keys[plan.index].rotary is not None
    room = Room.of(plan, row.keys, row.values, len(over.queries), turned, row.old)
    bits = room.first_bits(coded, sinks, over.length)
    budget.limit.note(plan.index, over.length, bits)
    return bits


def _moment(tensor: Tensor) -> Tensor:
    """Return the second moments of ``(H, n, d)``, ``(H, d, d)`` float64."""
    wide = tensor.double()
    return wide.mT @ wide / wide.shape[1]


def _all_dense(row: _Row) -> CodedRow:
    """Return a row without codes: every token is kept as sink tokens are."""
    return CodedRow((), None, row.keys.clone(), row.values.clone(), row.places, row.packed, row.bits)
