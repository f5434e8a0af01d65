"""Whether ``guard=`` tells wrong bases from ordinary text: ``python -m bench.guard``.

A model is calibrated on the texts that ship with grace_opt. Then every passage of `bench.passages`, two of each source,
is read and coded, and how unlike the calibration it is is noted for every layer. Of every source's second passage, the
same is done with something wrong: bases of other layers, swapped heads, turned coordinates, keys of changed weights,
keys far out, noise as keys; and with random tokens, which are no text. What is wrong is so in every layer, and each
layer counts by itself, as if it alone were.

Each passage of a model has its own file in ``--runs``; those of other texts, weights, settings or commits are measured
again. Writes docs/results/guard.{json,md,png}. If they are missing, models and texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from bench.caches import calibrated
from bench.material import books
from bench.passages import Passage, measure_passages, passage_parser, passages
from bench.provenance import digest
from bench.report import BLUE, GREY, ORANGE, Page, table
from bench.several import publish_models
from grace_opt.hf import CalibratedBasis, CompressedCache, capture_attention
from grace_opt.hf.bases.basis import Basis
from grace_opt.hf.engine.filling import filled
from grace_opt.hf.models.recording import CapturedAttention

#: What no basis knows of, as it is no text.
RANDOM = "random tokens"
#: Far-out keys have this size, as the biases of some models do.
FAR = 900.0

Captured = Mapping[int, CapturedAttention]


def wrong_bases(basis: CalibratedBasis) -> Iterator[tuple[str, CalibratedBasis]]:
    """Yield bases with what is wrong with them; no swapped heads if there is one head alone."""
    layers = basis.layers
    after = dict(zip(layers, (*layers[1:], layers[0]), strict=True))
    yield (
        "another layer's basis",
        replace(
            basis,
            keys={layer: basis.keys[after[layer]] for layer in layers},
            values={layer: basis.values[after[layer]] for layer in layers},
        ),
    )
    for what, change in (("swapped heads", _swapped), ("turned coordinates", _turned)):
        if what != "swapped heads" or len(basis.keys[layers[0]].energy) > 1:
            keys, values = (
                {layer: change(each) for layer, each in kind.items()} for kind in (basis.keys, basis.values)
            )
            yield what, replace(basis, keys=keys, values=values)


def wrong_keys(captured: Captured) -> Iterator[tuple[str, Captured]]:
    """Yield what layers received, with other keys."""
    for what, change in (
        ("keys twice as large", lambda keys: 2 * keys),
        (f"keys {FAR:.0f} far out", _far),
        ("noise as keys", _noise),
    ):
        yield what, {layer: replace(call, keys=change(call.keys)) for layer, call in captured.items()}


def measure(model: PreTrainedModel, passage: Passage, basis: CalibratedBasis, folder: Path) -> dict[str, list[float]]:
    """Return how unlike the calibration each layer is, as a share of what is too much: of the text, and of wrong ones.

    Parameters
    ----------
    model : PreTrainedModel
    passage : Passage
    basis : CalibratedBasis
    folder : Path
        For the files of bases.
    """
    path = folder / "basis_now.safetensors"

    def shares(captured: Captured, own: CalibratedBasis = basis) -> list[float]:
        own.save(path)
        cache = CompressedCache(model, bits=1, basis=path, trellis=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is what is measured
            filled(cache, captured)
        return [cache.layers[layer].compressed.divergence.largest[1] for layer in cache.prunable_layers]

    captured = capture_attention(model, passage.ids)
    found = {"text": shares(captured)}
    if passage.half == "B":
        found |= {what: shares(captured, wrong) for what, wrong in wrong_bases(basis)}
        found |= {what: shares(wrong) for what, wrong in wrong_keys(captured)}
        known = model.get_input_embeddings().num_embeddings
        noise = torch.randint(known, passage.ids.shape, generator=torch.Generator().manual_seed(int(passage.ids.sum())))
        found[RANDOM] = shares(capture_attention(model, noise))
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = passage_parser("guard", __doc__, models=True)
    parser.set_defaults(prompt=1024)
    args = parser.parse_args(given)

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        folder = args.runs / name
        basis, _ = calibrated(model, tokenizer, folder / "basis.safetensors", source)
        every = passages(args.text or books(), tokenizer, args.prompt)[: args.passages]
        settings = {
            "weights": digest(*model.parameters()),
            "basis": digest(*basis.key_rates.values()),
            "prompt": args.prompt,
        }
        found, origins = measure_passages(
            every, folder, settings, source, lambda passage: measure(model, passage, basis, folder), "shares"
        )
        return {"passages": found}, origins

    publish_models(args, page, {"prompt": args.prompt}, measured)


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, Any] = value["models"]
    shares = {label: _by_kind(of["passages"]) for label, of in models.items()}
    texts = [max(layers) for of in shares.values() for layers in of["text"]]
    plants = list(dict.fromkeys(what for of in shares.values() for what in of if what not in ("text", RANDOM)))
    rows, silent = [], []
    for label, of in shares.items():
        for what in ("text", *plants, RANDOM):
            if what not in of:
                continue
            every = [each for layers in of[what] for each in layers]
            caught, prompts = sum(each > 1 for each in every), sum(max(layers) > 1 for layers in of[what])
            cells = f"{caught:,} of {len(every):,}", f"{prompts} of {len(of[what])}"
            rows.append([label, what, f"{_short(min(every))} to {_short(max(every))}", *cells])
            if what in plants and prompts < len(of[what]):
                silent.append(f"{what} on {label}, of which {prompts} of {len(of[what])} prompts are told")
    alarms = sum(each > 1 for each in texts)
    told = f"all but {'; '.join(silent)}" if silent else "every prompt"
    return Page(
        title="A prompt that is unlike the calibration",
        picture="How unlike the calibration each layer is, as a share of what is too much, on a logarithmic scale: a "
        "panel per model; blue ordinary text, orange what is wrong",
        headline=f"guard= warns of {alarms} of {len(texts)} ordinary prompts of {len(models)} models",
        draw=lambda figure: _draw(figure, shares, ("text", *plants, RANDOM)),
        asked="Does `guard=` tell a basis or keys that are wrong from ordinary text?",
        found=f"Of {len(texts)} ordinary prompts of {len(models)} models it warns of {alarms}; the most unlike one "
        f"reaches {max(texts):.2f} of what is too much. Of prompts with a wrong basis or wrong keys in all layers it "
        f"tells {told}.",
        sure=f"16 passages of 4 kinds of text for each model, {value['prompt']:,} tokens each; half of them have been "
        "read with what is wrong as well.",
        tables=table(
            ["model", "what is read", "least to most, of the limit", "layers beyond it", "prompts told"], rows, 2
        ),
    )


def _by_kind(found: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the shares of every layer of every passage, by what was read."""
    kinds: dict[str, list[list[float]]] = {}
    for one in found:
        for what, layers in one["shares"].items():
            kinds.setdefault(what, []).append(layers)
    return kinds


