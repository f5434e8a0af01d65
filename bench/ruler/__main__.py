"""RULER's tasks and scores, for smaller caches: ``python -m bench.ruler``.

Makes cases of eleven of RULER's thirteen tasks by its published rules (`bench.ruler.cases`), lets a model read each
context once, compresses its cache in several ways (`bench.arena.contenders`), asks, and scores the answers as RULER
does (`bench.ruler.measure`). Takes about a quarter of an hour on two cores for the smallest model, and longer for
others. Writes docs/results/ruler.{json,md,png}.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import PreTrainedModel

from bench.arena.contenders import Subject, contenders
from bench.caches import SINKS, WINDOW, calibrated
from bench.material import books, read_text
from bench.report import parser_of
from bench.ruler.cases import TASKS, make_case
from bench.ruler.measure import measure
from bench.ruler.page import page
from bench.several import publish_models
from grace_opt.hf import attention_implementation

#: What is measured beside the dense cache, by the arena's names.
METHODS = ("int4", "grace-0.3", "bits-3", "bits-2")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+")


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = parser_of("ruler", __doc__, models=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help="default: all")
    parser.add_argument("--tokens", type=int, default=2048, help="of a case with its answer (default %(default)s)")
    parser.add_argument("--cases", type=int, default=3, help="of each task (default %(default)s)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", default=METHODS, help="names of bench.arena")
    args = parser.parse_args(given)
    if args.cases < 1 or args.tokens < 1:
        parser.error("--cases and --tokens are at least 1")
    if unknown := [name for name in args.methods if name not in contenders([])]:
        parser.error(f"no method is called {unknown[0]!r}: there are {', '.join(contenders([]))}")
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

    competing = {each: contenders([])[each] for each in args.methods}

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        def count(text: str) -> int:
            return len(tokenizer(text).input_ids)

        essay = sentences(args.text or books())
        cases = [make_case(task, args.tokens, count, essay, seed) for task in args.tasks for seed in range(args.cases)]
        longest = max(count(case.context) + count(case.question) + case.new_tokens for case in cases)
        context = model.config.max_position_embeddings
        if longest > context:
            raise SystemExit(
                f"the longest case has {longest} tokens, and the context of {name} {context}: give fewer with --tokens"
            )
        shortest = min(count(case.context) for case in cases)
        if shortest < 100 + SINKS + WINDOW:
            raise SystemExit(
                f"the shortest context has {shortest} tokens, too few to compress: give more with --tokens"
            )
        file = args.runs / name / "basis.safetensors"
        basis, _ = calibrated(model, tokenizer, file, source)
        subject, found = Subject(model, basis, file), []
        with attention_implementation(model, "grace_sdpa"), torch.no_grad():
            for case in track(cases, description=name):
                tokens, rows = measure(subject, tokenizer, competing, case)
                found.append({"task": case.task, "tokens": tokens, "expected": case.expected, "rows": rows})
        return {"cases": found}, {}

    settings = {
        **{"length": args.tokens, "tasks": args.tasks, "each": args.cases},
        "methods": {each: one.title for each, one in competing.items()},
    }
    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()
