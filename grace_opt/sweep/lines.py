"""The lines of a report's table: the paper's number, ours, difference from the baseline, interval, n, verdict.

There is one line per setting. With one metric, each of these has a column. With several, each metric has one column,
where difference and verdict follow our number.

When: `make_report`. Only `paired_interval` decides what is called better or worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionError
from .bootstrap import Interval, mean_interval, paired_interval
from .views import Table

NOT_RUN = "not run here"
#: (values of the rows, value of `by`, metric)
Place = tuple[tuple[Any, ...], Any, str]


@dataclass(frozen=True)
class Lines:
    """A table as text, before it is Markdown.

    Attributes
    ----------
    head : list of str
    body : list of list of str
        Commands are in backquotes.
    notes : list of str
    verdicts : list of (str, str)
        For each comparison, the value of `by` and the verdict.
    """

    head: list[str]
    body: list[list[str]]
    notes: list[str]
    verdicts: list[tuple[str, str]]


def lines(table: Table, data: Sequence[dict[str, Any]], command: str) -> Lines:
    """Return the lines of `table`.

    Parameters
    ----------
    table : Table
    data : sequence of dict
        All rows of all cells; may be empty.
    command : str
        The command that would fill missing lines.
    """
    printed = {_place(table, number.at, number.metric): number for number in table.paper}
    measured = _measured(table, data)
    places = _ordered(table, [*measured, *(place for place in printed if place not in measured)])
    notes: list[str] = [table.note] if table.note else []
    compared = "ratio" if table.compare == "ratio" else "difference"
    to = "to" if table.compare == "ratio" else "from"
    interval = f"{compared} {to} {table.baseline} (95 %)" if table.pair else "95 % interval"
    body = []
    for place in places:
        rows, by, metric = place
        paper, values = printed.get(place), measured.get(place)
        base = (rows, table.baseline, metric)
        line: dict[str, str] = {}
        fixed = [*map(_text, rows), _text(by)]
        line["paper"] = f"{_number(paper.value, table)} ({paper.source})" if paper else ""
        against = printed.get(base)
        ratio = table.compare == "ratio"
        if paper and against and table.pair and by != table.baseline and (against.value or not ratio):
            change = paper.value / against.value if ratio else paper.value - against.value
            line[f"paper's {compared}"] = _number(change, table, signed=table.compare == "difference")
        if values is None:
            line["ours"], line["to measure it"] = NOT_RUN, f"`{(paper and paper.command) or command}`"
        else:
            if bad := sum(not math.isfinite(value) for value in values.values()):
                notes.append(
                    f"{' '.join(map(_text, (*rows, by, metric)))}: {bad} of {len(values)} are not finite and left out."
                )
            kept = {key: value for key, value in values.items() if math.isfinite(value)}
            line |= _ours(table, place, kept, measured.get(base), interval, notes)
        body.append((fixed, metric, line))
    verdicts = [(fixed[-1], line["verdict"]) for fixed, _, line in body if line.get("verdict")]
    left = [*table.rows, table.by]
    count = f"n ({', '.join(table.unit) or 'rows'})"  # says what is resampled, and is no column's name
    if len(table.metrics) > 1:
        beside = f"{interval}, and whether it is better or worse" if table.pair else interval
        notes.insert(0, f"In brackets after each mean: {beside}.")
        return Lines(*_wide(table, left, body, count, interval), notes, verdicts)
    names = ("paper", f"paper's {compared}", "ours", "n", interval, "verdict", "to measure it")
    right = [name for name in names if any(line.get(name) for _, _, line in body)]
    headings = {"n": count, "ours": "measured" if "paper" in right else table.metrics[0]}
    head = [*left, *(headings.get(name, name) for name in right)]
    return Lines(head, [[*fixed, *(line.get(name, "") for name in right)] for fixed, _, line in body], notes, verdicts)


def _wide(
    table: Table, left: list[str], body: list[tuple[list[str], str, dict[str, str]]], count: str, interval: str
) -> tuple[list[str], list[list[str]]]:
    """Head and body with a column for each metric, and one for its paper's numbers, if there are any."""
    together: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for fixed, metric, line in body:
        together.setdefault(tuple(fixed), {})[metric] = line
    printed = [metric for metric in table.metrics if any(m == metric and line["paper"] for _, m, line in body)]
    commands = any(line.get("to measure it") for _, _, line in body)
    head = list(left)
    for metric in table.metrics:
        head += [f"{metric}, paper"] * (metric in printed) + [metric]
    rows = []
    for setting, found in together.items():
        cells = list(setting)
        for metric in table.metrics:
            line = found.get(metric, {})
            change = line.get(f"paper's {'ratio' if table.compare == 'ratio' else 'difference'}", "")
            cells += [line.get("paper", "") + (f", {change}" if change else "")] * (metric in printed)
            beside = ", ".join(line[name] for name in (interval, "verdict") if line.get(name))
            cells.append(line.get("ours", "") + (f" ({beside})" if beside else ""))
        counts = list(dict.fromkeys(line["n"] for line in found.values() if line.get("n")))
        cells.append(" / ".join(counts))
        if commands:
            cells.append(next((line["to measure it"] for line in found.values() if line.get("to measure it")), ""))
        rows.append(cells)
    return [*head, count, *(["to measure it"] if commands else [])], rows


