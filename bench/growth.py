"""What a long generation costs: ``python -m bench.growth``.

A prompt of 1,024 tokens is read, then the next tokens of the text are fed in steps of 32, to a dense cache, to two with
``bits=2.25`` (with a trellis and without, ``trellis=False``), and to one with int4. Each step's next-token
distributions are compared with those of the dense cache; the last are also compared with those after a prompt that had
all tokens before them.

Later tokens read a compressed cache, so their own keys and values are not those of the dense one: the error is passed
on. To tell that from the error of coding, another run codes the dense cache's keys and values in place of its own.

Each text of a model has its own file in ``--runs``; those of other texts, weights, settings or commits are measured
again. Writes docs/results/growth.{json,md,png}. If they are missing, models and texts are downloaded
(`bench.material`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.bits import REFERENCES
from bench.caches import SINKS, calibrated
from bench.caches import WINDOW as RECENT
from bench.growth_page import BITS, STEP, WINDOW, page
from bench.material import books, read_text
from bench.passages import beginning, passage_at
from bench.provenance import digest, origin_of, recorded
from bench.report import parser_of
from bench.several import publish_models
from grace_opt._util.progress import progress_bar
from grace_opt.hf import CompressedCache, attention_implementation

#: Number of tokens of a prompt that is continued.
PROMPT = 1024
#: Runs of the model for each text.
RUNS = 8


class ExactCache(CompressedCache):
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

    def fed(cache: Any, start: int) -> Iterator[Tensor]:
        model(ids[:, :start], past_key_values=cache, logits_to_keep=1)
        for window in ids[:, start:].split(WINDOW, 1):
            logits = (model(part, past_key_values=cache).logits[0] for part in window.split(STEP, 1))
            # All in float32 would take gigabytes.
            yield torch.cat([each.float().log_softmax(-1).half() for each in logits])
        advance()

    def divergences(found: Iterable[Tensor]) -> list[float]:
        return [divergence(one, two) for one, two in zip(dense, found, strict=True)]

    whole = DynamicCache()  # whose sliding layers keep every token
    dense = list(fed(whole, prompt))

    def coded(**changes: Any) -> dict[str, Any]:
        own, kl, bits = {**settings, **changes}, [], []
        cache = CompressedCache(model, **own)
        for one, two in zip(dense, fed(cache, prompt), strict=True):
            kl.append(divergence(one, two))
            bits.append(cache.memory_report().bits or 0.0)
        exact = ExactCache(model, **own)
        exact.exact = whole
        (late,) = fed(CompressedCache(model, **own), ids.shape[1] - WINDOW)
        return {
            "kl": kl,
            "bits": bits,
            "exact": divergences(fed(exact, prompt)),
            "at_once": divergence(dense[-1], late),
        }

    plain, joint = coded(trellis=False), coded()
    windows = {"recent_window": RECENT, "sink_tokens": SINKS, "tail_block": 64}
    int4 = CompressedCache(model, **REFERENCES["int4"], **windows)
    return {**plain, "trellis": joint, "int4": divergences(fed(int4, prompt))}


def divergence(one: Tensor, two: Tensor) -> float:
    """Return the mean KL divergence of the second from the first, of logarithms of probabilities."""
    return float((one.float().exp() * (one.float() - two.float())).sum(-1).mean())


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
    parser = parser_of("growth", __doc__, models=True)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens after it (default %(default)s)")
    args = parser.parse_args(given)
    if args.tokens < WINDOW or args.tokens % WINDOW:
        raise SystemExit(f"--tokens {args.tokens}: give a multiple of {WINDOW}")

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, label: str) -> tuple[Any, Any]:
        context = model.config.max_position_embeddings
        if not 0 < args.prompt <= context - args.tokens:
            raise SystemExit(f"--prompt {args.prompt} --tokens {args.tokens}: the context of {label} has {context}")
        texts = of_texts(args.text or books()[:2], tokenizer, args.prompt + args.tokens)
        file = args.runs / label / "basis.safetensors"
        basis, _ = calibrated(model, tokenizer, file, source)
        settings = {"bits": BITS, "recent_window": RECENT, "sink_tokens": SINKS}
        about = {"weights": digest(*model.parameters()), "basis": digest(*basis.key_rates.values())}
        found, origins = [], {}
        with attention_implementation(model, "grace_sdpa"), progress_bar(None, RUNS * len(texts)) as show:
            for number, (name, ids) in enumerate(texts):
                done = iter(range(RUNS * number + 1, RUNS * len(texts) + 1))

                def grown(ids: Tensor = ids, name: str = name, done: Iterator[int] = done) -> dict[str, Any]:
                    own = {**settings, "basis": file}
                    rows = measure_growth(model, ids, own, args.prompt, lambda: show(name, next(done)))
                    return {"rows": rows}

                record = recorded(
                    args.runs / label / f"text_{number}.json",
                    {**about, **settings, "prompt": args.prompt, "ids": digest(ids)},
                    source,
                    grown,
                )
                found.append({"name": name, **record["rows"]})
                origins[name] = origin_of(source, record)
        return {"texts": found}, origins

    publish_models(args, page, {"prompt": args.prompt, "tokens": args.tokens}, measured)


if __name__ == "__main__":
    main()
