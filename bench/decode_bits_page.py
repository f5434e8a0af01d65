"""docs/results/decode_bits.md from the times that `bench.decode_bits` took: ratios to a dense cache, by model.

When: the script calls it, after a measurement or with ``--report-only``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.report import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, Page, read_results, table

BITS = 2.25
DENSE, OURS, BEFORE, PEER = "dense", f"bits={BITS:g}", "GRACE, K and V in 4 bits", "QuantizedCache, 4 bits"
#: Numbers coded one by one, and `CODED`, kinds of codes with their settings.
ONE_BY_ONE = f"{OURS}, trellis=False"
CODED: dict[str, dict[str, Any]] = {OURS: {}, ONE_BY_ONE: {"trellis": False}}
#: Steps of `OURS` without reading in place.
COPIES = f"bits={BITS:g}, dense copies"
#: A dense cache of one token: what a step takes if there is nothing to read but the weights.
NOTHING = "no tokens to read"
COLOURS = {DENSE: BLACK, OURS: BLUE, ONE_BY_ONE: PINK, COPIES: GREEN, BEFORE: GREY, PEER: ORANGE, NOTHING: SKY}
#: One layer, where all that the processor has may be used.
HERE = "all it has"
#: Caches that a prompt is read into.
READING = (DENSE, *CODED, BEFORE, PEER)
OF_LAYER = ("best dense, ms", f"{OURS}, ms", "times faster", "with `trellis=False`", "times fewer bytes")


def ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def best_dense(times: Mapping[str, Sequence[float]]) -> str:
    """Return the fastest dense way."""
    return min(times.keys() - CODED, key=lambda name: statistics.median(times[name]))


def summary(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stays on the page of a model's numbers once it was measured on another processor."""
    pairs = {DENSE: (OURS, DENSE), NOTHING: (NOTHING, DENSE), PEER: (OURS, PEER)}
    steps = {
        str(cell["tokens"]): {
            name: ratio(cell["ms"], *pair) for name, pair in pairs.items() if {*pair} <= {*cell["ms"]}
        }
        for cell in of["steps"]
    }
    return {"provenance": of["provenance"], "steps": steps}


