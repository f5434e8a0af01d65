"""Which layers and heads keep more tokens: ``python -m bench.layer_budgets`` measures evictions with divided budgets.

The losses of KV heads are measured once, on the texts that ship with grace_opt (`calibrate.budgets`). Then several
evictions keep a half, a quarter and a tenth of a prompt's tokens: the same number in every head, as `LayerBudgets`
divides them among layers, and among layers and heads: the same bytes. The next tokens of the text are fed, and the
distributions of what follows are compared with the dense cache's. Steps are timed after one passage.
Passages are two of each source of `bench.passages`, all from its second half.

Each passage, and the calibration, has its own file in ``--runs``; those of other texts, weights, settings or commits
are measured again. Writes docs/results/layer_budgets.{json,md,png}. If they are missing, models and texts are
downloaded (`bench.material`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.caches import Continuation
from bench.evictions import RECENT, SHARES
from bench.evictions_page import FAST, H2O_ALL, OURS
from bench.layer_budgets_page import page
from bench.material import books
from bench.passages import later_passages, measure_passages, passage_parser
from bench.provenance import digest, origin_of, recorded
from bench.several import publish_models
from grace_opt.hf import (
    H2O,
    CompressedCache,
    GraphEviction,
    LayerBudgets,
    LayerLosses,
    SnapKV,
    attention_implementation,
    calibrate,
    capture_attention,
)
from grace_opt.hf.engine.filling import dense_cache, filled
from grace_opt.hf.evict.token_budget import Budget

#: Share of the tokens that is kept where steps are timed, and the number of steps.
STEP_SHARE, ROUNDS = 0.25, 25
DENSE = "dense"
EVICTIONS: Mapping[str, Callable[[float], Budget]] = {
    OURS: lambda share: GraphEviction(budget=share),
    FAST: lambda share: GraphEviction(budget=share, observed=32, stride=128, averages=2, block=None),
    "SnapKV": lambda share: SnapKV(budget=share),
    H2O_ALL: lambda share: H2O(budget=share, window=None, observed=None),
}


def measure(model: PreTrainedModel, ids: Tensor, prompt: int, losses: LayerLosses) -> dict[str, dict[str, list[float]]]:
    """Return the KL divergences of each eviction at each share, in nats per token.

    With equal budgets, with those of layers, and with those of heads.
    """
    text = Continuation(model, ids, prompt)
    found: dict[str, dict[str, list[float]]] = {}
    for name, make in EVICTIONS.items():
        for share in SHARES:
            divided = (LayerBudgets(make(share), each) for each in (losses.of_layers(), losses))
            found.setdefault(name, {})[f"{share:g}"] = [
                text.kl(ratio=0.0, recent_window=RECENT, evict=evict) for evict in (make(share), *divided)
            ]
    return found


@torch.inference_mode()
def steps(model: PreTrainedModel, ids: Tensor, prompt: int, losses: LayerLosses) -> dict[str, list[float]]:
    """Return the milliseconds of each round's decoding step after a prompt, the caches taking turns."""
    captured = capture_attention(model, ids[:, :prompt])
    evict = EVICTIONS["SnapKV"](STEP_SHARE)
    divided = {"layers": LayerBudgets(evict, losses.of_layers()), "layers and heads": LayerBudgets(evict, losses)}
    caches: dict[str, Any] = {DENSE: dense_cache(model, captured)}
    for name, each in {"equal": evict, **divided}.items():
        caches[name] = filled(CompressedCache(model, ratio=0.0, recent_window=RECENT, evict=each), captured)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(ROUNDS + 2):
        for name, cache in caches.items():
            began = time.perf_counter()
            model(ids[:, prompt + turn : prompt + turn + 1], past_key_values=cache)
            taken = time.perf_counter() - began
            if turn > 1:  # the first ones compile, and wake threads
                times[name].append(1000 * taken)
    return times


def calibrated(model: PreTrainedModel, tokenizer: Any, tokens: int) -> dict[str, Any]:
    """Return the ``losses`` of heads, and the ``seconds`` that measuring them took."""
    began = time.perf_counter()
    losses = calibrate.budgets(model, tokenizer, tokens=tokens)
    return {"seconds": time.perf_counter() - began, "losses": dataclasses.asdict(losses)}


def main(given: Sequence[str] | None = None) -> None:
    parser = passage_parser("layer_budgets", __doc__, models=True)
    parser.add_argument("--calibrated", type=int, default=1152, help="first tokens of each text of the calibration")
    args = parser.parse_args(given)
    if args.prompt <= RECENT / min(SHARES) or args.tokens < 2:
        raise SystemExit(
            f"--prompt {args.prompt} --tokens {args.tokens}: give prompts of more than "
            f"{RECENT / min(SHARES):g} tokens, of which {RECENT} stay, and at least 2 tokens after them"
        )

    evictions = [repr(make(share)) for make in EVICTIONS.values() for share in SHARES]
    settings = {"prompt": args.prompt, "tokens": args.tokens, "calibrated": args.calibrated, "evictions": evictions}

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        texts, runs, weights = args.text or books(), args.runs / name, digest(*model.parameters())
        cut = later_passages(texts, tokenizer, args.prompt + args.tokens, seed=0, room=1)[: args.passages]
        record = recorded(
            runs / "losses.json",
            {"weights": weights, "tokens": args.calibrated},
            source,
            lambda: calibrated(model, tokenizer, args.calibrated),
        )
        losses = LayerLosses(**record["losses"])
        common = {"weights": weights, "losses": repr(losses.losses), **settings}
        with attention_implementation(model, "grace_sdpa"):
            timed = recorded(
                runs / "steps.json", common, source, lambda: {"ms": steps(model, cut[0].ids, args.prompt, losses)}
            )
            found, origins = measure_passages(
                cut, runs, common, source, lambda passage: measure(model, passage.ids, args.prompt, losses)
            )
        origins |= {what: origin_of(source, one) for what, one in (("losses", record), ("steps", timed))}
        divided = {}
        for share in SHARES:
            budgets = LayerBudgets(GraphEviction(budget=share), losses)
            divided[f"{share:g}"] = [
                budgets.tokens_of_heads(layer, args.prompt, least=RECENT + 1) for layer in losses.layers
            ]
        return {
            **{"passages": found, "calibration_seconds": record["seconds"], "layers": losses.layers},
            **{"losses": losses.losses, "shares": losses.shares, "divided": divided, "steps": timed["ms"]},
        }, origins

    publish_models(args, page, settings, measured)


if __name__ == "__main__":
    main()
