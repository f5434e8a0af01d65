"""How fast selection is, per instance, beside a line-by-line Python transcription of Algorithm 1 and a numpy loop.

``python -m bench.selection`` measures everything interleaved in one run and writes docs/results/selection.{json,md};
the same functions run under pytest-benchmark with ``make bench``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from bench.cost_model import MODELS, PROBES, Cost, probes
from bench.provenance import caption, provenance, write_json
from grace_opt import MaskProvider, interaction_matrix, solve

INSTANCES, N, K, QUERIES, KEYS = 256, 128, 77, 128, 1024
#: Calls of a contender when its turn comes.
CALLS = 7
RESULTS = Path(__file__).parent.parent / "docs" / "results"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns per contender (default %(default)s)")
    args = parser.parse_args()
    medians, firsts = measure(args.rounds)
    least = floors(medians.pop("copy"), medians.pop("product"))
    source = provenance()
    write_json(
        RESULTS / "selection.json",
        {
            "provenance": source,
            "rounds": args.rounds,
            "ms_per_instance": medians,
            "first_calls": firsts,
            "floors": least,
        },
    )
    plain, loop = medians["Algorithm 1, plain Python"], medians["Algorithm 1, numpy loop"]
    lines = [
        f"{INSTANCES} instances of {N}×{N}, k = {K}, float32 unless said; medians of {args.rounds} interleaved rounds, "
        f"in each of which a contender is called {CALLS} times. Ratios are of the later calls' medians; the first call "
        "of a turn finds the others' data in the caches and a second core asleep. "
        "The floor: bytes and products of the cost model, at the rates of a copy and of a product in the same run.",
        "",
        "| what | ms per instance | first call, ms | floor, ms | × faster than Python | × faster than the numpy loop |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, value in medians.items():
        selects = not name.startswith("W from")
        ratios = f"{plain / value:.1f} | {loop / value:.1f}" if selects else "– | –"
        floor = f"{least[name]:.4f}" if name in least else "–"
        lines.append(f"| {name} | {value:.4f} | {firsts[name]:.4f} | {floor} | {ratios} |")
    (RESULTS / "selection.md").write_text("\n".join([*lines, "", caption(source), ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
