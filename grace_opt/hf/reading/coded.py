"""Attention of new tokens over few of the coded ones (``bits=``): first the high bits of all keys, then few tokens.

The high half of each channel's bits leaves a range for each coordinate of a key. These ranges choose the tokens, or
pages of them, and bound the logits of the others; the low bits, and the values, count of what was chosen alone. Nothing
is stored besides the codes. Logits are those of the coordinates, as where codes are read in place
(`grace_opt.hf.bits.in_place`). Tokens that wait for their classes are read as the tail is.

This is the definition, in torch: it unpacks all codes in each step, which takes many times as long as reading them all
where they lie. On the CPU, compiled loops compute the same (:mod:`grace_opt.hf.reading.coded_in_place`).

Source: ranges from high bits are those of a search tree's inner nodes; pages of them are Quest's (arXiv 2406.10774).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import CacheError
from ...kernels.decode.reference import attention as whole_attention
from ...kernels.reading import Few, Stored, TokenRanges
from ...kernels.reading.reference import attention
from ..bits.bitplanes import unpack_bits
from ..bits.coded import CodedTokens
from ..bits.row import CodedRow, decoded
from .coded_in_place import read_in_place
from .index import least_units
from .report import ReadTally
from .settings import TopTokens


class _Row(NamedTuple):
    """One sequence as a step reads it, a batch of one; tokens that wait are part of the tail.

    Attributes
    ----------
    sink_keys, tail_keys : Tensor
        ``(1, H, n, d)``.
    old_values, tail_values : Tensor
        ``(1, H, n, d_v)``: those of the sinks and the coded tokens, and of the tail.
    keys, basis, units : Tensor, Tensor, TokenRanges or None
        Coordinates of the coded tokens' keys, by what they are multiplied, and what they are read by; None if the
        sequence is too short to be coded.
    """

    sink_keys: Tensor
    tail_keys: Tensor
    old_values: Tensor
    tail_values: Tensor
    keys: Tensor | None
    basis: Tensor | None
    units: TokenRanges | None

    def attend(
        self, query: Tensor, seen: int, mask: Tensor | None, reading: TopTokens, scaling: float, softcap: float | None
    ) -> Few:
        """Return the attention of one query over this sequence, of whose tail it sees the first `seen` tokens."""
        sinks, wide = self.sink_keys.shape[2], query.shape[3]
        upto = seen if mask is None else self.tail_keys.shape[2]  # a mask hides what comes later
        tail_keys, tail_values = self.tail_keys[:, :, :upto], self.tail_values[:, :, :upto]
        kept = torch.arange(wide, device=query.device).expand(1, self.sink_keys.shape[1], wide)
        if self.keys is None or self.units is None:
            none = self.sink_keys[:, :, :0]
            output, weights = whole_attention(
                query,
                none,
                kept,
                self.sink_keys,
                tail_keys,
                self.old_values,
                tail_values,
                mask,
                scaling,
                softcap,
                False,
            )
            bound = query.new_zeros(1, query.shape[1], dtype=torch.float64)
            read = torch.zeros(1, kept.shape[1], dtype=torch.int64, device=query.device)
            return Few(output, bound, read, weights=weights)
        most = least_units(self.units.units, self.units.size, reading.share, self.keys.shape[2], sinks + seen)
        least = torch.full((1,), most, dtype=torch.int64, device=query.device)
        stored = Stored(self.keys, kept, self.sink_keys, tail_keys, self.old_values, tail_values)
        limits = reading.epsilon, reading.top_p, mask, scaling, softcap
        return attention(query, stored, self.units, least, most, *limits, self.basis)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def read_coded_attention(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: CodedTokens,
    reading: TopTokens,
    tally: ReadTally,
    want_weights: bool,
    scaling: float,
    softcap: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute attention of new tokens over few of the coded ones, the sinks and the dense tail.

    Parameters
    ----------
    module, query, tail, value, softcap, is_causal, dropout
        As in :func:`~grace_opt.hf.pruned_attention.pruned_attention`.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, stored)``: columns of the stored tokens.
    old : CodedTokens
        The older tokens.
    reading, tally
        How few, and what is told of it.
    want_weights : bool
        Whether the attention weights are needed, which torch alone computes.
    scaling : float
        Of the logits.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``.
    received : Tensor
        ``(B, H, 3, waiting tokens + S_t)``: see `grace_opt.hf.bits.importance.tail_attention`; of what was read.
    weights : Tensor or None
        ``(B, H_q, L, stored tokens)``, zeros at unread tokens and at padding.
    """
    if dropout and module.training:
        raise CacheError("read= reads few tokens of each step, which has no dropout: write model.eval()")
    (batch, heads, recent), count, newest = tail.shape[:3], query.shape[2], old.waiting + tail.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not want_weights:
        found = read_in_place(query, tail, value, attention_mask, old, reading, tally, scaling, softcap, causal)
        if found is not None:
            return *found, None
    weights = query.new_zeros(batch, query.shape[1], count, old.stored + recent)
    outputs, received = list[Tensor](), list[Tensor]()
    shares, bounds = ([list[Tensor]() for _ in range(count)] for _ in range(2))
    for b, row in enumerate(old.rows):
        now = _row(row, old, tail[b], value[b], reading)
        columns, hidden = _columns(row, recent, query.device), None
        if attention_mask is not None:
            hidden = attention_mask[min(b, len(attention_mask) - 1)][None, :, :, columns]
        each = []
        for place in range(count):
            unseen = (count - 1 - place) * causal
            seen = now.tail_keys.shape[2] - unseen
            mask = None if hidden is None else hidden[:, :, place : place + 1]
            few = now.attend(query[b : b + 1, :, place : place + 1], seen, mask, reading, scaling, softcap)
            assert few.weights is not None
            each.append(torch.nn.functional.pad(few.weights[0], (0, len(columns) - few.weights.shape[-1])))
            outputs.append(few.output)
            dense = len(columns) - unseen - (0 if now.keys is None else now.keys.shape[2])
            shares[place].append((few.tokens[0] + dense).double() / (len(columns) - unseen))
            bounds[place].append(few.bound[0].detach())
        mine = torch.cat(each, dim=1)  # (H_q, L, columns)
        weights[b][..., columns] = mine.to(weights.dtype)
        part = mine[..., -newest:].float().view(heads, -1, count, newest)
        received.append(torch.stack([part.sum(2).mean(1), part.square().sum(2).mean(1)], dim=1))
    for share, bound in zip(shares, bounds, strict=True):
        tally.add(torch.stack(share), torch.stack(bound))
    numbers = (newest - torch.arange(newest, device=query.device)).clamp(max=count).float().expand(batch, heads, 1, -1)
    output = torch.cat(outputs).view(batch, count, query.shape[1], -1)
    return output, torch.cat([torch.stack(received), numbers], dim=2), weights


