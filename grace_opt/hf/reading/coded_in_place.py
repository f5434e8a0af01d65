"""Attention over few of the coded tokens where they lie, if compiled loops fit.

Else `grace_opt.hf.reading.coded`, which defines the result, unpacks all of them.

Each of several new tokens chooses for itself, as if it came alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import few_coded as kernels
from ..bits.codebooks import codebook
from ..bits.coded import CodedTokens
from ..bits.in_place import all_seen
from ..pruned_attention import float32_mask
from .index import least_units
from .report import ReadTally
from .settings import TopTokens


def read_in_place(
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: CodedTokens,
    reading: TopTokens,
    tally: ReadTally,
    scaling: float,
    softcap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor] | None:
    """Return output and received attention, as `grace_opt.hf.reading.coded.read_coded_attention` does, or None.

    Parameters
    ----------
    query, tail, value, attention_mask, old, reading, tally, scaling, softcap
        As there.
    causal : bool
        Whether a new token sees none of the next ones, without a mask.
    """
    (batch, heads, recent), count, waiting = tail.shape[:3], query.shape[2], old.waiting
    coded = [sum(segment.tokens for segment in row.segments) for row in old.rows]
    attend = kernels.kernel_for(query[:, :, :1], tail, value, max(coded))
    if attend is None:
        return None
    mask = None
    if attention_mask is not None:
        older, mask = attention_mask[..., : old.stored], float32_mask(attention_mask[..., old.stored :])
        if not all_seen(older, old):
            return None
    sequences = [row.sequence(old.bases) for row in old.rows]
    size, lying = reading.unit_size, [row.lying() for row in old.rows]
    received = query.new_zeros(batch, heads, 3, waiting + recent, dtype=torch.float32) if count > 1 else None
    outputs = []
    for place in range(count):
        seen = recent - (count - 1 - place) * causal
        shown = seen if mask is None else recent  # a mask hides what comes later
        dense = [row.sink_keys.shape[1] + row.waits + seen for row in old.rows]
        least = [
            least_units(-(-tokens // size), size, reading.share, tokens, others) if tokens else 0
            for tokens, others in zip(coded, dense, strict=True)
        ]
        few = attend(
            query[:, :, place : place + 1],
            sequences,
            lying,
            tail[:, :, :shown],
            value[:, :, :shown],
            codebook(query.device),
            waiting + shown,
            [waiting - row.waits for row in old.rows],  # without codes, tokens that others have waiting are dense
            least,
            size,
            reading.epsilon,
            reading.top_p,
            None if mask is None else mask[:, :, place : place + 1],
            scaling,
            softcap,
        )
        outputs.append(few.output)
        others, tokens = torch.tensor([dense, coded], dtype=torch.float64, device=query.device)[..., None]
        tally.add((few.tokens + others) / (tokens + others), few.bound)
        if received is None:
            return few.output, few.received
        received[..., : waiting + shown] += few.received
    assert received is not None
    received[:, :, 2] = (waiting + recent - torch.arange(waiting + recent, device=query.device)).clamp(max=count)
    return torch.cat(outputs, dim=1), received
