"""docs/results/real_model.md from the records of `bench.real_model`: means, paired differences, and what they say.

When: the script calls it, after a measurement or with ``--report-only``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.report import BLUE, GREY, ORANGE, Page, small, table
from grace_opt.attention.weights import prune_count
from grace_opt.sweep import mean_interval
from grace_opt.sweep.bootstrap import RESAMPLES

METHODS, RATIOS = {"THINK": "think", "GRACE": "grace"}, (0.5, 0.6)
RECENT = OBSERVED = 32
#: What is compared, in the table's order: name in a record, format, heading.
MEASURES = (
    ("kl", ".4f", "KL, nats"),
    ("top1", ".1%", "likeliest next token equal"),
    ("agreement", ".1%", "tokens equal"),
    ("prefix", ".1f", "common prefix, tokens"),
)


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences, and the ends of its bootstrap 95 % interval over prompts."""
    found = mean_interval(differences)
    return found.estimate, found.low, found.high


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the prompts, and paired differences between the methods."""
    dense = {part: float(np.mean([r["dense"][part] for r in records])) for part in ("key_bytes", "total_bytes")}
    rows, differences = [], []
    for ratio in dict.fromkeys(cell["ratio"] for cell in records[0]["pruned"]):
        by_method = {
            method: [c for r in records for c in r["pruned"] if (c["method"], c["ratio"]) == (method, ratio)]
            for method in METHODS
        }
        for method, cells in by_method.items():
            parts = [name for name, _, _ in MEASURES] + ["key_bytes", "total_bytes"]
            rows.append({"method": method, "ratio": ratio, **{p: float(np.mean([c[p] for c in cells])) for p in parts}})
        pairs = list(zip(by_method["GRACE"], by_method["THINK"], strict=True))
        paired = {name: interval([g[name] - t[name] for g, t in pairs]) for name, _, _ in MEASURES}
        nearer = sum(g["kl"] < t["kl"] for g, t in pairs)
        differences.append({"ratio": ratio, **paired, "prompts of lower KL": nearer})
    return {"dense": dense, "rows": rows, "GRACE - THINK": differences}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    differences, count, prompts = value["GRACE - THINK"], value["new_tokens"], value["prompts"]
    texts = "; ".join(dict.fromkeys(record["text"] for record in value["by prompt"]))
    ratios = [paired["ratio"] for paired in differences]
    nearer = " and ".join(f"{paired['prompts of lower KL']} at λ = {paired['ratio']:g}" for paired in differences)
    told = [f"{_signed(paired, 'kl')} nats at λ = {paired['ratio']:g}" for paired in differences]
    return Page(
        title="A real model with pruned keys",
        picture="Left: KL divergence from the dense cache's next-token distributions, by bytes of the cache; right: "
        "its difference between GRACE and THINK for each prompt",
        headline=f"By KL, {_verdict(differences, 'kl')}: GRACE − THINK is "
        + ", ".join(f"{paired['kl'][0]:+.4f} at λ = {paired['ratio']:g}" for paired in differences),
        draw=lambda figure: draw(figure, value),
        asked=f"At equal bytes, do the next-token distributions of {value['model']} stay nearer to those of a dense "
        "cache if GRACE chooses the channels, or if THINK does?",
        found=f"By KL divergence, {_verdict(differences, 'kl')}: GRACE − THINK is {' and '.join(told)}. By the share "
        "of generated tokens equal to the dense cache's, "
        f"{_verdict(differences, 'agreement', higher=True)}.",
        sure=f"This is one small model in 4 bits; of {prompts} prompts of {value['tokens']:,} tokens, GRACE has the "
        f"lower KL for {nearer}; intervals are 95 %, paired by prompt.",
        tables=[
            "λ: share of key channels pruned. All other columns compare with the dense cache: bytes, next-token "
            "distributions, and generated tokens (*tokens equal*, *common prefix*).",
            "",
            *table(
                ["cache", "λ", "K+V, % of dense", "K, % of dense", *(head for _, _, head in MEASURES)],
                _rows(value),
                words=2,
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    f"{value['model']} in float32 reads {prompts} prompts of {value['tokens']:,} tokens ({texts}) and "
                    f"generates {count} tokens greedily; recent and observation windows have {RECENT} tokens. Of the "
                    f"{value['head_dim']} channels, "
                    + ", ".join(f"{prune_count(r, value['head_dim'])} are pruned at λ = {r:g}" for r in ratios)
                    + f". A dense K takes {value['dense']['key_bytes'] / 2**20:.2f} MiB, and K+V "
                    f"{value['dense']['total_bytes'] / 2**20:.2f} MiB. Numbers are means over prompts.",
                    "",
                    "- *KL*(dense ‖ pruned) and *likeliest next token equal*: both caches are given the tokens that "
                    "the dense one generated.",
                    f"- *Tokens equal*: share of the {count} generated tokens equal to the dense cache's at the same "
                    "place. After the first difference the texts differ, so this mostly follows the *common prefix*.",
                    "- *GRACE − THINK*: mean of the paired differences and its bootstrap 95 % interval "
                    f"({RESAMPLES:,} resamples of {prompts} prompts); shares in percentage points (pp).",
                    "- Bytes are those of `memory_report()` after the prompt, in float32, with kept indices. In 16 "
                    "bits everything is half as large, except the indices.",
                ],
            )
        ],
    )


def _verdict(differences: Sequence[dict[str, Any]], measure: str, higher: bool = False) -> str:
    """Which choice is better where every interval says so."""
    signs = {(np.sign(p[measure][1]) if np.sign(p[measure][1]) == np.sign(p[measure][2]) else 0) for p in differences}
    if len(signs) > 1 or signs == {0}:
        return "no difference is shown" if signs == {0} else "a difference is shown at some λ only"
    return "GRACE is nearer" if (signs.pop() > 0) == higher else "THINK is nearer"


def _signed(paired: dict[str, Any], measure: str) -> str:
    form = next(form for name, form, _ in MEASURES if name == measure)
    scale, form, unit = (100, form.replace("%", "f"), " pp") if form.endswith("%") else (1, form, "")
    mean, low, high = (f"{scale * number:+{form}}" for number in paired[measure])
    return f"{mean}{unit} {small(f'[{low}, {high}]')}"


def _rows(value: dict[str, Any]) -> list[list[str]]:
    dense = value["dense"]
    rows = [["dense", "–", "100.0%", "100.0%", "0", "100.0%", "100.0%", str(value["new_tokens"])]]
    for paired in value["GRACE - THINK"]:
        for row in (r for r in value["rows"] if r["ratio"] == paired["ratio"]):
            sizes = [f"{row[part] / dense[part]:.1%}" for part in ("total_bytes", "key_bytes")]
            numbers = [f"{row[measure]:{form}}" for measure, form, _ in MEASURES]
            rows.append([row["method"], f"{row['ratio']:g}", *sizes, *numbers])
        shown = [_signed(paired, measure) for measure, _, _ in MEASURES]
        rows.append(["GRACE − THINK", f"{paired['ratio']:g}", "–", "–", *shown])
    return rows


def draw(figure: Any, value: dict[str, Any]) -> None:
    """KL by bytes, and the paired differences in KL."""
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    for method, colour, marker in (("THINK", ORANGE, "s"), ("GRACE", BLUE, "D")):
        of = [row for row in value["rows"] if row["method"] == method]
        x = [100 * row["total_bytes"] / value["dense"]["total_bytes"] for row in of]
        left.plot([100, *x], [0, *(row["kl"] for row in of)], color=colour, marker=marker, label=method)
        for place, row in zip(x, of, strict=True):
            if method == "THINK":
                left.annotate(
                    f"λ = {row['ratio']:g}", (place, row["kl"]), (4, 4), textcoords="offset points", fontsize=8
                )
    left.set_xlabel("K+V, % of dense")
    left.set_ylabel("KL from dense, nats")
    left.set_ylim(bottom=0)
    left.legend(loc="upper right", fontsize=8)
    for place, paired in enumerate(value["GRACE - THINK"]):
        cells = {
            method: [
                cell["kl"]
                for record in value["by prompt"]
                for cell in record["pruned"]
                if (cell["method"], cell["ratio"]) == (method, paired["ratio"])
            ]
            for method in METHODS
        }
        points = np.subtract(cells["GRACE"], cells["THINK"])
        right.plot(np.full(len(points), place) + np.linspace(-0.12, 0.12, len(points)), points, "o", color=GREY, ms=4)
        mean, low, high = paired["kl"]
        right.errorbar(place + 0.25, mean, [[mean - low], [high - mean]], color=BLUE, marker="D", capsize=4)
    right.axhline(0, color="black", linewidth=0.8)
    right.set_xticks(range(len(value["GRACE - THINK"])), [f"λ = {p['ratio']:g}" for p in value["GRACE - THINK"]])
    right.set_xlim(-0.5, len(value["GRACE - THINK"]) - 0.4)
    right.set_ylabel("KL, GRACE − THINK")
    right.set_title("each prompt, mean and 95 % interval")