def _short(share: float) -> str:
    return f"{share:.2f}" if share < 10 else f"{share:,.0f}"


def _swapped(own: Basis) -> Basis:
    return replace(own, encode=own.encode.flip(0), decode=own.decode.flip(0), energy=own.energy.flip(0))


def _turned(own: Basis) -> Basis:
    turns = torch.linalg.qr(torch.randn(own.encode.shape, generator=torch.Generator().manual_seed(0)))[0]
    return replace(own, encode=own.encode @ turns, decode=turns.mT @ own.decode)


def _far(keys: Tensor) -> Tensor:
    """Return keys as a bias of the first pair of channels leaves them, turned by a radian per token."""
    keys, angles = keys.clone(), torch.arange(keys.shape[2], dtype=torch.float32)
    for channel, wave in ((0, angles.cos()), (keys.shape[3] // 2, angles.sin())):
        keys[..., channel] += (FAR * wave).to(keys.dtype)
    return keys


def _noise(keys: Tensor) -> Tensor:
    """Return noise with the mean and the variance of each channel."""
    noise = torch.randn(keys.shape, generator=torch.Generator().manual_seed(0))
    return (noise * keys.float().std(2, keepdim=True) + keys.float().mean(2, keepdim=True)).to(keys.dtype)


def _draw(figure: Figure, shares: Mapping[str, Mapping[str, list[list[float]]]], kinds: Sequence[str]) -> None:
    figure.set_size_inches(max(6.5, 1.5 + 2.6 * len(shares)), 4.2)
    panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    for axes, (label, of) in zip(panels, shares.items(), strict=True):
        for place, what in enumerate(kinds):
            every = [each for layers in of.get(what, []) for each in layers]
            color = BLUE if what == "text" else GREY if what == RANDOM else ORANGE
            apart = [place + 0.5 * (number / len(every) - 0.5) for number in range(len(every))]
            axes.plot([max(each, 1e-3) for each in every], apart, ".", color=color, markersize=2)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_title(label)
        axes.set_xlabel("of what is too much")


if __name__ == "__main__":
    main()
