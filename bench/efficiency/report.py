"""What was measured as a page: a picture, and a table per attention function, batch and context, with the paper's.

Source: Table 4 of GRACE (arXiv 2604.16983), on one RTX 3090.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.efficiency.measure import MEASURED, WARM_UP, Row
from bench.efficiency.methods import METHODS
from bench.report import Page, si

#: Time to first token and per token of Llama-3-8B, in seconds, by method and λ.
PAPER = {
    ("think", 0.5): (2.42, 0.07224),
    ("grace", 0.5): (2.73, 0.07166),
    ("think", 0.6): (2.33, 0.07209),
    ("grace", 0.6): (2.80, 0.07237),
}


def by_size(rows: Sequence[Row]) -> list[tuple[tuple[str, int, int], list[Row]]]:
    """Rows of the same attention, batch and context, together."""
    groups = itertools.groupby(rows, key=lambda row: (row.attention, row.batch, row.context))
    return [(size, list(of)) for size, of in groups]


def read_rows(value: Mapping[str, Any]) -> list[Row]:
    """The rows of a JSON file, medians aside, which are computed."""
    return [Row(**{name: part for name, part in row.items() if name != "median"}) for row in value["rows"]]


def page(value: Mapping[str, Any]) -> Page:
    """What docs/results/efficiency.md says of the numbers."""
    rows, threads = read_rows(value), value["threads"]
    where = f", {threads} thread{'s' * (threads > 1)}" if value["device"] == "cpu" else ""
    on = f"{value['device_name']}{where}"
    gpu = ", and GPUs are not measured yet" if value["device"] == "cpu" else ""
    tables = [
        "λ: share of key channels pruned. *TTFT*: time to the first token; *TPOT*: time per token after it; "
        "*selection*: share of TTFT; *× dense*: the column before it, divided by the dense cache's.",
        "",
    ]
    for (attention, batch, context), of_size in by_size(rows):
        tables += [f"**{context:,} tokens × {batch}**, {attention} attention.", ""]
        tables += table(of_size, paper=value["shape"] == "llama3-8b")
    plain = value["words"].replace("*", "")
    compared = _compared(rows)
    return Page(
        title="Time to first token, time per token, memory",
        picture="Lines: time per token by length of the prompt, for each cache",
        headline=compared[0],
        draw=lambda figure: draw(figure, rows),
        asked="How do the time to the first token, the time per token after it, and the bytes change with a pruned "
        "cache?",
        found=compared[1],
        sure=f"These are medians of {value['rounds']} rounds with caches taking turns, on {on}, with {plain}, "
        f"{value['dtype']}; other machines have other times and ratios{gpu}.",
        tables=tables,
        details=[("How it is counted", _counted(value))],
    )


def _compared(rows: Sequence[Row]) -> tuple[str, str]:
    """GRACE beside dense at the longest context that both were measured at: for the picture, and for the page."""
    done = [row for row in rows if row.status == MEASURED]
    for (_, batch, context), of_size in sorted(by_size(done), key=lambda pair: pair[0][1:], reverse=True):
        dense = next((row for row in of_size if row.method == "dense"), None)
        ours = [row for row in of_size if row.method in ("grace", "grace+int4-kv")]
        if dense is None or not ours:
            continue
        parts, steps = [], []
        for row in ours:
            first, step = ((row.median(part) or 0) / (dense.median(part) or 1) for part in ("ttft_s", "tpot_s"))
            size = (row.cache_bytes or 0) / (dense.cache_bytes or 1)
            steps.append(f"{METHODS[row.method].title}: {step:.2f} ×")
            parts.append(
                f"{METHODS[row.method].title} (λ = {row.ratio:g}): {first:.2f} × the time to the first token, "
                f"{step:.2f} × the time per token, {size:.2f} × the bytes"
            )
        prompts = "a prompt" if batch == 1 else f"{batch} prompts at once"
        return (
            f"Time per token after {context:,} tokens, as a multiple of a dense cache's: {', '.join(steps)}",
            f"With {prompts} of {context:,} tokens, compared with a dense cache: " + "; ".join(parts) + ".",
        )
    nothing = "Nothing to compare: dense and pruned caches were not both measured."
    return nothing, nothing


def _counted(value: Mapping[str, Any]) -> list[str]:
    return [
        f"- *TTFT*, time to first token: from a prompt's tokens to the first of {value['new_tokens']} new ones. It "
        "includes making the cache, reading the prompt, choosing and packing channels. *Selection*: the share of TTFT "
        "spent on choosing channels, including W.",
        f"- *TPOT*, time per output token: after that, without the first {WARM_UP} tokens; the median over the steps "
        "of a round, then over the rounds. Tokens are chosen greedily in a plain loop, without `generate`.",
        "- *Bytes*: held by the cache after the last token, with room to grow. *Peak*: the most that was allocated at "
        "once, without the weights, measured in a separate untimed run.",
        "- *× dense*: the column before it, divided by that of the dense cache. Times and bytes do not depend on the "
        "values of the weights, so random weights are enough. With fewer layers, the embedding and logits take a "
        "larger share of a step.",
        *(
            [
                "- *Paper*: Table 4 of [GRACE](https://arxiv.org/abs/2604.16983), on an RTX 3090 and with the whole "
                "model: compare ratios only."
            ]
            if value["shape"] == "llama3-8b"
            else []
        ),
        "- *QuantizedCache* is transformers' own cache in 4 bits, with its defaults. *ThinKPress* sets channels to "
        "zero and saves no bytes; kvpress needs transformers older than 5.3, which `make test-oldest` installs in a "
        "second environment.",
    ]


def table(rows: Sequence[Row], paper: bool) -> list[str]:
    """One size's table.

    Parameters
    ----------
    rows : sequence of Row
    paper : bool
        Whether the paper measured this shape.
    """
    head = ["cache", "λ", "TTFT", "× dense", "selection", "TPOT", "× dense", "bytes", "× dense", "peak"]
    if paper:
        head += ["paper, RTX 3090: TTFT", "TPOT"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    dense = next((row for row in rows if row.method == "dense"), None)
    for row in rows:
        cells = [METHODS[row.method].title, "–" if row.ratio is None else f"{row.ratio:g}"]
        cells += _measured(row, dense) if row.status == MEASURED else [row.status.replace("|", "/"), *["–"] * 7]
        if paper:
            published = PAPER.get((row.method, row.ratio or 0.0), (None, None))
            cells += [_cell(value, "s") for value in published]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _measured(row: Row, dense: Row | None) -> list[str]:
    pairs = [
        (row.median("ttft_s"), dense and dense.median("ttft_s"), "s"),
        (row.median("tpot_s"), dense and dense.median("tpot_s"), "s"),
        (row.cache_bytes, dense and dense.cache_bytes, "B"),
    ]
    cells = [[_cell(value, unit), f"{value / of:.2f}" if value and of else "–"] for value, of, unit in pairs]
    chosen, first = row.median("selection_s"), row.median("ttft_s")
    cells[0].append(f"{chosen / first:.1%}" if chosen is not None and first else "–")
    return [*itertools.chain(*cells), _cell(row.peak_bytes, "B")]


def _cell(value: float | None, unit: str) -> str:
    return "–" if value is None else si(value, unit)


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """A panel for each attention function, batch and λ: time per token against context.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    rows : sequence of Row
    """
    ratios: list[float | None] = list(dict.fromkeys(row.ratio for row in rows if row.ratio is not None)) or [None]
    sizes = list(dict.fromkeys((row.attention, row.batch) for row in rows))
    panels = [(*size, ratio) for size in sizes for ratio in ratios]
    columns = min(len(panels), 2)
    lines = math.ceil(len(panels) / columns)
    figure.set_size_inches(max(4.4 * columns, 7), 1.4 + 3.2 * lines)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)
    grid = figure.subplots(lines, columns, squeeze=False).flat
    legend: dict[str, Any] = {}
    for axes, (attention, batch, ratio) in zip(grid, panels, strict=False):
        inside = [r for r in rows if (r.attention, r.batch) == (attention, batch) and r.ratio in (None, ratio)]
        legend |= _methods(axes, [row for row in inside if row.status == MEASURED])
        axes.set_title(f"{attention}, batch {batch}" + (f", λ = {ratio:g}" if ratio else ""), fontsize=10)
        _scales(axes, sorted({row.context for row in inside}))
    for axes in [*grid][len(panels) :]:
        axes.set_axis_off()
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _methods(axes: Any, rows: Sequence[Row]) -> dict[str, Any]:
    drawn = {}
    for name in dict.fromkeys(row.method for row in rows):
        method = METHODS[name]
        points = sorted((row.context, 1000 * (row.median("tpot_s") or 0)) for row in rows if row.method == name)
        colour, marker = method.look
        (drawn[method.title],) = axes.plot(
            *zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.4, alpha=0.9
        )
    return drawn


def _scales(axes: Any, contexts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("ms per token (TPOT)")
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
