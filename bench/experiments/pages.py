"""The pages of docs/results/experiments: ``python -m bench.experiments.pages smollm2``.

Runs the missing cells in a folder of runs/ for this commit, and writes its report if all cells are of one
clean commit. All records are stored beside the report in ``records.json.gz``; ``--report-only`` makes the pages again
from them, in the words of today's code.

When: `make results`. Source: the cells are `grace_opt.sweep`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.experiments.__main__ import main as run
from bench.experiments.__main__ import settings_of
from bench.experiments.registry import experiments
from bench.material import BOOKS, MODEL
from bench.provenance import refuse, require_clean
from bench.report import RESULTS, mark, origin
from grace_opt._util.files import atomic_write
from grace_opt.sweep import make_report, read_description, write_description

ROOT = Path(__file__).parents[2]
NAME = "smollm2"
#: Arguments of `bench.experiments`.
RUN = ["reconstruction", "--size", "full", "--model", MODEL, "--set", f"texts={BOOKS}", "--set", "passages=6"]
RUN += ["--set", "layers=0,7,15,22,29"]
#: Of the index: on which model, and the first and last of its three sentences; the second is the experiment's.
WHERE, ASKED, SURE = (
    "on SmolLM2-135M",
    "What do pruned keys change in the attention of a real model?",
    "One small model, five of its layers and six passages of books; attention is measured, not generated text.",
)
PICTURE = re.compile(r"^!\[.*$", re.MULTILINE)
FOUND = re.compile(r"^- \*\*Found\*\*: (.*)$", re.MULTILINE)


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


def reword(folder: Path) -> None:
    """Take the texts and views of the recorded experiments from today's code; cells and commands stay."""
    known = experiments()
    for path in sorted(folder.glob("*/experiment.json")):
        old = read_description(path)
        if old.name in known:
            new, settings = known[old.name], settings_of(known[old.name], shlex.split(old.command)[3:])
            texts = {"title": new.title, "paper": new.paper, "about": new.about, "views": tuple(new.views(settings))}
            write_description(folder, dataclasses.replace(old, **texts))


def report(files: dict[str, str], out: Path, allow_dirty: bool) -> list[Path]:
    """Write the pages if all cells are of one clean commit; return them, the index first.

    Parameters
    ----------
    files : dict
        What `gather` returned.
    out : Path
        Folder of the pages.
    allow_dirty : bool
    """
    cells = {path: json.loads(text)["provenance"] for path, text in files.items() if "/cells/" in path}
    if not cells:
        raise SystemExit("nothing to report: no cell was measured")
    source = refuse(cells, allow_dirty)
    with tempfile.TemporaryDirectory() as folder:
        spread(files, Path(folder))
        reword(Path(folder))
        pages = make_report(folder, out)
    for page in pages:  # the committed pages are the Markdown ones
        page.with_suffix(".html").unlink(missing_ok=True)
    index = pages[0]
    beginning = _beginning(pages[1])
    for page in pages[1:]:
        title, rest = page.read_text(encoding="utf-8").split("\n", 1)
        with atomic_write(page) as target:
            target.write_text(f"{title}, {WHERE}\n{rest}", encoding="utf-8")
    table = index.read_text(encoding="utf-8").split("\n", 1)[1].strip()
    made = origin({"": source}, f"experiments/{NAME}/index")
    lines = [f"# The paper's experiments {WHERE}", *mark(source), *beginning, table, made]
    with atomic_write(index) as target:
        target.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return pages


def _beginning(page: Path) -> list[str]:
    """Return the picture and the sentences of the index: those of an experiment's page."""
    text = page.read_text(encoding="utf-8")
    title, picture, found = text.splitlines()[0].removeprefix("# "), PICTURE.search(text), FOUND.search(text)
    assert found is not None
    sentences = [f"- **Asked**: {ASKED}", f"- **Found**: [{title}]({page.name}): {found[1]}", f"- **How sure**: {SURE}"]
    return [*([picture[0]] if picture else []), "\n".join(sentences)]


def main(given: Sequence[str] | None = None) -> int:
    """Run and report what the command line asks for; 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.experiments.pages", description=__doc__)
    parser.add_argument("name", choices=[NAME])
    parser.add_argument("--report-only", action="store_true", help="make the pages again from records.json.gz")
    parser.add_argument("--allow-dirty", action="store_true", help="accept changed files; the pages say so")
    parser.add_argument("--out", type=Path, help="folder of the pages (default: docs/results/experiments/NAME)")
    args, more = parser.parse_known_args(given)
    out = args.out or RESULTS / "experiments" / args.name
    records, code = out / "records.json.gz", 0
    if args.report_only:
        try:
            files = json.loads(gzip.decompress(records.read_bytes()))
        except FileNotFoundError:
            raise SystemExit(
                f"--report-only: there is no {records.name} in {out.name}: leave the option out to measure"
            ) from None
    else:
        source = require_clean(args.allow_dirty)
        folder = ROOT / "runs" / "experiments" / f"{args.name}-{source['commit']}"
        code = run([*RUN, *more, "--out", str(folder)])
        if code > 1:
            return code
        files = gather(folder)
    pages = report(files, out, args.allow_dirty)
    if not args.report_only:
        with atomic_write(records) as target:  # without a date: equal records, equal bytes
            target.write_bytes(gzip.compress(json.dumps(files).encode(), mtime=0))
    print(f"{len(pages)} pages in {out.name}/")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
