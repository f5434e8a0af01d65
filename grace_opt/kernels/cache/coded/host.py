"""Attention of a few new queries over coded tokens on the CPU: passes tensors, by address, to the compiled loops of
:mod:`grace_opt.kernels.cache.coded.cpu`.

When: on a CPU, while decoding, if no gradients, dropout or attention weights are needed; `unsupported_reason` says why
not. Numbers are float32 inside, whatever the model's type is.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Sequence
from functools import cache
from struct import Struct
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import CacheError
from ..._shared.switches import LLVM, is_off
from ..._shared.threads import call_in_threads
from ..decode.checks import kind_of_mask
from ..decode.host import scales_of
from .forms import BLOCK, LANES, ROWS
from .table import COLUMNS, CodedSequence, CodesTable, batched

#: Most query rows (query heads per KV head times new tokens): beyond, making keys and values dense is faster.
MAX_ROWS = 256
#: Number of entries of what the loops get; of these, the address of the sizes, and the first of those that differ from
#: step to step; of the sizes, the first that does, and the first of the sequences.
ENTRIES, SIZES_ENTRY, WORKSPACE_ENTRY, STEP_ENTRY, SEQUENCES_ENTRY = 19, 8, 12, 19 + 6, 19 + 36
#: Addresses of what is worked with, of the books, the output and the attention received; of sizes, those of
#: `STEP_ENTRY`.
ADDRESSES, STEP = Struct(f"{ENTRIES - WORKSPACE_ENTRY}q"), Struct(f"{SEQUENCES_ENTRY - STEP_ENTRY}q")
#: Bytes of a number in these.
PLACE = 8
#: Most plans kept with a sequence: one lasts for 32 steps.
PLANS = 4
#: Most float32 numbers of workspace that a thread retains.
RETAINED = 2**18
#: If fewer numbers are read, waking other threads takes longer than it saves.
ALONE_BELOW = 2**16


def unsupported_reason(query: Tensor, tail_keys: Tensor, tail_values: Tensor) -> str | None:
    """Return why :func:`coded_attention` does not support these tensors, or None if it does.

    Parameters
    ----------
    query, tail_keys, tail_values : Tensor
        As there.
    """
    tensors = query, tail_keys, tail_values
    if not (query.is_cpu and tail_keys.is_cpu and tail_values.is_cpu):
        devices = ", ".join(sorted({str(t.device) for t in tensors}))
        return f"tensors are on {devices}; they must all be on the CPU"
    if is_off(LLVM):
        return f"{LLVM}=0 turns off what is written as LLVM instructions"
    if sys.byteorder != "little":
        return "bits are in the order of little-endian machines, which this is not"
    if query.dtype == torch.float64:
        return "queries are float64, and the loops compute in float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are requested, and the loops have none"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and cannot look into the loops"
    rows = query.shape[1] // tail_keys.shape[1] * query.shape[2]
    if rows > MAX_ROWS:
        return f"{rows} query rows share a KV head; at most {MAX_ROWS} is possible"
    return None


def coded_attention(
    query: Tensor,
    sequences: Sequence[CodedSequence],
    tail_keys: Tensor,
    tail_values: Tensor,
    books: Tensor,
    newest: int,
    dense_newest: Sequence[int],
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    before: Tensor | None = None,
    trellis: bool = False,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over sinks, coded tokens and a dense tail.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, L, d)``: L new tokens at the end of the sequence.
    sequences : sequence of CodedSequence
        One per sequence of the batch. New queries see all of their tokens.
    dense_newest : sequence of int
        How many of the newest tokens that are not in the tail are among each sequence's sinks, the last ones.
    tail_keys, tail_values : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S_t, d_v)``.
    books : Tensor
        ``(9, 256)`` float32: row b has the numbers that codes of b bits stand for, as they are read.
    newest : int
        Number of tokens, the last ones, whose attention received is returned.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, S_t)`` over the tail, bool (True attends) or additive. None means causal if `causal` is
        true, else nothing is hidden.
    scaling : float or None
        Of the logits; None means ``d ** -0.5``.
    softcap : float or None
        Logits become ``softcap * tanh(logits / softcap)`` before the mask.
    causal : bool
        What ``attention_mask=None`` means.
    before : Tensor or None
        ``(B, H, 3, n)``: what the first of the newest tokens have received before.
    trellis : bool
        Whether codes are those of a trellis, which are read as one bit more
        (:mod:`grace_opt.kernels.cache.coding.trellis`).
    added : Tensor or None
        ``(B, H, R, n)`` float32: products of each query row with what the codes of keys leave out, at each position;
        sequences with ``positions`` get them. Row r is query head ``r // L`` of the group, token ``r % L``.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``, the same for any number of threads.
    received : Tensor
        ``(B, H, 3, newest)`` float32: sums over the queries of p and of p², each the mean of the group's heads, and
        the number of queries that saw the token; added to what was `before`.

    Raises
    ------
    CacheError
        If shapes do not go together. `unsupported_reason` must have returned None before.
    """
    loops = _loops()
    inputs = laid_out(
        *(query, sequences, None, tail_keys, tail_values, books, newest, dense_newest),
        *(attention_mask, scaling, softcap, causal, before, trellis, added),
    )
    plan = inputs.plan
    loops.prepare_at(inputs.address)
    attend = loops.attend_three_at if plan.by_three else loops.attend_at
    call_in_threads(attend, inputs.address, len(plan.table.tasks), alone=plan.alone)
    output = inputs.output if query.dtype == torch.float32 else inputs.output.to(query.dtype)
    return output, inputs.received


