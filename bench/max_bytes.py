"""What ``max_bytes=`` costs while a text grows: ``python -m bench.max_bytes``.

A prompt is read, then the next tokens of the text are fed in steps of 32, to a dense cache and to two that never take
more bytes than so many dense tokens: one that does not know how many tokens will come, and codes older ones again with
fewer bits, and one that knows. Next-token distributions are compared with those of the dense cache; the last also with
those after a prompt that has all tokens before them and as many bytes.

Later tokens read a compressed cache, so errors are passed on. To tell that from the error of coding, another run codes
the dense cache's keys and values in place of its own.

Each text of a model has its own file in ``--runs``; those of other texts, weights, settings or commits are measured
again. Writes docs/results/max_bytes.{json,md,png}. If they are missing, models and texts are downloaded
(`bench.material`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.caches import calibrated
from bench.growth import ExactCache, divergence, of_texts
from bench.growth_page import STEP, WINDOW
from bench.material import books
from bench.provenance import digest, origin_of, recorded
from bench.report import BLACK, BLUE, GREEN, Page, parser_of, table
from bench.several import publish_models
from grace_opt._util.progress import progress_bar
from grace_opt.hf import CompressedCache, attention_implementation
from grace_opt.hf.engine.layer import PrunedKeyLayer
from grace_opt.hf.stores.coded.coded import CodedTokens
from grace_opt.hf.stores.coded.room import STEP as STEP_DOWN

#: Number of tokens of a prompt that is continued, and dense tokens that the limit is worth.
PROMPT, LIMIT = 1024, 512
#: Runs of the model for each text.
RUNS = 5
#: Single steps of which the median is a plain step's time.
STEPS = 11
#: What is asked for: KL over that of one prompt in as many bytes, time of a step that codes again over a plain one's.
AIMS = (1.3, 30)


@torch.no_grad()
def measure_limit(
    model: PreTrainedModel, ids: Tensor, basis: Path, prompt: int, limit: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Feed the tokens after a prompt in steps, to a dense cache and to some with a limit.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    ids : Tensor
        ``(1, n)``: the prompt and a whole number of `WINDOW` more.
    basis : Path
    prompt, limit : int
        Number of tokens of the prompt; and of dense tokens that may take as many bytes.
    advance : callable
        Called after each of `RUNS` runs.

    Returns
    -------
    dict
        ``unknown`` and ``known``: a dict of ``kl``, the mean of each window, ``share``, the largest share of the limit
        that was taken after any step, ``history`` and ``bits``; ``exact``, each window's KL if the dense cache's keys
        and values are coded; ``at_once``, the last window's KL, bits and bytes if all tokens before it are the prompt;
        ``seconds``, of a plain step and of coding all again.
    """
    whole = DynamicCache()

    def fed(cache: Any, start: int, after: Callable[[], None] = lambda: None) -> Iterator[Tensor]:
        model(ids[:, :start], past_key_values=cache, logits_to_keep=1)
        after()
        for window in ids[:, start:].split(WINDOW, 1):
            logits = []
            for part in window.split(STEP, 1):
                logits.append(model(part, past_key_values=cache).logits[0])
                after()
            # All in float32 would take gigabytes.
            yield torch.cat([each.float().log_softmax(-1).half() for each in logits])
        advance()

    dense = list(fed(whole, prompt))
    layers = [layer for layer in whole.layers if layer.keys.numel()]
    token = sum(layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes for layer in layers)
    most = limit * token

    def divergences(found: Iterable[Tensor]) -> list[float]:
        return [divergence(one, two) for one, two in zip(dense, found, strict=True)]

    found: dict[str, Any] = {"bytes": most}
    for name, later in (("unknown", None), ("known", ids.shape[1] - prompt)):
        cache, taken = CompressedCache(model, max_bytes=most, basis=basis), [0]
        cache.declare_prompt(prompt, later)

        def look(cache: CompressedCache = cache, taken: list[int] = taken) -> None:
            taken.append(cache.memory_report().allocated_bytes)

        kl, report = divergences(fed(cache, prompt, look)), cache.memory_report()
        history = [list(each) for each in report.history]
        found[name] = {"kl": kl, "share": max(taken) / most, "history": history, "bits": report.bits}
        if name == "unknown":
            found["seconds"] = _seconds(model, cache, ids[:, -1:])
            size = report.total_bytes
    exact = ExactCache(model, max_bytes=most, basis=basis)
    exact.exact = whole
    exact.declare_prompt(prompt)
    found["exact"] = divergences(fed(exact, prompt))
    once, reports = CompressedCache(model, total_bytes=size, basis=basis), []
    (late,) = fed(once, ids.shape[1] - WINDOW, lambda: reports.append(once.memory_report()))
    bits, total = reports[0].bits, reports[0].total_bytes  # before the first of the last tokens
    found["at_once"] = {"kl": divergence(dense[-1], late), "bits": bits, "share": total / size}
    return found


