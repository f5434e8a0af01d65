"""Fit the levels of a trellis to a Gaussian, and measure the error that they leave; what `grace_opt/data` ships.

Lloyd's iteration (Marcellin and Fischer, 1990): code numbers by Viterbi's algorithm, move every level to the mean of
the numbers that are coded by it, and again. Levels stay symmetric.

    python -m bench.trellis_levels grace_opt/data/trellis.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri
from torch import Tensor

from grace_opt._util.files import write_file
from grace_opt.hf.stores.coded.bitplanes import unpack_codes
from grace_opt.kernels.cache.coding.cpu import code
from grace_opt.kernels.cache.coding.trellis import as_read

#: Bits of codes; those that are read have one more.
WIDTHS = (1, 2, 3, 4, 5, 6)
ROWS, COLUMNS, STEPS, SEED = 200, 4000, 1000, 0


def main() -> None:
    """Write the file."""
    made = {}
    draws = np.random.default_rng(SEED)
    for bits in WIDTHS:
        # Nearly the best of so many levels without a trellis (Panter and Dite, Proceedings of the IRE 39, 1951).
        levels = (3**0.5 * ndtri((np.arange(2 << bits) + 0.5) / (2 << bits))).astype(np.float32)
        for _ in range(STEPS):
            rows = draws.standard_normal((ROWS, COLUMNS), dtype=np.float32)
            levels = fitted(rows, levels, bits)
        levels = np.round(levels, 5)
        rows = draws.standard_normal((ROWS, COLUMNS), dtype=np.float32)
        error = float(np.square(rows - levels[coded(rows, levels, bits)]).mean(dtype=np.float64))
        made[str(bits)] = {"levels": [round(float(level), 5) for level in levels], "distortion": float(f"{error:.4g}")}
        print(bits, made[str(bits)], file=sys.stderr)
    write_file(Path(sys.argv[1]), json.dumps(made, indent=1) + "\n")


def coded(rows: npt.NDArray[np.float32], levels: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.int64]:
    """Return the codes of rows as they are read."""
    number, count = rows.shape
    book = np.zeros((bits + 2, 256), np.float32)
    book[bits + 1, : len(levels)] = levels
    no_edges, no_even = book[:, 1:].copy(), 0  # which only other codes have
    widths, planes = np.full((1, number), bits, np.uint8), np.empty(number * bits * -(-count // 8), np.uint8)
    means, scales = np.zeros(number, np.float32), np.ones((1, number), np.float32)
    code(rows, means, widths, np.array([count]), no_edges, book, no_even, scales, planes)
    by_plane = torch.from_numpy(planes).view(number * bits, -1)
    found: Tensor = as_read(unpack_codes(by_plane, torch.from_numpy(widths[0]), count))
    return found.long().numpy()


def fitted(rows: npt.NDArray[np.float32], levels: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """Return better levels."""
    read = coded(rows, levels, bits).ravel()
    sums = np.bincount(read, rows.ravel().astype(np.float64), len(levels))
    counts = np.bincount(read, minlength=len(levels))
    means = np.where(counts > 0, sums / np.maximum(counts, 1), levels)
    return np.sort((means - means[::-1]) / 2).astype(np.float32)


if __name__ == "__main__":
    main()
