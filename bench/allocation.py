"""How fast `allocate` divides a budget and how close it comes, beside bisection on one price and HiGHS (scipy's milp).

``python -m bench.allocation`` measures everything interleaved in one run and writes
docs/results/allocation.{json,md,png}. Instances are drawn by seed: bits of channels in
classes of tokens, and random losses and costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.progress import track
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from bench.provenance import require_clean
from bench.report import BLUE, GREY, ORANGE, SKY, Page, add_options, read_results, table, write_results
from grace_opt import Status, allocate

SIZES, LEVELS = (64, 512, 4096), 8
BITS = np.array([0, 1, 2, 3, 4, 5, 6, 8])
#: Tokens in each of four classes of a prompt of 1,792.
TOKENS = np.array([36, 179, 538, 1039])
KINDS = {"bits": "bits of channels", "real": "random losses and costs"}
#: Instances that one call covers: those of a batch, and those solved one by one.
BATCH, FEW = 32, 4
#: Seconds per instance for methods that may not end.
LIMIT = 10.0
LAGRANGIAN, EXACT, BISECTION, HIGHS = "allocate", "allocate, exact", "bisection", "HiGHS"
COLOURS = {LAGRANGIAN: BLUE, EXACT: SKY, BISECTION: GREY, HIGHS: ORANGE}

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float]
#: What a contender returns: objectives, lower bounds (-inf for none), and which it proved.
Answers = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def drawn(kind: str, n: int, seed: int = 0) -> Arrays:
    """Losses and costs (BATCH, n, L), and the budget."""
    rng = np.random.default_rng([n, seed])
    if kind == "bits":  # of each channel in each of four classes of tokens, with 32 more for a scale and a mean
        tokens = np.resize(TOKENS, (n, 1))
        losses = rng.lognormal(0, 2, (BATCH, n, 1)) * tokens * 4.0**-BITS * rng.uniform(0.8, 1.2, (BATCH, n, LEVELS))
        costs = tokens * BITS + 32.0 * (BITS > 0)
        return losses, np.broadcast_to(costs, losses.shape), 2.0 * float(tokens.sum())
    losses = np.sort(rng.random((BATCH, n, LEVELS)))[..., ::-1].copy()
    return losses, np.sort(rng.random((BATCH, n, LEVELS))), 0.4 * n


def bisection(losses: np.ndarray[Any, Any], costs: np.ndarray[Any, Any], budget: float) -> Answers:
    """What people write first: one price per instance, halved 60 times, and no bound."""
    low, high = np.full(len(losses), 1e-14), np.full(len(losses), 1e8)

    def chosen(price: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray((losses + price[:, None, None] * costs).argmin(-1))[..., None]

    for _ in range(60):
        price = np.sqrt(low * high)
        over = np.take_along_axis(costs, chosen(price), -1).sum((1, 2)) > budget
        low, high = np.where(over, price, low), np.where(over, high, price)
    objective = np.take_along_axis(losses, chosen(high), -1).sum((1, 2))
    return objective, np.full(len(losses), -np.inf), np.zeros(len(losses), bool)


def ours(method: str) -> Callable[..., Answers]:
    """`allocate` on the whole batch."""

    def run(losses: np.ndarray[Any, Any], costs: np.ndarray[Any, Any], budget: float) -> Answers:
        limit = None if method == "lagrangian" else LIMIT * len(losses)
        found = allocate(losses, costs, budget, method=method, time_limit=limit)
        return found.objective, found.lower_bound, found.status == Status.OPTIMAL

    return run


def highs(losses: np.ndarray[Any, Any], costs: np.ndarray[Any, Any], budget: float) -> Answers:
    """The same as an integer program, instance by instance, to a gap of zero or the time limit."""
    n = losses.shape[1]
    one = sparse.kron(sparse.eye(n), np.ones((1, LEVELS)), "csr")
    found = [
        milp(
            f.ravel(),
            constraints=[LinearConstraint(one, 1, 1), LinearConstraint(sparse.csr_array(c.reshape(1, -1)), 0, budget)],
            integrality=np.ones(f.size),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0.0, "time_limit": LIMIT},
        )
        for f, c in zip(losses, costs, strict=True)
    ]
    objective = np.array(
        [np.inf if r.x is None else (f.ravel() @ np.round(r.x)) for r, f in zip(found, losses, strict=True)]
    )
    bound = np.array([-np.inf if r.mip_dual_bound is None else r.mip_dual_bound for r in found])
    return objective, bound, np.array([r.status == 0 for r in found])


#: Name -> (what to run, instances per call).
CONTENDERS: dict[str, tuple[Callable[..., Answers], int]] = {
    BISECTION: (bisection, BATCH),
    LAGRANGIAN: (ours("lagrangian"), BATCH),
    EXACT: (ours("exact"), FEW),
    HIGHS: (highs, FEW),
}


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row per kind, size and contender: milliseconds per instance, gap to the best bound of all, share proved."""
    rows = []
    for kind, n in track([(kind, n) for kind in KINDS for n in SIZES], description="allocation"):
        losses, costs, budget = drawn(kind, n)
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        answers: dict[str, Answers] = {}
        for run, _ in CONTENDERS.values():
            run(losses[:1], costs[:1], budget)  # warm
        for round_ in range(rounds):
            for name, (run, count) in CONTENDERS.items():
                if count == FEW and round_:
                    continue  # seconds long: once is enough
                began = time.perf_counter()
                answers[name] = run(losses[:count], costs[:count], budget)
                times[name].append(1000 * (time.perf_counter() - began) / count)
        best = np.max([bound[:FEW] for _, bound, _ in answers.values()], axis=0)
        value = np.min([f[:FEW] for f, _, _ in answers.values()], axis=0)
        if not (answers[LAGRANGIAN][1][:FEW] <= value * (1 + 1e-9)).all():
            raise SystemExit(f"{kind}, n = {n}: a lower bound of allocate is above another method's answer")
        for name, (f, _, proved) in answers.items():
            gap = float(np.mean(f[:FEW] / np.minimum(best, value) - 1))
            row = {"kind": kind, "n": n, "method": name, "ms": statistics.median(times[name])}
            rows.append(row | {"gap": max(gap, 0.0), "proved": float(np.mean(proved[:FEW]))})
    return rows