def _row(row: CodedRow, old: CodedTokens, tail: Tensor, value: Tensor, reading: TopTokens) -> _Row:
    """Unpack one sequence; `tail` and `value` are its ``(H, S_t, d)``."""
    sinks = row.sink_keys, row.sink_values
    if not row.segments:
        return _Row(sinks[0][None], tail[None], sinks[1][None], value[None], None, None, None)
    key_basis, value_basis = row.decodes(old.bases)
    if row.waiting is not None:
        keys, values = row.waiting_coordinates()
        tail = torch.cat([decoded(keys, key_basis, tail.dtype), tail], dim=1)
        value = torch.cat([decoded(values, value_basis, value.dtype), value], dim=1)
    coordinates = [segment.coordinates() for segment in row.segments]
    keys, values = (torch.cat(each, dim=1) for each in zip(*coordinates, strict=True))
    ranges = zip(*(segment.key_ranges() for segment in row.segments), strict=True)
    lower, upper = (torch.cat(each, dim=1)[None] for each in ranges)
    old_values = torch.cat([sinks[1], decoded(values, value_basis, value.dtype)], dim=1)
    if key_basis is None:
        key_basis = torch.eye(keys.shape[2], dtype=torch.float32, device=keys.device).expand(len(keys), -1, -1)
    units = TokenRanges.of(lower, upper, reading.unit_size)
    return _Row(sinks[0][None], tail[None], old_values[None], value[None], keys[None], key_basis[None], units)


def _columns(row: CodedRow, recent: int, device: torch.device) -> Tensor:
    """Return the columns of a mask that a sequence has, padding not among them."""
    columns = torch.arange(row.length + recent, device=device)
    if row.present is None:
        return columns
    present = unpack_bits(row.present, row.length).bool()
    return torch.cat([columns[: row.length][present], columns[row.length :]])
