"""docs/results/cost_model.md from the numbers of `bench.cost_model`.

When: the script calls it, after a measurement or with ``--report-only``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.report import BLUE, ORANGE, Page, si, table


def page(value: dict[str, Any]) -> Page:
    """Floors in ratios of all shapes; bytes, operations and times of the first one folded away."""
    first, models, constants = value["models"][0], value["models"], value["constants"]
    cells = [cell for model in models for cell in model["cells"]]
    shares = [floors["selection_by_prefill"] for cell in cells for floors in cell["floors"]]
    steps = [cell["step_bytes_ratio"] for cell in cells]
    vendor = value["machines"][1]
    name = first["models"]
    return Page(
        title="Least cost of selection, prefill and decoding",
        picture="Bars: bytes of a dense decoding step divided by those of a pruned one, by model, tokens and prompts",
        draw=lambda figure: draw(figure, models, value["ratio"]),
        asked="What is the least that choosing channels, reading a prompt and decoding can cost, counting the bytes to "
        "move and the operations to compute?",
        found=f"At λ = {value['ratio']:g}, choosing channels needs {min(shares):.2%} to {max(shares):.2%} of the least "
        f"time for the prompt, and a dense decoding step moves {min(steps):.2f} to {max(steps):.2f} times the bytes of "
        "a pruned one; the gain grows with the length and number of prompts.",
        sure="These are lower bounds from formulas, which the tests compare with torch's own counts and "
        "`memory_report()`: at these rates, code cannot be faster, but it can be slower. Only the rates of this "
        "machine are measured; nothing ran on an H200.",
        tables=_ratios(models),
        details=[
            (f"{name}: bytes to move and operations to compute, on any machine", _costs(first["cells"])),
            (
                f"{name}: least time on this machine",
                [f"From {value['rates']}.", "", *_floors(first["cells"], 0), *_measured(name, value)],
            ),
            (
                f"{name}: least time on an H200, by the vendor's figures",
                [
                    f"At {si(vendor['bandwidth'], 'B/s')} and {si(vendor['rate'], 'FLOP/s')} (bfloat16, dense): "
                    "**vendor's figures, nothing measured here**.",
                    "",
                    *_floors(first["cells"], 1),
                ],
            ),
            (
                "How it is counted",
                [
                    f"The formulas are for 16-bit weights and caches, {constants['observed']} observed queries, and "
                    f"dense keys for the last {constants['recent']} tokens. *Tokens × prompts*: the length of a prompt "
                    "and how many are read at once. A time is limited by what stands in brackets: moving *bytes* or "
                    "computing *products*. Only the shapes of the models count here: not all of these models read "
                    "prompts that long. [What follows for speed](../performance.md).",
                ],
            ),
        ],
    )


def _measured(name: str, value: dict[str, Any]) -> list[str]:
    found = value["interaction_matrix"]
    if found is None:
        return []
    return [
        f"For comparison, measured: `interaction_matrix` for one layer of {name} and one prompt of "
        f"{found['context']:,} tokens takes {si(found['seconds'], 's')} here, "
        f"{found['seconds'] / found['floor']:.1f} times its lower bound of {si(found['floor'], 's')}.",
        "",
    ]


def _costs(found: Sequence[dict[str, Any]]) -> list[str]:
    """Bytes and operations, which no machine changes."""
    rows = [["bytes; operations", *(f"{f['context']:,} × {f['batch']}" for f in found)]]
    for name in found[0]["costs"]:
        costs = [f["costs"][name] for f in found]
        rows.append([name, *(f"{si(c['bytes'], 'B')}; {si(c['flops'], 'FLOP')}" for c in costs)])
    rows.append(["dense K+V / pruned K+V", *(f"{f['cache_ratio']:.2f}" for f in found)])
    rows.append(["dense step / pruned step, bytes", *(f"{f['step_bytes_ratio']:.2f}" for f in found)])
    return table(rows[0], rows[1:])


def _floors(found: Sequence[dict[str, Any]], machine: int) -> list[str]:
    """Floors of one machine."""
    floors = [f["floors"][machine] for f in found]
    rows = [["at least", *(f"{f['context']:,} × {f['batch']}" for f in found)]]
    for name in floors[0]["seconds"]:
        rows.append([name, *(f"{si(f['seconds'][name], 's')} ({f['bound_by'][name]})" for f in floors)])
    rows.append(["selection / prefill", *(f"{f['selection_by_prefill']:.2%}" for f in floors)])
    rows.append(["dense step / pruned step", *(f"{f['step_ratio']:.2f}" for f in floors)])
    return table(rows[0], rows[1:])


def _ratios(models: Sequence[dict[str, Any]]) -> list[str]:
    """All models in ratios."""
    head = ["model", "tokens × prompts", "K+V, bytes", "step, bytes", "step, time here", "step, time on H200"]
    rows = [[*head, "selection, here", "selection, H200"]]
    for model in models:
        for f in model["cells"]:
            ratios = [f["cache_ratio"], f["step_bytes_ratio"], *(floors["step_ratio"] for floors in f["floors"])]
            shares = [f"{floors['selection_by_prefill']:.2%}" for floors in f["floors"]]
            cell = f"{f['context']:,} × {f['batch']}"
            rows.append([model["models"], cell, *(f"{ratio:.2f}" for ratio in ratios), *shares])
    return [
        "*K+V* and *step*: dense divided by pruned, for the cache and for a decoding step, in bytes (on any machine) "
        "and in least time (at the rates of this machine, or the vendor's for an H200). *Selection*: its least time as "
        "a share of the prompt's.",
        "",
        *table(rows[0], rows[1:]),
    ]


def draw(figure: Any, models: Sequence[dict[str, Any]], ratio: float) -> None:
    """Dense by pruned, in bytes, of a step and of its cache alone."""
    axes = figure.subplots()
    sizes = [(cell["context"], cell["batch"]) for cell in models[0]["cells"]]
    width = 0.8 / len(sizes)
    shades = [0.35 + 0.65 * place / max(len(sizes) - 1, 1) for place in range(len(sizes))]
    for place, (context, batch) in enumerate(sizes):
        x = [number + (place - (len(sizes) - 1) / 2) * width for number in range(len(models))]
        heights = [model["cells"][place]["step_bytes_ratio"] for model in models]
        label = f"{context:,} tokens × {batch}"
        drawn = axes.bar(x, heights, 0.92 * width, color=BLUE, alpha=shades[place], label=label)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7)
    for number, model in enumerate(models):
        top = model["cells"][-1]["cache_ratio"]
        axes.plot(
            [number - 0.45, number + 0.45], [top, top], color=ORANGE, label="the cache alone" if not number else None
        )
    highest = max(cell["cache_ratio"] for model in models for cell in model["cells"])
    axes.set_ylim(1, 1 + 1.4 * (highest - 1))  # a bar begins where nothing is saved
    axes.set_xticks(range(len(models)), [model["models"].replace("-Instruct-v0.2", "") for model in models])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("bytes, dense / pruned")
    axes.set_title(f"A decoding step at λ = {ratio:g}")
    axes.legend(loc="upper left", ncols=3, fontsize=8)
