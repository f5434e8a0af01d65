"""`CodedTokens`: a store of tokens coded in few bits, a row for each sequence.

Rows are shared by beams and copies, and replaced when they grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...._util.arrays import without_autocast
from ....errors import CacheError
from ...bases.importance import tail_attention
from ...models.attention import Attended, logit_scaling
from ...models.placement import rank
from ..counting import bits_of
from ..masks import check_mask_covers_cache, gather_mask_columns
from ..packed.tokens import StoredTensor
from ..plan import LayerPlan
from ..store import Step, Store
from ..tail import Tail
from .in_place import attention_in_place
from .parts import CodedParts, Received
from .room import Room, ready_within
from .row import CodedRow
from .saved_row import DIVERGENCE, taken_apart
from .short import dense_rows, why_dense
from .waiting import SETTLED, ready

#: What is counted of codes.
COUNTED = ("codes", "parameters")
#: Which sizes belong to which kind of `Store.sizes`.
_KINDS = {
    "sink_keys": ("key sinks",),
    "keys": tuple(f"key {part}" for part in COUNTED),
    "values": ("value sinks", *(f"value {part}" for part in COUNTED)),
    "indices": ("classes", "tables", "positions", "received"),
}


@dataclass(frozen=True)
class CodedTokens(CodedParts):
    """The older tokens of a layer, coded; the fields are those of `CodedParts`."""

    appends_attended = True
    full_width_instead = "ratio= and fused=False in place of bits="

    @property
    def compressed(self) -> int:
        """Largest number of coded tokens of a sequence."""
        return self.coded

    def needs_our_attention(self, fused: bool) -> bool:
        """Whether only grace_opt's attention function can read it: always."""
        return True

    def warning(self, plan: LayerPlan, newer: int) -> str | None:
        """Say that some of the batch's prompts, or all, stay dense."""
        if plan.bits is not None and plan.bits.limit is not None:
            return None  # they are coded once there are enough tokens
        short, count = sum(not row.tokens for row in self.rows), len(self.rows)
        if short == count and self.divergence is not None:
            return None  # it could have been coded: the guard has said why it is not
        if short == count:
            return why_dense(plan, self.stored + newer)
        return dense_rows(plan, short, count) if short else None

    def dense(self, tail: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values, dense: the coded ones, then the tail's ``(B, H, S_t, d)``."""
        dense = [row.dense(self.bases, self.columns(number)) for number, row in enumerate(self.rows)]
        keys = torch.cat([torch.stack([keys for keys, _ in dense]), tail], dim=2)
        return keys, torch.cat([torch.stack([values for _, values in dense]), value], dim=2)

    def attend(self, step: Step) -> Attended | None:
        """Compute attention over the codes where they lie, if a kernel can, and add up what the newest receive."""
        if step.wants_weights:
            return None
        mask = step.mask
        if mask is not None:
            check_mask_covers_cache(step.module, mask, self, step.tail.shape[2])
            mask = gather_mask_columns(mask, self, step.query.shape[1])
        given = {**step.arguments, "scaling": logit_scaling(step.query, step.arguments)}
        received = self.received.on(step.query.device)
        found = attention_in_place(
            step.module, step.query, step.tail, step.value, mask, self, received=received, **given
        )
        if found is None:
            return None
        output, self.received.sums = found
        return output, None

    def attended(self, keys: Tensor, step: Step, mask: Tensor | None) -> None:
        """Add up the attention that the newest of the dense keys are about to receive."""
        newest, scaling = self.waiting + step.tail.shape[2], logit_scaling(step.query, step.arguments)
        with without_autocast(keys):
            self.received.add(tail_attention(step.query, keys, mask, newest, scaling, step.arguments.get("softcap")))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def extended(self, plan: LayerPlan, tokens: Tail) -> CodedTokens:
        """Append newer tokens, which wait for their classes; give those that have waited long enough theirs."""
        keys, values = tokens.keys.detach(), tokens.values.detach()  # codes have no gradients
        assert plan.bits is not None
        trellis, waits = plan.bits.trellis, plan.bits.limit is not None
        rows = tuple(
            row.appended(keys[number], values[number], self.bases, self.length, trellis, waits)
            for number, row in enumerate(self.rows)
        )
        positions, length = self.positions_with(tokens.length), self.length + tokens.length
        grown = replace(self, length=length, rows=rows, positions=positions)
        count = grown.waiting
        sums = self.received.of(count, tokens.keys)
        if not count:  # no row has codes: the block is dense, and nobody will ask
            return replace(grown, received=Received(sums[..., tokens.length :].clone()))
        coded = ready(count, tokens.length) if plan.bits.limit is None else grown.ready_within(plan, tokens)
        if not coded:
            return grown
        settled = replace(grown.settled(plan, sums[..., :coded]), received=Received(sums[..., coded:].clone()))
        return settled if plan.bits.limit is None else settled.within(plan, tokens, len(tokens.keys))

    def beside(self, others: Sequence[Store], lengths: Sequence[int]) -> CodedTokens:
        """Return the first tokens of single sequences as a batch; see `Store.beside`."""
        stores = [self, *(store for store in others if isinstance(store, CodedTokens))]
        places, rows = max(lengths), []
        for store, length in zip(stores, lengths, strict=True):
            own = store if length == store.length else store.cropped(length)
            rows.append(own.rows[0].padded(places - length))
        unlike = [each.divergence for each in stores if each.divergence is not None]
        most = max(unlike, key=lambda each: each.largest[1], default=None)
        return CodedTokens(places, tuple(rows), self.bases, divergence=most)

    @property
    def turned(self) -> bool:
        """Whether keys leave out a mean that turns with the position."""
        return self.bases is not None and self.bases[0].rotary is not None

    def ready_within(self, plan: LayerPlan, block: Tail) -> int:
        """Return how many of the waiting tokens are coded now, by what may wait under a limit of bytes."""
        room = self.room(plan, block, len(block.keys))
        most = SETTLED
        for row in self.own_rows():
            if row.waits_beyond(room, more=1):
                most = min(most, row.waits)
        return ready_within(self.waiting, block.length, most)

    @classmethod
    def empty(cls, plan: LayerPlan, tail: Tail) -> CodedTokens:
        """Return a store without tokens, for a text whose beginning is too short to be coded."""
        assert plan.bits is not None
        none = tail.cut(0, 0)
        bases = plan.bits.bases(plan.index, none.keys.shape[1], rank())
        if bases is not None:
            bases = bases[0].to(none.keys.device), bases[1].to(none.keys.device)
        made = cls(0, (CodedRow((), None, none.keys[0], none.values[0], 0),) * len(none.keys), bases)
        bits = made.room(plan, tail, len(none.keys)).first_bits(0, 0, tail.length)
        assert plan.bits.limit is not None
        plan.bits.limit.note(plan.index, tail.length, bits)
        return replace(made, rows=tuple(replace(row, bits=(bits, bits)) for row in made.rows))

    def room(self, plan: LayerPlan, tail: Tail, rows: int) -> Room:
        """Return what a layer of one of so many sequences may take."""
        return Room.of(plan, tail.keys[0], tail.values[0], rows, self.turned, self.length)

    def within(self, plan: LayerPlan, tail: Tail, rows: int) -> CodedTokens:
        """Return it with as few bits as so many sequences may have; raises `CacheError` if that is not enough."""
        room = self.room(plan, tail, rows)
        store, block = self, plan.config.tail_block or 1
        while store.waiting and any(row.waits_beyond(room) for row in store.own_rows()):
            coded = -(-store.waiting // block // 2) * block
            sums = store.received.of(store.waiting + tail.length, tail.keys)
            store = replace(store.settled(plan, sums[..., :coded]), received=Received(sums[..., coded:].clone()))
        made = {id(row): row.within(plan, room, self.bases) for row in store.own_rows()}
        found = replace(store, rows=tuple(made[id(row)] for row in store.rows))
        assert plan.bits is not None
        assert plan.bits.limit is not None
        if any(before.bits != after.bits for before, after in zip(store.rows, found.rows, strict=True)):
            fewest = min(row.bits[0] for row in found.rows)
            plan.bits.limit.note(plan.index, self.length + plan.config.recent_window, fewest)
        return found

    def settled(self, plan: LayerPlan, received: Tensor) -> CodedTokens:
        """Give the n oldest waiting tokens their classes; `received` ``(B, H, 3, n)`` is the attention on them."""
        rows = (row.settled(plan, received[number], self.bases) for number, row in enumerate(self.rows))
        return replace(self, rows=tuple(rows))

    def before_tail(self, tail: int) -> CodedTokens:
        """Return it for a tail that was cut to so many tokens."""
        sums = self.received.sums
        return self if sums is None else replace(self, received=Received(sums[..., : self.waiting + tail].clone()))

    def remembered(self) -> Callable[[], None]:
        """Return what takes back the attention that is added up from now on."""
        received, sums = self.received, self.received.sums

        def forget() -> None:
            received.sums = sums

        return forget

    def select(self, rows: Tensor) -> CodedTokens:
        """Select sequences of the batch in this order, repeated if listed repeatedly; codes are not copied."""
        positions = None if self.positions is None else self.positions[rows.to(self.positions.device)]
        made = replace(self, rows=tuple(self.rows[index] for index in rows.tolist()), positions=positions)
        sums = self.received.sums
        if sums is None:
            return made
        # Of rows without codes, which are dense for good, none waits.
        kept = sums[..., self.waiting - made.waiting :]
        return replace(made, received=Received(kept.index_select(0, rows.to(kept.device))))

    def to(self, device: torch.device | str) -> CodedTokens:
        """Move to another device without waiting; rows that are shared stay so, and so do sums of attention."""
        made = self._changed(lambda tensor: tensor.to(device, non_blocking=True), device)
        if self.received.sums is not None:
            self.received.sums = self.received.sums.to(device, non_blocking=True)
        return made

    def outside_inference(self) -> CodedTokens:
        """Return itself: codes are in no graph of gradients."""
        return self

    def cropped(self, length: int) -> CodedTokens:
        """Keep only the first ``length`` tokens; codes of others stay where they lie among those, and are not read.

        Raises
        ------
        CacheError
            If some were evicted, or none that is coded would be left.
        """
        made = {id(row): row.cropped(length) for row in self.own_rows()}
        rows = tuple(made[id(row)] for row in self.rows)
        short = any(before.tokens and not after.tokens for before, after in zip(self.rows, rows, strict=True))
        if self.positions is not None:
            raise CacheError(
                f"the cache can be cropped to {self.length} tokens or more, not to {length}: of the older ones, each "
                "head has evicted others; call reset() and start again"
            )
        if short:
            least = max(row.first_coded for row in self.rows if row.tokens) + 1
            raise CacheError(
                f"the cache can be cropped to {least} tokens or more, or to none, not to {length}: with bits=, at "
                "least one that is coded must stay; call reset() and start again"
            )
        return replace(self, length=length, rows=rows, received=Received())

    def parts(self) -> dict[str, StoredTensor]:
        """Return the tensors that it consists of, by name; the model's bases are not among them."""
        found: dict[str, StoredTensor] = {
            f"rows.{number}.{name}": t
            for number, row in enumerate(self.rows)
            for name, t in (row.tensors() | row.table_tensors()).items()
        }
        return found if self.positions is None else {**found, "positions": self.positions}

    def held(self) -> dict[str, StoredTensor]:
        """Return all tensors kept alive, by name."""
        sums = {} if self.received.sums is None else {"received": self.received.sums}
        return {**self.parts(), **sums}

    def changed(self, change: Callable[[Any], Any]) -> CodedTokens:
        """Return it with a function applied to all tensors but the model's bases."""
        return self._changed(change, None)

    def sizes(self) -> Counter[str]:
        """Return bytes by kind, and numbers of coded elements; rows that several sequences share count once."""
        found: Counter[str] = Counter()
        for row in self.own_rows():
            found["key parameters"] += 0 if row.gain is None else row.gain.nbytes
            for number, (name, sinks) in enumerate((("key", row.sink_keys), ("value", row.sink_values))):
                every = [(each.keys, each.values)[number] for each in row.segments]
                every += [] if row.waiting is None else [row.waiting[number]]
                planes = sum(plane.nbytes for codes in every for plane in codes.planes)
                found[f"{name} codes"] += planes
                found[f"{name} parameters"] += sum(codes.nbytes for codes in every) - planes
                found[f"{name} sinks"] += sinks.nbytes
                found[f"{name} elements"] += len(sinks) * sinks.shape[-1] * row.tokens
            found["classes"] += sum(each.classes.nbytes for each in row.segments)
            found["received"] += sum(0 if each.weights is None else each.weights.nbytes for each in row.segments)
            found["classes"] += 0 if row.present is None else row.present.nbytes
            found["tables"] += sum(part.nbytes for part in row.table_tensors().values())
        found["positions"] = 0 if self.positions is None else self.positions.nbytes
        found["received"] += 0 if self.received.sums is None else self.received.sums.nbytes
        for name, finer in _KINDS.items():
            found[name] = sum(found[part] for part in finer)
        return found

    def bits(self, widths: Sequence[int], sinks: int) -> tuple[list[float], list[int], int]:
        """Count bits as if the model had 16; see `Store.bits`."""
        sizes = self.sizes()
        half = 4 * (sizes["classes"] + sizes["positions"])
        bits = [half + 8.0 * sum(sizes[f"{name} {part}"] for part in COUNTED) for name in ("key", "value")]
        elements = [sizes["key elements"], sizes["value elements"]]
        if self.positions is not None:  # evicted tokens are compressed ones
            elements = [width * max(self.length - sinks, 0) for width in widths]
        dense = sum(bits_of(row.sink_keys) + bits_of(row.sink_values) for row in self.own_rows())
        return bits, elements, dense + (0 if self.received.sums is None else bits_of(self.received.sums))

    def compresses(self, row: int, tokens: int, sinks: int) -> bool:
        """Whether any of a sequence's tokens is coded, or evicted."""
        return (self.positions is not None and tokens > self.stored) or self.rows[row].tokens > 0

    def to_file(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and plain values; see `grace_opt.hf.stores.coded.saved_row`."""
        tensors, about = taken_apart(self.rows, self.own_rows(), self.positions)
        if self.received.sums is not None:
            tensors["received"] = self.received.sums
        if self.divergence is not None:
            about[DIVERGENCE] = list(self.divergence)
        return tensors, {**about, "length": self.length}

    def _changed(self, change: Callable[[Tensor], Tensor], device: torch.device | str | None) -> CodedTokens:
        made = {id(row): row.map(change) for row in self.own_rows()}
        bases = self.bases
        if bases is not None and device is not None:
            bases = bases[0].to(device), bases[1].to(device)
        positions = None if self.positions is None else change(self.positions)
        return replace(self, rows=tuple(made[id(row)] for row in self.rows), bases=bases, positions=positions)
