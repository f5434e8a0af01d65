"""What a trellis buys, and what it takes: ``python -m bench.trellis``.

Caches with ``bits=``, with a trellis and without (``trellis=False``), of the same bytes: the KL of next-token
distributions from those of a dense cache on passages of half B (`bench.passages`), words that were hidden in a text,
seconds of reading a prompt, and of a decoding step after a long one. Prompts are read once, and caches filled with what
their layers had (`bench.bits`); caches that are timed take turns.

Writes docs/results/trellis.{json,md,png}. If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and the
texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.bits import NEVER
from bench.caches import SINKS, WINDOW, calibrated
from bench.intervals import DENSE, hidden_words, with_ends
from bench.material import MODEL, books, model_path, require_texts
from bench.passages import Case, Passage, cases, passages
from bench.provenance import refuse, require_clean
from bench.real_model import digest, read_text
from bench.report import BLUE, ORANGE, Page, add_options, read_results, table, write_results
from grace_opt._util.progress import progress_bar
from grace_opt.hf import CompressedCache, attention_implementation, capture_attention
from grace_opt.hf.models import disable_progress_bars, load_model
from grace_opt.hf.tools.evaluation import ask, compare_predictions, next_token_log_probs, stored_bits
from grace_opt.hf.tools.filling import dense_cache, filled
from grace_opt.sweep import mean_interval

ROOT = Path(__file__).parent.parent
#: Bits of the passages, of hidden words, and of what is timed.
BITS, ASKED, TIMED = (1.0, 1.5, 2.0, 2.25, 3.0, 4.0), 2.0, 2.25
#: The two kinds of codes, as the page names them, and their settings.
KINDS: dict[str, dict[str, Any]] = {"one by one": {"trellis": False}, "trellis": {}}

Advance = Callable[[], None]


def measure_passage(
    model: PreTrainedModel, passage: Passage, later: int, settings: dict[str, Any], advance: Advance
) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by bits and kind, bits per element and how far the last `later` distributions are from the dense ones."""
    ids, fed = passage.ids[:, :-later], passage.ids[:, -later:]
    captured = capture_attention(model, ids)
    dense, found = next_token_log_probs(model, dense_cache(model, captured), fed), {}
    advance()
    for bits in BITS:
        found[f"{bits:g}"] = rows = {}
        for kind, own in KINDS.items():
            cache = filled(CompressedCache(model, bits=bits, tail_block=NEVER, **settings, **own), captured)
            near = compare_predictions(next_token_log_probs(model, cache, fed), dense, fed[0, 1:])
            rows[kind] = {"bits": stored_bits(cache).bits, **asdict(near)}
            advance()
    return found


def measure_case(
    model: PreTrainedModel, case: Case, settings: dict[str, Any], advance: Advance
) -> dict[str, dict[str, float]]:
    """Return how well each cache, and the dense one, answers a question."""
    captured = capture_attention(model, case.context)
    made: dict[str, Any] = {DENSE: dense_cache(model, captured)}
    for kind, own in KINDS.items():
        made[kind] = filled(CompressedCache(model, bits=ASKED, tail_block=NEVER, **settings, **own), captured)
    advance()
    return {name: asdict(ask(model, cache, case.question, case.answer)) for name, cache in made.items()}


def measure_times(
    model: PreTrainedModel,
    ids: Tensor,
    prompt: int,
    steps: int,
    rounds: int,
    settings: dict[str, Any],
    advance: Advance,
) -> dict[str, dict[str, list[float]]]:
    """Return seconds of reading a prompt, and of steps after all but the last of `ids`, of caches that take turns."""

    def caches() -> dict[str, Any]:
        coded = {kind: CompressedCache(model, bits=TIMED, **settings, **own) for kind, own in KINDS.items()}
        return {DENSE: DynamicCache(config=model.config), **coded}

    def timed(part: Tensor, cache: Any) -> float:
        start = time.perf_counter()
        model(part, past_key_values=cache, logits_to_keep=1)
        return time.perf_counter() - start

    read: dict[str, list[float]] = {name: [] for name in caches()}
    for number in range(rounds + 1):  # the first is for warming up
        for name, cache in caches().items():
            seconds = timed(ids[:, :prompt], cache)
            read[name] += [seconds] if number else []
            advance()
    long, decoded = caches(), {name: [] for name in caches()}
    for cache in long.values():
        timed(ids[:, : -steps - 1], cache)
        advance()
    for step in range(steps):
        for name, cache in long.items():
            place = ids.shape[1] - steps - 1 + step
            decoded[name].append(timed(ids[:, place : place + 1], cache))
    return {"read": read, "decoded": decoded}


