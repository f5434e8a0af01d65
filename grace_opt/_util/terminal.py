"""Adapt output to the terminal: plain letters if its encoding lacks others, tables that become lists if narrow.

When: for all that the command line prints, and every table. Foreign text (names, paths, model output) is never
interpreted as rich's markup. Built on rich.
"""

from __future__ import annotations

import codecs
import unicodedata
from typing import TextIO

from rich import box
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

#: ASCII spellings of the non-ASCII letters that we print.
ASCII_SPELLINGS = dict(
    zip(
        "λ Σ √ ∞ ≤ ≥ × · → ² ³ ᵀ ‖ − – — … ‘ ’ “ ”".split(),
        "lambda sum sqrt inf <= >= x . -> ^2 ^3 ^T || - - - ... ' ' \" \"".split(),
        strict=True,
    )
)


def _spell_in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Error handler for codecs: the spelling in `ASCII_SPELLINGS`, or question marks for the width of the letter."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    wide = {letter: "?" * (2 if unicodedata.east_asian_width(letter) in "WF" else 1) for letter in lacking}
    return "".join(ASCII_SPELLINGS.get(letter, wide[letter]) for letter in lacking), error.end


codecs.register_error("grace_opt.plain", _spell_in_ascii)


def use_ascii_fallback(stream: TextIO) -> None:
    """From now on, write letters that the encoding of `stream` lacks in plain letters instead of failing.

    Parameters
    ----------
    stream : text file
        Such as ``sys.stdout``; a stream that cannot be reconfigured is left unchanged.

    Examples
    --------
    >>> import io
    >>> stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    >>> use_ascii_fallback(stream)
    >>> _ = stream.write("λ ≤ 0.5, 東京"), stream.flush()
    >>> stream.buffer.getvalue()
    b'lambda <= 0.5, ????'
    """
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="grace_opt.plain")


def escape_path(text: str, stream: TextIO) -> str:
    """Escape, as Python would, the letters of a path that `stream` lacks; different names stay different.

    And what would control the terminal.

    Examples
    --------
    >>> import io
    >>> print(escape_path("gλ.dat ≤", io.TextIOWrapper(io.BytesIO(), encoding="ascii")))
    g\\u03bb.dat ≤
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"

    def shown(letter: str) -> str:
        if unicodedata.category(letter) == "Cc" and letter not in "\n\t":
            return repr(letter)[1:-1]
        return letter.encode(encoding, "backslashreplace").decode(encoding) if letter.isalpha() else letter

    return "".join(map(shown, text))


#: A rule below the column names, made of a character that every terminal has.
HEADER_RULE = box.Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)


class FittingTable(Table):
    """A table without borders that becomes a list, one paragraph per row, if the terminal is too narrow.

    Numbers and names are never cut or broken: only the column with a `min_width` is wrapped. Names, cells, title and
    caption are shown as they are, brackets included.

    Parameters
    ----------
    names : str
        The first columns, on the left.
    title, caption : str, optional
        Text above and below the table.

    Examples
    --------
    >>> table = FittingTable("method", "objective", caption="less is better")
    >>> table.add_row("[mies]", "0.123456789")
    >>> for width in (40, 16):
    ...     Console(width=width, color_system=None).print(table)
    method  objective
    ...
    [mies]  0.123456789
    less is better
    method [mies]
      objective:
      0.123456789
    less is better
    """

    def __init__(self, *names: str, title: str = "", caption: str = "") -> None:
        super().__init__(
            title=Text(title, style="italic") if title else None,
            caption=Text(caption, style="dim") if caption else None,
            caption_justify="left",
            box=HEADER_RULE,
            show_edge=False,
            collapse_padding=True,
            pad_edge=False,
        )
        for name in names:
            self.add_column(name)

    def add_column(  # type: ignore[override]
        self, name: str, *, justify: JustifyMethod = "left", min_width: int | None = None
    ) -> None:
        """Add a column. Its cells are wrapped if it has a `min_width`, which only one column may have."""
        super().add_column(Text(name), justify=justify, min_width=min_width, no_wrap=min_width is None, overflow="fold")

    def add_row(self, *cells: str | Text) -> None:  # type: ignore[override]
        """Add a row, with a cell for each column."""
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least_width() <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield self.title
        names = [str(column.header) for column in self.columns]
        for first, *rest in zip(*(column.cells for column in self.columns), strict=True):
            if isinstance(first, Text) and first:
                yield Text.assemble((f"{names[0]} ", "dim"), first, overflow="fold")
            cells = zip(names[1:], rest, strict=True)
            pairs = [
                Text.assemble((f"{name}: ", "dim"), Text(", ").join(cell.split("\n")), overflow="fold")
                for name, cell in cells
                if isinstance(cell, Text) and cell
            ]
            yield Padding(Columns(pairs, padding=(0, 2)), (0, 0, 0, 2))
        if self.caption:
            yield self.caption

    def _least_width(self) -> int:
        widths = []
        for column in self.columns:
            lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
            whole = max(map(cell_len, lines), default=0)
            widths.append(whole if column.min_width is None else min(whole, column.min_width))
        return sum(widths) + 2 * (len(widths) - 1)  # a space, and one for the box
