"""Objectives and certified gaps on the heads of a trained model: ``python -m bench.real_heads``.

A text is read once by SmolLM2-135M-Instruct; each KV head gives one interaction matrix W, from the last queries and all
keys (`grace_opt.hf.models.recording`). The weights and the text are fetched where they are missing (`bench.material`).
``--model`` and ``--text`` take others; ``--instances FILE`` takes matrices (heads, n, n) that there are already, as
.npz, .npy or .safetensors. Writes docs/results/real_heads.{json,md,png}; with ``--save FILE`` only the matrices.

When: to know what a smaller objective GRACE's selection and an exchange after it give on real keys. Source: W as in
GRACE (arXiv 2604.16983), section 3.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.material import MODEL, books, model_path
from bench.provenance import require_clean
from bench.report import BLUE, GREEN, ORANGE, Page, add_options, read_results, small, table, write_results
from grace_opt import instances, solve
from grace_opt.attention import interaction_matrix, prune_count

RATIOS = (0.5, 0.6, 0.7, 0.8)
TOKENS, OBSERVED = 1792, 32
Array = npt.NDArray[np.float64]


def heads(model_name: str, text: Path, tokens: int = TOKENS, observed: int = OBSERVED) -> Array:
    """W of every KV head, in layer-major order, (heads, n, n).

    Parameters
    ----------
    model_name : str
        Hub id, folder or .gguf file.
    text : Path
    tokens : int
        Of the passage, from the beginning of the text.
    observed : int
        Number of last queries that W is made of.
    """
    from grace_opt.hf import capture_attention
    from grace_opt.hf.models import disable_progress_bars, load_model

    disable_progress_bars()
    model, tokenizer = load_model(model_name)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        raise SystemExit(f"--text: {text.name} has {ids.shape[1]:,} tokens, and {tokens:,} are read: name a longer one")
    layers = capture_attention(model, ids[:, :tokens]).values()
    found = [interaction_matrix(c.queries[:, :, -observed:].double(), c.keys.double())[0] for c in layers]
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
        draw=lambda figure: draw(figure, rows, f"{value['instances']} heads of {name}"),
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


def draw(figure: Any, rows: list[dict[str, Any]], title: str) -> None:
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
    figure.suptitle(title, fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="Hub id, folder or .gguf file (default: %(default)s, fetched)")
    parser.add_argument("--text", type=Path, help="a text to read (default: a novel, fetched)")
    parser.add_argument("--instances", type=Path, help="matrices that there are already, instead of a model and a text")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the matrices there, and measure nothing")
    add_options(parser, "real_heads")
    args = parser.parse_args()
    if args.save:
        W = heads(model_path(args.model), args.text or books()[0])
        instances.write(args.save, W)
        print(f"wrote {args.save}: {len(W)} matrices of {W.shape[-1]} x {W.shape[-1]}")
        return
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        if args.instances is not None:
            W, name = np.asarray(instances.read(args.instances).W), args.instances.stem
            passage = "a file"
        else:
            text = args.text or books()[0]
            where = model_path(args.model)
            W, name = heads(where, text), Path(where).stem
            passage = f"{TOKENS:,} tokens of {text.stem}, last {OBSERVED} queries"
        value = {"provenance": source, "model": name, "passage": passage, "instances": len(W), "n": W.shape[-1]}
        value["rows"] = measure(W)
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
