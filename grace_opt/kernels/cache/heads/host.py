"""Heads on the CPU: passes all heads of keys and of values to the compiled loop, in torch's threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._shared.threads import call_in_threads
from ..coding.reference import PER_BYTE, Codebooks, levels_read
from . import forms
from .parts import Coded, Heads, Tables


def code_heads(kinds: Sequence[Heads], tables: Tables, books: Codebooks) -> list[Coded]:
    """Code keys and values.

    Parameters
    ----------
    kinds : sequence of Heads
        For which `is_compiled` holds.
    tables : Tables
    books : Codebooks
    """
    from ..._shared.products import ROWS
    from .cpu import code_heads_at

    here = torch.device("cpu")
    classes, counts = len(tables.counts), tables.counts.tolist()
    limits = torch.tensor([tables.small, tables.large], dtype=torch.float32, device=here)
    trellis = levels_read(books)
    held = [tensor.contiguous() for tensor in (*tables[:4], limits, books.levels, books.edges, trellis)]
    sizes = classes, len(tables.widths), len(books.levels), len(trellis), books.even, tables.lowest
    shared = np.array([*(tensor.data_ptr() for tensor in held), *sizes], np.int64)
    records, outputs = np.zeros((len(kinds), 17), np.int64), []
    whole_bytes = sum(-(-count // PER_BYTE) for count in counts)
    for number, kind in enumerate(kinds):
        heads, tokens, width = kind.tensor.shape
        turned = torch.nn.functional.pad(kind.encode.mT, (0, 0, 0, -width % ROWS)).contiguous()
        precise = (tensor.double().contiguous() for tensor in (kind.energy, kind.bits))
        inputs = [turned.float(), kind.order.contiguous(), kind.weights.float().contiguous(), *precise]
        # A plane costs its bytes, so a head's planes take no more than its bits, nor than all with the most.
        capacity = min(int(kind.bits.max()) // PER_BYTE, whole_bytes * width * int(tables.widths.max()))
        results = (
            torch.zeros(heads, classes, width, dtype=torch.int64, device=here),
            torch.zeros(heads, width, dtype=torch.float32, device=here),
            torch.zeros(heads, classes, width, dtype=torch.float32, device=here),
            torch.zeros(heads, dtype=torch.float32, device=here),
            torch.empty(heads, capacity, dtype=torch.uint8, device=here),
        )
        held += inputs
        outputs.append(results)
        steps = [step * kind.tensor.element_size() for step in kind.tensor.stride()]
        records[number, [forms.TENSOR, forms.HEAD_STEP, forms.TOKEN_STEP]] = kind.tensor.data_ptr(), *steps[:2]
        inner = [forms.ENCODE, forms.ORDER, forms.WEIGHTS, forms.ENERGY, forms.BITS]
        records[number, inner] = [tensor.data_ptr() for tensor in inputs]
        records[number, [forms.HEADS, forms.TOKENS, forms.WIDTH, forms.CAPACITY]] = heads, tokens, width, capacity
        outer = [forms.LEVELS, forms.MEANS, forms.SCALES, forms.HEAD_SCALE, forms.PLANES]
        records[number, outer] = [tensor.data_ptr() for tensor in results]
    taken = np.zeros(2, np.int64)
    addresses = [array.ctypes.data for array in (taken, records, shared)]
    data = np.array([*addresses, len(kinds)], np.int64)
    call_in_threads(code_heads_at, data.ctypes.data, forms.AT_ONCE)
    return [_coded(tables, counts, *results) for results in outputs]


def _coded(
    tables: Tables,
    counts: Sequence[int],
    levels: Tensor,
    means: Tensor,
    scales: Tensor,
    head_scale: Tensor,
    planes: Tensor,
) -> Coded:
    """Put the heads' planes together, class by class."""
    numbers = tables.widths[levels].sum(2).tolist()  # (H, C)
    sizes = [-(-count // PER_BYTE) for count in counts]
    by_class: list[list[Any]] = [[] for _ in counts]
    for own, of_head in zip(planes.numpy(), numbers, strict=True):
        starts = np.cumsum([0, *(number * size for number, size in zip(of_head, sizes, strict=True))]).tolist()
        for planes_of_class, size, number, (start, stop) in zip(
            by_class, sizes, of_head, pairwise(starts), strict=True
        ):
            planes_of_class.append(own[start:stop].reshape(number, size))
    return Coded(
        levels.transpose(0, 1),
        means.to(torch.float16),
        scales.transpose(0, 1).to(torch.float16),
        head_scale,
        tuple(torch.from_numpy(np.concatenate(planes_of_class)) for planes_of_class in by_class),
    )
