"""What blocks for servers cost: ``python -m bench.blocks``.

A prompt is read, and all its keys and values are replaced by what is left of them after they went, in blocks of 256
tokens, through a codec: ours (`grace_opt.serving.BlockCodec`) with several bits, and those of LMCache, which are FP8
and TurboQuant, with the first and last two layers as they are, as is its default, and with none. The next tokens of the
text are fed, and next-token distributions compared with those of the exact cache. Beside it, ``attach(bits=2.5)``,
which knows queries and places. Passages are of half B (`bench.passages`), one of each source.

TurboQuant is our implementation of LMCache's preset ``turboquant_4bit_nc``, as its own runs on GPUs alone: a random
rotation, Lloyd-Max levels and a corrected norm in 16 bits for keys; for values, even levels with a scale and an offset
in 16 bits.

Each passage has its own file in ``--runs``; those of other texts, weights, settings or commits are made again. Writes
docs/results/blocks.{json,md,png}. If they are missing, models and texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from bench.arena.peers.turboquant import quantised
from bench.caches import SINKS, WINDOW, Continuation, calibrated
from bench.material import books
from bench.passages import Passage, later_passages, measure_passages
from bench.provenance import digest, recorded
from bench.report import BLUE, GREEN, GREY, ORANGE, PINK, Page, parser_of, table
from bench.several import publish_models
from grace_opt.hf import CalibratedBasis, attention_implementation
from grace_opt.hf.engine.filling import dense_cache
from grace_opt.hf.tools.evaluation import stored_bits
from grace_opt.serving import BlockCodec

#: Tokens of a block, as LMCache's are by default, and layers at each end that its TurboQuant leaves as they are.
BLOCK, ENDS = 256, 2
BITS = (2.5, 3.0)
#: Times that a block is read, coded and decoded.
ROUNDS = 11
#: What is compared by name, and how it looks.
OURS = "blocks, {:g} bits"
SKIPPING, TURBOQUANT, FP8, ATTACHED = "TurboQuant, 4 bits, ends whole", "TurboQuant, 4 bits", "FP8", "attach(bits=2.5)"
LOOKS = {
    OURS.format(2.5): BLUE,
    OURS.format(3): GREEN,
    SKIPPING: ORANGE,
    TURBOQUANT: PINK,
    FP8: GREY,
    ATTACHED: "#000000",
}

#: Codes a block ``(2, L, n, H d)``: returns what is left of it, and the bits that the layers of `coded` took.
Coder = Callable[[Tensor], tuple[Tensor, float]]


def ours(codec: BlockCodec, block: Tensor) -> tuple[Tensor, float]:
    """Code a block by ours, as one in 16 bits."""
    data = codec.encode(block.bfloat16())
    whole = block[:, [layer for layer in range(block.shape[1]) if layer not in codec.basis.keys]].numel()
    return codec.decode(data).to(block.dtype), 8.0 * len(data) - 16 * whole


def fp8(coded: Sequence[int], block: Tensor) -> tuple[Tensor, float]:
    """Code a block by 8-bit floats, as LMCache's ``fp8`` does."""
    found = block.clone()
    found[:, coded] = block[:, coded].to(torch.float8_e4m3fn).to(block.dtype)
    return found, 8.0 * block[:, coded].numel()


def turboquant(coded: Sequence[int], heads: int, ends: int, block: Tensor) -> tuple[Tensor, float]:
    """Code a block as LMCache's ``turboquant_4bit_nc`` does; layers at the ends that stay as they are take 16 bits."""
    found, bits = block.clone(), 0.0
    for layer in coded:
        keys, values = block[:, layer].unflatten(-1, (heads, -1)).transpose(1, 2)
        if min(layer, block.shape[1] - 1 - layer) < ends:
            bits += 16 * (keys.numel() + values.numel())
            continue
        rounded, spent = quantised(keys, 4, seed=layer)
        norm = keys.norm(dim=-1, keepdim=True) / rounded.norm(dim=-1, keepdim=True).clamp(min=1e-20)
        least, most = values.aminmax(dim=-1, keepdim=True)
        step = ((most - least) / 15).half().float().clamp(min=1e-20)
        even = ((values - least) / step).round().clamp(0, 15) * step + least.half().float()
        bits += spent + 4 * values.numel() + 32 * values.shape[:2].numel()
        found[:, layer] = torch.stack([rounded * norm, even]).transpose(1, 2).flatten(2)
    return found, bits


