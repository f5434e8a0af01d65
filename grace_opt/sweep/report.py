"""`make_report`: turn the records of a results folder into Parquet files and pages (Markdown and HTML).

A page begins with its first plot and three sentences: what was asked, what was found (the verdicts, counted), and how
sure that is. The index lists what every experiment found. The origin of the numbers is in a folded section.

When: after a sweep or during it; the page says what is missing. Nothing on a page is typed by hand: numbers come from
the records, sentences from the `Description` stored with them. Equal records give equal pages. Built on pandas,
pyarrow, matplotlib and markdown-it-py.
"""

from __future__ import annotations

import html
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._util.files import new_folder, os_error_advice, write_file
from .._util.optional import require
from ..errors import OptionError
from .cells import Record, SweepError, check_inside, read_cell
from .lines import lines
from .plots import save_plot
from .views import Description, Plot, Table, check_columns, read_description

REQUIRED_EXTRA = ("bench", "grace-opt report")
#: The start of a folded section; the only HTML on a page.
#: Up to this many contenders are named in what a page found; of more, verdicts are only counted.
MOST_NAMED = 8
_OPEN, _CLOSE = "<details><summary>Where the numbers come from</summary>", "</details>"
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .75rem; text-align: left; vertical-align: top }
img { max-width: 100% } code { font-size: .9em }"""


def make_report(directory: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> list[Path]:
    """Write a page for every experiment below `directory`, and an index.

    Parameters
    ----------
    directory : path
        The results folder of one or more sweeps. Each experiment's ``results.parquet`` is written there.
    out : path, optional
        Where pages and plots go; default ``directory/report``.

    Returns
    -------
    list of Path
        The Markdown files, the index first.

    Raises
    ------
    GraceError
        If there is nothing to report, a record is invalid, a view reads a column that no row has, or a file cannot be
        written.
    """
    directory = Path(directory)
    # The folder may come from anybody: names and links in it must not lead out of it.
    out = check_inside(directory, directory / "report") if out is None else Path(out)
    found = [read_description(check_inside(directory, path)) for path in sorted(directory.glob("*/experiment.json"))]
    if not found:
        raise OptionError(
            f"{directory} holds no experiments (NAME/experiment.json). Give the folder that a sweep wrote to, as in: "
            "python -m bench.experiments all --out results; grace-opt report results"
        )
    try:
        with new_folder(out, SweepError):
            pages = [_experiment(directory, out, description) for description in found]
            rows = [
                [f"[{_escape(d.title)}]({d.name}.md)", _escape(d.paper), said, f"{done} of {len(d.keys)}"]
                for d, (_, done, said) in zip(found, pages, strict=True)
            ]
            head = ["experiment", "in the paper", "found", "cells measured"]
            index = "# Experiments\n\n" + _markdown_table(head, rows)
            return [_write(out / "index", "Experiments", index), *(page for page, _, _ in pages)]
    except OSError as error:  # for example a folder that cannot be listed
        raise SweepError(f"cannot make the report: {error.filename}: {os_error_advice(error)}") from error


def merge(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return all rows, each with ``cell``, ``cell_seconds`` and those settings of its cell that are numbers or text.

    Raises
    ------
    OptionError
        If a column holds numbers in one row and text or a truth value in another, or an integer beyond 64 bits.

    Examples
    --------
    >>> from grace_opt.sweep import Cell
    >>> merge([Record(Cell("demo", {"seed": 3}), [{"f": 1.5}], 0.5, {})])[0]["f"]
    1.5
    """
    rows = []
    for record in records:
        settings = {name: value for name, value in record.cell.config.items() if not isinstance(value, list | dict)}
        added = {"cell": record.cell.key, "cell_seconds": record.seconds}
        rows += [{**settings, **row, **added} for row in record.rows]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        for kind, what in ((str, "text"), (bool, "a truth value")):
            found = [value for value in values if isinstance(value, kind)]
            if found and len(found) < len(values):
                other = next(value for value in values if not isinstance(value, kind))
                raise OptionError(f"column {name!r} holds {what} ({found[0]!r}) in some rows, and {other!r} in others.")
        if large := [value for value in values if isinstance(value, int) and not -(2**63) <= value < 2**63]:
            raise OptionError(
                f"column {name!r} holds {str(large[0])[:24]}, an integer beyond 64 bits: write it as text."
            )
    return rows


