"""Has it become slower? ``python -m bench.check`` compares a few ratios with committed baselines.

It compares ratios of code that takes turns, not times: a slower or busier machine changes both sides. A ratio that is
worse than its baseline by more than its margin is measured again; if it is still worse, the exit status is 1. Better
ratios are reported but do not fail; ``--update`` writes bench/baselines.json anew.

When: before a release, or after work on a hot path; on a quiet machine, so not in CI.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import decode, decode_bits, selection
from bench.cost_model import MODELS
from bench.efficiency.measure import WARM_UP, contenders, measure
from bench.efficiency.subject import random_weights
from bench.provenance import provenance, write_json

BASELINES = Path(__file__).parent / "baselines.json"
#: Raise it when a ratio comes to mean something else: older baselines then do not count.
VERSION = 1
MARGIN = 0.25
CONTEXT, RATIO = 16384, 0.6  # tokens of the decoding step; share of the channels pruned


@dataclass(frozen=True)
class Ratio:
    """One thing to watch.

    Attributes
    ----------
    name : str
        In the table and in the file.
    measure : callable
        From a number of rounds to the ratio.
    up_is_better : bool
    margin : float
        How much worse it may be, as a share of the baseline.
    """

    name: str
    measure: Callable[[int], float]
    up_is_better: bool = True
    margin: float = MARGIN

    def allowed(self, baseline: float) -> float:
        """The worst ratio that passes.

        Examples
        --------
        >>> Ratio("speed-up", lambda rounds: 1.0).allowed(40.0)
        30.0
        """
        return baseline * (1 - self.margin if self.up_is_better else 1 + self.margin)

    def verdict(self, value: float, baseline: float) -> str:
        """``"worse"``, ``"better"`` (both by more than the margin) or ``"as before"``."""
        worst, best = self.allowed(baseline), 2 * baseline - self.allowed(baseline)
        if not self.up_is_better:
            value, worst, best = -value, -worst, -best
        return "worse" if value < worst else "better" if value > best else "as before"


class BaselineError(Exception):
    """There is nothing to compare with; says what to write."""


def read_baselines(path: Path, ratios: Sequence[Ratio]) -> tuple[dict[str, float], dict[str, Any]]:
    """The baselines by name, and where they are from.

    Parameters
    ----------
    path : Path
    ratios : sequence of Ratio
        Each must have one.

    Raises
    ------
    BaselineError
    """
    update = "write python -m bench.check --update, on a commit that is known to be good"
    try:
        found = json.loads(path.read_text())
        version, values, source = found["version"], found["ratios"], found["provenance"]
    except FileNotFoundError:
        raise BaselineError(f"there are no baselines at {path.name}: {update}") from None
    except (ValueError, KeyError, TypeError):
        raise BaselineError(f"{path.name} cannot be read: {update}") from None
    if version != VERSION:
        raise BaselineError(f"{path.name} is of version {version}, and this check of version {VERSION}: {update}")
    if missing := [ratio.name for ratio in ratios if ratio.name not in values]:
        raise BaselineError(f"{path.name} has no baseline of {', '.join(missing)}: {update}")
    return values, source


@dataclass(frozen=True)
class Found:
    """A ratio, its baseline and what to make of them."""

    ratio: Ratio
    value: float
    baseline: float

    @property
    def verdict(self) -> str:
        """As `Ratio.verdict`."""
        return self.ratio.verdict(self.value, self.baseline)


def compare(
    ratios: Sequence[Ratio], baselines: Mapping[str, float], rounds: int, say: Callable[[str], object]
) -> list[Found]:
    """Measure everything, and once more what is worse.

    Parameters
    ----------
    ratios : sequence of Ratio
    baselines : mapping
        By name.
    rounds : int
    say : callable
        Told what is about to be measured.
    """
    found = []
    for ratio in ratios:
        say(f"measuring {ratio.name}")
        one = Found(ratio, ratio.measure(rounds), baselines[ratio.name])
        if one.verdict == "worse":
            say(f"{one.value:.3g} beside {one.baseline:.3g} is worse: measuring it once more")
            one = Found(ratio, ratio.measure(rounds), one.baseline)
        found.append(one)
    return found


def table(found: Sequence[Found]) -> Table:
    """For people."""
    shown = Table("ratio", "now", "baseline", "allowed", "verdict")
    for one in found:
        bound = "≥" if one.ratio.up_is_better else "≤"
        colour = {"worse": "red", "better": "cyan"}.get(one.verdict, "green")
        allowed = f"{bound} {one.ratio.allowed(one.baseline):.3g}"
        cells = [f"{one.value:.3g}", f"{one.baseline:.3g}", allowed, f"[{colour}]{one.verdict}[/]"]
        shown.add_row(one.ratio.name, *cells)
    return shown


def interleaved(first: Callable[[], object], second: Callable[[], object], rounds: int) -> float:
    """Median of the quotient of two times, the two taking turns, after a turn that does not count."""

    def seconds(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    quotients = [seconds(first) / seconds(second) for _ in range(rounds + 1)]
    return statistics.median(quotients[1:])


@functools.cache
def _contenders() -> dict[str, tuple[Callable[[], Any], int]]:
    return selection.contenders()


def by_plain_python(name: str, rounds: int) -> float:
    """How many times faster than plain Python a contender of `bench.selection` is, per instance."""
    (python, few), (other, many) = (_contenders()[key] for key in ("Algorithm 1, plain Python", name))
    return interleaved(python, other, rounds) * many / few


def decoding(rounds: int) -> float:
    """The fastest dense step of one layer of Llama-3-8B by the compiled pruned one; this alone knows `bench.decode`."""
    model = MODELS["llama3-8b"]
    with torch.inference_mode():
        times = decode.measure(model, CONTEXT, rounds, few_bits=False)
    found: float = decode.summary(model, CONTEXT, RATIO, times, bandwidth=1.0)["dense_by_pruned"]["token-major"]
    return found


def decoding_bits(rounds: int) -> float:
    """The same on 2.25 bits for each number."""
    times = decode_bits.one_layer(CONTEXT, rounds)["ms"]
    return decode_bits.ratio(times, decode_bits.best_dense(times), decode_bits.OURS)


def selection_share(rounds: int) -> float:
    """Choosing channels by GRACE, as a share of the time to first token: two layers of SmolLM2-135M, 2,048 tokens."""
    model = random_weights("smollm2-135m", 2, "cpu", "float32").model
    rows = contenders(["grace"], [RATIO], ("sdpa", 1, 2048))
    measure(model, rows, new_tokens=WARM_UP + 2, rounds=rounds, device="cpu", advance=lambda step: None)
    return statistics.median(c / f for c, f in zip(rows[0].selection_s, rows[0].ttft_s, strict=True))


RATIOS = (
    Ratio("plain Python / mies, check=False", functools.partial(by_plain_python, "mies, check=False")),
    Ratio("plain Python / mies, with checks", functools.partial(by_plain_python, "mies, with checks")),
    # Not beside mies: a faster mies would make it look worse.
    Ratio("plain Python / local_search, check=False", functools.partial(by_plain_python, "local_search, check=False")),
    Ratio(f"decoding step, dense / pruned, {CONTEXT:,} tokens", decoding),
    Ratio(f"decoding step, dense / 2.25 bits, {CONTEXT:,} tokens", decoding_bits),
    Ratio("selection / time to first token", selection_share, up_is_better=False),
)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.check", description="Ratios beside committed baselines.")
    parser.add_argument("--update", action="store_true", help="write what is measured now as the baselines")
    parser.add_argument("--rounds", type=int, default=9, help="of each ratio (default %(default)s)")
    args = parser.parse_args(given)
    if args.rounds < 1:
        raise SystemExit("--rounds: write at least 1")
    console = Console()
    if args.update:
        values = {}
        for ratio in RATIOS:
            console.print(f"measuring {ratio.name}")
            values[ratio.name] = ratio.measure(args.rounds)
        write_json(BASELINES, {"version": VERSION, "provenance": provenance(), "ratios": values})
        console.print(table([Found(ratio, values[ratio.name], values[ratio.name]) for ratio in RATIOS]))
        return
    try:
        baselines, source = read_baselines(BASELINES, RATIOS)
    except BaselineError as error:
        raise SystemExit(str(error)) from None
    found = compare(RATIOS, baselines, args.rounds, console.print)
    console.print(table(found))
    console.print(
        f"Baselines: commit {source['commit']}, {source['date']}, {source['cores']} cores of {source['cpu']}."
    )
    here = provenance()
    if (here["cpu"], here["cores"]) != (source["cpu"], source["cores"]):
        console.print(f"This machine is another, {here['cores']} cores of {here['cpu']}: ratios need not carry over.")
    if worse := [one.ratio.name for one in found if one.verdict == "worse"]:
        raise SystemExit(f"worse than the baseline, twice: {'; '.join(worse)}")


if __name__ == "__main__":
    main()