def _ours(
    table: Table,
    place: Place,
    values: dict[Any, float],
    baseline: dict[Any, float] | None,
    title: str,
    notes: list[str],
) -> dict[str, str]:
    """Mean, n, interval and verdict; `notes` gets what could not be paired."""
    if not values:
        return {"ours": "no finite number", "n": "0"}
    units = _units(table, values)
    found = {"ours": _number(float(np.mean(list(units.values()))), table), "n": str(len(units))}
    if not table.pair:
        return found | {title: _interval(mean_interval(list(units.values())), table, signed=False)}
    if place[1] == table.baseline:
        return found
    both = [key for key, value in (baseline or {}).items() if key in values and math.isfinite(value)]
    if len(both) < len(values):
        name = " ".join(map(_text, (*place[0], place[1], place[2])))
        notes.append(f"{name}: {len(values) - len(both)} of {len(values)} cannot be paired with {table.baseline}.")
    if not both:
        return found | {"verdict": "no pairs"}
    ours = _units(table, {key: values[key] for key in both})
    theirs = _units(table, {key: (baseline or {})[key] for key in both})
    result = paired_interval(list(ours.values()), list(theirs.values()), better=table.better, compare=table.compare)
    signed = table.compare == "difference"
    return found | {
        "n": str(result.n),
        title: f"{_number(result.estimate, table, signed=signed)} {_interval(result, table, signed=signed)}",
        "verdict": result.verdict,
    }


def _measured(table: Table, data: Sequence[dict[str, Any]]) -> dict[Place, dict[Any, float]]:
    """Of every place, the values by pair, or by number where nothing is paired."""
    found: dict[Place, dict[Any, float]] = {}
    for row in data:
        if row.get(table.by) is None:
            continue  # another table's row
        for metric in table.metrics:
            if row.get(metric) is None:
                continue
            if isinstance(row[metric], str):
                raise OptionError(
                    f"table {table.title!r}: column {metric!r} holds text ({row[metric]!r}), not numbers."
                )
            values = found.setdefault((tuple(row.get(name) for name in table.rows), row[table.by], metric), {})
            key = tuple(row.get(name) for name in table.pair) if table.pair else (len(values),)
            if key in values:
                where = ", ".join(f"{name}={value!r}" for name, value in zip(table.pair, key, strict=True))
                raise OptionError(
                    f"table {table.title!r}: two values of {metric!r} by {row[table.by]!r} at {where}. `pair` must "
                    "name every column that tells measurements of one line apart."
                )
            values[key] = float(row[metric])
    return found


def _units(table: Table, values: dict[Any, float]) -> dict[Any, float]:
    """Means of what belongs to one unit, in order of appearance."""
    if table.unit == table.pair:
        return values
    at = [table.pair.index(name) for name in table.unit]
    groups: dict[Any, list[float]] = {}
    for key, value in values.items():
        groups.setdefault(tuple(key[i] for i in at), []).append(value)
    return {key: float(np.mean(group)) for key, group in groups.items()}


def _ordered(table: Table, places: list[Place]) -> list[Place]:
    """By rows, then `by`, then metric, each in order of appearance, the baseline first."""
    rows = list(dict.fromkeys(place[0] for place in places))
    by = list(dict.fromkeys([*([table.baseline] if table.pair else []), *(place[1] for place in places)]))
    return sorted(places, key=lambda p: (rows.index(p[0]), by.index(p[1]), table.metrics.index(p[2])))


def _place(table: Table, at: Any, metric: str) -> Place:
    return tuple(at[name] for name in table.rows), at[table.by], metric


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def _number(value: float, table: Table, *, signed: bool = False) -> str:
    return f"{value:{'+' if signed else ''}.{table.digits}g}"


def _interval(found: Interval, table: Table, *, signed: bool) -> str:
    if math.isinf(found.low):
        return "[unknown]"
    return f"[{_number(found.low, table, signed=signed)}, {_number(found.high, table, signed=signed)}]"
