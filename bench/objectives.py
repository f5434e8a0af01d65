"""Which W is worth minimising: ``python -m bench.objectives`` compares the paper's with that of the attention's output.

Passages of half B (`bench.passages`), one of each kind, are read by three families of models, pruned at each ratio, and
continued with their own next tokens: how far are the next-token distributions from the dense cache's? And where do
interactions help? In every layer, channels are chosen by queries in the middle of the prompt; the error of the logits,
the first-order error of the output that `output_matrix` describes, and the true error of the output are measured on
these queries and on all later ones.

Each passage has its own file in ``--runs``; those of other texts, weights, settings or commits are made again. Writes
docs/results/objectives.{json,md,png}. If they are missing, models and texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from bench.caches import Continuation
from bench.material import books
from bench.passages import Passage, later_passages
from bench.provenance import digest, origin_of, recorded
from bench.report import BLUE, GREEN, GREY, ORANGE, Page, parser_of, table
from bench.several import publish_models
from grace_opt import MaskProvider
from grace_opt.attention.outputs import NEAR
from grace_opt.hf import CompressedCache, attention_implementation
from grace_opt.hf.models.recording import CapturedAttention

#: Shares of the channels that are pruned; errors are measured at `HALF`.
RATIOS = (0.3, 0.5, 0.7)
HALF, OBSERVED = 0.5, 32
KINDS = ("book", "Python", "JSON")


@dataclass(frozen=True)
class Way:
    """A method, the W that it minimises, and how it looks in the picture."""

    method: str
    weight: str
    look: tuple[str, str]


GRACE, THINK, OUTPUT = "GRACE", "THINK", "output, by its diagonal"
WAYS = {
    GRACE: Way("grace", "frobenius", (ORANGE, "-")),
    THINK: Way("think", "frobenius", (GREY, "--")),
    OUTPUT: Way("think", "output", (BLUE, "-")),
    "output, with interactions": Way("mies", "output", (GREEN, ":")),
}
ERRORS = ("logits", "output, to first order", "output")
QUERIES = ("observed", "later")


def measure(model: PreTrainedModel, ids: Tensor, prompt: int) -> dict[str, Any]:
    """Return the KL divergence of each way at each ratio, in nats per token, and the mean errors of all layers."""
    text = Continuation(model, ids, prompt)
    kl = {
        name: {f"{ratio:g}": text.kl(method=way.method, ratio=ratio, weight=way.weight) for ratio in RATIOS}
        for name, way in WAYS.items()
    }
    pruned = CompressedCache(model, "think", HALF).prunable_layers
    layers = [errors_of_layer(text.captured[layer]) for layer in pruned]
    means = {
        name: {queries: [statistics.fmean(each) for each in zip(*(one[name][queries] for one in layers), strict=True)]
               for queries in QUERIES}
        for name in WAYS
    }  # fmt: skip
    return {"kl": kl, "errors": means}


def errors_of_layer(call: CapturedAttention) -> dict[str, dict[str, list[float]]]:
    """Return `ERRORS`, as shares of what is changed, of each way on observed queries and on later ones."""
    length = call.keys.shape[2]
    at = 3 * length // 4
    keys, values = call.keys[:, :, :at], call.values[:, :, :at]
    found = {}
    for name, way in WAYS.items():
        choose = MaskProvider(way.method, HALF, weight=way.weight)
        mask = choose(call.queries[:, :, at - OBSERVED : at], keys, None, values, call.scaling).pruned
        places = torch.arange(at - OBSERVED, at), torch.arange(at, length, 4)
        found[name] = {kind: errors(call, mask[0], at, each) for kind, each in zip(QUERIES, places, strict=True)}
    return found


def errors(call: CapturedAttention, pruned: Tensor, at: int, places: Tensor) -> list[float]:
    """Return `ERRORS` of the queries at `places`, if keys before `at` lack channels, but for near ones."""
    keys, values = (part[0].float() for part in (call.keys, call.values))
    queries = call.queries[0][:, places].float().unflatten(0, (len(keys), -1))
    place, keys, values = torch.arange(keys.shape[1]), keys[:, None], values[:, None]
    before = places[:, None] - place
    logits = queries @ keys.mT * call.scaling
    counted = (before >= NEAR) & (place < at - NEAR)
    lost = queries @ (keys * pruned[:, None, None]).mT * call.scaling * counted
    p, changed = (each.masked_fill(before < 0, -torch.inf).softmax(-1) for each in (logits, logits - lost))
    output = p @ values
    first = (p * lost) @ values - (p * lost).sum(-1, keepdim=True) * output
    pairs = (lost, logits * counted), (first, output), (changed @ values - output, output)
    return [float(change.square().sum() / whole.square().sum()) for change, whole in pairs]


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, list[dict[str, Any]]] = {name: of["cases"] for name, of in value["models"].items()}
    shares = [f"{ratio:g}" for ratio in RATIOS]
    kl, rows, sizes = {name: _means(cases) for name, cases in models.items()}, [], []
    for model, means in kl.items():
        rows += [[model, name, *(f"{of[share]:.4f}" for share in shares)] for name, of in means.items()]
        for name in means:
            by = [statistics.fmean(case["errors"][name][kind][place] for case in models[model])
                  for place in range(len(ERRORS)) for kind in QUERIES]  # fmt: skip
            sizes.append([model, name, *(f"{each:.4f}" for each in by)])
    times = {
        other: [
            statistics.geometric_mean(of[OUTPUT][share] / of[other][share] for of in kl.values()) for share in shares
        ]
        for other in (THINK, GRACE)
    }
    pairs = [(case["kl"][OUTPUT][share], min(case["kl"][name][share] for name in (THINK, GRACE)))
             for cases in models.values() for case in cases for share in shares]  # fmt: skip
    better = sum(found < other for found, other in pairs)
    said = {other: " / ".join(f"{each:.2f}" for each in found) for other, found in times.items()}
    at = " / ".join(f"{ratio:.0%}" for ratio in RATIOS)
    return Page(
        title="The W of the output, measured",
        picture="KL divergence from the dense cache's next-token distributions by share of channels pruned, for THINK, "
        "GRACE and the W of the attention's output, a panel per model",
        headline=f"Channels chosen by the output have {said[THINK]} times the KL of THINK, with {at} pruned",
        draw=lambda figure: _draw(figure, kl),
        asked="Does a smaller change of the logits keep a model's predictions, or is there a better W; and where do "
        "interactions between channels help?",
        found=f"With {at} of the channels pruned, the diagonal of the output's W has {said[THINK]} times the KL of "
        f"THINK and {said[GRACE]} times that of GRACE (geometric means over models), and a lower KL than both in "
        f"{better} of {len(pairs)} cases.",
        sure=f"These are {len(models)} small models and {len(value['kinds'])} passages each, with {value['tokens']} of "
        f"their own next tokens after {value['prompt']:,}.",
        tables=[
            *table(["model", "chosen by", *(f"KL, {float(share):.0%} pruned" for share in shares)], rows, 2),
            "",
            f"Errors with {HALF:.0%} pruned, as shares of the squared logits and outputs, means over layers:",
            "",
            *table(["model", "chosen by", *(f"{what}, {kind}" for what in ERRORS for kind in QUERIES)], sizes, 2),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"All but the last 32 keys of a prompt are pruned; {OBSERVED} queries are observed. *Output*: "
                    '`weight="output"`, with `method="think"` (its diagonal) or `"mies"` (interactions). GRACE is MIES '
                    "with protection, on the logits' W. Errors: channels are chosen after three quarters of the "
                    f"prompt; {OBSERVED} queries before are *observed*, and those of the last quarter *later*."
                ],
            )
        ],
    )  # fmt: skip


def _means(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean KL over passages, by way and ratio."""
    first = cases[0]["kl"]
    return {n: {share: statistics.fmean(case["kl"][n][share] for case in cases) for share in first[n]} for n in first}


