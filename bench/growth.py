"""What a long generation costs: ``python -m bench.growth``.

A prompt of 1,024 tokens is read, then the next tokens of the text are fed in steps of 32, to a dense cache, to two with
``bits=2.25`` (with a trellis and without, ``trellis=False``), and to one with int4. Each step's next-token
distributions are compared with those of the dense cache; the last are also compared with those after a prompt that had
all tokens before them.

Later tokens read a compressed cache, so their own keys and values are not those of the dense one: the error is passed
on. To tell that from the error of coding, another run codes the dense cache's keys and values in place of its own.

Each text has its own file in ``--runs``; files of other texts, weights, settings or commits are measured again. Writes
docs/results/growth.{json,md,png}. If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and the texts are
downloaded (`bench.material`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.bits import REFERENCES
from bench.caches import SINKS, calibrated
from bench.caches import WINDOW as RECENT
from bench.material import books, open_model, read_text
from bench.passages import beginning, passage_at
from bench.provenance import digest, origin_of, recorded, refuse
from bench.report import BLACK, BLUE, GREEN, ORANGE, Page, parser_of, publish, table
from grace_opt._util.progress import progress_bar
from grace_opt.hf import CompressedCache, attention_implementation

#: Bits that are asked for, number of tokens of a prompt that is continued, of those fed in one step, and of those of
#: which a mean is reported.
BITS, PROMPT, STEP, WINDOW = 2.25, 1024, 32, 256
#: Windows to a line of the table.
LINE = 4
#: Runs of the model for each text.
RUNS = 8


class _ExactCache(CompressedCache):
    """Stores the keys and values that a dense cache has at the same places, whatever it is given."""

    exact: DynamicCache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any) -> tuple[Tensor, Tensor]:
        old, new = self.get_seq_length(layer_idx), key_states.shape[2]
        layer = self.exact.layers[layer_idx]
        keys, values = (each[:, :, old : old + new].clone() for each in (layer.keys, layer.values))
        return super().update(keys, values, layer_idx, *args)


@torch.no_grad()
def measure_growth(
    model: PreTrainedModel, ids: Tensor, settings: dict[str, Any], prompt: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Feed the tokens after a prompt in steps, to a dense and to a coded cache.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    ids : Tensor
        ``(1, n)``: the prompt and a whole number of `WINDOW` more.
    settings : dict
        Of the coded cache.
    prompt : int
        Number of tokens of the prompt.
    advance : callable
        Called after each of `RUNS` runs.

    Returns
    -------
    dict
        ``kl``, the mean of each window; ``bits``, the report's after each window; ``exact``, each window's KL if the
        dense cache's keys and values are coded; ``at_once``, the last window's KL if all tokens before it are the
        prompt; ``trellis``, a dict of these with a trellis; ``int4``, each window's KL of int4.
    """

    def fed(cache: Any, start: int) -> tuple[Tensor, list[float]]:
        model(ids[:, :start], past_key_values=cache, logits_to_keep=1)
        found, bits = [], []
        for first in range(start, ids.shape[1], STEP):
            logits = model(ids[:, first : first + STEP], past_key_values=cache).logits[0]
            found.append(logits.float().log_softmax(-1).half())  # all in float32 would take gigabytes
            if isinstance(cache, CompressedCache) and (first + STEP - start) % WINDOW == 0:
                bits.append(cache.memory_report().bits or 0.0)
        advance()
        return torch.cat(found), bits

    def divergence(dense: Tensor, other: Tensor) -> list[float]:
        pairs = zip(dense.split(WINDOW), other.split(WINDOW), strict=True)
        return [float((one.float().exp() * (one.float() - two.float())).sum(-1).mean()) for one, two in pairs]

    whole = DynamicCache(config=model.config)
    dense, _ = fed(whole, prompt)

    def coded(**changes: Any) -> dict[str, Any]:
        own = {**settings, **changes}
        grown, bits = fed(CompressedCache(model, **own), prompt)
        cache = _ExactCache(model, **own)
        cache.exact = whole
        exact, _ = fed(cache, prompt)
        late, _ = fed(CompressedCache(model, **own), ids.shape[1] - WINDOW)
        once = divergence(dense[-WINDOW:], late)[0]
        return {"kl": divergence(dense, grown), "bits": bits, "exact": divergence(dense, exact), "at_once": once}

    plain, joint = coded(trellis=False), coded()
    windows = {"recent_window": RECENT, "sink_tokens": SINKS, "tail_block": 64}
    grown, _ = fed(CompressedCache(model, **REFERENCES["int4"], **windows), prompt)
    return {**plain, "trellis": joint, "int4": divergence(dense, grown)}


