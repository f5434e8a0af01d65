"""What it buys to count dropped channels together when bits are divided: ``python -m bench.quadratic_zero``.

Four texts are read by SmolLM2-135M-Instruct (`bench.material`). Each KV head's channels get 0 to 8 bits in a budget,
by `allocate` with the weight of dropped channels each on its own (separable), and together (``interaction=W``). Both
allocations are then applied to the keys, and the errors of the logits counted, on the queries that were observed and on
later ones. Writes docs/results/quadratic_zero.{json,md,png}.

When: to decide whether dropped channels need W. Sources: W as in GRACE (arXiv 2604.16983), section 3; Max, IRE Trans.
Inf. Theory 6 (1960), for the quantiser.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from scipy.special import ndtr, ndtri
from torch import Tensor

from bench.material import MODEL, books, model_path
from bench.provenance import require_clean
from bench.report import BLUE, GREEN, GREY, ORANGE, Page, add_options, read_results, small, table, write_results
from grace_opt import allocate, symmetrize
from grace_opt.sweep.bootstrap import mean_interval

#: Tokens of the prompt, and later ones; the first and the last of the prompt are left out, as a cache keeps them dense.
PROMPT, LATER, SINKS, RECENT = 1792, 256, 4, 32
BITS = (0, 1, 2, 3, 4, 5, 6, 8)
COSTS = torch.tensor(BITS, dtype=torch.float64)
BUDGETS = (1.0, 1.5, 2.0, 2.25, 3.0)
#: How the moments of queries are shrunk towards their diagonal before the basis is made of them.
SHRINK = 0.1
#: Dropped channels become zero or their mean; both contenders alike.
SETTINGS = {
    "zero": "raw channels, dropped to zero",
    "mean": "raw channels, dropped to their mean",
    "calibrated": "joint basis of the other texts, dropped to their mean",
    "own": "joint basis of the same text, dropped to their mean",
}
OBSERVED = {"32": "last 32 queries", "all": "all queries of the prompt"}
COUNTED = ("loss", "observed", "later")


def lloyd_max(bits: int) -> Tensor:
    """The 2**bits values that quantise a standard normal with the least squared error."""
    values = ndtri((np.arange(2**bits) + 0.5) / 2**bits) * 3**0.5
    for _ in range(3000):
        edges = np.concatenate([[-np.inf], 0.5 * (values[1:] + values[:-1]), [np.inf]])
        density = np.exp(-(edges**2) / 2) / (2 * np.pi) ** 0.5  # scipy.stats takes six times as long
        values = -np.diff(density) / np.diff(ndtr(edges))
    return torch.from_numpy(values).float()


def quantiser_errors(keys: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """Centred keys (heads, tokens, d) less their values at 1, 2, … bits, (levels, heads, tokens, d)."""
    scale = keys.square().mean(1, keepdim=True).sqrt().clamp(min=1e-20)
    unit = keys / scale
    found = [unit - each[torch.bucketize(unit, 0.5 * (each[1:] + each[:-1]))] for each in tables]
    return torch.stack(found) * scale


def joint_basis(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices for keys and for queries (heads, d, d) after which both second moments (heads, d, d) are diagonal."""
    shrunk = (1 - SHRINK) * queries + SHRINK * torch.diag_embed(queries.diagonal(dim1=-2, dim2=-1))
    values, vectors = torch.linalg.eigh(shrunk)
    root = values.clamp(min=1e-6 * values.amax(-1, keepdim=True)).sqrt()
    forth = (vectors * root[:, None]) @ vectors.mT
    back = (vectors / root[:, None]) @ vectors.mT
    _, turned = torch.linalg.eigh(forth @ keys @ forth)
    return forth @ turned, back @ turned


