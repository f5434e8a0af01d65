"""Variants of how `bits=` decides, for the ablation of `bench.bits`: each changes one part of the decision.

Some change what the prompt decides (`varied`), others are files of another basis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from grace_opt.hf import CalibratedBasis
from grace_opt.hf.bases.classes import class_sizes, token_weights
from grace_opt.hf.bases.importance import (
    KEPT,
    LAST,
    ObservedQueries,
    attention_moments,
    observed_queries,
    queries_of_row,
)
from grace_opt.hf.models.observation import Observation
from grace_opt.hf.stores.coded import code_prompt
from grace_opt.kernels.cache.coding import reference

#: Bits at which all are measured.
BITS = 2.25
#: What each one has that is different.
VARIANTS = {
    "still": "no mean of keys that turns with the position",
    "local": "shares by local errors, without gradients",
    "equal": "the same share for every head",
    "none": 'channels as they are, equal shares: `basis="none"`',
    "prompt": 'the prompt\'s own basis, stored and counted, equal shares: `basis="prompt"`',
    "floor-0": "no floor of token weights",
    "floor-0.3": "a floor of .3, not .05",
    "class-1": "one class of tokens",
    "class-2": "two classes",
    "last-32": "attention received from the last 32 queries only",
    "causal": "attention received from later queries only",
    "whole": "attention received by all heads of a group from all observed queries",
    "squares": "scales with the least squared error, which cut outliers short",
}


@contextmanager
def varied(name: str) -> Iterator[None]:
    """Code prompts in a ``with`` block as a variant does; any other name changes nothing."""
    kind, _, number = name.partition("-")
    change: dict[str, Callable[..., object]] = {}
    if kind == "floor":
        change["token_weights"] = functools.partial(token_weights, floor=float(number))
    elif kind == "class":
        change["class_sizes"] = functools.partial(class_sizes, classes=int(number))
    elif kind == "last":
        change["queries_of_row"] = _last_queries
    elif kind == "causal":
        change["attention_moments"] = _causal_moments
    elif kind == "whole":
        change["attention_moments"] = lambda *given: attention_moments(*given[:5])
    with ExitStack() as changed:
        if change:
            changed.enter_context(mock.patch.multiple(code_prompt, **change))
        if kind == "squares":
            changed.enter_context(mock.patch("grace_opt.hf.stores.coded.heads.is_compiled", return_value=False))
            changed.enter_context(mock.patch("grace_opt.hf.stores.coded.codes.scaled_and_coded", _by_squares))
        yield


def _by_squares(*given: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what `scaled_and_coded` does, with one whole step from the standard deviation to the least squares."""
    steps = {"BEYOND": math.inf, "FITTING_STEPS": 1, "_better_scale": _least_squares}
    with mock.patch.multiple(reference, **steps):
        return reference.scaled_and_coded(*given)


def _least_squares(sizes: Tensor, scale: Tensor, edges: Tensor, levels: Tensor) -> Tensor:
    numbers = levels.gather(1, torch.searchsorted(edges * scale.clamp(min=reference.SMALLEST)[:, None], sizes))
    found = ((sizes * numbers).sum(1) / numbers.square().sum(1)).float()
    return torch.where(found > 0, found, scale)


def _last_queries(over: Observation, row: int) -> ObservedQueries:
    found = queries_of_row(over, row)
    weights = torch.zeros_like(found.weights)
    weights[-min(LAST) :] = 1 / min(LAST)
    return found._replace(weights=weights)


def _causal_moments(
    queries: Tensor, weights: Tensor, keys: Tensor, scaling: float, softcap: float | None, whole: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `attention_moments` does, of attention as the model has it; of a prompt without padding."""
    assert softcap is None
    heads, length, width = keys.shape
    every = torch.arange(length, device="cpu")
    places = every[(observed_queries(length) > 0) | (every % KEPT == 0)]
    hidden = torch.arange(length, device="cpu") > places[:, None]
    grouped = queries.reshape(heads, -1, len(places), width)
    share = weights.float() / grouped.shape[1]
    moments = []
    for own, group in zip(keys, grouped, strict=True):
        found = (group @ own.mT * scaling).masked_fill(hidden, -torch.inf).softmax(-1)
        moments.append([torch.einsum("gqk,q->k", each, share) for each in (found, found.square())])
    first, second = (torch.stack(each) for each in zip(*moments, strict=True))
    return first, second


def with_rates_of(basis: CalibratedBasis, other: CalibratedBasis) -> CalibratedBasis:
    """Return the basis with another one's shares of layers and heads."""
    return replace(basis, multipliers=other.multipliers, key_rates=other.key_rates, value_rates=other.value_rates)


def with_equal_rates(basis: CalibratedBasis) -> CalibratedBasis:
    """Return the basis with the same share for every head of all layers."""
    means = [torch.cat(list(rates.values())).mean(0) for rates in (basis.key_rates, basis.value_rates)]
    keys, values = (
        {layer: mean.expand(len(each), -1).clone() for layer, each in rates.items()}
        for mean, rates in zip(means, (basis.key_rates, basis.value_rates), strict=True)
    )
    return replace(basis, key_rates=keys, value_rates=values)