def _draw(figure: Figure, kl: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    all_axes = figure.subplots(1, len(kl), sharey=True, squeeze=False)[0]
    for axes, (model, means) in zip(all_axes, kl.items(), strict=True):
        for name, of in means.items():
            colour, line = WAYS[name].look
            axes.plot(list(map(float, of)), list(of.values()), "o", color=colour, linestyle=line, label=name)
        axes.set_yscale("log")
        axes.set_xticks(RATIOS, [f"{ratio:.0%}" for ratio in RATIOS])
        axes.set_title(model)
        axes.set_xlabel("channels pruned")
    all_axes[0].set_ylabel("KL, nats")
    all_axes[0].legend()


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("objectives", __doc__, models=True)
    add = parser.add_argument
    add("--prompt", type=int, default=1024, help="tokens of a prompt (default %(default)s)")
    add("--tokens", type=int, default=128, help="tokens after it (default %(default)s)")
    add("--kinds", nargs="+", default=KINDS, help="of passages (default: book Python JSON)")
    args = parser.parse_args(given)
    if args.prompt < 8 * OBSERVED or args.tokens < 2:
        raise SystemExit(f"--prompt {args.prompt} --tokens {args.tokens}: give at least {8 * OBSERVED} and 2 tokens")

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        cut = later_passages(args.text or books(), tokenizer, args.prompt + args.tokens)
        chosen = dict[str, Passage]({each.kind: each for each in reversed(cut) if each.kind in args.kinds})
        if missing := sorted({*args.kinds} - {*chosen}):
            raise SystemExit(f"--kinds {' '.join(missing)}: give some of {', '.join({each.kind: 0 for each in cut})}")
        weights, cases, origins = digest(*model.parameters()), [], {}
        with attention_implementation(model, "grace_sdpa"):
            for kind, passage in chosen.items():
                record = recorded(
                    args.runs / f"{name}_{kind}.json",
                    {"weights": weights, "ids": digest(passage.ids), "prompt": args.prompt},
                    source,
                    lambda passage=passage: measure(model, passage.ids, args.prompt),  # type: ignore[misc]
                )
                print(f"{name}: {passage.name}", flush=True)
                origins[kind] = origin_of(source, record)
                cases.append({"kind": kind, "name": passage.name, "kl": record["kl"], "errors": record["errors"]})
        return {"cases": cases}, origins

    publish_models(args, page, {"kinds": args.kinds, "prompt": args.prompt, "tokens": args.tokens}, measured)


if __name__ == "__main__":
    main()