def _seconds(model: PreTrainedModel, cache: CompressedCache, token: Tensor) -> list[float]:
    """Return the seconds of a plain step, the median, and those of coding everything again."""
    steps = []
    for _ in range(STEPS):
        began = time.perf_counter()
        model(token, past_key_values=cache)
        steps.append(time.perf_counter() - began)
    began = time.perf_counter()
    for layer in cache.layers:
        if isinstance(layer, PrunedKeyLayer) and isinstance(layer.compressed, CodedTokens):
            row = layer.compressed.rows[0]
            row.again(layer.plan, layer.compressed.bases, STEP_DOWN * row.bits[0])
    return [statistics.median(steps), time.perf_counter() - began]


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("max_bytes", __doc__, models=True)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=6656, help="tokens after it (default %(default)s)")
    parser.add_argument("--limit", type=int, default=LIMIT, help="dense tokens of as many bytes (default %(default)s)")
    parser.add_argument("--texts", type=int, default=1, help="number of texts (default %(default)s)")
    args = parser.parse_args(given)
    if args.tokens < WINDOW or args.tokens % WINDOW:
        raise SystemExit(f"--tokens {args.tokens}: give a multiple of {WINDOW}")

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, label: str) -> tuple[Any, Any]:
        context = model.config.max_position_embeddings
        if not 0 < args.prompt <= context - args.tokens:
            raise SystemExit(f"--prompt {args.prompt} --tokens {args.tokens}: the context of {label} has {context}")
        texts = of_texts((args.text or books())[: args.texts], tokenizer, args.prompt + args.tokens)
        file = args.runs / label / "basis.safetensors"
        basis, _ = calibrated(model, tokenizer, file, source)
        about = {"weights": digest(*model.parameters()), "basis": digest(*basis.key_rates.values())}
        found, origins = [], {}
        with attention_implementation(model, "grace_sdpa"), progress_bar(None, RUNS * len(texts)) as show:
            for number, (name, ids) in enumerate(texts):
                done = iter(range(RUNS * number + 1, RUNS * len(texts) + 1))

                def grown(ids: Tensor = ids, name: str = name, done: Iterator[int] = done) -> dict[str, Any]:
                    advance = lambda: show(name, next(done))  # noqa: E731
                    return {"rows": measure_limit(model, ids, file, args.prompt, args.limit, advance)}

                record = recorded(
                    args.runs / label / f"text_{number}.json",
                    {**about, "prompt": args.prompt, "limit": args.limit, "ids": digest(ids)},
                    source,
                    grown,
                )
                found.append({"name": name, **record["rows"]})
                origins[name] = origin_of(source, record)
        return {"texts": found}, origins

    publish_models(args, page, {"prompt": args.prompt, "tokens": args.tokens, "limit": args.limit}, measured)


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, list[dict[str, Any]]] = {label: of["texts"] for label, of in value["models"].items()}
    every = [one for texts in models.values() for one in texts]
    ratios = [one["unknown"]["kl"][-1] / one["at_once"]["kl"] for one in every]
    beside = [one["unknown"]["kl"][-1] / one["known"]["kl"][-1] for one in every]
    times = [one["seconds"][1] / one["seconds"][0] for one in every]
    often = max(len(one["unknown"]["history"]) - 1 for one in every)
    share = max(one[name]["share"] for one in every for name in ("unknown", "known"))
    rows = []
    for label, texts in models.items():
        for one in texts:
            own, known, once, (step, again) = one["unknown"], one["known"], one["at_once"], one["seconds"]
            kl = own["kl"][0], own["kl"][-1], one["exact"][-1], known["kl"][-1], once["kl"]
            bits = own["bits"], known["bits"], once["bits"]
            rows.append(
                [
                    *(label, one["name"]),
                    *(f"{each:.5f}" for each in kl),
                    " / ".join(f"{each:.2f}" for each in bits),
                    str(len(own["history"]) - 1),
                    f"{1000 * step:.0f} ms / {again / step:.0f} ×",
                ]
            )
    tokens = value["prompt"] + value["tokens"]
    return Page(
        title="A limit of bytes while a text grows",
        picture="KL divergence from the dense cache's next-token distributions by tokens after the prompt, on a "
        "logarithmic scale, a panel per model: coded again as tokens come, with bits chosen once, of coding alone, and "
        "after one prompt in as many bytes",
        headline=f"{tokens:,} tokens in the bytes of {value['limit']}: never more, and coding again costs "
        f"{_span(beside)} times the KL of bits that were chosen once",
        draw=lambda figure: _draw(figure, models, value["prompt"]),
        asked=f"What becomes of a cache with `max_bytes=` that is worth {value['limit']} dense tokens while "
        f"{value['tokens']:,} tokens come after a prompt of {value['prompt']:,}?",
        found=f"It takes at most {share:.1%} of the limit after any step. Its KL over the last {WINDOW} tokens is "
        f"{_span(beside)} times that of a cache that knows how many tokens will come, and {_span(ratios)} times that "
        f"of one prompt in as many bytes (our aim: {AIMS[0]}). All is coded again {often} times at most, which takes "
        f"{_span(times, 0)} times as long as a step (our aim: {AIMS[1]}).",
        sure=f"Measured on {len(models)} small model{'s' * (len(models) > 1)} in float32 and {len(every)} "
        f"text{'s' * (len(every) > 1)}, whose own tokens are fed.",
        tables=table(
            [
                *("model", "text", f"KL, first {WINDOW}", f"last {WINDOW}", "of coding alone", "tokens known"),
                *("one prompt", "bits: coded again / known / one prompt", "times coded again", "a step / coding again"),
            ],
            rows,
            2,
        ),
        details=[
            (
                "How it is measured",
                [
                    f"Tokens are fed in steps of {STEP}; after each, all bytes that the cache keeps alive are counted. "
                    "*Of coding alone* is the KL of a cache that codes the dense cache's keys and values; *one prompt* "
                    f"has all tokens but the last {WINDOW} as its prompt, and as many bytes as the cache that was "
                    "coded again. In float32 the tail of up to 96 dense tokens takes twice the share that it has in 16 "
                    "bits."
                ],
            ),
            (
                "When it was coded again",
                [
                    f"{label}, {one['name']}: "
                    + ", ".join(f"{bits:.2f} bits at {at:,} tokens" for at, bits, _ in one["unknown"]["history"])
                    + "."
                    for label, texts in models.items()
                    for one in texts
                ],
            ),
        ],
    )


