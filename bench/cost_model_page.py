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
        title="What selection, prefill and decoding cost at least",
        picture="Bytes of a dense decoding step by those of a pruned one, by shape, tokens and prompts",
        draw=lambda figure: draw(figure, models, value["ratio"]),
        asked="What do choosing channels, reading a prompt and decoding cost at least, by bytes that must be moved and "
        "operations that must be computed?",
        found=f"At λ = {value['ratio']:g} choosing channels takes {min(shares):.2%} to {max(shares):.2%} of the "
        f"prefill's floor, and a decoding step moves {min(steps):.2f} to {max(steps):.2f} times fewer bytes than a "
        "dense one: the more, the longer the texts and the more of them at once.",
        sure="Formulas that the tests hold to what torch counts and to `memory_report()`; only the two rates are "
        "measured, nothing was run on the H200, and a floor says what cannot be beaten, not what will be reached.",
        tables=_ratios(models),
        details=[
            (f"{name}: what must be moved and computed, on any machine", _costs(first["cells"])),
            (
                f"{name}: floors here",
                [f"From {value['rates']}.", "", *_floors(first["cells"], 0), *_measured(name, value)],
            ),
            (
                f"{name}: floors of an H200, by the vendor's figures",
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
                    f"Formulas for 16-bit weights and caches; {constants['observed']} observed queries, the last "
                    f"{constants['recent']} tokens dense. Columns and *tokens × prompts* are lengths and how many are "
                    "read at once. *Bytes* or *products* in brackets is what a floor waits for. In the first table, "
                    "*K+V* and *step* are dense by pruned, *selection* is by prefill; *bytes* hold on any machine, "
                    "*here* is by the rates measured here, *H200* by the vendor's figures. Shapes, not models: not all "
                    "of these read texts that long. [What follows from it](../performance.md).",
                ],
            ),
        ],
    )


def _measured(name: str, value: dict[str, Any]) -> list[str]:
    found = value["interaction_matrix"]
    if found is None:
        return []
    return [
        f"*Measured beside its floor*: `interaction_matrix` of one layer of {name}, {found['context']:,} tokens, one "
        f"prompt, takes {si(found['seconds'], 's')} here, {found['seconds'] / found['floor']:.1f} times its floor of "
        f"{si(found['floor'], 's')}.",
        "",
    ]


def _costs(found: Sequence[dict[str, Any]]) -> list[str]:
    """Bytes and operations, which no machine changes."""
    rows = [["bytes; operations", *(f"{f['context']:,} × {f['batch']}" for f in found)]]
    for name in found[0]["costs"]:
        costs = [f["costs"][name] for f in found]
        rows.append([name, *(f"{si(c['bytes'], 'B')}; {si(c['flops'], 'FLOP')}" for c in costs)])
    rows.append(["dense K+V by pruned K+V", *(f"{f['cache_ratio']:.2f}" for f in found)])
    rows.append(["dense step by pruned step, bytes", *(f"{f['step_bytes_ratio']:.2f}" for f in found)])
    return table(rows[0], rows[1:])


def _floors(found: Sequence[dict[str, Any]], machine: int) -> list[str]:
    """Floors of one machine."""
    floors = [f["floors"][machine] for f in found]
    rows = [["at least", *(f"{f['context']:,} × {f['batch']}" for f in found)]]
    for name in floors[0]["seconds"]:
        rows.append([name, *(f"{si(f['seconds'][name], 's')} ({f['bound_by'][name]})" for f in floors)])
    rows.append(["selection by prefill", *(f"{f['selection_by_prefill']:.2%}" for f in floors)])
    rows.append(["dense step by pruned step", *(f"{f['step_ratio']:.2f}" for f in floors)])
    return table(rows[0], rows[1:])


def _ratios(models: Sequence[dict[str, Any]]) -> list[str]:
    """All models in ratios."""
    head = ["model", "tokens × prompts", "K+V, bytes", "step, bytes", "step, here", "step, H200"]
    rows = [[*head, "selection, here", "selection, H200"]]
    for model in models:
        for f in model["cells"]:
            ratios = [f["cache_ratio"], f["step_bytes_ratio"], *(floors["step_ratio"] for floors in f["floors"])]
            shares = [f"{floors['selection_by_prefill']:.2%}" for floors in f["floors"]]
            cell = f"{f['context']:,} × {f['batch']}"
            rows.append([model["models"], cell, *(f"{ratio:.2f}" for ratio in ratios), *shares])
    return table(rows[0], rows[1:])


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