def through(text: Continuation, coded: Sequence[int], code: Coder) -> tuple[float, float]:
    """Return the KL after a prompt that went through a codec in whole blocks, and the bits per number that is coded."""
    whole, heads = _block(text)
    bits = count = 0.0
    for start in range(0, whole.shape[2] - BLOCK + 1, BLOCK):
        part = whole[:, :, start : start + BLOCK].contiguous()
        whole[:, :, start : start + BLOCK], spent = code(part)
        bits, count = bits + spent, count + part[:, coded].numel()
    keys, values = whole.unflatten(-1, (heads, -1)).transpose(2, 3)
    changed = {
        layer: replace(text.captured[layer], keys=keys[number][None], values=values[number][None])
        for number, layer in enumerate(sorted(text.captured))
    }
    return text.beside_dense(dense_cache(text.model, changed)).kl, bits / count


def _block(text: Continuation) -> tuple[Tensor, int]:
    """Return a prompt's keys and values as one block, and the number of heads."""
    layers = [text.captured[layer] for layer in sorted(text.captured)]
    kinds = [
        [getattr(each, kind)[0].transpose(0, 1).flatten(1).float() for each in layers] for kind in ("keys", "values")
    ]
    return torch.stack([torch.stack(each) for each in kinds]), layers[0].keys.shape[1]


def measure(text: Continuation, basis: CalibratedBasis, path: Path) -> dict[str, Any]:
    """Return KL and bits of each way."""
    coded, heads = list(basis.layers), text.captured[0].keys.shape[1]
    ways: dict[str, Coder] = {OURS.format(bits): functools.partial(ours, BlockCodec(basis, bits)) for bits in BITS}
    ways[SKIPPING] = functools.partial(turboquant, coded, heads, ENDS)
    ways[TURBOQUANT] = functools.partial(turboquant, coded, heads, 0)
    ways[FP8] = functools.partial(fp8, coded)
    found = {name: through(text, coded, code) for name, code in ways.items()}
    cache = text.cache(bits=BITS[0], basis=path, guard="off", recent_window=WINDOW, sink_tokens=SINKS)
    bits = stored_bits(cache).bits
    found[ATTACHED] = text.beside_dense(cache).kl, bits
    return {
        "kl": {name: kl for name, (kl, _) in found.items()},
        "bits": {name: each for name, (_, each) in found.items()},
    }


