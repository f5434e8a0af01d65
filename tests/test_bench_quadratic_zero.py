"""The benchmark of `allocate(interaction=W)`: its quantiser, its basis, and a page from small random heads."""

import numpy as np
import pytest
import torch

from bench import quadratic_zero as bench

HEADS, TOKENS, D = 3, 60, 6


def text(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """What `moments` gives of a text, of small heads whose channels are correlated."""
    rng = np.random.default_rng(seed)
    mix = torch.from_numpy(rng.normal(size=(HEADS, D, D)))
    keys = torch.from_numpy(rng.normal(size=(HEADS, TOKENS, D))) @ mix
    queries = {name: torch.from_numpy(rng.normal(size=(HEADS, 40, D))) @ mix for name in ("32", "all", "later")}
    centred = keys - keys.mean(1, keepdim=True)
    return {name: q.mT @ q for name, q in queries.items()}, centred.mT @ centred, keys.float()


@pytest.mark.slow
def test_the_quantiser_is_lloyd_and_maxs():
    assert bench.lloyd_max(1).tolist() == pytest.approx([-0.7979, 0.7979], abs=1e-4)
    assert bench.lloyd_max(2).tolist() == pytest.approx([-1.5104, -0.4528, 0.4528, 1.5104], abs=1e-4)  # Max (1960)
    keys = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 4000, 2))).float()
    errors = bench.quantiser_errors(keys, [bench.lloyd_max(bits) for bits in (1, 2, 3)])
    assert errors.square().mean((1, 2, 3)).tolist() == pytest.approx([0.3634, 0.1175, 0.0345], rel=0.05)


def test_the_joint_basis_makes_both_moments_diagonal_and_keeps_products():
    grams, of_keys, _ = text(1)
    forth, back = bench.joint_basis(grams["all"], of_keys)
    identity = forth @ back.mT
    torch.testing.assert_close(identity, torch.eye(D, dtype=torch.float64).expand_as(identity), atol=1e-8, rtol=0)
    turned = forth.mT @ of_keys @ forth
    off = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    assert float(off.abs().max()) < 1e-8 * float(turned.abs().max())


@pytest.mark.slow
def test_a_page_from_small_heads(monkeypatch):
    monkeypatch.setattr(bench, "BUDGETS", (1.0, 2.0))
    rows = bench.rows_of(bench.measure([text(seed) for seed in (1, 2)]))
    assert len(rows) == len(bench.SETTINGS) * len(bench.OBSERVED) * 2
    assert all(row["loss"]["ratio"] <= 1 + 1e-9 for row in rows)  # what is minimised can only get smaller
    assert min(row["loss"]["ratio"] for row in rows) < 0.999
    own = [row for row in rows if row["setting"] == "own"]
    assert all(row["later"]["ratio"] == pytest.approx(1, abs=1e-3) for row in own)  # W is diagonal there
    page = bench.page({"rows": rows, "heads": HEADS, "model": "small", "texts": 2})
    assert f"of {len(rows)} rows" in page.found
    assert sum(line.count("<small>") == len(bench.COUNTED) for line in page.tables) == len(rows)
