"""Whether ``grace-opt tune`` keeps what it promises on texts that it did not see: ``python -m bench.tune``.

`grace_opt.hf.tune` measures settings on windows of the texts of `bench.passages`: books, Python, JSON, numbered lines.
Each text is left out in turn: a setting is recommended for a KL on the windows of the others, and its KL and bytes on
the text that was left out are compared with what was asked for, and with the smallest setting that would have kept it
there. Everything is measured once, and then only averaged in other ways.

Measurements are kept in ``--runs``, one file each, for a commit; a stopped run goes on where it was. Writes
docs/results/tune.{json,md,png}. If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and the texts are
downloaded (`bench.material`).
"""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from matplotlib.figure import Figure
from transformers import PreTrainedModel

from bench.caches import calibrated
from bench.intervals import with_ends
from bench.material import books, open_model
from bench.passages import sources
from bench.provenance import digest, is_clean
from bench.report import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, Page, parser_of, publish, table
from grace_opt.hf import tune
from grace_opt.hf.tools.tune import Target
from grace_opt.hf.tools.tune.candidates import default_candidates
from grace_opt.hf.tools.tune.recommend import choose
from grace_opt.hf.tools.tune.windows import LATER
from grace_opt.sweep import mean_interval

#: What is asked for, nats; the first is the default of `tune`.
TARGETS = (0.005, 0.0025, 0.01, 0.02)
#: How far the KL on a text that was left out may be above what was asked for, and bytes above the best (our aims).
KL_AIM, BYTES_AIM = 1.5, 1.1
COLOURS, MARKERS = (BLUE, ORANGE, GREEN, PINK, SKY, BLACK), ("o", "s", "D", "^", "v", "P", "X")
#: What is kept of each window: the share of the bytes, and the KL; in this order, as `choose` takes them.
KEPT = ("share", "kl")


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Mapping[str, str],
    basis: Path,
    folder: Path,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measure all settings on windows of all texts.

    Returns
    -------
    dict
        ``texts``, the name of each window's text; ``settings``, by name the share of the bytes and the KL on each
        window;
        ``left_out``, by name why a setting was not measured.
    """
    candidates = [one for one in default_candidates(args.tokens - args.later, basis=str(basis)) if one.config]
    result = tune(
        model,
        tokenizer,
        texts,
        candidates=candidates,
        windows=args.windows * len(texts),
        tokens=args.tokens,
        later=args.later,
        folder=folder,
    )
    if result.interrupted:
        raise SystemExit("interrupted: what was measured is kept, and the same command goes on from there")
    names = [row.name for row in result.rows]
    places = range(len(result.windows))
    settings = {
        name: {key: [result.measured[name, place][0][key] for place in places] for key in KEPT} for name in names
    }
    return {
        "texts": [str(one["name"]).partition(", tokens ")[0] for one in result.windows],
        "settings": settings,
        "left_out": dict(result.left_out),
    }


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


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    every = {target: left_out_in_turn(value, target) for target in TARGETS}
    found = {target: summary(rows, target) for target, rows in every.items()}
    first, texts = found[TARGETS[0]], list(dict.fromkeys(value["texts"]))
    worst = max(one["worst_kl"] for one in found.values())
    bytes_over = max(one["mean_bytes"] for one in found.values())
    rows = [
        [
            f"{target:g}", f"{one['texts']} of {len(texts)}", f"{one['mean_kl']:.2f}", f"{one['worst_kl']:.2f}",
            f"{one['mean_bytes']:.3f}", f"{one['worst_bytes']:.3f}",
        ]
        for target, one in found.items()
    ]  # fmt: skip
    details = []
    for target, held in every.items():
        lines = [
            [
                one["text"], one["setting"], f"{one['said']:.4f}", f"{one['kl']:.4f}", f"{one['kl'] / target:.2f}",
                f"{one['share']:.1%}", one["best"] or "none",
                f"{one['share'] / one['least']:.3f}" if one["least"] is not None else "–",
            ]
            for one in held
        ]  # fmt: skip
        head = [
            "left out",
            "recommended",
            "KL on the others",
            "KL on it",
            "/ asked",
            "bytes",
            "smallest there",
            "bytes /",
        ]
        details.append((f"Each text left out in turn, KL ≤ {target:g}", table(head, lines, 2)))
    measured = [
        [name, f"{statistics.fmean(cells['share']):.1%}", with_ends(mean_interval(cells["kl"]))]
        for name, cells in sorted(value["settings"].items(), key=lambda item: statistics.fmean(item[1]["share"]))
    ]
    windows = len(value["texts"])
    left = "; ".join(f"{name}: {why}" for name, why in value["left_out"].items()) or "none"
    return Page(
        title="Does a recommended setting keep what was asked for on other text?",
        picture="KL on the text that was left out against the KL that was asked for, a point for each text; a line "
        f"where both are equal, and one at {KL_AIM:g} times as much",
        headline=f"On text that was left out, the KL is {first['mean_kl']:.2f} times what was asked for in the mean, "
        f"{first['worst_kl']:.2f} times at most (KL ≤ {TARGETS[0]:g})",
        draw=lambda figure: _draw(figure, every, texts),
        asked=f"`grace-opt tune` recommends the smallest cache that keeps a KL on {len(texts) - 1} texts: what is its "
        f"KL on another, and how much smaller could it have been, on {value['model']}?",
        found=f"With the default target, {TARGETS[0]:g}, the KL on the text that was left out is "
        f"{first['mean_kl']:.2f} times what was asked for in the mean, and {first['worst_kl']:.2f} times at most; the "
        f"cache takes {first['mean_bytes']:.3f} times the bytes of the smallest measured setting that would have kept "
        f"it there. Over all targets, {worst:.2f} times at most (our aim: {KL_AIM:g}) and {bytes_over:.3f} times the "
        f"bytes (mean over texts, of the worst target; our aim: {BYTES_AIM:g}).",
        sure=f"This is one small model and {len(texts)} texts with {windows // len(texts)} windows each, of "
        f"{value['tokens']:,} tokens; kinds of text that are not here may differ more.",
        tables=[
            *table(
                ["asked: KL at most", "texts", "KL / asked, mean", "worst", "bytes / smallest, mean", "worst"], rows
            ),
            "*Texts*: those for which a setting keeps the target on all the others. *Bytes / smallest*: beside the "
            "smallest measured setting that keeps the target on the text itself.",
        ],
        details=[
            *details,
            ("All settings, on all texts", table(["setting", "bytes", "KL"], measured)),
            (
                "How it is measured",
                [
                    f"As `grace-opt tune` does: windows of {value['tokens']:,} tokens, of which {value['later']} are "
                    "fed after the rest was compressed, with hidden facts in it; means over windows; bytes as if the "
                    f"model had 16 bits. Texts: {', '.join(texts)}. Settings that could not be measured: {left}."
                ],
            ),
        ],
    )


def _draw(figure: Figure, every: Mapping[float, Sequence[Mapping[str, Any]]], texts: Sequence[str]) -> None:
    figure.set_size_inches(8, 4.2)
    axes = figure.subplots()
    targets = sorted(every)
    axes.plot(targets, targets, color="0.4", linewidth=1, label="as asked")
    axes.plot(targets, [KL_AIM * one for one in targets], color="0.4", linestyle=":", label=f"{KL_AIM:g} times")
    for number, text in enumerate(texts):
        held = [next(row for row in every[target] if row["text"] == text) for target in targets]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        shift = 1.02 ** (number - len(texts) / 2)  # beside one another
        places = [target * shift for target in targets]
        axes.plot(
            places,
            [row["kl"] for row in held],
            marker,
            color=colour,
            markersize=5,
            label=shorten(text, 34, placeholder=" …"),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("KL asked for, nats")
    axes.set_ylabel("KL on the text that was left out")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("tune", __doc__, model=True)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a window (default %(default)s)")
    parser.add_argument("--later", type=int, default=LATER, help="those fed afterwards (default %(default)s)")
    parser.add_argument("--windows", type=int, default=2, help="windows of each text (default %(default)s)")
    args = parser.parse_args(given)

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        model, tokenizer, name = open_model(args)
        basis = args.runs / "basis.safetensors"
        made, _ = calibrated(model, tokenizer, basis, source)
        # Records belong to a commit; if files differ from it, nothing is used again.
        folder = args.runs / (str(source["commit"]) if is_clean(source) else secrets.token_hex(8))
        texts = {title: text for _, title, text in sources(args.text or books(), args.tokens, 0)}
        return {
            **{"model": name, "weights": digest(*model.parameters()), "tokens": args.tokens, "later": args.later},
            "calibration": {"texts": made.texts, "tokens": made.tokens},
            **measure(model, tokenizer, texts, basis, folder, args),
        }

    publish(args, page, measured)


if __name__ == "__main__":
    main()
