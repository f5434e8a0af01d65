"""What compiled loops lose where others take the cores: times beside busy processes, and with too many threads.

``python -m bench.busy`` writes docs/results/busy.{json,md,png}. In every round each case runs for a moment in four
ways: quietly; beside as many spinning processes as there are cores, which signals stop and continue, so that little
else differs; and both again with four times as many threads of torch as there are cores, in a process of its own.
Beside others a process gets a share of the cores: what threads that wait for nobody hash in a second, by what they hash
quietly, in the same round. The loss is how many times longer a call takes than quietly, times this share; it is 1 if
nothing is lost but what the others take. Beside it stands how many times more seconds of the processor a call takes
than quietly, whatever the others get, which shows who waits in a loop. Times are means, as a few calls take nearly all
of the time. As in a model, a matrix product of torch comes before each step of decoding, which is not timed.

It needs signals that stop and continue processes, so Linux or macOS.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rich.progress import track
from torch import nn

from bench.provenance import require_clean
from bench.report import BLACK, BLUE, GREY, ORANGE, Page, add_options, read_results, small, table, write_results
from grace_opt._util.cores import cores

#: Seconds for which a case runs in a row, and until the threads of whoever ran before are asleep.
SECONDS, PAUSE = 0.3, 0.03
#: How many times as many threads as cores the second process has.
TIMES = 4
SHARE = "threads that wait for nobody"
PRODUCT = "torch's own product of two 256 × 256 matrices"
DECODING = "decoding, "
CASES = (
    SHARE,
    "MIES with checks, 64 heads of width 128",
    "local search, 16 heads of width 128, from random",
    "tabu, 8 heads of width 64, 2,000 iterations",
    "proofs by branch and bound, 8 heads of width 24",
    f"{DECODING}SmolLM2-135M's shape, 4,096 tokens",
    f"{DECODING}Llama-3-8B's shape, 4,096 tokens",
    f"{DECODING}Llama-3-8B's shape in 2.25 bits, 2,048 tokens",
    PRODUCT,
)
#: Ways to run: a thread for each core, or more; quietly, or beside others.
QUIET, BUSY, MANY, BOTH = "quiet", "busy", "many threads", "many threads, busy"
LOSSES = BUSY, MANY, BOTH


def calls() -> list[Callable[[], Any]]:
    """Return what each case runs; made once per process."""
    import grace_opt
    from bench.decode_bits import coded_layer
    from grace_opt.hf.stores.coded.in_place import attention_in_place

    generator = torch.Generator().manual_seed(0)
    G = torch.randn(64, 128, 128, generator=generator)
    W = G @ G.mT
    narrow, tiny = W[:8, :64, :64].contiguous(), W[:8, :24, :24].contiguous()
    start = grace_opt.solve(W[:16], 64, "random").mask
    left, right = torch.randn(2, 256, 256, generator=generator)
    old, query, keys, values = coded_layer(2048)
    return [
        hashing(),
        lambda: grace_opt.solve(W, 77, "mies"),
        lambda: grace_opt.solve(W[:16], 64, "local_search", start=start, check=False),
        lambda: grace_opt.solve(narrow, 32, "tabu", iterations=2_000),
        lambda: grace_opt.solve(tiny, 12, "branch_and_bound"),
        decoding(generator, 9, 3, 64, 4096),
        decoding(generator, 32, 8, 128, 4096),
        lambda: attention_in_place(nn.Identity(), query, keys, values, None, old, query.shape[3] ** -0.5),
        lambda: left @ right,
    ]


def decoding(generator: torch.Generator, query_heads: int, heads: int, width: int, tokens: int) -> Callable[[], Any]:
    """One step over 60 % fewer key channels: by the compiled loops or, where they are off, by torch."""
    from grace_opt.kernels.cache.decode import kernel_for
    from grace_opt.kernels.cache.decode.reference import attention

    kept, recent = width - -(-width * 3 // 5), 32
    index = torch.rand(1, heads, width, generator=generator).argsort(-1)[..., :kept].sort(-1).values
    counts = (tokens - recent, kept), (0, width), (recent, width), (tokens - recent, width), (recent, width)
    stored = [torch.randn(1, heads, *count, generator=generator) for count in counts]
    query = torch.randn(1, query_heads, 1, width, generator=generator)
    run = kernel_for(query, *stored) or attention
    return lambda: run(query, stored[0], index, *stored[1:])


def hashing() -> Callable[[], Any]:
    """Return work for a thread on each core, in blocks that whoever is free takes."""
    threads, block = min(torch.get_num_threads(), cores()), bytes(2**18)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda _: hashlib.sha256(block).digest(), range(100 * threads)))


def work(threads: int) -> None:
    """Run a worker: a case's number in, mean seconds of a call and of the processor out."""
    torch.set_num_threads(threads)
    left, right = torch.randn(2, 256, 256)
    with torch.inference_mode():
        every = calls()
        for line in sys.stdin:
            number, seconds = line.split()
            run, taken, spent, count = every[int(number)], 0.0, 0.0, 0
            until = time.perf_counter() + float(seconds)
            while not count or time.perf_counter() < until:
                if CASES[int(number)].startswith(DECODING):
                    left @ right
                began, before = time.perf_counter(), time.process_time()
                run()
                taken, spent = taken + time.perf_counter() - began, spent + time.process_time() - before
                count += 1
            print(taken / count, spent / count, flush=True)


