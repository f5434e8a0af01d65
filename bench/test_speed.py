"""Times of what a change may slow down, by pytest-benchmark: ``make bench``.

When: while working on a solver or a store. `PYTEST_FLAGS="--benchmark-autosave"` keeps the times, and
`PYTEST_FLAGS="--benchmark-compare"` shows them beside the last ones that were kept. No page is made of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grace_opt import solve
from grace_opt.attention import interaction_matrix
from grace_opt.hf import CompressedCache, attention_implementation
from grace_opt.hf.models import load_pocket

TOKENS = 1024


@pytest.mark.parametrize("method", ["mies", "local_search", "tabu"])
@pytest.mark.benchmark(group="64 heads of 128 channels, half of them dropped")
def test_heads(benchmark: Any, method: str) -> None:
    draw = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(64, count, 128, generator=draw) for count in (32, 256))
    W = interaction_matrix(queries, keys)
    found = benchmark(solve, W, 64, method)
    assert found.mask.sum(-1).unique().tolist() == [64]


@pytest.mark.benchmark(group="a proof")
def test_proof(benchmark: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(1, count, 32, generator=draw) for count in (32, 256))
    found = benchmark(solve, interaction_matrix(queries, keys).double(), 16, "branch_and_bound")
    assert found.success.all()


@pytest.mark.parametrize("settings", [{"bits": 2.25, "basis": "none"}, {"quantize": "int4"}, {"ratio": 0.5}], ids=str)
@pytest.mark.benchmark(group=f"a step of the pocket model after {TOKENS:,} tokens")
def test_step(benchmark: Any, settings: dict[str, Any]) -> None:
    model, _ = load_pocket()
    ids = torch.arange(TOKENS)[None] % model.config.vocab_size
    with attention_implementation(model, "grace_sdpa"), torch.inference_mode():
        cache = CompressedCache(model, **settings)
        model(ids, past_key_values=cache)

        def step() -> Any:
            return model(ids[:, :1], past_key_values=cache).logits

        assert benchmark.pedantic(step, rounds=30, warmup_rounds=3).isfinite().all()
