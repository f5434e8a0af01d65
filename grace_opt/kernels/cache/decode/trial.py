"""Check that the decoding kernels agree with the float64 reference on a small case, dense and in few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._shared.cases import draw
from .packed import PackedKeys, PackedValues, element_of
from .reference import attention

Store = Callable[[Tensor, Tensor], tuple[Any, Any, Tensor, Tensor]]


def cpu() -> bool:
    """Compare the compiled loops, to 1e-5."""
    from .host import decode_attention

    return all(_agrees(decode_attention, torch.device("cpu"), store, torch.float32, 1e-5) for store in STORES)


def gpu(device: torch.device) -> bool:
    """Compare Triton's kernels on dense keys, to 1e-5 in float32 and 2e-3 in float16."""
    return _gpu(device, _dense)


def gpu_in_few_bits(device: torch.device) -> bool:
    """As `gpu`, with keys rounded to four bits and values to three."""
    return _gpu(device, _in_few_bits)


def _gpu(device: torch.device, store: Store) -> bool:
    from . import gpu as on_chip

    cases = ((torch.float32, 1e-5), (torch.float16, 2e-3))
    return all(_agrees(on_chip.decode_attention, device, store, *case) for case in cases)


def _agrees(
    decode: Callable[..., Tensor], device: torch.device, store: Store, dtype: torch.dtype, tolerance: float
) -> bool:
    """Compare on stored keys and values, and the numbers that they stand for, as `store` makes them of dense ones."""
    query, pruned = (draw(device, *s).to(dtype) for s in ((2, 4, 2, 48), (2, 2, 301, 19)))
    sinks, tail = (draw(device, 2, 2, count, 48).to(dtype) for count in (3, 37))
    old, new = (draw(device, 2, 2, count, 40).to(dtype) for count in (304, 37))
    stored, stored_values, pruned, old = store(pruned, old)
    kept_indices = torch.stack([torch.arange(19, device=device), torch.arange(5, 43, 2, device=device)])
    kept_indices = kept_indices.expand(2, -1, -1).contiguous()
    wide = sinks.double(), tail.double(), old.double(), new.double()
    expected, _ = attention(query.double(), pruned.double(), kept_indices, *wide)
    actual = decode(query, stored, kept_indices, sinks, tail, stored_values, new)
    return bool(((actual - expected).abs().max() <= tolerance * expected.abs().max()).item())


def _dense(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return keys, values, keys, values


def _in_few_bits(keys: Tensor, values: Tensor) -> tuple[PackedKeys, PackedValues, Tensor, Tensor]:
    """Groups of 43 tokens in bytes and of 8 channels in int32, and what they stand for: steps of 1/4 from -2, which
    all types hold."""
    few = zip((keys, values), (4, 3), strict=True)
    of_keys, of_values = (((t.float() + 2) * 4).round().clamp(0, 2**bits - 1) for t, bits in few)
    batch, heads, _, channels = keys.shape
    by_token = of_keys.view(batch, heads, -1, 43, channels).mT.reshape(batch, -1, 43)
    packed_keys = PackedKeys(shape=keys.shape, **_packed(by_token, 4, keys.shape[2] // 43, heads, keys.dtype))
    by_channel = of_values.view(batch, -1, 8)
    packed_values = PackedValues(shape=values.shape, **_packed(by_channel, 3, values.shape[2], heads, keys.dtype))
    dense_keys, dense_values = ((levels.double() * 0.25 - 2).to(keys.dtype) for levels in (of_keys, of_values))
    return packed_keys, packed_values, dense_keys, dense_values


def _packed(rows: Tensor, bits: int, token_groups: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return all but the shape of what has as many rows of levels per sequence as fill its bytes or int32."""
    element, shared = element_of(bits)
    parts = enumerate(rows.to(element).chunk(shared, dim=1))
    packed = torch.stack([part << number * bits for number, part in parts]).sum(0, dtype=element)
    scale, zero = (torch.full((rows.shape[1],), value, device=rows.device, dtype=dtype) for value in (0.25, 2.0))
    parameters, places = (scale.data_ptr(), zero.data_ptr()), (packed.shape[1], rows.shape[1] // heads, 0)
    return {
        "dtype": dtype,
        "parameters": dtype,
        "group_size": rows.shape[2],
        "bits": bits,
        "high_first": False,
        "zero_in_levels": False,
        "table": torch.tensor(
            [[(part.data_ptr(), *parameters, *places)] for part in packed], dtype=torch.int64, device=rows.device
        ),
        "owners": torch.zeros(token_groups, dtype=torch.int32, device=rows.device),
        "tensors": (packed, scale, zero),
    }


STORES: tuple[Store, ...] = (_dense, _in_few_bits)
