"""Sweeps: many measurements, one file each, that can be stopped and resumed at any time; and reports from them.

A `Cell` is one measurement. `run_sweep` makes the cells that have no record yet: in this process, in several processes,
in `WarmProcesses` for timings, or on any `concurrent.futures` executor. A `Description` stored with the records lists
what a report shows, as `Table` and `Plot`; `make_report` writes it (``grace-opt report DIR``). Every comparison is a
paired bootstrap, `paired_interval`.

Processes need pebble, and reports need pandas, pyarrow and matplotlib. The extra ``bench`` installs them; they are
imported when used.
"""

from __future__ import annotations

from .bootstrap import Interval, mean_interval, paired_interval
from .cells import Cell, Record, SweepError, read_cell, write_cell
from .report import make_report
from .run import Failure, SweepResult, run_sweep
from .views import Description, Paper, Plot, Table, read_description, write_description
from .warm import ProcessLostError, WarmProcesses

__all__ = [
    "Cell",
    "Description",
    "Failure",
    "Interval",
    "Paper",
    "Plot",
    "ProcessLostError",
    "Record",
    "SweepError",
    "SweepResult",
    "Table",
    "WarmProcesses",
    "make_report",
    "mean_interval",
    "paired_interval",
    "read_cell",
    "read_description",
    "run_sweep",
    "write_cell",
    "write_description",
]
