"""The tables of `bench.arena`'s page: methods on short and long passages, ratios to others, hidden words, answers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from scipy.stats import binomtest

from bench.arena.contenders import ABLATED, OUR_FAMILIES, OURS
from bench.arena.numbers import (
    BOTH,
    CHOSEN,
    best,
    families,
    interval,
    mean,
    names,
    nearest,
    numbers,
    ratio,
    told,
)
from bench.intervals import DENSE, hidden_words, with_ends
from bench.report import small, table


def methods(value: dict[str, Any], part: str, only: Sequence[str] | None = None) -> list[str]:
    """Return a row for every method, or for some, family by family."""
    both = {one["half"] for one in value[part]} == set(BOTH)
    other = CHOSEN if both else None
    head = ["method", "bits", "K", "V", "% of 16 bits", f"KL, half {told(value, part)}"]
    head += [f"KL, half {other}"] * (other is not None) + ["likeliest token equal", "ΔNLL", "seconds"]
    rows = []
    for each in families(value, part).values():
        for name in (name for name in each if only is None or name in only):
            sizes = [f"{mean(value, part, name, size):.2f}" for size in ("bits", "key_bits", "value_bits")]
            row = [value["methods"][name]["title"], *sizes, f"{mean(value, part, name, 'share'):.1%}"]
            row.append(with_ends(interval(value, part, name, "kl")))
            if other is not None:
                chosen = numbers(value, part, name, "kl", other)
                row.append(f"{statistics.fmean(chosen):.4f}" if chosen else "–")
            row += [f"{mean(value, part, name, 'top1'):.1%}", f"{mean(value, part, name, 'nll'):+.4f}"]
            rows.append([*row, f"{mean(value, part, name, 'seconds'):.1f}"])
    return table(head, rows)


def kinds(value: dict[str, Any]) -> list[str]:
    """Return the KL of every method by kind of text."""
    half = told(value, "passages")
    found = list(dict.fromkeys(one["kind"] for one in value["passages"] if one["half"] == half))
    rows = []
    for name in names(value, "passages"):
        of_kind = {kind: [] for kind in found}
        for one in value["passages"]:
            if one["half"] == half and name in one["rows"]:
                of_kind[one["kind"]].append(one["rows"][name]["kl"])
        rows.append([value["methods"][name]["title"], *(f"{statistics.fmean(of_kind[kind]):.4f}" for kind in found)])
    return [f"KL, half {half}.", "", *table(["method", *found], rows)]


def ablation(value: dict[str, Any]) -> list[str]:
    """Return what `bits=` loses without a part."""
    rows = []
    for family in OUR_FAMILIES[1:]:
        cells = []
        for bits in ABLATED:
            suffix = {1: "class-1", 2: "none", 3: "plain"}[OUR_FAMILIES.index(family)]
            name, whole = f"bits-{bits:g}-{suffix}", f"bits-{bits:g}"
            found = ratio(value, "passages", name, whole)
            cells.append(with_ends(found, ".2f") if found else "–")
        rows.append([family.replace(OURS + ", ", ""), *cells])
    return [
        "KL as a multiple of that of `bits=` as it is.",
        "",
        *table(["without a part", *(f"{bits:g} bits" for bits in ABLATED)], rows),
    ]


def retrieval(value: dict[str, Any]) -> list[str]:
    """Return hits and likelihood of hidden words."""
    cases = value["cases"]
    return hidden_words(cases, list(cases[0]["rows"]), lambda name: _title(value, name)) if cases else []


def chat(value: dict[str, Any]) -> list[str]:
    """Return how many answers each method keeps."""
    asked = [one["rows"] for one in value["chat"]]
    answered = [rows for rows in asked if rows[DENSE]["right"]]
    if not answered:
        return ["The dense cache answers no question."] if asked else []
    rows = []
    for name in answered[0]:
        right = sum(one[name]["right"] for one in answered)
        ends = binomtest(right, len(answered)).proportion_ci(0.95, method="wilson")
        share = "" if name == DENSE else " " + small(f"{ends.low:.0%} to {ends.high:.0%}")
        rows.append([_title(value, name), f"{right} of {len(answered)}{share}"])
    return [
        f"**Answers**: {len(asked)} questions about texts that have at most {value['chat_tokens']:,} tokens with their "
        f"question, as in a chat, each asked after the text was compressed; only the {len(answered)} that the dense "
        "cache answers count. An answer is right if it contains the expected words. Intervals are Wilson's.",
        "",
        *table(["method", "answers kept"], rows),
    ]


def sources(value: dict[str, Any]) -> list[str]:
    """Return where every family comes from."""
    found: dict[str, list[str]] = {}
    for one in value["methods"].values():
        if one["source"] not in found.setdefault(one["family"], []):
            found[one["family"]].append(one["source"])
    return table(["family", "source"], [[family, "; ".join(each)] for family, each in found.items()], words=2)


def _title(value: dict[str, Any], name: str) -> str:
    return "dense" if name == DENSE else str(value["methods"][name]["title"])


TURBO = "TurboQuant"
#: Ours, the name of what it is compared with, and a function that finds that.
RATIOS: tuple[tuple[str, str, Callable[[dict[str, Any], str], str | None]], ...] = (
    ("bits-3", f"{TURBO} at 3.25", lambda v, part: nearest(v, part, TURBO, 3.25)),
    ("bits-3", "the best int4 at 5", lambda v, part: best(v, part, 4.9, 5.1)),
    ("bits-2.25", "the best of others at 2.25 to 3", lambda v, part: best(v, part, 2.2, 3.05)),
    ("bits-2.25", f"{TURBO} at 4.25", lambda v, part: nearest(v, part, TURBO, 4.25)),
    ("bits-2", f"{TURBO} at 4.25", lambda v, part: nearest(v, part, TURBO, 4.25)),
    ("bits-1", "GRACE, λ = 0.5", lambda v, part: "grace-0.5" if "grace-0.5" in names(v, part) else None),
)
#: Passages, and their halves: one that is reported, or both.
COLUMNS: tuple[tuple[str, str | None], ...] = (("passages", None), ("passages", BOTH), ("long", None))


def ratios(value: dict[str, Any]) -> list[str]:
    """Markdown lines."""
    rows = []
    for name, words, find in RATIOS:
        cells = []
        for part, half in COLUMNS:
            other = find(value, part) if name in names(value, part) else None
            found = ratio(value, part, name, other, half) if other else None
            if found is None or other is None:
                cells.append("–")
                continue
            who = value["methods"][other]["title"]
            cells.append(f"{found.estimate:.3f} {small(f'[{found.low:.3f}, {found.high:.3f}]')} {small(who)}")
        if set(cells) != {"–"}:
            rows.append([f"`bits={name.removeprefix('bits-')}`, of {words}", *cells])
    if not rows:
        return []
    short, long = f"{value['tokens']:,} tokens", f"{value['long_tokens']:,} tokens"
    return [
        "**KL of ours as a share of that of others**: ratios of means over passages, with 95 % intervals, paired. "
        "Settings were chosen on half A. Peers are our implementations of them.",
        "",
        *table(["", f"{short}, half {told(value, 'passages')}", f"{short}, both halves", long], rows),
        "",
    ]
