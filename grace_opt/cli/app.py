"""The command ``grace-opt``, put together from the others in the order of ``--help``, with report and doctor.

Text is printed as it is: rich's markup is never interpreted in text from users, files or models. For the exit codes
see `Exit`. Built on typer and rich.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from .._util.files import NO_SPACE_ERRORS
from .._util.loading import end_loading
from .._util.terminal import escape_path, use_ascii_fallback
from ..errors import OptionError
from . import calibration_commands, instance_commands, model_commands, prompt_commands
from .common import EXIT_CODES, AsJson, Exit, console, errors, errors_as_exit_codes, print_json

app = typer.Typer(
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # else brackets in a help text or in a user's words would be styles, or an error
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"grace-opt {version('grace-opt')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Find k vertices whose induced subgraph weighs least, and make caches smaller. Begin with: grace-opt demo."""


def run() -> None:
    """Run ``grace-opt``, whatever the terminal's encoding and wherever the output goes."""
    end_loading()
    if sys.stderr is None:  # closed, as by 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the end)
    if sys.stdout is None:  # before there is an answer that nobody could read
        errors.print("error: the output cannot be written: it is closed.", soft_wrap=True)
        sys.exit(Exit.OUTPUT)
    for stream in (sys.stdout, sys.stderr):
        use_ascii_fallback(stream)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # not at the interpreter's end, where nobody could say what went wrong
    except OSError as error:
        if error.errno not in (*NO_SPACE_ERRORS, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushing the rest would fail again
        if error.errno != errno.EPIPE:  # a reader such as head has closed the pipe: not an error
            errors.print(f"error: the output cannot be written: {error.strerror}.", soft_wrap=True)
        sys.exit(Exit.OUTPUT)


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Results folder of python -m bench.experiments.")],
    out: Annotated[Path | None, typer.Option(help="Folder for pages and plots; default: DIR/report.")] = None,
) -> None:
    """Turn the experiments' results in DIR into pages.

    Writes Markdown and HTML, with tables and plots. Unfinished experiments show the results so far. Needs pandas,
    pyarrow and matplotlib: pip install ".[bench]" in the checkout.

    Example: grace-opt report results --out docs/results/experiments
    """
    from ..sweep import make_report

    with errors_as_exit_codes():
        pages = make_report(directory, out)
    count = f"{len(pages) - 1} experiment{'s' if len(pages) > 2 else ''}"
    console.print(f"wrote {escape_path(str(pages[0].with_suffix('.html')), sys.stdout)}: {count}", soft_wrap=True)


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Run no tests; only show which code would run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which code runs on this machine, and test it.

    For every operation and device: whether compiled code, Triton or torch does the work, and how to switch it off.
    Compares each loop and kernel with its reference on a small case; the first time this compiles them (about a
    minute). Also shows versions, the folder of compiled loops, and what is missing and how to get it. Exit code 1 if a
    result differs.

    Example: GRACE_OPT_LLVM=0 grace-opt doctor --quick
    """
    from ..kernels.doctor import examine, show

    with errors_as_exit_codes(), errors.status("trying what runs here ...") as status:
        report = examine(not quick, lambda step: status.update(f"trying {step} ..."))
    if as_json:
        print_json(report.to_dict())
    else:
        show(report, console)
    if report.problems:
        raise typer.Exit(1)


#: Settings of a command that takes whatever is written.
_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def _moved(old: str, new: str) -> Callable[[], None]:
    """Return a command that says its new name, whatever its arguments; one release long."""

    def moved() -> None:
        with errors_as_exit_codes():
            raise OptionError(f"grace-opt {old} has another name now: write grace-opt {new}.")

    return moved


# In the order of --help.
app.command()(instance_commands.methods)
app.command(epilog=EXIT_CODES)(instance_commands.solve)
app.command(epilog=EXIT_CODES)(instance_commands.compare)
app.command()(instance_commands.generate)
app.command()(model_commands.demo)
app.command(epilog=model_commands.TUNE_EXIT_CODES)(model_commands.tune)
app.add_typer(calibration_commands.group, name="calibrate")
app.add_typer(prompt_commands.group, name="prompts")
for old, new in (("basis", "calibrate basis"), ("layers", "calibrate budgets")):
    app.command(name=old, hidden=True, add_help_option=False, context_settings=_ANYTHING)(_moved(old, new))
app.command(
    name="lm-eval",
    epilog=EXIT_CODES,
    # Every argument is the harness's own, and reaches it as it was written.
    context_settings={**_ANYTHING, "allow_interspersed_args": False, "help_option_names": []},
)(model_commands.lm_eval)
app.command()(report)
app.command()(doctor)
