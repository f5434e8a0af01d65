"""Learned masks: ``python -m bench.learned`` compares `learn_masks` with `calibrate` and with channels per prompt.

Masks are learned, and calibrated, on one passage of each source of `bench.passages`, from its first half. Two passages
of its second half are read, pruned with each mask at each ratio, and continued with the text's own next tokens: how far
are the next-token distributions from the dense cache's?

Masks and passages have their own files in ``--runs``; those of other texts, weights, settings or commits are made
again. Writes docs/results/learned.{json,md,png}. If they are missing, models and texts are downloaded
(`bench.material`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from operator import lt
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from bench.caches import Continuation
from bench.evictions_page import by_name, draw_models, worst_of
from bench.intervals import with_ends
from bench.material import books
from bench.passages import later_passages, measure_passages, passage_parser, passages
from bench.provenance import digest, origin_of, recorded
from bench.report import BLUE, GREEN, GREY, ORANGE, Page, table
from bench.several import publish_models
from grace_opt.attention.masks import ChannelMask
from grace_opt.hf import attention_implementation, calibrate, learn_masks
from grace_opt.sweep import mean_interval, paired_interval

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
    models: dict[str, Any] = value["models"]
    kl = {label: by_name(of["passages"]) for label, of in models.items()}
    ratios = list(next(iter(kl.values()))[LEARNED])
    shares, several = [f"{float(ratio):.0%}" for ratio in ratios], len(models) > 1
    pruned, counts = " / ".join(shares), sorted({str(len(of["passages"])) for of in models.values()})
    times = {
        other: {
            label: [paired_interval(own[LEARNED][ratio], own[other][ratio], compare="ratio") for ratio in ratios]
            for label, own in kl.items()
        }
        for other in (CALIBRATED, CALIBRATED_GRACE, PROMPT)
    }
    seconds = {
        label: {name: statistics.fmean(of["seconds"][f"{name}, {ratio}"] for ratio in ratios) for name in MAKERS}
        for label, of in models.items()
    }
    minutes = {name: _span([of[name] / 60 for of in seconds.values()]) for name in MAKERS}
    rows, against = [], []
    for label, own in kl.items():
        for name, of in own.items():
            made = f"{seconds[label][name]:.0f}" if name in MAKERS else "–"
            rows.append([label, name, *(with_ends(mean_interval(each)) for each in of.values()), made])
        for other, by_model in times.items():
            found, wins = by_model[label], (str(sum(map(lt, own[LEARNED][at], own[other][at]))) for at in ratios)
            lower = f"{' / '.join(wins)} of {found[0].n}"
            against.append([label, other, *(with_ends(each, ".2f") for each in found), lower])
    worst, said, others = worst_of(times[CALIBRATED])
    worst_prompt, said_prompt, _ = worst_of(times[PROMPT])
    return Page(
        title="Learned masks",
        picture="KL divergence from the dense cache's next-token distributions by share of channels pruned, for "
        "learned and calibrated masks and for channels chosen per prompt, a panel per model",
        headline=f"Learned masks have {said} times the KL of calibrated ones, with {pruned} of the channels pruned"
        + f" ({worst}, the worst of {len(models)} models)" * several,
        draw=lambda figure: draw_models(figure, kl, _LOOKS, "channels pruned"),
        asked="How close to the dense cache does a model stay with static masks that are learned, beside calibrated "
        "ones, and beside channels chosen for each prompt?",
        found=f"With {pruned} of the channels pruned, learned masks have {said} times the KL divergence of calibrated "
        f"ones (MIES) on {worst}{f', where they do worst ({others})' if others else ''}. "
        f"{'At worst, on' if several else 'On'} {worst_prompt}, they have {said_prompt} times that of channels "
        f"chosen per prompt by GRACE. Learning takes {minutes[LEARNED]} minutes for each ratio, calibrating "
        f"{minutes[CALIBRATED]}.",
        sure=f"Measured on {len(models)} small model{'s' * several} and {' or '.join(counts)} passages of books, code "
        f"and generated text{' each' * several}, with {value['tokens']} of their own next tokens; intervals are 95 %, "
        "over passages. Masks come from other passages of the same sources: on other kinds of text they may be worse.",
        tables=[
            *table(["model", "channels", *(f"KL, {each} pruned" for each in shares), "seconds to make"], rows, 2),
            "",
            *table(
                ["model", "learned beside", *(f"KL, ratio to it, {each}" for each in shares), "passages where lower"],
                against,
                2,
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"A prompt of {value['prompt']:,} tokens is read, its keys are pruned but for the last 32, and "
                    f"{value['tokens']} tokens are fed. Masks are made from {value['learn']:,} tokens of the first "
                    "half of each source; prompts are from the second halves. Learning takes "
                    f"{' and '.join(map(str, value['steps']))} steps in each layer. Every head keeps the same number "
                    "of channels in all rows.",
                ],
            ),
        ],
    )


def _span(numbers: Sequence[float]) -> str:
    low, high = (f"{each(numbers):.1f}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def main(given: Sequence[str] | None = None) -> None:
    parser = passage_parser("learned", __doc__, models=True)
    parser.add_argument("--learn", type=int, default=1536, help="tokens of each source to learn from (%(default)s)")
    parser.add_argument("--steps", type=int, nargs=2, default=(200, 60), help="steps of both stages (default 200 60)")
    args = parser.parse_args(given)
    if args.prompt < 64 or args.tokens < 2 or args.learn < 128:
        raise SystemExit(
            f"--prompt {args.prompt} --tokens {args.tokens} --learn {args.learn}: give prompts of at least 64 tokens, "
            "2 tokens after them, and 128 of each source to learn from"
        )
    settings = {"learn": args.learn, "steps": args.steps, "prompt": args.prompt, "tokens": args.tokens}

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        texts, runs = args.text or books(), args.runs / name
        learned_on = [each.ids for each in passages(texts, tokenizer, args.learn) if each.half == "A"]
        cut = later_passages(texts, tokenizer, args.prompt + args.tokens)[: args.passages]
        common = {"weights": digest(*model.parameters()), "learned_on": digest(*learned_on)}
        with attention_implementation(model, "grace_sdpa"):
            masks, records = made(model, learned_on, tuple(args.steps), runs, common, source)
            found, origins = measure_passages(
                cut,
                runs,
                {**common, **settings},
                source,
                lambda passage: measure(model, passage.ids, args.prompt, masks),
            )
        origins |= {what: origin_of(source, record) for what, record in records.items()}
        return {"seconds": {what: record["seconds"] for what, record in records.items()}, "passages": found}, origins

    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()
