"""Numbers with their intervals, and the table of hidden words, as every page of results shows them.

Source: `grace_opt.sweep`: bias-corrected and accelerated bootstrap (Efron, J. Am. Stat. Assoc. 82, 1987).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.report import small, table
from grace_opt.sweep import Interval, mean_interval

#: The name of the dense cache among the rows of a hidden word.
DENSE = "dense"


def with_ends(found: Interval, form: str = ".4f") -> str:
    """Return an estimate and the ends of its interval; of one number, there are none."""
    if found.n < 2:
        return f"{found.estimate:{form}}"
    return f"{found.estimate:{form}} {small(f'[{found.low:{form}}, {found.high:{form}}]')}"


def hidden_words(
    models: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str], title: Callable[[str], str]
) -> list[str]:
    """Return hits and likelihood of hidden words, a row for each name and two columns for each model.

    Parameters
    ----------
    models : mapping
        Cases of each model. Each has ``tokens`` and, for `DENSE` and some names, ``rows`` with "exact" and "nll".
    names : sequence of str
    title : callable
    """
    rows = []
    for name in names:
        row = [title(name)]
        for cases in models.values():
            found = [case["rows"] for case in cases if name in case["rows"]]
            over = [case[name]["nll"] - case[DENSE]["nll"] for case in found]
            row.append(f"{sum(case[name]['exact'] for case in found)} of {len(found)}" if found else "–")
            row.append(with_ends(mean_interval(over), "+.3f") if found and name != DENSE else "–")
        rows.append(row)
    none = [label for label, cases in models.items() if not any(case["rows"][DENSE]["exact"] for case in cases)]
    tokens = statistics.fmean(case["tokens"] for cases in models.values() for case in cases)
    return [
        f"**Hidden words**: a word hidden in a text of {tokens:,.0f} tokens (mean), asked for after the cache was "
        "compressed. *Hits*: every token of the answer is the likeliest. *NLL*: sum over the answer's tokens, nats, "
        "mean over cases; difference to dense with its 95 % interval."
        + f" The dense cache of {' and that of '.join(none)} hits none."
        * bool(none),
        "",
        *table(["cache", *(f"{label}: {what}" for label in models for what in ("hits", "NLL over dense"))], rows),
    ]
