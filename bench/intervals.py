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


def hidden_words(cases: Sequence[Mapping[str, Any]], names: Sequence[str], title: Callable[[str], str]) -> list[str]:
    """Return hits and likelihood of hidden words, a row for each name.

    Parameters
    ----------
    cases : sequence of mapping
        Each has ``tokens`` and, for every name, ``rows`` with "exact", "nll" and perhaps "bits".
    names : sequence of str
    title : callable
    """
    rows, found = [], [case["rows"] for case in cases]
    counted = any("bits" in case[name] for case in found for name in names)
    for name in names:
        hits = sum(case[name]["exact"] for case in found)
        kept = sum(case[name]["exact"] and case[DENSE]["exact"] for case in found)
        nll = statistics.fmean(case[name]["nll"] for case in found)
        over, bits = "–", "16"
        if name != DENSE:
            over = with_ends(mean_interval([case[name]["nll"] - case[DENSE]["nll"] for case in found]), "+.3f")
            bits = f"{statistics.fmean(case[name]['bits'] for case in found):.2f}" if counted else ""
        rows.append([title(name), *[bits] * counted, f"{hits} of {len(found)}", f"{kept}", f"{nll:.3f}", over])
    tokens = statistics.fmean(case["tokens"] for case in cases)
    return [
        f"**Hidden words**: a word hidden in a text of {tokens:,.0f} tokens (mean), asked for after the cache was "
        "compressed. *Hits*: every token of the answer is the likeliest. *NLL*: sum over the answer's tokens, nats, "
        "mean over cases; difference to dense with its 95 % interval.",
        "",
        *table(["cache", *["bits"] * counted, "hits", "of dense's hits", "NLL", "over dense"], rows),
    ]
