"""Attention and steps on a cache with bits for each channel, on a GPU: ``python -m bench.decode_gpu``.

*One layer*: attention of one new token over Llama-3-8B's shape, as in `bench.decode_bits`: keys and values are normal
numbers with decaying spread, coded in 2.25 bits in a given basis, with a trellis and without; dense attention is
torch's fastest. All launches of several layers, which together are more than the GPU's caches hold, are recorded as a
CUDA graph and replayed, so that what Python takes is not measured. *Whole steps*: a Llama-3-8B with random weights, all
its layers, one token after the other in plain Python, as transformers does it; and the time to code the prompt's keys
and values.

Everything in bfloat16. Floors are the bytes of keys and values, or of codes, at the rate of a large copy. Writes
docs/results/decode_gpu.{json,md,png}. It needs a CUDA device and Triton, and takes some two minutes. ``--small``
tries the script on a tiny model: without a GPU in Triton's interpreter, if ``TRITON_INTERPRET=1`` is set.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from bench.caches import SINKS
from bench.caches import WINDOW as RECENT
from bench.decode_bits_page import BITS, CODED, ONE_BY_ONE, OURS
from bench.efficiency.methods import Clock
from bench.efficiency.subject import SHAPES, random_weights
from bench.machine import Model, copy_bandwidth
from bench.report import BLACK, BLUE, RESULTS, SKY, Page, parser_of, publish, table
from grace_opt.hf import CapturedAttention, CompressedCache, attention_implementation
from grace_opt.hf.bases.basis import Basis
from grace_opt.hf.engine.filling import filled
from grace_opt.hf.stores.coded.in_place import attention_in_place
from grace_opt.kernels._shared import dispatch

#: Model's shape, tokens and prompts of one layer, and of whole steps; the same with ``--small``.
LARGE = "llama3-8b", ((8192, 1), (32768, 1), (8192, 8), (32768, 8)), ((8192, 1), (32768, 1))
SMALL = "tiny", ((256, 2),), ((256, 1),)
#: Where kernels run; without a GPU the CPU plays one.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DENSE = "dense"
#: Bytes of dense keys and values, or of codes, that are more than the GPU's caches hold; and most layers made for it.
COLD, MOST = 2**27 if DEVICE == "cuda" else 0, 16
FASTEST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
#: Steps of each cache before those that count.
WARM_UP = 3


@contextmanager
def kernels_here() -> Iterator[None]:
    """Triton's kernels run on `DEVICE`: on a CPU in the interpreter, if ``TRITON_INTERPRET=1`` was set early enough."""
    if DEVICE == "cpu":
        from tests import interpreter  # noqa: F401  (cheaper launches)
    with mock.patch.object(dispatch, "DEVICE_TYPE", DEVICE):
        yield


def drawn(sizes: Model, tokens: int, prompts: int) -> CapturedAttention:
    """Return queries, keys and values of one layer: normal numbers with decaying spread."""
    width = sizes.head_dim
    spread = 4.0 ** -torch.linspace(0, 2, width, device=DEVICE)
    keys, values = (
        (torch.randn(prompts, sizes.kv_heads, tokens, width, device=DEVICE) * spread).bfloat16() for _ in range(2)
    )
    queries = (torch.randn(prompts, sizes.query_heads, RECENT, width, device=DEVICE) * spread).bfloat16()
    return CapturedAttention(0, queries, keys, values, None, width**-0.5)


def turned(layer: Any) -> None:
    """Give a layer bases, as with calibrated ones: a step has to multiply by them."""
    _, heads, _, width = layer.tail.keys.shape
    turn = torch.linalg.qr(torch.randn(heads, width, width, device=DEVICE)).Q.contiguous()
    basis = Basis(turn.mT.contiguous(), turn, torch.ones(heads, width, device=DEVICE))
    layer.compressed = replace(layer.compressed, bases=(basis, basis))


