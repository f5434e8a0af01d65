"""TurboQuant (arXiv 2504.19874), the variant for mean squared error: a random rotation, and one codebook for all.

A token's norm is kept in 16 bits. Its direction is rotated by a random orthogonal matrix, after which each coordinate
has the density of a coordinate of a random point on the sphere, proportional to (1 - x²)^((d-3)/2), whatever the token
was. Coordinates are rounded to that density's Lloyd-Max levels. With d = 64, b bits take b + .25.

The rotation and the levels depend on nothing but d and the seed, so they are not stored.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from scipy.special import betainc, betaln
from torch import Tensor

from bench.arena.stored import PARAMETER_BITS, Layer, Method, Stored, in_16_bits, stored
from grace_opt.hf import CalibratedBasis

SOURCE = "TurboQuant, arXiv 2504.19874"
WIDTHS = (4, 3, 2)
SEED = 0
#: Most steps of Lloyd's iteration, and the move of a level below which it has come to rest.
_STEPS, _AT_REST = 4000, 1e-9


@functools.lru_cache(maxsize=64)
def levels(width: int, bits: int) -> Tensor:
    """Return the 2^bits levels that represent a coordinate of a random unit vector best, ascending.

    Examples
    --------
    >>> (levels(64, 1) * 8).tolist()  # a Gaussian of the same variance has ±.798
    [-0.801..., 0.801...]
    """
    shape = (width - 1) / 2

    def below(x: np.ndarray) -> np.ndarray:
        return betainc(shape, shape, (x + 1) / 2)

    # Of x times the density, up to the same constant: (1 - x²)^((d-3)/2) x integrates to -(1 - x²)^((d-1)/2) / (d - 1).
    constant = np.exp(-_log_beta(width)) / (width - 1)
    found = np.linspace(-1, 1, 2**bits + 2)[1:-1] * min(1.0, 3 / np.sqrt(width))
    for _ in range(_STEPS):
        edges = np.concatenate([[-1.0], (found[1:] + found[:-1]) / 2, [1.0]])
        moments = constant * -np.diff((1 - edges**2) ** shape)
        shares = np.diff(below(edges))
        middle = (edges[1:] + edges[:-1]) / 2
        before, found = found, np.where(shares > 1e-300, moments / np.maximum(shares, 1e-300), middle)
        if np.abs(found - before).max() < _AT_REST:
            break
    return torch.from_numpy(found).float()


def _log_beta(width: int) -> float:
    """Return the logarithm of the integral of (1 - x²)^((d-3)/2) over the interval from -1 to 1."""
    shape = (width - 1) / 2
    return float(betaln(shape, shape) + (width - 2) * np.log(2))


@functools.lru_cache(maxsize=64)
def rotation(width: int, seed: int = SEED) -> Tensor:
    """Return a random orthogonal matrix, uniformly distributed."""
    generator = torch.Generator().manual_seed(seed)
    found, triangle = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return (found * triangle.diagonal().sign()).float()


def nearest(numbers: Tensor, to: Tensor) -> Tensor:
    """Return the nearest of some ascending levels for each number."""
    return to[torch.bucketize(numbers, (to[1:] + to[:-1]) / 2)]


def quantised(tokens: Tensor, bits: int, seed: int = SEED) -> tuple[Tensor, float]:
    """Quantise tokens ``(H, n, d)``; return them read again, and their bits."""
    width = tokens.shape[-1]
    norm = tokens.norm(dim=-1, keepdim=True)
    turn = rotation(width, seed)
    direction = nearest(tokens / torch.where(norm > 0, norm, 1) @ turn.T, levels(width, bits)) @ turn
    return in_16_bits(norm) * direction, tokens.numel() * bits + PARAMETER_BITS * tokens.shape[:2].numel()


def store(layers: list[Layer], basis: CalibratedBasis | None, *, bits: int) -> list[Stored]:
    """Store a prompt; K and V have different rotations."""
    keys = functools.partial(quantised, bits=bits)
    return [stored(layer, keys, functools.partial(keys, seed=SEED + 1)) for layer in layers]


def methods() -> list[Method]:
    """Return every width."""
    return [
        Method(
            f"turboquant-{bits}",
            f"TurboQuant, {bits} bits (our implementation)",
            "TurboQuant",
            SOURCE,
            functools.partial(store, bits=bits),
        )
        for bits in WIDTHS
    ]