def _experiment(directory: Path, out: Path, description: Description) -> tuple[Path, int, str]:
    """Write one experiment's Parquet file, plots and pages; return the page, the number of done cells, the finding."""
    name = description.name
    folder = directory / name / "cells"
    paths = [folder / f"{key}.json" for key in description.keys]
    records = [read_cell(check_inside(directory, path)) for path in paths if os.path.lexists(path)]
    others = sum(not path.name.startswith(".") for path in folder.glob("*.json")) - len(records)
    data = merge(records)
    frame = require("pandas", *REQUIRED_EXTRA).DataFrame(data)
    if data:
        require("pyarrow", *REQUIRED_EXTRA)
        write_file(
            check_inside(directory, directory / name / "results.parquet"), frame.to_parquet(index=False), SweepError
        )
    parts, verdicts = [f"# {_escape(description.title)}"], list[tuple[str, str, str]]()  # of the first comparison
    if description.missing:
        parts.append(f"**Not run here**: {_escape(description.missing)}")
    shown: list[tuple[bool, list[str]]] = []
    for at, view in enumerate(description.views, 1):
        section = [f"## {_escape(view.title)}"]
        shown.append((isinstance(view, Plot), section))
        if data and len(records) < len(paths) and not set(view.columns) <= set(frame.columns):
            section.append(_nothing(description))  # no row has this column yet
            continue
        if data:
            check_columns(name, view, frame.columns)
        if isinstance(view, Table):
            table = lines(view, data, description.command)
            verdicts = verdicts or [(str(view.baseline), by, said) for by, said in table.verdicts]
            body = [[_cell(text) for text in line] for line in table.body]
            section.append(_markdown_table(table.head, body) if body else _nothing(description))
            section += [_paragraph(note) for note in table.notes]
        elif data:
            png, svg = save_plot(view, frame, out / f"{name}-{at}")
            section.append(f"![{_escape(view.title)}]({png.name})\n\n[as SVG]({svg.name})")
            section += [_paragraph(view.note)] if view.note else []
        else:
            section.append(_nothing(description))
    picture = next((section for is_plot, section in shown if is_plot and data), None)
    found = _found(description, records, verdicts)
    parts += picture[1:2] if picture else []
    parts.append(_sentences(description, records, found))
    parts += picture[2:] if picture else []  # its note
    parts += [part for _, section in shown if section is not picture for part in section]
    parts += [_OPEN, *_provenance(description, records, others), _CLOSE]
    return _write(out / name, description.title, "\n\n".join(parts)), len(records), found


def _found(description: Description, records: list[Record], verdicts: list[tuple[str, str, str]]) -> str:
    """Return the finding: the verdicts of the first table that compares, counted."""
    if not records:
        return f"Nothing: {'it could not run here' if description.missing else 'no cell is measured yet'}."
    if not verdicts:
        return "No methods are compared here; see the plots and tables."
    counts = {by: Counter(verdict for _, other, verdict in verdicts if other == by) for _, by, _ in verdicts}
    if len(counts) > MOST_NAMED:
        counts = {f"{len(counts)} others,": Counter(verdict for *_, verdict in verdicts)}
    found = [
        f"{_escape(by)} {', '.join(f'{number} {verdict}' for verdict, number in of.items())}"
        for by, of in counts.items()
    ]
    return f"Comparisons with {_escape(verdicts[0][0])} in the first table: {'; '.join(found)}."


