"""A small case per kernel, solved beside the plainest reference: what it has to pass before it is used on a device.

Shapes are odd on purpose: several blocks, none of them full. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gather import gpu as gather
from ..greedy import gpu as greedy
from ..greedy import torch_order
from ..interaction import gpu as interaction
from . import gpu as decode
from .packed import PackedKeys, PackedValues


def _random(device: torch.device, *shape: int) -> Tensor:
    # From the CPU's generator: the user's random numbers on the device stay what they were.
    return torch.randn(
        *shape, generator=torch.Generator("cpu").manual_seed(sum(shape)), dtype=torch.float32, device="cpu"
    ).to(device)


def _weights(device: torch.device) -> Tensor:
    roots = _random(device, 3, 50, 37)
    return (roots.mT @ roots).round().contiguous()  # whole numbers: sums are exact in any order


def mies(device: torch.device) -> bool:
    """The same order and sums, bit for bit."""
    W, k = _weights(device), torch.tensor([0, 9, 37], device=device)
    scores = W.diagonal(dim1=-2, dim2=-1).clone()
    found, expected = greedy.greedy_order(W, scores, k, 37), torch_order(W, scores, k, 37)
    return torch.equal(found.order, expected.order) and torch.equal(found.rise, expected.rise)


def exchanges(device: torch.device) -> bool:
    """As many vertices, and no single exchange that improves what was found."""
    W, every = _weights(device), torch.ones(3, 37, dtype=torch.bool, device=device)
    start = torch.arange(37, device=device).expand(3, -1) < 15
    mask = greedy.swap_refine(W, start, every, 1000)
    wide, sums = W.double(), (W.double() @ mask.double().unsqueeze(-1)).squeeze(-1)
    own = wide.diagonal(dim1=-2, dim2=-1)
    change = (own - 2 * sums).unsqueeze(-1) + (own + 2 * sums).unsqueeze(-2) - 2 * wide
    possible = mask.unsqueeze(-1) & ~mask.unsqueeze(-2)
    return bool((mask.sum(-1) == 15).all()) and bool((change[possible] >= 0).all())


def narrow(device: torch.device) -> bool:
    """The same numbers, whichever way they lie."""
    keys, kept = (
        _random(device, 2, 2, 300, 40).mT.contiguous().mT,
        torch.arange(3, 40, 3, device=device).expand(2, 2, -1),
    )
    expected = keys[..., 3:40:3]
    return all(torch.equal(gather.narrowed(keys, kept, lies), expected) for lies in (False, True))


def weights(device: torch.device) -> bool:
    """W to 1e-5 of its largest entry in float32, of the same half-precision numbers in float16."""
    queries, keys = _random(device, 2, 4, 70, 40), _random(device, 2, 2, 700, 40)
    valid = torch.arange(700, device=device).expand(2, -1) >= torch.tensor([[0], [90]], device=device)
    good = True
    for dtype in (torch.float32, torch.float16):
        q, k = queries.to(dtype).double(), keys.to(dtype).double()
        q, k = q * valid[:, None, -70:, None], k * valid[:, None, :, None]
        stacked = q.reshape(2, 2, 140, 40)
        expected = (stacked.mT @ stacked) * (k.mT @ k)
        found = interaction.interaction_matrix(queries.to(dtype), keys.to(dtype), valid)
        good &= bool(((found - expected).abs().max() <= 1e-5 * expected.abs().max()).item())
    return good


def decoding(device: torch.device) -> bool:
    """Attention to 1e-5 in float32, 2e-3 in float16."""
    return _attention(device, lambda *dense: (*dense, *dense))


def decoding_in_few_bits(device: torch.device) -> bool:
    """As `decoding`, with the nearest keys and values in four bits."""
    return _attention(device, _in_four_bits)


def _in_four_bits(keys: Tensor, values: Tensor) -> tuple[PackedKeys, PackedValues, Tensor, Tensor]:
    """Groups of 43 tokens and of 8 channels, and what they stand for: steps of 1/4 from -2, which all types
    hold."""
    of_keys, of_values = (((t.float() + 2) * 4).round().clamp(0, 15).to(torch.uint8) for t in (keys, values))
    batch, heads, _, channels = keys.shape
    by_token = of_keys.view(batch, heads, -1, 43, channels).mT.reshape(batch, -1, 43)
    packed_keys = PackedKeys(shape=keys.shape, **_packed(by_token, keys.shape[2] // 43, heads, keys.dtype))
    by_channel = of_values.view(batch, -1, 8)
    packed_values = PackedValues(shape=values.shape, **_packed(by_channel, values.shape[2], heads, keys.dtype))
    dense_keys, dense_values = ((levels.double() * 0.25 - 2).to(keys.dtype) for levels in (of_keys, of_values))
    return packed_keys, packed_values, dense_keys, dense_values


def _packed(rows: Tensor, units: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """All but the shape of what has an even number of rows of levels per sequence; two share a byte."""
    low, high = rows.chunk(2, dim=1)
    packed = low | high << 4
    scale, zero = (torch.full((rows.shape[1],), value, device=rows.device, dtype=dtype) for value in (0.25, 2.0))
    parameters, places = (scale.data_ptr(), zero.data_ptr()), (packed.shape[1], rows.shape[1] // heads, 0)
    return {
        "dtype": dtype,
        "parameters": dtype,
        "group_size": rows.shape[2],
        "bits": 4,
        "high_first": False,
        "zero_in_levels": False,
        "table": torch.tensor([[(part.data_ptr(), *parameters, *places)] for part in packed], device=rows.device),
        "owners": torch.zeros(units, dtype=torch.int32, device=rows.device),
        "tensors": (packed, scale, zero),
    }


def _attention(device: torch.device, store: Callable[[Tensor, Tensor], tuple[Any, Any, Tensor, Tensor]]) -> bool:
    """With stored keys and values, and the numbers that they stand for, as `store` makes them of dense ones."""
    good = True
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        query, pruned = (_random(device, *s).to(dtype) for s in ((2, 4, 2, 48), (2, 2, 301, 19)))
        sinks, tail = (_random(device, 2, 2, count, 48).to(dtype) for count in (3, 37))
        old, new = (_random(device, 2, 2, count, 40).to(dtype) for count in (304, 37))
        stored, stored_values, pruned, old = store(pruned, old)
        kept = torch.stack([torch.arange(19, device=device), torch.arange(5, 43, 2, device=device)])
        kept = kept.expand(2, -1, -1).contiguous()
        full = torch.zeros(2, 2, 301, 48, device=device, dtype=torch.float64)
        full.scatter_(-1, kept[:, :, None].expand(-1, -1, 301, -1), pruned.double())
        keys, values = torch.cat([sinks.double(), full, tail.double()], 2), torch.cat([old, new], 2).double()
        logits = query.double() @ keys.repeat_interleave(2, 1).mT * 48**-0.5
        hidden = torch.ones(2, 341, dtype=torch.bool, device=device).triu(340)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = (weights @ values.repeat_interleave(2, 1)).transpose(1, 2)
        found = decode.decode_attention(query, stored, kept, sinks, tail, stored_values, new)
        good &= bool(((found - expected).abs().max() <= tolerance * expected.abs().max()).item())
    return good


#: By the names that :func:`grace_opt.kernels._shared.dispatch.use_triton` is asked for.
TRIALS: dict[str, Callable[[torch.device], bool]] = {
    "mies": mies,
    "exchanges": exchanges,
    "gather": narrow,
    "weights": weights,
    "decoding": decoding,
    "decoding in few bits": decoding_in_few_bits,
}
