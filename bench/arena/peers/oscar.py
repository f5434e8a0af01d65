"""OSCAR (arXiv 2605.17757): a rotation from what attention looks at, Hadamard on top, clipping, and int2 per token.

Keys are turned into the eigenvectors of the queries' second moments, values into those of the values' moments, each
token weighted by k'Ck, where C are the queries' moments. Moments are averaged over the KV heads of a layer, so a layer
has one rotation for K and one for V. Both are followed by a Hadamard matrix and a permutation: the direction with the
i-th largest eigenvalue goes to the place whose binary digits are i's in reverse. In each token, entries beyond the
96th (K) or 92nd (V) percentile of its magnitudes are cut; the token is then quantised asymmetrically in groups of 128
channels, with step and lowest level in 16 bits: 2.5 bits with d = 64.

Taken from the authors' public code and its defaults, whose windows are the first 64 and the last 256 tokens: there is a
row with them, and one with ours. The paper calibrates offline. So do we, for keys, where a calibrated basis is given
(it contains the queries' moments); the values' weighted moments are the prompt's own, and are not counted, in the
peer's favour. Only 2 bits are published; 3 bits are clipped likewise, and 4 bits are not, as each does better so.

Widths that are no power of two are refused, as by the authors.
"""

from __future__ import annotations

import functools

import torch
from scipy.linalg import hadamard
from torch import Tensor

from bench.arena.peers.kivi import per_token
from bench.arena.stored import Layer, Method, Stored, between, stored
from grace_opt.errors import OptionError
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.bases.basis import SHRINKAGE

SOURCE = "OSCAR, arXiv 2605.17757"
#: Percentiles of a token's magnitudes at which its entries are cut.
KEY_CLIP, VALUE_CLIP = 0.96, 0.92
GROUP = 128
#: The authors' first and last tokens.
OWN_WINDOWS = (64, 256)


def reversed_bits(count: int) -> Tensor:
    """Return the numbers below a power of two, each with its binary digits in reverse.

    Examples
    --------
    >>> reversed_bits(8).tolist()
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    digits = count.bit_length() - 1
    return torch.tensor(
        [int(format(number, f"0{digits}b")[::-1] or "0", 2) if digits else 0 for number in range(count)]
    )


def rotation(moment: Tensor) -> Tensor:
    """Return eigenvectors of a second moment ``(d, d)``, times a Hadamard matrix, permuted: coordinates are ``x @ it``.

    Raises
    ------
    OptionError
        If d is no power of two.
    """
    width = len(moment)
    if width & (width - 1):
        raise OptionError(
            f"OSCAR's Hadamard matrix and its permutation need heads whose width is a power of two, and these have "
            f"{width}; leave this peer out for this model"
        )
    values, vectors = torch.linalg.eigh(moment.double())
    turned = vectors @ torch.from_numpy(hadamard(width)).double() / width**0.5
    place = torch.empty(width, dtype=torch.long)
    place[reversed_bits(width)] = values.argsort(descending=True)
    return turned[:, place].float()


def key_moment(layer: Layer, basis: CalibratedBasis | None) -> Tensor:
    """Return the queries' second moments, averaged over KV heads ``(d, d)``: the calibrated ones, if there are any."""
    if basis is None or layer.index not in basis.keys:
        asked = layer.queries.flatten(1, 2).double()
        return (asked.mT @ asked).mean(0) / asked.shape[1]
    calibrated = basis.keys[layer.index]
    encode = calibrated.encode.double()
    shrunk = ((encode * calibrated.energy[:, None]) @ encode.mT).mean(0)
    diagonal = shrunk.diagonal().diag()  # the basis was made from moments shrunk towards their diagonal
    return diagonal + (shrunk - diagonal) / (1 - SHRINKAGE)


def value_moment(layer: Layer, metric: Tensor) -> Tensor:
    """Return the values' second moments, each token weighted by its key's energy, averaged over KV heads."""
    keys, values = layer.keys.double(), layer.values.double()
    weight = ((keys @ metric.double()) * keys).sum(-1).clamp(min=0)
    found = (values * weight[..., None]).mT @ values / weight.sum(-1).clamp(min=1e-12)[:, None, None]
    return found.mean(0)


def clipped(tokens: Tensor, percentile: float) -> Tensor:
    """Cut each token's entries at the magnitude that this share of them is below."""
    width = tokens.shape[-1]
    place = min(int(percentile * width), width - 1)
    bound = tokens.abs().sort(dim=-1).values[..., place, None]
    return torch.maximum(torch.minimum(tokens, bound), -bound)


def coded(tokens: Tensor, turn: Tensor, bits: int, clip: float) -> tuple[Tensor, float]:
    """Turn tokens ``(H, n, d)``, clip and quantise each, and turn back; return them, and their bits."""
    found, spent = per_token(clipped(tokens @ turn, clip), bits, GROUP)
    return found @ turn.T, spent


def store(layers: list[Layer], basis: CalibratedBasis | None, *, bits: int, own_windows: bool = False) -> list[Stored]:
    """Store a prompt."""
    clips = (KEY_CLIP, VALUE_CLIP) if bits < 4 else (1.0, 1.0)
    found = []
    for layer in layers:
        metric = key_moment(layer, basis)
        turns = rotation(metric), rotation(value_moment(layer, metric))
        coders = [
            functools.partial(coded, turn=turn, bits=bits, clip=clip) for turn, clip in zip(turns, clips, strict=True)
        ]
        inner = between(layer.keys.shape[1], *OWN_WINDOWS) if own_windows else None
        found.append(stored(layer, coders[0], coders[1], None if inner is None else (inner, inner)))
    return found


def methods() -> list[Method]:
    """Return 2 bits as published and with its own windows, and 3 and 4 bits."""
    rows = [(4, False), (3, False), (2, False), (2, True)]
    return [
        Method(
            f"oscar-{bits}{'-own' if own else ''}",
            f"OSCAR, {bits} bits{', its own windows of 64 and 256' if own else ''}"
            f"{'' if bits < 4 else ', without clipping'} (our implementation)",
            "OSCAR, own windows" if own else "OSCAR",
            SOURCE,
            functools.partial(store, bits=bits, own_windows=own),
        )
        for bits, own in rows
    ]
