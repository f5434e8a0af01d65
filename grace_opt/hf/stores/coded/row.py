"""`CodedRow`: the coded keys and values of one sequence in one layer.

Rows of a batch are coded one by one, each as it would be alone: they share no means, no scales and no class sizes, and
padding is not stored. Sink tokens are dense.

Source: StreamingLLM (arXiv 2309.17453) for sink tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...._util.arrays import to_device
from ....kernels.cache.coded.table import CodedSequence, CodesTable, table_of, units_of
from ...bases.basis import Basis
from ...bases.rotary import RotaryMean, positions_of
from ..plan import LayerPlan
from .again import coded_again
from .bitplanes import append_bits, pack_bits, unpack_bits
from .codes import Codes
from .room import STEP, Room
from .segment import Segment
from .waiting import settled, waiting_codes, waiting_coordinates, waiting_width

_LARGEST = float(torch.finfo(torch.float16).max)


@dataclass(frozen=True)
class CodedRow:
    """One sequence's older tokens, coded.

    Attributes
    ----------
    segments : tuple of Segment
        The tokens that are neither padding nor sinks, in the order of the sequence: those of the prompt, then newer
        ones. Without any (the prompt was too short), all tokens are kept as sinks are.
    waiting : (Codes, Codes) or None
        Keys and values of tokens that come after those and wait for their classes
        (:mod:`grace_opt.hf.stores.coded.waiting`).
    sink_keys, sink_values : Tensor
        ``(H, s, d)`` and ``(H, s, d_v)``: the first tokens, dense.
    length : int
        Number of places, padding included.
    present : Tensor or None
        ``(⌈length/8⌉,)`` uint8: one bit per place, 0 at padding. None if there is no padding.
    bits : (float, float)
        Mean bits per element of keys and of values that every segment has, with everything counted.
    gain : Tensor or None
        ``(H,)`` float16: how much of the rotary mean is not in the codes of keys; None if nothing was taken off.
    origin : int
        Place in the sequence, padding included, whose position is 0: the first token that is no padding, as a rule.
    tokens, waits, hidden : int
        Number of coded tokens, of those among them that wait, and of codes that stand for no token (`Segment.hidden`).
    """

    segments: tuple[Segment, ...]
    waiting: tuple[Codes, Codes] | None
    sink_keys: Tensor
    sink_values: Tensor
    length: int
    present: Tensor | None = None
    bits: tuple[float, float] = (0.0, 0.0)
    gain: Tensor | None = None
    origin: int = 0
    tokens: int = field(init=False)
    waits: int = field(init=False)
    hidden: int = field(init=False)
    _table: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        waits = 0
        if self.waiting is not None:
            waits = len(self.waiting[0].means) // len(self.sink_keys) * self.waiting[0].counts[0]
        # Counted once: every step asks for them.
        object.__setattr__(self, "waits", waits)
        object.__setattr__(self, "tokens", sum(segment.tokens for segment in self.segments) + waits)
        object.__setattr__(self, "hidden", sum(segment.hidden for segment in self.segments))

    def dense(self, bases: tuple[Basis, Basis] | None, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return keys ``(H, length, d)`` and values ``(H, length, d_v)`` in the order of the sequence; 0 at padding.

        Parameters
        ----------
        bases : (Basis, Basis) or None
            Those of keys and values; None if their channels are coded as they are.
        columns : Tensor or None
            ``(H, length)``: where the places are in the sequence, padding included; None for all, in order.
        """
        parts = [segment.coordinates() for segment in self.segments]
        if self.waiting is not None:
            parts.append(self.waiting_coordinates())
        found = []
        for number, (decode, sinks) in enumerate(zip(_decodes(bases), (self.sink_keys, self.sink_values), strict=True)):
            together = sinks
            if parts:
                tokens = decoded(torch.cat([part[number] for part in parts], dim=1), decode)
                if number == 0 and bases is not None and self.gain is not None:
                    tokens = _moved(tokens, bases[0], -self.gain, self.positions(columns)[..., sinks.shape[1] :])
                tokens = _cast(tokens, sinks.dtype)
                together = torch.cat([sinks, tokens], dim=1)
            if not together.shape[1]:  # nothing but padding
                together = sinks.new_zeros(len(sinks), self.length, sinks.shape[-1])
            elif self.present is not None:
                present = unpack_bits(self.present, self.length).bool()
                place = (present.cumsum(0) - 1).clamp(min=0)
                together = torch.where(present[:, None], together[:, place], 0)
            found.append(together)
        return found[0], found[1]

    def positions(self, columns: Tensor | None = None) -> Tensor:
        """Return the positions of all stored tokens but padding, ``(n,)`` or ``(H, n)``; `columns` as in `dense`."""
        if columns is None:
            columns = torch.arange(self.length, device="cpu")
        if self.present is not None:
            columns = columns[..., unpack_bits(self.present, self.length).bool().to(columns.device)]
        return positions_of(columns, self.origin)

    def appended(
        self,
        keys: Tensor,
        values: Tensor,
        bases: tuple[Basis, Basis] | None,
        column: int,
        trellis: bool,
        waits: bool = False,
    ) -> CodedRow:
        """Append a block of newer tokens, which wait for their classes.

        A row without codes keeps them dense, unless it `waits` all the same.

        Parameters
        ----------
        keys, values : Tensor
            ``(H, n, d)`` and ``(H, n, d_v)``, n the same for every block.
        bases : (Basis, Basis) or None
            As in `dense`.
        column : int
            Where the first of them is in the sequence, padding included.
        trellis : bool
            Whether to code by a trellis.
        waits : bool
        """
        more, present = keys.shape[1], self.present
        if present is not None:
            present = append_bits(present, self.length, torch.ones(more, dtype=torch.uint8, device=present.device))
        grown = replace(self, length=self.length + more, present=present)
        if not (self.segments or waits):
            sink_keys, sink_values = torch.cat([self.sink_keys, keys], 1), torch.cat([self.sink_values, values], 1)
            return replace(grown, sink_keys=sink_keys, sink_values=sink_values)
        made = []
        if self.gain is not None and bases is not None:
            places = torch.arange(column, column + more, device="cpu")
            keys = _moved(keys, bases[0], self.gain, positions_of(places, self.origin))
        for number, tensor in enumerate((keys, values)):
            moved = tensor.float() if bases is None else tensor.float() @ bases[number].encode
            before = None if self.waiting is None else self.waiting[number]
            made.append(waiting_codes(before, moved, waiting_width(number, self.bits[number]), trellis))
        return replace(grown, waiting=(made[0], made[1]))

    def cropped(self, length: int) -> CodedRow:
        """Return its first places, padding included; tokens that waited have their codes for good."""
        present = None if self.present is None else unpack_bits(self.present, self.length)[:length]
        left = length if present is None else int(present.sum())
        sinks = self.sink_keys[:, :left].clone(), self.sink_values[:, :left].clone()
        left, segments = left - sinks[0].shape[1], []
        for each in (*self.segments, *self._blocks()):
            if left > 0:
                segments.append(each.cropped(min(left, each.tokens)))
                left -= segments[-1].tokens
        return replace(
            self,
            segments=tuple(segments),
            waiting=None,
            sink_keys=sinks[0],
            sink_values=sinks[1],
            length=length,
            present=None if present is None else pack_bits(present),
        )

    @property
    def first_coded(self) -> int:
        """Place of the first token that is coded; there must be one."""
        sinks = self.sink_keys.shape[1]
        return sinks if self.present is None else int(unpack_bits(self.present, self.length).nonzero()[sinks, 0])

    def padded(self, padding: int) -> CodedRow:
        """Return it behind so much padding, of a row without any."""
        if not padding:
            return self
        places = torch.arange(self.length + padding, device=self.sink_keys.device)
        return replace(self, length=len(places), present=pack_bits(places >= padding), origin=padding)

    def _blocks(self) -> Iterator[Segment]:
        """Yield the blocks that wait, as segments."""
        heads, waiting = len(self.sink_keys), self.waiting
        while waiting is not None and len(waiting[0].means):
            (keys, more_keys), (values, more_values) = (codes.split(heads) for codes in waiting)
            yield Segment.of_block(keys, values)
            waiting = more_keys, more_values

    def settled(self, plan: LayerPlan, received: Tensor, bases: tuple[Basis, Basis] | None) -> CodedRow:
        """Code the oldest waiting tokens, whole blocks; `received`, of these, is as in `bits.waiting.settled`."""
        if self.waiting is None:
            return self
        heads = len(self.sink_keys)
        blocks = received.shape[-1] // self.waiting[0].counts[0]
        (old_keys, keys), (old_values, values) = (codes.split(heads * blocks) for codes in self.waiting)
        coordinates = waiting_coordinates(old_keys, heads), waiting_coordinates(old_values, heads)
        segment = settled(plan, coordinates, received, self._energies(bases), self.bits)
        waiting = (keys, values) if len(keys.means) else None
        return replace(self, segments=(*self.segments, segment), waiting=waiting)

    def within(self, plan: LayerPlan, room: Room, bases: tuple[Basis, Basis] | None) -> CodedRow:
        """Return it with as few bits as it may have; raises `CacheError` if even the fewest are too many."""
        if not self.segments:
            return self
        counts = [each.keys.counts for each in self.segments]
        most = room.mean_bits(counts, self.sink_keys.shape[1], self.length, self._waiting_bytes(room))
        fixed = room.fixed(counts)
        tokens = sum(map(sum, counts)) * room.heads
        elements = tokens * room.width, tokens * room.depth
        asked = sum(max(mean * own, least) for mean, own, least in zip(self.bits, elements, fixed, strict=True))
        if asked <= most * sum(elements):
            return self
        least = max(own / of for own, of in zip(fixed, elements, strict=True))
        bits = max(most * STEP, least)
        return self.again(plan, bases, bits)

    def again(self, plan: LayerPlan, bases: tuple[Basis, Basis] | None, bits: float) -> CodedRow:
        """Return it with all segments coded again, in so many bits per element; those that wait stay as they are."""
        made = coded_again(plan, self.segments, self._energies(bases), (bits, bits))
        return replace(self, segments=made, bits=(bits, bits))

    def waits_beyond(self, room: Room, more: int = 0) -> bool:
        """Return whether its waiting tokens, and some blocks `more`, take more than is kept for them."""
        undivided = room.undivided(self.sink_keys.shape[1])
        # Those that wait already may have more bits than those that come.
        held = self._waiting_bytes(room) + more * room.waiting_block(self.bits, self.length)
        return held > room.may_wait(undivided, self.bits, self.length) * room.waiting_block(self.bits, self.length)

    def _waiting_bytes(self, room: Room) -> float:
        codes = 0 if self.waiting is None else sum(codes.nbytes for codes in self.waiting)
        return codes + self.waits / room.block * room.beside_waiting(self.length)

    def _energies(self, bases: tuple[Basis, Basis] | None) -> tuple[Tensor, Tensor]:
        """Return what errors in each coordinate of keys and values cost, ``(H, d)``: without a basis, all alike."""
        if bases is not None:
            return bases[0].energy.float(), bases[1].energy.float()
        sinks = self.sink_keys, self.sink_values
        keys, values = (each.new_ones((len(each), each.shape[-1]), dtype=torch.float32) for each in sinks)
        return keys, values

    def waiting_coordinates(self) -> tuple[Tensor, Tensor]:
        """Return the coordinates of waiting keys and values, ``(H, n, d)`` float32 each; there must be some."""
        assert self.waiting is not None
        keys, values = (waiting_coordinates(codes, len(self.sink_keys)) for codes in self.waiting)
        return keys, values

    def left_out(self, rotary: RotaryMean) -> Tensor:
        """Return the part of a mean that is not in the codes of keys, ``(H, 2, P)`` float32: made once."""
        if "left out" not in self._table:
            gain = rotary.mean.new_zeros(len(rotary.mean)) if self.gain is None else self.gain.float()
            self._table["left out"] = rotary.mean * gain[:, None, None]
        found: Tensor = self._table["left out"]
        return found

    def table(self) -> CodesTable:
        """Return where the codes are, for `grace_opt.kernels.cache.coded`: made once, and again where tensors moved."""
        known = self._table
        if "first" not in known:
            known["first"] = [each.keys.means for each in self.segments[:1]]
            known["first"] += [] if self.waiting is None else [self.waiting[0].means]
        where = [each.data_ptr() for each in known["first"]]
        if known.get("where") != where:
            heads = len(self.sink_keys)
            units = [units_of(each.keys, each.values, heads) for each in self.segments]
            units += [] if self.waiting is None else [units_of(*self.waiting, heads, newest=True)]
            known.update(where=where, found=table_of(units, heads), sequence=None)
        found: CodesTable = known["found"]
        return found

    def sequence(
        self, bases: tuple[Basis, Basis] | None, columns: Tensor | None = None, placed: bool = False
    ) -> CodedSequence:
        """Return what `grace_opt.kernels.cache.coded` reads: made once, as `table` is; parameters as in `dense`.

        `placed` says whether anything is added by position.
        """
        known = self._table.get("sequence")
        if (
            known is None
            or known[0] is not bases
            or placed > known[4]
            or [part.data_ptr() for part in known[1]] != known[2]
        ):
            table, dense = self.table(), (self.sink_keys, self.sink_values, *_decodes(bases))
            parts = [*self._table["first"], *(part for part in dense if part is not None)]
            known = (
                bases,
                parts,
                [part.data_ptr() for part in parts],
                CodedSequence(table, *dense, self._coded_positions(columns) if placed else None),
                placed,
            )
            self._table["sequence"] = known
        found: CodedSequence = known[3]
        return found

    def _coded_positions(self, columns: Tensor | None) -> Tensor | None:
        """Return the position of every coded token, in the order of `table`, ``(H, T)``: `length` of hidden ones."""
        if not self.segments:
            return None
        if "positions" not in self._table:
            sinks = self.sink_keys.shape[1]
            every = to_device(self.positions(columns)[..., sinks:], self.sink_keys.device)
            every, parts, first = every.expand(len(self.sink_keys), -1), [], 0
            for segment in self.segments:
                own = functional.pad(every[:, first : first + segment.tokens], (0, segment.hidden), value=self.length)
                parts.append(own.gather(1, segment.order()))
                first += segment.tokens
            found = torch.cat([*parts, every[:, first:]], dim=1)
            small = columns is None and self.length < torch.iinfo(torch.int16).max
            self._table["positions"] = found.to(torch.int16 if small else torch.int32).contiguous()
        positions: Tensor = self._table["positions"]
        return positions

    def table_tensors(self) -> dict[str, Tensor]:
        """Return what `table` has made, by name; nothing before the first step that reads codes where they lie."""
        if "found" not in self._table:
            return {}
        found: CodesTable = self._table["found"]
        named = {"table.units": torch.from_numpy(found.units), "table.tasks": torch.from_numpy(found.tasks)}
        of_gpu = (each.tensors() for each in found.on_device)
        named |= {f"table.{name}": self._table[name] for name in ("positions", "left out") if name in self._table}
        return named | {f"table.gpu.{name}": tensor for each in of_gpu for name, tensor in each.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave addresses out of copies."""
        return {**self.__dict__, "_table": {}}

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that is stored, by name."""
        named = self._plain()
        for number, segment in enumerate(self.segments):
            named |= {f"segments.{number}.{name}": tensor for name, tensor in segment.tensors().items()}
        for kind, codes in zip(("keys", "values"), self.waiting or (), strict=False):
            named |= {f"waiting.{kind}.{name}": tensor for name, tensor in codes.tensors().items()}
        return named

    def map(self, change: Callable[[Tensor], Tensor]) -> CodedRow:
        """Apply a function to every tensor."""
        waiting = None if self.waiting is None else (self.waiting[0].map(change), self.waiting[1].map(change))
        made = replace(self, segments=tuple(each.map(change) for each in self.segments), waiting=waiting)
        return replace(made, **{name: change(tensor) for name, tensor in self._plain().items()})  # type: ignore[arg-type]

    def _plain(self) -> dict[str, Tensor]:
        """Return the tensors that are not of codes."""
        names = ("sink_keys", "sink_values", "present", "gain")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _decodes(bases: tuple[Basis, Basis] | None) -> tuple[Tensor | None, Tensor | None]:
    """Return by what coordinates of keys and of values are multiplied, ``(H, d, d)``; None: they are as they are."""
    return (None, None) if bases is None else (bases[0].decode, bases[1].decode)


def decoded(coordinates: Tensor, decode: Tensor | None) -> Tensor:
    """Return the tokens ``(H, T, d)`` with these coordinates; `decode` as in `_decodes`."""
    return coordinates if decode is None else coordinates @ decode.float()


def _moved(keys: Tensor, basis: Basis, gain: Tensor, positions: Tensor) -> Tensor:
    """Return keys less so much of the rotary mean of a basis; as they are if it has none."""
    return keys if basis.rotary is None else basis.rotary.taken_off(keys, gain, positions)


def _cast(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float16:  # an error must not take the largest numbers beyond it
        tokens = tokens.clamp(-_LARGEST, _LARGEST)
    return tokens.to(dtype)