@contextmanager
def worker(threads: int) -> Iterator[Callable[[int, float], list[float]]]:
    """Start a process with so many threads, and yield how to ask it for a case."""
    command = [sys.executable, "-m", "bench.busy", "--worker", str(threads)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(case: int, seconds: float) -> list[float]:
            print(case, seconds, file=process.stdin, flush=True)
            return [float(number) for number in process.stdout.readline().split()]

        yield ask
        process.stdin.close()


@contextmanager
def spinning(count: int) -> Iterator[Callable[[bool], None]]:
    """Start processes that only spin, and yield how to let them (or not); they begin stopped."""
    with ExitStack() as stack:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        for other in others:
            stack.callback(other.wait)
            stack.callback(other.kill)

        def spin(now: bool) -> None:
            for other in others:
                other.send_signal(signal.SIGCONT if now else signal.SIGSTOP)

        spin(False)
        yield spin


def measure(rounds: int, seconds: float = SECONDS) -> dict[str, dict[str, list[list[float]]]]:
    """Return mean seconds of each round, of calls and of the processor, by case and way."""
    times: dict[str, dict[str, list[list[float]]]] = {case: {} for case in CASES}
    with spinning(cores()) as spin, worker(cores()) as usual, worker(TIMES * cores()) as many:
        ways = {QUIET: (usual, False), BUSY: (usual, True), MANY: (many, False), BOTH: (many, True)}
        for turn in track(range(-1, rounds), description="rounds"):  # the first one compiles, and warms up
            for number, found in enumerate(times.values()):
                for way, (ask, busy) in ways.items():
                    spin(busy)
                    time.sleep(PAUSE)
                    taken = ask(number, seconds if turn >= 0 else 0.0)
                    if turn >= 0:
                        found.setdefault(way, []).append(taken)
    return times


def summary(times: dict[str, dict[str, list[list[float]]]]) -> list[dict[str, Any]]:
    """Return one row for each case: milliseconds, losses with their middle halves, and how much more processor."""
    rows = []
    for case, found in times.items():
        taken = {way: [one for one, _ in pairs] for way, pairs in found.items()}
        row: dict[str, Any] = {"case": case, "ms": {way: 1000 * statistics.median(taken[way]) for way in taken}}
        for way in LOSSES:
            shares = [quiet / now for (quiet, _), (now, _) in zip(times[SHARE][QUIET], times[SHARE][way], strict=True)]
            losses = [s * now / quiet for s, now, quiet in zip(shares, taken[way], taken[QUIET], strict=True)]
            low, middle, high = statistics.quantiles(losses, n=4)
            more = [now / quiet for (_, now), (_, quiet) in zip(found[way], found[QUIET], strict=True)]
            share, spent = statistics.median(shares), statistics.median(more)
            row[way] = {"loss": middle, "half": [low, high], "share": share, "processor": spent}
        rows.append(row)
    return rows


def page(value: dict[str, Any]) -> Page:
    """What docs/results/busy.md says of the numbers."""
    (control, *ours, theirs), count = value["rows"], value["cores"]
    worst = max((row[way]["loss"], row["case"]) for row in ours for way in LOSSES)
    return Page(
        title="A busy machine",
        picture="Bars: what each case loses beside busy processes, with too many threads, and with both",
        draw=lambda figure: draw(figure, [*ours, theirs]),
        asked="How much do compiled loops lose where other processes take the cores, or torch has more threads than "
        "there are cores?",
        found=f"At most a factor of {worst[0]:.1f} ({worst[1]}), apart from what the others take; torch's own threads, "
        f"which wait for each other in a loop, lose a factor of {theirs[BUSY]['loss']:.0f}.",
        sure=f"These are medians of {value['rounds']} rounds on {count} cores, beside {count} spinning processes, "
        f"which leave a share of {control[BUSY]['share']:.2f} of them, or with {TIMES * count} threads.",
        tables=[
            "*Loss*: how many times longer a call takes than quietly, times the share of the cores that threads get "
            "which wait for nobody; its median and, in small type, its middle half. *Processor*: how many times more "
            "seconds of the processor it takes.",
            "",
            *table(
                [
                    "what",
                    *(f"{way}, ms" for way in (QUIET, *LOSSES)),
                    *(f"loss: {way}" for way in LOSSES),
                    "processor: busy",
                ],
                [
                    [
                        row["case"],
                        *(f"{row['ms'][way]:.2f}" for way in (QUIET, *LOSSES)),
                        *(
                            f"{row[way]['loss']:.2f} {small('{:.2f}–{:.2f}'.format(*row[way]['half']))}"
                            for way in LOSSES
                        ),
                        f"{row[BUSY]['processor']:.2f}",
                    ]
                    for row in (*ours, theirs)
                ],
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    "Times are means over a third of a second in each round: beside others, most calls take little "
                    "longer, and a few take nearly all of the time. The last row is torch alone. Its threads spin for "
                    "milliseconds before they sleep, also while the one that they wait for has no core; with more "
                    "threads than cores, they hardly spin. `OMP_WAIT_POLICY=passive` in the environment, before Python "
                    "starts, lets them sleep at once.",
                ],
            )
        ],
    )


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Losses as groups of bars, one for each case."""
    figure.set_size_inches(8, 4.8)
    axes = figure.subplots()
    for offset, way, colour in zip((-0.26, 0, 0.26), LOSSES, (BLUE, ORANGE, GREY), strict=True):
        losses = [row[way]["loss"] for row in rows]
        places = [place + offset for place in range(len(rows))]
        axes.barh(places, losses, height=0.24, color=colour, label=way)
        for place, loss in zip(places, losses, strict=True):
            axes.annotate(f"{loss:.2g}", (loss, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color=BLACK, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("time / quiet time × share of the cores (1: nothing is lost)")
    own = max(row[way]["loss"] for row in rows[:-1] for way in LOSSES)
    axes.set_title(f"Our loops lose at most a factor of {own:.2g} beside other processes", fontsize=10)
    axes.legend(loc="upper right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each case (default %(default)s)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    add_options(parser, "busy")
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        times = measure(args.rounds)
        value = {"provenance": source, "rounds": args.rounds, "cores": cores(), "times": times, "rows": summary(times)}
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
