r"""`RotaryMean`: what keys are on average at a position, for models that turn keys by it (RoPE).

Before it is turned, a key has a mean: the projection's bias, and what all tokens have in common. Rotary embeddings turn
each pair of channels by an angle that is proportional to the position, and the mean with them, so that no mean of the
turned keys is near it. It is known all the same,

.. math:: m_t = R_t\,\mu, \qquad q \cdot m_t = \mathrm{Re} \sum_j \bar q_j\, \mu_j\, e^{i \theta_j t},

with the two channels of a pair as one complex number; so it is not stored with every token. What is coded is
:math:`k_t - g\,m_t`, and the product with the query is added to the logits.

It predicts, no more: with the wrong frequencies, or positions, codes take the same bits and lose more. So pairs of
channels and their frequencies are chosen by what they explain (`choose_pairs`), and the factor g of each head by what
they explain in the prompt (`RotaryMean.gain`): 0 where nothing.

Source: Su et al., RoFormer (arXiv 2104.09864), for the embedding; the mean of what is turned back is this library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..._util.arrays import to_device

#: Most pairs of channels whose mean is taken off: each makes every step a little longer. And how much one explains at
#: least, as a share of what is left of a layer's keys without all means.
MOST_PAIRS, LEAST_SHARE = 32, 4e-3
#: Neighbouring positions for which sines are looked up; those of the first ones are multiplied.
BLOCK = 64
#: The prompt's tokens of which one shows how much of the mean to take off.
STRIDE = 4


@dataclass(frozen=True)
class RotaryMean:
    """The mean of the keys of a layer in some pairs of channels, before they are turned.

    Attributes
    ----------
    frequencies : Tensor
        ``(P,)`` float64: angles per position, in radians.
    channels : Tensor
        ``(2, P)`` int64: the two channels of each pair.
    mean : Tensor
        ``(H, 2, P)`` float32.
    """

    frequencies: Tensor
    channels: Tensor
    mean: Tensor
    _known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def pairs(self, kept: Tensor) -> RotaryMean:
        """Return some of the pairs."""
        return RotaryMean(self.frequencies[kept.cpu()], self.channels[:, kept], self.mean[..., kept])

    def heads(self, start: int, stop: int) -> RotaryMean:
        """Return that of some of the heads."""
        return RotaryMean(self.frequencies, self.channels, self.mean[start:stop])

    def to(self, device: torch.device | str) -> RotaryMean:
        """Copy what is multiplied to a device; the frequencies stay, as some devices have no float64."""
        there = torch.device(device)
        return RotaryMean(self.frequencies, to_device(self.channels, there), to_device(self.mean, there))

    def at(self, positions: Tensor, width: int) -> Tensor:
        """Return the mean of whole keys ``(H, n, d)`` at positions ``(n,)``, or ``(H, n)`` of each head; float32."""
        heads, pairs = len(self.mean), len(self.frequencies)
        parts = torch.zeros(heads, 2 * pairs, width, dtype=torch.float32, device=self.mean.device)
        every = torch.arange(pairs, device=self.mean.device)
        for number, channels in enumerate(self.channels):
            parts[:, every, channels] = self.mean[:, number]
            parts[:, pairs + every, channels] = self.mean[:, 1 - number] * (2 * number - 1)
        return torch.cat(self._turns(positions), dim=-1) @ parts

    def turned_back(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return the mean over tokens of keys ``(H, n, d)``, turned back from positions ``(n,)``: ``(H, 2, P)``."""
        cosines, sines = self._turns(positions)
        first, second = (keys[..., channels].to(cosines.dtype) for channels in self.channels)
        return torch.stack([first * cosines + second * sines, second * cosines - first * sines], dim=1).mean(2)

    def gain(self, keys: Tensor, metric: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor of the mean, from 0 to 1, with which each head's keys cost least, and what that saves.

        Parameters
        ----------
        keys : Tensor
            ``(H, n, d)``.
        metric : Tensor
            ``(H, d, d)``: how errors count, of which the diagonal is read.
        positions : Tensor
            ``(n,)`` or ``(H, n)``.

        Returns
        -------
        gain : Tensor
            ``(H,)`` float16.
        saved : Tensor
            ``()`` float32, of all heads together.
        """
        some = keys[:, ::STRIDE].float()
        means = self.at(positions[..., ::STRIDE], keys.shape[-1])
        means, some = (each - each.mean(1, keepdim=True) for each in (means, some))
        weighted = means * torch.diagonal(metric, dim1=-2, dim2=-1).float()[:, None]
        norm, product = ((weighted * each).sum((1, 2)) for each in (means, some))
        share = torch.where(norm > 0, product / norm, 0).nan_to_num(0.0).clamp(0, 1).half()
        return share, (share * (2 * product - share * norm)).sum()

    def taken_off(self, keys: Tensor, gain: Tensor, positions: Tensor) -> Tensor:
        """Return keys ``(H, n, d)`` less so much of the mean, float32 or float64; with ``-gain``, it is added again."""
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        return wide - self.at(positions, keys.shape[-1]) * gain.float()[:, None, None]

    def logits(self, queries: Tensor, mean: Tensor, count: int) -> Tensor:
        """Return the products of queries and of a mean at positions 0, 1, …, ``(H, R, count)`` float32.

        Parameters
        ----------
        queries : Tensor
            ``(H, R, d)``.
        mean : Tensor
            ``(H, 2, P)``: this one, or a part of it.
        count : int
            Number of positions.

        Notes
        -----
        Of every block of 64 positions, the sum of P products is computed as matrix product with the sines of 64 angles.
        """
        begins, places = self.tables(count)
        first, second = (queries[..., channels].float() for channels in self.channels)
        a, b = mean[:, None, 0], mean[:, None, 1]
        real, imaginary = first * a + second * b, first * b - second * a  # of the conjugate of q, times the mean
        cosines, sines = begins[: -(-count // BLOCK), :, None, None].unbind(1)
        begun = torch.cat([real * cosines - imaginary * sines, -(real * sines + imaginary * cosines)], dim=-1)
        return (begun @ places).permute(1, 2, 0, 3).flatten(2)[..., :count]

    def tables(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines at every 64th of `count` positions or more, ``(blocks, 2, P)``; and at the first 64.

        The latter are ``(2 P, 64)``, cosines first. Once made, they are kept.
        """
        known = self._known.get(0)
        if known is None or len(known[0]) * BLOCK < count:
            blocks = max(-(-count // BLOCK), 0 if known is None else 2 * len(known[0]))
            # In float64, which not all devices have: on the CPU.
            angles = (
                torch.arange(each, device="cpu")[:, None] * step * self.frequencies
                for each, step in ((blocks, BLOCK), (BLOCK, 1))
            )
            far, near = (torch.stack([each.cos(), each.sin()], dim=1) for each in angles)
            known = to_device(far.float(), self.mean.device), to_device(near.flatten(1).mT.float(), self.mean.device)
            known = self._known[0] = known[0], known[1].contiguous()
        return known

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``(..., n, P)`` float32 of the angles at some positions."""
        begins, places = self.tables(int(positions.max()) + 1 if positions.numel() else 1)
        places = places.mT.reshape(BLOCK, 2, -1)
        positions = to_device(positions, begins.device)
        (c, s), (cosine, sine) = begins[positions // BLOCK].unbind(-2), places[positions % BLOCK].unbind(-2)
        return c * cosine - s * sine, s * cosine + c * sine


def positions_of(columns: Tensor, origin: int) -> Tensor:
    """Return the positions of some places in a sequence, of which one has position 0, as those before it have."""
    return (columns.long() - origin).clamp(min=0)


def explained_by(mean: RotaryMean, keys: Tensor, positions: Tensor, queries: Tensor) -> Tensor:
    """Return how much less the variance of keys costs once a mean is taken off, for each pair, ``(P,)``, of their type.

    Parameters
    ----------
    mean : RotaryMean
    keys : Tensor
        ``(H, n, d)`` float32, or float64 where the device has it.
    positions : Tensor
        ``(n,)``.
    queries : Tensor
        ``(H, d)``: mean squares, by which errors count.
    """
    every = torch.ones(len(keys), dtype=torch.float32, device=keys.device)
    found = keys, mean.taken_off(keys, every, positions)
    before, after = ((each - each.mean(1, keepdim=True)).square().mean(1) * queries for each in found)
    less = (before - after).sum(0)
    return less[mean.channels].sum(0)


def choose_pairs(keys: Tensor, queries: Tensor, positions: Tensor, candidates: Sequence[Tensor]) -> RotaryMean | None:
    """Return the pairs of channels whose mean, once taken off, explains most of a text's keys; None if none does.

    Parameters
    ----------
    keys, queries, positions
        As for `explained_by`.
    candidates : sequence of Tensor
        Frequencies, ``(P,)`` each, that the model may turn by. Pairs are neighbours, or half of the turned channels
        apart, and these are the first ones or the last: what explains most is taken.
    """
    best, chosen, shares = 0.0, None, queries
    for frequencies in candidates:
        for channels in _layouts(len(frequencies), keys.shape[-1]):
            own = to_device(channels, keys.device)
            nothing = torch.zeros(len(keys), 2, len(frequencies), dtype=torch.float32, device=keys.device)
            found = RotaryMean(frequencies, own, nothing)
            found = replace(found, mean=found.turned_back(keys, positions).float())
            explained = explained_by(found, keys, positions, queries)
            if float(explained.sum()) > best:
                best, chosen, shares = float(explained.sum()), found, explained
    if chosen is None:
        return None
    left = ((keys - keys.mean(1, keepdim=True)).square().mean(1) * queries).sum() - shares.sum()
    kept = shares.topk(min(MOST_PAIRS, len(shares))).indices
    kept = kept[shares[kept] > LEAST_SHARE * left].sort().values
    return chosen.pairs(kept) if len(kept) else None


def frequencies_of(model: nn.Module) -> list[Tensor]:
    """Return the frequencies of all rotary embeddings of a model, ``(P,)`` float64 each, equal ones once."""
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if "inv_freq" in name and buffer.dim() == 1 and buffer.is_floating_point() and buffer.numel():
            here = buffer.detach().cpu().double()
            if here.isfinite().all() and not any(torch.equal(here, other) for other in found):
                found.append(here)
    return found


def _layouts(pairs: int, width: int) -> list[Tensor]:
    """Return the channels ``(2, pairs)`` that a model of some width may turn together."""
    first = torch.arange(pairs, device="cpu")
    if 2 * pairs > width:
        return []
    found = [torch.stack([first, first + pairs]), torch.stack([2 * first, 2 * first + 1])]
    return found if 2 * pairs == width else [each + start for start in (0, width - 2 * pairs) for each in found]
