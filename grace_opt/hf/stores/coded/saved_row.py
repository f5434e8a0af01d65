"""Take coded rows apart for a file, and put them together again after checking every part.

When: `grace_opt.hf.engine.saving` writes, and `grace_opt.hf.engine.saved_layer` reads. Whatever is in the file, what
comes out can be decoded and appended to, and has no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...bases.classes import CLASS_BITS, FRACTIONS
from ...bases.divergence import Divergence
from ...settings.bits import MAX_BITS
from .bitplanes import PER_BYTE, unpack_bits
from .codes import LEVEL_BITS, Codes
from .row import CodedRow
from .segment import Segment

#: Raises an error with the text unless the first argument is true.
Require = Callable[[bool, str], None]
#: What the metadata say about the coded tokens of a layer, beside their ``length``.
CODED_FIELDS = ("rows", "waiting", "block", "bits", "stored", "sequences")
#: More, if there is padding: the place of each row whose position is 0; where it was measured, the three numbers of the
#: prompt's `Divergence`; and where the sequence was cropped, how many tokens of each segment of each row are hidden.
MORE_FIELDS = {ORIGIN := "origin", DIVERGENCE := "divergence", HIDDEN := "hidden"}
_OF_CODES = ("levels", "means", "scales", "unit")
_SINKS = ("sink_keys", "sink_values")


def taken_apart(
    sequences: Sequence[CodedRow], own: Iterable[CodedRow], positions: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of all rows, and plain values that describe them.

    Parameters
    ----------
    sequences, own : sequence of CodedRow
        The row of each sequence, and every row once, however many sequences share it.
    positions : Tensor or None
        Those of the stored tokens.
    """
    rows = list(own)
    tensors = {f"rows.{number}.{name}": t for number, row in enumerate(rows) for name, t in row.tensors().items()}
    if positions is not None:
        tensors["positions"] = positions
    numbers = {id(row): number for number, row in enumerate(rows)}
    waiting = [0 if row.waiting is None else row.waiting[0].counts[0] for row in rows]
    said: dict[str, Any] = {}
    if any(row.origin for row in rows):
        said[ORIGIN] = [row.origin for row in rows]
    if any(row.hidden for row in rows):
        said[HIDDEN] = [[segment.hidden for segment in row.segments] for row in rows]
    return tensors, said | {
        "rows": [[list(segment.keys.counts) for segment in row.segments] for row in rows],
        "waiting": [row.waits for row in rows],
        "block": max(waiting),
        "bits": [list(row.bits) for row in rows],
        "stored": sequences[0].length,
        "sequences": [numbers[id(row)] for row in sequences],
    }


def divergence_of(require: Require, said: Mapping[str, Any]) -> Divergence | None:
    """Return what the metadata say of how unlike the calibration the prompt was."""
    found = said.get(DIVERGENCE)
    if found is None:
        return None
    fits = isinstance(found, list) and len(found) == len(Divergence._fields)
    fits = fits and all(type(each) is float and 0 <= each < math.inf for each in found)
    require(fits, f"{DIVERGENCE}={found!r} are not the numbers of keys, values and queries")
    return Divergence(*found)


