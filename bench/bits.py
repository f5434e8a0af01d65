"""What a budget of bits costs real models: ``python -m bench.bits``.

`grace_opt.hf` gives every channel of every token its own number of bits (``bits=2.25``). Each passage (see
`bench.passages`) is a prompt and 256 later tokens, which are fed in one forward pass on the compressed cache and stay
dense. Each cache is compared with the dense one by its next-token distributions. Settings are chosen on half A of the
passages (``--half A``) and reported on half B; one setting serves all numbers of bits, and all models.

Retrieval: a word is hidden in a text, and asked for after the cache was compressed, so no query had looked for it.

A prompt is read once; every kind of cache is filled with the queries, keys and values of its layers, as the attention
function would (a test compares both). Time to compress is measured apart, on prompts that are really read.

Variants change one part of the decision each (`bench.bits_variants`). Models of ``--brief`` are compared on passages
alone, without them: for larger ones.

Each passage and each case has its own file in ``--runs``. A stopped run resumes; files of other texts, weights,
settings or commits are measured again, and all are if files differ from the commit. Writes
docs/results/bits.{json,md,png}. If they are missing, models and texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.bits_page import DENSE, RETRIEVAL, ROWS, TIMED, page
from bench.bits_variants import VARIANTS, varied, with_equal_rates, with_rates_of
from bench.caches import SINKS, WINDOW, Continuation, calibrated, sizes_of
from bench.material import LARGEST, SEVERAL, books, label_of
from bench.passages import HALVES, Case, Passage, cases, passages
from bench.provenance import digest, origin_of, recorded
from bench.report import parser_of
from bench.several import publish_models
from grace_opt._util.progress import progress_bar
from grace_opt.hf import CalibratedBasis, CompressedCache, Quantize, attention_implementation, capture_attention
from grace_opt.hf.engine.filling import dense_cache, filled
from grace_opt.hf.tools.evaluation import ask, stored_bits

#: So large that no later token is compressed.
NEVER = 2**20
#: More tokens than a hidden word's sentence, its question and its answer have.
ASKED = 100
REFERENCES: dict[str, dict[str, Any]] = {
    "int4": {"method": "think", "ratio": 0.0, "quantize": Quantize(4)},
    "ratio-0.3": {"ratio": 0.3},
}
#: Variants that are other bases, in files of their names.
OTHER_BASES = ("local", "equal", "still")


def settings_of(name: str, basis: Path) -> dict[str, Any]:
    """Return the arguments of a row's cache; `basis` is the file of the calibrated one."""
    windows: dict[str, Any] = {"recent_window": WINDOW, "sink_tokens": SINKS}
    if name in REFERENCES:
        return {**REFERENCES[name], **windows}
    if name == "none":
        return {"bits": ROWS[name], "basis": name, "tail_block": NEVER, **windows}
    if name in OTHER_BASES:
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
    for name in names:
        with varied(name):
            cache = text.cache(**settings_of(name, basis))
        advance()
        found[name] = sizes_of(stored_bits(cache)) | asdict(text.beside_dense(cache))
    return found


@torch.no_grad()
def measure_case(model: PreTrainedModel, case: Case, basis: Path) -> dict[str, dict[str, float]]:
    """Return, for the dense cache and others, the answer's NLL in nats, and whether each token is the likeliest."""
    captured = capture_attention(model, case.context)
    caches = {DENSE: lambda: dense_cache(model, captured)} | {
        name: lambda name=name: filled(CompressedCache(model, **settings_of(name, basis)), captured)  # type: ignore[misc]
        for name in RETRIEVAL
    }
    return {name: asdict(ask(model, make(), case.question, case.answer)) for name, make in caches.items()}


