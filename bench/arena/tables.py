"""The tables of `bench.arena`'s page: methods on short and long passages, ratios to others, hidden words, answers.

`models` maps each model's name to what was measured of it, which may lack methods or parts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scipy.stats import binomtest

from bench.arena.contenders import ABLATED, OUR_FAMILIES, OURS
from bench.arena.numbers import BOTH, CHOSEN, best, families, interval, mean, names, numbers, ratio, told
from bench.intervals import DENSE, hidden_words, with_ends
from bench.report import small, table

Models = Mapping[str, dict[str, Any]]


def titles(models: Models) -> dict[str, str]:
    """Return what tables call each method."""
    return {name: one["title"] for of in models.values() for name, one in of["methods"].items()} | {DENSE: "dense"}


def span(counts: Iterable[int]) -> str:
    """Return a count that models have in common, or the smallest and the largest."""
    found = sorted(set(counts))
    return " to ".join(f"{count:,}" for count in dict.fromkeys([found[0], found[-1]]))


def halves(models: Models, part: str = "passages") -> str:
    """Return the half that is reported, or both if they differ between models."""
    return " and ".join(sorted({told(of, part) for of in models.values()}))


def methods(of: dict[str, Any], part: str) -> list[str]:
    """Return a row for every method on one model, family by family."""
    both = {one["half"] for one in of[part]} == set(BOTH)
    other = CHOSEN if both else None
    head = ["method", "bits", "K", "V", "% of 16 bits", f"KL, half {told(of, part)}"]
    head += [f"KL, half {other}"] * (other is not None) + ["likeliest token equal", "ΔNLL", "seconds"]
    rows = []
    for name in (name for each in families(of, part).values() for name in each):
        sizes = [f"{mean(of, part, name, size):.2f}" for size in ("bits", "key_bits", "value_bits")]
        row = [of["methods"][name]["title"], *sizes, f"{mean(of, part, name, 'share'):.1%}"]
        row.append(with_ends(interval(of, part, name, "kl")))
        if other is not None:
            chosen = numbers(of, part, name, "kl", other)
            row.append(f"{statistics.fmean(chosen):.4f}" if chosen else "–")
        row += [f"{mean(of, part, name, 'top1'):.1%}", f"{mean(of, part, name, 'nll'):+.4f}"]
        rows.append([*row, f"{mean(of, part, name, 'seconds'):.1f}"])
    return table(head, rows)


def compared(models: Models, part: str, only: Sequence[str] | None = None) -> list[str]:
    """Return a row for every method, or for some: its bits and its KL on each model."""
    head = ["method", *(f"{label}: {what}" for label in models for what in ("bits", "KL"))]
    found = dict.fromkeys(name for of in models.values() for each in families(of, part).values() for name in each)
    rows = []
    for name in found if only is None else [name for name in found if name in only]:
        row = [titles(models)[name]]
        for of in models.values():
            has = name in names(of, part)
            row += [f"{mean(of, part, name, 'bits'):.2f}", with_ends(interval(of, part, name, "kl"))] if has else "––"
        rows.append(row)
    return table(head, rows)


def kinds(models: Models, only: Sequence[str]) -> list[str]:
    """Return the KL of some methods by kind of text."""
    found = list(dict.fromkeys(one["kind"] for of in models.values() for one in of["passages"]))
    rows = []
    for label, of in models.items():
        half = told(of, "passages")
        for name in (name for name in names(of, "passages") if name in only):
            row = [label, of["methods"][name]["title"]]
            for kind in found:
                kl = [
                    one["rows"][name]["kl"]
                    for one in of["passages"]
                    if one["half"] == half and one["kind"] == kind and name in one["rows"]
                ]
                row.append(f"{statistics.fmean(kl):.4f}" if kl else "–")
            rows.append(row)
    return table(["model", "method", *found], rows, words=2)


def ablation(models: Models) -> list[str]:
    """Return what `bits=` loses without a part."""
    rows = []
    for label, of in models.items():
        for family, suffix in zip(OUR_FAMILIES[1:], ("class-1", "none", "plain"), strict=True):
            found = [ratio(of, "passages", f"bits-{bits:g}-{suffix}", f"bits-{bits:g}") for bits in ABLATED]
            cells = [with_ends(each, ".2f") if each else "–" for each in found]
            rows.append([label, family.replace(OURS + ", ", ""), *cells])
    return [
        "KL as a multiple of that of `bits=` as it is.",
        "",
        *table(["model", "without a part", *(f"{bits:g} bits" for bits in ABLATED)], rows, words=2),
    ]


def retrieval(models: Models) -> list[str]:
    """Return hits and likelihood of hidden words."""
    cases = {label: of["cases"] for label, of in models.items() if of["cases"]}
    found = list(dict.fromkeys(name for each in cases.values() for name in each[0]["rows"]))
    return hidden_words(cases, found, titles(models).__getitem__) if cases else []


def chat(models: Models) -> list[str]:
    """Return how many answers each method keeps."""
    asked = {label: [one["rows"] for one in of["chat"]] for label, of in models.items() if of["chat"]}
    if not asked:
        return []
    right = {label: [rows for rows in every if rows[DENSE]["right"]] for label, every in asked.items()}
    none = [label for label, every in right.items() if not every]
    right = {label: every for label, every in right.items() if every}
    rows = []
    for name in dict.fromkeys(name for every in right.values() for name in every[0]):
        row = [titles(models)[name]]
        for every in right.values():
            if name not in every[0]:
                row.append("–")
                continue
            kept = sum(one[name]["right"] for one in every)
            ends = binomtest(kept, len(every)).proportion_ci(0.95, method="wilson")
            share = "" if name == DENSE else " " + small(f"{ends.low:.0%} to {ends.high:.0%}")
            row.append(f"{kept} of {len(every)}{share}")
        rows.append(row)
    tokens, questions = span(models[label]["chat_tokens"] for label in asked), span(map(len, asked.values()))
    return [
        f"**Answers**: {questions} questions about texts that have at most {tokens} tokens with their question, as in "
        "a chat if the model is for chats, each asked after the text was compressed; only those that the dense cache "
        "answers count. An answer is right if it contains the expected words. Intervals are Wilson's."
        + f" The dense cache of {' and that of '.join(none)} answers no question."
        * bool(none),
        "",
        *(table(["method", *right], rows) if right else []),
    ]


def sources(models: Models) -> list[str]:
    """Return where every family comes from."""
    found: dict[str, list[str]] = {}
    for one in (one for of in models.values() for one in of["methods"].values()):
        if one["source"] not in found.setdefault(one["family"], []):
            found[one["family"]].append(one["source"])
    return table(["family", "source"], [[family, "; ".join(each)] for family, each in found.items()], words=2)


#: Ours, what it is compared with, and that method's name, or the bits that the best of others may have.
RATIOS: tuple[tuple[str, str, str | tuple[float, float]], ...] = (
    ("bits-3", "TurboQuant, 3 bits", "turboquant-3"),
    ("bits-3", "the best of others at 5 bits", (4.9, 5.1)),
    ("bits-2.25", "the best of others at 2.2 to 3 bits", (2.2, 3.05)),
    ("bits-2.25", "TurboQuant, 4 bits", "turboquant-4"),
    ("bits-2", "TurboQuant, 4 bits", "turboquant-4"),
    ("bits-1", "GRACE, λ = 0.5", "grace-0.5"),
)


def ratios(models: Models, part: str = "passages", half: str | None = None) -> list[str]:
    """Return a row for each comparison: what share of the KL of others ours has, on each model."""
    rows = []
    for name, words, beside in RATIOS:
        cells = [_ratio(of, part, half, name, beside) for of in models.values()]
        if set(cells) != {"–"}:
            rows.append([f"`bits={name.removeprefix('bits-')}`, of {words}", *cells])
    return table(["", *models], rows) if rows else []


def _ratio(of: dict[str, Any], part: str, half: str | None, name: str, beside: str | tuple[float, float]) -> str:
    other = beside if isinstance(beside, str) else best(of, part, *beside)
    found = ratio(of, part, name, other, half) if other is not None and {name, other} <= {*names(of, part)} else None
    if found is None or other is None:
        return "–"
    return with_ends(found, ".3f") + ("" if other == beside else " " + small(of["methods"][other]["title"]))