def moments(queries: Tensor, keys: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Sums of squares of observed, all and later queries, and of centred keys, (heads, d, d); and the prompt's keys.

    Parameters
    ----------
    queries : Tensor (layers, query heads, tokens, d)
    keys : Tensor (layers, KV heads, tokens, d)
    """
    layers, heads, tokens, d = keys.shape
    Q = queries.reshape(layers * heads, -1, tokens, d)
    K = keys.reshape(-1, tokens, d)[:, SINKS : PROMPT - RECENT]
    parts = {"32": Q[:, :, PROMPT - RECENT : PROMPT], "all": Q[:, :, :PROMPT], "later": Q[:, :, PROMPT:]}
    grams = {name: (part.flatten(1, 2).mT @ part.flatten(1, 2)).double() for name, part in parts.items()}
    centred = K - K.mean(1, keepdim=True)
    return grams, (centred.mT @ centred).double(), K


def measure_text(
    grams: dict[str, Tensor],
    keys: Tensor,
    bases: dict[str, tuple[Tensor, Tensor]],
    tables: Sequence[Tensor],
    settings: Sequence[str] = tuple(SETTINGS),
) -> list[dict[str, Any]]:
    """One dict for each setting, observed queries and budget, with a number per head for each contender.

    Parameters
    ----------
    grams, keys
        As from `moments`.
    bases : dict
        `joint_basis` for the settings that have one.
    tables : sequence of Tensor
        `lloyd_max` of all BITS but 0.
    settings : sequence of str
    """
    centred, found = keys - keys.mean(1, keepdim=True), []
    for setting in settings:
        X, G = centred, grams
        if setting in bases:
            of_keys, of_queries = bases[setting]
            X, G = (X.double() @ of_keys).float(), {name: of_queries.mT @ M @ of_queries for name, M in grams.items()}
        dropped = keys if setting == "zero" else X
        every = torch.cat([dropped[None], quantiser_errors(X, tables)])
        size = torch.stack([each.square().sum(1, dtype=torch.float64) for each in every], -1)
        products = symmetrize((dropped.mT @ dropped).double())
        for name, budget in itertools.product(OBSERVED, BUDGETS):
            losses, W = G[name].diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * size, symmetrize(G[name]) * products
            losses[..., 0] = W.diagonal(dim1=-2, dim2=-1)
            apart = allocate(losses, COSTS, budget * keys.shape[-1])
            joint = allocate(losses, COSTS, budget * keys.shape[-1], interaction=W)
            row = {"setting": setting, "observed_on": name, "budget": budget, "gap": joint.gap.tolist()}
            errors = _products_of_errors(every, apart.levels)
            row["separable"] = _counted(losses, W, apart.levels, errors, G[name], G["later"])
            changed = (joint.levels != apart.levels).any(-1)
            errors[changed] = _products_of_errors(every[:, changed], joint.levels[changed])
            row["quadratic"] = _counted(losses, W, joint.levels, errors, G[name], G["later"])
            found.append(row)
    return found


def _products_of_errors(every: Tensor, levels: Tensor) -> Tensor:
    """E'E of every head, (heads, d, d), for errors (levels, heads, tokens, d) at the levels (heads, d)."""
    channels, found = torch.arange(levels.shape[-1]), torch.empty(*levels.shape, levels.shape[-1], dtype=torch.float64)
    for head, chosen in enumerate(levels):
        E = every[chosen, head, :, channels]
        found[head] = (E @ E.T).double()
    return found


def _counted(
    losses: Tensor, W: Tensor, levels: Tensor, errors: Tensor, observed: Tensor, later: Tensor
) -> dict[str, list[float]]:
    """The loss that `allocate` minimises with W, and the squared errors of logits, of each head."""
    zero = (levels == 0).double()
    own = losses.gather(-1, levels.unsqueeze(-1)).squeeze(-1) * (1 - zero)
    return {
        "loss": (own.sum(-1) + (W * zero.unsqueeze(-1) * zero.unsqueeze(-2)).sum((1, 2))).tolist(),
        "observed": (observed * errors).sum((1, 2)).tolist(),
        "later": (later * errors).sum((1, 2)).tolist(),
        "dropped": zero.mean(-1).tolist(),
    }


def rows_of(texts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Geometric means of quadratic / separable, with intervals over heads, and the means of single texts."""
    rows = []
    for same in zip(*texts, strict=True):
        first = same[0]
        row = {key: first[key] for key in ("setting", "observed_on", "budget")}
        for what in COUNTED:
            logs = np.log([np.divide(one["quadratic"][what], one["separable"][what]) for one in same])
            over = mean_interval(logs.mean(0))  # the same head on all texts is one observation
            row[what] = {
                "ratio": float(np.exp(over.estimate)),
                "low": float(np.exp(over.low)),
                "high": float(np.exp(over.high)),
                "texts": np.exp(logs.mean(1)).tolist(),
            }
        row["gap"] = float(np.median([one["gap"] for one in same]))
        for contender in ("separable", "quadratic"):
            row[f"dropped_{contender}"] = float(np.mean([one[contender]["dropped"] for one in same]))
        rows.append(row)
    return rows


def read(model_name: str, texts: Sequence[Path]) -> list[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """`moments` of every text."""
    from grace_opt.hf import capture
    from grace_opt.hf.models import disable_progress_bars, load_model

    disable_progress_bars()
    model, tokenizer = load_model(model_name)
    found = []
    for text in track(texts, description="reading"):
        ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids
        if ids.shape[1] < PROMPT + LATER:
            raise SystemExit(f"{text.name} has {ids.shape[1]:,} tokens, and {PROMPT + LATER:,} are read")
        layers = capture(model, ids[:, : PROMPT + LATER]).values()
        queries, keys = torch.stack([c.queries[0] for c in layers]), torch.stack([c.keys[0] for c in layers])
        found.append(moments(queries.float(), keys.float()))
    return found


def measure(texts: Sequence[tuple[dict[str, Tensor], Tensor, Tensor]]) -> list[list[dict[str, Any]]]:
    """`measure_text` of every text, with the bases of itself and of the others."""
    tables, found = [lloyd_max(bits) for bits in BITS[1:]], []
    for at, (grams, of_keys, keys) in enumerate(track(texts, description="quadratic_zero")):
        others = [text for number, text in enumerate(texts) if number != at] or [texts[at]]
        bases = {
            "own": joint_basis(grams["all"], of_keys),
            "calibrated": joint_basis(sum(o[0]["all"] for o in others), sum(o[1] for o in others)),
        }
        found.append(measure_text(grams, keys, bases, tables))
    return found


def page(value: dict[str, Any]) -> Page:
    """What docs/results/quadratic_zero.md says of the numbers."""
    rows = value["rows"]
    better = [row for row in rows if row["later"]["high"] < 1]
    worse = [row for row in rows if row["later"]["low"] > 1]
    best = min(rows, key=lambda row: row["later"]["ratio"])
    body = [
        [
            SETTINGS[row["setting"]],
            OBSERVED[row["observed_on"]],
            f"{row['budget']:g}",
            *(f"{row[w]['ratio']:.4f} {small(_ends(row[w]))}" for w in COUNTED),
            f"{min(row['later']['texts']):.4f} to {max(row['later']['texts']):.4f}",
            f"{row['dropped_separable']:.1%}",
            f"{row['gap']:.2%}",
        ]
        for row in rows
    ]
    return Page(
        title="Counting dropped channels together",
        picture="Error of later logits with W over that without, by bits per channel, with intervals",
        draw=lambda figure: draw(figure, rows),
        asked="What does it buy to count the channels with no bits together (`interaction=W`) when bits are divided, "
        "instead of each on its own?",
        found=f"The error of later logits is {100 * (1 - best['later']['ratio']):.1f} % smaller at best "
        f"({SETTINGS[best['setting']]}, {best['budget']:g} bits); the interval is below 1 in {len(better)} of "
        f"{len(rows)} rows, and above it in {len(worse)}.",
        sure=f"{value['heads']} heads of {value['model']} on {value['texts']} texts: geometric means of ratios, and "
        "95 % bootstrap intervals over heads, each averaged over texts. One small model; keys only.",
        tables=table(
            [
                "zero level",
                "W from",
                "bits",
                "loss",
                "observed logits",
                "later logits",
                "single texts",
                "dropped",
                "gap",
            ],
            body,
            words=2,
        ),
        details=[
            (
                "How it is counted",
                [
                    f"Every number is quadratic / separable. {PROMPT:,} tokens of prompt, the first {SINKS} and last "
                    f"{RECENT} left out; {LATER} later queries. Levels of {BITS} bits by a Lloyd-Max quantiser for a "
                    "Gaussian, one scale and one mean per channel, which both contenders keep. In the first rows a "
                    "dropped channel becomes zero, in all others its mean. The loss is the one that the quadratic "
                    "contender minimises; the logits' errors are those of the quantised keys. *dropped*: by the "
                    "separable contender; *gap*: certified, of the quadratic one, at the median.",
                ],
            )
        ],
    )


def _ends(found: dict[str, Any]) -> str:
    return f"{found['low']:.4f} to {found['high']:.4f}"


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Ratios by budget, a panel for the queries of W, a line for each setting."""
    for axes, (name, words) in zip(figure.subplots(1, len(OBSERVED), sharey=True), OBSERVED.items(), strict=True):
        for colour, (setting, label) in zip((GREY, BLUE, ORANGE, GREEN), SETTINGS.items(), strict=True):
            line = [row for row in rows if row["setting"] == setting and row["observed_on"] == name]
            ratio, low, high = (np.array([row["later"][end] for row in line]) for end in ("ratio", "low", "high"))
            x = [row["budget"] for row in line]
            axes.errorbar(x, ratio, [ratio - low, high - ratio], fmt="o-", color=colour, label=label, capsize=2)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"W from the {words}" if name == "32" else f"W from {words}")
        axes.set_xlabel("bits per channel")
    figure.axes[0].set_ylabel("error of later logits, with W / without")
    figure.axes[-1].legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="Hub id, folder or .gguf file (default: %(default)s, fetched)")
    parser.add_argument("--text", type=Path, nargs="+", help="texts to read (default: four, fetched)")
    add_options(parser, "quadratic_zero")
    args = parser.parse_args()
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        where = model_path(args.model)
        texts = measure(read(where, args.text or books()))
        value = {"provenance": source, "model": Path(where).stem, "texts": len(texts)}
        value |= {"heads": len(texts[0][0]["gap"]), "rows": rows_of(texts)}
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