@torch.no_grad()
def measure_time(model: PreTrainedModel, ids: Tensor, basis: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds in which a prompt is read, with the dense cache and with another, which take turns."""
    found: dict[str, list[float]] = {DENSE: [], TIMED: []}
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
    return found


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    args: argparse.Namespace,
    source: Mapping[str, Any],
    *,
    brief: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure of a model what is not measured yet; return all of it, and where each number comes from.

    Parameters
    ----------
    model, tokenizer : object
    folder : Path
        Of its records.
    args : Namespace
    source : mapping
        The provenance of now.
    brief : bool
        Whether to leave out variants, hidden words and times.
    """
    texts = args.text or books()
    every = [each for each in passages(texts, tokenizer, args.tokens) if each.half == args.half][: args.passages]
    asked = [] if brief else cases(texts, tokenizer, args.cases, args.context)
    basis, path, seconds = bases(model, tokenizer, folder, source, brief=brief)
    names = [name for name in ROWS if not (brief and name in VARIANTS)]
    common = {
        "weights": digest(*model.parameters()),
        "basis": digest(*basis.key_rates.values(), *(each.encode for each in basis.keys.values())),
        "transformers": source["transformers"],
    }
    origins, of_passages, of_cases, done = {}, [], [], 0
    total = len(every) * len(names) + len(asked)
    with attention_implementation(model, "grace_sdpa"), progress_bar(None, total) as show:

        def stored(file: str, settings: dict[str, Any], measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            record = recorded(folder / f"{file}.json", {**common, **settings}, source, lambda: {"rows": measured()})
            origins[f"{folder.name}, {file}"] = origin_of(source, record)
            rows: dict[str, Any] = record["rows"]
            return rows

        for number, passage in enumerate(every):

            def advance(what: str = f"{folder.name}, passage {number + 1}") -> None:
                nonlocal done
                done += 1
                show(what, done)

            rows = {name: {**settings_of(name, path), "basis": None} for name in names}
            found = stored(
                f"{args.half}_{number:02}",
                {"ids": digest(passage.ids), "later": args.later, "rows": rows},
                lambda p=passage, a=advance: measure_passage(model, p, args.later, names, path, a),  # type: ignore[misc]
            )
            of_passages.append({"kind": passage.kind, "name": passage.name, "rows": found})
        for number, case in enumerate(asked):
            show(f"{folder.name}, hidden word {number + 1}", done + number)
            rows = {name: {**settings_of(name, path), "basis": None} for name in RETRIEVAL}
            found = stored(
                f"case_{number:02}",
                {"ids": digest(case.context, case.question, case.answer), "rows": rows},
                lambda c=case: measure_case(model, c, path),  # type: ignore[misc]
            )
            tokens = case.context.shape[1]
            of_cases.append({"name": case.name, "depth": case.depth, "tokens": tokens, "rows": found})
        times = {}
        if args.rounds and not brief:
            settings = {"ids": digest(every[0].ids), "later": args.later, "rounds": args.rounds}
            ids = every[0].ids[:, : -args.later]
            times = stored("times", settings, lambda: measure_time(model, ids, path, args.rounds))
    return {
        "calibration": {"texts": basis.texts, "tokens": basis.tokens, "seconds": seconds},
        **{"passages": of_passages, "cases": of_cases, "seconds": times},
    }, origins


def bases(
    model: PreTrainedModel, tokenizer: Any, folder: Path, source: Mapping[str, Any], *, brief: bool
) -> tuple[CalibratedBasis, Path, float]:
    """Return the calibrated basis, its file in `folder`, and seconds; `OTHER_BASES` are written beside it."""
    path = folder / "basis.safetensors"
    basis, seconds = calibrated(model, tokenizer, path, source)
    if not brief:
        local, _ = calibrated(model, tokenizer, folder / "by_local_errors.safetensors", source, end_to_end=False)
        with_rates_of(basis, local).save(folder / "local.safetensors")
        with_equal_rates(basis).save(folder / "equal.safetensors")
        with mock.patch("grace_opt.hf.bases.calibrate.frequencies_of", return_value=[]):
            calibrated(model, tokenizer, folder / "still.safetensors", source, end_to_end=True)
    return basis, path, seconds


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("bits", __doc__, models=True)
    add = parser.add_argument
    add("--brief", nargs="*", metavar="MODEL", help=f"measured less (default: {LARGEST}, if no --model is named)")
    add("--half", choices=HALVES, default="B", help="which passages (default %(default)s)")
    add("--passages", type=int, help="only the first so many (default: all)")
    add("--cases", type=int, default=24, help="of retrieval (default %(default)s)")
    add("--context", type=int, default=1600, help="tokens around a hidden word (default %(default)s)")
    add("--tokens", type=int, default=2048, help="of a passage (default %(default)s)")
    add("--later", type=int, default=256, help="of these, fed after the prompt (default %(default)s)")
    add("--rounds", type=int, default=7, help="of reading a prompt, for times (default %(default)s)")
    args = parser.parse_args(given)
    if not 2 <= args.later < args.tokens:
        raise SystemExit(f"--later {args.later}: give at least 2, and fewer than the {args.tokens} --tokens")
    brief = ([LARGEST] if args.model == SEVERAL else []) if args.brief is None else args.brief
    args.model = [*args.model, *(name for name in brief if name not in args.model)]

    settings = {"tokens": args.tokens, "later": args.later, "sinks": SINKS, "window": WINDOW, "half": args.half}

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        context = model.config.max_position_embeddings
        if max(args.tokens, args.context + ASKED) > context:
            raise SystemExit(
                f"--tokens {args.tokens} --context {args.context}: the context of {name} has {context}, of which a "
                f"question takes up to {ASKED}"
            )
        return run(model, tokenizer, args.runs / name, args, source, brief=name in map(label_of, brief))

    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()
