"""Objectives and certified gaps on the heads of a trained model: ``python -m bench.real_heads``.

A text is read once by SmolLM2-135M-Instruct; each KV head gives one interaction matrix W, from the last queries and all
keys (`grace_opt.hf.models.recording`). The weights and the text are fetched where they are missing (`bench.material`).
``--model`` and ``--text`` take others. Writes docs/results/real_heads.{json,md,png}.

When: to know what a smaller objective GRACE's selection and an exchange after it give on real keys. Source: W as in
GRACE (arXiv 2604.16983), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.material import books, open_model
from bench.report import BLUE, GREEN, ORANGE, Page, parser_of, publish, small, table
from grace_opt import solve
from grace_opt.attention import interaction_matrix, prune_count
from grace_opt.hf import capture_attention

RATIOS = (0.5, 0.6, 0.7, 0.8)
TOKENS, OBSERVED = 1792, 32
Array = npt.NDArray[np.float64]


def heads(model: Any, tokenizer: Any, text: Path) -> Array:
    """W of every KV head of the first `TOKENS` of a text, in layer-major order, (heads, n, n)."""
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids
    if ids.shape[1] < TOKENS:
        raise SystemExit(f"--text: {text.name} has {ids.shape[1]:,} tokens, and {TOKENS:,} are read: name a longer one")
    layers = capture_attention(model, ids[:, :TOKENS]).values()
    found = [interaction_matrix(c.queries[:, :, -OBSERVED:].double(), c.keys.double())[0] for c in layers]
    matrices: Array = torch.cat(found).numpy()
    return matrices


def measure(W: Array) -> list[dict[str, Any]]:
    """A row for each λ: quotients of objectives, and gaps to the certified bound."""
    rows = []
    for ratio in RATIOS:
        k = prune_count(ratio, W.shape[-1])
        think = solve(W, k, "think").objective
        mies = solve(W, k, "mies", certify=True).verify()
        swap = solve(W, k, "local_search", certify=True).verify()
        rows.append(
            {
                "ratio": ratio,
                "k": k,
                "mies/think mean": float(np.mean(mies.objective / think)),
                "mies/think min": float(np.min(mies.objective / think)),
                "local_search/mies mean": float(np.mean(swap.objective / mies.objective)),
                "certified gap of mies, median": float(np.median(mies.gap)),
                "certified gap of local_search, median": float(np.median(swap.gap)),
            }
        )
    return rows


def page(value: dict[str, Any]) -> Page:
    """What docs/results/real_heads.md says of the numbers."""
    rows, n = value["rows"], value["n"]
    lower = [100 * (1 - row["mies/think mean"]) for row in rows]
    more = [100 * (1 - row["local_search/mies mean"]) for row in rows]
    gaps = [row["certified gap of local_search, median"] for row in rows]
    body = [
        [
            f"{row['ratio']:g}",
            str(row["k"]),
            f"{row['mies/think mean']:.4f} {small('best head ' + format(row['mies/think min'], '.3f'))}",
            f"{row['local_search/mies mean']:.4f}",
            f"{row['certified gap of mies, median']:.1%}",
            f"{row['certified gap of local_search, median']:.1%}",
        ]
        for row in rows
    ]
    name, passage = value["model"], value["passage"]
    return Page(
        title="Choosing channels jointly, on real heads",
        picture="Bars: how far f of MIES and of local search lies below THINK's, by the share of channels pruned",
        headline=f"Chosen jointly, by MIES, f is {min(lower):.1f} to {max(lower):.1f} % below THINK's, on the mean of "
        f"{value['instances']} heads",
        draw=lambda figure: draw(figure, rows),
        asked=f"How much smaller is the objective f on the {value['instances']} heads of {name} if channels are chosen "
        "jointly, instead of one by one as THINK does?",
        found=f"MIES makes f {min(lower):.0f} to {max(lower):.0f} % smaller on average, and exchanging channels after "
        f"it (local search) another {min(more):.1f} to {max(more):.1f} %.",
        sure="This is one model and one passage of text. By quick lower bounds, the optimum is at most "
        f"{min(gaps):.1%} to {max(gaps):.1%} below local search at the median; [Solvers](../reference/solvers.md) has "
        "the optimum.",
        tables=[
            "λ: share of channels pruned; k: their number. Ratios of f are means over the heads, gaps are medians.",
            "",
            *table(
                [
                    "λ",
                    "k",
                    "f, MIES / THINK",
                    "f, local search / MIES",
                    "certified gap, MIES",
                    "certified gap, local search",
                ],
                body,
                words=0,
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    f"One interaction matrix per KV head, {n}×{n}, from {passage}. "
                    "A gap is the distance between f and the lower bound of `certify=True`. A smaller f on these "
                    "queries does not tell [how good attention is on later "
                    "ones](../theory/index.md#what-a-smaller-objective-is-worth).",
                ],
            )
        ],
    )


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Objectives as shares of THINK's."""
    left, right = figure.subplots(1, 2)
    x = np.arange(len(rows))
    mies = np.array([row["mies/think mean"] for row in rows])
    swap = mies * [row["local_search/mies mean"] for row in rows]
    for shift, values, name, colour in ((-0.2, mies, "MIES", BLUE), (0.2, swap, "MIES, then exchanges", GREEN)):
        drawn = left.bar(x + shift, 100 * (1 - values), 0.38, color=colour, label=name)
        left.bar_label(drawn, fmt="%.1f", fontsize=8)
    left.set_ylabel("% below THINK's f, mean of the heads")
    right.bar(x, 100 * (1 - np.array([row["mies/think min"] for row in rows])), 0.5, color=ORANGE)
    right.set_ylabel("% below THINK's f, MIES, the best head")
    for axes in (left, right):
        axes.set_xticks(x, [f"{row['ratio']:g}" for row in rows])
        axes.set_xlabel("λ, share of channels pruned")
        axes.grid(visible=False, axis="x")
    left.set_ylim(top=1.25 * left.get_ylim()[1])
    left.legend(loc="upper left", fontsize=8)


def main(given: Sequence[str] | None = None) -> None:
    args = parser_of("real_heads", __doc__, model=True).parse_args(given)

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        model, tokenizer, name = open_model(args)
        text = (args.text or books())[0]
        W, passage = heads(model, tokenizer, text), f"{TOKENS:,} tokens of {text.stem}, last {OBSERVED} queries"
        about = {"model": name, "passage": passage, "instances": len(W), "n": W.shape[-1]}
        return {**about, "rows": measure(W)}

    publish(args, page, measured)


if __name__ == "__main__":
    main()