def _sentences(description: Description, records: list[Record], found: str) -> str:
    """Return the three sentences, asked, found and how sure, and the rest of the description."""
    asked = _first_sentence(description.about)
    of_paper = f" ({_escape(description.paper)} of the paper.)" if description.paper else ""
    left = len(description.keys) - len(records)
    cells = f"{len(records)} of {len(description.keys)} cells are measured" + (f", {left} are missing" if left else "")
    sure = (
        "Intervals are 95 % bootstrap intervals (BCa) over the n units shown; “better” and “worse” need at least 6 "
        f"units and an interval that excludes “no difference”; {cells}."
    )
    lines = [f"- **Asked**: {_escape(asked)}{of_paper}", f"- **Found**: {found}", f"- **How sure**: {sure}"]
    rest = description.about[len(asked) :].strip()
    return "\n".join(lines) + (f"\n\n{_paragraph(rest)}" if rest else "")


def _first_sentence(text: str) -> str:
    """Return the text up to the first full stop before a capital."""
    end = re.search(r"[.?!](?= +[A-Z])", text)
    return text[: end.end()] if end else text


def _nothing(description: Description) -> str:
    return f"Not run here, or not yet. To measure it: {_code(description.command)}"


def _provenance(description: Description, records: list[Record], others: int) -> list[str]:
    """Return paragraphs on what was measured, with what, where and when."""
    left = len(description.keys) - len(records)
    counts = f"{len(records)} of {len(description.keys)} cells measured"
    counts += f"; {left} missing, to measure them: {_code(description.command)}" if left else ""
    counts += f"; not shown: {others} records of other settings in the folder" if others else ""
    seeds = sorted({str(record.cell.seed) for record in records if record.cell.seed is not None})
    seconds = sum(record.seconds for record in records)
    parts = [f"{counts}. They took {seconds:.3g} s in total." if records else f"{counts}."]
    if seeds:
        parts.append(f"Seeds: {_escape(', '.join(seeds[:20]))}{' and more' if len(seeds) > 20 else ''}.")
    facts: dict[str, list[str]] = {}
    for record in records:
        for key, value in record.provenance.items():
            if str(value) not in facts.setdefault(key, []):
                facts[key].append(str(value))
    if facts:
        rows = [[_escape(key), "; ".join(_cell(value) for value in values)] for key, values in facts.items()]
        parts.append(_markdown_table(["", "as measured"], rows))
    return parts


def _write(stem: Path, title: str, markdown: str) -> Path:
    """Write ``stem.md`` and ``stem.html``."""
    parser = require("markdown_it", *REQUIRED_EXTRA).MarkdownIt("commonmark", {"html": False}).enable("table")
    body = parser.render(markdown)
    for tag in (_OPEN, _CLOSE):  # ours are the last; any other HTML is shown as text
        body = tag.join(body.rsplit(f"<p>{html.escape(tag)}</p>", 1))
    body = re.sub(r'(<a href="[^"/:]+)\.md"', r'\1.html"', body)
    page = (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>\n{STYLE}\n</style>\n{body}</html>\n"
    )
    for suffix, text in ((".md", markdown + "\n"), (".html", page)):
        write_file(check_inside(stem.parent, stem.with_name(stem.name + suffix)), text, SweepError)
    return stem.with_name(stem.name + ".md")


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = [[_escape(name) for name in head], ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in shown)


def _cell(text: str) -> str:
    """Return a table's entry; text in backquotes is code."""
    return _code(text[1:-1]) if re.fullmatch(r"`[^`]+`", text) else _escape(text)


def _code(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").split()).replace("|", r"\|") + "`"


def _paragraph(text: str) -> str:
    """Escape text that would begin a heading, list, rule or fence."""
    return re.sub(r"^([#+=~-]|[0-9]+(?=[.)]))", lambda found: _marked(found[0]), _escape(text))


def _marked(start: str) -> str:
    return f"\\{start}" if not start[0].isdigit() else f"{start}\\"


def _escape(text: str) -> str:
    """Escape text so that Markdown shows it unchanged in one line: no tags, emphasis or new columns."""
    text = re.sub(r"([\\`*_\[\]|$])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