@cache
def _loops() -> ModuleType:
    """Import the loops, which takes longer than to say why they cannot be used."""
    from . import cpu

    return cpu


def by_three(rows: int) -> bool:
    """Return whether three query rows at a time take no more passes over the codes than `ROWS`.

    Examples
    --------
    >>> [rows for rows in range(1, 13) if by_three(rows)]
    [1, 2, 3, 5, 6, 9]
    """
    return -(-rows // 3) <= -(-rows // ROWS)


class Plan(NamedTuple):
    """What stays the same while steps of the same shapes read the same codes.

    Attributes
    ----------
    table : CodesTable
        Of all sequences.
    by_three, alone : bool
        Whether three query rows are taken at a time, and in one thread.
    data : array
        What the loops get, with zeros where steps differ.
    logit_space, sinks : int
        Least number of logits that there is space for, a row; most sinks.
    numbers, places : int, tuple of int
        Float32 numbers that the loops work with, and where four parts of them begin, in bytes.
    scales : array
        Of the logits.
    alive : list
        What `data` has the addresses of.
    """

    table: CodesTable
    by_three: bool
    alone: bool
    data: array[int]
    logit_space: int
    sinks: int
    numbers: int
    places: tuple[int, int, int, int]
    scales: array[float]
    alive: list[Any]


class LoopInputs(NamedTuple):
    """What the loops get.

    Attributes
    ----------
    data : array
        Lengths and addresses: see `grace_opt.kernels.cache.coded.cpu.attend`. Then the sizes, to which one of them
        points.
    address : int
        The address of `data`.
    taken : int
        The place in `data` of the number of tasks that are taken: the first size.
    output, received : Tensor
        What they write.
    plan : Plan
    alive : list
        What `data` has the addresses of.
    """

    data: array[int]
    address: int
    taken: int
    output: Tensor
    received: Tensor
    plan: Plan
    alive: list[Any]


def laid_out(
    query: Tensor,
    sequences: Sequence[CodedSequence],
    table: CodesTable | None,
    tail_keys: Tensor,
    tail_values: Tensor,
    books: Tensor,
    newest: int,
    dense_newest: Sequence[int],
    attention_mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    causal: bool,
    before: Tensor | None,
    trellis: bool = False,
    added: Tensor | None = None,
) -> LoopInputs:
    """Return what the loops get.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, L, d)``; it and all other tensors are as for `coded_attention`, which says more.
    sequences : sequence of CodedSequence
        B of them.
    table : CodesTable or None
        Of the codes of all sequences; None makes it of their tables.
    tail_keys, tail_values : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S_t, d_v)``.
    books : Tensor
        ``(9, 256)`` float32.
    newest : int
    dense_newest : sequence of int
        B of them.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, S_t)``, bool or floating.
    scaling, softcap : float or None
    causal : bool
    before : Tensor or None
        ``(B, H, 3, n)``.
    trellis : bool
    added : Tensor or None
        ``(B, H, R, n)``.
    """
    plan = _plan_for(query, sequences, table, tail_keys, tail_values, newest, dense_newest, scaling, softcap)
    (batch, query_heads, length, _), (_, heads, tail, value_width) = query.shape, tail_values.shape
    # All tensors are kept alive until the loops are done: they get only addresses.
    query, tail_keys, tail_values = floats = rowwise(query), rowwise(tail_keys), rowwise(tail_values)
    kind, mask, mask_place = _read_mask(attention_mask, query, tail, causal)
    before_address = known = 0
    if before is not None:
        known = before.shape[3]
        if before.shape[:3] != (batch, heads, 3) or known > newest:
            raise CacheError(
                f"what tokens received before is {tuple(before.shape)}; it must be "
                f"({batch}, {heads}, 3, {newest} or fewer)"
            )
        if before.dtype != torch.float32 or not before.is_contiguous():
            before = before.float().contiguous()
        before_address = before.data_ptr()
    of_added = [0, 0, 0]
    if added is not None:
        check_added(added, sequences, heads, query_heads // heads * length)
        added = rowwise(added)
        added = added if added.stride(0) == heads * added.stride(1) else added.contiguous()
        of_added = [added.data_ptr(), 4 * added.stride(1), 4 * added.stride(2)]
    output = torch.empty(batch, length, query_heads, value_width, dtype=torch.float32, device="cpu")
    received = torch.empty(batch, heads, 3, newest, dtype=torch.float32, device="cpu")
    workspace, data = workspace_for(plan.numbers), plan.data[:]
    address, workspace_address = data.buffer_info()[0], workspace.data_ptr()
    queries, of_newest, ends, products = plan.places
    data[SIZES_ENTRY] = address + ENTRIES * PLACE
    areas = (
        workspace_address + queries,
        workspace_address + of_newest,
        workspace_address + ends,
        workspace_address + products,
    )
    ADDRESSES.pack_into(data, WORKSPACE_ENTRY * PLACE, *areas, books.data_ptr(), output.data_ptr(), received.data_ptr())
    logit_space = max(plan.logit_space, rounded(plan.sinks + tail + 2 * LANES))
    places = query.data_ptr(), *query.stride(), tail_keys.data_ptr(), *tail_keys.stride()
    more = tail_values.data_ptr(), *tail_values.stride(), before_address, known, trellis, *of_added
    STEP.pack_into(data, STEP_ENTRY * PLACE, kind, logit_space, newest, tail, *mask_place, *places, *more)
    return LoopInputs(data, address, ENTRIES, output, received, plan, [mask, floats, workspace, books, before, added])


def _plan_for(
    query: Tensor,
    sequences: Sequence[CodedSequence],
    table: CodesTable | None,
    tail_keys: Tensor,
    tail_values: Tensor,
    newest: int,
    dense_newest: Sequence[int],
    scaling: float | None,
    softcap: float | None,
) -> Plan:
    """Return the plan of these shapes, made once if there is one sequence; parameters as for `laid_out`."""
    (rows, heads, tail, width), (*others, tokens, value_width) = tail_keys.shape, tail_values.shape
    known: dict[Any, Plan] = sequences[0].on_host if len(sequences) == 1 else {}
    numbers = rows, heads, width, *others, value_width, rounded(newest), scaling, softcap, *dense_newest
    key = id(table), query.shape, numbers
    plan = known.get(key)
    if plan is None or tail != tokens:
        check_shapes(query, sequences, tail_keys, tail_values)
        plan, lasts = _planned(query, sequences, table, value_width, heads, newest, dense_newest, scaling, softcap)
        if lasts:
            if len(known) >= PLANS:
                known.clear()
            known[key] = plan
    return plan


def _planned(
    query: Tensor,
    sequences: Sequence[CodedSequence],
    table: CodesTable | None,
    value_width: int,
    heads: int,
    newest: int,
    dense_newest: Sequence[int],
    scaling: float | None,
    softcap: float | None,
) -> tuple[Plan, bool]:
    """Return a plan, and whether it lasts: not if it has copies of tensors, which take memory that nobody counts."""
    if table is None:
        table = batched([sequence.table for sequence in sequences], heads)
    batch, query_heads, length, width = query.shape
    pairs, group, count = batch * heads, query_heads // heads, len(table.tasks)
    dense = [_dense(sequence) for sequence in sequences]
    sinks = max(entries[0] for _, entries in dense)
    padded, wide, value_wide = -(-group * length // ROWS) * ROWS, rounded(width), rounded(value_width)
    news = rounded(newest)
    inner, outer = scales_of(width**-0.5 if scaling is None else scaling, softcap)
    scales = array("f", [float(inner), float(softcap is not None), float(outer)])
    of_queries, of_newest = rounded(2 * pairs * padded * wide), rounded(pairs * padded * news)
    of_ends, of_products = rounded(2 * count * padded), rounded(count * padded * value_wide)
    newest_offset, ends_offset = 4 * of_queries, 4 * (of_queries + of_newest)
    numbers = [pairs, batch, padded, wide, news, count, len(table.units), value_wide]
    numbers += [0, *table.addresses, scales.buffer_info()[0], *[0] * (ENTRIES - WORKSPACE_ENTRY)]
    numbers += [0, heads, group, length, width, value_width, *[0] * (SEQUENCES_ENTRY - STEP_ENTRY)]
    for (_, entries), more, sequence in zip(dense, dense_newest, sequences, strict=True):
        at = sequence.positions
        numbers += [
            *entries,
            more,
            *([0] * 3 if at is None else (at.data_ptr(), at.stride(0) * at.itemsize, at.itemsize)),
        ]
    numbers += [0] * pairs
    logit_space = rounded(COLUMNS + 2 * BLOCK * table.most)
    alone = table.numbers * (width + value_width) < ALONE_BELOW
    made = [tensor for tensors, _ in dense for tensor in tensors]
    plan = Plan(
        *(table, by_three(group * length), alone, array("q", numbers), logit_space, sinks),
        *(of_queries + of_newest + of_ends + of_products, (0, newest_offset, ends_offset, ends_offset + 4 * of_ends)),
        *(scales, made),
    )
    stored = {tensor.data_ptr() for sequence in sequences for tensor in sequence.tensors() if tensor is not None}
    return plan, {tensor.data_ptr() for tensor in made} <= stored


def _dense(sequence: CodedSequence) -> tuple[list[Tensor], list[int]]:
    """Return tensors to keep alive, and what is said of them: see `grace_opt.kernels.cache.coded.cpu.SINKS`."""
    sinks = [rowwise(tensor) for tensor in (sequence.sink_keys, sequence.sink_values)]
    own = [basis.float().contiguous() for basis in (sequence.key_basis, sequence.value_basis) if basis is not None]
    entries = [sinks[0].shape[1]]
    for tensor in sinks:
        entries += [tensor.data_ptr(), 4 * tensor.stride(0), 4 * tensor.stride(1)]
    for basis in own:
        entries += [basis.data_ptr(), 4 * basis.stride(0)]
    return [*sinks, *own], entries + [0] * (4 - 2 * len(own))


def rowwise(tensor: Tensor) -> Tensor:
    """Return float32 numbers of which each row is contiguous."""
    if tensor.dtype != torch.float32:
        tensor = tensor.detach().float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def workspace_for(numbers: int) -> Tensor:
    """Return so many float32 numbers or more, whatever they are; the thread's own, from call to call, if they are few.

    New memory would have to come from another thread's caches, or from the machine's memory.
    """
    if numbers > RETAINED:
        return torch.empty(numbers, dtype=torch.float32, device="cpu")
    workspace: Tensor | None = getattr(_WORKSPACE, "numbers", None)
    if workspace is None or workspace.shape[0] < numbers:
        workspace = _WORKSPACE.numbers = torch.empty(numbers, dtype=torch.float32, device="cpu")
    return workspace


_WORKSPACE = threading.local()


def rounded(count: int) -> int:
    """Round up to whole pairs of vectors."""
    return -(-count // (2 * LANES)) * 2 * LANES


def check_shapes(query: Tensor, sequences: Sequence[CodedSequence], keys: Tensor, values: Tensor) -> None:
    """Raise unless shapes go together: what reads by address must not get a tensor that is too small."""
    (batch, query_heads, _, width), (rows, heads, tokens, key_width) = query.shape, keys.shape
    together = (rows, heads, tokens) == values.shape[:3] and key_width == width and not query_heads % heads
    if (
        not together
        or len(sequences) != batch != 0
        or any(sequence.sink_keys.shape[0] != heads for sequence in sequences)
    ):
        raise CacheError(
            f"queries {tuple(query.shape)}, the tail's keys {tuple(keys.shape)} and values {tuple(values.shape)}, and "
            f"{len(sequences)} coded sequences with {[len(sequence.sink_keys) for sequence in sequences]} heads do not "
            "fit"
        )


def check_added(added: Tensor, sequences: Sequence[CodedSequence], heads: int, rows: int) -> None:
    """Raise unless what is added by position has the right shape, and the sequences have positions."""
    fits = added.dim() == 4 and added.shape[:3] == (len(sequences), heads, rows)
    if not fits or any(sequence.positions is None for sequence in sequences if sequence.table.numbers):
        raise CacheError(
            f"what is added by position is {tuple(added.shape)}, not ({len(sequences)}, {heads}, {rows}, positions), "
            "or a sequence has no positions"
        )


def _read_mask(mask: Tensor | None, query: Tensor, tail: int, causal: bool) -> tuple[int, Tensor | None, list[int]]:
    """Return the kind of mask, the tensor to keep alive, and its address and strides."""
    kind = kind_of_mask(mask, query, tail, causal)
    if mask is None:
        return kind, None, [0] * 5
    mask = mask if mask.dtype == torch.bool else mask.float()
    mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], tail)
    return kind, mask, [mask.data_ptr(), *(mask.element_size() * step for step in mask.stride())]
