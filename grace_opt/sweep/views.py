"""The tables and plots of a report, described as data and stored with the records.

When: an experiment is set up. ``DIR/NAME/experiment.json`` holds a `Description`: what the experiment is, its cells,
the command that makes them, and a list of `Table` and `Plot`. A report therefore needs no code of the experiment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._util.parameters import integer, number
from ..errors import OptionError
from .cells import FORMAT, check_name, content_errors, decode, encode, read_json, write_sweep_file

KINDS = ("line", "bar", "heatmap", "scatter", "box")


@dataclass(frozen=True)
class Paper:
    """A number that the paper prints.

    Attributes
    ----------
    metric : str
        Our column to compare it with.
    at : dict
        Maps every column in the table's `rows` and `by` to a value.
    value : float
    source : str
        Place in the paper, e.g. "Table 2".
    command : str
        The command that measures ours; by default the experiment's command.
    """

    metric: str
    at: Mapping[str, Any]
    value: float
    source: str
    command: str = ""

    def __post_init__(self) -> None:
        what = "a number of the paper"
        _check_texts(what, metric=self.metric, source=self.source, command=self.command)
        object.__setattr__(self, "value", number(f"{what}: value", self.value))
        if not isinstance(self.at, Mapping) or not all(map(_is_plain, self.at.values())):
            raise OptionError(f"{what}: at={self.at!r}; give a dict of column to number or text.")


@dataclass(frozen=True)
class Table:
    """A table of means, one line for each value of `rows` and `by`.

    Attributes
    ----------
    title : str
    metrics : sequence of str
        Columns to average.
    rows : sequence of str
        Columns that identify a line: dataset, ratio, ...
    by : str
        The column whose values are compared, usually "method".
    baseline : optional
        The value of `by` with which the others are compared, e.g. "think".
    pair : sequence of str
        Columns that, with `rows`, identify measurements to pair: prompt, layer, head, ... Needs `baseline`.
    unit : sequence of str
        Columns of `pair` to resample; measurements of one unit are averaged first. Heads of one prompt are not
        independent: with pair=("prompt", "head"), write unit=("prompt",). By default `pair`.
    better : {"lower", "higher"}
    compare : {"difference", "ratio"}
        Comparison with the baseline: difference of the means, or their ratio.
    paper : sequence of Paper
        Printed next to ours; "not run here" if ours is missing.
    note : str
        Text below the table.
    digits : int
        Number of significant digits.

    Examples
    --------
    >>> table = Table("f", ["f"], rows=["n"], by="method", baseline="think", pair=["instance"])
    >>> table.unit
    ('instance',)
    """

    title: str
    metrics: Sequence[str]
    rows: Sequence[str]
    by: str
    baseline: Any = None
    pair: Sequence[str] = ()
    unit: Sequence[str] = ()
    better: str = "lower"
    compare: str = "difference"
    paper: Sequence[Paper] = ()
    note: str = ""
    digits: int = 4

    def __post_init__(self) -> None:
        what = f"table {self.title!r}"
        _check_texts(what, title=self.title, by=self.by, better=self.better, compare=self.compare, note=self.note)
        for name in ("metrics", "rows", "pair", "unit", "paper"):
            _as_tuple(self, name, Paper if name == "paper" else str)
        object.__setattr__(self, "digits", integer(f"{what}: digits", self.digits, at_least=1, at_most=17))
        if not _is_plain(self.baseline):
            raise OptionError(f"{what}: baseline={self.baseline!r}; give a number or text.")
        if not self.unit:
            object.__setattr__(self, "unit", self.pair)
        if not self.metrics:
            raise OptionError(f"{what} has no metrics: name the columns to average.")
        if (self.baseline is None) != (not self.pair):
            raise OptionError(f"{what}: `baseline` and `pair` go together; give both or none.")
        if extra := [name for name in self.unit if name not in self.pair]:
            raise OptionError(f"{what}: unit {extra[0]!r} is not among pair={list(self.pair)}.")
        if self.better not in ("lower", "higher") or self.compare not in ("difference", "ratio"):
            raise OptionError(f'{what}: better is "lower" or "higher", compare "difference" or "ratio".')
        for figure in self.paper:
            if set(figure.at) != {*self.rows, self.by} or figure.metric not in self.metrics:
                raise OptionError(
                    f"{what}: a number of the paper stands at {dict(figure.at)}, metric {figure.metric!r}; it needs a "
                    f"value for each of {[*self.rows, self.by]} and one of the metrics {list(self.metrics)}."
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return (*self.metrics, *self.rows, self.by, *self.pair)


@dataclass(frozen=True)
class Plot:
    """A picture of rows.

    Attributes
    ----------
    kind : {"line", "bar", "heatmap", "scatter", "box"}
        Lines and bars show means with 95 % bootstrap intervals, heatmaps means of `value`, the others every row.
    title : str
    x, y : str
        Columns.
    value : str
        For heatmaps: the column that the colour shows.
    hue, facet : str
        Columns with one colour, or one panel, per value; "" for none.
    log : sequence of str
        Axes with a logarithmic scale: "x", "y".
    labels : dict
        Maps a column to the text on its axis, e.g. {"f": "reconstruction error"}.
    note : str
        Text below the plot.
    """

    kind: str
    title: str
    x: str
    y: str
    value: str = ""
    hue: str = ""
    facet: str = ""
    log: Sequence[str] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        names = ("kind", "title", "x", "y", "value", "hue", "facet", "note")
        _check_texts(f"plot {self.title!r}", **{name: getattr(self, name) for name in names})
        _as_tuple(self, "log", str)
        if not isinstance(self.labels, Mapping):
            raise OptionError(f"plot {self.title!r}: labels={self.labels!r}; give a dict of column to text.")
        _check_texts(f"plot {self.title!r}, labels", **self.labels)
        if self.kind not in KINDS:
            raise OptionError(f"plot {self.title!r}: kind={self.kind!r}; there are {', '.join(KINDS)}.")
        if (self.kind == "heatmap") != bool(self.value) or (self.kind == "heatmap" and self.hue):
            raise OptionError(f"plot {self.title!r}: a heatmap has `value` and no `hue`; others have no `value`.")
        if bad := [axis for axis in self.log if axis not in ("x", "y")]:
            raise OptionError(f"plot {self.title!r}: log={bad[0]!r}; name axes, x or y.")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return tuple(name for name in (self.x, self.y, self.value, self.hue, self.facet) if name)


@dataclass(frozen=True)
class Description:
    """What a report needs to know of an experiment.

    Attributes
    ----------
    name, title : str
    paper : str
        The figure or table of the paper, e.g. "Fig. 5"; empty if there is none.
    about : str
        A paragraph: what is measured, how, and on what.
    command : str
        The command that makes missing cells.
    keys : sequence of str
        Keys of the cells, in order; records of other cells in the folder are not shown.
    views : sequence of Table and Plot
    missing : str
        Why nothing could be run, if so.
    """

    name: str
    title: str
    paper: str
    about: str
    command: str
    keys: Sequence[str]
    views: Sequence[Table | Plot]
    missing: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        texts = {name: getattr(self, name) for name in ("title", "paper", "about", "command", "missing")}
        _check_texts(f"experiment {self.name!r}", **texts)
        for name, kind in (("keys", str), ("views", Table | Plot)):
            _as_tuple(self, name, kind)
        bad = [key for key in self.keys if not re.fullmatch("[0-9a-f]{32}", key)]
        if bad or len(set(self.keys)) < len(self.keys):
            wrong = f"{bad[0]!r} is none" if bad else "one stands twice"
            raise OptionError(f"experiment {self.name!r}: keys are 32 hexadecimal digits, each of them once; {wrong}.")


def write_description(directory: str | os.PathLike[str], description: Description) -> Path:
    """Write ``directory/NAME/experiment.json``, atomically."""
    path = Path(directory) / description.name / "experiment.json"
    content = {"format": FORMAT, **dataclasses.asdict(description)}
    for view, shown in zip(content["views"], description.views, strict=True):
        view["view"] = type(shown).__name__
    write_sweep_file(path, json.dumps(encode(content, "description"), indent=1, allow_nan=False) + "\n")
    return path


def read_description(path: str | os.PathLike[str]) -> Description:
    """Read an ``experiment.json``; raise a `SweepError` that says what is wrong with it."""
    path = Path(os.path.abspath(path))
    content = read_json(path)
    with content_errors(path):
        content = decode(content)
        del content["format"]
        views: list[Table | Plot] = []
        for view in content.pop("views"):
            if view.pop("view") == "Table":
                views.append(Table(**{**view, "paper": [Paper(**number) for number in view["paper"]]}))
            else:
                views.append(Plot(**view))
        found = Description(**content, views=tuple(views))
        if found.name != path.parent.name:
            raise OptionError(f"name={found.name!r} is not that of its folder, {path.parent.name!r}.")
    return found


def check_columns(experiment: str, view: Table | Plot, columns: Iterable[str]) -> None:
    """Raise an `OptionError` if the view reads a column that no row has."""
    known = sorted(columns)
    if unknown := [name for name in view.columns if name not in known]:
        raise OptionError(
            f"{experiment}: the {type(view).__name__.lower()} {view.title!r} reads column {unknown[0]!r}, which no row "
            f"has; there are {', '.join(known)}."
        )


def _check_texts(what: str, /, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, str):
            raise OptionError(f"{what}: {name}={value!r}; give text.")


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None)


def _as_tuple(view: Table | Plot | Description, name: str, kind: Any) -> None:
    """A sequence as tuple; a string where a sequence belongs is a likely slip."""
    value = getattr(view, name)
    what = f"{type(view).__name__.lower()} {view.title!r}"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError(f"{what}: {name}={value!r}; give a list.")
    if bad := [entry for entry in value if not isinstance(entry, kind)]:
        raise OptionError(f"{what}: {name} holds {bad[0]!r}; give a list of {getattr(kind, '__name__', kind)}.")
    object.__setattr__(view, name, tuple(value))
