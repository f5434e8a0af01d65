"""A results folder may be anybody's: a report writes nowhere else, shows text as text, and names what is wrong."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grace_opt.errors import GraceError, OptionError
from grace_opt.sweep import (
    Cell,
    Description,
    Paper,
    Plot,
    Record,
    SweepError,
    Table,
    make_report,
    read_cell,
    read_description,
    write_cell,
    write_description,
)
from grace_opt.sweep.cells import _digest

VIEWS = (
    Table(
        "A table", ["f"], ["n"], "method", "think", ["prompt"], paper=[Paper("f", {"n": 1, "method": "mies"}, 2.0, "T")]
    ),
    Plot("line", "A plot", "prompt", "f", hue="method", labels={"f": "error"}),
)
BAD = (
    None,
    True,
    -1,
    10**30,
    0.5,
    {"$float": "nan"},
    {"$float": "x"},
    {"$float": None},
    "",
    "\ud800",
    [],
    {},
    [[]],
    [None],
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A results folder of one experiment with one cell."""
    rows = [{"method": m, "prompt": p, "f": p + (m == "think") / 2} for p in range(3) for m in ("think", "mies")]
    cell = Cell("made", {"n": 1, "seed": 0})
    write_cell(tmp_path / "results", Record(cell, rows, 0.5, {"commit": "abc"}))
    write_description(tmp_path / "results", Description("made", "Made", "", "About it.", "run", [cell.key], VIEWS))
    return tmp_path / "results"


def everything(folder: Path) -> set[str]:
    return {os.path.relpath(Path(at) / name, folder) for at, _, names in os.walk(folder) for name in names}


def edit(path: Path, change: Callable[[dict[str, Any]], Any], *, digest: bool = False) -> None:
    """Change a JSON file as somebody would who knows its digest."""
    content = json.loads(path.read_text())
    content.pop("digest", None)
    change(content)
    if digest:
        content["digest"] = _digest(content)
    path.write_text(json.dumps(content))


def fields(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(place for key, entry in inner for place in fields(entry, (*at, key)))]


def put(content: Any, at: tuple[Any, ...], value: Any) -> None:
    for key in at[:-1]:
        content = content[key]
    if value is ...:
        del content[at[-1]]
    else:
        content[at[-1]] = value


@pytest.mark.parametrize(
    "name", ["../../evil", "/tmp/evil", "..", "a/b", "", "Made", "other", "index", "made\n", None, 3]
)
def test_names_that_lead_elsewhere(name: Any, folder: Path) -> None:
    before = everything(folder.parent)
    edit(folder / "made" / "experiment.json", lambda content: content.update(name=name))
    with pytest.raises(SweepError, match=r"experiment\.json is not what a sweep writes"):
        make_report(folder)
    assert everything(folder.parent) == before
    with pytest.raises(OptionError, match="experiment="):
        Description("../evil", "", "", "", "", [], [])


@pytest.mark.parametrize("key", ["../../../evil", "/etc/passwd", "x", "", None, 3])
def test_keys_that_lead_elsewhere(key: Any, folder: Path) -> None:
    edit(folder / "made" / "experiment.json", lambda content: content["keys"].append(key))
    with pytest.raises(SweepError, match=r"experiment\.json is not what a sweep writes.*keys"):
        make_report(folder)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links")
@pytest.mark.parametrize(
    "what", ["experiment", "description", "cells", "record", "parquet", "report", "page", "picture"]
)
def test_links_that_leave_the_folder(what: str, folder: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    (record,) = (folder / "made" / "cells").iterdir()
    places = {
        "experiment": folder / "made",
        "description": folder / "made" / "experiment.json",
        "cells": folder / "made" / "cells",
        "record": record,
        "parquet": folder / "made" / "results.parquet",
        "report": folder / "report",
        "page": folder / "report" / "made.html",
        "picture": folder / "report" / "made-2.png",
    }
    place = places[what]
    if place.exists():
        place.rename(far)
    elif what == "report":
        far.mkdir()
    else:
        far.write_text("precious")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(far)
    before = everything(tmp_path) - everything(folder)
    with pytest.raises(SweepError, match=r"leads out of .*to .*far"):
        make_report(folder)
    assert far.is_dir() or what in ("description", "record") or far.read_text() == "precious"
    assert {name for name in everything(tmp_path) if not name.startswith("results")} == {
        name for name in before if not name.startswith("results")
    }
    place.unlink()
    place.symlink_to(place)  # a link to itself
    if what == "cells":
        assert "0 of 1 cells measured" in make_report(folder)[1].read_text()
    else:
        with pytest.raises(GraceError):
            make_report(folder)


def test_a_folder_that_is_a_link_is_the_users(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert make_report(tmp_path / "link")[1].name == "made.md"


@pytest.mark.slow
def test_every_field_of_a_description(folder: Path) -> None:
    """Whatever stands in it: a report, or an error that says where. Nothing is written outside of the folder."""
    path = folder / "made" / "experiment.json"
    whole, before = path.read_text(), everything(folder.parent)
    for at in fields(json.loads(whole)):
        for value in (..., *BAD):
            path.write_text(whole)
            edit(path, lambda content, at=at, value=value: put(content, at, value))
            try:
                read_description(path)
            except SweepError as error:
                assert "experiment.json" in str(error)  # noqa: PT017
    path.write_text(whole)
    read_description(path)
    assert everything(folder.parent) == before


@pytest.mark.slow
def test_every_field_of_a_record(folder: Path) -> None:
    (path,) = (folder / "made" / "cells").iterdir()
    whole, refused = path.read_text(), 0
    for at in fields(json.loads(whole)):
        for value in (..., *BAD):
            path.write_text(whole)
            try:
                edit(path, lambda content, at=at, value=value: put(content, at, value), digest=at != ("digest",))
            except KeyError:
                continue  # the digest itself
            try:
                read_cell(path)
            except SweepError as error:
                assert path.name in str(error)  # noqa: PT017
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "{",
        '{"format": 1}',
        '{"format": 1, "digest": NaN}',
        '{"format": 1, "x": Infinity}',
        '{"format": 1, "x": 1e999}',
        '{"format": 1, "x": "\\ud800"}',
        '{"format": 1, "x": ' + "9" * 5000 + "}",
        '{"format": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"format": 1, "x": ' + "[" * 900 + "]" * 900 + "}",
        b"\xff\xfe",
    ],
)
def test_files_that_are_none(content: str | bytes, folder: Path) -> None:
    (record,) = (folder / "made" / "cells").iterdir()
    for path in (record, folder / "made" / "experiment.json"):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        for read in (read_cell, read_description):
            with pytest.raises(SweepError, match=path.name):
                read(path)
        with pytest.raises(SweepError):
            make_report(folder)
    record.unlink()
    record.mkdir()
    with pytest.raises(SweepError, match=record.name):
        read_cell(record)


