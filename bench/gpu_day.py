"""The day with a GPU, prepared: ``python -m bench.gpu_day`` takes at most eight minutes on one card.

Each part is a process of its own with a share of the minutes; what one leaves, those after it may use. *masks*: W and
MIES for many heads at once, beside the CPU and plain torch, one head after the other. *decode*: `bench.decode_gpu`,
which writes a page of its own. *tests*: all files of tests that ask for a CUDA device. After each part the page is
written again, so a killed run leaves what it had; parts that fail or run out of time are named on it.

Writes docs/results/gpu_day.{json,md,png}, and what the parts print to ``--runs``. With ``--only``, parts that the same
clean commit has measured before stay on the page. ``--small`` tries the script, without a GPU in Triton's interpreter:
tiny sizes, few tests, and nothing is written but to ``--runs``, or a temporary folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import decode_gpu
from bench.decode_bits import OURS
from bench.decode_gpu import DEVICE, best_dense, kernels_here, milliseconds
from bench.provenance import is_clean, refuse, write_json
from bench.report import BLACK, BLUE, RESULTS, Page, bars, parser_of, publish, read_results, table, write_results
from grace_opt import solve
from grace_opt.attention import interaction_matrix

ROOT = Path(__file__).resolve().parent.parent
#: Minutes of each part, of eight.
PARTS = {"masks": 1.5, "decode": 3.5, "tests": 3.0}
MEASURED = "measured"
#: Numbers of heads; their width, channels taken, tokens and observed queries; rounds. The same with ``--small``.
LARGE, SMALL = ((64, 4096), (128, 64, 2048, 32), 5), ((2, 4), (16, 8, 64, 8), 1)
#: What ``--small`` tests.
FEW = ("tests/test_gpu.py", "tests/hf/test_bits_triton.py")
#: Here, on the CPU, and one head after the other.
TIMES = "gpu_ms", "cpu_ms", "loop_ms"
#: What is wanted, by bar of the picture; -1 where the words say how long ours takes, and not the other.
WANTED = {
    "MIES, 4,096 heads: CPU": ("MIES of 4,096 heads is {:.2f} times as fast as on the CPU (wanted: at least 10)", 1),
    "attention, 32,768 × 8: dense": (
        "attention over codes takes {:.2f} times as long as dense attention with 32,768 × 8 tokens (wanted: at most "
        "1.0; before there was a trellis: 1.52)",
        -1,
    ),
}


def looped_weights(queries: Tensor, keys: Tensor) -> list[Tensor]:
    """W by plain torch, one head after the other."""
    return [(q.mT @ q) * (k.mT @ k) for q, k in zip(queries.float(), keys.float(), strict=True)]


def looped_mies(W: Tensor, k: int) -> Tensor:
    """The masks of MIES by plain torch, as the paper writes it down, one head after the other."""
    masks = torch.zeros(W.shape[:-1], dtype=torch.bool, device=W.device)
    for head, mask in zip(W, masks, strict=True):
        scores = head.diagonal().clone()
        for _ in range(k):
            best = scores.argmin()
            mask[best] = True
            scores += 2 * head[best]
            scores[best] = torch.inf
    return masks


def beside(heads: int, width: int, k: int, tokens: int, observed: int, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of each round, of W and of MIES: here, on the CPU, and of the loop over heads."""

    def timed(rounds: int, device: str, *runs: Callable[[], Any]) -> list[list[float]]:
        return [[milliseconds(run, device) for _ in range(rounds + 1)][1:] for run in runs]

    def ours(device: str, queries: Tensor, keys: Tensor, W: Tensor) -> list[list[float]]:
        return timed(
            rounds, device, lambda: interaction_matrix(queries, keys), lambda: solve(W, k, "mies", check=False)
        )

    draw = torch.Generator(DEVICE).manual_seed(0)
    queries, keys = (
        torch.randn(heads, length, width, generator=draw, device=DEVICE).bfloat16() for length in (observed, tokens)
    )
    with kernels_here():
        W = interaction_matrix(queries, keys)
        taken = solve(W, k, "mies", check=False).mask.cpu()
        here = ours(DEVICE, queries, keys, W)
    if not torch.equal(solve(W.cpu(), k, "mies", check=False).mask, taken):
        raise SystemExit(
            f"MIES of {heads} heads takes other channels on the GPU than on the CPU: its time is worthless"
        )
    there = ours("cpu", queries.cpu(), keys.cpu(), W.cpu())
    looped_mies(W[:1], k)  # a whole round before it would take longer than all else
    loop = [*timed(1, DEVICE, lambda: looped_weights(queries, keys)), [milliseconds(lambda: looped_mies(W, k))]]
    return [
        {"what": what, "heads": heads, "gpu_ms": here[place], "cpu_ms": there[place], "loop_ms": loop[place]}
        for place, what in enumerate(("W", "MIES"))
    ]


