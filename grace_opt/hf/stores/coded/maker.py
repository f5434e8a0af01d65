"""`CODED`: makes stores of coded tokens: of a prompt, or of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import CacheError
from ...models.observation import Observation
from ...models.placement import rank
from ..maker import StoreMaker
from ..old_tokens import evicted_positions, tokens_kept
from ..plan import LayerPlan
from ..saved import LayerCheck
from ..store import Store
from ..tail import Tail
from ..tally import LayerReading
from .code_prompt import code_prompt
from .coded import CodedTokens
from .parts import Received
from .saved_row import CODED_FIELDS, MORE_FIELDS, RowCheck, divergence_of
from .short import why_dense

#: Largest number that can be coded: products of a query and a key must stay in the range of float32.
MAX_CODED = 1e18


class CodedMaker(StoreMaker):
    """Makes `CodedTokens`."""

    def of_prompt(self, plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Store | None:
        """Code all of a prompt but its recent window; None if it is too short, and nothing is evicted."""
        assert plan.bits is not None
        recent, length = plan.config.recent_window, over.length
        kept = evicted_positions(plan, over, keys, values, recent, tokens_kept(plan, plan.index, length))
        places = tuple(tokens_kept(plan, layer, length) - recent for layer in plan.bits.layers)
        return code_prompt(plan, over, keys, values, kept, places)

    def of_beginning(self, plan: LayerPlan, tail: Tail) -> Store:
        """Return a store without tokens, for a text whose beginning is too short to be coded."""
        return CodedTokens.empty(plan, tail)

    def of_file(
        self, check: LayerCheck, plan: LayerPlan, about: dict[str, Any], tensors: dict[str, Tensor], tail: Tail
    ) -> Callable[[torch.device], Store]:
        """Check what `Store.to_file` gave; return what puts a store on a device."""
        assert plan.bits is not None
        rows = {name: tensor for name, tensor in tensors.items() if name.startswith("rows.")}
        others = {name: tensor for name, tensor in tensors.items() if name not in rows}
        optional = tuple(name for name in ("positions", "received") if name in others)
        check.names(about, {"length", *CODED_FIELDS, *(MORE_FIELDS & about.keys())}, others, optional)
        (batch, heads, recent, width), depth = tail.keys.shape, tail.values.shape[3]
        coded = isinstance(about["rows"], list) and any(about["rows"])  # else no basis is needed
        bases = plan.bits.bases(plan.index, heads, rank()) if coded else None
        if bases is not None:
            made = tuple(tuple(basis.decode.shape) for basis in bases)
            check.require(
                made == ((heads, width, width), (heads, depth, depth)),
                f"the model's basis is for keys {made[0]} and values {made[1]}, and the tail has {heads} heads of "
                f"{width} and {depth} channels",
            )
        row_check = RowCheck(
            check.require,
            heads,
            width,
            depth,
            tail.keys.dtype,
            plan.bits.trellis,
        )
        block = plan.config.tail_block
        check.require(about["block"] in (0, block), f"block={about['block']!r} for a cache with tail_block={block}")
        made_rows = row_check.rows(about, rows, batch)
        check.placed(about["length"], about["stored"], tensors.get("positions"), batch, heads)
        received, newest = tensors.get("received"), recent + max(row.waits for row in made_rows)
        if received is not None:
            fits = received.dtype == torch.float32 and received.dim() == 4 and received.shape[3] == newest
            fits = fits and received.shape[:3] == (batch, heads, 3)
            check.require(fits, f"received is {received.dtype} {tuple(received.shape)} for {newest} newest tokens")
            usable = bool(received.isfinite().all()) and bool((received >= 0).all())
            check.require(usable, "received has numbers that are negative or not finite")
        unlike, positions = divergence_of(check.require, about), tensors.get("positions")
        return CodedTokens(about["length"], made_rows, bases, positions, Received(received), unlike).to

    def check_numbers(self, plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Tensor | None:
        """Raise unless all numbers can be coded; dividing bits waits for the device anyway."""
        _check_codable(plan.index, (keys, over.queries, values))
        return None

    def why_dense(self, plan: LayerPlan, length: int) -> str:
        """Say why a prompt stays dense, and what to write instead."""
        return why_dense(plan, length)

    def instead_of_terms(self, plan: LayerPlan) -> str | None:
        """Terms that a model adds to its logits are no matter: codes are then made dense."""
        return None

    def stored_as(self, plan: LayerPlan) -> str:
        """Return what becomes of old tokens."""
        return "coded"

    def idle(self, plan: LayerPlan, stores: Sequence[Store], readings: Sequence[LayerReading]) -> tuple[str, ...]:
        """Say which settings have changed nothing: none, and of short prompts the report's first line says it."""
        return ()


CODED = CodedMaker()


def _check_codable(layer: int, tensors: Iterable[Tensor]) -> None:
    """Raise if keys, queries or values are not finite, or too large for float32, in which they are coded."""
    found = [end.double() for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]
    largest = torch.stack([each.to(found[0].device) for each in found]).abs().max().cpu()
    if not bool(largest.isfinite()):
        raise CacheError(
            f"keys, queries or values of layer {layer} are not finite (inf or NaN), so they cannot be coded, and the "
            "model's own output is useless too. Usually float16 has overflowed: load the model with "
            "dtype=torch.bfloat16 or torch.float32"
        )
    if largest > MAX_CODED:
        raise CacheError(
            f"keys, queries or values of layer {layer} go up to {float(largest):.0e}, and bits= codes numbers up to "
            f"{MAX_CODED:.0e}; leave this layer out if it is one of the first (dense_layers=), or leave out bits"
        )