def page(value: dict[str, Any]) -> Page:
    """What docs/results/allocation.md says of the numbers."""
    rows = value["rows"]
    by = {(row["kind"], row["n"], row["method"]): row for row in rows}
    middle, large = SIZES[1], SIZES[-1]
    fast, slow = by["bits", middle, LAGRANGIAN], by["bits", middle, HIGHS]
    worst = max(row["gap"] for row in rows if row["method"] == LAGRANGIAN and row["n"] == large)
    return Page(
        title="Dividing a budget: speed and gap",
        picture="Milliseconds per instance of each way of dividing a budget, by number of groups",
        draw=lambda figure: draw(figure, rows),
        asked=f"How long does dividing a budget over n groups of {LEVELS} levels take, and how far from optimal is the "
        "answer, beside bisection on one price and an integer-programming solver?",
        found=f"`allocate` takes {fast['ms']:.2f} ms for {middle} channels' bits, {slow['ms'] / fast['ms']:,.0f} times "
        f"less than HiGHS; at {large:,} groups its answers are within {100 * worst:.4f} % of the optimum, certified.",
        sure=f"Medians of {value['rounds']} rounds on one machine, one run for {EXACT} and HiGHS; gaps are means over "
        f"{FEW} instances, to the best lower bound of all methods. Instances are drawn, not measured on a model.",
        tables=table(
            ["instances", "groups", "method", "ms per instance", "above the best bound, %", "proved optimal, %"],
            [
                [KINDS[r["kind"]], f"{r['n']:,}", r["method"], f"{r['ms']:.3f}", f"{100 * r['gap']:.5f}",
                 f"{100 * r['proved']:.0f}"]
                for r in rows
            ],
        ),
        details=[
            (
                "How it is counted",
                [
                    f"{BATCH} instances per call for {BISECTION} and {LAGRANGIAN}, {FEW} one by one for the others, "
                    f"which get {LIMIT:.0f} s per instance. Bisection halves the price 60 times and gives no bound. "
                    "HiGHS is scipy's `milp` with `mip_rel_gap=0`; what it calls proved holds to its own tolerances.",
                ],
            )
        ],
    )  # fmt: skip


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Time by size, a line for each method, a panel for each kind."""
    for axes, (kind, words) in zip(figure.subplots(1, len(KINDS), sharey=True), KINDS.items(), strict=True):
        for name, colour in COLOURS.items():
            line = [row for row in rows if row["kind"] == kind and row["method"] == name]
            axes.loglog([row["n"] for row in line], [row["ms"] for row in line], "o-", color=colour, label=name)
        axes.set_title(words)
        axes.set_xlabel("groups")
    axes.legend(frameon=False)
    figure.axes[0].set_ylabel("ms per instance")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns per contender (default %(default)s)")
    add_options(parser, "allocation")
    args = parser.parse_args()
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        value = {"provenance": source, "rounds": args.rounds, "rows": measure(args.rounds)}
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