def _span(numbers: Sequence[float], digits: int = 2) -> str:
    low, high = (f"{pick(numbers):.{digits}f}" for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _draw(figure: Figure, models: Mapping[str, list[dict[str, Any]]], prompt: int) -> None:
    figure.set_size_inches(max(8, 4 * len(models)), 4.2)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (label, texts) in zip(panels, models.items(), strict=True):
        places = [(number + 0.5) * WINDOW for number in range(len(texts[0]["exact"]))]
        drawn = (
            ([one["unknown"]["kl"] for one in texts], "coded again as tokens come", BLUE, "-"),
            ([one["exact"] for one in texts], "of coding alone", BLUE, "--"),
            ([one["known"]["kl"] for one in texts], "bits chosen once", GREEN, "-"),
        )
        for lines, what, colour, style in drawn:
            means = [statistics.fmean(each) for each in zip(*lines, strict=True)]
            axes.plot(places, means, color=colour, linestyle=style, linewidth=2, label=what)
        once = statistics.fmean(one["at_once"]["kl"] for one in texts)
        axes.plot(places[-1:], [once], "o", color=BLACK, label="one prompt in as many bytes")
        axes.set_yscale("log")
        axes.set_title(label)
        axes.set_xlabel(f"tokens after a prompt of {prompt:,}")
    panels[0].set_ylabel(f"KL, nats (means of {WINDOW})")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


if __name__ == "__main__":
    main()
