"""What a calibration takes, and what its thrift costs: ``python -m bench.calibration_cost``.

Bases of `calibrate.basis` from more and fewer tokens, and with and without gaps between positions, on three families of
models. Each is used with 2.25 bits on the passages of half B (`bench.passages`), whose prompts are read once. Seconds
are of the processor, in one thread, as a machine may have others to serve: the fewer of two, from the first to the last
and back again, so that what slows the processor for a while slows no single one.

Each model has its own file in ``--runs``; those of other texts, weights, settings or commits are measured again. Writes
docs/results/calibration_cost.{json,md,png}. If they are missing, models and texts are downloaded
(`bench.material`).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from bench.bits import NEVER
from bench.caches import SINKS, WINDOW, Continuation
from bench.material import books
from bench.passages import Passage, passages
from bench.provenance import digest, origin_of, recorded
from bench.report import BLUE, GREEN, ORANGE, Page, parser_of, table
from bench.several import publish_models
from grace_opt._util.progress import progress_bar
from grace_opt.hf import attention_implementation, calibrate
from grace_opt.hf.bases import calibrate as calibration

BITS = 2.25


@dataclass(frozen=True)
class Variant:
    """How much of each text is read, how many of its tokens have gradients, and whether positions have gaps."""

    tokens: int
    later: int
    gaps: bool = True


#: The first is what others are compared with.
VARIANTS = {
    "2,048 tokens, 512 with gradients": Variant(2048, 512),
    "1,024 tokens, 64 with gradients": Variant(1024, 64),
    "the same, without gaps": Variant(1024, 64, gaps=False),
    "512 tokens, 64 with gradients": Variant(512, 64),
}
DEFAULT = next(name for name, each in VARIANTS.items() if each == Variant(calibration.TOKENS, calibration.LATER))


def measure(model: PreTrainedModel, tokenizer: Any, found: Sequence[Passage], later: int) -> dict[str, Any]:
    """Return, by variant, the seconds of its calibration and the KL of each passage.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : callable
    found : sequence of Passage
    later : int
        Tokens of each that are fed after the prompt.
    """
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, progress_bar(None, 2 * len(VARIANTS) + len(found)) as show:
        for done, name in enumerate((*VARIANTS, *reversed(VARIANTS))):
            show("calibrations", done)
            each = VARIANTS[name]
            changes: dict[str, Any] = {"LATER": each.later}
            if not each.gaps:
                changes["places"] = lambda *_: None
            with mock.patch.multiple(calibration, **changes):
                began = time.process_time()
                basis = calibrate.basis(model, tokenizer, tokens=each.tokens)
                seconds = time.process_time() - began
            row = rows.setdefault(name, {"seconds": seconds, "tokens": basis.tokens, "kl": []})
            row["seconds"] = min(row["seconds"], seconds)
            basis.save(Path(folder) / f"{list(VARIANTS).index(name)}.safetensors")
        windows = {"recent_window": WINDOW, "sink_tokens": SINKS, "tail_block": NEVER}
        with attention_implementation(model, "grace_sdpa"):
            for done, passage in enumerate(found, 2 * len(VARIANTS)):
                show("passages", done)
                text = Continuation(model, passage.ids, passage.ids.shape[1] - later)
                for number, row in enumerate(rows.values()):
                    row["kl"].append(text.kl(bits=BITS, basis=f"{folder}/{number}.safetensors", **windows))
    return {"passages": [each.name for each in found], "rows": rows}


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return, by variant, seconds and mean KL as multiples of the first variant's."""
    first = next(iter(rows.values()))
    return {
        name: (row["seconds"] / first["seconds"], statistics.mean(row["kl"]) / statistics.mean(first["kl"]))
        for name, row in rows.items()
    }


