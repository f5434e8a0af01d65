"""The pages of docs/results/experiments: ``python -m bench.experiments.pages pocket`` (or ``smollm2``).

Runs the experiments of a set, or what is missing of them, in a folder of runs/ that only this commit has, and writes
their report, if all cells are of one clean commit; all records lie beside it in ``records.json.gz``, from which
``--report-only`` forms the pages again.

When: `make results`. Source: the cells are `grace_opt.sweep`'s.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.experiments.__main__ import main as run
from bench.material import BOOKS, MODEL
from bench.provenance import caption, is_clean, refuse, require_clean
from bench.report import MARK, RESULTS
from bench.results import COMMANDS
from grace_opt._util.files import atomic_write
from grace_opt.sweep import make_report

ROOT = Path(__file__).parents[2]
_SMOLLM2 = ["--size", "full", "--model", MODEL, "--set", f"texts={BOOKS}", "--set", "passages=6"]
#: What each set runs, and what its index says it is about.
SETS = {
    "pocket": (["all", "--size", "pocket"], "on the pocket model"),
    "smollm2": (["bits", "reconstruction", *_SMOLLM2, "--set", "layers=0,7,15,22,29"], "on SmolLM2-135M"),
}


def gather(folder: Path) -> dict[str, str]:
    """All descriptions and the cells that they list, as text by path below the results folder."""
    found = {}
    for path in sorted(folder.glob("*/experiment.json")):
        found[str(path.relative_to(folder))] = path.read_text(encoding="utf-8")
        for cell in sorted((path.parent / "cells").glob("*.json")):
            if not cell.name.startswith("."):
                found[str(cell.relative_to(folder))] = cell.read_text(encoding="utf-8")
    return found


def spread(files: dict[str, str], folder: Path) -> None:
    """The reverse of `gather`."""
    for name, text in files.items():
        path = (folder / name).resolve()
        if folder.resolve() not in path.parents:
            raise SystemExit(f"records.json.gz: {name} leads out of its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as target:
            target.write_text(text, encoding="utf-8")


def report(name: str, files: dict[str, str], out: Path, allow_dirty: bool) -> list[Path]:
    """Write the pages of a set, if all its cells are of one clean commit; an index says which.

    Parameters
    ----------
    name : str
        Of the set.
    files : dict
        As `gather` gives them.
    out : Path
        Where the pages go.
    allow_dirty : bool
    """
    cells = {path: json.loads(text)["provenance"] for path, text in files.items() if "/cells/" in path}
    if not cells:
        raise SystemExit("no cell was measured, so there is nothing to report")
    source = refuse(cells, allow_dirty)
    with tempfile.TemporaryDirectory() as folder:
        spread(files, Path(folder))
        pages = make_report(folder, out)
    for page in pages:  # the committed pages are the Markdown ones
        page.with_suffix(".html").unlink(missing_ok=True)
    mark = "" if is_clean(source) else f"{MARK}these numbers are of changed files or of several commits.\n\n"
    index = pages[0]
    title, table = index.read_text(encoding="utf-8").split("\n", 1)
    made = f"Made again by `{COMMANDS[f'experiments/{name}/index']}`. Its numbers are from {caption(source)}"
    text = f"{title} {SETS[name][1]}\n\n{mark}{table.strip()}\n\n{made}\n"
    with atomic_write(index) as target:
        target.write_text(text, encoding="utf-8")
    return pages


def main(given: Sequence[str] | None = None) -> int:
    """Run and report what the command line asks for; 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.experiments.pages", description=__doc__)
    parser.add_argument("name", choices=SETS)
    parser.add_argument("--report-only", action="store_true", help="form the pages again from records.json.gz")
    parser.add_argument("--allow-dirty", action="store_true", help="also with changed files; the pages say so")
    parser.add_argument("--out", type=Path, help="folder of the pages (default: docs/results/experiments/NAME)")
    args, more = parser.parse_known_args(given)
    out = args.out or RESULTS / "experiments" / args.name
    records, code = out / "records.json.gz", 0
    if args.report_only:
        try:
            files = json.loads(gzip.decompress(records.read_bytes()))
        except FileNotFoundError:
            raise SystemExit(
                f"--report-only: there is no {records.name} there: leave the option out to measure"
            ) from None
    else:
        source = require_clean(args.allow_dirty)
        folder = ROOT / "runs" / "experiments" / f"{args.name}-{source['commit']}"
        code = run([*SETS[args.name][0], *more, "--out", str(folder)])
        if code > 1:
            return code
        files = gather(folder)
    pages = report(args.name, files, out, args.allow_dirty)
    if not args.report_only:
        with atomic_write(records) as target:  # without a date: equal records, equal bytes
            target.write_bytes(gzip.compress(json.dumps(files).encode(), mtime=0))
    print(f"{len(pages)} pages in {out.name}/")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
