"""Codebooks: the numbers that a code of b bits stands for, before its scale and mean.

One to six bits have the levels of Lloyd and Max for a Gaussian, which coordinates of keys and values nearly are in a
good basis; those of a trellis are fitted to one too, twice as many. Eight bits, given to the few tokens that matter
most, are evenly spaced up to the largest entry, so that no outlier is cut. Level 0 stores nothing: the channel is its
mean.

Source: Lloyd, IEEE Trans. Information Theory 28 (1982); Max, IRE Trans. Information Theory 6 (1960).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from ...kernels.cache.coding import Codebooks
from ...kernels.cache.coding.reference import levels_read

#: Bits that a channel can have.
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)
#: The width whose codes are evenly spaced, its scale being the largest entry.
EVEN_WIDTH = 8
#: What `python -m bench.trellis_levels` fits: by bits, the levels of a trellis, twice as many, and the squared error.
_TRELLIS = Path(__file__).parents[2] / "data" / "trellis.json"
#: Number of steps in which Lloyd's iteration for 64 levels comes to rest, with room to spare.
_STEPS = 4000


@functools.cache
def gaussian_levels(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels that represent a standard Gaussian with the least squared error, ascending.

    Rounded to six digits, so that every machine has the same ones.

    Examples
    --------
    >>> gaussian_levels(1)
    (-0.797885, 0.797885)
    """
    levels = np.linspace(-2.5, 2.5, 2**bits)
    for _ in range(_STEPS):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-np.square(edges) / 2) / np.sqrt(2 * np.pi)
        levels = (density[:-1] - density[1:]) / (ndtr(edges[1:]) - ndtr(edges[:-1]))
    half = np.round(levels[len(levels) // 2 :], 6).tolist()
    return tuple([-level for level in reversed(half)] + half)


@functools.cache
def _of_trellis() -> dict[int, Any]:
    return {int(bits): found for bits, found in json.loads(_TRELLIS.read_text(encoding="utf-8")).items()}


@functools.cache
def distortions(trellis: bool = False) -> tuple[float, ...]:
    """Return the mean squared error of each of `WIDTHS` on a standard Gaussian.

    For `EVEN_WIDTH` on a range of four standard deviations, which some thousand tokens reach.
    """
    found: list[float] = []
    for bits in WIDTHS:
        if trellis and bits in _of_trellis():
            found.append(_of_trellis()[bits]["distortion"])
        elif bits == 0:
            found.append(1.0)
        elif bits == EVEN_WIDTH:
            found.append((4 / 127) ** 2 / 12)
        else:
            levels = np.array(gaussian_levels(bits))
            edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
            found.append(1.0 - float(np.sum(np.square(levels) * np.diff(ndtr(edges)))))
    return tuple(found)


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return levels, edges, and the levels of a trellis."""
    shape = (max(WIDTHS) + 1, 2 ** max(WIDTHS))
    table, edges = np.zeros(shape, dtype=np.float32), np.full((shape[0], shape[1] - 1), np.inf, dtype=np.float32)
    for bits in WIDTHS[1:]:
        levels = (
            (np.arange(2**bits) - 2 ** (bits - 1)) / (2 ** (bits - 1) - 1)
            if bits == EVEN_WIDTH
            else np.array(gaussian_levels(bits))
        )
        table[bits, : 2**bits] = levels
        edges[bits, : 2**bits - 1] = (levels[1:] + levels[:-1]) / 2
    trellis = np.zeros(shape, dtype=np.float32)
    trellis[EVEN_WIDTH] = table[EVEN_WIDTH]
    for bits, found in _of_trellis().items():
        trellis[bits + 1, : 2 ** (bits + 1)] = found["levels"]
    return table, edges, trellis


def codebook(device: torch.device) -> Tensor:
    """Return all levels, ``(9, 256)`` float32: row b has those of b bits, padded with zeros."""
    return codebooks(device).levels


def trellis_codebook(device: torch.device) -> Tensor:
    """Return the levels of a trellis, ``(9, 256)`` float32: row b has those of codes that are read as b bits."""
    return levels_read(codebooks(device, trellis=True))


def codebooks(device: torch.device, trellis: bool = False) -> Codebooks:
    """Return all levels, and the edges between them."""
    if (device, trellis) not in _CODEBOOKS:
        levels, edges, read = (torch.from_numpy(part).to(device) for part in _tables())
        _CODEBOOKS[device, False] = Codebooks(levels, edges, EVEN_WIDTH)
        _CODEBOOKS[device, True] = Codebooks(levels, edges, EVEN_WIDTH, read)
    return _CODEBOOKS[device, trellis]


#: By device: made when something is coded, and only read while torch.compile traces a decode step.
_CODEBOOKS: dict[tuple[torch.device, bool], Codebooks] = {}