def times(model: PreTrainedModel, text: Continuation, ids: Tensor, basis: CalibratedBasis) -> dict[str, float]:
    """Return the milliseconds that a block takes to be read by the model, coded, and decoded; medians of `ROUNDS`."""
    codec, block = BlockCodec(basis, BITS[0]), _block(text)[0][:, :, BLOCK : 2 * BLOCK].bfloat16()
    data = codec.encode(block)
    doing = {
        "read": lambda: model(ids[:, :BLOCK]),
        "code": lambda: codec.encode(block),
        "decode": lambda: codec.decode(data),
    }
    taken: dict[str, list[float]] = {name: [] for name in doing}
    for _ in range(ROUNDS):
        for name, do in doing.items():
            start = time.perf_counter()
            do()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in taken.items()}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: Mapping[str, Mapping[str, Any]] = value["models"]
    kl = {name: _means([case["blocks"]["kl"] for case in of["cases"]]) for name, of in models.items()}
    bits = {name: _means([case["blocks"]["bits"] for case in of["cases"]]) for name, of in models.items()}
    first = OURS.format(BITS[0])
    # Of a model with a few layers, all are ends, and nothing is lost.
    shares = {name: of[first] / min(of[way] for way in (SKIPPING, TURBOQUANT) if of[way]) for name, of in kl.items()}
    worst = max(shares, key=lambda name: shares[name])
    beside = {name: of[first] / of[ATTACHED] for name, of in kl.items()}
    rows = [
        [model, name, f"{bits[model][name]:.2f}", f"{each:.4f}",
         f"{max(case['blocks']['kl'][name] for case in models[model]['cases']):.4f}"]
        for model, of in kl.items() for name, each in of.items()
    ]  # fmt: skip
    spent = [
        [model, *(f"{of['ms'][name]:.0f}" for name in ("read", "code", "decode")),
         *(f"{of['ms'][name] / of['ms']['read']:.3f}" for name in ("code", "decode"))]
        for model, of in models.items()
    ]  # fmt: skip
    return Page(
        title="Blocks for servers",
        picture="KL divergence from the exact cache's next-token distributions by bits of the codec, a panel per model",
        headline=f"Blocks in {BITS[0]:g} bits have {shares[worst]:.2f} times the KL of TurboQuant's 4 bits on {worst}, "
        "where they are worst",
        draw=lambda figure: _draw(figure, kl, bits),
        asked="What is left of a model's predictions if its cache went through a server's blocks, which stand alone "
        "and bring no queries?",
        found=f"On {worst}, where it is worst of {len(models)} models, our codec's {BITS[0]:g} bits have "
        f"{shares[worst]:.2f} times the KL of LMCache's 4-bit codec (ends whole or not, whichever is better)"
        f"{''.join(f', and {share:.2f} times on {name}' for name, share in shares.items() if name != worst)}. They "
        f"have {min(beside.values()):.1f} to {max(beside.values()):.1f} times the KL of `attach(bits={BITS[0]:g})`, "
        "which knows the queries and codes whole prompts.",
        sure=f"These are {min(len(of['cases']) for of in models.values())} passages of each model, with prompts of "
        f"{value['prompt']:,} tokens and {value['tokens']} after them; TurboQuant is our implementation, as LMCache's "
        "runs on GPUs alone.",
        tables=[
            *table(["model", "codec", "bits per number", "KL, mean", "KL, worst passage"], rows, 2),
            "",
            f"Milliseconds of a block of {BLOCK} tokens, medians of {ROUNDS} rounds:",
            "",
            *table(
                ["model", "to read it", "to code it", "to decode it", "coding / reading", "decoding / reading"],
                spent,
                1,
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    "All tokens of a prompt go through the codec, the first and the last as well, as in a server. Bits "
                    "count everything that is stored, of the layers that are coded: those without a sliding window. "
                    f"*Ends whole*: the first and last {ENDS} layers stay as they are, LMCache's default. `attach` "
                    f"keeps {SINKS} first and {WINDOW} last tokens dense, which its bits do not count."
                ],
            )
        ],
    )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every column."""
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def _draw(figure: Figure, kl: Mapping[str, Mapping[str, float]], bits: Mapping[str, Mapping[str, float]]) -> None:
    all_axes = figure.subplots(1, len(kl), sharey=True, squeeze=False)[0]
    for axes, (model, of) in zip(all_axes, kl.items(), strict=True):
        for name, each in of.items():
            axes.plot(bits[model][name], each, "o", color=LOOKS[name], label=name)
        axes.set_yscale("log")
        axes.set_title(model)
        axes.set_xlabel("bits per number")
    all_axes[0].set_ylabel("KL, nats")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("blocks", __doc__, models=True)
    add = parser.add_argument
    add("--prompt", type=int, default=1792, help="tokens of a prompt (default %(default)s)")
    add("--tokens", type=int, default=256, help="tokens after it (default %(default)s)")
    add("--passages", type=int, default=8, help="passages, one of each source (default %(default)s: all)")
    args = parser.parse_args(given)
    if args.prompt < 2 * BLOCK or args.tokens < 2 or args.passages < 1:
        raise SystemExit(
            f"--prompt {args.prompt} --tokens {args.tokens} --passages {args.passages}: at least {2 * BLOCK}, 2 and 1"
        )

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        cut = later_passages(args.text or books(), tokenizer, args.prompt + args.tokens)[::2][: args.passages]
        path = args.runs / f"{name}.safetensors"
        with attention_implementation(model, "grace_sdpa"), torch.no_grad():
            basis, _ = calibrated(model, tokenizer, path, source)
            settings = {"weights": digest(*model.parameters()), "prompt": args.prompt}

            def one(passage: Passage) -> dict[str, Any]:
                return measure(Continuation(model, passage.ids, args.prompt), basis, path)

            cases, origins = measure_passages(cut, args.runs / name, settings, source, one, "blocks")

            def timed() -> dict[str, Any]:
                first = cut[0].ids
                return {"ms": times(model, Continuation(model, first[:, : 2 * BLOCK + 2], 2 * BLOCK), first, basis)}

            ms = recorded(args.runs / name / "times.json", settings, source, timed)["ms"]
        return {"cases": cases, "ms": ms}, origins

    publish_models(args, page, {"prompt": args.prompt, "tokens": args.tokens}, measured)


if __name__ == "__main__":
    main()