def masks(path: Path, small: bool) -> None:
    """Measure W and MIES; the file has what is done."""
    counts, sizes, rounds = SMALL if small else LARGE
    rows: list[dict[str, Any]] = []
    for heads in counts:
        rows += beside(heads, *sizes, rounds)
        write_json(path, {"sizes": sizes, "rounds": rounds, "rows": rows})


class Recorder:
    """Keeps in a file how many tests have passed, failed or been skipped so far, and which failed."""

    def __init__(self, path: Path) -> None:
        self.path, self.counts, self.failed = path, Counter[str](), list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
            self.failed += [report.nodeid] if report.failed else []
            write_json(self.path, {"counts": self.counts, "failed": self.failed})

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            report.when = "collect"
            self.pytest_runtest_logreport(report)


def tests(path: Path, small: bool) -> None:
    """Run the tests that ask for a CUDA device; a failing one is a result, and no error."""
    import pytest

    asking = (file for file in sorted(ROOT.glob("tests/**/test_*.py")) if "cuda.is_available()" in file.read_text())
    files = FEW if small else [str(file.relative_to(ROOT)) for file in asking]
    several = not small and importlib.util.find_spec("xdist") is not None
    at_once = ["-n", str(min(os.cpu_count() or 1, 8))] if several else []
    code = pytest.main(["-q", "-p", "no:cacheprovider", *at_once, *files], plugins=[Recorder(path)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with code {int(code)}")


def run(name: str, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run a part in a process that has so many seconds, and return what became of it."""
    decode, path, log = args.out.with_name("decode_gpu"), args.runs / f"{name}.json", args.runs / f"{name}.log"
    path.unlink(missing_ok=True)
    words = ["-c", f"from pathlib import *; from bench import gpu_day; gpu_day.{name}({path!r}, {args.small})"]
    if name == "decode":
        words = ["-m", "bench.decode_gpu", *([] if decode.parent == RESULTS else ["--out", str(decode)])]
        words += [*(["--small", "--rounds=1"] if args.small else []), *(["--allow-dirty"] if args.allow_dirty else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env["TRITON_INTERPRET"] = str(int(DEVICE == "cpu"))
    began, code = time.monotonic(), None
    with log.open("w") as said:
        options: dict[str, Any] = {"cwd": ROOT, "env": env, "stdout": said, "stderr": said, "start_new_session": True}
        with subprocess.Popen([sys.executable, *words], **options) as child:
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(limit)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # and whatever it has started
    if name == "decode" and code == 0:
        write_json(path, read_results(decode))
    last = (log.read_text(errors="replace").strip() or "it printed nothing").splitlines()[-1]
    return {
        "status": f"ran out of its {limit:.0f} s" if code is None else f"failed: {last}" if code else MEASURED,
        "seconds": time.monotonic() - began,
        "found": json.loads(path.read_text()) if path.exists() else None,
    }


def ratios(found: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times as long as ours on the GPU each thing beside it takes."""
    shown = {}
    for row in found["masks"]["rows"] if "masks" in found else ():
        ours, cpu, loop = (statistics.median(row[name]) for name in TIMES)
        label = f"{row['what']}, {row['heads']:,} heads"
        shown |= {f"{label}: CPU": cpu / ours, f"{label}: one after the other": loop / ours}
    for cell in found["decode"]["layers"] if "decode" in found else ():
        dense, ours = (statistics.median(cell["us"][name]) for name in (best_dense(cell["us"]), OURS))
        shown[f"attention, {cell['tokens']:,} × {cell['prompts']}: dense"] = dense / ours
    return shown


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    parts, tables, said = value["parts"], list[str](), list[str]()
    found = {name: part["found"] for name, part in parts.items() if part["found"] is not None}
    lacking = [f"*{name}* {part['status']}" for name, part in parts.items() if part["status"] != MEASURED]
    lacking += [f"*{name}* was not run" for name in PARTS if name not in parts]
    shown, tested, failed = ratios(found), "no test ended", list[str]()
    aims = [words.format(shown[label] ** power) for label, (words, power) in WANTED.items() if label in shown]
    if "masks" in found:
        width, k, tokens, observed = found["masks"]["sizes"]
        rows = [
            [row["what"], f"{row['heads']:,}", *(f"{statistics.median(row[name]):,.2f}" for name in TIMES)]
            for row in found["masks"]["rows"]
        ]
        tables += table(["what", "heads", "GPU, ms", "CPU, ms", "GPU, one head after the other, ms"], rows)
        said.append(
            f"- W of {tokens:,} keys and {observed} queries in bfloat16, of whose {width} channels MIES takes {k}: "
            f"medians of {found['masks']['rounds']} rounds. Plain torch, one head after the other, ran once."
        )
    if "decode" in found:
        tables += decode_gpu.page(found["decode"]).tables
        said.append("- Attention, coding and whole steps have [a page of their own](decode_gpu.md).")
    if "tests" in found:
        counts, failed = found["tests"]["counts"], found["tests"]["failed"]
        tested = ", ".join(f"{counts.get(word, 0):,} {word}" for word in ("passed", "failed", "skipped"))
    said.append("- Seconds: " + ", ".join(f"{name} {part['seconds']:.0f}" for name, part in parts.items()) + ".")
    label, ratio = [*shown.items()][-1] if shown else ("", 0.0)
    return Page(
        title="A day with a GPU",
        picture="Bars: how many times as long as ours on the GPU each thing beside it takes",
        headline=f"{label} takes {ratio:.2g} times as long as ours" if shown else f"Tests on a GPU: {tested}",
        draw=lambda figure: draw(figure, shown),
        asked="Do the kernels pass their tests on a GPU, and how long do they take beside the CPU and other code?",
        found="; ".join([f"Of the tests that ask for a GPU: {tested}", *aims]) + ".",
        sure=f"On one {value['device']}; other GPUs have other ratios. "
        + (f"Not everything was measured: {'; '.join(lacking)}." if lacking else "All parts ended in time."),
        tables=tables,
        details=[
            *([("Tests that failed", [f"- `{test}`" for test in failed])] if failed else []),
            ("How it is measured", said),
        ],
    )


def draw(figure: Any, shown: Mapping[str, float]) -> None:
    """Draw a bar for each ratio."""
    axes = figure.subplots()
    bars(axes, [*shown], [*shown.values()], [f"{ratio:.2g}" for ratio in shown.values()], BLUE)
    if shown:
        axes.set_xscale("log")
        axes.axvline(1, color=BLACK, linewidth=0.8)
    axes.set_xlabel("times as long as ours on the GPU")


def day(args: argparse.Namespace, source: dict[str, Any]) -> dict[str, Any]:
    """Run the parts, and write the page after each."""
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU that plays a GPU"
    parts: dict[str, Any] = {}
    with suppress(SystemExit):  # there is no page yet
        before = read_results(args.out)
        if is_clean(source) and (before["device"], before["provenance"]["commit"]) == (device, source["commit"]):
            parts, source = before["parts"], refuse({"before": before["provenance"], "now": source})
    names, end = [args.only] if args.only else list(PARTS), time.monotonic()
    for name in names:
        end += 60 * args.minutes * PARTS[name] / sum(PARTS[each] for each in names)
        parts[name] = run(name, args, max(end - time.monotonic(), 1.0))
        value = {"provenance": source, "device": device, "parts": parts}
        write_results(args.out, value, page, allow_dirty=args.allow_dirty)
    return value


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("gpu_day", __doc__)
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--minutes", type=float, default=sum(PARTS.values()), help="of all parts (default %(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, without a GPU in Triton's interpreter")
    parser.add_argument("--runs", type=Path, help="folder of what the parts print (default: runs/gpu_day)")
    args = parser.parse_args(given)
    if not (args.report_only or args.small or DEVICE == "cuda"):
        raise SystemExit(
            'bench.gpu_day needs a CUDA device, which torch does not see here, and pip install ".[gpu,bench,dev]"; '
            "with --small it is tried without one"
        )
    if args.small:
        args.runs = args.runs or Path(tempfile.mkdtemp(prefix="gpu_day-"))
        args.out, args.allow_dirty = args.runs / "gpu_day", True
    args.runs = (args.runs or ROOT / "runs" / "gpu_day").resolve()
    args.runs.mkdir(parents=True, exist_ok=True)
    publish(args, page, lambda source: day(args, source))


if __name__ == "__main__":
    main()