def _ends(texts: list[dict[str, Any]]) -> tuple[float, ...]:
    """Means over texts: the KL of the first tokens, of the last, and of these after a prompt with all before them."""
    found = [(one["kl"][0], one["kl"][-1], one["at_once"]) for one in texts]
    return tuple(statistics.fmean(each) for each in zip(*found, strict=True))


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    texts, count = value["texts"], len(value["texts"][0]["kl"])
    joint = [one["trellis"] for one in texts]
    (first, last, once), ends = _ends(joint), _ends(texts)
    int4 = statistics.fmean(one["int4"][-1] for one in texts)
    bits = [each for one in texts for each in one["bits"]]
    rows = []
    for start in range(0, count, LINE):
        stop = min(start + LINE, count)
        every = [
            (joint, "kl"),
            (joint, "exact"),
            (texts, "kl"),
            (texts, "exact"),
            (texts, "int4"),
            (texts, "bits"),
        ]
        parts = [[x for one in those for x in one[name][start:stop]] for those, name in every]
        means = [f"{statistics.fmean(part):.4f}" for part in parts[:-1]]
        range_of_bits = f"{min(parts[-1]):.2f} to {max(parts[-1]):.2f}"
        rows.append([f"{start * WINDOW:,} to {stop * WINDOW:,}", *means, range_of_bits])
    own = [
        [
            one["name"] + ", `trellis=False`" * (own is one),
            *(f"{x:.4f}" for x in (own["kl"][0], own["kl"][-1], own["exact"][-1], one["int4"][-1], own["at_once"])),
        ]
        for one in texts
        for own in (one["trellis"], one)
    ]
    return Page(
        title="A long generation",
        picture="KL divergence from the dense cache's next-token distributions by tokens after the prompt, on a "
        "logarithmic scale: as generated, of coding alone, int4, and with all tokens as the prompt",
        headline=f"{count * WINDOW:,} tokens later, bits={BITS:g} has a KL of {last:.4f}, int4 one of {int4:.4f}",
        draw=lambda figure: _draw(figure, value),
        asked=f"What becomes of `bits={BITS:g}` while {count * WINDOW:,} tokens come after a prompt of "
        f"{value['prompt']:,}, on {value['model']}?",
        found=f"KL grows from {first:.4f} in the first {WINDOW} tokens to {last:.4f} in the last (int4: {int4:.4f}). "
        f"After a prompt that has all but these, it is {once:.4f}. With `trellis=False`: {ends[0]:.4f}, {ends[1]:.4f} "
        f"and {ends[2]:.4f}. With tokens that wait for their classes, the bits are {min(bits):.2f} to {max(bits):.2f}.",
        sure=f"This is one small model and {len(texts)} texts, whose own tokens are fed; errors are passed on as in a "
        "generation, but not by other tokens.",
        tables=[
            *table(
                [
                    "tokens after the prompt",
                    *("KL", "of coding alone", "KL, `trellis=False`", "of coding alone, `trellis=False`"),
                    *("int4", "bits"),
                ],
                rows,
            ),
            "",
            *table(
                ["text", f"KL, first {WINDOW}", f"last {WINDOW}", "of coding alone", "int4", "all but these as prompt"],
                own,
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"Tokens are fed in steps of {STEP}; int4 codes them in blocks of 64. Later tokens read the "
                    "compressed cache, so their own keys and values differ from the dense cache's, and errors are "
                    "passed on; *of coding alone* is the KL of a cache that codes the dense cache's keys and values. "
                    "Newer tokens wait in more bits, fewer than 1,024 of them, until the oldest are coded: *bits* "
                    "counts them."
                ],
            )
        ],
    )