def ratio(value: dict[str, Any], bits: str) -> list[float]:
    """Return, by passage, the logarithm of the KL with a trellis beside that without."""
    rows = [each["rows"][bits] for each in value["passages"]]
    return [math.log(row["trellis"]["kl"] / row["one by one"]["kl"]) for row in rows]


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    rows, said = [], {}
    for bits in value["passages"][0]["rows"]:
        own = {kind: [each["rows"][bits][kind] for each in value["passages"]] for kind in KINDS}
        means = [statistics.fmean(one["kl"] for one in own[kind]) for kind in KINDS]
        logs = mean_interval(ratio(value, bits))
        found = replace(logs, estimate=math.exp(logs.estimate), low=math.exp(logs.low), high=math.exp(logs.high))
        said[bits] = found.estimate
        equal = [f"{statistics.fmean(one['top1'] for one in own[kind]):.1%}" for kind in KINDS]
        stored = [f"{statistics.fmean(one['bits'] for one in own[kind]):.3f}" for kind in KINDS]
        rows.append([bits, " and ".join(stored), *(f"{x:.5f}" for x in means), with_ends(found, ".2f"), *equal])
    times = {
        part: {name: statistics.median(each) for name, each in value[part].items()} for part in ("read", "decoded")
    }
    counts = value["prompt"], value["long"]
    slower = [times[part]["trellis"] / times[part]["one by one"] for part in times]
    return Page(
        title="A trellis",
        picture="KL divergence from the dense cache's next-token distributions by bits, on a logarithmic scale, with "
        "and without a trellis; thin lines are passages",
        draw=lambda figure: _draw(figure, value),
        asked="What do codes of a trellis buy in the same bytes beside codes of single numbers (`trellis=False`), and "
        "what do they take?",
        found=f"{said['1']:.2f} times the KL at 1 bit, {said['2.25']:.2f} times at 2.25, {said['3']:.2f} times at 3. "
        f"Reading a prompt of {counts[0]:,} tokens takes {slower[0]:.2f} times as long, a decoding step after "
        f"{counts[1]:,} tokens {slower[1]:.2f} times.",
        sure=f"This is one small model and {len(value['passages'])} passages, on which nothing was chosen; intervals "
        "are over passages. Times are of one machine's CPU.",
        tables=[
            *table(
                ["bits", "stored", *(f"KL, {kind}" for kind in KINDS), "ratio", *(f"equal, {k}" for k in KINDS)], rows
            ),
            "",
            "*Ratio*: geometric mean over passages, with its 95 % interval. *Equal*: how often the likeliest token is.",
            "",
            *(hidden_words(value["cases"], (DENSE, *KINDS), lambda n: n if n == DENSE else f"{n}, {ASKED:g} bits")),
            "",
            *table(
                ["seconds (medians)", DENSE, *KINDS],
                [
                    [f"prompt of {counts[0]:,} tokens", *(f"{times['read'][name]:.2f}" for name in (DENSE, *KINDS))],
                    [f"step after {counts[1]:,}", *(f"{times['decoded'][name]:.4f}" for name in (DENSE, *KINDS))],
                ],
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"Passages of {value['tokens']:,} tokens, of which the last {value['later']} are fed at once on "
                    f"the compressed cache and stay dense; {SINKS} sink tokens, recent window {WINDOW}. Times: caches "
                    f"with `bits={TIMED:g}` and the dense one take turns, {len(value['read'][DENSE])} times with a "
                    f"prompt, after once for warming up, and for {len(value['decoded'][DENSE])} steps."
                ],
            )
        ],
    )


