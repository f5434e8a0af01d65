"""Tables for the command line: a solution, the demo's report, calibrated bases, and what layers lose.

Built on rich.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .._util.terminal import FittingTable, escape_path
from ..comparison.table import MAX_INSTANCES_SHOWN
from ..solution import Solution

if TYPE_CHECKING:
    from ..hf.bases.basis_folder import KeptBasis
    from ..hf.bases.calibrated import CalibratedBasis
    from ..hf.evict.layer_losses import LayerLosses
    from ..hf.tools.demo import DemoReport
    from ..hf.tools.tune import TuneResult

#: Bits per element at which shares are shown, and number of layers at either end.
SHOWN_BITS, SHOWN_LAYERS = 2.25, 2
#: Share of the tokens for which it is shown what each layer keeps, and length of the prompt.
SHOWN_SHARE, SHOWN_LENGTH = 0.25, 2000


def print_bases(console: Console, folder: Path, bases: Sequence[KeptBasis], removed: int | None) -> None:
    """Print the bases of a folder; or, if they have just been removed, how many files that were."""
    size, where = sum(basis.bytes for basis in bases) / 2**20, escape_path(str(folder), sys.stdout)
    if removed is not None:
        console.print(f"removed {removed} file{'s' * (removed != 1)}, {size:,.1f} MiB, from {where}", soft_wrap=True)
        return
    if bases:
        table = FittingTable()
        for name in ("model", "calibrated", "MiB", "last use"):
            table.add_column(name, justify="right" if name == "MiB" else "left")
        for basis in bases:
            name = escape_path(basis.model or basis.path.stem, sys.stdout)
            made = (basis.made or "unknown") if basis.is_finished else "unfinished"
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(basis.used))
            table.add_row(name, made, f"{basis.bytes / 2**20:,.1f}", used)
        console.print(table)
    console.print(f"{len(bases)} file{'s' * (len(bases) != 1)}, {size:,.1f} MiB, in {where}", soft_wrap=True)


def print_basis(console: Console, basis: CalibratedBasis, seconds: float) -> None:
    """Print what a basis was made of, and the shares of the first and last layers."""
    from ..hf.bases.basis_file import as_tensors  # loaded already

    size = sum(tensor.nbytes for tensor in as_tensors(basis).values())
    layers, heads = basis.layers, {len(each.energy) for each in basis.keys.values()}
    console.print(
        f"{len(layers)} layers, {' or '.join(map(str, sorted(heads)))} KV heads; {basis.texts} "
        f"text{'s' * (basis.texts > 1)}, {basis.tokens:,} tokens; {seconds:.1f} s, {size / 1024:,.0f} KiB",
        soft_wrap=True,
    )
    if basis.kl is not None:
        curve = "  ".join(f"{bits:g}: {kl:.2g}" for bits, kl in basis.kl.tolist())
        console.print(f"KL divergence left, nats per token, by bits: {curve}", soft_wrap=True)
    table = FittingTable(title=f"bits per element of each head at {SHOWN_BITS} on average")
    table.add_column("layer", justify="right")
    for name in ("keys", "values"):
        table.add_column(name)
    shares = basis.shares(SHOWN_BITS, SHOWN_BITS)
    few = len(layers) <= 2 * SHOWN_LAYERS
    for layer in layers if few else layers[:SHOWN_LAYERS] + layers[-SHOWN_LAYERS:]:
        if not few and layer == layers[-SHOWN_LAYERS]:
            table.add_section()
        table.add_row(str(layer), *("  ".join(f"{bits:.2f}" for bits in part.tolist()) for part in shares[layer]))
    console.print(table)


def print_layers(console: Console, losses: LayerLosses) -> None:
    """Print what the output loses with each layer, and the shares that its heads keep of a quarter."""
    from ..hf.evict.graph_eviction import GraphEviction  # loaded already, as the losses come from its package
    from ..hf.evict.layer_budgets import LayerBudgets

    budgets = LayerBudgets(GraphEviction(budget=SHOWN_SHARE), losses)
    curve = losses.curves([SHOWN_SHARE])[:, 0]
    table = FittingTable(title=f"with {SHOWN_SHARE:.0%} of the tokens on average")
    for name in ("layer", "KL if it alone keeps that", "its heads keep"):
        table.add_column(name, justify="right")
    for layer, loss in zip(losses.layers, curve, strict=True):
        counts = budgets.tokens_of_heads(layer, SHOWN_LENGTH)
        table.add_row(str(layer), f"{loss:.2g}", "  ".join(f"{count / SHOWN_LENGTH:.0%}" for count in counts))
    console.print(table)


def print_demo(console: Console, report: DemoReport) -> None:
    """Print a demo's report: a row per cache, a row per solver, what the columns mean, and where to start."""
    from ..hf.tools.demo import ADVICE, DENSE  # loaded already: the report comes from this module

    console.print(
        Text.assemble(
            (report.model, "bold"),
            f": {len(report.layers)} layers, {report.kv_heads} KV heads of {report.head_dim} channels; reads "
            f"{report.context_tokens} tokens with {report.questions} passwords in them\n{report.question} ",
            (report.answer, "bold"),
        ),
        soft_wrap=True,
    )
    caches = FittingTable(title="caches")
    caches.add_column("method", min_width=12)
    for name in ("bits", "K+V KiB", "%", "KL", "same next token", "right"):
        caches.add_column(name, justify="right")
    for row in report.rows:
        compared = [f"{row.kl:.2g}", f"{row.top1:.1%}"] if row.method != DENSE else [""] * 2
        right = Text(f"{row.right} of {report.questions}", "green" if row.right == report.questions else "red")
        size = f"{row.bits:.3g}", f"{row.total_bytes / 1024:,.0f}", f"{100 * row.share:.1f}"
        caches.add_row(row.method, *size, *compared, right)
    console.print(caches)
    solvers = FittingTable(title="which channels THINK and GRACE drop")
    solvers.add_column("method", min_width=12)
    for name in ("ratio", "f", "gap"):
        solvers.add_column(name, justify="right")
    for before, solver in zip((None, *report.solvers), report.solvers, strict=False):
        if before is not None and before.ratio != solver.ratio:
            solvers.add_section()
        solvers.add_row(solver.method, f"{solver.ratio:g}", f"{solver.objective:.3g}", f"{solver.gap:.1%}")
    console.print(solvers)
    console.print(
        "bits: mean per number that is compressed, everything counted. K+V, %: the whole cache, if the model had 16 "
        "bits. KL: how far next-token distributions are from the dense cache's, nats, mean over the next "
        f"{report.later_tokens} tokens of the text; same next token: how often the likeliest is the same. right: "
        "passwords that are found in the smaller cache, asked for after it was made. ratio: share of the key channels "
        "that is dropped. f: squared change of the observed logits, over all heads. gap: distance of f from a "
        f"certified lower bound for every choice of as many channels. {report.seconds:.1f} s.",
        style="dim",
    )
    console.print(ADVICE)


