r"""Tables of random hyperplanes: which tokens a query samples, with what probability, and how near the others can be.

Keys are centred, :math:`v_t = k_t - m`: all logits of a query then lack the same :math:`q^{\mathsf T} m`. A bit says on
which side of a random hyperplane a vector lies; bits of :math:`q` and :math:`v_t` are equal with probability
:math:`p = 1 - \theta / \pi` at the angle :math:`\theta`. Each of :math:`L` tables has a code of :math:`K` bits, and a
token is sampled if its code is the query's in at least two tables, that is with probability

.. math:: u = 1 - (1 - p^K)^L - L\,p^K (1 - p^K)^{L - 1}.

Of the :math:`N = LK` bits, the number :math:`M` of equal ones is binomial, so with the exact upper confidence limit
:math:`\bar p(M)` of level :math:`\delta / n`, all :math:`n` tokens of a query have
:math:`x_t \le q^{\mathsf T} m + \lVert q \rVert \lVert v_t \rVert \cos \pi (1 - \bar p(M_t))` at once, with
probability :math:`1 - \delta` or more over the draw of the hyperplanes.

Source: MagicPIG (arXiv 2410.16179) for codes, centring and :math:`u`; Charikar, "Similarity estimation techniques from
rounding algorithms" (2002), for :math:`p`; Clopper and Pearson (1934) for the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..._shared.limits import BITS, BITS_AT_ONCE
from .pages import Placed

#: Tables in which a token's code must be the query's.
COLLISIONS = 2
#: Most bits of a code.
MAX_BITS = 24
#: Numbers that are compared, or bits that are made, at once.
_AT_ONCE = 2**22
#: More than what rounding may do to a confidence limit, which has no unit.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class HashTables(Placed):
    """Codes of the older tokens' keys, and what the logits of unread tokens can be.

    Attributes
    ----------
    bits : int
        Bits of a code, K.
    planes : Tensor
        ``(d', L K)`` float32: the hyperplanes, from `hyperplanes`. The same for all sequences and heads.
    codes : Tensor
        ``(B, H, S_p / 256, L K, 32)`` uint8, with the numbers of tokens and planes rounded up, to 16 planes: of each
        plane a bit for every token, from `packed`, so that bits of many tokens are compared at once.
    norms : Tensor
        ``(B, H, S_p)`` float64: of the centred keys.
    mean : Tensor
        ``(B, H, d')``, float32 or wider: what keys are centred by.
    highest : Tensor
        ``(B, L K + 1)`` float64: cosines from `highest_cosines`, by the number of equal bits.
    tokens_per_page : Tensor
        ``(B, S_p)`` int32: 1 for real tokens, 0 for padding; each is a page of its own.
    reach : Tensor
        ``(B, H, d')``: the largest absolute number of each channel.
    places : dict
        What the compiled loop keeps between steps.
    """

    bits: int
    planes: Tensor
    codes: Tensor
    norms: Tensor
    mean: Tensor
    highest: Tensor
    tokens_per_page: Tensor
    reach: Tensor
    places: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(keys: Tensor, real: Tensor, tables: int, bits: int, confidence: float, seed: int, layer: int) -> HashTables:
        """Make them for the keys of a layer.

        Parameters
        ----------
        keys : Tensor
            ``(B, H, S_p, d')``, floating.
        real : Tensor
            ``(B, S_p)`` bool, False at padding.
        tables, bits : int
            L and K.
        confidence : float
            Of the highest cosines: see `highest_cosines`.
        seed, layer : int
            Of the hyperplanes.
        """
        shown = keys.masked_fill(~real[:, None, :, None], 0.0)
        wide = torch.promote_types(keys.dtype, torch.float32)
        mean = (shown.double().sum(2) / real.sum(-1).clamp(min=1)[:, None, None]).to(wide)
        centred = shown.double() - mean[:, :, None].double()
        planes = hyperplanes(seed, layer, keys.shape[3], tables * bits).to(keys.device)
        return HashTables(
            bits=bits,
            planes=planes,
            codes=packed(centred, planes),
            norms=torch.linalg.vector_norm(centred, dim=-1).masked_fill(~real[:, None], 0.0),
            mean=mean,
            highest=highest_cosines(real.sum(-1), tables * bits, confidence),
            tokens_per_page=real.to(torch.int32),
            reach=shown.abs().amax(2),
        )

    @property
    def tables(self) -> int:
        """Number of tables, L."""
        return self.planes.shape[1] // self.bits

    def compare(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens queries ``(B, H, g, d')`` sample, and the highest logits, ``(B, H, g, S_p)`` each."""
        count, old = self.planes.shape[1], self.norms.shape[2]
        mine = _signs(sides_of(query, self.planes)).view(*query.shape[:3], self.tables, self.bits)
        mine = mine.transpose(2, 3)[:, :, None]  # (B, H, 1, L, g, K)
        step = max(_AT_ONCE // (query.shape[:3].numel() * count * BITS), 1)
        collisions, equal = [], []
        for codes in torch.split(self.codes[:, :, :, :count], step, dim=2):
            above = (codes[..., None] >> torch.arange(8, dtype=torch.uint8, device=codes.device)) & 1
            signs = _signs(above).view(*codes.shape[:3], self.tables, self.bits, BITS)
            more = mine @ signs  # equal bits less others of each table: whole numbers, exact in every order
            collisions.append((more == self.bits).sum(3).transpose(2, 3).flatten(3))
            equal.append((more.sum(3).transpose(2, 3).flatten(3) + count).long() // 2)
        matches, collided = (torch.cat(each, dim=-1)[..., :old] for each in (equal, collisions))
        cosines = self.highest.gather(-1, matches.flatten(1)).view(matches.shape)
        lengths = torch.linalg.vector_norm(query, dim=-1, keepdim=True) * self.norms[:, :, None]
        shift = (query * self.mean.to(query.dtype)[:, :, None]).sum(-1, keepdim=True)
        return collided >= COLLISIONS, shift + lengths * cosines

    def log_probabilities(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the logarithms ``(B, H, g, n)`` of the probabilities with which queries ``(B, H, g, d')`` sample keys
        ``(B, H, n, d')``."""
        centred = keys - self.mean.to(keys.dtype)[:, :, None]
        lengths = [torch.linalg.vector_norm(vectors, dim=-1, keepdim=True) for vectors in (query, centred)]
        one, other = (vectors / length for vectors, length in zip((query, centred), lengths, strict=True))
        equal = 1 - (one @ other.mT).clamp(-1, 1).acos() / torch.pi
        # A vector without a direction has the same code always: equal to any other's with the probability of a right
        # angle, and to that of another such vector surely.
        none, either = (lengths[0] == 0) & (lengths[1] == 0).mT, (lengths[0] == 0) | (lengths[1] == 0).mT
        equal = equal.masked_fill(either, 0.5).masked_fill(none, 1.0)
        return log_sampling_probability(equal, self.bits, self.tables)

    def terms(self, query: Tensor) -> Tensor:
        """Return a rounding scale ``(B, H, g)``: no product's terms add up to more, in absolute value."""
        length = torch.linalg.vector_norm(query, dim=-1)
        products = 2 * (query.abs() * self.reach.to(query.dtype)[:, :, None]).sum(-1)
        terms: Tensor = products + length * self.norms.amax(-1, keepdim=True)
        return terms


def hyperplanes(seed: int, layer: int, width: int, count: int) -> Tensor:
    """Return normals of random hyperplanes, ``(width, count)`` float32 on the CPU; those of every layer are others."""
    state = int(np.random.SeedSequence((seed, layer)).generate_state(1)[0])
    generator = torch.Generator("cpu").manual_seed(state)
    return torch.randn(width, count, generator=generator, dtype=torch.float32, device="cpu")


def sides_of(vectors: Tensor, planes: Tensor) -> Tensor:
    """Return whether vectors ``(B, H, n, d')`` lie on the upper side of each hyperplane, ``(B, H, n, planes)`` bool.

    Products are computed in float64: rounding then changes a bit with a probability of about 1e-15.
    """
    return vectors.double() @ planes.to(vectors.device, torch.float64) >= 0


def packed(vectors: Tensor, planes: Tensor) -> Tensor:
    """Return the bits of vectors ``(B, H, n, d')``, as `HashTables.codes` holds them; the first in the lowest bit."""
    count, step = planes.shape[1], max(_AT_ONCE // (vectors.shape[:2].numel() * planes.shape[1] * BITS), 1)
    blocks = []
    for block in torch.split(vectors, step * BITS, dim=2):
        padding = -block.shape[2] % BITS
        above = functional.pad(sides_of(block, planes), (0, -count % BITS_AT_ONCE, 0, padding)).to(torch.uint8)
        eights = above.view(*above.shape[:2], -1, BITS // 8, 8, above.shape[3])
        codes = eights[..., 0, :]
        for place in range(1, 8):
            codes = codes | eights[..., place, :] << place
        blocks.append(codes.mT.contiguous())
    return torch.cat(blocks, dim=2)


def _signs(bits: Tensor) -> Tensor:
    """Return 1 for ones and -1 for zeros."""
    return bits.to(torch.float32) * 2 - 1


def log_sampling_probability(equal: Tensor, bits: int, tables: int) -> Tensor:
    """Return the logarithm of u for the probability that a bit is equal.

    Written as :math:`-\\operatorname{expm1}`, because it is far smaller than 1 for distant tokens.

    Examples
    --------
    >>> equal = torch.tensor([0.5, 1.0], dtype=torch.float64)
    >>> log_sampling_probability(equal, 1, 2).exp()
    tensor([0.2500, 1.0000], dtype=torch.float64)
    """
    code = equal**bits
    none_or_one = (tables - 1) * torch.log1p(-code) + torch.log1p((tables - 1) * code)
    return (-torch.expm1(none_or_one)).clamp(min=torch.finfo(equal.dtype).tiny).log()


def highest_cosines(tokens: Tensor, bits: int, confidence: float) -> Tensor:
    """Return the largest plausible cosines by the number of equal bits, from 0 to `bits`, for rows of so many tokens.

    Parameters
    ----------
    tokens : Tensor
        ``(B,)``: tokens that share the error probability ``1 - confidence``.
    bits : int
        Of a token, in all tables together.
    confidence : float
        With which no token of a row has a larger cosine.

    Returns
    -------
    Tensor
        ``(B, bits + 1)`` float64, on the device of `tokens`.
    """
    from scipy.special import betainccinv

    level = (1 - confidence) / tokens.clamp(min=1).double().cpu().numpy()[:, None]
    equal = np.arange(bits, dtype=np.float64)
    limit = np.ones((len(level), bits + 1))
    limit[:, :-1] = np.minimum(betainccinv(equal + 1, bits - equal, level) + _ROUNDING, 1.0)
    return torch.from_numpy(-np.cos(np.pi * limit)).to(tokens.device)
