"""Every way to a smaller cache at equal bytes: ``python -m bench.arena``.

Each passage (`bench.passages`) is a prompt and 256 later tokens, which are fed in one forward pass on the compressed
cache; next-token distributions are compared with those of the dense cache (`grace_opt.hf.tools.evaluation`). Ours,
caches of transformers, pruned channels, evicted tokens, and other papers' quantisers (`bench.arena.peers`) see the same
prompts. Settings were chosen on half A of the passages; half B is reported. Some methods are also measured on long
passages, asked for hidden words, and asked questions about a text, where a model's context is long enough.

Each cell (a method on a passage, hidden word or text) has its own record in ``--runs``. A stopped run goes on where it
stopped; records of other texts, weights, settings or commits are not used, and none is if files differ from the commit.
Writes docs/results/arena.{json,md,png}.

If they are missing, models and texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from bench.arena.contenders import Subject, contenders, refused
from bench.arena.measure import Arena
from bench.arena.page import page
from bench.arena.run import run
from bench.arena.stored import Method
from bench.bits import ASKED
from bench.caches import SINKS, WINDOW, calibrated
from bench.material import books
from bench.passages import cases, long_passages, passages
from bench.questions import DEFAULT, prompts, read_questions
from bench.report import parser_of
from bench.several import publish_models
from grace_opt.errors import GraceError


def peers() -> list[Method]:
    """Return the methods of other papers."""
    from bench.arena.peers import methods

    return methods()


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = parser_of("arena", __doc__, models=True)
    parser.add_argument("--questions", type=Path, default=DEFAULT, help="TOML; default: bench/questions.toml")
    parser.add_argument("--tokens", type=int, default=2048, help="of a passage (default %(default)s)")
    parser.add_argument("--long", type=int, default=7168, help="of a long passage; 0 for none (default %(default)s)")
    parser.add_argument("--later", type=int, default=256, help="of these, fed after the prompt (default %(default)s)")
    parser.add_argument("--cases", type=int, default=52, help="hidden words (default %(default)s)")
    parser.add_argument("--context", type=int, default=1600, help="tokens around a hidden word (default %(default)s)")
    parser.add_argument("--chat", type=int, default=1950, help="tokens of a text with a question; 0 for none")
    parser.add_argument("--new-tokens", type=int, default=24, help="of an answer, at most (default %(default)s)")
    parser.add_argument("--passages-only", action="store_true", help="as --long 0 --cases 0 --chat 0")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="only these, to try something out")
    parser.add_argument("--without", nargs="+", metavar="NAME", default=[], help="methods to leave out")
    parser.add_argument("--quick", action="store_true", help="two passages, one long one, four words, one text")
    parser.add_argument("--list", action="store_true", help="show the methods without measuring them")
    args = parser.parse_args(given)
    if args.passages_only:
        args.long = args.cases = args.chat = 0
    for name, tokens in (("--tokens", args.tokens), ("--long", args.long)):
        if tokens and not 2 <= args.later <= tokens - SINKS - WINDOW - 1:
            raise SystemExit(
                f"--later {args.later}: give at least 2, and so many fewer than {name} {tokens} that more than the "
                f"{SINKS + WINDOW} dense tokens are left for the prompt"
            )
    if args.tokens < 1 or min(args.long, args.cases, args.chat) < 0 or args.new_tokens < 1:
        raise SystemExit("--tokens and --new-tokens are at least 1; --long, --cases and --chat at least 0")
    return args


def competing(args: argparse.Namespace) -> dict[str, Any]:
    """Return the contenders that the command line asks for."""
    every = contenders(peers())
    if unknown := [name for name in (*(args.methods or ()), *args.without) if name not in every]:
        raise SystemExit(f"no method is called {unknown[0]!r}; there are {', '.join(every)}")
    names = [name for name in every if (args.methods is None or name in args.methods) and name not in args.without]
    if not names:
        raise SystemExit("--methods and --without leave no method: name at least one that is not left out")
    return {name: every[name] for name in names}


def main(given: Sequence[str] | None = None) -> None:
    args = parsed(given)
    found = {} if args.report_only else competing(args)
    if args.list:
        print("\n".join(f"{name:<28} {one.title} ({one.source})" for name, one in found.items()))
        return

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        if tokenizer is None:
            raise SystemExit(f"--model {name}: there is no tokenizer with it, so texts cannot be read")
        context = model.config.max_position_embeddings
        if args.tokens > context:
            raise SystemExit(f"--tokens {args.tokens}: the context of {name} has {context}")
        needs = {
            "long passages": args.long,
            "hidden words": args.cases and args.context + ASKED,
            "questions": args.chat and args.chat + args.new_tokens,
        }
        fit = {part for part, tokens in needs.items() if 0 < tokens <= context}
        impossible = refused(model)
        competes = {each: one for each, one in found.items() if each not in impossible}
        without = [*args.without, *(["all but those of --methods"] if args.methods else [])]
        without += [f"{each} ({why})" for each, why in impossible.items() if each in found]
        too_long = f" (its context has {context:,} tokens)"
        without += [part + too_long * bool(tokens) for part, tokens in needs.items() if part not in fit]
        texts = args.text or books()
        few = (2, 1, 4, 1) if args.quick else (None,) * 4
        short = passages(texts, tokenizer, args.tokens)[: few[0]]
        long = long_passages(texts, tokenizer, args.long)[: few[1]] if "long passages" in fit else []
        asked = cases(texts, tokenizer, args.cases, args.context)[: few[2]] if "hidden words" in fit else []
        sets = read_questions(args.questions)[: few[3]] if "questions" in fit else []
        chat = [prompts(text, tokenizer, args.chat) for text in sets]
        file = args.runs / name / "basis.safetensors"
        basis, seconds = calibrated(model, tokenizer, file, source)
        arena = Arena(
            Subject(model, basis, file), tokenizer, competes, short, long, asked, chat, args.later, args.new_tokens
        )
        try:
            records, origins = run(arena, args.runs / name, source, datetime.now(UTC).isoformat())
        except GraceError as error:
            raise SystemExit(str(error)) from None
        return {
            "calibration": {"texts": basis.texts, "tokens": basis.tokens, "seconds": seconds},
            **{"long_tokens": args.long, "chat_tokens": args.chat, "new_tokens": args.new_tokens, "without": without},
            "methods": {
                each: {"title": one.title, "family": one.family, "source": one.source} for each, one in competes.items()
            },
            **records,
        }, origins

    settings = {"tokens": args.tokens, "later": args.later, "sinks": SINKS, "window": WINDOW}
    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()
