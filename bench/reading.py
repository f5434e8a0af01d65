"""What reading few tokens costs and saves: ``python -m bench.reading``.

A trained model reads a passage once; caches that read all tokens, or few of them (``read=``), are filled with it and
fed the next tokens of the text. *KL* compares their next-token distributions with those of a dense cache. *Unread* is
the attention that was on tokens that were not read: as the cache bounds it, and in truth, in float64, for the first
tokens fed. *Times* are whole steps, each way in turn with reading all; with ``bits=``, with ``bits=`` alone. KL with
``bits=`` is of short passages only.

Everything in float32 on the CPU. The basis for ``bits=`` is calibrated first, and kept in ``--runs`` with the commit.
Writes docs/results/reading.{json,md,png}. If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and the
texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from bench.caches import SINKS, Continuation
from bench.caches import WINDOW as RECENT
from bench.growth import of_texts
from bench.intervals import with_ends
from bench.material import books, open_model
from bench.report import BLACK, BLUE, GREEN, ORANGE, Page, parser_of, publish, small, table
from grace_opt.attention.provider import DEFAULT_RATIO
from grace_opt.hf import CompressedCache, TopTokens, attention_implementation, capture_attention
from grace_opt.hf.stores.channels import reading as reading
from grace_opt.hf.tools.evaluation import next_token_log_probs
from grace_opt.hf.tools.filling import filled
from grace_opt.kernels.cache.decode.reference import attention as whole_attention
from grace_opt.kernels.cache.reading import Few, Stored, reference_for
from grace_opt.sweep import mean_interval

#: Tokens of the passages, of what is fed, and of that part of it whose unread attention is measured.
PASSAGES, TOKENS, TRUE = (2000, 7900), 64, 4
#: Share of the channels that do not give scores, and a name for what ``read="channels"`` means, with the usual ratio.
RATIO, USUAL = 0.5, "channels, as usual"
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
#: What the issue asks for: share of the tokens, and KL.
GOAL = (0.25, 0.002)


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


def _numbers(value: dict[str, Any], prompt: int) -> dict[str, dict[str, list[float]]]:
    """Return the numbers of all texts, by way to read."""
    texts = [one["rows"] for one in value["texts"] if one["prompt"] == prompt]
    return {name: {key: [rows[name][key] for rows in texts] for key in texts[0][name]} for name in texts[0]}


def _means(value: dict[str, Any], prompt: int) -> dict[str, dict[str, float]]:
    """Return the means over the texts, by way to read."""
    found = _numbers(value, prompt).items()
    return {name: {key: statistics.fmean(of) for key, of in row.items()} for name, row in found}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    tables, prompts = [], sorted({one["prompt"] for one in value["texts"]})
    largest, known = prompts[-1], ("bound", "first_bound", "unread")
    for prompt in prompts:
        rows, means = [], _means(value, prompt)
        for name, one in means.items():
            kl = with_ends(mean_interval(_numbers(value, prompt)[name]["kl"]))
            rows.append([name, f"{one['share']:.1%}", kl, *(f"{one[each]:.3f}" for each in known)])
        head = ["read", "share read", "KL, nats", "bound", f"bound, first {TRUE} tokens", "true share unread"]
        of_texts = f"{value['count']} texts, with 95 % intervals:"
        tables += [f"After {prompt:,} tokens, means over {of_texts}", "", *table(head, rows), ""]
    pairs = {
        name: [a / b for a, b in zip(times["own"], times["all"], strict=True)] for name, times in value["ms"].items()
    }
    rows = []
    for name, times in value["ms"].items():
        ends = statistics.quantiles(pairs[name], n=4) if len(pairs[name]) > 1 else pairs[name] * 3
        share = f"{ends[1]:.2f} {small(f'[{ends[0]:.2f}, {ends[2]:.2f}]')}"
        rows.append([name, *(f"{statistics.median(times[key]):.1f}" for key in ("own", "all")), share])
    head = ["read", "ms", "ms, all read", "ratio, with the middle half"]
    tables += [f"Whole steps after {value['timed']:,} tokens, in turn with steps that read all:"]
    tables += ["", *table(head, rows)]
    met = []
    for prompt in prompts:
        fits = {n: one for n, one in _means(value, prompt).items() if one["share"] <= GOAL[0] and one["kl"] <= GOAL[1]}
        best = min(fits, key=lambda name: fits[name]["kl"], default=None)
        said = f"`{best}`, KL {fits[best]['kl']:.4f} with {fits[best]['share']:.1%} read" if best else "no setting"
        met.append(f"after {prompt:,} tokens {said}")
    times = ", ".join(f"`{name}` {statistics.median(pairs[name]):.2f}" for name in TIMED)
    return Page(
        title="Reading few tokens",
        picture=f"KL divergence by the share of the tokens read, after {largest:,} tokens: pages, channels, "
        "channels with a share of the attention, and samples",
        headline=_headline(_means(value, largest), largest),
        draw=lambda figure: _draw(figure, value, largest),
        asked=f"How few tokens can a step read on {value['model']}, what does it save, and what does the cache know of "
        "the rest?",
        found=f"At most {GOAL[0]:.0%} of the tokens at KL {GOAL[1]} or less: {'; '.join(met)}. A step's time after "
        f"{value['timed']:,} tokens, as a multiple of that which reads all: {times}.",
        sure=f"This is one small model, whose attention is spread over many tokens, and {value['count']} texts, whose "
        "own tokens are fed.",
        tables=tables,
        details=[
            (
                "How it is measured",
                [
                    f"Sinks ({SINKS}), the last {RECENT} tokens of the prompt and what is fed are always read and "
                    f"counted. Channels: a share {RATIO:g} of them, chosen by GRACE, gives no scores; *as usual* is "
                    f'`read="channels"`: {DEFAULT_RATIO:g}, with `top_p={SETTINGS[USUAL].top_p}`. *Sampling*: tables, '
                    "and bits of a code (MagicPIG's are 150 and 10); each bound holds at "
                    f"{SETTINGS[SAMPLED[0]].confidence:.0%} confidence. *Bound*: mean over heads, layers "
                    "and steps of what the unread tokens' share of the attention can be at most; *true share*: what it "
                    "was, of the first tokens."
                ],
            )
        ],
    )


def _headline(means: dict[str, dict[str, float]], prompt: int) -> str:
    """What the picture says of its ways to read: the nearest to dense attention of those within the goal's share."""
    few = {name: one for name, one in means.items() if one["share"] <= GOAL[0]}
    if not few:
        return f"No way reads {GOAL[0]:.0%} or less of {prompt:,} tokens"
    name = min(few, key=lambda name: few[name]["kl"])
    return f"{few[name]['share']:.0%} of {prompt:,} tokens read leave a KL of {few[name]['kl']:.4f} at best ({name})"