def page(value: dict[str, Any]) -> Page:
    """Make the page from the numbers."""
    passages = [len(each["passages"]) for each in value["models"].values()]
    by_model = {name: ratios(each["rows"]) for name, each in value["models"].items()}
    seconds, kl = ([every[DEFAULT][which] for every in by_model.values()] for which in (0, 1))
    bare = [every["the same, without gaps"][1] for every in by_model.values()]
    lines = [
        [
            model,
            name,
            f"{row['seconds']:.1f}",
            f"{by_model[model][name][0]:.2f}",
            f"{statistics.mean(row['kl']):.5f}",
            f"{by_model[model][name][1]:.2f}",
        ]
        for model, each in value["models"].items()
        for name, row in each["rows"].items()
    ]
    return Page(
        title="What a calibration takes",
        picture="KL at 2.25 bits by the processor's seconds of a calibration, both as multiples of those of the most "
        "thorough one, a line for each model",
        headline=f"The default calibration (circled) takes {_span(seconds)} of the most thorough one's time, for "
        f"{_span(kl)} times its KL",
        draw=lambda figure: _draw(figure, by_model),
        asked="A basis for `bits=` is calibrated once per model. How few tokens do?",
        found=f"1,024 tokens of each text, 64 with gradients, take {_span(seconds)} of the time of 2,048 with 512, for "
        f"{_span(kl)} times the KL; without gaps between positions it is {_span(bare)} times.",
        sure=f"These are {len(by_model)} models and {passages[0]} passages each. The same calibration with other "
        "sampled tokens moves the KL by some five percent, so differences below that say nothing.",
        tables=[
            *table(["model", "calibration", "CPU seconds", "× first", "KL", "× first"], lines, words=2),
            "",
            "KL: mean over passages, of next-token distributions from the dense cache's, in nats.",
        ],
        details=[
            (
                "How it is measured",
                [
                    f"One thread, the six texts that ship with grace_opt. Passages of {value['tokens']:,} tokens, of "
                    f"which the last {value['later']} are fed at once on the compressed cache and stay dense; "
                    f"{SINKS} sink tokens, recent window {WINDOW}. Models with sliding windows have no gaps: their "
                    "texts begin at different positions."
                ],
            )
        ],
    )


def _span(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.2f} to {max(numbers):.2f}" if len(numbers) > 1 else f"{numbers[0]:.2f}"


def _draw(figure: Figure, by_model: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    axes = figure.subplots()
    for (model, every), colour in zip(by_model.items(), (BLUE, ORANGE, GREEN), strict=False):
        with_gaps = sorted(every[name] for name, each in VARIANTS.items() if each.gaps)
        axes.plot(*zip(*with_gaps, strict=True), "o-", color=colour, label=model)
        axes.plot(*every["the same, without gaps"], "x", color=colour, label=f"{model}, without gaps")
        axes.plot(*every[DEFAULT], "o", color=colour, markersize=11, markerfacecolor="none")
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_xlabel("CPU seconds, as a share of the most thorough calibration's")
    axes.set_ylabel("KL at 2.25 bits, as a multiple")
    axes.legend(fontsize=7)


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("calibration_cost", __doc__, models=True)
    parser.add_argument("--tokens", type=int, default=2048, help="of a passage (default %(default)s)")
    parser.add_argument("--later", type=int, default=256, help="of these, fed after the prompt (default %(default)s)")
    args = parser.parse_args(given)
    if not 2 <= args.later < args.tokens:
        raise SystemExit(f"--later {args.later}: give at least 2, and fewer than the {args.tokens} --tokens")

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        torch.set_num_threads(1)
        cut = [each for each in passages(args.text or books(), tokenizer, args.tokens) if each.half == "B"]
        ids = digest(*(each.ids for each in cut))
        settings = {"weights": digest(*model.parameters()), "ids": ids, "later": args.later}
        record = recorded(
            args.runs / f"{name}.json", settings, source, lambda: measure(model, tokenizer, cut, args.later)
        )
        return {part: record[part] for part in ("passages", "rows")}, {name: origin_of(source, record)}

    publish_models(args, page, {"tokens": args.tokens, "later": args.later}, measured)


if __name__ == "__main__":
    main()