def print_tune(console: Console, result: TuneResult, own: bool, file: Path) -> None:
    """Print what `tune` measured, what is missing and why, and the recommendation.

    Parameters
    ----------
    console : Console
    result : TuneResult
    own : bool
        Whether the texts were the user's.
    file : Path
        Where the recommended settings are written.
    """
    from ..hf.tools.tune.table import COLUMNS  # loaded already: the result comes from this package

    if result.rows:
        console.print(result.table())
        console.print(COLUMNS, style="dim")
    for name, why in result.left_out.items():
        console.print(f"left out: {name}: {why}", style="dim", soft_wrap=True)
    if not own:
        console.print(
            "These texts are those that the basis for bits is calibrated on, a first try only: give --text with your "
            "own.",
            style="dim",
        )
    if result.recommendation is not None:
        best = result.recommendation
        console.print(Text.assemble(("recommended: " if best.reached else "not reached: ", "bold"), str(best)))
        if not best.reached:
            return
        words = best.row.candidate.words
        console.print(
            escape_path(f"to use it: attach(model, {words}), or attach(model, config={str(file)!r})", sys.stdout),
            markup=False,
            soft_wrap=True,
        )


def solution_table(s: Solution, note: str | None = None) -> RenderableType:
    """Return one instance as a list, a batch as rows, with the chosen vertices; `note` goes below."""
    status = np.ravel(np.asarray(s.status, dtype=object))
    size = len(status)
    rows = list(zip(np.ravel(s.objective), np.ravel(s.bound), np.ravel(s.gap), strict=True))[:MAX_INSTANCES_SHOWN]
    names = range(s.mask.shape[-1]) if s.problem is None or s.problem.labels is None else s.problem.labels
    chosen = [
        " ".join(escape_path(str(names[i]), sys.stdout) for i in row if i >= 0)
        for row in np.asarray(s.indices).reshape(size, -1)[:MAX_INSTANCES_SHOWN]
    ]
    bound = "upper bound" if s.maximize else "lower bound"
    time = f"{s.stats['time']:.3g} s"
    if np.ndim(s.status) == 0:
        facts = dict(zip(("objective", bound, "gap"), _numbers(*rows[0]), strict=True))
        facts |= {"status": f"{status[0].name}: {status[0].value}", "time": time, "chosen vertices": chosen[0]}
        listed = Table.grid(padding=(0, 2))
        listed.add_column(no_wrap=True)
        listed.add_column(overflow="fold")
        for name, value in ({"method": s.method} | facts | ({"note": note} if note else {})).items():
            listed.add_row(Text(name, "bold"), Text(value))
        return listed
    shown = f", the first {MAX_INSTANCES_SHOWN} shown; --json gives all" if size > MAX_INSTANCES_SHOWN else ""
    table = FittingTable(
        "instance", caption=f"{s.method}: {size} instances in {time}{shown}{f'; {note}' if note else ''}"
    )
    for name in ("objective", bound, "gap"):
        table.add_column(name, justify="right")
    table.add_column("status")
    table.add_column("chosen vertices", min_width=15)
    for b, numbers in enumerate(rows):
        table.add_row(str(b), *_numbers(*numbers), status[b].name, chosen[b])
    return table


def _numbers(f: float, bound: float, gap: float) -> tuple[str, str, str]:
    return (
        f"{f:.9g}",
        f"{bound:.9g}" if math.isfinite(bound) else "none",
        f"{gap:.3%}" if math.isfinite(gap) else "unknown",
    )
