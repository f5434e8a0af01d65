"""Which tokens to keep: ``python -m bench.evictions`` compares `GraphEviction` with the others, at equal budgets.

A passage's prompt is read once. Each eviction keeps a half, a quarter and a tenth of its tokens in every layer, the
last 32 among them; then the next tokens of the text are fed, and the next-token distributions compared with the dense
cache's. Passages are two of each source of `bench.passages`, all from its second half; settings were chosen on
passages from the first halves. The time to choose tokens is compared with that of reading the prompt. For heads of a
short prompt W is formed, and f of greedy's choice is compared with a certified lower bound.

Each passage has its own file in ``--runs``; those of other texts, weights, settings or commits are measured again.
Writes docs/results/evictions.{json,md,png}. If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and the
texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.evictions_page import FAST, H2O_ALL, H2O_LAST, OURS, page
from bench.material import books, model_path, require_texts
from bench.passage_runs import measure_passages, passage_options
from bench.passages import later_passages
from bench.provenance import refuse, require_clean
from bench.real_model import digest
from bench.report import read_results, write_results
from grace_opt import Problem, solve
from grace_opt.attention.tokens import drop_order, formed
from grace_opt.bounds import certificate
from grace_opt.hf import (
    H2O,
    CompressedCache,
    GraphEviction,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    attention_implementation,
    capture_attention,
)
from grace_opt.hf.evict.eviction import TokenEviction
from grace_opt.hf.evict.kept_tokens import kept_tokens
from grace_opt.hf.models import disable_progress_bars, load_model
from grace_opt.hf.models.recording import CapturedAttention
from grace_opt.hf.tools.evaluation import compare_predictions, next_token_log_probs
from grace_opt.hf.tools.filling import dense_cache, filled
from grace_opt.objective import evaluate

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
#: Every how many layers f is bounded, and times that timings are repeated: the least counts.
EVERY, TIMES = 5, 3


@torch.no_grad()
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
    captured, following = capture_attention(model, ids[:, :prompt]), ids[:, prompt:]
    dense = next_token_log_probs(model, dense_cache(model, captured), following)
    found: dict[str, dict[str, float]] = {}
    for name, make in EVICTIONS.items():
        for share in SHARES:
            settings: dict[str, Any] = {"ratio": 0.0, "recent_window": RECENT, "evict": make(share)}
            cache = filled(CompressedCache(model, **settings), captured)
            log_probs = next_token_log_probs(model, cache, following)
            kl = compare_predictions(log_probs, dense, following[0, 1:]).kl
            found.setdefault(name, {})[f"{share:g}"] = kl
    return found


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


@torch.no_grad()
def bounded(captured: Mapping[int, CapturedAttention]) -> list[dict[str, Any]]:
    """Return f of several choices of the tokens to drop, and a certified bound, for a head of every few layers.

    f is the change of the observed queries' outputs to first order, as a share of their squares. Each row has the
    ``layer``, the ``share`` kept, and f of ``greedy``, of ``blocks``, of the ``diagonal`` alone, and the ``bound``.
    """
    found = []
    for index, layer in list(captured.items())[::EVERY]:
        for share in SHARES:
            eviction = GraphEviction(budget=share)
            graph = eviction.graph(
                *(part[0].double() for part in (layer.queries, layer.keys, layer.values)), layer.scaling, layer.softcap
            )
            first = type(graph)(*(part[:1] for part in graph[:3]), graph.weights)
            W, length = formed(first), layer.keys.shape[2]
            candidates = torch.arange(length) < length - eviction.recent(length)
            count = length - eviction.count(length)
            problem = Problem.of(W, count, protected=~candidates).flatten()
            greedy = solve(W, count, "mies", protected=~candidates, check=False).mask
            blocks = torch.zeros_like(greedy)
            blocks[0, drop_order(first, count, candidates, eviction.block, renormalise=False)[0, :count]] = True
            diagonal = solve(W, count, "think", protected=~candidates, check=False).mask
            size = float(first.outputs.square().sum(-1)[0] @ first.weights)
            row = {"layer": index, "share": share}
            for name, mask in (("greedy", greedy), ("blocks", blocks), ("diagonal", diagonal)):
                row[name] = float(evaluate(problem.W, mask)) / size
            found.append({**row, "bound": float(certificate(problem, "tight", incumbent=greedy)) / size})
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = passage_options("evictions", __doc__)
    parser.add_argument("--short", type=int, default=512, help="tokens of the prompt with bounds (default %(default)s)")
    args = parser.parse_args(given)
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    least = RECENT / min(SHARES)
    if args.prompt <= least or args.short <= least or args.tokens < 2:
        raise SystemExit(
            f"--prompt {args.prompt} --short {args.short} --tokens {args.tokens}: give prompts of more "
            f"than {least:g} tokens, of which {RECENT} stay, and at least 2 tokens after them"
        )
    require_texts(args.text)
    source = require_clean(args.allow_dirty)
    disable_progress_bars()
    where = model_path(args.model)
    model, tokenizer = load_model(where)
    texts = args.text or books()
    cut = later_passages(texts, tokenizer, args.prompt + args.tokens, seed=0, room=1)[: args.passages]
    weights = digest(*model.parameters())
    common = {"commit": source["commit"], "weights": weights, "prompt": args.prompt}
    common["settings"] = [repr(make(share)) for make in EVICTIONS.values() for share in SHARES]
    with attention_implementation(model, "grace_sdpa"):
        found, origins = measure_passages(
            cut, args.runs, common, source, lambda passage: measure(model, passage.ids, args.prompt)
        )
        seconds = timed(model, cut[0].ids[:, : args.prompt + args.tokens])
        bounds = bounded(capture_attention(model, cut[0].ids[:, : args.short]))
    value = {
        "provenance": refuse(origins, args.allow_dirty),
        **{"model": args.name or Path(where).stem, "weights": weights, "prompt": args.prompt, "tokens": args.tokens},
        **{
            "short": args.short,
            "evictions": common["settings"],
            "passages": found,
            "seconds": seconds,
            "bounds": bounds,
        },
    }
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty))


if __name__ == "__main__":
    main()
