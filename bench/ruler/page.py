"""The page of `bench.ruler`: scores by task and cache, and what each cache loses of the dense one's, by model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.intervals import DENSE, with_ends
from bench.report import BLACK, BLUE, Page, bars, table
from grace_opt.sweep import Interval, mean_interval, paired_interval

#: What was measured of a model.
Measured = Mapping[str, Any]


def scores(of: Measured, name: str, task: str | None = None) -> list[float]:
    """Return a cache's scores on the cases of a task, or on all cases, between 0 and 100."""
    return [100 * case["rows"][name]["score"] for case in of["cases"] if task in (None, case["task"])]


def over_dense(of: Measured, name: str) -> Interval:
    """Return what a cache gains or loses, with its 95 % interval over cases."""
    return paired_interval(scores(of, name), scores(of, DENSE), better="higher")


def page(value: dict[str, Any]) -> Page:
    """Make the page from its JSON."""
    models: dict[str, Any] = value["models"]
    caches: dict[str, str] = {DENSE: "dense", **value["methods"]}
    gains = {(label, name): over_dense(of, name).estimate for label, of in models.items() for name in value["methods"]}
    worst, least = min(gains, key=gains.__getitem__)
    dense = statistics.fmean(scores(models[worst], DENSE))
    among = f", the worst of {len(models)} models" * (len(models) > 1)
    by_cache = "; ".join(
        f"{caches[name]} {_span([gains[label, name] for label in models], '+.1f')} points at "
        f"{_span([share(of, name) for of in models.values()], '.1%')} of the bytes"
        for name in value["methods"]
    )
    sizes, rows = [], []
    for label, of in models.items():
        for name, title in caches.items():
            bits = "16.00" if name == DENSE else f"{_mean(of, name, 'bits'):.2f}"
            beside = "–" if name == DENSE else with_ends(over_dense(of, name), "+.1f")
            score = with_ends(mean_interval(scores(of, name)), ".1f")
            sizes.append([label, title, bits, f"{share(of, name):.1%}", score, beside])
        for task in value["tasks"]:
            means = (f"{statistics.fmean(scores(of, name, task)):.0f}" for name in caches)
            rows.append([label, task, *means])
    unable = {label: [t for t in value["tasks"] if not any(scores(of, DENSE, t))] for label, of in models.items()}
    nothing = "; ".join(f"{', '.join(tasks)} ({label})" for label, tasks in unable.items() if tasks)
    read = _span([statistics.fmean(case["tokens"] for case in of["cases"]) for of in models.values()], ",.0f")
    few = "one small model" if len(models) == 1 else f"each of {len(models)} small models"
    return Page(
        title="RULER's rules",
        picture="Mean score of each cache over all cases, a panel for each model",
        headline=f"By RULER's rules, smaller caches score {_span([*gains.values()], '+.1f')} points beside the dense "
        f"one; the lowest is {_plain(caches[least])} on {worst}{among}",
        draw=lambda figure: _draw(figure, models, caches),
        asked="What does a model lose of its scores by RULER's published rules if its cache is smaller, and the "
        "question comes after it was compressed?",
        found=f"The lowest beside its dense cache is {caches[least]} on {worst}{among}: {gains[worst, least]:+.1f} "
        f"points from {dense:.1f}. By cache: {by_cache}.",
        sure=f"{len(value['tasks']) * value['each']} cases of {read} tokens (mean) for {few}. Words and essays are "
        "ours, so the scores are not those of RULER's tables."
        + f" Where the dense cache scores 0, nothing can be lost: {nothing}."
        * bool(nothing),
        tables=[
            "Scores between 0 and 100, as RULER defines them; intervals are 95 %, over cases. *Bits*: mean per element "
            "of what is compressed. *% of 16 bits*: the whole cache after the context.",
            "",
            *table(["model", "cache", "bits", "% of 16 bits", "score", "over dense"], sizes, words=2),
            f"By task, means of {value['each']} cases:",
            "",
            *table(["model", "task", *caches.values()], rows, words=2),
        ],
        details=[("How it is counted", _counted(value))],
    )


def _plain(title: str) -> str:
    return title.replace("`", "")


def _span(numbers: list[float], form: str) -> str:
    """Return the smallest and the largest of some numbers, or one if they read the same."""
    return " to ".join(dict.fromkeys(f"{each(numbers):{form}}" for each in (min, max)))


def _draw(figure: Any, models: Mapping[str, Measured], caches: Mapping[str, str]) -> None:
    figure.set_size_inches(max(8, 4 * len(models)), 3)
    every = figure.subplots(1, len(models), sharex=True, sharey=True, squeeze=False)[0]
    colours = [BLUE if name.startswith("bits-") else BLACK for name in caches]
    for axes, (label, of) in zip(every, models.items(), strict=True):
        means = [statistics.fmean(scores(of, name)) for name in caches]
        bars(axes, [_plain(title) for title in caches.values()], means, [f"{one:.1f}" for one in means], colours)
        axes.set_title(label)
        axes.set_xlabel("score, mean over all cases")
    highest = max(statistics.fmean(scores(of, name)) for of in models.values() for name in caches)
    every[0].set_xlim(0, 1.15 * max(highest, 1))


def _counted(value: Mapping[str, Any]) -> list[str]:
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


def share(of: Measured, name: str) -> float:
    """Return the bytes of a cache as a share of those of a dense one in 16 bits."""
    return 1.0 if name == DENSE else _mean(of, name, "share")


def _mean(of: Measured, name: str, part: str) -> float:
    return statistics.fmean(case["rows"][name][part] for case in of["cases"])
