r"""What a key says of the attention that its token will receive, where no query is known.

Queries of a head have much in common, so that the same keys are asked for again and again. On the calibration texts,
the logarithm of the attention that tokens receive is fitted by a function of their keys, by least squares,

.. math:: \log p_t \approx a + \sum_i u_i k_{ti} + \sum_i v_i k_{ti}^2,

and that of the mean of :math:`p^2` likewise. Only differences between the tokens of a text count: means are taken off
before, and a is not kept.

Source: that future attention can be expected from statistics of queries is the idea of Expected Attention (Devoto,
Jeblick and Jégou, arXiv 2510.00636), which computes it from their moments; the regression is this library's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .classes import WEIGHT_FLOOR

#: Added to each diagonal entry of the keys' moments, as a share of it.
RIDGE = 0.02
#: Logarithms are cut at this distance from their mean: a prediction must not decide alone.
FARTHEST = 6.0


def expected_sums(keys: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return what one text adds to the sums of the regression.

    Parameters
    ----------
    keys : Tensor
        ``(H, n, d)``, float32 or float64.
    first, second : Tensor
        ``(H, n)``: the means of p and of p² that each of these tokens received.

    Returns
    -------
    moments : Tensor
        ``(H, 2 d, 2 d)``, the sums of products of centred numbers and squares.
    products : Tensor
        ``(H, 2 d, 2)``, those of these and of centred logarithms.
    """
    received = torch.stack([first, second.clamp(min=0)], dim=-1).to(keys.dtype)
    logs = (received + WEIGHT_FLOOR * received.mean(1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny).log()
    centred, logs = (each - each.mean(1, keepdim=True) for each in (_features(keys), logs))
    return centred.mT @ centred, centred.mT @ logs


def directions(moments: Tensor, products: Tensor) -> Tensor:
    """Return the coefficients u and v of p and of p², ``(H, 2 d, 2)`` float32; zeros where keys do not differ.

    Examples
    --------
    >>> import torch
    >>> directions(torch.eye(2)[None] * 4, torch.tensor([[[2.04, 0.0], [0.0, 0.0]]]))
    tensor([[[0.5000, 0.0000],
             [0.0000, 0.0000]]])
    """
    diagonal = torch.diagonal(moments.double(), dim1=-2, dim2=-1)
    least = diagonal.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny) * torch.finfo(torch.float32).eps
    regular = moments.double() + torch.diag_embed(RIDGE * torch.maximum(diagonal, least))
    found: Tensor = torch.linalg.solve(regular, products.double()).float()
    return found


def expected(keys: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is expected of the means of p and of p² of some tokens, up to a factor of each head.

    Parameters
    ----------
    keys : Tensor
        ``(H, n, d)``.
    direction : Tensor
        ``(H, 2 d, 2)``, of `directions`.

    Returns
    -------
    Tensor, Tensor
        ``(H, n)`` float32 each, around 1.

    Examples
    --------
    >>> import torch
    >>> first, _ = expected(torch.tensor([[[1.0], [-1.0], [300.0]]]), torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]))
    >>> first.log().round()
    tensor([[-6., -6.,  6.]])
    """
    logs = _features(keys.float()) @ direction
    logs = (logs - logs.mean(1, keepdim=True)).clamp(-FARTHEST, FARTHEST)
    first, second = logs.exp().unbind(-1)
    return first, second


def _features(keys: Tensor) -> Tensor:
    """Return numbers and squares, ``(H, n, 2 d)``."""
    return torch.cat([keys, keys.square()], dim=-1)
