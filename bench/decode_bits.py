"""Steps on a cache with bits for each channel: ``python -m bench.decode_bits``.

*Whole steps*: a trained model reads a passage once; a dense cache, one with ``bits=2.25``, the same with one layer at a
time made dense instead of being read where it lies, GRACE with keys and values in 4 bits and transformers'
QuantizedCache in 4 bits are filled with it, and take turns of two steps, of which the second is timed, as does a dense
cache of hardly any tokens, which shows what no cache can save. *One layer*: attention of one new token in heads like
the model's, without its weights: keys and values are normal numbers with decaying spread, coded in 2.25 bits in a given
basis; dense attention is the fastest way to write it. Each call uses another layer's tensors, so that none is in the
processor's caches. *Memory*: the most bytes allocated at once while a prompt is read, by the profiler's events, besides
the weights.

Everything in float32 on the CPU. Ratios are medians over the rounds. Floors are the bytes of weights and caches at the
rate of a large copy, which also writes: reading alone can be faster. If a model was measured on another processor
before, the page keeps what that one took. Writes docs/results/decode_bits.{json,md,png}. If they are missing, models
and texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.caches import SINKS, calibrated
from bench.caches import WINDOW as RECENT
from bench.decode_bits_layer import one_layer, with_less
from bench.decode_bits_page import BEFORE, BITS, CODED, COPIES, DENSE, HERE, NOTHING, OURS, PEER, elsewhere, page
from bench.efficiency.measure import peak
from bench.efficiency.methods import held_bytes, int4, missing
from bench.growth import of_texts
from bench.machine import copy_bandwidth
from bench.material import books
from bench.report import parser_of
from bench.several import publish_models
from grace_opt.hf import CompressedCache, Quantize, attention_implementation, capture_attention
from grace_opt.hf.engine.filling import filled
from grace_opt.kernels._shared.switches import LLVM, is_off

#: Tokens of a passage whose steps are measured, of one layer's context, and of a prompt whose memory is.
PASSAGES, LAYER, READ = (2048, 8000), 16384, 7000
#: Steps of a cache's turn, of which the last is timed: in a generation, a step follows one of the same cache.
STEPS = 2


def caches(model: PreTrainedModel, file: Path) -> dict[str, Callable[[], Any]]:
    """Return how to make each empty cache; transformers' QuantizedCache takes no model with a sliding window."""
    windows: dict[str, Any] = {"recent_window": RECENT, "sink_tokens": SINKS}
    few = Quantize(4)
    found: dict[str, Callable[[], Any]] = {
        DENSE: lambda: DynamicCache(config=model.config),
        **{
            name: lambda kind=kind: CompressedCache(model, bits=BITS, basis=file, **kind, **windows)
            for name, kind in CODED.items()
        },
        BEFORE: lambda: CompressedCache(model, ratio=0.5, quantize=few, recent_window=RECENT),
        PEER: lambda: int4(model, 0.0, None).cache,
    }
    if found[DENSE]().is_sliding.count(True):
        del found[PEER]
    return found


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
    every = caches(model, file)
    made = {name: filled(make(), captured) for name, make in {**every, COPIES: every[OURS]}.items()}
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
    sizes = {
        name: cache.memory_report().total_bytes if isinstance(cache, CompressedCache) else held_bytes(cache)
        for name, cache in made.items()
    }
    weights = sum(part.nbytes for part in model.parameters())
    return {"tokens": tokens, "ms": times, "bytes": sizes, "weight_bytes": weights}


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


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("decode_bits", __doc__, models=True)
    parser.add_argument("--rounds", type=int, default=25, help="steps per cache (default %(default)s)")
    args = parser.parse_args(given)
    needed = max(PASSAGES) + STEPS * (args.rounds + 1)
    before = elsewhere(args.out)

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        if (reason := missing("grace+int4-kv")) is not None:
            raise SystemExit(reason)
        if needed > (context := model.config.max_position_embeddings):
            raise SystemExit(
                f"--rounds {args.rounds}: {needed} tokens are fed, but the context of {name} has {context}"
            )
        ((_, ids),) = of_texts((args.text or books())[:1], tokenizer, needed)
        file = args.runs / name / "basis.safetensors"
        calibrated(model, tokenizer, file, source)
        *_, layer = capture_attention(model, ids[:, :8]).values()
        heads = layer.keys.shape[1], layer.queries.shape[1], layer.keys.shape[3]
        return {
            "copy_bandwidth": copy_bandwidth("cpu"),
            "heads": heads,
            "layer": {HERE: one_layer(heads, LAYER, args.rounds), **with_less(heads, LAYER, args.rounds)},
            "steps": [whole_steps(model, ids, tokens, file, args.rounds) for tokens in PASSAGES],
            "peak": reading(model, ids, file),
            "elsewhere": [one for one in before.get(name, []) if one["provenance"]["cpu"] != source["cpu"]],
        }, {}

    settings = {"rounds": args.rounds, "turn": STEPS, "read": READ, "threads": torch.get_num_threads()}
    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()