def elsewhere(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return, by model, the summaries of the results that may be replaced, and of those that they replaced."""
    if not out.with_name(out.name + ".json").exists():
        return {}
    return {label: [*of["elsewhere"], summary(of)] for label, of in read_results(out)["models"].items()}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, Any] = value["models"]
    shares = {label: [ratio(cell["ms"], OURS, DENSE) for cell in of["steps"]] for label, of in models.items()}
    worst = max(shares, key=lambda label: shares[label][-1])
    others = [label for label in models if label != worst]
    first, *_, last = models[worst]["steps"]
    at_worst = f", where it saves least of {len(models)} models" if others else ""
    beside = " and ".join(f"{shares[label][-1]:.2f} on {label}" for label in others)
    peers = [ratio(of["steps"][-1]["ms"], OURS, PEER) for of in models.values() if PEER in of["steps"][-1]["ms"]]
    beside_peer = f" Beside QuantizedCache, it takes {_span(peers)} of the time." if peers else ""
    layers = [of["layer"][HERE] for of in models.values()]
    faster, one_by_one = (_span([ratio(one["ms"], best_dense(one["ms"]), name) for one in layers]) for name in CODED)
    slower = " and ".join(
        f"{one['steps'][str(last['tokens'])][DENSE]:.2f} ({label}, {one['provenance']['cpu']})"
        for label, of in models.items()
        for one in of["elsewhere"]
    )
    names = [name for name in COLOURS if name != DENSE]
    steps = [(label, of, cell) for label, of in models.items() for cell in of["steps"]]
    return Page(
        title="Steps on 2.25 bits",
        picture="Bars: time of a whole decoding step as a share of the dense cache's, by cache, after two passages, a "
        "panel per model",
        headline=f"With {OURS}, a step takes {shares[worst][0]:.2f} of the dense cache's time after "
        f"{first['tokens']:,} tokens, {shares[worst][-1]:.2f} after {last['tokens']:,}"
        + f" ({worst}, the worst of {len(models)} models)"
        * bool(others),
        draw=lambda figure: _draw(figure, models),
        asked=f"How long does a decoding step take on a cache with `{OURS}`, read where it lies, on a CPU?",
        found=f"On {worst}{at_worst}, a whole step takes {shares[worst][0]:.2f} of the dense cache's time after "
        f"{first['tokens']:,} tokens, and {shares[worst][-1]:.2f} after {last['tokens']:,}"
        f"{f' ({beside})' if others else ''}; with no tokens to read, it takes {ratio(last['ms'], NOTHING, DENSE):.2f} "
        f"of it.{beside_peer} Attention alone, over {layers[0]['tokens']:,} tokens, is "
        f"{faster} times as fast as the fastest dense one, and {one_by_one} times without a trellis.",
        sure=f"These are medians of {value['rounds']} rounds with {value['threads']} threads on {', '.join(models)}, "
        f"in float32, all caches taking turns of {value['turn']} steps, of which the last is timed. Reading the "
        "weights takes most of a short step, whatever the cache is."
        + f" On other processors, that after {last['tokens']:,} tokens took {slower} of the dense cache's time."
        * bool(slower),
        tables=[
            "Time of a step / that on a dense cache (QuantizedCache takes no model with a sliding window):",
            "",
            *table(
                ["model", "tokens", "dense, ms", *names],
                [
                    [
                        label,
                        f"{cell['tokens']:,}",
                        f"{statistics.median(cell['ms'][DENSE]):.1f}",
                        *(f"{ratio(cell['ms'], name, DENSE):.2f}" if name in cell["ms"] else "–" for name in names),
                    ]
                    for label, _, cell in steps
                ],
            ),
            "",
            f"Most megabytes that are allocated at once while {value['read']:,} tokens are read, besides the weights:",
            "",
            *table(
                ["model", *READING],
                [[label, *(_megabytes(of["peak"].get(name)) for name in READING)] for label, of in models.items()],
            ),
        ],
        details=[
            (
                "Milliseconds and bytes",
                [
                    "*Floor*: bytes of the weights and of the cache at the rate of a large copy ("
                    + ", ".join(f"{of['copy_bandwidth'] / 1e9:.1f} GB/s for {label}" for label, of in models.items())
                    + "); reading alone can be faster. Layers with a sliding window stay dense.",
                    "",
                    *table(
                        ["model", "tokens", "cache", "step, ms", f"{OURS} / this", "cache, MB", "floor, ms"],
                        [_step_row(label, of, cell, name) for label, of, cell in steps for name in cell["ms"]],
                        3,
                    ),
                ],
            ),
            (
                "One layer",
                [
                    f"Attention of one new token over {layers[0]['tokens']:,} tokens in so many heads, with all "
                    "that the processor has, and in processes that were told to use no more of it than all of a kind "
                    "have: AVX2 (x86-64-v3), or AVX-512 without GFNI (x86-64-v4). Processors of these kinds have other "
                    "caches and clocks. Codes are of normal numbers with decaying spread in a random basis; bytes are "
                    "those of codes.",
                    "",
                    *table(
                        ["model", "KV heads", "query heads", "width", "may use", *OF_LAYER],
                        [
                            [label, *map(str, of["heads"]), *_layer_row(kind, cell)]
                            for label, of in models.items()
                            for kind, cell in of["layer"].items()
                        ],
                    ),
                ],
            ),
            *([("Other machines", _machines(models))] if slower else []),
        ],
    )


def _span(numbers: Sequence[float]) -> str:
    low, high = (f"{each(numbers):.2f}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def _megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:,.0f}"


def _step_row(label: str, of: Mapping[str, Any], cell: Mapping[str, Any], name: str) -> list[str]:
    size = cell["bytes"].get(name)
    floor = None if size is None else 1000 * (cell["weight_bytes"] + size) / of["copy_bandwidth"]
    return [
        label,
        f"{cell['tokens']:,}",
        name,
        f"{statistics.median(cell['ms'][name]):.1f}",
        f"{ratio(cell['ms'], OURS, name):.2f}",
        "–" if size is None else f"{size / 1e6:.1f}",
        "–" if floor is None else f"{floor:.1f}",
    ]


def _layer_row(kind: str, cell: Mapping[str, Any]) -> list[str]:
    best, times = best_dense(cell["ms"]), cell["ms"]
    return [
        kind,
        f"{statistics.median(times[best]):.2f} ({best})",
        f"{statistics.median(times[OURS]):.2f}",
        f"{ratio(times, best, OURS):.2f}",
        f"{ratio(times, best, ONE_BY_ONE):.2f}",
        f"{cell['dense_bytes'] / cell['bytes']:.1f}",
    ]


def _machines(models: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            label,
            ", ".join(one["provenance"][name] for name in ("cpu", "date", "commit")),
            *(
                f"{shares[name]:.2f}" if name in shares else "–"
                for shares in one["steps"].values()
                for name in (DENSE, NOTHING, PEER)
            ),
        ]
        for label, of in models.items()
        for one in (summary(of), *of["elsewhere"])
    ]
    tokens = [f"{cell['tokens']:,}" for cell in next(iter(models.values()))["steps"]]
    head = [f"{each}: {what}" for each in tokens for what in ("/ dense", "no tokens / dense", f"/ {PEER}")]
    return [
        f"Steps with `{OURS}`, and with no tokens to read, as shares of others' time. Other machines had the commits "
        "that stand with them.",
        "",
        *table(["model", "machine, date, commit", *head], rows, 2),
    ]


def _draw(figure: Figure, models: Mapping[str, Any]) -> None:
    figure.set_size_inches(8, 1.4 + 2.2 * len(models))
    panels = figure.subplots(len(models), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    names = [name for name in COLOURS if name != COPIES]  # whose bars would hide the others'
    for axes, (label, of) in zip(panels, models.items(), strict=True):
        for number, cell in enumerate(of["steps"]):
            for place, name in enumerate(names):
                x = number * (len(names) + 1) + place
                share = ratio(cell["ms"], name, DENSE) if name in cell["ms"] else 0
                axes.bar(x, share, color=COLOURS[name], label=name if not number else None)
                said = f"{share:.2f}" if share else "–"
                white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                axes.text(x, share + 0.02, said, ha="center", va="bottom", fontsize=8, bbox=white)
        middle = (len(names) - 1) / 2
        axes.set_xticks(
            [number * (len(names) + 1) + middle for number in range(len(of["steps"]))],
            [f"{cell['tokens']:,} tokens" for cell in of["steps"]],
        )
        axes.axhline(1, color=BLACK, linewidth=0.8, zorder=0.5)  # behind the bars and their numbers
        axes.set_ylabel("time of a step / dense")
        axes.set_title(label)
    panels[0].legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.12))
