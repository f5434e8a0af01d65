"""Sweeps: many measurements, one file each, that can be stopped at any moment; and the reports that are made of them.

A `Cell` is one measurement. `run_sweep` makes those that are not on record yet, in this process, in several, or on any
`concurrent.futures` executor. A `Description` beside the records says what a report shows, as `Table` and `Plot`, and
`make_report` shows it (``grace-opt report DIR``). Every comparison is a paired bootstrap, `paired_interval`.

What reports need besides (pandas, pyarrow, matplotlib) comes with the extra ``bench`` and is loaded when a report is
made.
"""

from __future__ import annotations

from .bootstrap import Interval, mean_interval, paired_interval
from .cells import Cell, Record, SweepError, read_cell, write_cell
from .report import make_report
from .run import Failure, SweepResult, run_sweep
from .views import Description, Paper, Plot, Table, read_description, write_description

__all__ = [
    "Cell",
    "Description",
    "Failure",
    "Interval",
    "Paper",
    "Plot",
    "Record",
    "SweepError",
    "SweepResult",
    "Table",
    "make_report",
    "mean_interval",
    "paired_interval",
    "read_cell",
    "read_description",
    "run_sweep",
    "write_cell",
    "write_description",
]
