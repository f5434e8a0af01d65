"""The form of a page of results: a picture, three sentences, wide tables, and details folded away.

The function `page(value)` of a benchmark makes a `Page` only from what its JSON file holds, so ``--report-only`` can
make the page again without measuring. `write_results` writes the JSON file, the picture and the page.

When: every script that writes to docs/results. Pictures are drawn by matplotlib in Okabe and Ito's colours, which
colour-blind readers can tell apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.material import MODEL, SEVERAL, require_texts
from bench.provenance import CHANGED, NONE, caption, is_clean, refuse, require_clean, write_json
from bench.results import COMMANDS
from grace_opt._util.files import atomic_write

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999",
)  # fmt: skip
#: Begins a page with numbers of changed files or of several commits.
MARK = "**Not to be committed**: "


@dataclass(frozen=True)
class Page:
    """What a page says, without its provenance.

    Attributes
    ----------
    title : str
    picture : str
        What the picture shows, for readers who cannot see it.
    headline : str
        What the picture says, which stands above it: made of the numbers, as these may change.
    draw : callable
        Draws on a matplotlib figure.
    asked, found, sure : str
        One sentence each: what was asked, what was found, how sure that is.
    tables : sequence of str
        Markdown lines.
    details : sequence of (str, sequence of str)
        Summary and Markdown lines of each folded section.
    """

    title: str
    picture: str
    headline: str
    draw: Callable[[Any], None]
    asked: str
    found: str
    sure: str
    tables: Sequence[str] = ()
    details: Sequence[tuple[str, Sequence[str]]] = ()


def parser_of(
    name: str, description: str | None, *, model: bool = False, models: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that writes docs/results/NAME, with the options that all have.

    Parameters
    ----------
    name, description : str
    model : bool
        Whether it reads texts with a trained model, and keeps records.
    models : bool
        Whether it does so with several, those of `bench.material` unless others are named.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    if model:
        add("--model", default=MODEL, help="Hub id, folder or .gguf file (default: %(default)s, fetched)")
        add("--name", help="what to call the model in the results (default: the last part of --model)")
    if models:
        names = ", ".join(SEVERAL)
        add("--model", nargs="+", default=SEVERAL, help=f"Hub ids, folders or .gguf files (default: {names}, fetched)")
    if model or models:
        add("--text", type=Path, nargs="+", help="books as plain text (default: fetched)")
        add("--runs", type=Path, default=ROOT / "runs" / name, help="folder of the records")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / name, help=f"path of the results, without suffix (docs/results/{name})"
    )
    parser.add_argument(
        "--report-only", action="store_true", help="make the page again from its JSON file, without measuring"
    )
    parser.add_argument(
        "--allow-dirty",
        action="store_true",
        help="accept changed files or records of several commits; the page says not to commit it",
    )
    return parser


def publish(
    args: argparse.Namespace,
    page: Callable[[dict[str, Any]], Page],
    measure: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Measure, or read what was measured, write the page and print it.

    Parameters
    ----------
    args : Namespace
        From `parser_of`.
    page : callable
    measure : callable
        Gets the provenance of this run, and returns what the page says; if its records have several, with their own.
    """
    if args.report_only:
        value = read_results(args.out)
    else:
        require_texts(getattr(args, "text", None))
        source = require_clean(args.allow_dirty)
        value = {"provenance": source, **measure(source)}
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


def read_results(out: Path) -> dict[str, Any]:
    """Return the numbers that ``--report-only`` starts from."""
    path = out.with_name(out.name + ".json")
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"--report-only: there is no {path.name}: leave the option out to measure") from None
    return value


def write_results(
    out: Path,
    value: Mapping[str, Any],
    page: Callable[[dict[str, Any]], Page],
    *,
    allow_dirty: bool = False,
    measured: bool = True,
) -> str:
    """Write ``out.json`` (if something was measured), ``out.png`` and ``out.md``.

    Parameters
    ----------
    out : Path
        Without suffix.
    value : mapping
        With its ``provenance``, or with ``models`` that have theirs.
    page : callable
        Gets `value` as read back from JSON, so the page is the same now and with ``--report-only``.
    allow_dirty : bool
    measured : bool
        False leaves the JSON file as it is.

    Returns
    -------
    str
        The page.
    """
    sources = sources_of(value, allow_dirty)
    if measured:
        write_json(out.with_name(out.name + ".json"), value)
    formed = page(json.loads(json.dumps(value)))
    save(formed, out.with_name(out.name + ".png"))
    text = markdown(formed, sources, out.name)
    with atomic_write(out.with_name(out.name + ".md")) as path:
        path.write_text(text, encoding="utf-8")
    return text


