"""What a budget of bits costs a real model: ``python -m bench.bits``.

`grace_opt.hf` gives every channel of every token its own number of bits (``bits=2.25``). Each passage (see
`bench.passages`) is a prompt and 256 later tokens, which are fed in one forward pass on the compressed cache and stay
dense. Each cache is compared with the dense one by its next-token distributions. Settings are chosen on half A of the
passages and reported on half B; one setting serves all numbers of bits.

Retrieval: a word is hidden in a text, and asked for after the cache was compressed, so no query had looked for it.

A prompt is read once; every kind of cache is filled with the queries, keys and values of its layers, as the attention
function would (a test compares both). Time to compress is measured apart, on prompts that are really read.

Variants change one part of the decision each (`bench.bits_variants`).

Each passage and each case has its own file in ``--runs``. A stopped run resumes; files of other texts, weights,
settings or commits are measured again, and all are if files differ from the commit. Writes
docs/results/bits.{json,md,png}.

If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and the texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.bits_page import ASKED_VARIANTS, DENSE, RETRIEVAL, ROWS, TIMED, page
from bench.bits_variants import VARIANTS, varied, with_equal_rates, with_rates_of
from bench.caches import SINKS, WINDOW, Continuation, calibrated, sizes_of
from bench.material import books, open_model
from bench.passages import HALVES, Case, Passage, cases, passages
from bench.provenance import digest, origin_of, recorded, refuse
from bench.report import parser_of, publish
from grace_opt._util.progress import progress_bar
from grace_opt.hf import (
    CalibratedBasis,
    CompressedCache,
    Quantize,
    attention_implementation,
    capture_attention,
)
from grace_opt.hf.tools.evaluation import ask, stored_bits
from grace_opt.hf.tools.filling import dense_cache, filled

#: So large that no later token is compressed.
NEVER = 2**20
#: More tokens than a hidden word's sentence, its question and its answer have.
ASKED = 100
REFERENCES: dict[str, dict[str, Any]] = {
    "int4": {"method": "think", "ratio": 0.0, "quantize": Quantize(4)},
    "ratio-0.3": {"ratio": 0.3},
}


def settings_of(name: str, basis: Path) -> dict[str, Any]:
    """Return the arguments of a row's cache; `basis` is the file of the calibrated one."""
    windows: dict[str, Any] = {"recent_window": WINDOW, "sink_tokens": SINKS}
    if name in REFERENCES:
        return {**REFERENCES[name], **windows}
    if name in ("none", "prompt"):
        return {"bits": ROWS[name], "basis": name, "tail_block": NEVER, **windows}
    if name in ("local", "equal"):
        basis = basis.with_name(f"{name}.safetensors")
    return {"bits": ROWS[name], "basis": str(basis), "tail_block": NEVER, **windows}


@torch.no_grad()
def measure_passage(
    model: PreTrainedModel,
    passage: Passage,
    later: int,
    names: Iterable[str],
    basis: Path,
    advance: Callable[[], None],
) -> dict[str, dict[str, float]]:
    """Compare every row's cache with the dense one on the last `later` tokens of a passage.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    passage : Passage
    later : int
    names : iterable of str
        Rows of `ROWS`.
    basis : Path
        The file of the calibrated one.
    advance : callable
        Called after each row.
    """
    text, found = Continuation(model, passage.ids, passage.ids.shape[1] - later), {}
    advance()
    for name in names:
        with varied(name):
            cache = text.cache(**settings_of(name, basis))
        advance()
        if name in VARIANTS and cache.memory_report().bits is None:
            continue  # all dense: the prompt is too short to store a basis of its own
        found[name] = sizes_of(stored_bits(cache)) | asdict(text.beside_dense(cache))
    return found


