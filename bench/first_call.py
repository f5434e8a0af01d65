"""How long the first call on a machine takes, where no loop is compiled yet, and every later process.

``python -m bench.first_call`` writes docs/results/first_call.{json,md,png}. Each case is a process of its own that
starts with an empty folder for compiled loops (Python's own compiled files are there), and a second one that finds what
the first has left. Processes of the checkout take turns with those of a wheel of it (`bench.wheel`), which brings
machine code; ``--no-wheel`` leaves it out. Seconds are counted from the start of the process, imports included, except
where the case says otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import track

from bench import wheel
from bench.report import BLUE, GREEN, Page, bars, parser_of, publish, table

ROOT = Path(__file__).resolve().parent.parent
#: What a child prints to have the time taken.
MARK = "first_call:"
FIRST, BLOCK, LIMITED, STEP, PACKED, CODED, LATER = (
    "README's first block, to its first output",
    "README's first block, `compare` included",
    "branch and bound, n = 64, `time_limit=1`",
    "first decoding step, pruned keys, 2,300 tokens, alone",
    "a prompt of 1,000 tokens coded with `bits=3`, alone",
    "first decoding step on codes, `bits=3`, 1,000 tokens, alone",
    "a later decoding step on codes, `bits=3`, 1,000 tokens, alone",
)
CASES = FIRST, BLOCK, LIMITED, STEP, PACKED, CODED, LATER
#: What is measured: this commit as it is checked out, and as it is installed from a wheel.
NOW, WHEEL = "now", "wheel"
COLOURS = {NOW: BLUE, WHEEL: GREEN}
_LIMITED = f"""
import grace_opt
from grace_opt.instances import generators
grace_opt.solve(generators.attention(64, seed=1).W, 32, "branch_and_bound", time_limit=1)
print("{MARK} {LIMITED}", flush=True)
"""
#: Reads the prompt before the clock starts, and takes the time of one new token after the other.
_STEPS = f"""
import statistics, time, torch
from grace_opt.hf import attach
from grace_opt.hf.models import load_pocket
model, _ = load_pocket()
seconds = []
class Tokens:
    def put(self, tokens):
        seconds.append(time.perf_counter())
    def end(self):
        pass
prompt = torch.randint(5, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
with torch.inference_mode(), attach(model, SETTINGS):
    new = dict(max_new_tokens=42, min_new_tokens=42, streamer=Tokens())
    model.generate(prompt, attention_mask=torch.ones_like(prompt), **new)
first, *later = [end - began for began, end in zip(seconds[1:], seconds[2:])]
print("{MARK} NAME took", first, flush=True)
if "LATER":
    print("{MARK} LATER took", statistics.median(later), flush=True)
"""
#: Beside the same prompt on a dense cache, which is read first.
_PACKED = f"""
import time, torch
from grace_opt.hf import attach
from grace_opt.hf.models import load_pocket
model, _ = load_pocket()
prompt = torch.randint(5, model.config.vocab_size, (1, 1000), generator=torch.Generator().manual_seed(0))
given = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=1)
with torch.inference_mode():
    model.generate(prompt, **given)
    began = time.perf_counter()
    model.generate(prompt, **given)
    dense = time.perf_counter() - began
    with attach(model, bits=3, basis="prompt"):
        began = time.perf_counter()
        model.generate(prompt, **given)
        print("{MARK} {PACKED} took", time.perf_counter() - began - dense, flush=True)
"""


def readme_block() -> str:
    """Return the README's first block of Python."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise SystemExit("README.md has no block of Python")
    return found[1]


def children() -> list[str]:
    """Return what each process runs."""
    pruned = steps(STEP, 2300, 'method="mies", ratio=0.6')
    coded = steps(CODED, 1000, 'bits=3, basis="prompt"', LATER)
    return [readme_block() + f'\nprint("{MARK} {BLOCK}", flush=True)\n', _LIMITED, pruned, _PACKED, coded]


def steps(name: str, tokens: int, settings: str, later: str = "") -> str:
    """Return what takes the time of a first step, and of later ones, after a prompt that is read before."""
    words = {"NAME": name, "TOKENS": str(tokens), "SETTINGS": settings, "LATER": later}
    return re.sub("|".join(words), lambda found: words[found[0]], _STEPS)


