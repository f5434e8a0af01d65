"""What a budget of bits costs each of several trained models: ``python -m bench.models``.

Every model of `bench.material` (or those of ``--model``) reads passages of four kinds of text (`bench.passages`). After
each prompt, the next-token distributions of caches are compared with the dense cache's, on later tokens that are fed in
one forward pass and stay dense. Settings are chosen on half A (``--half A``) and reported on half B.

*Without the rotary mean*: with another basis, of the same texts, that takes no mean off keys at their positions
(docs/adr/0024-a-mean-that-turns.md).

Each passage of a model has its own file in ``--runs``; a stopped run resumes, on the same clean commit. Writes
docs/results/models.{json,md,png}.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from bench.bits import NEVER
from bench.caches import SINKS, WINDOW, Continuation, calibrated
from bench.intervals import with_ends
from bench.material import MODELS, books, last_part, model_path
from bench.passages import HALVES, Passage, passages
from bench.provenance import digest, origin_of, recorded, refuse
from bench.report import BLUE, GREEN, GREY, ORANGE, PINK, Page, parser_of, publish, table
from grace_opt._util.progress import progress_bar
from grace_opt.hf import Quantize, attention_implementation
from grace_opt.hf.models import disable_progress_bars, load_model
from grace_opt.hf.tools.evaluation import stored_bits
from grace_opt.sweep import mean_interval

BITS = (3.0, 2.25, 2.0, 1.0)
#: Rows of bits, by name; with the basis that takes no mean off as well.
OF_BITS = {f"bits={bits:g}": bits for bits in BITS}
STILL = {f"bits={bits:g}, without the rotary mean": bits for bits in (2.25, 1.0)}
INT4 = "int4: Quantize(4)"
ROWS = (*OF_BITS, *STILL, INT4)
USUAL = "bits=2.25"


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of a row's cache; `folder` has the bases."""
    windows = {"recent_window": WINDOW, "sink_tokens": SINKS}
    if name == INT4:
        return {"ratio": 0.0, "quantize": Quantize(4), **windows}
    basis = folder / ("still.safetensors" if name in STILL else "basis.safetensors")
    return {"bits": {**OF_BITS, **STILL}[name], "basis": str(basis), "tail_block": NEVER, **windows}


@torch.no_grad()
def measure(model: PreTrainedModel, passage: Passage, later: int, folder: Path) -> dict[str, Any]:
    """Return what each row's cache stores and predicts, beside the dense one, on the last `later` tokens."""
    text, found = Continuation(model, passage.ids, passage.ids.shape[1] - later), {}
    for name in ROWS:
        cache = text.cache(**settings_of(name, folder))
        found[name] = {"bits": stored_bits(cache).bits} | asdict(text.beside_dense(cache))
    return {"rows": found}


def of_model(
    name: str, label: str, texts: Sequence[Path], args: Any, source: Mapping[str, Any], origins: dict[str, Any]
) -> dict[str, Any]:
    """Return the records of a model's passages; `origins` gets where each comes from."""
    model, tokenizer = load_model(model_path(name))
    folder = args.runs / label
    _, seconds = calibrated(model, tokenizer, folder / "basis.safetensors", source)
    with mock.patch("grace_opt.hf.bases.calibrate.frequencies_of", return_value=[]):
        calibrated(model, tokenizer, folder / "still.safetensors", source, end_to_end=True)
    cut = [each for each in passages(texts, tokenizer, args.tokens) if each.half == args.half][: args.passages]
    weights, found = digest(*model.parameters()), []
    with attention_implementation(model, "grace_sdpa"), progress_bar(None, len(cut)) as show:
        for number, passage in enumerate(cut):
            show(f"{label}, {passage.kind}", number)
            settings = {"weights": weights, "ids": digest(passage.ids), "later": args.later, "rows": list(ROWS)}
            path = folder / f"{passage.half}_{number:02}.json"
            record = recorded(path, settings, source, lambda p=passage: measure(model, p, args.later, folder))
            origins[f"{label}, {passage.name}"] = origin_of(source, record)
            found.append({"kind": passage.kind, "name": passage.name, "rows": record["rows"]})
    return {"weights": weights, "calibration": seconds, "passages": found}


def kl(value: Mapping[str, Any], model: str, row: str) -> list[float]:
    """Return the KL of every passage."""
    return [each["rows"][row]["kl"] for each in value["models"][model]["passages"]]


