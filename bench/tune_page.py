"""docs/results/tune.md from the measurements of `bench.tune`: each text left out in turn, for each model.

When: the script calls it, after a measurement or with ``--report-only``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any

from matplotlib.figure import Figure

from bench.intervals import with_ends
from bench.report import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, Page, table
from grace_opt.hf.tools.tune import Target
from grace_opt.hf.tools.tune.recommend import choose
from grace_opt.sweep import mean_interval

#: What is asked for, nats; the first is the default of `tune`.
TARGETS = (0.005, 0.0025, 0.01, 0.02)
#: How far the KL on a text that was left out may be above what was asked for, and bytes above the best (our aims).
KL_AIM, BYTES_AIM = 1.5, 1.1
COLOURS, MARKERS = (BLUE, ORANGE, GREEN, PINK, SKY, BLACK), ("o", "s", "D", "^", "v", "P", "X")
#: What of `summary` our aims are for; and what the table has, with numbers of decimal places.
OVER = ("worst_kl", "mean_bytes")
PLACES = {"mean_kl": 2, "worst_kl": 2, "mean_bytes": 3, "worst_bytes": 3}
#: What is kept of each window: the share of the bytes, and the KL; in this order, as `choose` takes them.
KEPT = ("share", "kl")


def left_out_in_turn(value: Mapping[str, Any], target: float) -> list[dict[str, Any]]:
    """Recommend a setting on all texts but one, and see what it does on that one.

    Parameters
    ----------
    value : mapping
        What `measure` returned.
    target : float
        The KL that is asked for.

    Returns
    -------
    list of dict
        For each text: ``setting``, and ``reached``: whether it keeps the target on the others; ``said``, its KL there;
        ``kl`` and ``share`` on the text; ``best`` and ``least``: the smallest setting that keeps the target on the text
        itself, and its share, None if none does.
    """
    names, asked, found = list(value["settings"]), Target("max_kl", target), []
    for text in dict.fromkeys(value["texts"]):
        rest, own = (
            [_means(value, [at for at, one in enumerate(value["texts"]) if (one == text) == here], key) for key in KEPT]
            for here in (False, True)
        )
        place, reached = choose(*rest, asked)
        best, kept = choose(*own, asked)
        found.append(
            {
                **{"text": text, "setting": names[place], "reached": reached, "said": rest[1][place]},
                **{"share": own[0][place], "kl": own[1][place]},
                **{"best": names[best] if kept else None, "least": own[0][best] if kept else None},
            }
        )
    return found


def _means(value: Mapping[str, Any], places: Sequence[int], key: str) -> list[float]:
    """Return the mean of each setting over some windows."""
    return [statistics.fmean(cells[key][at] for at in places) for cells in value["settings"].values()]


def summary(rows: Sequence[Mapping[str, Any]], target: float) -> dict[str, float]:
    """Return the mean and the largest of KL over what was asked for, and of bytes over the best; NaN without any."""
    kl = [row["kl"] / target for row in rows if row["reached"]]
    over = [row["share"] / row["least"] for row in rows if row["reached"] and row["least"] is not None]
    return {
        **{"texts": len(kl), "mean_kl": _mean(kl), "worst_kl": max(kl, default=math.nan)},
        **{"mean_bytes": _mean(over), "worst_bytes": max(over, default=math.nan)},
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _largest(numbers: Iterable[float]) -> float:
    """Return the largest; NaN without any."""
    return max((one for one in numbers if not math.isnan(one)), default=math.nan)


def _said(number: float, places: int = 2) -> str:
    return "–" if math.isnan(number) else f"{number:.{places}f}"


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, Any] = value["models"]
    every = {label: {target: left_out_in_turn(of, target) for target in TARGETS} for label, of in models.items()}
    found = {label: {target: summary(rows, target) for target, rows in of.items()} for label, of in every.items()}
    first = {label: of[TARGETS[0]] for label, of in found.items()}
    worst = max(first, key=lambda label: (first[label]["texts"] > 0, first[label]["worst_kl"]))
    times, others = first[worst], [label for label in first if label != worst]
    beside = "; ".join(
        f"{label}: {_said(first[label]['mean_kl'])} and {_said(first[label]['worst_kl'])}" for label in others
    )
    kept = f"{times['mean_kl']:.2f} times what was asked for in the mean, and {times['worst_kl']:.2f} times at most"
    kept = kept if times["texts"] else "not known, as no setting keeps what was asked for"
    at_worst = f"the worst of {len(models)} models"
    over_kl, over_bytes = (_largest(one[key] for of in found.values() for one in of.values()) for key in OVER)
    texts = list(dict.fromkeys(next(iter(models.values()))["texts"]))
    left = "; ".join(
        f"{name} on {label}: {why}" for label, of in models.items() for name, why in of["left_out"].items()
    )
    return Page(
        title="Does a recommended setting keep what was asked for on other text?",
        picture="KL on the text that was left out against the KL that was asked for, a point for each text, a panel "
        f"per model; a line where both are equal, and one at {KL_AIM:g} times as much",
        headline=f"On text that was left out, the KL is {kept} "
        f"(KL ≤ {TARGETS[0]:g}{f', {worst}, {at_worst}' if others else ''})",
        draw=lambda figure: _draw(figure, every, texts),
        asked=f"`grace-opt tune` recommends the smallest cache that keeps a KL on {len(texts) - 1} texts: what is its "
        "KL on another, and how much smaller could it have been?",
        found=f"On {worst},{f' {at_worst},' if others else ''} the KL on the text that was left out is "
        f"{kept}, with the default target, {TARGETS[0]:g}{f' ({beside})' if others else ''}. Over all targets"
        f"{' and models' if others else ''}, it is {_said(over_kl)} times at most (our aim: {KL_AIM:g}), and the cache "
        f"takes {_said(over_bytes, 3)} times the bytes of the smallest measured setting that would have kept it there "
        f"(mean over texts, where it is largest; our aim: {BYTES_AIM:g}).",
        sure=f"Measured on {', '.join(models)}, on {len(texts)} texts with {value['windows']} windows each, of "
        f"{value['tokens']:,} tokens; kinds of text that are not here may differ more.",
        tables=[
            *table(
                ["model", "asked: KL at most", "texts", "KL / asked, mean", "worst", "bytes / smallest, mean", "worst"],
                [_row(label, target, one, len(texts)) for label, of in found.items() for target, one in of.items()],
            ),
            "*Texts*: those for which a setting keeps the target on all the others. *Bytes / smallest*: beside the "
            "smallest measured setting that keeps the target on the text itself.",
        ],
        details=[
            *(
                (
                    f"Each text left out in turn, KL ≤ {target:g}",
                    _texts({name: of[target] for name, of in every.items()}, target),
                )
                for target in TARGETS
            ),
            ("All settings, on all texts", _settings(models)),
            (
                "How it is measured",
                [
                    f"As `grace-opt tune` does: windows of {value['tokens']:,} tokens, of which {value['later']} are "
                    "fed after the rest was compressed, with hidden facts in it; means over windows; bytes as if the "
                    f"model had 16 bits. Texts: {', '.join(texts)}. Settings that could not be measured: "
                    f"{left or 'none'}."
                ],
            ),
        ],
    )


def _row(label: str, target: float, one: Mapping[str, float], texts: int) -> list[str]:
    numbers = [_said(one[key], places) for key, places in PLACES.items()]
    return [label, f"{target:g}", f"{one['texts']} of {texts}", *numbers]


def _texts(held: Mapping[str, Sequence[Mapping[str, Any]]], target: float) -> list[str]:
    """Return what `left_out_in_turn` found for a target, of each model."""
    rows = [
        [
            label, one["text"], one["setting"], f"{one['said']:.4f}", f"{one['kl']:.4f}", f"{one['kl'] / target:.2f}",
            f"{one['share']:.1%}", one["best"] or "none",
            f"{one['share'] / one['least']:.3f}" if one["least"] is not None else "–",
        ]
        for label, of in held.items()
        for one in of
    ]  # fmt: skip
    head = ["left out", "recommended", "KL on the others", "KL on it", "/ asked", "bytes", "smallest there", "bytes /"]
    return table(["model", *head], rows, 3)


def _settings(models: Mapping[str, Any]) -> list[str]:
    """Return the bytes and the KL of every setting on all texts, two columns for each model."""
    sizes: dict[str, float] = {}
    for of in models.values():
        sizes |= {name: statistics.fmean(cells["share"]) for name, cells in of["settings"].items() if name not in sizes}
    rows = []
    for name in sorted(sizes, key=lambda name: sizes[name]):
        row = [name]
        for of in models.values():
            cells = of["settings"].get(name)
            row += (
                [f"{statistics.fmean(cells['share']):.1%}", with_ends(mean_interval(cells["kl"]))]
                if cells
                else ["–"] * 2
            )
        rows.append(row)
    return table(["setting", *(f"{label}: {what}" for label in models for what in ("bytes", "KL"))], rows)


def _draw(
    figure: Figure, every: Mapping[str, Mapping[float, Sequence[Mapping[str, Any]]]], texts: Sequence[str]
) -> None:
    figure.set_size_inches(3.5 + 3 * len(every), 4.2)
    panels = figure.subplots(1, len(every), sharey=True, squeeze=False)[0]
    targets = sorted(TARGETS)
    for axes, (label, of) in zip(panels, every.items(), strict=True):
        axes.plot(targets, targets, color="0.4", linewidth=1, label="as asked")
        axes.plot(targets, [KL_AIM * one for one in targets], color="0.4", linestyle=":", label=f"{KL_AIM:g} times")
        for number, text in enumerate(texts):
            shift = 1.02 ** (number - len(texts) / 2)  # beside one another
            axes.plot(
                [target * shift for target in targets],
                [next((row["kl"] for row in of[target] if row["text"] == text), math.nan) for target in targets],
                MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                markersize=5,
                label=shorten(text, 34, placeholder=" …"),
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for ticks in (axes.set_xticks, axes.set_yticks):
            ticks(targets, [f"{one:g}" for one in targets])
        axes.minorticks_off()
        axes.set_xlabel("KL asked for, nats")
        axes.set_title(label)
    panels[0].set_ylabel("KL on the text that was left out")
    panels[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