def run(code: str, library: Path, folder: Path) -> dict[str, float]:
    """Run a process, and return the seconds of each case that it is about."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("GRACE_OPT_")}
    env |= {"PYTHONPATH": str(library), "NUMBA_CACHE_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    found: dict[str, float] = {}
    began = time.perf_counter()
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, env=env, cwd=library, text=True, stdout=subprocess.PIPE, stderr=said) as child:
            assert child.stdout is not None
            for line in child.stdout:
                seconds = time.perf_counter() - began
                if line.startswith(MARK):
                    name, _, own = line.removeprefix(MARK).strip().partition(" took ")
                    found[name] = float(own) if own else seconds
                elif not found and code.startswith(readme_block()):
                    found[FIRST] = seconds
        if child.returncode:
            said.seek(0)
            raise SystemExit(f"a process failed:\n{said.read()}")
    return found


@contextmanager
def libraries(with_wheel: bool) -> Iterator[dict[str, Path]]:
    """Yield the folders of what is measured, by name."""
    with tempfile.TemporaryDirectory() as folder:
        found = {NOW: ROOT}
        if with_wheel:
            found[WHEEL] = Path(folder, WHEEL)
            with zipfile.ZipFile(wheel.build(Path(folder))) as packed:
                packed.extractall(found[WHEEL])
        yield found


def measure(rounds: int, with_wheel: bool) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by case and by library and folder, as in ``now, empty``."""
    found: dict[str, dict[str, list[float]]] = {case: {} for case in CASES}
    with libraries(with_wheel) as measured:
        codes = children()
        for turn in track(range(-1, rounds), description="rounds"):  # the first writes Python's own compiled files
            for code in codes:
                for name, library in list(measured.items())[:: 1 if turn % 2 else -1]:
                    folder = Path(tempfile.mkdtemp())
                    try:
                        for state in ("empty", "kept"):
                            for case, seconds in run(code, library, folder).items():
                                if turn >= 0:
                                    found[case].setdefault(f"{name}, {state}", []).append(seconds)
                    finally:
                        shutil.rmtree(folder)
    return found


def page(value: dict[str, Any]) -> Page:
    """Return what docs/results/first_call.md says of the numbers."""
    rows, load = value["seconds"], value["load"]
    middle = {case: {name: statistics.median(each) for name, each in found.items()} for case, found in rows.items()}
    block, step, packed, coded = (middle[case]["now, empty"] for case in (BLOCK, STEP, PACKED, CODED))
    columns = [
        f"{name}, {state}" for state in ("empty", "kept") for name in COLOURS if f"{name}, {state}" in middle[BLOCK]
    ]
    busy = f"; the machine was busy (load {load:.0f}), so these numbers are too high" if (load or 0) > 2 else ""
    precompiled = ""
    if "wheel, empty" in columns:
        limited, *others = (f"{middle[case]['wheel, empty']:.2f}" for case in (LIMITED, STEP, PACKED, CODED))
        precompiled = (
            f" From a wheel that brings machine code, a branch and bound takes {limited} s (as checked out "
            f"{middle[LIMITED]['now, empty']:.2f}), a first decoding step {others[0]}, a first prompt in codes "
            f"{others[1]} and a first step on them {others[2]}."
        )
    return Page(
        title="The first call",
        picture="Bars: seconds of each case where nothing is compiled yet, as checked out and from a wheel",
        headline=f"With nothing compiled, the README's first block takes {block:.1f} s"
        + (f", and {middle[BLOCK]['wheel, empty']:.1f} s from a wheel" if "wheel, empty" in columns else ""),
        draw=lambda figure: draw(figure, middle),
        asked="How long does the first call take on a machine where no loop is compiled yet?",
        found=f"The README's first block takes {block:.1f} s, and a first decoding step {step:.1f} s; a "
        f"first prompt in codes {packed:.1f} s and a first step on them {coded:.1f}.{precompiled}",
        sure=f"These are medians of {value['rounds']} rounds, all processes taking turns{busy}.",
        tables=[
            "Seconds, and the least and the most of all rounds. *Empty*: a folder without compiled loops; *kept*: the "
            "next process. *Wheel*: installed from one that brings machine code for this kind of processor.",
            "",
            *table(
                ["what", *columns],
                [
                    [
                        case,
                        *(
                            f"{_said(middle[case][name])} ({_said(min(found[name]))}–{_said(max(found[name]))})"
                            for name in columns
                        ),
                    ]
                    for case, found in rows.items()
                ],
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    "From the start of the process, imports included; *alone*: without reading the prompt.",
                ],
            )
        ],
    )


def _said(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.4f}"


def draw(figure: Any, middle: dict[str, dict[str, float]]) -> None:
    """Draw a bar for each first call and library."""
    cases = {case: found for case, found in middle.items() if case != LATER}
    shown = [(case, name) for case, found in cases.items() for name in COLOURS if f"{name}, empty" in found]
    values = [cases[case][f"{name}, empty"] for case, name in shown]
    axes = figure.subplots()
    names = [f"{case.replace('`', '')}: {name}" for case, name in shown]
    bars(axes, names, values, [f"{seconds:.1f} s" for seconds in values], [COLOURS[name] for _, name in shown])
    axes.set_xlim(0, 1.15 * max(values))
    axes.set_xlabel("seconds")


def main(given: list[str] | None = None) -> None:
    """Measure, or form the page again."""
    parser = parser_of("first_call", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each case (default %(default)s)")
    parser.add_argument("--no-wheel", action="store_true", help="build and measure no wheel")
    args = parser.parse_args(given)

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        seconds = measure(args.rounds, not args.no_wheel)
        return {"rounds": args.rounds, "load": load, "seconds": seconds}

    publish(args, page, measured)


if __name__ == "__main__":
    main()