def mean(value: Mapping[str, Any], model: str, row: str) -> float:
    """Return the mean KL over passages."""
    return statistics.mean(kl(value, model, row))


def page(value: dict[str, Any]) -> Page:
    """Make the page from the numbers."""
    models = list(value["models"])
    worst = max(models, key=lambda each: mean(value, each, USUAL))
    saved = [1 - mean(value, each, USUAL) / mean(value, each, f"{USUAL}, without the rotary mean") for each in models]
    lines = [[row, *(with_ends(mean_interval(kl(value, each, row))) for each in models)] for row in ROWS]
    count = len(value["models"][worst]["passages"])
    kinds = sorted({each["kind"] for each in value["models"][worst]["passages"]})
    by_kind = [[each, *(f"{_of_kind(value, each, kind):.4f}" for kind in kinds)] for each in models]
    return Page(
        title="The same bits on several models",
        picture="KL divergence from the dense cache's next-token distributions by bits per element, a line for each "
        "model, solid with the rotary mean and dotted without",
        headline=f"2.25 bits cost {worst} most: {mean(value, worst, USUAL):.4f} nats",
        draw=lambda figure: _draw(figure, value),
        asked="Do bits cost every model as little?",
        found=f"The worst of {len(models)} at 2.25 bits is {worst}, with a KL of {mean(value, worst, USUAL):.4f} nats "
        f"({', '.join(f'{each}: {mean(value, each, USUAL):.4f}' for each in models)}). Taking off the mean that "
        f"turns with the position saves {min(saved):.0%} to {max(saved):.0%} of it.",
        sure=f"These are {count} passages of {len(kinds)} kinds of text for each model, on "
        "which no setting was chosen; 95 % intervals are over passages. Their weights have 4 bits.",
        tables=table(["cache", *models], lines),
        details=[
            ("By kind of text, at 2.25 bits", table(["model", *kinds], by_kind)),
            (
                "How it is measured",
                [
                    f"Passages of {value['tokens']:,} tokens, of which the last {value['later']} are fed at once on "
                    f"the compressed cache and stay dense; {SINKS} sink tokens, recent window {WINDOW}. A text begins "
                    f"with the token that the model expects there, if it does. Half {value['half']} of each text."
                ],
            ),
        ],
    )


def _of_kind(value: Mapping[str, Any], model: str, kind: str) -> float:
    found = value["models"][model]["passages"]
    return statistics.mean(each["rows"][USUAL]["kl"] for each in found if each["kind"] == kind)


def _draw(figure: Figure, value: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    for model, colour in zip(value["models"], (BLUE, ORANGE, GREEN, PINK), strict=False):
        for rows, style in ((OF_BITS, "o-"), (STILL, "x:")):
            points = sorted((bits, mean(value, model, row)) for row, bits in rows.items())
            label = model if rows is OF_BITS else None
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
    axes.plot([], [], "x:", color=GREY, label="without the rotary mean")
    axes.set_yscale("log")
    axes.set_xlabel("bits per element of coded tokens")
    axes.set_ylabel("KL, nats")
    axes.legend(fontsize=8)


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("models", __doc__)
    parser.add_argument(
        "--model", nargs="+", default=list(MODELS), help="Hub ids, folders or .gguf files (default: all)"
    )
    parser.add_argument("--text", type=Path, nargs="+", help="books as plain text (default: four, fetched)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/models"), help="folder of records (default %(default)s)"
    )
    parser.add_argument("--half", choices=HALVES, default="B", help="which passages (default %(default)s)")
    parser.add_argument("--passages", type=int, help="only the first so many (default: all)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a passage (default %(default)s)")
    parser.add_argument("--later", type=int, default=256, help="of these, fed after the prompt (default %(default)s)")
    args = parser.parse_args(given)
    if not 2 <= args.later < args.tokens:
        raise SystemExit(f"--later {args.later}: give at least 2, and fewer than the {args.tokens} --tokens")

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        disable_progress_bars()
        found, origins = {}, {}
        for name in args.model:
            label = name if name in MODELS else last_part(name)
            found[label] = of_model(name, label, args.text or books(), args, source, origins)
        return {
            "provenance": refuse(origins, args.allow_dirty),
            "models": found,
            **{"tokens": args.tokens, "later": args.later, "half": args.half},
        }

    publish(args, page, measured)


if __name__ == "__main__":
    main()