def _draw(figure: Figure, value: dict[str, Any], prompt: int) -> None:
    axes, means = figure.subplots(), _means(value, prompt)
    looks = (
        ("pages", BLUE, lambda way: way.by == "pages"),
        ("channels", ORANGE, lambda way: way.by == "channels" and way.top_p is None),
        ("channels, top_p", BLACK, lambda way: way.top_p is not None),
        ("sampling", GREEN, lambda way: way.by == "sampling"),
    )
    for label, colour, belongs in looks:
        ways = {name: way for name, way in SETTINGS.items() if name in means and way.epsilon is None and name != USUAL}
        names = [name for name, way in ways.items() if belongs(way)]
        if not names:
            continue
        points = sorted((means[name]["share"], means[name]["kl"]) for name in names)
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
    axes.axvline(GOAL[0], color="0.7", linewidth=0.8)
    axes.axhline(GOAL[1], color="0.7", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("share of the tokens read")
    axes.set_ylabel("KL, nats")
    axes.legend()


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("reading", __doc__, model=True)
    parser.add_argument("--prompt", type=int, nargs="+", default=PASSAGES, help="tokens of the passages")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens fed (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="steps that are timed (default %(default)s)")
    args = parser.parse_args(given)

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        model, tokenizer, name = open_model(args)
        longest, more = max(args.prompt), max(args.tokens, args.rounds + 2)
        if args.tokens < TRUE or longest + more > model.config.max_position_embeddings:
            raise SystemExit(
                f"--prompt {longest}, --tokens {args.tokens}, --rounds {args.rounds}: feed at least {TRUE} tokens, and "
                f"all must fit into {model.config.max_position_embeddings}"
            )
        texts = of_texts(args.text or books(), tokenizer, longest + more)
        found = list[dict[str, Any]]()
        with attention_implementation(model, "grace_sdpa"):
            total = len(args.prompt) * len(texts) * len(SETTINGS)
            turns = iter(track(range(total), description="ways to read"))
            for prompt in args.prompt:
                for text, ids in texts:
                    rows = of_passage(model, ids, prompt, args.tokens, lambda: next(turns, None))
                    found.append({"name": text, "prompt": prompt, "rows": rows})
            next(turns, None)
            ms = steps(model, texts[0][1], longest, args.rounds)
        return {"model": name, "count": len(texts), "texts": found, "timed": longest, "ms": ms}

    publish(args, page, measured)


if __name__ == "__main__":
    main()