@dataclass(frozen=True)
class RowCheck:
    """What the rows of one layer must fit.

    Attributes
    ----------
    require : callable
    heads, width, depth : int
        Number of KV heads, and widths of keys and of values.
    dtype : torch.dtype
        Of tokens that are dense.
    trellis : bool
        Whether codes are those of a trellis.
    """

    require: Require
    heads: int
    width: int
    depth: int
    dtype: torch.dtype
    trellis: bool

    def rows(self, said: Mapping[str, Any], found: Mapping[str, Tensor], batch: int) -> tuple[CodedRow, ...]:
        """Return the row of each sequence.

        Parameters
        ----------
        said : mapping
            Has `CODED_FIELDS`.
        found : mapping
            The tensors whose names begin with ``rows.``.
        batch : int
            Number of sequences. Perhaps none has codes: beams may have left only rows that were too short.
        """
        counts, waiting, block, bits, stored, sequences = (said[name] for name in CODED_FIELDS)
        self.require(
            isinstance(counts, list) and all(isinstance(row, list) and all(map(_is_counts, row)) for row in counts),
            f"rows={counts!r} are not lists of the numbers of tokens in each class of each segment",
        )
        self.require(_at_least(block, 0), f"block={block!r} is not a number of tokens")
        fits = isinstance(waiting, list) and len(waiting) == len(counts)
        self.require(
            fits and all(_at_least(each, 0) and (each == 0 or (block and each % block == 0)) for each in waiting),
            f"waiting={waiting!r} are not the numbers of waiting tokens of {len(counts)} rows, in blocks of {block}",
        )
        together = {each for each, segments in zip(waiting, counts, strict=True) if segments}
        self.require(len(together) <= 1, f"waiting={waiting!r} differ, and rows grow together")
        fits = isinstance(bits, list) and len(bits) == len(counts) and all(_is_bits(each) for each in bits)
        self.require(fits, f"bits={bits!r} are not the bits of keys and values of {len(counts)} rows")
        origins = said.get(ORIGIN, [0] * len(counts))
        fits = isinstance(origins, list) and len(origins) == len(counts) and all(_at_least(each, 0) for each in origins)
        self.require(fits, f"{ORIGIN}={origins!r} are not the places of {len(counts)} rows that have position 0")
        hidden = said.get(HIDDEN, [[0] * len(row) for row in counts])
        fits = isinstance(hidden, list) and len(hidden) == len(counts) and all(map(_are_fewer, hidden, counts))
        self.require(fits, f"{HIDDEN}={hidden!r} are not numbers of tokens, each fewer than in its segment")
        self.require(_at_least(stored, 1), f"stored={stored!r} is not a number of tokens")
        used = list(range(len(counts)))
        fits = isinstance(sequences, list) and all(_at_least(each, 0) for each in sequences)
        self.require(
            fits and len(sequences) == batch and sorted(set(sequences)) == used,
            f"sequences={sequences!r} are not the numbers of rows 0 to {len(counts) - 1} for {batch} sequences",
        )
        names = {number: f"rows.{number}." for number in used}
        parts = {number: _under(start, found) for number, start in names.items()}
        left = sorted(set(found) - {names[n] + name for n in used for name in parts[n]})
        self.require(not left, f"it has tensors that do not belong: {', '.join(left)}")
        rows = [
            self._row(
                f"row {number}",
                parts[number],
                _Row(counts[number], hidden[number], waiting[number], block, tuple(bits[number]), origins[number]),
                stored,
            )
            for number in used
        ]
        return tuple(rows[number] for number in sequences)

    def _row(self, where: str, parts: dict[str, Tensor], said: _Row, stored: int) -> CodedRow:
        self.require(bool(said.segments) or not said.waiting, f"{where} has waiting tokens behind none that are coded")
        wanted = {*_SINKS}
        for number, counts in enumerate(said.segments):
            wanted |= {f"segments.{number}.{name}" for name in ("classes", *_names_of_codes(len(counts)))}
        if said.waiting:
            wanted |= {f"waiting.{name}" for name in _names_of_codes(1)}
        optional = {"present", "gain", *(f"segments.{number}.weights" for number in range(len(said.segments)))}
        lost, more = sorted(wanted - set(parts)), sorted(set(parts) - wanted - optional)
        self.require(not lost, f"{where} lacks tensors: {', '.join(lost)}")
        self.require(not more, f"{where} has tensors that do not belong: {', '.join(more)}")
        for name, width in zip(_SINKS, (self.width, self.depth), strict=True):
            self._shaped(f"{where}.{name}", parts[name], self.dtype, (self.heads, None, width))
        sinks = parts["sink_keys"].shape[1]
        self.require(parts["sink_values"].shape[1] == sinks, f"{where} differs in its sink tokens of keys and values")
        segments = tuple(
            replace(
                self._segment(f"{where}.segments.{number}", _under(f"segments.{number}.", parts), counts), hidden=own
            )
            for number, (counts, own) in enumerate(zip(said.segments, said.hidden, strict=True))
        )
        waiting = None
        if said.waiting:
            heads = self.heads * (said.waiting // said.block)
            keys, values = self._both(f"{where}.waiting", _under("waiting.", parts), (said.block,), heads)
            waiting = keys, values
        plain = {name: tensor for name, tensor in parts.items() if "." not in name}
        row = CodedRow(segments, waiting, length=stored, bits=said.bits, origin=said.origin, **plain)
        if row.gain is not None:
            self._shaped(f"{where}.gain", row.gain, torch.float16, (self.heads,))
            within = bool(((row.gain >= 0) & (row.gain <= 1)).all())
            self.require(within and bool(row.segments), f"{where}.gain is no share of a mean, or of no coded tokens")
        if row.present is not None:
            self._shaped(f"{where}.present", row.present, torch.uint8, (_bytes(stored),))
        here = stored if row.present is None else int(unpack_bits(row.present, stored).sum())
        self.require(
            here == sinks + row.tokens, f"{where} has {sinks} sink tokens and {row.tokens} coded ones for {here} places"
        )
        return row

    def _segment(self, where: str, parts: dict[str, Tensor], counts: Sequence[int]) -> Segment:
        keys, values = self._both(where, parts, counts, self.heads)
        classes = parts["classes"]
        self._shaped(f"{where}.classes", classes, torch.uint8, (CLASS_BITS, self.heads, _bytes(sum(counts))))
        planes = unpack_bits(classes, sum(counts)).long()
        of_token = planes[0] | planes[1] << 1
        same = all(bool(((of_token == number).sum(-1) == count).all()) for number, count in enumerate(counts))
        self.require(same, f"{where}.classes do not have {', '.join(map(str, counts))} tokens in every head")
        weights = parts.get("weights")
        if weights is not None:
            self._shaped(f"{where}.weights", weights, torch.float32, (2, self.heads, len(counts)))
            usable = bool(weights.isfinite().all()) and bool((weights >= 0).all())
            self.require(usable, f"{where}.weights are negative or not finite")
        return Segment(keys, values, classes, weights)

    def _both(self, where: str, parts: dict[str, Tensor], counts: Sequence[int], heads: int) -> tuple[Codes, Codes]:
        keys, values = (
            self._codes(f"{where}.{kind}", _under(f"{kind}.", parts), counts, heads, width)
            for kind, width in (("keys", self.width), ("values", self.depth))
        )
        return keys, values

    def _codes(self, where: str, parts: dict[str, Tensor], counts: Sequence[int], heads: int, width: int) -> Codes:
        places = heads * len(counts) * width
        self._shaped(f"{where}.levels", parts["levels"], torch.uint8, (LEVEL_BITS, _bytes(places)))
        self._shaped(f"{where}.means", parts["means"], torch.float16, (heads, width))
        self._shaped(f"{where}.unit", parts["unit"], torch.float32, (heads,))
        codes = Codes.of(parts, counts, self.trellis)
        widths = codes.widths()
        self._shaped(f"{where}.scales", codes.scales, torch.float16, (int((widths > 0).sum()),))
        for number, count in enumerate(counts):
            shape = (int(widths[number].sum()), _bytes(count))
            self._shaped(f"{where}.planes{number}", codes.planes[number], torch.uint8, shape)
        self.require(bool((codes.scales >= 0).all()), f"{where}.scales are not all positive or zero")
        mantissa = torch.frexp(codes.unit)[0]
        powers = bool(((mantissa == 0.5) & (codes.unit > 0)).all())  # not true of inf and NaN
        self.require(powers, f"{where}.unit is not made of powers of two")
        largest = codes.scales.float().amax() if len(codes.scales) else codes.unit.new_zeros(())
        reach = (codes.means.float().abs().amax(1) + largest * float(codes.book.max())) * codes.unit
        self.require(bool(reach.isfinite().all()), f"{where} has means, scales or units that are not finite")
        return codes

    def _shaped(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
        """Check type and sizes; None stands for any size."""
        same = tensor.dim() == len(shape) and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        expected = f"{dtype} ({', '.join('any' if size is None else str(size) for size in shape)})"
        self.require(same and tensor.dtype == dtype, f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {expected}")


@dataclass(frozen=True)
class _Row:
    """What the metadata say of a row: tokens of each class of each segment, and how many of these are hidden; waiting
    tokens, blocks; bits; origin."""

    segments: Sequence[Sequence[int]]
    hidden: Sequence[int]
    waiting: int
    block: int
    bits: tuple[float, float]
    origin: int


def _names_of_codes(classes: int) -> list[str]:
    names = [*_OF_CODES, *(f"planes{number}" for number in range(classes))]
    return [f"{kind}.{name}" for kind in ("keys", "values") for name in names]


def _under(start: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}


def _bytes(bits: int) -> int:
    return -(-bits // PER_BYTE)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= len(FRACTIONS) and all(_at_least(each, 1) for each in value)


def _are_fewer(hidden: Any, counts: Sequence[Sequence[int]]) -> bool:
    fits = isinstance(hidden, list) and len(hidden) == len(counts)
    return fits and all(_at_least(own, 0) and own < sum(of) for own, of in zip(hidden, counts, strict=True))


def _is_bits(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(each) in (int, float) and 0 <= each <= MAX_BITS for each in value)
    )


def _at_least(value: Any, least: int) -> bool:
    return type(value) is int and value >= least