def _draw(figure: Figure, value: dict[str, Any]) -> None:
    axes, texts = figure.subplots(), value["texts"]
    places = [(number + 0.5) * WINDOW for number in range(len(texts[0]["kl"]))]
    joint = [one["trellis"] for one in texts]
    drawn = (
        (joint, "kl", f"bits={BITS:g}", BLUE, "-"),
        (joint, "exact", "of coding alone", BLUE, "--"),
        (texts, "int4", "int4", ORANGE, "-"),
        (texts, "kl", f"bits={BITS:g}, trellis=False", GREEN, "-"),
    )
    for those, name, label, colour, line in drawn:
        for one in those:
            axes.plot(places, one[name], color=colour, linestyle=line, linewidth=0.6, alpha=0.5)
        means = [statistics.fmean(each) for each in zip(*(one[name] for one in those), strict=True)]
        axes.plot(places, means, color=colour, linestyle=line, linewidth=2, label=label)
    once = statistics.fmean(one["at_once"] for one in joint)
    axes.plot(places[-1:], [once], "o", color=BLACK, label=f"bits={BITS:g}, all as the prompt")
    axes.set_yscale("log")
    axes.set_xlabel(f"tokens after a prompt of {value['prompt']:,}")
    axes.set_ylabel(f"KL, nats (means of {WINDOW})")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))


def of_texts(paths: Sequence[Path], tokenizer: Any, tokens: int) -> list[tuple[str, Tensor]]:
    """Return the name of each text and some of its tokens; a text that is too short is an error."""
    found = []
    for path in paths:
        name, text = read_text(path)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        start = int(0.3 * ids.shape[1])  # not the table of contents
        if ids.shape[1] - start < tokens:
            raise SystemExit(f"{name!r} has {ids.shape[1] - start} tokens after its first 30 %, of {tokens} needed")
        found.append((name, passage_at(ids, start, tokens, beginning(tokenizer))))
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("growth", __doc__, model=True)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens after it (default %(default)s)")
    args = parser.parse_args(given)
    if args.tokens < WINDOW or args.tokens % WINDOW:
        raise SystemExit(f"--tokens {args.tokens}: give a multiple of {WINDOW}")

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        model, tokenizer, label = open_model(args)
        context = model.config.max_position_embeddings
        if not 0 < args.prompt <= context - args.tokens:
            raise SystemExit(f"--prompt {args.prompt} --tokens {args.tokens}: this model's context has {context}")
        texts = of_texts(args.text or books()[:2], tokenizer, args.prompt + args.tokens)
        file = args.runs / "basis.safetensors"
        basis, _ = calibrated(model, tokenizer, file, source)
        settings = {"bits": BITS, "recent_window": RECENT, "sink_tokens": SINKS}
        weights = digest(*model.parameters())
        common = {"weights": weights, "basis": digest(*basis.key_rates.values()), **settings, "prompt": args.prompt}
        found, sources = [], {}
        with attention_implementation(model, "grace_sdpa"), progress_bar(None, RUNS * len(texts)) as show:
            for number, (name, ids) in enumerate(texts):
                done = iter(range(RUNS * number + 1, RUNS * len(texts) + 1))

                def grown(ids: Tensor = ids, name: str = name, done: Iterator[int] = done) -> dict[str, Any]:
                    own = {**settings, "basis": file}
                    rows = measure_growth(model, ids, own, args.prompt, lambda: show(name, next(done)))
                    return {"rows": rows}

                record = recorded(args.runs / f"text_{number}.json", {**common, "ids": digest(ids)}, source, grown)
                found.append({"name": name, **record["rows"]})
                sources[name] = origin_of(source, record)
        return {
            "provenance": refuse(sources, args.allow_dirty),
            **{"model": label, "weights": weights, "prompt": args.prompt, "texts": found},
        }

    publish(args, page, measured)


if __name__ == "__main__":
    main()