def _draw(figure: Figure, value: dict[str, Any]) -> None:
    axes, names = figure.subplots(), list(value["passages"][0]["rows"])
    places = [float(name) for name in names]
    for kind, colour in zip(KINDS, (ORANGE, BLUE), strict=True):
        every = [[each["rows"][name][kind]["kl"] for name in names] for each in value["passages"]]
        for one in every:
            axes.plot(places, one, color=colour, linewidth=0.6, alpha=0.4)
        means = [statistics.geometric_mean(each) for each in zip(*every, strict=True)]
        axes.plot(places, means, "o-", color=colour, linewidth=2, label=kind)
    axes.set_yscale("log")
    axes.set_xlabel("bits per element of keys and values, all counted")
    axes.set_ylabel("KL, nats (geometric means)")
    axes.legend()


def _steps(found: Sequence[Passage], asked: Sequence[Case], rounds: int) -> int:
    return len(found) * (1 + len(BITS) * len(KINDS)) + len(asked) + (rounds + 2) * (1 + len(KINDS))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.trellis", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="Hub id, folder or .gguf file (default: %(default)s, fetched)")
    parser.add_argument("--name", help="what to call the model in the results (default: the last part of --model)")
    parser.add_argument("--text", type=Path, nargs="+", help="books as plain text (default: four, fetched)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a passage (default %(default)s)")
    parser.add_argument("--later", type=int, default=256, help="of these, fed after the prompt (default %(default)s)")
    parser.add_argument("--cases", type=int, default=52, help="hidden words (default %(default)s)")
    parser.add_argument("--context", type=int, default=1600, help="tokens around one (default %(default)s)")
    parser.add_argument("--long", type=int, default=8000, help="tokens before timed steps (default %(default)s)")
    parser.add_argument("--steps", type=int, default=41, help="timed steps, of each cache (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of reading a prompt, for times (default %(default)s)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "trellis", help="folder of the calibrated basis")
    add_options(parser, "trellis")
    args = parser.parse_args(given)
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    if not 2 <= args.later < args.tokens:
        raise SystemExit(f"--later {args.later}: give at least 2, and fewer than the {args.tokens} --tokens")
    require_texts(args.text)
    source = require_clean(args.allow_dirty)
    disable_progress_bars()
    where = model_path(args.model)
    model, tokenizer = load_model(where)
    texts = args.text or books()
    prompt = args.tokens - args.later
    ids = _longest(texts, tokenizer)[:, : args.long + args.steps + 1]
    if ids.shape[1] > model.config.max_position_embeddings or ids.shape[1] <= max(args.steps + 1, prompt):
        raise SystemExit(f"--long {args.long}: the longest text, or the model's context, has {ids.shape[1]} tokens")
    found = [each for each in passages(texts, tokenizer, args.tokens) if each.half == "B"]
    asked = cases(texts, tokenizer, args.cases, args.context)
    basis, _ = calibrated(model, tokenizer, args.runs / "basis.safetensors", source)
    settings = {"basis": str(args.runs / "basis.safetensors"), "recent_window": WINDOW, "sink_tokens": SINKS}
    with (
        torch.no_grad(),
        attention_implementation(model, "grace_sdpa"),
        progress_bar(None, _steps(found, asked, args.rounds)) as show,
    ):
        places: Iterator[int] = iter(range(1, 10**9))
        advance = lambda: show("passages, hidden words, times", next(places))  # noqa: E731
        of_passages = [
            {"name": each.name, "kind": each.kind, "rows": measure_passage(model, each, args.later, settings, advance)}
            for each in found
        ]
        of_cases = [
            {"name": each.name, "tokens": each.context.shape[1], "rows": measure_case(model, each, settings, advance)}
            for each in asked
        ]
        times = measure_times(model, ids, prompt, args.steps, args.rounds, settings, advance)
    value = {
        "provenance": refuse({"this run": source}, args.allow_dirty),
        "model": args.name or Path(where).stem,
        "weights": digest(*model.parameters()),
        "basis": digest(*basis.key_rates.values()),
        **{"tokens": args.tokens, "later": args.later, "prompt": prompt, "long": ids.shape[1] - args.steps - 1},
        **{"passages": of_passages, "cases": of_cases, **times},
    }
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty))


def _longest(texts: Sequence[Path], tokenizer: Any) -> Tensor:
    """Return the tokens of the longest text."""
    every = [tokenizer(read_text(path)[1], add_special_tokens=False, return_tensors="pt").input_ids for path in texts]
    longest: Tensor = max(every, key=lambda ids: ids.shape[1])
    return longest


if __name__ == "__main__":
    main()
