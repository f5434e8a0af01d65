"""How fast selection is, per instance, beside a line-by-line Python transcription of Algorithm 1 and a numpy loop.

``python -m bench.selection`` measures everything interleaved in one run and writes
docs/results/selection.{json,md,png}; the same functions run under pytest-benchmark with ``make bench``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.progress import track

from bench.cost_model import MODELS, PROBES, Cost, probes
from bench.provenance import require_clean
from bench.report import BLUE, GREY, ORANGE, SKY, Page, add_options, bars, read_results, table, write_results
from grace_opt import MaskProvider, interaction_matrix, solve

INSTANCES, N, K, QUERIES, KEYS = 256, 128, 77, 128, 1024
#: Calls of a contender when its turn comes.
CALLS = 7
PLAIN, LOOP = "Algorithm 1, plain Python", "Algorithm 1, numpy loop"


def python_mies(W: list[list[float]], k: int) -> list[int]:
    """Algorithm 1 of GRACE, line by line in plain Python."""
    n = len(W)
    score = [W[i][i] for i in range(n)]
    remaining, chosen = list(range(n)), []
    for _ in range(k):
        best = remaining[0]
        for i in remaining:
            if score[i] < score[best]:
                best = i
        remaining.remove(best)
        chosen.append(best)
        row = W[best]
        for i in remaining:
            score[i] += 2.0 * row[i]
    return sorted(chosen)


def numpy_mies(W: np.ndarray[Any, Any], k: int) -> list[int]:
    """Algorithm 1 with a numpy operation for each line."""
    score, chosen = np.diag(W).copy(), []
    for _ in range(k):
        best = int(np.argmin(score))
        chosen.append(best)
        score += 2.0 * W[best]
        score[best] = np.inf
    return sorted(chosen)


def attention_like(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (B, 1, L_obs, d) and keys (B, 1, L, d) with channel scales as uneven as attention's."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(INSTANCES, 1, QUERIES, N, generator=g) * torch.randn(INSTANCES, 1, 1, N, generator=g).exp()
    k = torch.randn(INSTANCES, 1, KEYS, N, generator=g) * torch.randn(INSTANCES, 1, 1, N, generator=g).exp()
    return q, k + torch.randn(INSTANCES, 1, 1, N, generator=g)


def contenders() -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (what to time, instances that one call covers)."""
    q, k = attention_like()
    W = interaction_matrix(q, k)[:, 0].contiguous()
    lists, arrays = [w.tolist() for w in W[:8]], [w.numpy() for w in W]
    doubles = W.double()
    chosen = solve(W, K).indices
    if [python_mies(w, K) for w in lists] != chosen[:8].tolist() or numpy_mies(arrays[0], K) != chosen[0].tolist():
        raise SystemExit("the contenders do not choose alike: nothing is worth timing")
    protect = MaskProvider("grace", 0.6)
    return {
        "Algorithm 1, plain Python": (lambda: [python_mies(w, K) for w in lists], len(lists)),
        "Algorithm 1, numpy loop": (lambda: [numpy_mies(w, K) for w in arrays], INSTANCES),
        "mies, check=False": (lambda: solve(W, K, "mies", check=False), INSTANCES),
        "mies, with checks": (lambda: solve(W, K, "mies"), INSTANCES),
        "mies, float64, check=False": (lambda: solve(doubles, K, "mies", check=False), INSTANCES),
        "think, check=False": (lambda: solve(W, K, "think", check=False), INSTANCES),
        "local_search, check=False": (lambda: solve(W, K, "local_search", check=False), INSTANCES),
        f"W from {QUERIES} queries, {KEYS} keys": (lambda: interaction_matrix(q, k), INSTANCES),
        "provider: W + protection + mies": (lambda: protect(q, k), INSTANCES),
    }


def floors(copy: float, product: float) -> dict[str, float]:
    """Least milliseconds per instance by the bytes and products of the cost model, at the rates of these two probes.

    Parameters
    ----------
    copy, product : float
        Milliseconds of the copy and of the square product of `bench.cost_model.PROBES`.
    """
    _, side, count = PROBES["cpu"]
    bandwidth, rate = 8 * count / copy * 1000, 2 * side**3 / product * 1000  # a copy reads and writes
    steps, whole = 4 * N * (K + 1), 4 * N * N
    rows = QUERIES + KEYS
    found = {
        "mies, check=False": Cost(steps, 2 * N * K),
        "mies, with checks": Cost(whole + steps, 2 * N * K),
        "mies, float64, check=False": Cost(2 * steps, 2 * N * K),
        f"W from {QUERIES} queries, {KEYS} keys": Cost(4 * rows * N + whole, 2 * rows * N * N),
    }
    return {name: 1000 * cost.floor(bandwidth, rate) for name, cost in found.items()}


