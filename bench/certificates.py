"""How tight certificates are, in what time, beside single cheap bounds: ``python -m bench.certificates``.

For each set of instances: the gap that ``certify="fast"`` and ``"tight"`` leave for an answer of the default method and
for one of tabu search, the gap by the best of the single bounds, and milliseconds per instance, batched, in one thread
and in all. Writes docs/results/certificates.{json,md,png}; some minutes on two cores.

When: after a change of a bound, or to know what gap to expect of which W. Source: real heads as in `bench.real_heads`,
from a model that is fetched (`bench.material`), or from ``--instances FILE``; all others by seed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from torch import Tensor

from bench.provenance import require_clean
from bench.report import BLUE, GREEN, GREY, ORANGE, Page, add_options, read_results, table, write_results
from bench.solvers.sets import mixed
from grace_opt import Problem, bounds, instances, objective, solve
from grace_opt.attention import prune_count
from grace_opt.bounds.certificates import LARGEST_EIGEN
from grace_opt.instances import generators
from grace_opt.solution import proved, relative_gap

Array = npt.NDArray[np.float64]
#: Method of `solve` where none is named, and one that finds better answers.
DEFAULT, SEARCH = "mies", "tabu"
#: A certificate is below a single bound if it is lower by more than this share of it: relaxations are solved to this.
RTOL = 1e-6
#: No set is timed again once its calls have taken this many seconds in all.
LONG = 3.0
SINGLE: dict[str, Callable[[Problem], Tensor]] = {
    "row": bounds.row_bound,
    "plain": bounds.plain_bound,
    "continuous": bounds.continuous_bound,
    "eigenvalue": bounds.eigenvalue_bound,
}
#: Single bounds that take all eigenvalues of W, by the batch on one core: cheap up to `LARGEST_EIGEN` vertices.
EIGEN = ("continuous", "eigenvalue")


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes
    ----------
    name : str
    k : int
    make : callable
        Gives W, (instances, n, n).
    tight : bool
        Whether ``"tight"`` takes seconds, not minutes.
    """

    name: str
    k: int
    make: Callable[[], Array]
    tight: bool = True


def real_heads(file: Path | None) -> list[Case]:
    """The heads of a trained model, or of a file."""
    if file is None:
        from bench.material import MODEL, books, model_path
        from bench.real_heads import heads

        return real_heads_of(heads(model_path(MODEL), books()[0]))
    return real_heads_of(np.asarray(instances.read(file).W))


def real_heads_of(W: Array) -> list[Case]:
    """At the default share of pruned channels, and at twice that."""
    sizes = [prune_count(ratio, W.shape[-1]) for ratio in (0.3, 0.6)]
    return [Case(f"real heads, n = {W.shape[-1]}", k, lambda: W) for k in sizes]


def pocket_heads() -> Case:
    """The heads of the model that ships with grace_opt, on three prompts."""
    from bench.experiments.problems import make

    config = {"kind": "heads", "model": "", "device": "cpu", "tokens": 400, "ratio": 0.6, "heads": 0}
    found = [one for seed in range(3) for one in make({**config, "seed": seed})]
    W = np.stack([one.W for one in found])
    return Case(f"pocket heads, n = {W.shape[-1]}", found[0].k, lambda: W)


def semidefinite(n: int, seed: int, rank: int = 50) -> Array:
    """A positive semidefinite W of this rank."""
    G = np.random.default_rng([seed, n]).normal(size=(n, rank))
    return np.asarray(G @ G.T)


