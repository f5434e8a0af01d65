"""The least that selecting channels, reading a prompt and decoding can cost: ``python -m bench.cost_model``.

This is a roofline model: a pass over the data takes at least the time to move its bytes at the memory's bandwidth, and
at least the time to compute its matrix products at the machine's rate. Bytes and operations follow from the shape of a
model; bandwidth and rate are measured on this machine (``--device cuda`` for a GPU) or given. The result is a limit for
every implementation, not the speed of ours. Writes docs/results/cost_model.{json,md,png}.

Source: the roofline is Williams, Waterman and Patterson (Communications of the ACM 52(4), 2009); shapes are from the
models' ``config.json``; the H200's peaks are from NVIDIA's data sheet, where the dense bfloat16 rate is half of the one
stated with sparsity.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.cache_bytes import INDEX, ITEM, RECENT, Shape, dense, ours
from bench.cost_model_page import page
from bench.provenance import require_clean
from bench.report import add_options, read_results, si, write_results
from grace_opt import interaction_matrix
from grace_opt.attention.weights import prune_count

OBSERVED = 32  # queries that W is built from, the adapter's default
SINGLE = 4  # bytes of a float32, in which W is stored
#: By device: type of the products, side of the matrices, elements of the copied float32 tensor.
PROBES = {"cpu": (torch.float32, 2048, 2**26), "cuda": (torch.bfloat16, 8192, 2**28)}


@dataclass(frozen=True)
class Cost:
    """What one pass over the data must move and compute.

    Attributes
    ----------
    bytes : int
        Read from and written to main memory.
    flops : int
        Multiplications and additions of products.

    Examples
    --------
    >>> Cost(bytes=100, flops=6).floor(bandwidth=50, rate=2)
    3.0
    """

    bytes: int
    flops: int

    def floor(self, bandwidth: float, rate: float) -> float:
        """Seconds that it takes at least.

        Parameters
        ----------
        bandwidth : float
            Bytes per second.
        rate : float
            Operations per second.
        """
        return max(self.bytes / bandwidth, self.flops / rate)

    def times(self, count: int) -> Cost:
        """The same ``count`` times over, for instance once per layer."""
        return Cost(count * self.bytes, count * self.flops)


@dataclass(frozen=True)
class Model(Shape):
    """A decoder's sizes, besides those of its cache."""

    hidden: int
    intermediate: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices: queries and output, keys and values, and the gated MLP's three."""
        attention = 2 * self.hidden * self.head_dim * (self.query_heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Numbers in the matrix that makes logits; the embedding is looked up and costs a row per token."""
        return self.hidden * self.vocabulary


MODELS = {
    "llama3-8b": Model("Llama-3-8B", 32, 8, 32, 128, 4096, 14336, 128256),
    "mistral-7b": Model("Mistral-7B-Instruct-v0.2", 32, 8, 32, 128, 4096, 14336, 32000),
    "qwen3-8b": Model("Qwen3-8B", 36, 8, 32, 128, 4096, 12288, 151936),
    "smollm2-135m": Model("SmolLM2-135M", 30, 3, 9, 64, 576, 1536, 49152),
}


@dataclass(frozen=True)
class Rates:
    """What a machine can do: bytes and operations per second, and where the two figures are from."""

    source: str
    bandwidth: float
    rate: float


VENDOR = Rates("NVIDIA H200, the vendor's figures, nothing measured here", 4.8e12, 989e12)


def gram(model: Model, context: int, batch: int = 1, observed: int = OBSERVED) -> Cost:
    """QᵀQ and KᵀK of one layer, and from them W: one read of K and of the observed queries, one write of W.

    Parameters
    ----------
    model : Model
    context, batch : int
        Tokens of the prompt, and how many prompts.
    observed : int
        Queries that W is built from, per query head.

    Notes
    -----
    Element-wise work, d² per head, is left out of ``flops``; the diagonal of KᵀK has the squared norms that protection
    needs, so that K need not be read for these again.
    """
    width = model.head_dim
    rows = batch * (model.kv_heads * context + model.query_heads * observed)
    return Cost(rows * width * ITEM + batch * model.kv_heads * width**2 * SINGLE, 2 * rows * width**2)


def mies(model: Model, ratio: float, batch: int = 1) -> Cost:
    """MIES on one layer's heads: the diagonal and k rows of W are read, each to update n scores.

    Parameters
    ----------
    model : Model
    ratio : float
        Share of the channels to prune; n = d and k = ⌈λd⌉.
    batch : int

    Notes
    -----
    The k steps wait for each other. That, and not this floor, is what a small instance takes.
    """
    width = model.head_dim
    count, instances = prune_count(ratio, width), batch * model.kv_heads
    return Cost(instances * (count + 1) * width * SINGLE, instances * 2 * count * width)


def gather(model: Model, context: int, ratio: float, batch: int = 1) -> Cost:
    """Pack one layer's kept channels: read K, write what `CompressedCache` stores of it, kept indices included.

    Parameters
    ----------
    model : Model
    context : int
    ratio : float
    batch : int

    Notes
    -----
    All of K counts as read: a token's kept channels lie scattered over its 2d bytes, and memory is read in lines.
    """
    keys, _ = ours(model, context, ratio)
    return Cost(batch * (dense(model, context) + keys) // model.layers, 0)


def prefill(model: Model, context: int, batch: int = 1) -> Cost:
    """Read a prompt with dense causal attention: all layers, and the logits of the last token.

    Parameters
    ----------
    model : Model
    context, batch : int

    Notes
    -----
    Bytes are the weights, read once, and K and V, written once. A floor: activations are thought to stay in fast
    memory. Position t attends to t keys, not to all, and costs 4 H d t in each layer: two products.
    """
    weights = model.layers * model.layer_weights
    attention = model.layers * 2 * model.query_heads * model.head_dim * context * (context + 1)
    flops = 2 * (weights * context + model.head_weights) + attention
    moved = (weights + model.head_weights) * ITEM + batch * 2 * dense(model, context)
    return Cost(moved, batch * flops)


def decode(model: Model, context: int, ratio: float | None = None, batch: int = 1) -> Cost:
    """One step after a prompt: the weights, the cache of the prompt, and the new token's own key and value.

    Parameters
    ----------
    model : Model
    context : int
        Tokens of the prompt.
    ratio : float, optional
        Share of the channels that were pruned; the last 32 tokens and the new one are dense. None is a dense cache.
    batch : int

    Notes
    -----
    Weights are read once for the whole batch, the cache once per sequence.
    """
    width = model.head_dim
    keys, values, old = dense(model, context), dense(model, context), 0
    kept = width
    if ratio is not None:
        keys, values = ours(model, context, ratio)
        old, kept = context - RECENT, width - prune_count(ratio, width)
    weights = model.layers * model.layer_weights + model.head_weights
    logits = 2 * model.query_heads * (kept * old + width * (context + 1 - old))
    output = 2 * model.query_heads * width * (context + 1)
    moved = weights * ITEM + batch * (keys + values + 2 * dense(model, 1))
    return Cost(moved, batch * (2 * weights + model.layers * (logits + output)))


def cache_ratio(model: Model, context: int, ratio: float) -> float:
    """Bytes of dense K and V by those that remain: 1/(1 − λ/2), but for rounding, the recent window and indices."""
    return 2 * dense(model, context) / sum(ours(model, context, ratio))


def passes(model: Model, context: int, ratio: float, batch: int) -> dict[str, tuple[Cost, ...]]:
    """What is computed, by name; each is one pass, or several that wait for each other.

    Parameters
    ----------
    model : Model
    context : int
    ratio : float
    batch : int
    """
    matrices = gram(model, context, batch)
    of_all = [cost.times(model.layers) for cost in (matrices, mies(model, ratio, batch))]
    of_all.append(gather(model, context, ratio, batch).times(model.layers))
    return {
        "W, one layer": (matrices,),
        "W, all layers": (of_all[0],),
        "MIES, all layers": (of_all[1],),
        "packing K, all layers": (of_all[2],),
        "selection: these three": tuple(of_all),
        "dense prefill": (prefill(model, context, batch),),
        "dense decoding step": (decode(model, context, None, batch),),
        "pruned decoding step": (decode(model, context, ratio, batch),),
    }


def seconds(costs: Sequence[Cost], rates: Rates) -> float:
    """The floor of passes that wait for each other."""
    return sum(cost.floor(rates.bandwidth, rates.rate) for cost in costs)


def summary(model: Model, context: int, ratio: float, batch: int, machines: Sequence[Rates]) -> dict[str, Any]:
    """Everything about one model, context and batch, for the JSON file and the tables.

    Parameters
    ----------
    model : Model
    context : int
    ratio : float
    batch : int
    machines : sequence of Rates
    """
    found = passes(model, context, ratio, batch)
    costs = {name: {key: sum(asdict(c)[key] for c in of) for key in ("bytes", "flops")} for name, of in found.items()}
    plain, pruned = costs["dense decoding step"], costs["pruned decoding step"]
    floors = []
    for rates in machines:
        times = {name: seconds(of, rates) for name, of in found.items()}
        floors.append(
            {
                "machine": rates.source,
                "seconds": times,
                "bound_by": {name: bound_by(of, rates) for name, of in found.items()},
                "selection_by_prefill": times["selection: these three"] / times["dense prefill"],
                "step_ratio": times["dense decoding step"] / times["pruned decoding step"],
            }
        )
    return {
        "context": context,
        "batch": batch,
        "costs": costs,
        "cache_ratio": cache_ratio(model, context, ratio),
        "step_bytes_ratio": plain["bytes"] / pruned["bytes"],
        "floors": floors,
    }


def bound_by(costs: Sequence[Cost], rates: Rates) -> str:
    """Which of the two the longest of the passes waits for: ``"bytes"`` or ``"products"``."""
    slowest = max(costs, key=lambda cost: cost.floor(rates.bandwidth, rates.rate))
    return "products" if slowest.flops / rates.rate > slowest.bytes / rates.bandwidth else "bytes"


def probes(model: Model, context: int, device: str) -> dict[str, Callable[[], object]]:
    """What is timed, by name: a large copy, a square product, and `interaction_matrix` of one layer, batch 1.

    Parameters
    ----------
    model : Model
    context : int
    device : str
        On a CPU the product is of float32, on a GPU of bfloat16; queries and keys are bfloat16 on both.
    """
    dtype, side, count = PROBES[device]
    source = torch.ones(count, device=device)
    target = torch.zeros_like(source)
    left, right = torch.randn(2, side, side, device=device, dtype=dtype)
    queries = torch.randn(1, model.query_heads, min(OBSERVED, context), model.head_dim, device=device).bfloat16()
    keys = torch.randn(1, model.kv_heads, context, model.head_dim, device=device).bfloat16()
    return {
        "copy": lambda: target.copy_(source),
        "product": lambda: left @ right,
        "W": lambda: interaction_matrix(queries, keys),
    }


def timed(runs: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, sorted, the calls taking turns, after a turn that is not counted.

    Parameters
    ----------
    runs : mapping
        What to time, by name.
    device : str
        ``"cuda"`` is waited for before and after each call.
    rounds : int
    """

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = now()
            run()
            times[name].append(now() - began)
    return {name: sorted(of) for name, of in times.items()}


def measure(args: argparse.Namespace) -> tuple[Rates, str, dict[str, float]]:
    """The rates of the machine at hand, measured where they are not given.

    Returns
    -------
    rates : Rates
    words : str
        Where the two are from.
    times : dict
        Median seconds by name; empty if both rates are given.
    """
    dtype, side, count = PROBES[args.device]
    given = [None if args.bandwidth is None else 1e9 * args.bandwidth]
    given.append(None if args.matrix_rate is None else 1e12 * args.matrix_rate)
    if None not in given:
        bandwidth, rate = given
        return Rates("here", bandwidth, rate), f"{si(bandwidth, 'B/s')} given, {si(rate, 'FLOP/s')} given", {}
    times = timed(probes(MODELS[args.shape[0]], min(args.context), args.device), args.device, args.rounds)
    median = {name: statistics.median(of) for name, of in times.items()}
    work = {"copy": 2 * count * SINGLE, "product": 2 * side**3}
    kind, size = str(dtype).removeprefix("torch."), count * SINGLE / 2**20
    what = {
        "copy": f"a copy of {size:,.0f} MiB, read and written",
        "product": f"a {kind} product, {side:,} × {side:,}",
    }
    rates, words = [], []
    for name, rate, unit in zip(work, given, ("B/s", "FLOP/s"), strict=True):
        rates.append(rate or work[name] / median[name])
        fastest = si(work[name] / times[name][0], unit)
        words.append(si(rates[-1], unit) + (" given" if rate else f" measured ({what[name]}; the fastest: {fastest})"))
    threads = torch.get_num_threads()
    device = "the CPU, " + ("1 thread" if threads == 1 else f"{threads} threads")
    if args.device == "cuda":
        device = torch.cuda.get_device_name()
    return Rates("here", *rates), " and ".join(words) + f"; medians of {args.rounds} on {device}", median


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=MODELS, default=list(MODELS), help="models; the first in detail")
    parser.add_argument("--context", nargs="+", type=int, default=[8192, 32768], help="tokens (default %(default)s)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="prompts at once (default %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.6, help="share of channels pruned (default %(default)s)")
    parser.add_argument("--bandwidth", type=float, help="GB/s, instead of measuring it")
    parser.add_argument("--matrix-rate", type=float, help="TFLOP/s, instead of measuring it")
    parser.add_argument("--device", choices=PROBES, default="cpu", help="what to measure (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of each measurement (default %(default)s)")
    add_options(parser, "cost_model")
    args = parser.parse_args()
    if min(args.context) <= RECENT:
        parser.error(f"--context must be more than the {RECENT} tokens that stay dense")
    if min(*args.batch, args.rounds, 1) < 1:
        parser.error("--batch and --rounds must be at least 1")
    if not 0 < args.ratio < 1:
        parser.error("--ratio must lie between 0 and 1")
    if any(given is not None and not given > 0 for given in (args.bandwidth, args.matrix_rate)):
        parser.error("--bandwidth and --matrix-rate must be positive")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return args


def results(args: argparse.Namespace, source: dict[str, Any]) -> dict[str, Any]:
    """Everything that the page is formed from."""
    here, words, times = measure(args)
    models = [MODELS[name] for name in args.shape]
    cells = [(context, batch) for context in args.context for batch in args.batch]
    found = [(m, [summary(m, context, args.ratio, batch, [here, VENDOR]) for context, batch in cells]) for m in models]
    measured = None
    if args.bandwidth is None and args.matrix_rate is None:
        context = min(args.context)
        least = gram(models[0], context).floor(here.bandwidth, here.rate)
        measured = {"context": context, "seconds": times["W"], "floor": least}
    return {
        "provenance": source,
        "ratio": args.ratio,
        "rates": words,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "machines": [asdict(rates) for rates in (here, VENDOR)],
        "constants": {"recent": RECENT, "observed": OBSERVED, "item": ITEM, "index": INDEX},
        "interaction_matrix": measured,
        "models": [{**asdict(model), "cells": of_model} for model, of_model in found],
    }


def main() -> None:
    args = arguments()
    value = read_results(args.out) if args.report_only else results(args, require_clean(args.allow_dirty))
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
