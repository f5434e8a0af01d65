r"""Bases in which bits are given to channels: changes of coordinates that leave attention unchanged.

Keys are stored as :math:`k E`, and :math:`q \cdot k = (q E^{-\top}) \cdot (k E)`. In the basis that diagonalises the
second moments of queries and of centred keys together, an error in one coordinate changes the logits independently of
all others: the loss of a head is the sum over its channels, which is what `grace_opt.allocate` divides a budget by.
Values are stored likewise, with the metric of the output projection in the place of the queries' moments.

Source: simultaneous diagonalisation (Horn & Johnson, Matrix Analysis, 7.6); reverse water-filling on the joint spectrum
(Cover & Thomas, Elements of Information Theory, 10.3) is the limit that the allocation approaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._util.arrays import to_device
from .rotary import RotaryMean

#: Weight of the diagonal in the queries' moments: a prompt shows some thousand queries, not all.
SHRINKAGE = 0.1
#: Eigenvalues of the metric below this share of the largest are raised to it, those of the keys' moments likewise: a
#: direction that nobody has asked for yet may be asked for later.
FLOOR = 1e-6


@dataclass(frozen=True)
class Basis:
    """A change of coordinates per KV head.

    Attributes
    ----------
    encode : Tensor
        ``(H, d, d)`` float32: stored coordinates are ``x @ encode``.
    decode : Tensor
        ``(H, d, d)`` float32, its inverse.
    energy : Tensor
        ``(H, d)`` float64: how much a unit of squared error in each stored coordinate costs.
    rotary : RotaryMean, optional
        What is taken off keys before, at their positions.
    """

    encode: Tensor
    decode: Tensor
    energy: Tensor
    rotary: RotaryMean | None = None

    def heads(self, start: int, stop: int) -> Basis:
        """Return the basis of some of the heads, as a rank of a tensor-parallel model needs."""
        rotary = None if self.rotary is None else self.rotary.heads(start, stop)
        return Basis(self.encode[start:stop], self.decode[start:stop], self.energy[start:stop], rotary)

    def __deepcopy__(self, copies: dict[int, Any]) -> Basis:
        return self  # it belongs to the model, and copies of a cache share it

    def to(self, device: torch.device | str) -> Basis:
        """Copy to a device."""
        there = torch.device(device)
        encode, decode, energy = (to_device(each, there) for each in (self.encode, self.decode, self.energy))
        return Basis(encode, decode, energy, None if self.rotary is None else self.rotary.to(there))


def joint_basis(metric: Tensor, moment: Tensor, shrinkage: float = SHRINKAGE) -> Basis:
    """Return the basis in which a metric and a second moment are both diagonal, with coordinates of variance one.

    Parameters
    ----------
    metric : Tensor
        ``(H, d, d)``, positive semidefinite: how errors count; second moments of the queries, for keys.
    moment : Tensor
        ``(H, d, d)``, positive semidefinite: second moments of what is stored, centred.
    shrinkage : float
        Weight of the metric's diagonal against the metric.

    Returns
    -------
    Basis
        With the metric's diagonal as its energy. Singular matrices are floored; zero ones give the identity.
    """
    values, vectors = _floored(_shrunk(metric.double(), shrinkage))
    root = (vectors * values.sqrt()[:, None]) @ vectors.mT
    inverse = (vectors / values.sqrt()[:, None]) @ vectors.mT
    values, vectors = _floored(moment.double())
    found = root @ (vectors * values[:, None]) @ vectors.mT @ root
    spread, turn = torch.linalg.eigh((found + found.mT) / 2)
    # Not below what two floors allow: rounding must leave no zeros and no negative numbers.
    spread = torch.maximum(spread, spread[:, -1:] * FLOOR**2).sqrt()
    encode = root @ turn / spread[:, None]
    decode = spread[..., None] * (turn.mT @ inverse)
    return Basis(encode.float(), decode.float(), spread.square())


def identity_basis(heads: int, width: int, device: torch.device | None = None) -> Basis:
    """Return the coordinates as they are."""
    eye = torch.eye(width, dtype=torch.float32, device=device).expand(heads, width, width)
    return Basis(eye, eye, torch.ones(heads, width, dtype=torch.float64, device=device))


def energy_in(basis: Basis, metric: Tensor, shrinkage: float = SHRINKAGE) -> Tensor:
    """Return what errors in each coordinate of a basis cost under another metric, ``(H, d)`` float64."""
    decode = basis.decode.double()
    return ((decode @ _shrunk(metric.double(), shrinkage)) * decode).sum(-1).clamp(min=0)


def _shrunk(moment: Tensor, share: float) -> Tensor:
    diagonal = torch.diagonal(moment, dim1=-2, dim2=-1)
    return (1 - share) * moment + share * torch.diag_embed(diagonal)


def _floored(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, raised to `FLOOR` of the largest, and eigenvectors; those of the identity for zero."""
    values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    largest = values[:, -1:]
    return torch.where(largest > 0, torch.maximum(values, largest * FLOOR), 1.0), vectors
