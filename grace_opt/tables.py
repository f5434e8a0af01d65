"""What the command line shows: a solution and the demo's report as tables for people.

Source: ours, on rich.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from .solution import Solution

if TYPE_CHECKING:
    from .hf.demo import DemoReport

#: Instances of a batch that the tables show; JSON gives all.
SHOWN = 20


def print_demo(console: Console, report: DemoReport) -> None:
    """Print a demo's report: what was asked, a row per cache, what the columns mean, and what to start with."""
    from .hf.demo import ADVICE  # which whoever has a report has loaded

    console.print(
        f"[bold]{report.model}[/]: {len(report.layers)} layers, {report.kv_heads} KV heads of {report.head_dim} "
        f"channels; prompt of {report.prompt_tokens} tokens, needle at depth {report.depth:g}\n"
        f"{report.question} [bold]{report.answer}[/]",
        soft_wrap=True,
    )
    wide = console.width >= 120
    table = Table(title="key cache, beside dense", box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True)
    table.add_column("method", min_width=12, no_wrap=wide)
    for name in ("λ", "Σ f", "gap ≤", "logits", "K KiB", "%", "K+V KiB", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("found", no_wrap=True)
    if wide:
        table.add_column("generated", overflow="ellipsis", no_wrap=True, max_width=console.width - 94)
    last = report.rows[0].ratio
    for row in report.rows:
        if row.ratio != last:
            table.add_section()
        last = row.ratio
        costs = [f"{row.ratio:g}".lstrip("0"), f"{row.objective:.3g}", f"{row.gap:.1%}", f"{row.logit_error:.2%}"]
        table.add_row(
            row.method,
            *(costs if row.ratio else [""] * 4),
            *(f"{row.key_bytes / 1024:,.0f}", f"{100 * row.key_ratio:.1f}"),
            *(f"{row.total_bytes / 1024:,.0f}", f"{100 * row.total_ratio:.1f}"),
            "[green]yes[/]" if row.found else "[red]no[/]",
            *([row.text] if wide else []),
        )
    console.print(table)
    if not wide:
        for row in report.rows:
            name = f"{row.method}, λ = {row.ratio:g}" if row.ratio else row.method
            console.print(f"  {name:<31} {row.text}", overflow="ellipsis", no_wrap=True, highlight=False, markup=False)
    console.print(
        "Σ f: squared change of the observed logits, over all heads. gap: to a certified lower bound that holds for "
        "every choice of as many channels. logits: relative error over the dense run's continuation, which "
        "a smaller f need not make smaller. The whole answer is decoded from the pruned cache. "
        f"{report.seconds:.1f} s.",
        style="dim",
    )
    console.print(ADVICE, soft_wrap=True, highlight=False)


def solution_table(s: Solution, note: str | None = None) -> Table:
    """A solution as rows, one per instance, with the chosen vertices; `note` goes below."""
    size = np.asarray(s.objective).size
    batch = size > 1
    notes = [f"{size} instances, the first {SHOWN} shown; --json gives all"] if size > SHOWN else []
    table = Table(
        *("method", *(["instance"] if batch else []), "objective", "lower bound", "gap", "status", "time"),
        caption="; ".join([*notes, *([note] if note else [])]) or None,
    )
    table.add_column("chosen vertices", overflow="fold")
    rows = zip(
        np.ravel(s.objective),
        np.ravel(s.lower_bound),
        np.ravel(s.gap),
        np.ravel(np.asarray(s.status, dtype=object)),
        np.reshape(s.indices, (size, -1)),
        strict=True,
    )
    for b, (f, bound, gap, status, chosen) in enumerate(list(rows)[:SHOWN]):
        table.add_row(
            s.method if b == 0 else "",
            *([str(b)] if batch else []),
            f"{f:.9g}",
            f"{bound:.9g}" if math.isfinite(bound) else "none",
            f"{gap:.3%}" if math.isfinite(gap) else "unknown",
            status.name,
            f"{s.stats['time']:.3g} s" if b == 0 else "",
            " ".join(str(i) for i in chosen if i >= 0),
        )
    return table