def empty_cache(sizes: Model, tokens: int, layers: int, **settings: Any) -> CompressedCache:
    """Return a cache of our kind for so many layers of the shape."""
    config = LlamaConfig(
        hidden_size=sizes.query_heads * sizes.head_dim,
        num_hidden_layers=layers,
        num_attention_heads=sizes.query_heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=tokens + 1,
    )
    return CompressedCache(config, bits=BITS, basis="none", recent_window=RECENT, sink_tokens=SINKS, **settings)


def dense_bytes(sizes: Model, tokens: int, prompts: int) -> int:
    """Return the bytes of a layer's keys and values in bfloat16."""
    return 2 * 2 * prompts * sizes.kv_heads * tokens * sizes.head_dim


def attend(layer: Any, query: Tensor) -> Tensor:
    """Attention of one new token over a coded layer."""
    keys, values, scaling = layer.tail.keys, layer.tail.values, query.shape[-1] ** -0.5
    found = attention_in_place(nn.Identity(), query, keys, values, None, layer.compressed, scaling)
    if found is None:
        raise SystemExit("the kernels for coded tokens are not used here: grace-opt doctor says why")
    return found[0]


def check(layer: Any, query: Tensor) -> None:
    """Stop unless reading in place gives what dense copies give, within what bfloat16 allows."""
    keys, values = (part.float() for part in layer.compressed.dense(layer.tail.keys, layer.tail.values))
    expected = nn.functional.scaled_dot_product_attention(query.float(), keys, values, enable_gqa=True).transpose(1, 2)
    error = (attend(layer, query).float() - expected).abs().max()
    if not error <= 2.0**-7 * expected.abs().max():
        raise SystemExit(f"reading codes in place is off by {error:.2g}: nothing is worth timing")


def replay_of(calls: Callable[[], Any]) -> Callable[[], Any]:
    """Record what calls launch, and return what launches it again; a CPU calls again."""
    if DEVICE == "cpu":
        calls()
        return calls
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            calls()
    torch.cuda.synchronize()
    return graph.replay


def milliseconds(run: Callable[[], Any], device: str = DEVICE) -> float:
    """How long the device takes."""
    clock = Clock(device)
    first = clock.mark()
    run()
    last = clock.mark()
    clock.wait()
    return 1000 * clock.seconds(first, last)


