"""RULER's tasks and scores, for smaller caches: ``python -m bench.ruler``.

Makes cases of eleven of RULER's thirteen tasks by its published rules (`bench.ruler.tasks`), lets a model read each
context once, compresses its cache in several ways (`bench.arena.contenders`), asks, and scores the answers as RULER
does (`bench.ruler.measure`). ``--file`` reads cases that RULER has made instead. Takes about a quarter of an hour on
two cores. Writes docs/results/ruler.{json,md,png}.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import track

from bench.arena.contenders import Subject, contenders
from bench.caches import SINKS, WINDOW, calibrated
from bench.material import MODEL, books, model_path, require_texts
from bench.provenance import require_clean
from bench.real_model import digest, read_text
from bench.report import add_options, read_results, write_results
from bench.ruler.cases import Case
from bench.ruler.measure import measure
from bench.ruler.page import page
from bench.ruler.tasks import TASKS, make_case, read_cases
from grace_opt.hf import attention_implementation
from grace_opt.hf.models import disable_progress_bars, load_model

ROOT = Path(__file__).parent.parent.parent
#: What is measured beside the dense cache, by the arena's names.
METHODS = ("int4", "grace-0.3", "bits-3", "bits-2")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+")


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ruler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="Hub id, folder or .gguf file (default: %(default)s, fetched)")
    parser.add_argument("--text", type=Path, nargs="+", help="books as plain text, for essays (default: four, fetched)")
    parser.add_argument(
        "--file", type=Path, nargs="+", default=[], help="JSON lines that RULER has made; no others then"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help="default: all")
    parser.add_argument("--tokens", type=int, default=2048, help="of a case with its answer (default %(default)s)")
    parser.add_argument("--cases", type=int, default=3, help="of each task, or of each file (default %(default)s)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", default=METHODS, help="names of bench.arena")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "ruler", help="folder of the calibrated basis")
    add_options(parser, "ruler")
    args = parser.parse_args(given)
    if args.cases < 1 or args.tokens < 1:
        parser.error("--cases and --tokens are at least 1")
    if unknown := [name for name in args.methods if name not in contenders([])]:
        parser.error(f"no method is called {unknown[0]!r}: there are {', '.join(contenders([]))}")
    require_texts(args.text)
    return args


def sentences(texts: Sequence[Path]) -> list[str]:
    """Return the sentences of some texts, one after the other, each on one line."""
    return [
        " ".join(sentence.split())
        for path in texts
        for sentence in _SENTENCE.split(read_text(path)[1])
        if sentence.strip()
    ]


def main(given: Sequence[str] | None = None) -> None:
    args = parsed(given)
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    source = require_clean(args.allow_dirty)
    disable_progress_bars()
    where = model_path(args.model)
    model, tokenizer = load_model(where)

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    cases: list[Case] = [case for path in args.file for case in read_cases(path)[: args.cases]]
    if not args.file:
        essay = sentences(args.text or books())
        cases = [make_case(task, args.tokens, count, essay, seed) for task in args.tasks for seed in range(args.cases)]
    longest = max(count(case.context) + count(case.question) + case.new_tokens for case in cases)
    if longest > model.config.max_position_embeddings:
        raise SystemExit(
            f"the longest case has {longest} tokens, and this model's context {model.config.max_position_embeddings}: "
            "give fewer with --tokens"
        )
    shortest = min(count(case.context) for case in cases)
    if shortest < 100 + SINKS + WINDOW:
        raise SystemExit(f"the shortest context has {shortest} tokens, too few to compress: give more with --tokens")
    file = args.runs / "basis.safetensors"
    basis, _ = calibrated(model, tokenizer, file, source)
    competing = {name: contenders([])[name] for name in args.methods}
    found = []
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        for case in track(cases, description="cases"):
            tokens, rows = measure(Subject(model, basis, file), tokenizer, competing, case)
            found.append({"task": case.task, "tokens": tokens, "expected": case.expected, "rows": rows})
    value = {
        "provenance": source,
        "model": Path(where).stem,
        "weights": digest(*model.parameters()),
        "length": args.tokens,
        "files": [path.name for path in args.file],
        "methods": {name: one.title for name, one in competing.items()},
        "cases": found,
    }
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty))


if __name__ == "__main__":
    main()