@torch.no_grad()
def measure_case(
    model: PreTrainedModel, case: Case, names: Iterable[str], basis: Path, advance: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Return, for the dense cache and every row, the answer's NLL in nats, and whether each token is the likeliest."""
    captured = capture_attention(model, case.context)
    found = {}
    for name in (DENSE, *names):
        with varied(name):
            cache: Any = (
                dense_cache(model, captured)
                if name == DENSE
                else filled(CompressedCache(model, **settings_of(name, basis)), captured)
            )
        found[name] = asdict(ask(model, cache, case.question, case.answer))
        advance()
    return found


@torch.no_grad()
def measure_time(
    model: PreTrainedModel, ids: Tensor, basis: Path, rounds: int, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the seconds in which a prompt is read, with the dense cache and with others, which take turns."""
    found: dict[str, list[float]] = {DENSE: [], **{name: [] for name in TIMED}}
    for number in range(rounds + 1):  # the first is for warming up
        for name, seconds in found.items():
            cache: Any = (
                DynamicCache(config=model.config)
                if name == DENSE
                else CompressedCache(model, **settings_of(name, basis))
            )
            start = time.perf_counter()
            model(ids, past_key_values=cache, logits_to_keep=1)
            if number:
                seconds.append(time.perf_counter() - start)
            advance()
    return found


def run(
    model: PreTrainedModel,
    found: Sequence[Passage],
    asked: Sequence[Case],
    basis: tuple[CalibratedBasis, Path],
    arguments: argparse.Namespace,
    source: Mapping[str, Any],
) -> dict[str, Any]:
    """Measure what is not measured yet; return the records of passages and of cases, and the times."""
    names = list(ROWS)
    common = {
        "weights": digest(*model.parameters()),
        "basis": digest(*basis[0].key_rates.values(), *(each.encode for each in basis[0].keys.values())),
        "transformers": source["transformers"],
    }
    asked_rows = (*RETRIEVAL, *ASKED_VARIANTS)
    per_case = 1 + len(asked_rows)
    rounds = arguments.rounds
    steps = (1 + len(names)) * len(found) + per_case * len(asked)
    total, done = steps + (rounds + 1) * (1 + len(TIMED)) * bool(rounds), 0
    with attention_implementation(model, "grace_sdpa"), progress_bar(None, total) as show:

        def advance(what: str) -> None:
            nonlocal done
            done += 1
            show(what, done)

        def stored(path: Path, settings: dict[str, Any], measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            record = recorded(path, {**common, **settings}, source, lambda: {"rows": measured()})
            return {name: value for name, value in record.items() if name != "settings"}

        of_passages, of_cases = [], []
        for number, passage in enumerate(found):
            what = f"passage {number + 1}"
            rows = {name: {**settings_of(name, basis[1]), "basis": None} for name in names}
            record = stored(
                arguments.runs / f"passage_{number:02}.json",
                {"ids": digest(passage.ids), "later": arguments.later, "rows": rows},
                lambda p=passage, w=what: measure_passage(
                    model, p, arguments.later, names, basis[1], lambda: advance(w)
                ),
            )
            of_passages.append({"kind": passage.kind, "name": passage.name, "half": passage.half, **record})
        for number, case in enumerate(asked):
            what = f"case {number + 1}"
            rows = {name: {**settings_of(name, basis[1]), "basis": None} for name in asked_rows}
            record = stored(
                arguments.runs / f"case_{number:02}.json",
                {"ids": digest(case.context, case.question, case.answer), "rows": rows},
                lambda c=case, w=what: measure_case(model, c, asked_rows, basis[1], lambda: advance(w)),
            )
            tokens = case.context.shape[1]
            of_cases.append({"name": case.name, "depth": case.depth, "tokens": tokens, **record})
        seconds = {}
        if rounds:
            ids = found[0].ids[:, : -arguments.later]
            seconds = measure_time(model, ids, basis[1], rounds, lambda: advance("time"))
    return {"passages": of_passages, "cases": of_cases, "seconds": seconds}


def bases(
    model: PreTrainedModel, tokenizer: Any, folder: Path, source: Mapping[str, Any]
) -> tuple[CalibratedBasis, Path, float]:
    """Return the calibrated basis, its file in `folder`, and seconds; the bases of variants are written beside it."""
    path = folder / "basis.safetensors"
    basis, seconds = calibrated(model, tokenizer, path, source)
    local, _ = calibrated(model, tokenizer, folder / "by_local_errors.safetensors", source, end_to_end=False)
    with_rates_of(basis, local).save(folder / "local.safetensors")
    with_equal_rates(basis).save(folder / "equal.safetensors")
    return basis, path, seconds


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("bits", __doc__, model=True)
    parser.add_argument("--half", choices=HALVES, help="only the passages of one half, while settings are chosen")
    parser.add_argument("--passages", type=int, help="only the first so many (default: all)")
    parser.add_argument("--cases", type=int, default=52, help="of retrieval (default %(default)s)")
    parser.add_argument("--context", type=int, default=1600, help="tokens around a hidden word (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a passage (default %(default)s)")
    parser.add_argument("--later", type=int, default=256, help="of these, fed after the prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of reading a prompt, for times (default %(default)s)")
    args = parser.parse_args(given)
    if not 2 <= args.later < args.tokens:
        raise SystemExit(f"--later {args.later}: give at least 2, and fewer than the {args.tokens} --tokens")

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        model, tokenizer, name = open_model(args)
        context = model.config.max_position_embeddings
        if max(args.tokens, args.context + ASKED) > context:
            raise SystemExit(
                f"--tokens {args.tokens} --context {args.context}: this model's context has {context}, of which a "
                f"question takes up to {ASKED}"
            )
        texts = args.text or books()
        found = [p for p in passages(texts, tokenizer, args.tokens) if args.half in (None, p.half)][: args.passages]
        asked = cases(texts, tokenizer, args.cases, args.context)
        basis, path, seconds = bases(model, tokenizer, args.runs, source)
        records = run(model, found, asked, (basis, path), args, source)
        sources = {
            f"{kind} {number + 1}": origin_of(source, record)
            for kind in ("passages", "cases")
            for number, record in enumerate(records[kind])
        }
        return {
            "provenance": refuse(sources or {"this run": source}, args.allow_dirty),
            "model": name,
            "weights": digest(*model.parameters()),
            **{"tokens": args.tokens, "later": args.later, "sinks": SINKS, "window": WINDOW},
            "calibration": {"texts": basis.texts, "tokens": basis.tokens, "seconds": seconds},
            **records,
        }

    publish(args, page, measured)


if __name__ == "__main__":
    main()