def generated() -> list[Case]:
    """The sets that are made by seed."""

    def several(count: int, make: Callable[[int], Any]) -> Callable[[], Array]:
        return lambda: np.stack([np.asarray(make(seed), np.float64) for seed in range(count)])

    def attention(n: int, count: int, tight: bool = True) -> Case:
        return Case(
            f"like attention, n = {n}", n * 2 // 5, several(count, lambda s: generators.attention(n, s).W), tight
        )

    return [
        attention(128, 8),
        attention(400, 4),
        attention(1000, 2, tight=False),
        Case("semidefinite of rank 50, n = 1000", 500, several(2, lambda s: semidefinite(1000, s)), tight=False),
        Case("k-cluster, n = 100", 50, several(4, lambda s: generators.k_cluster(100, s).W)),
        Case("maximum diversity, n = 500", 50, several(4, lambda s: generators.dispersion(500, s).W), tight=False),
        Case("of both signs, n = 2000", 1000, several(1, lambda s: mixed(2000, s)), tight=False),
    ]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    W = case.make()
    problem = Problem.of(W, case.k).flatten()
    row: dict[str, Any] = {"name": case.name, "instances": len(W), "n": problem.n, "k": case.k}
    found: dict[str, Tensor] = {}
    for method in (DEFAULT, SEARCH):
        mask = torch.as_tensor(solve(W, case.k, method).mask)
        value = objective.evaluate(problem.W, mask)
        for level in bounds.LEVELS if case.tight else bounds.LEVELS[:1]:
            found[level] = bounds.certificate(problem, level, incumbent=mask)
            row[f"{method} {level}"] = float(relative_gap(problem, mask, value, found[level]).median())
        if method == SEARCH:
            row["proved"] = int(proved(problem, mask, value, found[bounds.LEVELS[0]]).sum())
            row |= beside_single(problem, mask, value, found[bounds.LEVELS[0]])
            row["ms"] = milliseconds(problem, mask, rounds)
    return row


def beside_single(problem: Problem, mask: Tensor, value: Tensor, fast: Tensor) -> dict[str, Any]:
    """The gap by the best single bound, which one that mostly is, and how often ``"fast"`` is not below it."""
    names = [name for name in SINGLE if problem.n <= LARGEST_EIGEN or name not in EIGEN]
    each = torch.stack([torch.minimum(SINGLE[name](problem), value) for name in names])
    best, which = each.max(0)
    return {
        "single": float(relative_gap(problem, mask, value, best).median()),
        "best single": names[int(which.mode().values)],
        "not below": int((fast >= best - RTOL * best.abs()).sum()),
    }


def milliseconds(problem: Problem, mask: Tensor, rounds: int) -> dict[str, float]:
    """Per instance, by number of threads; medians of rounds that take turns."""
    taken: dict[str, list[float]] = {str(threads): [] for threads in sorted({1, torch.get_num_threads()})}
    for _ in range(rounds):
        for threads, times in taken.items():
            if sum(times) < LONG:
                with in_threads(int(threads)):
                    began = time.perf_counter()
                    bounds.certificate(problem, incumbent=mask)
                    times.append(time.perf_counter() - began)
    return {threads: 1000 * statistics.median(times) / len(problem.k) for threads, times in taken.items()}


