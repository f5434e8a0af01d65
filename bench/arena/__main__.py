"""Every way to a smaller cache at equal bytes: ``python -m bench.arena``.

Each passage (`bench.passages`) is a prompt and 256 later tokens, which are fed in one forward pass on the compressed
cache; next-token distributions are compared with those of the dense cache (`grace_opt.hf.tools.evaluation`). Ours,
caches of transformers, pruned channels, evicted tokens, and other papers' quantisers (`bench.arena.peers`) see the same
prompts. Settings were chosen on half A of the passages; half B is reported. Some methods are also measured on long
passages, asked for hidden words, and asked questions about a text.

Each cell (a method on a passage, hidden word or text) has its own record in ``--runs``. A stopped run goes on where it
stopped; records of other texts, weights, settings or commits are not used, and none is if files differ from the commit.
Writes docs/results/arena.{json,md,png}.

If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and the texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.arena.contenders import Subject, contenders
from bench.arena.measure import Arena
from bench.arena.page import page
from bench.arena.run import run
from bench.arena.stored import Method
from bench.bits import ASKED
from bench.caches import SINKS, WINDOW, calibrated
from bench.material import MODEL, books, model_path, require_texts
from bench.passages import cases, long_passages, passages
from bench.provenance import refuse, require_clean
from bench.questions import DEFAULT, prompts, read_questions
from bench.real_model import digest
from bench.report import add_options, read_results, write_results
from grace_opt.errors import GraceError
from grace_opt.hf.models import disable_progress_bars, load_model

ROOT = Path(__file__).parent.parent.parent


def peers() -> list[Method]:
    """Return the methods of other papers."""
    from bench.arena.peers import methods

    return methods()


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.arena", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="Hub id, folder or .gguf file (default: %(default)s, fetched)")
    parser.add_argument("--name", help="what to call the model in the results (default: the last part of --model)")
    parser.add_argument("--text", type=Path, nargs="+", help="books as plain text (default: four, fetched)")
    parser.add_argument("--questions", type=Path, default=DEFAULT, help="TOML; default: bench/questions.toml")
    parser.add_argument("--tokens", type=int, default=2048, help="of a passage (default %(default)s)")
    parser.add_argument("--long", type=int, default=7168, help="of a long passage; 0 for none (default %(default)s)")
    parser.add_argument(
        "--long-halves", choices=("B", "AB"), default="B", help="halves of long passages (default %(default)s)"
    )
    parser.add_argument("--later", type=int, default=256, help="of these, fed after the prompt (default %(default)s)")
    parser.add_argument("--cases", type=int, default=52, help="hidden words (default %(default)s)")
    parser.add_argument("--context", type=int, default=1600, help="tokens around a hidden word (default %(default)s)")
    parser.add_argument("--chat", type=int, default=1950, help="tokens of a text with a question; 0 for none")
    parser.add_argument("--new-tokens", type=int, default=24, help="of an answer, at most (default %(default)s)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="only these, to try something out")
    parser.add_argument("--without", nargs="+", metavar="NAME", default=[], help="methods to leave out")
    parser.add_argument("--quick", action="store_true", help="two passages, one long one, four words, one text")
    parser.add_argument("--list", action="store_true", help="show the methods without measuring them")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "arena", help="folder of the records")
    add_options(parser, "arena")
    args = parser.parse_args(given)
    for name, tokens in (("--tokens", args.tokens), ("--long", args.long)):
        if tokens and not 2 <= args.later <= tokens - SINKS - WINDOW - 1:
            raise SystemExit(
                f"--later {args.later}: give at least 2, and so many fewer than {name} {tokens} that more than the "
                f"{SINKS + WINDOW} dense tokens are left for the prompt"
            )
    if args.tokens < 1 or min(args.long, args.cases, args.chat) < 0 or args.new_tokens < 1:
        raise SystemExit("--tokens and --new-tokens are at least 1; --long, --cases and --chat at least 0")
    require_texts(args.text)
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
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    found = competing(args)
    if args.list:
        print("\n".join(f"{name:<28} {one.title} ({one.source})" for name, one in found.items()))
        return
    source, now = require_clean(args.allow_dirty), datetime.now(UTC).isoformat()
    texts = args.text or books()
    sets = read_questions(args.questions) if args.chat else []
    disable_progress_bars()
    where = model_path(args.model)
    model, tokenizer = load_model(where)
    if tokenizer is None:
        raise SystemExit(f"--model {args.model}: there is no tokenizer with it, so texts cannot be read")
    context, longest = model.config.max_position_embeddings, max(args.tokens, args.long, args.context + ASKED)
    if max(longest, args.chat + args.new_tokens) > context:
        raise SystemExit(
            f"--tokens {args.tokens} --long {args.long} --context {args.context} --chat {args.chat}: this model's "
            f"context has {context}, of which a question takes up to {ASKED} and an answer {args.new_tokens}"
        )
    some = 2 if args.quick else None
    short = passages(texts, tokenizer, args.tokens)[:some]
    every = long_passages(texts, tokenizer, args.long) if args.long else []
    long = [one for one in every if one.half in args.long_halves][: 1 if args.quick else None]
    asked = cases(texts, tokenizer, min(args.cases, 4) if args.quick else args.cases, args.context)
    chat = [prompts(text, tokenizer, args.chat) for text in (sets[:1] if args.quick else sets)]
    file = args.runs / "basis.safetensors"
    basis, seconds = calibrated(model, tokenizer, file, source)
    arena = Arena(Subject(model, basis, file), tokenizer, found, short, long, asked, chat, args.later, args.new_tokens)
    try:
        records, sources = run(arena, args.runs, source, now)
    except GraceError as error:
        raise SystemExit(str(error)) from None
    value = {
        "provenance": refuse(sources, args.allow_dirty),
        "model": args.name or Path(where).stem,
        "weights": digest(*model.parameters()),
        **{"tokens": args.tokens, "long_tokens": args.long, "later": args.later, "sinks": SINKS, "window": WINDOW},
        **{"chat_tokens": args.chat, "new_tokens": args.new_tokens},
        "calibration": {"texts": basis.texts, "tokens": basis.tokens, "seconds": seconds},
        "without": [*args.without, *(["all but those of --methods"] if args.methods else [])],
        "methods": {n: {"title": one.title, "family": one.family, "source": one.source} for n, one in found.items()},
        **records,
    }
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty))


if __name__ == "__main__":
    main()
