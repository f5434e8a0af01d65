"""Steps on a cache with bits for each channel: ``python -m bench.decode_bits``.

*Whole steps*: a trained model reads a passage once; a dense cache, one with ``bits=2.25``, the same with one layer at a
time made dense instead of being read where it lies, GRACE with keys and values in 4 bits and transformers'
QuantizedCache in 4 bits are filled with it, and take turns of two steps, of which the second is timed, as does a dense
cache of hardly any tokens, which shows what no cache can save. *One layer*: attention of one new token over
Llama-3-8B's shape, without its weights: keys and values are normal numbers with decaying spread, coded in 2.25 bits in
a given basis; dense attention is the fastest way to write it. Each call uses another layer's tensors, so that none is
in the processor's caches. *Memory*: the most bytes allocated at once while a prompt is read, by the
profiler's events, besides the weights.

Everything in float32 on the CPU. Ratios are medians over the rounds. Floors are the bytes of weights and caches at the
rate of a large copy, which also writes: reading alone can be faster. Writes docs/results/decode_bits.{json,md,png}. If
they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and the texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.caches import SINKS, calibrated
from bench.caches import WINDOW as RECENT
from bench.efficiency.measure import peak
from bench.efficiency.methods import int4, missing
from bench.growth import of_texts
from bench.machine import MODELS, Model, copy_bandwidth
from bench.material import books, open_model
from bench.report import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    Page,
    parser_of,
    publish,
    read_results,
    table,
)
from bench.wheel import KINDS
from grace_opt.hf import CapturedAttention, CompressedCache, Quantize, attention_implementation, capture_attention
from grace_opt.hf.bases.basis import Basis
from grace_opt.hf.stores.coded.in_place import attention_in_place
from grace_opt.hf.tools.filling import dense_cache, filled
from grace_opt.kernels._shared.lanes import FEATURES
from grace_opt.kernels._shared.switches import LLVM, is_off

ROOT = Path(__file__).parent.parent
BITS = 2.25
#: Tokens of a passage whose steps are measured, of one layer's context, and of a prompt whose memory is.
PASSAGES, LAYER, READ = (2048, 8000), (2048, 16384), 7000
DENSE, OURS, BEFORE, PEER = "dense", f"bits={BITS:g}", "GRACE, K and V in 4 bits", "QuantizedCache, 4 bits"
#: Numbers coded one by one, and `CODED`, kinds of codes with their settings.
ONE_BY_ONE = f"{OURS}, trellis=False"
CODED: dict[str, dict[str, Any]] = {OURS: {}, ONE_BY_ONE: {"trellis": False}}
#: Steps of `OURS` without reading in place.
COPIES = f"bits={BITS:g}, dense copies"
#: A dense cache of one token: what a step takes if there is nothing to read but the weights.
NOTHING = "no tokens to read"
COLOURS = {DENSE: BLACK, OURS: BLUE, ONE_BY_ONE: PINK, COPIES: GREEN, BEFORE: GREY, PEER: ORANGE, NOTHING: SKY}
#: Steps of a cache's turn, of which the last is timed: in a generation, a step follows one of the same cache.
STEPS = 2
#: Bytes that no processor's cache holds.
COLD = 2**26
#: Kinds of processors that loops are compiled for, with what torch and MKL call the widest vectors they may use then.
POORER = {"x86-64-v3": ("avx2", "AVX2"), "x86-64-v4": ("avx512", "AVX512")}
_ONE_LAYER = "import json, sys; from bench.decode_bits import one_layer; json.dump(one_layer(*{}), sys.stdout)"


def caches(model: PreTrainedModel, file: Path) -> dict[str, Callable[[], Any]]:
    """Return how to make each empty cache."""
    windows = {"recent_window": RECENT, "sink_tokens": SINKS}
    few = Quantize(4)
    return {
        DENSE: lambda: DynamicCache(config=model.config),
        **{
            name: lambda kind=kind: CompressedCache(model, bits=BITS, basis=file, **kind, **windows)
            for name, kind in CODED.items()
        },
        BEFORE: lambda: CompressedCache(model, ratio=0.5, quantize=few, recent_window=RECENT),
        PEER: lambda: int4(model, 0.0, None).cache,
    }


@contextmanager
def out_of_place() -> Iterator[None]:
    """Make coded layers dense to read them, as the switch of the environment does, which is looked up once."""
    try:
        with mock.patch.dict(os.environ, {LLVM: "0"}):
            is_off.cache_clear()
            yield
    finally:
        is_off.cache_clear()


@torch.inference_mode()
def whole_steps(model: PreTrainedModel, ids: Tensor, tokens: int, file: Path, rounds: int) -> dict[str, Any]:
    """Return milliseconds of each round's step, and bytes, of every cache after the same passage."""
    captured = capture_attention(model, ids[:, :tokens])
    made: dict[str, Any] = {}
    every = caches(model, file)
    for name, make in {**every, COPIES: every[OURS]}.items():
        cache = make()
        if isinstance(cache, CompressedCache):
            filled(cache, captured)
        elif name == DENSE:
            cache = dense_cache(model, captured)
        else:
            for index, layer in captured.items():
                cache.update(layer.keys, layer.values, index)
        made[name] = cache
    del captured
    made[NOTHING] = DynamicCache(config=model.config)
    model(ids[:, :1], past_key_values=made[NOTHING])
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in track(range(rounds + 1), description=f"whole steps after {tokens:,} tokens"):
        for name, cache in made.items():
            kind = "grace_sdpa" if isinstance(cache, CompressedCache) else "sdpa"
            with out_of_place() if name == COPIES else nullcontext(), attention_implementation(model, kind):
                for place in range(tokens + STEPS * turn, tokens + STEPS * (turn + 1)):
                    began = time.perf_counter()
                    model(ids[:, place : place + 1], past_key_values=cache)
                    taken = time.perf_counter() - began
            if turn:  # the first ones compile, and wake threads
                times[name].append(1000 * taken)
    sizes = {name: c.memory_report().total_bytes for name, c in made.items() if isinstance(c, CompressedCache)}
    weights = sum(part.nbytes for part in model.parameters())
    return {"tokens": tokens, "ms": times, "bytes": sizes, "weight_bytes": weights}


