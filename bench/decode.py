"""One decoding step of one layer: dense attention, pruned attention in torch, and the compiled kernel.

``python -m bench.decode`` measures them in turns on the CPU, in float32, for one sequence, and writes
docs/results/decode_cpu.{json,md,png}. Each call uses another layer's tensors, and there are enough layers that none is
still in the processor's caches when its turn comes again. As in a model, an untimed matrix product comes before each
call: it wakes torch's threads, which helps code that runs on them and slows down code that runs on others. The kernel
reads pruned keys in three layouts: each token's channels side by side (token-major), the same with room up to a
multiple of sixteen channels (padded), and each channel's tokens side by side (channel-major). It also reads keys in 8,
4 and 3 bits, which needs ``pip install ".[quant]"``. Ratios are medians of the ratios of each round.

The lower bound is the time to move keys, values and kept indices at the bandwidth of a large copy. A copy also writes,
so reading alone can be a little faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import eager_attention_forward

from bench.cost_model import MODELS, PROBES, Model, probes, timed
from bench.provenance import require_clean
from bench.report import BLACK, BLUE, GREY, ORANGE, SKY, Page, add_options, read_results, table, write_results
from grace_opt.attention.weights import prune_count
from grace_opt.hf.pruned_attention import pruned_attention
from grace_opt.hf.quantization import QuantizedTokens
from grace_opt.hf.storage import Compressed
from grace_opt.kernels.decode.host import decode_attention
from grace_opt.kernels.decode.packed import PackedKeys

CONTEXTS = {"llama3-8b": (2048, 4096, 8192, 16384, 32768), "smollm2-135m": (2048, 4096, 8192)}
RATIOS = (0.6, 0.5)
RECENT, ITEM, INDEX = 32, 4, 8  # dense tokens; bytes of a float32 and of a kept index
COLD = 2**27  # bytes of dense keys and values that no cache holds
LAYOUTS = ("token-major", "padded", "channel-major")
FEW_BITS = {"K in 8 bits": (8, "hqq"), "K in 4 bits": (4, "quanto"), "K in 3 bits": (3, "hqq")}
GROUP = 32  # tokens that share a scale and a zero point
WIDENED = "K in 4 bits, torch"
SLOW = ("eager, transformers", "sdpa, expanded")  # ten times slower, so timed on one layer a round, always another
Run = Callable[[int], Any]  # of the number of a layer
Layers = Sequence[tuple[Tensor, Tensor]]  # dense keys and values of each


def dense_bytes(model: Model, tokens: int) -> int:
    """Of K and V of one layer."""
    return 2 * model.kv_heads * tokens * model.head_dim * ITEM


def pruned_bytes(model: Model, tokens: int, ratio: float, bits: int | None = None) -> int:
    """Of pruned K, dense V and the kept indices of one layer; with `bits`, K's scales and zero points included."""
    kept = model.head_dim - prune_count(ratio, model.head_dim)
    numbers = (tokens - RECENT) * kept
    narrow = numbers * ITEM if bits is None else numbers * bits // 8 + 2 * ITEM * numbers // GROUP
    per_head = narrow + RECENT * model.head_dim * ITEM + kept * INDEX
    return model.kv_heads * per_head + dense_bytes(model, tokens) // 2


def in_layout(keys: Tensor, layout: str) -> Tensor:
    """Keys (B, H, S, d'), the same numbers in another order in memory."""
    if layout == "channel-major":
        return keys.mT.contiguous().mT
    if layout == "padded":
        width = keys.shape[-1]
        return functional.pad(keys, (0, -width % 16))[..., :width]
    return keys


