"""How much the hand-written LLVM and the use of torch's OpenMP threads gain: times with both, and without each.

``python -m bench.hand_made`` writes docs/results/hand_made.{json,md,png}. Three processes take turns, one call each, in
an order that changes from round to round: one with both, one with ``GRACE_OPT_LLVM=0``, one with
``GRACE_OPT_OPENMP=0``. The gain is the ratio of the times without and with, in the same round: its median over the
rounds and their middle half. The ratio of the fastest calls is the least disturbed by other work on the machine. As in
a model, an untimed matrix product comes before each call: it wakes torch's threads, which are asleep again before the
next process has its turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import track

from bench.provenance import require_clean
from bench.report import BLACK, BLUE, ORANGE, Page, add_options, bars, read_results, small, table, write_results

WITH, LLVM, OPENMP = "all on", "GRACE_OPT_LLVM=0", "GRACE_OPT_OPENMP=0"
#: Seconds until the threads of the process that was asked last are asleep.
PAUSE = 0.03
#: What is timed, and the switches that have a part in it.
CASES = {
    "MIES, 64 heads of width 128, k = 77": (LLVM,),
    "checks of W, 64 heads of width 128": (LLVM,),
    "local search, 16 heads of width 128, from random": (LLVM,),
    "decoding, Llama-3-8B's shape, 4,096 tokens": (LLVM, OPENMP),
    "decoding, Llama-3-8B's shape, 16,384 tokens": (LLVM, OPENMP),
    "decoding, SmolLM2-135M's shape, 4,096 tokens": (LLVM, OPENMP),
}


def calls() -> dict[str, Callable[[], Any]]:
    """What each case runs, by name; made once per process."""
    import grace_opt
    from grace_opt.kernels.extremes import extremes
    from grace_opt.kernels.greedy import greedy_order

    generator = torch.Generator().manual_seed(0)
    G = torch.randn(64, 128, 128, generator=generator)
    W, every, k = G @ G.mT, torch.ones(64, 128, dtype=torch.bool), torch.full((64,), 77)
    start = grace_opt.solve(W[:16], 64, "random").mask
    runs: list[Callable[[], Any]] = [
        lambda: greedy_order(W, None, every, k, 77),
        lambda: extremes(W),
        lambda: grace_opt.solve(W[:16], 64, "local_search", start=start, check=False),
        decoding(generator, 32, 8, 128, 4096),
        decoding(generator, 32, 8, 128, 16384),
        decoding(generator, 9, 3, 64, 4096),
    ]
    return dict(zip(CASES, runs, strict=True))


def decoding(generator: torch.Generator, query_heads: int, heads: int, width: int, tokens: int) -> Callable[[], Any]:
    """One step over 60 % fewer key channels: by the compiled loops or, where they are off, by torch."""
    from grace_opt.kernels.decode import kernel_for
    from grace_opt.kernels.decode.reference import attention

    kept, recent = width - -(-width * 3 // 5), 32
    index = torch.rand(1, heads, width, generator=generator).argsort(-1)[..., :kept].sort(-1).values
    counts = (tokens - recent, kept), (0, width), (recent, width), (tokens - recent, width), (recent, width)
    stored = [torch.randn(1, heads, *count, generator=generator) for count in counts]
    query = torch.randn(1, query_heads, 1, width, generator=generator)
    run = kernel_for(query, *stored) or attention
    return lambda: run(query, stored[0], index, *stored[1:])


def work() -> None:
    """A worker: a case's number in, seconds out."""
    left, right = torch.randn(2, 256, 256)
    with torch.inference_mode():
        table = list(calls().values())
        for line in sys.stdin:
            run = table[int(line)]
            left @ right
            began = time.perf_counter()
            run()
            print(time.perf_counter() - began, flush=True)


