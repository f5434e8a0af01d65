"""The commands that make the pages of docs/results, one after another: ``make results``.

``python -m bench.results`` runs all of them in order, on one clean commit, and prints how long each took. If one fails,
the others still run. ``python -m bench.results bits real_heads`` runs these two; ``--list`` shows the commands.
``--report-only`` makes the pages again from their JSON files, in seconds.

When: before a release, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
#: Maps each page in docs/results (without suffix) to the command that makes it, in the order of `make results`.
COMMANDS = {
    "real_heads": "python -m bench.real_heads",
    "sparse": "python -m bench.sparse",
    "bits": "python -m bench.bits",
    "max_kl": "python -m bench.max_kl",
    "max_bytes": "python -m bench.max_bytes",
    "prompts": "python -m bench.prompts",
    "guard": "python -m bench.guard",
    "calibration_cost": "python -m bench.calibration_cost",
    "growth": "python -m bench.growth",
    "reading": "python -m bench.reading",
    "arena": "python -m bench.arena",
    "learned": "python -m bench.learned",
    "objectives": "python -m bench.objectives",
    "blocks": "python -m bench.blocks",
    "evictions": "python -m bench.evictions",
    "layer_budgets": "python -m bench.layer_budgets",
    "tune": "python -m bench.tune",
    "ruler": "python -m bench.ruler",
    "decode_bits": "python -m bench.decode_bits",
    "decode_gpu": "python -m bench.decode_gpu",
    "first_call": "python -m bench.first_call",
    "efficiency": "python -m bench.efficiency",
    "answers": "python -m bench.answers",
    "real_model": "python -m bench.real_model",
    "adapter_matrix": "make test-matrix",
    "every_family": "make test-families",
    "test_deep": "make test-deep",
    "solvers": "python -m bench.solvers all",
    "peers": "python -m bench.peers",
    "scales": "python -m bench.scales",
    "experiments/smollm2/index": "python -m bench.experiments.pages smollm2",
}
#: Pages of tests: their commands have no ``--report-only``.
TESTS = ("adapter_matrix", "every_family", "test_deep")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.results", description="Make the pages of docs/results.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages (default: all)")
    parser.add_argument("--list", action="store_true", help="show pages and commands without running them")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="pages to leave out")
    parser.add_argument("--report-only", action="store_true", help="make the pages again from their JSON files")
    parser.add_argument("--allow-dirty", action="store_true", help="accept changed files, to try something out")
    args = parser.parse_args(given)
    if unknown := [name for name in (*args.names, *args.skip) if not chosen([name])]:
        parser.error(f"no page is called {unknown[0]}: there are {', '.join(COMMANDS)}")
    return args


def chosen(names: Sequence[str]) -> list[str]:
    """Return the pages with these names; the name of a folder means all pages in it."""
    return [page for page in COMMANDS if any(page == name or page.startswith(f"{name}/") for name in names)]


def command_of(page: str, report_only: bool, allow_dirty: bool) -> list[str]:
    """Return the words of a page's command, with this Python."""
    command = COMMANDS[page]
    if report_only and page in TESTS:
        command = f"python -m bench.pages_of_tests {page}"
    first, *rest = shlex.split(command)
    words = [sys.executable if first == "python" else first, *rest]
    if first == "make":
        return [*words, *(["ALLOW_DIRTY=1"] if allow_dirty else [])]
    words += ["--report-only"] if report_only and page not in TESTS else []
    return words + (["--allow-dirty"] if allow_dirty else [])


def main(given: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return 1 if a command failed."""
    args, console = arguments(given), Console()
    pages = [page for page in chosen(args.names or list(COMMANDS)) if page not in chosen(args.skip)]
    if args.list:
        for page in pages:
            print(f"{page:<28} {COMMANDS[page]}")
        return 0
    if not args.report_only:
        from bench.provenance import require_clean  # imports torch, which --list does without

        require_clean(args.allow_dirty)  # rather than after hours
    shown, failed, all_of = Table("page", "command", "minutes", "exit code"), 0, time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for number, page in enumerate(pages, 1):
        console.rule(f"{number} of {len(pages)}: {COMMANDS[page]}")
        words = command_of(page, args.report_only, args.allow_dirty)
        began = time.perf_counter()
        code = subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode
        failed += code != 0
        shown.add_row(page, COMMANDS[page], f"{(time.perf_counter() - began) / 60:.1f}", str(code))
    shown.add_section()
    shown.add_row("all", "", f"{(time.perf_counter() - all_of) / 60:.1f}", f"{failed} failed")
    console.print(shown)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
