"""Whether ``max_kl=`` keeps what it promises: ``python -m bench.max_kl``.

What bits leave on a model is measured once, on the texts that ship with grace_opt (`calibrate.kl`). Then each passage's
prompt is read once and coded with the bits that ``max_kl=`` finds there; the next tokens are fed, and the KL from the
dense cache's next-token distributions is compared with what was asked for. Passages are those of half B of
`bench.passages`, one of each source.

Each passage of a model has its own file in ``--runs``; those of other texts, weights, settings or commits are measured
again. Writes docs/results/max_kl.{json,md,png}. If they are missing, models and texts are downloaded
(`bench.material`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from bench.caches import Continuation, calibrated
from bench.material import books
from bench.passages import Passage, measure_passages, passage_parser, passages
from bench.provenance import digest, origin_of, recorded
from bench.report import BLUE, GREY, ORANGE, Page, table
from bench.several import publish_models
from grace_opt.hf import attention_implementation, calibrate

#: What is asked for, nats per token.
ASKED = (0.0005, 0.002, 0.008)
#: What is asked of the measured KL, as a multiple of that: aims of the mean over passages.
AIM = (0.4, 1.6)


def measure(model: PreTrainedModel, passage: Passage, prompt: int, basis: Path) -> dict[str, dict[str, float]]:
    """Return bits and KL of each of `ASKED`.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    passage : Passage
    prompt : int
        Number of tokens that are read before.
    basis : Path
        Of a basis with its measured KL.
    """
    text, found = Continuation(model, passage.ids, prompt), {}
    for asked in ASKED:
        cache = text.cache(max_kl=asked, basis=basis)
        bits = cache.memory_report().bits
        found[f"{asked:g}"] = {"bits": bits, "kl": text.beside_dense(cache).kl}
    return found


def main(given: Sequence[str] | None = None) -> None:
    args = passage_parser("max_kl", __doc__, models=True).parse_args(given)

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        folder = args.runs / name
        basis, _ = calibrated(model, tokenizer, folder / "basis.safetensors", source)

        def curve() -> dict[str, Any]:
            began = time.perf_counter()
            kl = calibrate.kl(model, basis, tokenizer).kl
            return {"curve": kl.tolist(), "seconds": time.perf_counter() - began}  # type: ignore[union-attr]

        about = {"weights": digest(*model.parameters()), "basis": digest(*basis.key_rates.values())}
        record = recorded(folder / "curve.json", about, source, curve)
        path = folder / "basis_with_kl.safetensors"
        replace(basis, kl=torch.tensor(record["curve"], dtype=torch.float64)).save(path)
        every = passages(args.text or books(), tokenizer, args.prompt + args.tokens)
        cut = [each for each in every if each.half == "B"][: args.passages]
        settings = {**about, "asked": ASKED, "prompt": args.prompt, "curve": record["curve"]}
        with attention_implementation(model, "grace_sdpa"):
            found, origins = measure_passages(
                cut, folder, settings, source, lambda passage: measure(model, passage, args.prompt, path)
            )
        origins["curve"] = origin_of(source, record)
        return {"curve": record["curve"], "seconds": record["seconds"], "passages": found}, origins

    publish_models(args, page, {"asked": ASKED, "prompt": args.prompt, "tokens": args.tokens}, measured)


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, Any] = value["models"]
    names = [f"{asked:g}" for asked in value["asked"]]
    ratios = {
        label: {name: [one["kl"][name]["kl"] / float(name) for one in of["passages"]] for name in names}
        for label, of in models.items()
    }
    means = {label: {name: statistics.fmean(each) for name, each in of.items()} for label, of in ratios.items()}
    low, high = (pick(each for of in means.values() for each in of.values()) for pick in (min, max))
    every = [each for of in ratios.values() for one in of.values() for each in one]
    inside = sum(AIM[0] <= each <= AIM[1] for each in every)
    rows = []
    for label, of in models.items():
        for name in names:
            bits, own = statistics.fmean(one["kl"][name]["bits"] for one in of["passages"]), ratios[label][name]
            spread = f"{min(own):.2f} to {max(own):.2f}"
            rows.append([label, name, f"{bits:.2f}", f"{means[label][name]:.2f}", spread])
    count = len(next(iter(models.values()))["passages"])
    return Page(
        title="A KL that is asked for",
        picture="KL divergence of each passage over what was asked for, on a logarithmic scale, a panel per model; "
        f"a bar for the mean, and grey from {AIM[0]} to {AIM[1]}",
        headline=f"The mean KL of {count} passages is {low:.2f} to {high:.2f} times what `max_kl=` was asked for, on "
        f"{len(models)} models",
        draw=lambda figure: _draw(figure, ratios),
        asked="`max_kl=0.002` finds the bits that leave a KL of .002: what is left on other text?",
        found=f"The mean over passages is {low:.2f} to {high:.2f} times what was asked for, over {len(models)} models "
        f"and {', '.join(names)} nats (our aim: {AIM[0]} to {AIM[1]}). Of single passages, {inside} of {len(every)} "
        f"are within that; they reach from {min(every):.2f} to {max(every):.2f}.",
        sure=f"{count} passages of 4 kinds of text for each model, {value['prompt']:,} tokens each, and "
        f"{value['tokens']} of their own next tokens. What bits leave was measured on six other texts.",
        tables=table(["model", "asked", "bits", "KL / asked, mean", "single passages"], rows, 1),
        details=[
            (
                "What was measured once for each model",
                [
                    *table(
                        ["model", *(f"{bits:g} bits" for bits, _ in next(iter(models.values()))["curve"]), "seconds"],
                        [
                            [label, *(f"{kl:.5f}" for _, kl in of["curve"]), f"{of['seconds']:.0f}"]
                            for label, of in models.items()
                        ],
                    ),
                    "",
                    "KL, nats, by bits: means over the six texts that ship with grace_opt, on tokens that the basis "
                    "is not made of.",
                ],
            )
        ],
    )


def _draw(figure: Figure, ratios: dict[str, dict[str, list[float]]]) -> None:
    figure.set_size_inches(max(6.0, 3.0 * len(ratios)), 3.6)
    panels = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
    for axes, (label, of) in zip(panels, ratios.items(), strict=True):
        axes.axhspan(*AIM, color=GREY, alpha=0.25, linewidth=0)
        axes.axhline(1, color=GREY, linewidth=1)
        for place, own in enumerate(of.values()):
            axes.plot([place] * len(own), own, "o", color=BLUE, alpha=0.6, markersize=5)
            axes.plot(place, statistics.fmean(own), "_", color=ORANGE, markersize=24, markeredgewidth=3)
        axes.set_yscale("log")
        axes.set_yticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
        axes.minorticks_off()
        axes.set_xticks(range(len(of)), list(of))
        axes.set_xlim(-0.5, len(of) - 0.5)
        axes.set_xlabel("KL asked for, nats")
        axes.set_title(label)
    panels[0].set_ylabel("measured / asked")


if __name__ == "__main__":
    main()
