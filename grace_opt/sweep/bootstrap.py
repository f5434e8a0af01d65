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
#: Values are scaled if the largest is above 2 to this power, or below its inverse: sums and BCa's cubes stay numbers.
USUAL_EXPONENT = 300


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
        both, shift = _scaled(np.stack([a, b]))
        none, samples = 0.0, (both[0] - both[1],)
    elif compare == "ratio":
        if (b <= 0).any():
            raise OptionError(f"a ratio wants baselines above zero; the least is {b.min():g}. Compare differences.")
        (above, up), (below, down) = _scaled(a), _scaled(b)
        none, samples, shift = 1.0, (above, below), up - down
    else:
        raise OptionError(f'compare={compare!r}: say "difference" or "ratio".')
    estimate, low, high = _estimate_and_ends(
        samples, shift, f"the {compare} of values and baseline", confidence, resamples, seed
    )
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
    a, shift = _scaled(_finite("values", values))
    return Interval(*_estimate_and_ends((a,), shift, "the mean of values", confidence, resamples, seed), len(a))


def _finite(name: str, values: Any) -> np.ndarray[Any, Any]:
    a = np.asarray(values, dtype=np.float64)
    if a.ndim != 1 or not len(a) or not np.isfinite(a).all():
        raise OptionError(f"{name}: give at least one number, all finite, in one dimension; got shape {a.shape}.")
    return a


def _scaled(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], int]:
    """The values over a power of two, and its exponent: 0, and the values as they are, unless they are far from 1."""
    exponent = int(np.frexp(np.abs(values).max())[1])
    return (values, 0) if abs(exponent) <= USUAL_EXPONENT else (np.ldexp(values, -exponent), exponent)


def _estimate_and_ends(
    samples: tuple[np.ndarray[Any, Any], ...], shift: int, what: str, confidence: float, resamples: int, seed: int
) -> tuple[float, float, float]:
    """Mean or ratio of the scaled samples, and its interval, times ``2**shift``; an `OptionError` if that overflows."""
    estimate = float(_mean_or_ratio(*samples, axis=0))
    found = [estimate, *_ends(samples, estimate, confidence, resamples, seed)]
    if shift and len(samples) == 1:  # a mean that is rounded up may lie above the largest float64
        least, most = float(samples[0].min()), float(samples[0].max())
        found = [min(max(value, least), most) if math.isfinite(value) else value for value in found]
    try:
        estimate, low, high = (math.ldexp(value, shift) for value in found)
    except OverflowError:
        raise OptionError(
            f"{what}, or an end of its interval, is beyond the largest float64: divide the values by a power of two."
        ) from None
    return estimate, low, high


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