def measure(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds per instance, of the later calls of a turn and of its first; the contenders take turns."""
    table = contenders()
    rates = probes(MODELS["llama3-8b"], KEYS, "cpu")
    table |= {name: (rates[name], 1) for name in ("copy", "product")}
    for run, _ in table.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in table}
    firsts: dict[str, list[float]] = {name: [] for name in table}
    for _ in track(range(rounds), description="selection"):
        for name, (run, count) in table.items():
            calls = []
            for _ in range(CALLS):
                began = time.perf_counter()
                run()
                calls.append(1000 * (time.perf_counter() - began) / count)
            # The first finds the others' data in the caches, and a second core asleep: told apart from the later ones.
            firsts[name].append(calls[0])
            times[name].append(statistics.median(calls[CALLS // 2 :]))
    later, first = ({name: statistics.median(values) for name, values in of.items()} for of in (times, firsts))
    return later, first


def page(value: dict[str, Any]) -> Page:
    """What docs/results/selection.md says of the numbers."""
    medians, firsts, least = value["ms_per_instance"], value["first_calls"], value["floors"]
    plain, loop = medians[PLAIN], medians[LOOP]
    rows = []
    for name, taken in medians.items():
        ratios = [f"{plain / taken:.1f}", f"{loop / taken:.1f}"] if not name.startswith("W from") else ["–", "–"]
        floor = f"{least[name]:.4f}" if name in least else "–"
        rows.append([name, f"{taken:.4f}", f"{firsts[name]:.4f}", floor, *ratios])
    fast, checked = medians["mies, check=False"], medians["mies, with checks"]
    return Page(
        title="Time to choose channels",
        picture="Bars: how many times faster than plain Python each way of choosing channels is",
        draw=lambda figure: draw(figure, medians),
        asked=f"How long does it take to choose {K} of {N} channels, compared with the paper's Algorithm 1 in plain "
        "Python and in numpy?",
        found=f"MIES takes {1000 * fast:.1f} µs per head in a batch of {INSTANCES}: {plain / fast:.0f} times faster "
        f"than Python and {loop / fast:.0f} times faster than numpy. If it also checks its input, it is "
        f"{plain / checked:.0f} and {loop / checked:.0f} times faster.",
        sure=f"These are medians of {value['rounds']} rounds on one machine, all ways taking turns; plain Python, "
        "numpy and MIES choose the same channels. On other machines, expect similar ratios, not similar times.",
        tables=[
            "*check=False* skips the checks of W; *lower bound* is the least time by the [cost model](cost_model.md).",
            "",
            *table(
                [
                    "what",
                    "ms per head",
                    "ms, first call",
                    "ms, lower bound",
                    "× faster than Python",
                    "× faster than numpy",
                ],
                rows,
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    f"{INSTANCES} matrices W of {N}×{N}, k = {K}, in float32 unless the row says otherwise. Plain "
                    "Python follows Algorithm 1 line by line; numpy uses one operation per line. The last two rows "
                    "also compute W: the provider is what the cache calls for each layer.",
                    "",
                    f"In each round, every way is called {CALLS} times in a row. Ratios use the median of the later "
                    "calls: the first one starts with the data of the previous way in the processor's caches, and "
                    "with sleeping threads. The lower bound is that of the [cost model](cost_model.md), at the rates "
                    "of a copy and of a matrix product in the same run.",
                ],
            )
        ],
    )


def draw(figure: Any, medians: dict[str, float]) -> None:
    """Speed-ups over plain Python, on a logarithmic axis."""
    ways = {name: medians[PLAIN] / taken for name, taken in medians.items() if not name.startswith("W from")}
    colours = [GREY if "Algorithm" in name else ORANGE if "provider" in name else BLUE for name in ways]
    colours = [
        SKY if name.startswith(("think", "local")) else colour for name, colour in zip(ways, colours, strict=True)
    ]
    axes = figure.subplots()
    bars(axes, list(ways), list(ways.values()), [f"{times:.0f} ×" for times in ways.values()], colours)
    axes.set_xscale("log")
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.set_xlim(0.8, 2.2 * max(ways.values()))
    axes.set_xlabel("times faster than plain Python, per instance")
    axes.set_title(f"Choosing {K} of {N} channels, {INSTANCES} instances at once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns per contender (default %(default)s)")
    add_options(parser, "selection")
    args = parser.parse_args()
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        medians, firsts = measure(args.rounds)
        least = floors(medians.pop("copy"), medians.pop("product"))
        value = {"provenance": source, "rounds": args.rounds}
        value |= {"ms_per_instance": medians, "first_calls": firsts, "floors": least}
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
