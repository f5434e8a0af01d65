"""The page of `bench.ruler`: scores by task and cache, and what each cache loses of the dense one's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.intervals import DENSE, with_ends
from bench.report import BLACK, BLUE, Page, bars, table
from grace_opt.sweep import Interval, mean_interval, paired_interval

Value = Mapping[str, Any]


def scores(value: Value, name: str, task: str | None = None) -> list[float]:
    """Return a cache's scores on the cases of a task, or on all cases, between 0 and 100."""
    return [100 * case["rows"][name]["score"] for case in value["cases"] if task in (None, case["task"])]


def over_dense(value: Value, name: str) -> Interval:
    """Return what a cache gains or loses, with its 95 % interval over cases."""
    return paired_interval(scores(value, name), scores(value, DENSE), better="higher")


def page(value: dict[str, Any]) -> Page:
    """Make the page from its JSON."""
    caches: dict[str, str] = {DENSE: "dense", **value["methods"]}
    tasks = list(dict.fromkeys(case["task"] for case in value["cases"]))
    count = len(value["cases"])
    read = statistics.fmean(case["tokens"] for case in value["cases"])
    of_size = {name: size(value, name) for name in caches}
    lost = "; ".join(
        f"{caches[name]} {over_dense(value, name).estimate:+.1f} points at {of_size[name][1]} of the bytes"
        for name in value["methods"]
    )
    rows = [
        [
            task,
            str(len(scores(value, DENSE, task))),
            *(f"{statistics.fmean(scores(value, n, task)):.0f}" for n in caches),
        ]
        for task in tasks
    ]
    rows.append(["all cases", str(count), *(f"{statistics.fmean(scores(value, name)):.1f}" for name in caches)])
    sizes = [
        [
            title,
            *of_size[name],
            with_ends(mean_interval(scores(value, name)), ".1f"),
            "–" if name == DENSE else with_ends(over_dense(value, name), "+.1f"),
        ]
        for name, title in caches.items()
    ]
    dense = statistics.fmean(scores(value, DENSE))
    gains = [over_dense(value, name).estimate for name in value["methods"]]
    return Page(
        title="RULER's rules",
        picture="Mean score of each cache over all cases",
        headline=f"By RULER's rules, smaller caches score {min(gains):+.1f} to {max(gains):+.1f} points beside the "
        f"dense one's {dense:.1f}",
        draw=lambda figure: _draw(figure, value, caches),
        asked=f"What does {value['model']} lose of its scores by RULER's published rules if its cache is smaller, and "
        "the question comes after it was compressed?",
        found=f"Of the dense cache's {dense:.1f} points: {lost}.",
        sure=f"{count} cases of {read:,.0f} tokens (mean) and one small model, whose own score is low where a task "
        "asks for more than to look something up: there, nothing can be lost. Words and essays are ours, so the "
        "scores are not those of RULER's tables.",
        tables=[
            "Scores between 0 and 100, as RULER defines them; intervals are 95 %, over cases. *Bits*: mean per element "
            "of what is compressed. *% of 16 bits*: the whole cache after the context.",
            "",
            *table(["cache", "bits", "% of 16 bits", "score", "over dense"], sizes),
            *table(["task", "cases", *caches.values()], rows),
        ],
        details=[("How it is counted", _counted(value))],
    )


def _draw(figure: Any, value: Value, caches: Mapping[str, str]) -> None:
    axes, means = figure.subplots(), [statistics.fmean(scores(value, name)) for name in caches]
    colours = [BLUE if name.startswith("bits-") else BLACK for name in caches]
    bars(axes, [title.replace("`", "") for title in caches.values()], means, [f"{one:.1f}" for one in means], colours)
    axes.set_xlim(0, 1.08 * max(*means, 1))
    axes.set_xlabel("score, mean over all cases")


def _counted(value: Value) -> list[str]:
    return [
        f"Cases have at most {value['length']:,} tokens with their answer, and are made from seeds by RULER's rules "
        "(`bench/ruler`). *niah*: values by their keys, eight variants; *vt*: all variables of a chain of four "
        "assignments; *cwe*, *fwe*: the words that come most often. RULER's `qa_1` and `qa_2` need data that is not "
        "here.",
        "",
        "- The score of an answer is the share of the expected strings that it contains, whatever their case "
        "(`string_match_all`).",
        "- The context is read densely and then compressed; question and answer stay dense after it. That is the order "
        "of kvpress' evaluation; RULER's own has the question in the prompt.",
        "- Answers are greedy, and end once everything expected was said, which cannot change a score.",
    ]


def size(value: Value, name: str) -> tuple[str, str]:
    """Return bits per element and the share of a dense cache in 16 bits, as words."""
    if name == DENSE:
        return "16.00", "100.0%"
    bits, share = (statistics.fmean(case["rows"][name][key] for case in value["cases"]) for key in ("bits", "share"))
    return f"{bits:.2f}", f"{share:.1%}"
