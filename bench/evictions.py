"""Which tokens to keep: ``python -m bench.evictions`` compares `GraphEviction` with the others, at equal budgets.

A passage's prompt is read once. Each eviction keeps a half, a quarter and a tenth of its tokens in every layer, the
last 32 among them; then the next tokens of the text are fed, and the next-token distributions compared with the dense
cache's. Passages are two of each source of `bench.passages`, all from its second half; settings were chosen on
passages from the first halves. The time to choose tokens is compared with that of reading the prompt.

Each passage of a model has its own file in ``--runs``; those of other texts, weights, settings or commits are measured
again. Writes docs/results/evictions.{json,md,png}. If they are missing, models and texts are downloaded
(`bench.material`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.caches import Continuation
from bench.evictions_page import FAST, H2O_ALL, H2O_LAST, OURS, page
from bench.material import books
from bench.passages import later_passages, measure_passages, passage_parser
from bench.provenance import digest, origin_of, recorded
from bench.several import publish_models
from grace_opt.hf import (
    H2O,
    GraphEviction,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    attention_implementation,
    capture_attention,
)
from grace_opt.hf.evict.eviction import TokenEviction
from grace_opt.hf.evict.kept_tokens import kept_tokens

#: Shares of the prompt's tokens that are kept, and number of last tokens that stay in any case.
SHARES, RECENT = (0.5, 0.25, 0.1), 32
EVICTIONS: Mapping[str, Callable[[float], TokenEviction]] = {
    OURS: lambda share: GraphEviction(budget=share),
    FAST: lambda share: GraphEviction(budget=share, observed=32, stride=128, averages=2, block=None),
    "SnapKV": lambda share: SnapKV(budget=share),
    "PyramidKV": lambda share: PyramidKV(budget=share),
    H2O_LAST: lambda share: H2O(budget=share),
    H2O_ALL: lambda share: H2O(budget=share, window=None, observed=None),
    "StreamingLLM": lambda share: StreamingLLM(budget=share),
}
#: Times that timings are repeated: the least counts.
TIMES = 3


def measure(model: PreTrainedModel, ids: Tensor, prompt: int) -> dict[str, dict[str, float]]:
    """Return the KL divergence of each eviction at each share, in nats per token.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    ids : Tensor
        ``(1, n)``.
    prompt : int
        Number of tokens that are read before.
    """
    text = Continuation(model, ids, prompt)
    return {
        name: {f"{share:g}": text.kl(ratio=0.0, recent_window=RECENT, evict=make(share)) for share in SHARES}
        for name, make in EVICTIONS.items()
    }


@torch.no_grad()
def timed(model: PreTrainedModel, ids: Tensor) -> dict[str, float]:
    """Return the seconds of reading a prompt, ``prefill``, and of choosing a quarter of its tokens in all layers."""
    captured = capture_attention(model, ids)

    def prefill() -> None:
        model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

    def chosen(eviction: TokenEviction) -> None:
        for index, layer in captured.items():
            needed, length = eviction.queries_needed, layer.keys.shape[2]
            queries = layer.queries if needed is None else layer.queries[:, :, max(length - needed, 0) :]
            kept_tokens(
                eviction,
                queries,
                layer.keys,
                None,
                layer.scaling,
                index,
                len(captured),
                layer.softcap,
                values=layer.values,
                last=RECENT,
            )

    calls: dict[str, Callable[[], None]] = {"prefill": prefill}
    calls |= {name: lambda make=make: chosen(make(0.25)) for name, make in EVICTIONS.items()}  # type: ignore[misc]
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(TIMES):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def main(given: Sequence[str] | None = None) -> None:
    parser = passage_parser("evictions", __doc__, models=True)
    args = parser.parse_args(given)
    least = RECENT / min(SHARES)
    if args.prompt <= least or args.tokens < 2:
        raise SystemExit(
            f"--prompt {args.prompt} --tokens {args.tokens}: give prompts of more than {least:g} tokens, of which "
            f"{RECENT} stay, and at least 2 tokens after them"
        )

    evictions = [repr(make(share)) for make in EVICTIONS.values() for share in SHARES]
    settings = {"prompt": args.prompt, "tokens": args.tokens, "evictions": evictions}

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        texts = args.text or books()
        cut = later_passages(texts, tokenizer, args.prompt + args.tokens, seed=0, room=1)[: args.passages]
        common = {"weights": digest(*model.parameters()), **settings}
        with attention_implementation(model, "grace_sdpa"):
            passages, origins = measure_passages(
                cut, args.runs / name, common, source, lambda passage: measure(model, passage.ids, args.prompt)
            )
            record = recorded(
                args.runs / name / "seconds.json", common, source, lambda: {"seconds": timed(model, cut[0].ids)}
            )
        origins["seconds"] = origin_of(source, record)
        return {"passages": passages, "seconds": record["seconds"]}, origins

    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()