def coded_layer(tokens: int, **kind: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return coded tokens of Llama-3-8B's shape, a query, and the dense tail."""
    sizes = MODELS["llama3-8b"]
    heads, width = sizes.kv_heads, sizes.head_dim
    spread = 4.0 ** -torch.linspace(0, 2, width)
    keys, values = (torch.randn(1, heads, tokens, width) * spread for _ in range(2))
    queries = torch.randn(1, sizes.query_heads, RECENT, width) * spread
    config = LlamaConfig(
        hidden_size=sizes.query_heads * width,
        num_hidden_layers=1,
        num_attention_heads=sizes.query_heads,
        num_key_value_heads=heads,
        max_position_embeddings=tokens + 1,
    )
    cache = CompressedCache(config, bits=BITS, basis="none", recent_window=RECENT, sink_tokens=SINKS, **kind)
    seen = CapturedAttention(0, queries, keys, values, None, width**-0.5)
    layer = filled(cache, {0: seen}).layers[0]
    turn = torch.linalg.qr(torch.randn(heads, width, width)).Q.contiguous()
    basis = Basis(turn.mT.contiguous(), turn, torch.ones(heads, width))
    # As with a calibrated basis: the step has to multiply by it.
    old = replace(layer.compressed, bases=(basis, basis))
    return old, queries[:, :, -1:], layer.tail.keys, layer.tail.values


def dense_contenders(model: Model, layers: Sequence[tuple[Tensor, Tensor]], q: Tensor) -> dict[str, Any]:
    """Return the fast ways to write dense attention, by name; each takes the number of a layer."""
    grouped = q.view(1, model.kv_heads, model.query_heads // model.kv_heads, model.head_dim)
    sdpa, scaling = nn.functional.scaled_dot_product_attention, model.head_dim**-0.5
    ways: dict[str, Callable[..., Any]] = {
        "eager, grouped": lambda k, v: torch.softmax(grouped @ k.mT * scaling, dim=-1) @ v,
        "sdpa, grouped": lambda k, v: sdpa(grouped, k, v),
        "sdpa, enable_gqa": lambda k, v: sdpa(q, k, v, enable_gqa=True),
    }
    return {name: lambda i, way=way: way(*layers[i]) for name, way in ways.items()}


@torch.inference_mode()
def one_layer(tokens: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds of each round, of attention alone."""
    torch.manual_seed(0)
    sizes, module = MODELS["llama3-8b"], nn.Identity()
    coded = {name: [coded_layer(tokens, **kind)] for name, kind in CODED.items()}
    held, count = coded[OURS][0][0].sizes(), 1
    while count * (held["key codes"] + held["value codes"]) < COLD and count < 30:
        count += 1
        for name, kind in CODED.items():
            coded[name].append(coded_layer(tokens, **kind))
    shape = 1, sizes.kv_heads, tokens, sizes.head_dim
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(min(count, 5))]
    ways = dense_contenders(sizes, layers, torch.randn(1, sizes.query_heads, 1, sizes.head_dim))

    def ours(number: int, name: str) -> Any:
        old, query, keys, values = coded[name][number % count]
        return attention_in_place(module, query, keys, values, None, old, sizes.head_dim**-0.5)

    for made in coded.values():
        check(made[0])
    left, right = torch.randn(2, 256, 256)
    ways |= {name: functools.partial(ours, name=name) for name in CODED}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in track(range(rounds + 1), description=f"one layer of Llama-3-8B, {tokens:,} tokens"):
        for name, run in ways.items():
            taken = 0.0
            for number in range(len(layers)):
                left @ right
                began = time.perf_counter()
                run((turn * len(layers) + number) % count if name in CODED else number)
                taken += time.perf_counter() - began
            if turn:
                times[name].append(1000 * taken / len(layers))
    plain = sum(part.nbytes for part in layers[0])
    return {"tokens": tokens, "ms": times, "dense_bytes": plain, "bytes": held["key codes"] + held["value codes"]}


def with_less(tokens: int, rounds: int) -> dict[str, Any]:
    """Return what `one_layer` measures where loops and torch may use less of this processor than it has, by kind."""
    found = {}
    for kind, (widest, name) in POORER.items():
        features = frozenset(f"+{feature}" for feature in KINDS[kind].split())
        if not features < FEATURES:
            continue
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {
                "NUMBA_CPU_NAME": "x86-64",
                "NUMBA_CPU_FEATURES": ",".join(sorted(features)),
                "NUMBA_CACHE_DIR": folder,
                "ATEN_CPU_CAPABILITY": widest,
                "MKL_ENABLE_INSTRUCTIONS": name,
            }
            command = [sys.executable, "-c", _ONE_LAYER.format((tokens, rounds))]
            done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found[kind] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def check(layer: tuple[Any, Tensor, Tensor, Tensor]) -> None:
    """Stop unless reading in place gives what dense copies give."""
    old, query, tail, values = layer
    found = attention_in_place(nn.Identity(), query, tail, values, None, old, query.shape[3] ** -0.5)
    keys, values = old.dense(tail, values)
    expected = nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(1, 2)
    if found is None or not torch.allclose(found[0], expected, atol=1e-5):
        raise SystemExit("reading codes in place gives other numbers than dense copies: nothing is worth timing")


def reading(model: PreTrainedModel, ids: Tensor, file: Path) -> dict[str, int]:
    """Return the most bytes allocated at once while a prompt is read, by cache."""
    found = {}
    for name, make in track(caches(model, file).items(), description=f"memory, {READ:,} tokens"):
        cache = make()
        kind = "grace_sdpa" if isinstance(cache, CompressedCache) else "sdpa"
        with attention_implementation(model, kind), torch.inference_mode():
            found[name] = peak(lambda c=cache: model(ids[:, :READ], past_key_values=c, logits_to_keep=1), "cpu")
        del cache
    return found


def ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def best_dense(times: Mapping[str, Sequence[float]]) -> str:
    """Return the fastest dense way."""
    return min(times.keys() - CODED, key=lambda name: statistics.median(times[name]))


def summary(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what other machines' pages say of these numbers."""
    steps = {
        str(cell["tokens"]): {
            DENSE: ratio(cell["ms"], OURS, DENSE),
            NOTHING: ratio(cell["ms"], NOTHING, DENSE),
            PEER: ratio(cell["ms"], OURS, PEER),
        }
        for cell in value["steps"]
    }
    times = value["layers"][-1]["ms"]
    return {"provenance": value["provenance"], "steps": steps, "layer": ratio(times, best_dense(times), OURS)}


def elsewhere(out: Path, cpu: str) -> list[dict[str, Any]]:
    """Return the summaries of other machines in the results that are about to be replaced, and of these results."""
    if not out.with_name(out.name + ".json").exists():
        return []
    before = read_results(out)
    return [one for one in (*before.get("elsewhere", []), summary(before)) if one["provenance"]["cpu"] != cpu]


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    steps, layers, rate = value["steps"], value["layers"], value["copy_bandwidth"]
    rows = []
    for cell in steps:
        for name, times in cell["ms"].items():
            size = cell["bytes"].get(name) if name != DENSE else value["dense_bytes"][str(cell["tokens"])]
            floor = "" if size is None else f"{1000 * (cell['weight_bytes'] + size) / rate:.1f}"
            rows.append(
                [
                    f"{cell['tokens']:,}",
                    name,
                    f"{statistics.median(times):.1f}",
                    f"{ratio(cell['ms'], name, DENSE):.2f}",
                    f"{ratio(cell['ms'], OURS, name):.2f}",
                    "" if size is None else f"{size / 1e6:.1f}",
                    floor,
                ]
            )
    alone = [_layer_row(f"{cell['tokens']:,}", cell) for cell in layers]
    last, most, others = steps[-1], layers[-1], value.get("elsewhere", [])
    machines = [
        [
            ", ".join(one["provenance"][name] for name in ("cpu", "date", "commit")),
            *(f"{share:.2f}" for shares in one["steps"].values() for share in shares.values()),
            f"{one['layer']:.1f}",
        ]
        for one in (summary(value), *others)
    ]
    head = [f"{cell['tokens']:,}: {what}" for cell in steps for what in ("/ dense", "no tokens / dense", f"/ {PEER}")]
    of_layer = ["best dense, ms", f"{OURS}, ms", "times faster", "with `trellis=False`", "times fewer bytes"]
    poorer = [_layer_row(kind, cell) for kind, cell in value["with_less"].items()]
    return Page(
        title="Steps on 2.25 bits",
        picture="Bars: time of a whole decoding step as a share of the dense cache's, by cache, after two passages",
        headline=f"With bits={BITS:g}, a step takes {ratio(steps[0]['ms'], OURS, DENSE):.2f} of the dense cache's time "
        f"after {steps[0]['tokens']:,} tokens, {ratio(last['ms'], OURS, DENSE):.2f} after {last['tokens']:,}",
        draw=lambda figure: _draw(figure, steps),
        asked=f"How long does a decoding step take on a cache with `bits={BITS:g}`, read where it lies, on "
        f"{value['model']} and a CPU?",
        found=f"After {last['tokens']:,} tokens a whole step takes {ratio(last['ms'], OURS, DENSE):.2f} of the dense "
        f"cache's time, and {ratio(last['ms'], OURS, PEER):.2f} of QuantizedCache's; after {steps[0]['tokens']:,}, "
        f"{ratio(steps[0]['ms'], OURS, DENSE):.2f} of the dense cache's. With no tokens to read, a step takes "
        f"{ratio(last['ms'], NOTHING, DENSE):.2f} of the dense cache's time after {last['tokens']:,}. Attention "
        f"alone, of Llama-3-8B's shape and {most['tokens']:,} tokens, is "
        f"{ratio(most['ms'], best_dense(most['ms']), OURS):.1f} times as fast as the "
        f"fastest dense one, and {ratio(most['ms'], best_dense(most['ms']), ONE_BY_ONE):.1f} times without a trellis.",
        sure=f"These are medians of {value['rounds']} rounds on one machine with {value['threads']} threads, in "
        f"float32, all caches taking turns of {value['turn']} steps, of which the last is timed. Reading the weights "
        "takes most of a short step, whatever the cache is."
        + "".join(
            f" On {one['provenance']['cpu']}, the step after {last['tokens']:,} took "
            f"{one['steps'][str(last['tokens'])][DENSE]:.2f} of the dense cache's time."
            for one in others
        ),
        tables=[
            *table(
                ["tokens", "cache", "step, ms", "/ dense", f"{OURS} / this", "cache, MB", "floor, ms"],
                rows,
            ),
            "",
            *table(["one layer, tokens", *of_layer], alone),
            "",
            *table(
                ["cache", f"most bytes while {READ:,} tokens are read, MB"],
                [[name, f"{size / 1e6:.0f}"] for name, size in value["peak"].items()],
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"*Floor*: bytes of the weights and of the cache at {rate / 1e9:.1f} GB/s, the rate of a large "
                    "copy (reading alone can be faster). The one layer's codes are of normal numbers with decaying "
                    "spread in a random basis. Bytes of the one layer are those of codes.",
                ],
            ),
            (
                "Processors with less",
                [
                    f"One layer at {most['tokens']:,} tokens, in processes that were told to use no more of this "
                    "processor than all of a kind have: AVX2 (x86-64-v3), or AVX-512 without GFNI (x86-64-v4). "
                    "Processors of these kinds have other caches and clocks.",
                    "",
                    *table(["kind", *of_layer], poorer),
                ],
            ),
            (
                "This machine and others",
                [
                    f"Steps with `bits={BITS:g}`, and with no tokens to read, as shares of others' time; the last "
                    f"column says how many times as fast one layer is at {most['tokens']:,} tokens. Other machines "
                    "had the commits that stand with them.",
                    "",
                    *table(["machine, date, commit", *head, "one layer"], machines),
                ],
            ),
        ],
    )


def _layer_row(name: str, cell: Mapping[str, Any]) -> list[str]:
    best, times = best_dense(cell["ms"]), cell["ms"]
    return [
        name,
        f"{statistics.median(times[best]):.2f} ({best})",
        f"{statistics.median(times[OURS]):.2f}",
        f"{ratio(times, best, OURS):.2f}",
        f"{ratio(times, best, ONE_BY_ONE):.2f}",
        f"{cell['dense_bytes'] / cell['bytes']:.1f}",
    ]


def _draw(figure: Figure, steps: Sequence[Mapping[str, Any]]) -> None:
    axes = figure.subplots()
    names = [name for name in steps[0]["ms"] if name != COPIES]  # whose bars would hide the others'
    for number, cell in enumerate(steps):
        for place, name in enumerate(names):
            x = number * (len(names) + 1) + place
            share = ratio(cell["ms"], name, DENSE)
            axes.bar(x, share, color=COLOURS[name], label=name if not number else None)
            white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            axes.text(x, share + 0.02, f"{share:.2f}", ha="center", va="bottom", fontsize=8, bbox=white)
    middle = (len(names) - 1) / 2
    axes.set_xticks(
        [number * (len(names) + 1) + middle for number in range(len(steps))],
        [f"{cell['tokens']:,} tokens" for cell in steps],
    )
    axes.axhline(1, color=BLACK, linewidth=0.8, zorder=0.5)  # behind the bars and their numbers
    axes.set_ylabel("time of a step / dense")
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("decode_bits", __doc__, model=True)
    parser.add_argument("--rounds", type=int, default=25, help="steps per cache (default %(default)s)")
    args = parser.parse_args(given)

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        reason = missing("grace+int4-kv")
        if reason is not None:
            raise SystemExit(reason)
        model, tokenizer, name = open_model(args)
        ((_, ids),) = of_texts((args.text or books())[:1], tokenizer, max(PASSAGES) + STEPS * (args.rounds + 1))
        file = args.runs / "basis.safetensors"
        calibrated(model, tokenizer, file, source)
        copied = copy_bandwidth("cpu")
        layers = [one_layer(tokens, args.rounds) for tokens in LAYER]
        steps = [whole_steps(model, ids, tokens, file, args.rounds) for tokens in PASSAGES]
        config = model.config
        width = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return {
            **{"model": name, "rounds": args.rounds, "turn": STEPS, "threads": torch.get_num_threads()},
            **{"copy_bandwidth": copied, "layers": layers, "with_less": with_less(LAYER[-1], args.rounds)},
            "steps": steps,
            "dense_bytes": {str(tokens): width * tokens for tokens in PASSAGES},
            "peak": reading(model, ids, file),
            "elsewhere": elsewhere(args.out, source["cpu"]),
        }

    publish(args, page, measured)


if __name__ == "__main__":
    main()
