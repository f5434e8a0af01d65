"""Variants of how `bits=` decides, for the ablation of `bench.bits`: each changes one part of the decision.

Some change what the prompt decides (`varied`), others are files of another basis.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from grace_opt.hf import CalibratedBasis
from grace_opt.hf.bases.classes import class_sizes
from grace_opt.hf.stores.coded import code_prompt

#: Bits at which all are measured.
BITS = 2.25
#: What each one has that is different.
VARIANTS = {
    "still": "no mean of keys that turns with the position",
    "local": "shares by local errors, without gradients",
    "equal": "the same share for every head",
    "none": 'channels as they are, equal shares: `basis="none"`',
    "class-1": "one class of tokens",
    "class-2": "two classes",
}


@contextmanager
def varied(name: str) -> Iterator[None]:
    """Code prompts in a ``with`` block as a variant does; any other name changes nothing."""
    kind, _, number = name.partition("-")
    if kind == "class":
        fewer = functools.partial(class_sizes, classes=int(number))
        with mock.patch.object(code_prompt, "class_sizes", fewer):
            yield
    else:
        yield


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
