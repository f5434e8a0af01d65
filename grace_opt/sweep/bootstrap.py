"""Paired bootstrap: how certain a difference between two methods on the same prompts or instances is.

When: for every claim that one method is better than another. Bias-corrected and accelerated intervals (BCa), pairs
resampled with replacement; for a ratio, numerator and denominator are resampled together. Cost: `RESAMPLES` means of n
numbers. Guarantee: none for small n, where bootstrap intervals are too narrow; below `MIN_PAIRS` pairs no verdict is
given. Source: Efron, Better bootstrap confidence intervals, JASA 82 (1987); `scipy.stats.bootstrap`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._util.parameters import integer, number
from ..errors import OptionError

RESAMPLES = 9999
#: With fewer pairs, even equal signs of all would not be rare by chance: 2 / 2**5 = 6 %, 2 / 2**6 = 3 %.
MIN_PAIRS = 6


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes
    ----------
    estimate, low, high : float
        `low` and `high` are infinite for a single pair, which shows no spread.
    n : int
        Number of pairs, or of values.
    verdict : str
        "better" or "worse" if the interval excludes zero difference, else "no difference shown". "too few pairs" if n
        is below `MIN_PAIRS`; "too few differ" if fewer than that many pairs differ, whose signs could agree by chance.
        Empty if nothing is compared.
    """

    estimate: float
    low: float
    high: float
    n: int
    verdict: str = ""


def paired_interval(
    values: Sequence[float] | np.ndarray[Any, Any],
    baseline: Sequence[float] | np.ndarray[Any, Any],
    *,
    better: str = "lower",
    compare: str = "difference",
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the mean of ``values - baseline``, or the ratio of the means, with a bootstrap interval over pairs.

    Parameters
    ----------
    values, baseline : sequence of float (n,)
        Entry i of both is measured on the same prompt or instance.
    better : {"lower", "higher"}
        Which values are good.
    compare : {"difference", "ratio"}
        A ratio needs baselines above zero.
    confidence : float
        Between 0 and 1.
    resamples : int
        Number of samples to draw.
    seed : int
        All randomness comes from it.

    Returns
    -------
    Interval

    Examples
    --------
    >>> found = paired_interval([1.0, 2.1, 2.9, 4.0, 5.1, 6.0], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    >>> round(found.estimate, 3), found.low < found.estimate < found.high, found.verdict
    (-0.983, True, 'better')
    >>> paired_interval([1.0], [2.0]).verdict
    'too few pairs'
    """
    a, b = _finite("values", values), _finite("baseline", baseline)
    if a.shape != b.shape:
        raise OptionError(f"{len(a)} values and {len(b)} baselines are no pairs.")
    if better not in ("lower", "higher"):
        raise OptionError(f'better={better!r}: say "lower" or "higher".')
    samples: tuple[np.ndarray[Any, Any], ...]
    if compare == "difference":
        none, estimate, samples = 0.0, float((a - b).mean()), (a - b,)
    elif compare == "ratio":
        if (b <= 0).any():
            raise OptionError(f"a ratio wants baselines above zero; the least is {b.min():g}. Compare differences.")
        none, estimate, samples = 1.0, float(a.mean() / b.mean()), (a, b)
    else:
        raise OptionError(f'compare={compare!r}: say "difference" or "ratio".')
    low, high = _ends(samples, estimate, confidence, resamples, seed)
    if len(a) < MIN_PAIRS:
        verdict = "too few pairs"
    elif low <= none <= high:
        verdict = "no difference shown"
    elif np.count_nonzero(a != b) < MIN_PAIRS:
        verdict = "too few differ"
    else:
        verdict = "better" if (high < none) == (better == "lower") else "worse"
    return Interval(estimate, low, high, len(a), verdict)


def mean_interval(
    values: Sequence[float] | np.ndarray[Any, Any],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the mean of the values with a bootstrap interval; parameters as in `paired_interval`.

    Examples
    --------
    >>> mean_interval([2.0, 2.0, 2.0])
    Interval(estimate=2.0, low=2.0, high=2.0, n=3, verdict='')
    """
    a = _finite("values", values)
    estimate = float(a.mean())
    return Interval(estimate, *_ends((a,), estimate, confidence, resamples, seed), len(a))


def _finite(name: str, values: Any) -> np.ndarray[Any, Any]:
    a = np.asarray(values, dtype=np.float64)
    if a.ndim != 1 or not len(a) or not np.isfinite(a).all():
        raise OptionError(f"{name}: give at least one number, all finite, in one dimension; got shape {a.shape}.")
    return a


def _mean_or_ratio(*samples: Any, axis: int) -> Any:
    mean = samples[0].mean(axis=axis)
    return mean if len(samples) == 1 else mean / samples[1].mean(axis=axis)


def _ends(
    samples: tuple[np.ndarray[Any, Any], ...], estimate: float, confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    confidence = number("confidence", confidence, above=0, below=1)
    resamples, seed = integer("resamples", resamples, at_least=1), integer("seed", seed, at_least=0)
    if len(samples[0]) == 1:
        return -math.inf, math.inf
    contributions = samples[0] if len(samples) == 1 else samples[0] - estimate * samples[1]
    scale = max(float(np.abs(sample).max()) for sample in samples)
    if float(np.ptp(contributions)) <= 1e-12 * scale:  # equal up to rounding: every resample gives the estimate
        return estimate, estimate
    from scipy.stats import bootstrap

    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # if the correction does not exist, scipy warns and returns NaN
            found = bootstrap(
                samples,
                _mean_or_ratio,
                paired=True,
                vectorized=True,
                axis=0,
                n_resamples=resamples,
                batch=max(1, 10_000_000 // len(samples[0])),
                confidence_level=confidence,
                method=method,
                random_state=np.random.default_rng(seed),
            ).confidence_interval
        if np.isfinite([found.low, found.high]).all():
            break
    return float(found.low), float(found.high)
