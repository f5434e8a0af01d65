"""Learned masks: ``python -m bench.learned`` compares `learn_masks` with `calibrate` and with channels per prompt.

Masks are learned, and calibrated, on one passage of each source of `bench.passages`, from its first half. Two passages
of its second half are read, pruned with each mask at each ratio, and continued with the text's own next tokens: how far
are the next-token distributions from the dense cache's?

Masks and passages have their own files in ``--runs``; those of other texts, weights, settings or commits are made
again. Writes docs/results/learned.{json,md,png}. If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and
the texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from bench.caches import Continuation
from bench.intervals import with_ends
from bench.material import books, open_model
from bench.passages import later_passages, measure_passages, passage_parser, passages
from bench.provenance import digest, origin_of, recorded, refuse
from bench.report import BLUE, GREEN, GREY, ORANGE, Page, publish, table
from grace_opt.attention.masks import ChannelMask
from grace_opt.hf import attention_implementation, calibrate, learn_masks
from grace_opt.sweep import Interval, mean_interval, paired_interval

LEARNED, CALIBRATED = "learned (`learn_masks`)", "calibrated, MIES"
CALIBRATED_GRACE, PROMPT = "calibrated, GRACE", "per prompt, GRACE"
_LOOKS = {LEARNED: (BLUE, "-"), CALIBRATED: (ORANGE, "-"), CALIBRATED_GRACE: (GREY, ":"), PROMPT: (GREEN, "--")}
#: Shares of the channels that are pruned.
RATIOS = (0.5, 0.6, 0.7)
Maker = Callable[[PreTrainedModel, list[Tensor], float, tuple[int, int]], ChannelMask]
#: Masks that serve every prompt.
MAKERS: Mapping[str, Maker] = {
    LEARNED: lambda model, texts, ratio, steps: learn_masks(model, texts=texts, ratio=ratio, steps=steps),
    CALIBRATED: lambda model, texts, ratio, steps: calibrate.masks(model, texts=texts, method="mies", ratio=ratio),
    CALIBRATED_GRACE: lambda model, texts, ratio, steps: calibrate.masks(
        model, texts=texts, method="grace", ratio=ratio
    ),
}


def made(
    model: PreTrainedModel,
    texts: list[Tensor],
    steps: tuple[int, int],
    runs: Path,
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
) -> tuple[dict[str, dict[float, ChannelMask]], dict[str, dict[str, Any]]]:
    """Return the masks by name and ratio, and the record of each, its seconds among them.

    Parameters
    ----------
    model : PreTrainedModel
    texts : list of Tensor
        To learn from, ``(1, L)`` each.
    steps : (int, int)
        Of learning.
    runs : Path
        Folder of the records.
    settings, source : mapping
        As in `recorded`.
    """
    masks: dict[str, dict[float, ChannelMask]] = {name: {} for name in MAKERS}
    records = {}
    for place, (name, make) in enumerate(MAKERS.items()):
        for ratio in RATIOS:
            path = runs / f"mask_{place}_{ratio:g}.json"
            file = path.with_suffix(".safetensors")

            def learn(make: Maker = make, ratio: float = ratio, file: Path = file) -> dict[str, float]:
                began = time.perf_counter()
                mask = make(model, texts, ratio, steps)
                seconds = time.perf_counter() - began
                mask.save(file)
                return {"seconds": seconds}

            about = {**settings, "name": name, "ratio": ratio, "steps": list(steps)}
            records[f"{name}, {ratio:g}"] = record = recorded(path, about, source, learn, beside=file)
            masks[name][ratio] = ChannelMask.load(file)
            print(f"{name}, ratio {ratio:g}: {record['seconds']:.0f} s", flush=True)
    return masks, records


def measure(
    model: PreTrainedModel, ids: Tensor, prompt: int, masks: Mapping[str, Mapping[float, ChannelMask]]
) -> dict[str, dict[str, float]]:
    """Return the KL divergence of each choice of channels at each ratio, in nats per token.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    ids : Tensor
        ``(1, n)``.
    prompt : int
        Number of tokens that are read before.
    masks : mapping
        By name and ratio.
    """
    text = Continuation(model, ids, prompt)
    found = {name: {f"{ratio:g}": text.kl(masks=each[ratio]) for ratio in RATIOS} for name, each in masks.items()}
    return {**found, PROMPT: {f"{ratio:g}": text.kl(method="grace", ratio=ratio) for ratio in RATIOS}}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    cases = value["passages"]
    ratios = list(cases[0]["kl"][LEARNED])
    kl = {name: {ratio: [one["kl"][name][ratio] for one in cases] for ratio in ratios} for name in _LOOKS}
    against = {
        other: {ratio: paired_interval(kl[LEARNED][ratio], kl[other][ratio], compare="ratio") for ratio in ratios}
        for other in (CALIBRATED, CALIBRATED_GRACE, PROMPT)
    }
    rows = []
    for other, by_ratio in against.items():
        for ratio in ratios:
            wins = sum(a < b for a, b in zip(kl[LEARNED][ratio], kl[other][ratio], strict=True))
            rows.append([other, f"{float(ratio):.0%}", with_ends(by_ratio[ratio], ".2f"), f"{wins} of {len(cases)}"])
    shares = " / ".join(f"{float(ratio):.0%}" for ratio in ratios)
    seconds = {name: [value["seconds"][f"{name}, {ratio}"] for ratio in ratios] for name in _LOOKS if name != PROMPT}
    return Page(
        title="Learned masks",
        picture="KL divergence from the dense cache's next-token distributions by share of channels pruned, for "
        "learned and calibrated masks and for channels chosen per prompt",
        headline=f"Learned masks have {_times(list(against[CALIBRATED].values()))} the KL of calibrated ones, with "
        f"{shares} of the channels pruned",
        draw=lambda figure: _draw(figure, kl, ratios),
        asked=f"How close to the dense cache does {value['model']} stay with static masks that are learned, beside "
        "calibrated ones, and beside channels chosen for each prompt?",
        found=f"With {shares} of the channels pruned, learned masks have "
        f"{_times(list(against[CALIBRATED].values()))} the KL divergence of calibrated ones (MIES), and "
        f"{_times(list(against[PROMPT].values()))} that of channels chosen per prompt by GRACE. Learning takes "
        f"{statistics.fmean(seconds[LEARNED]) / 60:.1f} minutes for each ratio, calibrating "
        f"{statistics.fmean(seconds[CALIBRATED]) / 60:.1f}.",
        sure=f"This is one small model and {len(cases)} passages of books, code and generated text, each with "
        f"{value['tokens']} of its own next tokens; intervals are 95 %, over passages. Masks come from other passages "
        "of the same sources: on other kinds of text they may be worse.",
        tables=[
            *table(
                ["channels", *(f"KL, {float(ratio):.0%} pruned" for ratio in ratios), "seconds to make"],
                [
                    [
                        name,
                        *(with_ends(mean_interval(kl[name][ratio])) for ratio in ratios),
                        f"{statistics.fmean(seconds[name]):.0f}" if name in seconds else "–",
                    ]
                    for name in _LOOKS
                ],
            ),
            "",
            *table(["learned beside", "pruned", "KL, ratio to it", "passages where lower"], rows),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"A prompt of {value['prompt']:,} tokens is read, its keys are pruned but for the last 32, and "
                    f"{value['tokens']} tokens are fed. Masks are made from {value['learned_on']:,} tokens of "
                    f"{value['sources']} passages, one from the first half of each source; prompts are from the "
                    f"second halves. Learning takes {' and '.join(map(str, value['steps']))} steps in each layer. "
                    "Every head keeps the same number of channels in all rows.",
                ],
            ),
        ],
    )


def _times(found: list[Interval]) -> str:
    return " / ".join(f"{each.estimate:.2f}" for each in found) + " times"


def _draw(figure: Figure, kl: dict[str, dict[str, list[float]]], ratios: list[str]) -> None:
    axes, places = figure.subplots(), [float(ratio) for ratio in ratios]
    for name, (colour, line) in _LOOKS.items():
        means = [statistics.fmean(kl[name][ratio]) for ratio in ratios]
        axes.plot(places, means, "o", color=colour, linestyle=line, label=name.replace("`", ""))
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:.0%}" for place in places])
    axes.set_xlabel("channels pruned")
    axes.set_ylabel("KL, nats")
    axes.legend()


def main(given: Sequence[str] | None = None) -> None:
    parser = passage_parser("learned", __doc__)
    parser.add_argument("--learn", type=int, default=1536, help="tokens of each source to learn from (%(default)s)")
    parser.add_argument("--steps", type=int, nargs=2, default=(200, 60), help="steps of both stages (default 200 60)")
    args = parser.parse_args(given)
    if args.prompt < 64 or args.tokens < 2 or args.learn < 128:
        raise SystemExit(
            f"--prompt {args.prompt} --tokens {args.tokens} --learn {args.learn}: give prompts of at least 64 tokens, "
            "2 tokens after them, and 128 of each source to learn from"
        )

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        model, tokenizer, name = open_model(args)
        texts = args.text or books()
        learned_on = [each.ids for each in passages(texts, tokenizer, args.learn) if each.half == "A"]
        cut = later_passages(texts, tokenizer, args.prompt + args.tokens)[: args.passages]
        common = {"weights": digest(*model.parameters()), "learned_on": digest(*learned_on)}
        with attention_implementation(model, "grace_sdpa"):
            masks, records = made(model, learned_on, tuple(args.steps), args.runs, common, source)
            settings = {**common, "steps": list(args.steps), "prompt": args.prompt}
            found, origins = measure_passages(
                cut, args.runs, settings, source, lambda passage: measure(model, passage.ids, args.prompt, masks)
            )
        origins |= {what: origin_of(source, record) for what, record in records.items()}
        return {
            "provenance": refuse(origins, args.allow_dirty),
            **{"model": name, "weights": common["weights"]},
            **{"learned_on": sum(ids.shape[1] for ids in learned_on), "sources": len(learned_on)},
            **{"steps": list(args.steps), "prompt": args.prompt, "tokens": args.tokens},
            "seconds": {what: record["seconds"] for what, record in records.items()},
            "passages": found,
        }

    publish(args, page, measured)


if __name__ == "__main__":
    main()
