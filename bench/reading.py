"""What reading few tokens costs and saves: ``python -m bench.reading``.

A trained model reads a passage once; caches that read all tokens, or few of them (``read=``), are filled with it and
fed the next tokens of the text. *KL* compares their next-token distributions with those of a dense cache. *Unread* is
the attention that was on tokens that were not read: as the cache bounds it, and in truth, in float64, for the first
tokens fed. *Times* are whole steps, each way in turn with reading all.

Everything in float32 on the CPU. Writes docs/results/reading.{json,md,png}. If they are missing, models and texts are
downloaded (`bench.material`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from bench.caches import SINKS, Continuation
from bench.caches import WINDOW as RECENT
from bench.growth import of_texts
from bench.material import books
from bench.reading_page import RATIO, TRUE, USUAL, page
from bench.report import parser_of
from bench.several import publish_models
from grace_opt.hf import CompressedCache, TopTokens, attention_implementation, capture_attention
from grace_opt.hf.engine.filling import filled
from grace_opt.hf.stores.channels import reading as reading
from grace_opt.hf.tools.evaluation import next_token_log_probs
from grace_opt.kernels.cache.decode.reference import attention as whole_attention
from grace_opt.kernels.cache.reading import Few, Stored, reference_for

#: Tokens of the passages, and of what is fed.
PASSAGES, TOKENS = (2000, 7900), 64
#: The ways to read, by name, and which of them are timed.
ALL = "all"
SETTINGS = {
    **{f"pages, {share:g}": TopTokens(share) for share in (0.125, 0.25, 0.5)},
    **{f"channels, {share:g}": TopTokens(share, "channels") for share in (0.125, 0.25, 0.5)},
    **{f"channels, top_p={p:g}": TopTokens(0.05, "channels", top_p=p) for p in (0.9, 0.94, 0.95, 0.96)},
    USUAL: TopTokens(by="channels"),
    "pages, epsilon=0.1": TopTokens(0.05, epsilon=0.1),
    "channels, epsilon=0.1": TopTokens(0.05, "channels", epsilon=0.1),
    # MagicPIG's own, and fewer bits in all, which read about as much as the usual channels after a long prompt.
    **{f"sampling, {n} x {k} bits": TopTokens(by="sampling", tables=n, hash_bits=k) for n, k in ((150, 10), (60, 8))},
}
SAMPLED = tuple(name for name, way in SETTINGS.items() if way.by == "sampling")
TIMED = ("pages, 0.25", "channels, 0.25", "channels, top_p=0.95", USUAL, *SAMPLED)


def made(model: PreTrainedModel, name: str) -> CompressedCache:
    """Return the empty cache of a way to read."""
    windows = {"recent_window": RECENT, "sink_tokens": SINKS}
    if name == ALL:
        return CompressedCache(model, ratio=0.0, **windows)
    way = SETTINGS[name]
    given = {"ratio": RATIO} if way.by == "channels" and name != USUAL else {}
    return CompressedCache(model, read=way, **given, **windows)


@contextmanager
def true_shares(found: list[float]) -> Iterator[None]:
    """Collect the mean share of the attention on unread tokens, of every layer and step inside; torch computes both."""

    def attend(query: Tensor, stored: Stored, *given: Any) -> Few:
        units, *_, mask, scaling, softcap = given
        few = reference_for(units)(query, stored, *given)
        assert few.weights is not None
        wide = [part if part.dtype == torch.int64 else part.double() for part in stored]
        _, whole = whole_attention(query.double(), *wide, mask, scaling, softcap)
        found.append(float(whole.masked_fill(few.weights > 0, 0.0).sum(-1).mean()))
        return few

    with mock.patch.object(reading.kernels, "attention_for", return_value=attend):
        yield


@torch.inference_mode()
def of_passage(
    model: PreTrainedModel,
    ids: Tensor,
    prompt: int,
    tokens: int,
    advance: Callable[[], None],
) -> Any:
    """Return, for each way to read, KL, the share read, bounds and the true share unread."""
    text, rows = Continuation(model, ids[:, : prompt + tokens], prompt), {}
    for name in SETTINGS:
        cache, truth = filled(made(model, name), text.captured), list[float]()
        kl = text.beside_dense(cache).kl
        advance()
        report = cache.read_report()
        again = filled(made(model, name), text.captured)
        with true_shares(truth):
            next_token_log_probs(model, again, text.fed[:, :TRUE])
        rows[name] = {
            "kl": kl,
            "share": report.share,
            "bound": report.bound_mean,
            "first_bound": again.read_report().bound_mean,
            "unread": statistics.fmean(truth),
        }
    return rows


@torch.inference_mode()
def steps(model: PreTrainedModel, ids: Tensor, prompt: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of whole steps of each way, ``own``, and of one that reads all, with which it takes turns."""
    captured = capture_attention(model, ids[:, :prompt])
    found = {}
    for name in track(TIMED, description=f"steps after {prompt:,} tokens"):
        caches = {key: filled(made(model, of), captured) for key, of in {"own": name, "all": ALL}.items()}
        times: dict[str, list[float]] = {key: [] for key in caches}
        for turn in range(rounds + 2):
            for key, cache in caches.items():
                began = time.perf_counter()
                model(ids[:, prompt + turn : prompt + turn + 1], past_key_values=cache)
                taken = time.perf_counter() - began
                if turn > 1:  # the first ones compile, and wake threads
                    times[key].append(1000 * taken)
        found[name] = times
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("reading", __doc__, models=True)
    parser.add_argument("--prompt", type=int, nargs="+", default=PASSAGES, help="tokens of the passages")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens fed (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="steps that are timed (default %(default)s)")
    args = parser.parse_args(given)
    longest, more = max(args.prompt), max(args.tokens, args.rounds + 2)

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        context = model.config.max_position_embeddings
        if args.tokens < TRUE or longest + more > context:
            raise SystemExit(
                f"--prompt {longest}, --tokens {args.tokens}, --rounds {args.rounds}: feed at least {TRUE} tokens, and "
                f"all must fit into the context of {name}, {context}"
            )
        texts = of_texts(args.text or books(), tokenizer, longest + more)
        found = list[dict[str, Any]]()
        with attention_implementation(model, "grace_sdpa"):
            total = len(args.prompt) * len(texts) * len(SETTINGS)
            turns = iter(track(range(total), description=f"ways to read, {name}"))
            for prompt in args.prompt:
                for text, ids in texts:
                    rows = of_passage(model, ids, prompt, args.tokens, lambda: next(turns, None))
                    found.append({"name": text, "prompt": prompt, "rows": rows})
            next(turns, None)
            ms = steps(model, texts[0][1], longest, args.rounds)
        return {"texts": found, "ms": ms}, {}

    settings = {"prompts": args.prompt, "tokens": args.tokens, "rounds": args.rounds, "ways": list(SETTINGS)}
    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()