def dense_contenders(model: Model, layers: Sequence[tuple[Tensor, Tensor]], q: Tensor) -> dict[str, Run]:
    """Dense attention as it is usually written, by name."""
    heads, group, width = model.kv_heads, model.query_heads // model.kv_heads, model.head_dim
    module = SimpleNamespace(num_key_value_groups=group, training=False)
    grouped, sdpa = q.view(1, heads, group, width), functional.scaled_dot_product_attention

    def eager(k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(grouped @ k.mT * width**-0.5, dim=-1) @ v

    def expanded(k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

    ways: dict[str, Callable[..., Any]] = {
        "eager, grouped": eager,
        "eager, transformers": lambda k, v: eager_attention_forward(module, q, k, v, None, width**-0.5),
        "sdpa, grouped": lambda k, v: sdpa(grouped, k, v),
        "sdpa, enable_gqa": lambda k, v: sdpa(q, k, v, enable_gqa=True),
        "sdpa, expanded": expanded,
    }
    return {name: lambda i, way=way: way(*layers[i]) for name, way in ways.items()}


def pruned_contenders(layers: Layers, q: Tensor, ratio: float, few_bits: bool) -> dict[str, Run]:
    """The torch reference and the kernel in each layout of the pruned keys, by name; also in `FEW_BITS`, if asked."""
    heads, tokens, width = layers[0][0].shape[1:]
    old = tokens - RECENT
    kept = torch.rand(1, heads, width).argsort(-1)[..., : width - prune_count(ratio, width)].sort(-1).values
    index = kept[:, :, None].expand(-1, -1, old, -1)
    narrow = [k[:, :, :old].gather(-1, index) for k, _ in layers]
    # Values are the cache's own, as are the tail's buffers.
    rest = [(k[:, :, :0], k[:, :, old:].clone(), v[:, :, :old].clone(), v[:, :, old:].clone()) for k, v in layers]

    def torch_reference(keys: Sequence[Tensor | QuantizedTokens]) -> Run:
        def run(i: int) -> Any:
            sinks, tail, values, tail_values = rest[i]
            stored = Compressed(old, sinks, keys[i], kept, values)
            return pruned_attention(torch.nn.Identity(), q, tail, tail_values, None, stored)[0]

        return run

    def kernel(stored: Sequence[Tensor | PackedKeys]) -> Run:
        return lambda i: decode_attention(q, stored[i], kept, *rest[i])

    found = {"segmented_attention": torch_reference(narrow)}
    found |= {layout: kernel([in_layout(keys, layout) for keys in narrow]) for layout in LAYOUTS}
    expected = {layout: found["segmented_attention"](0) for layout in LAYOUTS}
    for name, (bits, backend) in FEW_BITS.items() if few_bits else ():
        stored = [QuantizedTokens.quantize(keys, bits, "tokens", GROUP, backend) for keys in narrow]
        found[name], widened = kernel([keys.packed for keys in stored]), torch_reference(stored)
        expected[name] = widened(0)
        if f"{name}, torch" == WIDENED:
            found[WIDENED] = widened
    for name, output in expected.items():
        if not torch.allclose(found[name](0), output, atol=1e-5):
            raise SystemExit(f"{name}: the kernel and the reference differ: nothing is worth timing")
    return {f"λ={ratio}, {name}": run for name, run in found.items()}


def contenders(model: Model, tokens: int, few_bits: bool) -> tuple[dict[str, Run], int]:
    """Name -> what to time, and how many layers there are."""
    torch.manual_seed(0)
    count = min(model.layers, -(-COLD // dense_bytes(model, tokens)) + 1)
    shape = 1, model.kv_heads, tokens, model.head_dim
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(count)]
    q = torch.randn(1, model.query_heads, 1, model.head_dim)
    table = dense_contenders(model, layers, q)
    for ratio in RATIOS:
        table |= pruned_contenders(layers, q, ratio, few_bits)
    return table, count


def measure(model: Model, tokens: int, rounds: int, few_bits: bool = True) -> dict[str, list[float]]:
    """Milliseconds per layer of each round, the contenders taking turns."""
    table, count = contenders(model, tokens, few_bits)
    left, right = torch.randn(2, 256, 256)
    times: dict[str, list[float]] = {name: [] for name in table}
    for turn in track(range(rounds + 1), description=f"{model.models}, {tokens} tokens"):
        for name, run in table.items():
            layers = [turn % count] if name in SLOW else range(count)
            taken = 0.0
            for i in layers:
                left @ right
                began = time.perf_counter()
                run(i)
                taken += time.perf_counter() - began
            if turn:  # the first warms up
                times[name].append(1000 * taken / len(layers))
    return times


def summary(model: Model, tokens: int, ratio: float, times: dict[str, list[float]], bandwidth: float) -> dict[str, Any]:
    """One row: medians, which dense way is best, and ratios to it."""
    medians = {name: statistics.median(of) for name, of in times.items() if "λ" not in name}
    best = min(medians, key=lambda name: medians[name])
    mark = f"λ={ratio}, "
    ours = {name.removeprefix(mark): of for name, of in times.items() if name.startswith(mark)}
    moved, plain = pruned_bytes(model, tokens, ratio), dense_bytes(model, tokens)
    return {
        "model": model.models,
        "tokens": tokens,
        "ratio": ratio,
        "dense_ms": medians,
        "best_dense": best,
        "pruned_ms": {name: statistics.median(of) for name, of in ours.items()},
        "dense_by_pruned": {
            name: statistics.median(d / p for d, p in zip(times[best], of, strict=True)) for name, of in ours.items()
        },
        "fastest_ms": {name: min(of) for name, of in ({name: times[name] for name in medians} | ours).items()},
        "dense_bytes": plain,
        "pruned_bytes": moved,
        "bytes_ratio": plain / moved,
        "floor_ms": 1000 * moved / bandwidth,
        "floor_4_bits_ms": 1000 * pruned_bytes(model, tokens, ratio, 4) / bandwidth,
    }


LEFT = ("model", "tokens", "λ")
HEAD = (
    "best dense, ms", "which", "pruned, torch, ms", "pruned, kernel, ms", "lower bound, ms", "dense / torch",
    "dense / kernel", "bytes, dense / pruned",
)  # fmt: skip


def page(value: dict[str, Any]) -> Page:
    """What docs/results/decode_cpu.md says of the numbers."""
    cells = value["cells"]
    kernel = [cell["dense_by_pruned"]["token-major"] for cell in cells]
    best, worst = (choose(cells, key=lambda cell: cell["dense_by_pruned"]["token-major"]) for choose in (max, min))
    bits = [cell["dense_by_pruned"].get("K in 4 bits") for cell in cells]
    known = [ratio for ratio in bits if ratio is not None]
    few = f", and {min(known):.2f} to {max(known):.2f} times with K in 4 bits" if known else ""
    return Page(
        title="Decoding on pruned keys, on a CPU",
        picture="Lines: how many times faster a step on pruned keys is than the fastest dense one, by prompt length",
        draw=lambda figure: draw(figure, cells),
        asked="In a decoding step, how much faster is one layer's attention on pruned keys than the fastest dense "
        "attention in torch or transformers?",
        found=f"The compiled kernel is {min(kernel):.2f} to {max(kernel):.2f} times as fast{few}. The gain is largest "
        f"with {_place(best)}, and smallest with {_place(worst)}.",
        sure=f"These are medians of {value['rounds']} rounds on one machine, with {value['threads']} threads, in "
        "float32, all ways taking turns; it is attention only, and a whole step also reads the weights "
        "([Efficiency](efficiency.md)).",
        tables=[
            "λ: share of key channels pruned. *Dense / kernel* and *dense / torch*: how many times as fast as the best "
            "dense way, as medians of the rounds' ratios; *bytes*: the same ratio if only the bytes moved counted.",
            "",
            *table([*LEFT, *HEAD], [_row(cell) for cell in cells]),
        ],
        details=[
            ("Three layouts of the pruned keys", _layouts(cells)),
            (f"K in {_widths(cells)} bits", _few_bits(cells) if known else ["Not measured here."]),
            (
                "How it is counted",
                [
                    f"One sequence; λ is the share of key channels pruned, and the last {RECENT} tokens stay dense. "
                    "*Best dense* is the fastest of five ways to compute dense attention; *grouped* means that KV "
                    "heads are not repeated. *Torch* and *kernel* compute the same on pruned keys. Ratios are medians "
                    "over the rounds. The lower bound is the time to move keys, values and kept indices at "
                    f"{value['copy_bandwidth'] / 1e9:.1f} GB/s, the rate of a large copy.",
                    "",
                    "The kernel's layout is token-major: each token's channels lie side by side "
                    "([why](../adr/0007-layout-of-pruned-keys.md)). *Padded* adds room up to a multiple of sixteen "
                    "channels; *channel-major* puts the tokens of each channel side by side. Keys in "
                    f"[{_widths(cells)} bits](../howto/compose.md#fewer-bits) have groups of {GROUP} tokens; the "
                    "kernel reads them as they are stored, torch makes them dense first.",
                ],
            ),
        ],
    )


def _place(cell: dict[str, Any]) -> str:
    return f"{cell['tokens']:,} tokens, {cell['model'].split(' and ')[0]}'s shape and λ = {cell['ratio']:g}"


def _left(cell: dict[str, Any]) -> list[str]:
    return [cell["model"].split(" and ")[0], f"{cell['tokens']:,}", f"{cell['ratio']:g}"]


def _row(cell: dict[str, Any]) -> list[str]:
    ratios, pruned = cell["dense_by_pruned"], cell["pruned_ms"]
    numbers = [pruned["segmented_attention"], pruned["token-major"], cell["floor_ms"]]
    faster = [ratios["segmented_attention"], ratios["token-major"], cell["bytes_ratio"]]
    dense = [f"{cell['dense_ms'][cell['best_dense']]:.3f}", cell["best_dense"]]
    return [*_left(cell), *dense, *(f"{ms:.3f}" for ms in numbers), *(f"{factor:.2f}" for factor in faster)]


def _layouts(cells: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [*_left(cell), *(f"{cell['pruned_ms'][name]:.3f}" for name in LAYOUTS),
         *(f"{cell['dense_by_pruned'][name]:.2f}" for name in LAYOUTS)]
        for cell in cells
    ]  # fmt: skip
    head = [*(f"{name}, ms" for name in LAYOUTS), *(f"dense / {name}" for name in LAYOUTS)]
    return table([*LEFT, *head], rows)


def _measured(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Those of `FEW_BITS` that all cells have: older results have no 3 bits."""
    return [name for name in FEW_BITS if all(name in cell["pruned_ms"] for cell in cells)]


def _widths(cells: Sequence[dict[str, Any]]) -> str:
    """As "8, 4 and 3"."""
    *others, last = (str(FEW_BITS[name][0]) for name in _measured(cells) or FEW_BITS)
    return f"{', '.join(others)} and {last}"


def _few_bits(cells: Sequence[dict[str, Any]]) -> list[str]:
    names = [*_measured(cells), WIDENED]
    rows = [
        [*_left(cell), *(f"{cell['pruned_ms'][name]:.3f}" for name in ("token-major", *names)),
         f"{cell['floor_4_bits_ms']:.3f}", *(f"{cell['dense_by_pruned'][name]:.2f}" for name in names[1:])]
        for cell in cells
    ]  # fmt: skip
    few = [name.removeprefix("K in ") for name in names]
    head = ["K in 32 bits, ms", *(f"{name}, ms" for name in few), "lower bound, 4 bits, ms"]
    return table([*LEFT, *head, *(f"dense / {name}" for name in few[1:])], rows)


def draw(figure: Any, cells: Sequence[dict[str, Any]]) -> None:
    """Speed-ups at the first λ, a panel for each model."""
    ratio = cells[0]["ratio"]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    looks = {
        "token-major": ("kernel", BLUE, "o"),
        "K in 4 bits": ("kernel, K in 4 bits", SKY, "s"),
        "segmented_attention": ("torch", ORANGE, "^"),
    }
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        of = [cell for cell in cells if (cell["model"], cell["ratio"]) == (model, ratio)]
        x = [cell["tokens"] for cell in of]
        for name, (label, colour, marker) in looks.items():
            if all(name in cell["dense_by_pruned"] for cell in of):
                axes.plot(x, [cell["dense_by_pruned"][name] for cell in of], color=colour, marker=marker, label=label)
        axes.plot(x, [cell["bytes_ratio"] for cell in of], color=GREY, linestyle=":", label="by the bytes alone")
        axes.axhline(1, color=BLACK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{tokens // 1024}k" for tokens in x])
        axes.minorticks_off()
        axes.set_xlabel("tokens of the prompt")
        axes.set_title(f"{model.split(' and ')[0]}'s shape, λ = {ratio:g}")
    panels[0].set_ylabel("times faster than the fastest dense")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(loc="lower right", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns per contender (default %(default)s)")
    parser.add_argument("--models", nargs="*", choices=CONTEXTS, default=list(CONTEXTS))
    add_options(parser, "decode_cpu")
    args = parser.parse_args()
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        copy = timed({"copy": probes(MODELS["smollm2-135m"], 64, "cpu")["copy"]}, "cpu", args.rounds)["copy"]
        bandwidth = 2 * 4 * PROBES["cpu"][2] / statistics.median(copy)
        cells = []
        with torch.inference_mode():
            for name in args.models:
                for tokens in CONTEXTS[name]:
                    times = measure(MODELS[name], tokens, args.rounds)
                    cells += [summary(MODELS[name], tokens, ratio, times, bandwidth) for ratio in RATIOS]
        value = {"provenance": source, "rounds": args.rounds, "threads": torch.get_num_threads()}
        value |= {"copy_bandwidth": bandwidth, "cells": cells}
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