@contextmanager
def worker(switch: str) -> Iterator[Callable[[int], float]]:
    """A process with this switch, and how to ask it for a case."""
    name, _, value = switch.partition("=")
    env = {key: text for key, text in os.environ.items() if not key.startswith("GRACE_OPT_")}
    env |= {name: value} if value else {}
    command = [sys.executable, "-m", "bench.hand_made", "--worker"]
    with subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(case: int) -> float:
            print(case, file=process.stdin, flush=True)
            return float(process.stdout.readline())

        yield ask
        process.stdin.close()


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by case and switch."""
    times: dict[str, dict[str, list[float]]] = {
        case: {switch: [] for switch in (WITH, *switches)} for case, switches in CASES.items()
    }
    with worker(WITH) as on, worker(LLVM) as no_llvm, worker(OPENMP) as no_openmp:
        ask = {WITH: on, LLVM: no_llvm, OPENMP: no_openmp}
        for number, (case, found) in enumerate(times.items()):
            for turn in track(range(-2, rounds), description=case):  # the first two compile, and warm up
                order = list(found)
                for switch in order[turn % len(order) :] + order[: turn % len(order)]:
                    time.sleep(PAUSE)
                    taken = ask[switch](number)
                    if turn >= 0:
                        found[switch].append(taken)
    return times


def summary(times: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """One row for each case and switch."""
    rows = []
    for case, found in times.items():
        for switch in (name for name in found if name != WITH):
            ratios = [without / on for without, on in zip(found[switch], found[WITH], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            on, off = (1000 * statistics.median(found[name]) for name in (WITH, switch))
            fastest = min(found[switch]) / min(found[WITH])
            row = {"case": case, "switch": switch, "on_ms": on, "off_ms": off, "gain": middle, "half": [low, high]}
            rows.append({**row, "gain_of_fastest": fastest})
    return rows


def page(value: dict[str, Any]) -> Page:
    """What docs/results/hand_made.md says of the numbers."""
    rows, load = value["rows"], value["load"]
    least, most = (
        {switch: choose(row["gain"] for row in rows if row["switch"] == switch) for switch in (LLVM, OPENMP)}
        for choose in (min, max)
    )
    busy = f"; the machine was busy (load {load:.0f}), so trust the last column most" if (load or 0) > 3 else ""
    slower = " (below 1: faster without)" if min(least.values()) < 1 else ""
    return Page(
        title="Hand-made LLVM and torch's threads",
        picture="Bars: how many times longer each loop takes without the hand-made code",
        draw=lambda figure: draw(figure, rows),
        asked="How much time do the hand-written LLVM instructions and the use of torch's OpenMP threads save?",
        found=f"The loops take {least[LLVM]:.1f} to {most[LLVM]:.1f} times as long without the instructions, and "
        f"decoding takes {least[OPENMP]:.1f} to {most[OPENMP]:.1f} times as long without torch's threads{slower}.",
        sure=f"These are medians of {value['rounds']} rounds with {value['threads']} threads, all variants taking "
        f"turns{busy}.",
        tables=[
            "*Without / with*: ratio of both times in the same round, its median and, in small type, its middle half.",
            "",
            *table(
                ["what", "without", "with it, ms", "without, ms", "without / with", "the same, fastest calls"],
                [
                    [
                        row["case"],
                        f"`{row['switch']}`",
                        f"{row['on_ms']:.2f}",
                        f"{row['off_ms']:.2f}",
                        f"{row['gain']:.2f} {small('{:.2f}–{:.2f}'.format(*row['half']))}",
                        f"{row['gain_of_fastest']:.2f}",
                    ]
                    for row in rows
                ],
                words=2,
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    "`GRACE_OPT_LLVM=0` turns the instructions off, "
                    "`GRACE_OPT_OPENMP=0` the threads. Decoding without the instructions is done by torch.",
                ],
            )
        ],
    )


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Gains as bars, one for each case and switch."""
    names = [f"{row['case']}, without {'LLVM' if row['switch'] == LLVM else 'OpenMP'}" for row in rows]
    gains = [row["gain"] for row in rows]
    axes = figure.subplots()
    bars(
        axes, names, gains, [f"{gain:.2f} ×" for gain in gains], [BLUE if r["switch"] == LLVM else ORANGE for r in rows]
    )
    axes.axvline(1, color=BLACK, linewidth=0.8)
    axes.set_xlim(0, 1.2 * max(gains))
    axes.set_xlabel("time without / time with it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="turns of each case (default %(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    add_options(parser, "hand_made")
    args = parser.parse_args()
    if args.worker:
        work()
        return
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        rows = summary(measure(args.rounds))
        value = {"provenance": source, "rounds": args.rounds, "threads": torch.get_num_threads(), "load": load}
        value["rows"] = rows
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
