r"""`Divergence`: how unlike the texts of its calibration a prompt is, in the coordinates of a layer's bases.

On the calibration texts, coordinates have variance one, and queries ask for each as much as its energy says. A prompt's
own variances and energies are compared with that, as Gaussians of variance v and 1 are by their relative entropy,
:math:`(v - 1 - \ln v) / 2` nats, the mean over a head's coordinates. Variances below 1 count nothing: they cost no
quality, and short or repetitive prompts have them.

A basis of another layer, head or model, or turned coordinates, show in keys or queries, although the error of the
layer's output may look ordinary: bits follow the prompt's own variances wherever they are.

Source: the relative entropy of Gaussians (Cover & Thomas, Elements of Information Theory, 9.5).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .basis import Basis
from .calibrate import TOKENS

#: What is too much, nats per coordinate: ordinary text of three models stays below half of it, and another layer's
#: basis, swapped heads and turned coordinates are beyond it in nearly every layer (docs/results/guard.md). Values
#: differ more from text to text, and what is wrong is seen by the other two.
LIMITS = {"keys": 0.25, "values": 1.0, "queries": 0.25}
#: Of a head's tokens, about so many show the variances.
SHOWN = 256
#: Tokens from the prompt's beginning that are looked at, as many as a calibration text has: farther on, rotary
#: embeddings turn the means of keys and queries to where no text of the calibration was.
LOOKED_AT = TOKENS
#: Energies below this share of a head's mean count as this: what nothing asks for is no matter.
LEAST_ENERGY = 1e-3


class Divergence(NamedTuple):
    """Nats per coordinate by which a prompt's numbers exceed the calibration's, those of the most unlike head.

    Attributes
    ----------
    keys, values, queries : float

    Examples
    --------
    >>> Divergence(keys=0.05, values=0.5, queries=0.01).largest
    ('values', 0.5)
    """

    keys: float
    values: float
    queries: float

    @property
    def largest(self) -> tuple[str, float]:
        """Which of the three is largest, as a share of its limit, and that share."""
        shares = {name: size / LIMITS[name] for name, size in self._asdict().items()}
        return max(shares.items(), key=lambda pair: pair[1])


def excess(ratios: Tensor) -> Tensor:
    """Return the relative entropy of variances above 1, the mean over coordinates of the most unlike head.

    Parameters
    ----------
    ratios : Tensor
        ``(H, d)`` float64: variances, or other mean squares, over those of the calibration.

    Returns
    -------
    Tensor
        ``()`` float64.

    Examples
    --------
    >>> excess(torch.tensor([[1.0, 0.1], [3.0, 1.0]], dtype=torch.float64)).round(decimals=4)
    tensor(0.2253, dtype=torch.float64)
    """
    above = ratios.clamp(min=1)
    return ((above - 1 - above.log()) / 2).mean(-1).max()


def divergence(bases: tuple[Basis, Basis], keys: Tensor, values: Tensor, energy: Tensor) -> Tensor:
    """Return what a `Divergence` consists of, ``(3,)`` float64, on the device.

    Parameters
    ----------
    bases : (Basis, Basis)
        Those of keys and of values.
    keys, values : Tensor
        ``(H, n, d)`` and ``(H, n, d_v)``: the prompt's, the keys without the mean that turns; the first `LOOKED_AT`
        of them count.
    energy : Tensor
        ``(H, d)`` float64: what a unit of squared error in each of the keys' coordinates costs by the queries of as
        many tokens.
    """
    least = LEAST_ENERGY * bases[0].energy.mean(-1, keepdim=True)
    asked = (energy + least) / (bases[0].energy + least)
    ratios = [_variances(keys, bases[0]), _variances(values, bases[1]), asked]
    return torch.stack([excess(each) for each in ratios])


def _variances(tensor: Tensor, basis: Basis) -> Tensor:
    tensor = tensor[:, :LOOKED_AT]
    some = tensor[:, :: max(tensor.shape[1] // SHOWN, 1)].float() @ basis.encode
    return some.double().var(1, correction=0)