def sources_of(value: Mapping[str, Any], allow_dirty: bool = False) -> dict[str, dict[str, Any]]:
    """Return where numbers come from: all of them, or those of some models, by their names; one source per commit.

    Raises
    ------
    MixedError
        If some come from no clean commit, or those of one model from several.
    """
    if "provenance" in value:
        return {"": refuse({"this page": value["provenance"]}, allow_dirty)}
    by_commit: dict[str, dict[str, Mapping[str, Any]]] = {}
    for model, of in value["models"].items():
        by_commit.setdefault(str(of["provenance"]["commit"]), {})[model] = of["provenance"]
    return {" and ".join(of): refuse(of, allow_dirty) for of in by_commit.values()}


def markdown(page: Page, sources: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Return the page; its picture is ``name.png`` in the same folder."""
    lines = [f"# {page.title}", ""]
    for line in dict.fromkeys(line for source in sources.values() for line in mark(source)):
        lines += [line, ""]
    lines += [f"![{page.picture}]({name}.png)", ""]
    said = (("Asked", page.asked), ("Found", page.found), ("How sure", page.sure))
    lines += [*(f"- **{word}**: {sentence}" for word, sentence in said), "", *page.tables, ""]
    for summary, inside in page.details:
        lines += folded(summary, inside)
    lines += [origin(sources, name), ""]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def mark(source: Mapping[str, Any]) -> list[str]:
    """Return the line at the top of a page of no clean commit, if it is one."""
    return [] if is_clean(source) else [MARK + _unclean(str(source["commit"]))]


def origin(sources: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Return the last line of a page: the command that makes it, and where its numbers come from.

    Parameters
    ----------
    sources : mapping
        From `sources_of`.
    name : str
        The page, as in `bench.results.COMMANDS`.
    """
    (first, *others) = sources.values()
    command = COMMANDS.get(name, first["command"])
    if not others and first["command"] == command:
        return f"Made by {caption(first)}"
    if not others:
        return f"To make this page again: `{command}`. Its numbers come from {caption(first)}"
    every = "; ".join(f"those of {models} from {caption(source)[:-1]}" for models, source in sources.items())
    return f"To make this page again: `{command}`. Its numbers: {every}."


def folded(summary: str, inside: Sequence[str]) -> list[str]:
    """Markdown lines that a browser shows on a click."""
    return [f"<details><summary>{summary}</summary>", "", *inside, "", "</details>", ""]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> list[str]:
    """Markdown lines of a table: the first `words` columns stand left, numbers right."""
    rule = "|".join("---" if place < words else "---:" for place in range(len(head)))
    first, *rest = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return [first, f"|{rule}|", *rest, ""]


def small(interval: str) -> str:
    """An interval beside its number."""
    return f"<small>{interval}</small>"


def save(page: Page, path: Path) -> None:
    """Draw a page's picture, and write it as PNG: equal bytes for equal numbers."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "0.9",
        "font.size": 9,
        "axes.titlesize": 10,
        "legend.frameon": False,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(style):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        canvas = FigureCanvasAgg(figure)
        page.draw(figure)  # may change its size
        lines = -(-len(page.headline) // int(12 * figure.get_figwidth()))
        figure.suptitle(fill(page.headline, len(page.headline) // lines + 8), fontsize=11)  # lines of one length
        figure.set_dpi(130)
        with atomic_write(path) as name:
            canvas.print_png(name, metadata={"Software": None})  # savefig draws twice, for the same bytes


def si(value: float, unit: str) -> str:
    """A quantity in three digits with a prefix.

    Examples
    --------
    >>> si(0.00123, "s"), si(4.8e12, "B/s")
    ('1.23 ms', '4.8 TB/s')
    """
    prefixes = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ"}
    sizes = [size for size in prefixes if size <= 1 or unit != "s"]
    size = next((size for size in sizes if value >= size), 1.0 if value == 0 else 1e-6)
    number = value / size
    return f"{number:,.0f} {prefixes[size]}{unit}" if number >= 100 else f"{number:.3g} {prefixes[size]}{unit}"


def bars(axes: Any, names: Sequence[str], values: Sequence[float], texts: Sequence[str], colours: Any) -> None:
    """Horizontal bars, the first on top, each with its number behind it.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
    names, values, texts : sequence
        Of each bar.
    colours : str or sequence of str
    """
    places = range(len(names))
    axes.barh(places, values, color=colours, height=0.7)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    for place, value, text in zip(places, values, texts, strict=True):
        axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)


def _unclean(commit: str) -> str:
    if ", " in commit:
        return f"these numbers come from several commits, {commit}."
    if commit == NONE:
        return "these numbers come from no commit."
    return f"these numbers were measured with files that differ from commit {commit.rstrip(CHANGED)}."
