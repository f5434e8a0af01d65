"""Take coded rows apart for a file, and put them together again after checking every part.

When: `grace_opt.hf.saving` writes, and `grace_opt.hf.saved_layer` reads. Whatever is in the file, what comes out can be
decoded and appended to, and has no NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bitplanes import PER_BYTE, unpack_bits
from .classes import FRACTIONS
from .codebooks import codebook
from .coded import CodedTokens
from .codes import LEVEL_BITS, Codes
from .drift import Drift, factor_of
from .row import CLASS_BITS, CodedRow, inverse

#: Raises an error with the text unless the first argument is true.
Require = Callable[[bool, str], None]
#: What the metadata say about the coded tokens of a layer, beside their ``length``.
CODED_FIELDS = ("rows", "prompts", "block", "stored", "sequences")
_OF_CODES = ("levels", "means", "scales", "unit")
_OWN_BASES = ("key_decode", "value_decode")
_SINKS = ("sink_keys", "sink_values")
_DRIFT = ("drift_channels", "drift_means", "drift_scales", "drift_factors")


def taken_apart(coded: CodedTokens) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of all rows, and plain values that describe them; a row that several sequences share, once."""
    rows = list(coded.own_rows())
    tensors = {f"rows.{number}.{name}": t for number, row in enumerate(rows) for name, t in row.tensors().items()}
    if coded.positions is not None:
        tensors["positions"] = coded.positions
    numbers = {id(row): number for number, row in enumerate(rows)}
    return tensors, {
        "rows": [list(row.keys.counts) for row in rows],
        "prompts": [list(row.prompt) for row in rows],
        "block": max(row.block for row in rows),
        "stored": coded.stored,
        "sequences": [numbers[id(row)] for row in coded.rows],
    }


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
    own_bases : bool
        Whether rows have their own bases.
    """

    require: Require
    heads: int
    width: int
    depth: int
    dtype: torch.dtype
    own_bases: bool

    def rows(self, said: Mapping[str, Any], found: Mapping[str, Tensor], batch: int) -> tuple[CodedRow, ...]:
        """Return the row of each sequence.

        Parameters
        ----------
        said : mapping
            Has `CODED_FIELDS`.
        found : mapping
            The tensors whose names begin with ``rows.``.
        batch : int
            Number of sequences.
        """
        counts, prompts, block, stored, sequences = (said[name] for name in CODED_FIELDS)
        self.require(
            isinstance(counts, list) and all(_is_counts(each) for each in counts),
            f"rows={counts!r} are not lists of the numbers of tokens in each class",
        )
        fits = isinstance(prompts, list) and len(prompts) == len(counts) and all(_is_counts(each) for each in prompts)
        self.require(fits, f"prompts={prompts!r} are not lists of the numbers of the prompt's tokens in each class")
        self.require(_at_least(block, 0), f"block={block!r} is not a number of tokens")
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
            self._row(f"row {number}", parts[number], _Counts(counts[number], prompts[number], block), stored)
            for number in used
        ]
        self.require(any(row.tokens for row in rows), "no row has coded tokens")
        return tuple(rows[number] for number in sequences)

    def _row(self, where: str, parts: dict[str, Tensor], sizes: _Counts, stored: int) -> CodedRow:
        counts, prompt, block = sizes.counts, sizes.prompt, sizes.block
        self.require(
            sizes.fit(), f"{where} has {counts} tokens, which are not the prompt's {prompt} and blocks of {block}"
        )
        own = _OWN_BASES if self.own_bases and counts else ()
        codes = [*_OF_CODES, *(f"planes{number}" for number in range(len(counts)))]
        wanted = {"classes", *_SINKS, *own, *(f"{kind}.{name}" for kind in ("keys", "values") for name in codes)}
        # Blocks with few bits correct nothing.
        wanted |= {
            f"{kind}.{n}" for kind in ("keys", "values") if prompt and f"{kind}.{_DRIFT[0]}" in parts for n in _DRIFT
        }
        lost, more = sorted(wanted - set(parts)), sorted(set(parts) - wanted - {"present"})
        self.require(not lost, f"{where} lacks tensors: {', '.join(lost)}")
        self.require(not more, f"{where} has tensors that do not belong: {', '.join(more)}")
        for name, width in zip(_SINKS, (self.width, self.depth), strict=True):
            self._shaped(f"{where}.{name}", parts[name], self.dtype, (self.heads, None, width))
        sinks = parts["sink_keys"].shape[1]
        self.require(parts["sink_values"].shape[1] == sinks, f"{where} differs in its sink tokens of keys and values")
        for kind, width in (("keys", self.width), ("values", self.depth)):
            self._codes(f"{where}.{kind}", _under(f"{kind}.", parts), sizes, width)
        tokens = sum(counts)
        self._shaped(f"{where}.classes", parts["classes"], torch.uint8, (CLASS_BITS, self.heads, _bytes(tokens)))
        self._bases(where, {name: parts[name] for name in own})
        row = CodedRow.of(parts, counts, stored, prompt, block if prompt else 0)
        self._classes(where, row)
        if row.present is not None:
            self._shaped(f"{where}.present", row.present, torch.uint8, (_bytes(stored),))
        here = stored if row.present is None else int(unpack_bits(row.present, stored).sum())
        self.require(
            here == sinks + tokens, f"{where} has {sinks} sink tokens and {tokens} coded ones for {here} places"
        )
        return row

    def _codes(self, where: str, parts: dict[str, Tensor], sizes: _Counts, width: int) -> None:
        counts = sizes.counts
        places = self.heads * len(counts) * width
        self._shaped(f"{where}.levels", parts["levels"], torch.uint8, (LEVEL_BITS, _bytes(places)))
        self._shaped(f"{where}.means", parts["means"], torch.float16, (self.heads, width))
        self._shaped(f"{where}.unit", parts["unit"], torch.float32, (self.heads,))
        codes = Codes.of(parts, counts)
        widths = codes.widths()
        self._shaped(f"{where}.scales", codes.scales, torch.float16, (int((widths > 0).sum()),))
        for number, count in enumerate(counts):
            shape = (int(widths[number].sum()), _bytes(count))
            self._shaped(f"{where}.planes{number}", codes.planes[number], torch.uint8, shape)
        self.require(bool((codes.scales >= 0).all()), f"{where}.scales are not all positive or zero")
        mantissa = torch.frexp(codes.unit)[0]
        powers = bool(((mantissa == 0.5) & (codes.unit > 0)).all())  # not true of inf and NaN
        self.require(powers, f"{where}.unit is not made of powers of two")
        means, factor = codes.means.float().abs().amax(1), codes.unit.new_ones(())
        if codes.drift is not None:
            self._drift(where, codes.drift, sizes.blocks, len(counts), width)
            tables = codes.drift.tables(codes.means, len(counts))
            means, factor = tables[0].abs().amax((0, 2)), factor_of(tables[1].amax())
        largest = codes.scales.float().amax() * factor if len(codes.scales) else codes.unit.new_zeros(())
        reach = (means + largest * float(codebook(codes.unit.device).max())) * codes.unit
        self.require(bool(reach.isfinite().all()), f"{where} has means, scales or units that are not finite")

    def _drift(self, where: str, drift: Drift, blocks: int, classes: int, width: int) -> None:
        none = Drift.none(self.heads, width, classes, 0, drift.means.device)
        count = drift.means.shape[2] if drift.means.dim() == 3 else 0
        for name, tensor in vars(drift).items():
            self._shaped(f"{where}.drift_{name}", tensor, vars(none)[name].dtype, (blocks, self.heads, count))
        for name, places, most in (("channels", drift.channels, width), ("scales", drift.scales, classes * width)):
            within = not count or (int(places.min()) >= 0 and int(places.max()) < most)
            self.require(within, f"{where}.drift_{name} are not places from 0 to {most - 1}")

    def _classes(self, where: str, row: CodedRow) -> None:
        """Check that each head has as many tokens in each class as the codes, in the prompt and in each block."""
        counts = row.keys.counts
        planes = unpack_bits(row.classes, row.tokens).long()
        of_token = planes[0] | planes[1] << 1
        sizes = torch.stack([(of_token == number).sum(-1) for number in range(len(counts))]) if counts else of_token.mT
        same = all(set(found.tolist()) == {count} for found, count in zip(sizes, counts, strict=False))
        self.require(same, f"{where}.classes do not have {', '.join(map(str, counts))} tokens in every head")
        if row.prompt:
            block = (torch.div(row.order() - sum(row.prompt), row.block, rounding_mode="floor") + 1).clamp(min=0)
            alike = bool((block == block[:1]).all())
            parts = torch.split(block[0], list(counts))
            prompt = tuple(int((part == 0).sum()) for part in parts) == row.prompt
            self.require(alike and prompt, f"{where}.classes differ between heads in a block, or from {row.prompt}")

    def _bases(self, where: str, own: Mapping[str, Tensor]) -> None:
        for (name, decode), width in zip(own.items(), (self.width, self.depth), strict=False):
            self._shaped(f"{where}.{name}", decode, torch.float16, (self.heads, width, width))
            usable = bool(decode.isfinite().all())
            if usable:
                try:
                    usable = bool(inverse(decode).isfinite().all())
                except RuntimeError:  # LinAlgError
                    usable = False
            self.require(usable, f"{where}.{name} has no finite inverse")

    def _shaped(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
        """Check type and sizes; None stands for any size."""
        same = tensor.dim() == len(shape) and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        expected = f"{dtype} ({', '.join('any' if size is None else str(size) for size in shape)})"
        self.require(same and tensor.dtype == dtype, f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {expected}")


class _Counts:
    """How many tokens a row has in each class, how many of them the prompt had, and how many a block."""

    def __init__(self, counts: Sequence[int], prompt: Sequence[int], block: int) -> None:
        self.counts, self.prompt, self.block = tuple(counts), tuple(prompt), block

    @property
    def blocks(self) -> int:
        return (sum(self.counts) - sum(self.prompt)) // self.block

    def fit(self) -> bool:
        if not self.prompt:
            return True
        more = [now - before for now, before in zip(self.counts, self.prompt, strict=False)]
        whole = self.block > 0 and sum(more) > 0 and sum(more) % self.block == 0
        return whole and len(self.counts) == len(self.prompt) and min(more) >= 0


def _under(start: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}


def _bytes(bits: int) -> int:
    return -(-bits // PER_BYTE)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= len(FRACTIONS) and all(_at_least(each, 1) for each in value)


def _at_least(value: Any, least: int) -> bool:
    return type(value) is int and value >= least
