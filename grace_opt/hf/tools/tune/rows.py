"""`TuneRow`: what was measured of one setting; means over windows with bootstrap intervals.

All settings are compared on the same windows: those on which each of them was measured. If time ran out before there
was one, the first window counts, and settings that it lacks are named.

Source: bias-corrected and accelerated bootstrap, `grace_opt.sweep`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....sweep import Interval, mean_interval, paired_interval
from .candidates import Candidate

#: Numbers of a window's row that become means.
MEANS = ("share", "bits", "key_bits", "value_bits", "bytes", "kl", "top1", "nll")


@dataclass(frozen=True)
class TuneRow:
    """One setting.

    Attributes
    ----------
    candidate : Candidate
    windows : int
        Number of windows.
    share : Interval
        Bytes of the whole cache after the context, as a share of the dense one's, as if the model had 16 bits.
    bits, key_bits, value_bits : Interval
        Mean bits per element of the compressed tokens, with everything counted.
    bytes : Interval
        Bytes of the whole cache, counted so.
    kl, top1, nll : Interval
        As in `grace_opt.hf.tools.evaluation.PredictionDifference`.
    retrieval : Interval
        Share of the hidden facts that are found.
    found, kept, asked, dense_found : int
        Number of facts found, of those among them that the dense cache finds too, of all, and of those that the dense
        cache finds.
    compressed_tokens, tokens : int
        Of all windows' tokens, how many were compressed: what proves that the cache was used.
    time : Interval or None
        Time of a token beside the dense cache's, in turns; None if it was not timed.
    kls : tuple of float
        The KL on each window.
    against : Interval or None
        Difference of the KL to that of the recommended setting, over the same windows.
    """

    candidate: Candidate
    windows: int
    share: Interval
    bits: Interval
    key_bits: Interval
    value_bits: Interval
    bytes: Interval
    kl: Interval
    top1: Interval
    nll: Interval
    retrieval: Interval
    found: int
    kept: int
    asked: int
    dense_found: int
    compressed_tokens: int
    tokens: int
    time: Interval | None
    kls: tuple[float, ...]
    against: Interval | None = None

    @property
    def name(self) -> str:
        """The setting's name."""
        return self.candidate.name

    def values(self) -> dict[str, Any]:
        """Return plain values: of every interval the mean, and its ends as ``NAME_low`` and ``NAME_high``."""
        found: dict[str, Any] = {"setting": self.name, "family": self.candidate.family, "windows": self.windows}
        for name in (*MEANS, "retrieval", "time", "against"):
            one: Interval | None = getattr(self, name)
            ends = {"": None, "_low": None, "_high": None} if one is None else {
                "": one.estimate, "_low": _finite(one.low), "_high": _finite(one.high)}  # fmt: skip
            found |= {f"{name}{end}": value for end, value in ends.items()}
        counts = ("found", "kept", "asked", "dense_found", "compressed_tokens", "tokens")
        return found | {name: getattr(self, name) for name in counts}


def rows_of(
    candidates: Sequence[Candidate], measured: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], seed: int
) -> list[TuneRow]:
    """Return a row for each setting that was measured on all windows that count.

    Parameters
    ----------
    candidates : sequence of Candidate
    measured : mapping
        By setting and number of the window, the rows of a `Measurer`.
    seed : int
        Of the bootstrap.
    """
    numbers = sorted({number for _, number in measured})
    names = [one.name for one in candidates if any((one.name, number) in measured for number in numbers)]
    count = [number for number in numbers if all((name, number) in measured for name in names)] or numbers[:1]
    return [
        _row(one, [measured[one.name, number] for number in count], seed)
        for one in candidates
        if all((one.name, number) in measured for number in count) and count
    ]


def with_differences(rows: Sequence[TuneRow], chosen: TuneRow, seed: int) -> tuple[TuneRow, ...]:
    """Return the rows with ``against``: differences to the chosen one, which all share its windows."""
    return tuple(replace(row, against=paired_interval(row.kls, chosen.kls, seed=seed)) for row in rows)


def _row(candidate: Candidate, cells: Sequence[Sequence[Mapping[str, Any]]], seed: int) -> TuneRow:
    first = [cell[0] for cell in cells]
    means: dict[str, Any] = {name: mean_interval([float(row[name]) for row in first], seed=seed) for name in MEANS}
    counts: dict[str, Any] = {
        name: sum(int(row[name]) for row in first)
        for name in ("found", "kept", "asked", "dense_found", "compressed_tokens", "tokens")
    }
    times = [row for cell in cells for row in cell[1:]]
    ours, dense = ([float(row[name]) for row in times] for name in ("ms", "dense_ms"))
    return TuneRow(
        candidate=candidate,
        windows=len(cells),
        **means,
        retrieval=mean_interval([row["found"] / row["asked"] for row in first], seed=seed),
        **counts,
        time=paired_interval(ours, dense, compare="ratio", seed=seed) if times else None,
        kls=tuple(float(row["kl"]) for row in first),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