@contextmanager
def in_threads(count: int) -> Iterator[None]:
    """Inside, torch and certificates use this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def page(value: dict[str, Any]) -> Page:
    """What docs/results/certificates.md says of the numbers."""
    rows = value["rows"]
    real = [row for row in rows if row["name"].startswith("real heads")]
    best = max(row[f"{SEARCH} fast"] for row in real)
    single = min(row["single"] for row in real)
    threads = sorted(rows[0]["ms"], key=int)
    slowest = max(row["ms"][threads[-1]] for row in real)
    below = sum(row["instances"] - row["not below"] for row in rows)
    total = sum(row["instances"] for row in rows)
    shown = [
        [
            row["name"],
            str(row["k"]),
            str(row["instances"]),
            *(_percent(row.get(f"{method} {level}")) for method in (DEFAULT, SEARCH) for level in bounds.LEVELS),
            f"{_percent(row['single'])} ({row['best single']})",
            *(_number(row["ms"][of]) for of in threads),
            f"{row['proved']} of {row['instances']}",
            f"{row['not below']} of {row['instances']}",
        ]
        for row in rows
    ]
    return Page(
        title="Certificates: how small a gap they show, and in what time",
        picture="Median gap of a tabu answer by the best single bound, by fast and by tight, and the time of fast",
        draw=lambda figure: draw(figure, rows, threads),
        asked='How small a gap does `certify="fast"` show for a good answer, in what time, and is it ever below a '
        "single cheap bound?",
        found=f"On real heads a tabu answer has a median gap of at most {_percent(best)} in {_number(slowest)} ms per "
        f"instance, where the best single bound leaves {_percent(single)} or more; "
        + (
            f"no certificate is below any single bound ({total} instances)."
            if not below
            else f"{below} of {total} certificates are below a single bound, which should never be."
        ),
        sure="Bounds hold for every instance; gaps are medians of the instances named, most of which are made by seed, "
        f"and times are medians of up to {value['rounds']} calls on one machine.",
        tables=[
            "MIES and tabu: median gaps of their answers, by fast and tight certificates. ms: per instance, for fast.",
            "",
            *table(
                [
                    "W",
                    "k",
                    "instances",
                    "MIES, fast",
                    "MIES, tight",
                    "tabu, fast",
                    "tabu, tight",
                    "tabu, best single bound",
                    *(f"ms, {of} thread{'s' * (of != '1')}" for of in threads),
                    "tabu proved by fast",
                    "never below",
                ],
                shown,
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    "Gaps are medians of f less the bound, by |f|; a gap of the default method (MIES) includes what "
                    "its answer lacks. Times: `grace_opt.bounds.certificate` for tabu's answers, all instances of the "
                    f"set in one call. Single bounds: `row_bound`, `plain_bound` and, up to {LARGEST_EIGEN} vertices, "
                    "`continuous_bound` and `eigenvalue_bound`; the one named is best most often. Never below: "
                    f"instances where fast is at least the best of them, to a relative {RTOL:g}. Tight is left out "
                    "where it takes minutes.",
                ],
            )
        ],
    )


def draw(figure: Any, rows: Sequence[dict[str, Any]], threads: Sequence[str]) -> None:
    """Gaps, on an axis that is linear near zero, and times."""
    figure.set_size_inches(9, 0.5 * len(rows) + 1.6)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    y = np.arange(len(rows))
    kinds = (
        ("single", "best single bound", GREY),
        (f"{SEARCH} fast", "fast", BLUE),
        (f"{SEARCH} tight", "tight", GREEN),
    )
    for place, (key, name, colour) in enumerate(kinds):
        values = [100 * row[key] if key in row else np.nan for row in rows]
        at = y + 0.27 * (place - 1)
        left.barh(at, values, 0.25, color=colour, label=name)
        for height, value in zip(at, values, strict=True):
            if np.isfinite(value):
                left.annotate(_percent(value / 100), (value, height), (3, 0), textcoords="offset points",
                              va="center", fontsize=7)  # fmt: skip
    left.set_xscale("symlog", linthresh=1.0)
    largest = max(100 * row["single"] for row in rows)
    left.set_xlim(0, 8 * max(largest, 1))
    left.set_xticks([0, 1, 10, 100, *([1000] if largest > 300 else [])])
    left.set_xticklabels(["0", "1 %", "10 %", "100 %", *(["1000 %"] if largest > 300 else [])])
    left.set_yticks(y, [f"{row['name']}, k = {row['k']}" for row in rows], fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("median gap of a tabu answer")
    left.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    times = [row["ms"][threads[-1]] for row in rows]
    right.barh(y, times, 0.6, color=ORANGE)
    for height, taken in zip(y, times, strict=True):
        right.annotate(_number(taken), (taken, height), (3, 0), textcoords="offset points", va="center", fontsize=7)
    right.set_xscale("log")
    right.set_xlim(min(times) / 3, 8 * max(times))
    right.set_xlabel(f"ms per instance, fast, {threads[-1]} threads")
    for axes in (left, right):
        axes.grid(visible=False, axis="y")


def _percent(share: float | None) -> str:
    """A gap in two or three digits."""
    if share is None:
        return "–"
    percent = 100 * share
    return "0 %" if percent < 5e-4 else f"{percent:.2g} %" if percent < 10 else f"{percent:,.0f} %"


def _number(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="calls that are timed (default %(default)s)")
    parser.add_argument("--instances", type=Path, help="real heads (heads, n, n) that there are already")
    add_options(parser, "certificates")
    args = parser.parse_args()
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        bounds.prepare()
        cases = [*real_heads(args.instances), pocket_heads(), *generated()]
        rows = [measure(case, args.rounds) for case in track(cases, description="certificates")]
        value = {"provenance": source, "rounds": args.rounds, "rows": rows}
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