def report_of(tmp_path: Path, rows: list[dict[str, Any]], views: Any = VIEWS, **config: Any) -> str:
    cell = Cell("made", {"n": 1, **config})
    write_cell(tmp_path, Record(cell, rows, 0.5, {}))
    write_description(tmp_path, Description("made", "Made", "", "", "run", [cell.key], views))
    return make_report(tmp_path)[1].read_text()


@pytest.mark.parametrize("large", [2**63, -(2**63) - 1, 10**400])
@pytest.mark.parametrize("where", ["row", "setting"])
def test_numbers_beyond_64_bits_are_named(large: int, where: str, tmp_path: Path) -> None:
    row = {"method": "mies", "prompt": 0, "f": 1.0}
    with pytest.raises(OptionError, match=r"'large' holds .*beyond 64 bits"):
        report_of(
            tmp_path,
            [row | ({"large": large} if where == "row" else {})],
            **({"large": large} if where != "row" else {}),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "values", [(1e308, 1.5e308, 1.7e308), (-1e308, 1e308, 0.0), (math.inf, math.nan, -math.inf), (5e-324, 0.0, -0.0)]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_at_the_ends_of_the_range(values: tuple[float, ...], tmp_path: Path) -> None:
    rows = [{"method": m, "prompt": p, "f": v} for p, v in enumerate(values) for m in ("think", "mies")]
    kinds = [Plot(kind, kind, "prompt", "f", hue="method") for kind in ("line", "bar", "box", "scatter")]
    heatmap = Plot("heatmap", "heatmap", "prompt", "method", value="f")
    views = [*VIEWS, Table("M", ["f"], [], "method"), *kinds, heatmap]
    try:
        assert "mies" in report_of(tmp_path, rows, views)
    except OptionError as error:  # what matplotlib has no axis for
        assert re.search("plot '.*cannot be drawn", str(error))  # noqa: PT017
        assert max(map(abs, values)) >= 1e308


def test_truth_values_and_numbers_in_one_column(tmp_path: Path) -> None:
    rows = [{"method": "mies", "prompt": p, "f": 1.0, "found": value} for p, value in enumerate((True, 1.5))]
    with pytest.raises(OptionError, match="'found' holds a truth value"):
        report_of(tmp_path, rows)


@pytest.mark.slow
def test_text_begins_no_markdown_and_no_tags(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)> [x](javascript:alert(1)) `c` | ![y](z) **b** &lt;i&gt; \\"
    starts = (
        "<details><summary>Where the numbers come from</summary>",
        "# h",
        "- l",
        "1. n",
        "2) n",
        "+ l",
        "=====",
        "~~~",
        "---",
        "> q",
        "* l",
        "```",
    )
    rows = [{"method": evil, "prompt": 0, "f": 1.0, "n": 1}]
    for at, start in enumerate(starts):
        about, cell = f"{start} {evil}", Cell(f"e{at}", {"n": 1})
        write_cell(tmp_path, Record(cell, rows, 0.5, {"commit": evil, evil: "x"}))
        views = [Table(evil, ["f"], ["n"], "method", note=about), Plot("bar", "p" + evil, "method", "f", note=about)]
        write_description(tmp_path, Description(cell.experiment, evil, evil, about, evil, [cell.key], views))
    for page in make_report(tmp_path):
        html = page.with_suffix(".html").read_text()
        body = html[html.index("</style>") :]
        for tag in ("<img src=x", 'javascript:alert(1)"', "<em", "<ol", "<pre", "<blockquote", "<hr"):
            assert tag not in body, (page.name, tag)
        assert body.count("<h1>") == 1
        own = 0 if page.name == "index.md" else 1  # asked, found, how sure; and where it comes from
        assert [body.count(tag) for tag in ("<ul", "<li", "<strong", "<details")] == [own, 3 * own, 3 * own, own]
        assert page.name == "index.md" or "onerror=alert(1)&gt;" in body
    for picture in (tmp_path / "report").glob("*.svg"):
        assert "<img" not in picture.read_text()


def test_a_ratio_to_a_printed_zero(tmp_path: Path) -> None:
    paper = [Paper("f", {"n": 1, "method": m}, value, "T") for m, value in (("think", 0.0), ("mies", 2.0))]
    table = Table("R", ["f"], ["n"], "method", "think", ["prompt"], compare="ratio", paper=paper)
    rows = [{"method": m, "prompt": 0, "f": 1.0} for m in ("think", "mies")]
    assert "| 0 (T) |" in report_of(tmp_path, rows, [table])
