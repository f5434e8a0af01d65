"""Shared by the commands of ``grace-opt``: exit codes, the two consoles, errors as one line, options, JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from .._util.json_values import to_json_text
from .._util.terminal import escape_path
from ..errors import GraceError, SolverError

EXIT_CODES = (
    "Exit codes: 0 answered; 1 stdout cannot be written; 2 bad input or options, or too little memory; 3 a limit "
    "stopped a method, and the best answer is not proved optimal; 4 a method refused or failed; 130 Ctrl-C. With 3, 4 "
    "and 130, the results so far are printed first."
)
#: Columns below which tables have no room for numbers; ``COLUMNS=0`` would leave room for nothing.
NARROWEST = 30
#: Columns of a file, in which no line is too long.
OF_FILES = 10_000
console, errors = (Console(stderr=stderr, markup=False, emoji=False, highlight=False) for stderr in (False, True))
for stream in (console, errors):
    if stream.width < NARROWEST:
        stream.width = NARROWEST
if sys.stdout is not None and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
    console.width = OF_FILES
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
#: A model, as every command that takes one says it.
ModelName = Annotated[str, typer.Argument(help="Hub id, folder or .gguf file; or pocket, the pocket model.")]


class Exit(IntEnum):
    """Exit codes, and what they mean."""

    OK = 0
    OUTPUT = 1
    BAD_INPUT = 2
    LIMIT = 3
    SOLVER = 4
    INTERRUPTED = 130


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Turn our errors and Ctrl-C into one line and an exit code; anything else is a bug and keeps its traceback."""
    try:
        yield
    except SolverError as error:
        fail("refused", error, Exit.SOLVER)
    except GraceError as error:
        fail("error", error, Exit.BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        reason = str(error).rstrip(".") or "no details given"
        fail("error", f"there is too little memory: {reason}. Use a smaller instance.", Exit.BAD_INPUT)
    except KeyboardInterrupt as stop:
        notes = " ".join(getattr(stop, "__notes__", ()))
        fail("interrupted", notes or "nothing had been found yet.", Exit.INTERRUPTED)


def _is_memory(error: Exception) -> bool:
    """Whether memory ran out; on the CPU, torch has no exception type for it."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error)


def fail(what: str, why: object, code: Exit) -> NoReturn:
    """Say in one line what went wrong, and end with this exit code."""
    errors.print(Text.assemble((f"{what}:", "red"), f" {escape_path(str(why), sys.stderr)}"), soft_wrap=True)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Write JSON to stdout."""
    sys.stdout.write(to_json_text(value))