@torch.inference_mode()
def one_layer(sizes: Model, tokens: int, prompts: int, rounds: int) -> dict[str, Any]:
    """Return microseconds of each round, of attention alone, seconds that coding took, and bytes of codes."""
    torch.manual_seed(0)
    plain = dense_bytes(sizes, tokens, prompts)
    query = torch.randn(prompts, sizes.query_heads, 1, sizes.head_dim, device=DEVICE).bfloat16()
    made = {name: coded_layers(sizes, tokens, prompts, **settings) for name, settings in CODED.items()}
    for layers, _, _ in made.values():
        check(layers[0], query)
    every = [(seen.keys, seen.values) for seen in (drawn(sizes, tokens, prompts) for _ in range(1 + COLD // plain))]
    replays = {}
    for backend in FASTEST:

        def dense(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                for keys, values in every:
                    nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each backend says why it cannot be used
                replays[backend.name.removesuffix("_ATTENTION").lower()] = (replay_of(dense), len(every))
        except RuntimeError:
            continue
    for name, (layers, _, _) in made.items():
        replays[name] = (replay_of(lambda layers=layers: [attend(layer, query) for layer in layers]), len(layers))  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in replays}
    for turn in range(rounds + 1):
        for name, (replay, count) in replays.items():
            taken = 1000 * milliseconds(replay) / count
            if turn:
                times[name].append(taken)
    return {
        "tokens": tokens,
        "prompts": prompts,
        "us": times,
        "coding_s": made[OURS][1],
        "coding_one_by_one_s": made[ONE_BY_ONE][1],
        "bytes": made[OURS][2],
    }


def coded_layers(sizes: Model, tokens: int, prompts: int, **settings: Any) -> tuple[list[Any], float, int]:
    """Return coded layers, more than the GPU's caches hold, seconds that coding one took, and bytes of its codes."""
    coded, coding, held = list[Any](), list[float](), 1
    while len(coded) < 2 or (len(coded) * held < COLD and len(coded) < MOST):  # the first one compiles
        seen, cache = drawn(sizes, tokens, prompts), empty_cache(sizes, tokens, 1, **settings)
        Clock(DEVICE).wait()
        began = time.perf_counter()
        layer = filled(cache, {0: seen}).layers[0]
        Clock(DEVICE).wait()
        coding.append(time.perf_counter() - began)
        turned(layer)
        parts = layer.compressed.sizes()
        held = parts["key codes"] + parts["value codes"]
        coded.append(layer)
    return coded, min(coding), held


@torch.inference_mode()
def whole_steps(model: Any, sizes: Model, tokens: int, prompts: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds of each round's step of a whole model, after a prompt of random keys and values."""
    torch.manual_seed(0)
    dense, ours = DynamicCache(config=model.config), empty_cache(sizes, tokens, sizes.layers)
    for index in range(sizes.layers):
        seen = drawn(sizes, tokens, prompts)
        dense.update(seen.keys, seen.values, index)
        filled(ours, {index: seen})
        turned(ours.layers[index])
    ids = torch.randint(sizes.vocabulary, (prompts, 1), device=DEVICE)
    times: dict[str, list[float]] = {DENSE: [], OURS: []}
    for turn in range(rounds + WARM_UP):
        for name, cache, kind in ((DENSE, dense, "sdpa"), (OURS, ours, "grace_sdpa")):
            with attention_implementation(model, kind):
                taken = milliseconds(lambda cache=cache: model(ids, past_key_values=cache))  # type: ignore[misc]
            if turn >= WARM_UP:
                times[name].append(taken)
    return {"tokens": tokens, "prompts": prompts, "ms": times, "bytes": ours.memory_report().total_bytes}


def best_dense(times: dict[str, list[float]]) -> str:
    """Return the fastest dense way."""
    return min(times.keys() - CODED, key=lambda name: statistics.median(times[name]))


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    rate, rows, steps = value["copy_bandwidth"], [], []
    sizes, _ = SHAPES[value.get("shape", LARGE[0])]
    for cell in value["layers"]:
        plain, best = dense_bytes(sizes, cell["tokens"], cell["prompts"]), best_dense(cell["us"])
        dense, ours = (statistics.median(cell["us"][name]) for name in (best, OURS))
        rows.append(
            [
                f"{cell['tokens']:,} × {cell['prompts']}",
                f"{dense:.1f} ({best})",
                f"{ours:.1f}",
                f"{ours / dense:.2f}",
                f"{1e6 * plain / rate:.1f}",
                f"{1e6 * cell['bytes'] / rate:.1f}",
                f"{plain / cell['bytes']:.1f}",
                f"{cell['coding_s']:.2f}",
            ]
        )
        if ONE_BY_ONE in cell["us"]:  # before a trellis was the default, there was no other kind
            single = statistics.median(cell["us"][ONE_BY_ONE])
            rows[-1] += [f"{single:.1f}", f"{single / dense:.2f}", f"{cell['coding_one_by_one_s']:.2f}"]
    for cell in value["steps"]:
        plain = sizes.layers * dense_bytes(sizes, cell["tokens"], cell["prompts"])
        dense, ours = (statistics.median(cell["ms"][name]) for name in (DENSE, OURS))
        steps.append(
            [
                f"{cell['tokens']:,} × {cell['prompts']}",
                f"{dense:.1f}",
                f"{ours:.1f}",
                f"{ours / dense:.2f}",
                f"{plain / 1e9:.2f}",
                f"{cell['bytes'] / 1e9:.2f}",
            ]
        )
    first, last = rows[0], rows[-1]
    return Page(
        title="Decoding from 2.25 bits on a GPU",
        picture="Bars: time of attention over codes divided by that of the fastest dense one, by tokens and prompts",
        headline=f"On a GPU, attention over codes takes {last[3]} times as long as the fastest dense one ({last[0]} "
        f"tokens), and a whole step {steps[-1][3]} times ({steps[-1][0]})",
        draw=lambda figure: _draw(figure, [*rows, *([f"whole step,\n{row[0]}", *row[1:]] for row in steps)]),
        asked=f"How long does attention take on a GPU with `bits={BITS:g}`, whose codes are read where they lie, "
        "beside dense attention?",
        found=f"Attention alone takes {last[3]} times as long over codes as torch's fastest dense one with {last[0]} "
        f"tokens, and {first[3]} times with {first[0]}, and reads {last[6]} times fewer bytes. A whole step of "
        f"transformers, in plain Python, takes {steps[0][3]} times as long as with a dense cache after {steps[0][0]} "
        f"tokens, and {steps[-1][3]} times after {steps[-1][0]}.",
        sure=f"These are medians of {value['rounds']} rounds on one {value['device']}, in bfloat16, with "
        f"{sizes.models}'s shape and random numbers; other GPUs have other ratios. Whole steps are mostly launching, "
        "whatever the cache is, and depend on the processor and on versions of torch and transformers.",
        tables=[
            *table(
                [
                    *("tokens × prompts", "dense, µs", f"{OURS}, µs", "/ dense", "floor, dense", "floor, codes"),
                    *("times fewer bytes", "coding a layer, s"),
                    *("`trellis=False`, µs", "/ dense", "coding, s"),
                ][: len(first)],
                rows,
            ),
            "",
            *table(
                ["whole step, tokens × prompts", "dense, ms", f"{OURS}, ms", "/ dense", "cache, dense, GB", "ours, GB"],
                steps,
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"*Floor*: bytes of keys and values, or of codes, at {rate / 1e12:.2f} TB/s, the rate of a large "
                    "copy. Attention of one layer and one new token is replayed from a CUDA graph of several layers; "
                    "dense attention by each of torch's kernels, the fastest one in the table. Whole steps take turns, "
                    "and are not recorded; dense ones use what torch chooses. Coding is what a prompt's keys and "
                    "values take, the fastest of the layers made; the first one compiles.",
                ],
            )
        ],
    )


def _draw(figure: Figure, rows: Sequence[Sequence[str]]) -> None:
    axes = figure.subplots()
    for place, row in enumerate(rows):
        height = float(row[3])
        axes.bar(place, height, color=BLUE if "step" not in row[0] else SKY, width=0.6)
        axes.text(place, height, row[3], ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(rows)), [row[0] for row in rows])
    axes.set_xlabel("tokens × prompts")
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set_ylabel("time / dense")


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("decode_gpu", __doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each measurement (default %(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU if there is no GPU; needs --out")
    args = parser.parse_args(given)
    if not (args.report_only or args.small or DEVICE == "cuda"):
        raise SystemExit("bench.decode_gpu: torch sees no CUDA device; bench.decode_bits measures on a CPU")
    if args.small and args.out.parent == RESULTS:
        raise SystemExit("--small: times of a tiny model are no results; write --out PATH as well")

    @kernels_here()
    def measured(source: dict[str, Any]) -> dict[str, Any]:
        shape, layers, steps = SMALL if args.small else LARGE
        sizes, copied, found = SHAPES[shape][0], copy_bandwidth(DEVICE), []
        for tokens, prompts in layers:
            found.append(one_layer(sizes, tokens, prompts, args.rounds))
            torch.cuda.empty_cache()
        model = random_weights(shape, None, DEVICE, "bfloat16").model
        whole = [whole_steps(model, sizes, tokens, prompts, args.rounds) for tokens, prompts in steps]
        device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
        about = {"device": device, "shape": shape, "rounds": args.rounds, "copy_bandwidth": copied}
        return {**about, "layers": found, "steps": whole}

    publish(args, page, measured)


if __name__ == "__main__":
    main()
