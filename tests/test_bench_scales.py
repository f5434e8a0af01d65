"""What solvers claim of s W: how claims are judged, and how W is scaled for those that need it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import scales
from bench.solvers import evidence, peers
from bench.solvers.tables import share_proved

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        ({"status": "proved", "f": 5.0, "size": 2, "bound": 5.0}, "right"),
        ({"status": "proved", "f": 5.0, "size": 2, "bound": None}, "right"),
        ({"status": "limit", "f": 8.0, "size": 2, "bound": 4.0}, "open"),
        ({"status": "limit", "f": 8.0, "size": 2, "bound": 5.1}, "contradicted"),
        ({"status": "limit", "f": None, "size": None, "bound": 5.1}, "contradicted"),
        ({"status": "proved", "f": 8.0, "size": 2, "bound": 5.0}, "contradicted"),
        ({"status": "proved", "f": 1.0, "size": 1, "bound": 1.0}, "contradicted"),
        ({"status": "failed", "f": None, "size": None, "bound": None}, "nothing"),
        ({"status": "refused", "f": None, "size": None, "bound": None}, "nothing"),
    ],
)
def test_claims_are_judged_by_known_sets(row: dict[str, Any], verdict: str) -> None:
    """Planted claims about an optimum of 5."""
    assert scales.judged(row, 5.0, 2) == verdict


def test_a_set_is_summed_again_and_a_bound_is_put_in_units_of_w() -> None:
    W = np.array([[1.0, 0.5], [0.5, 2.0]])
    row = scales.row_of({"status": "proved", "indices": [0, 1], "claimed": 0.0, "bound": 3e-7}, W, 1e-7)
    assert (row["f"], row["size"], row["bound"]) == (4.0, 2, pytest.approx(3.0))
    assert scales.row_of({"status": "limit", "indices": None, "bound": -math.inf}, W, 1.0)["bound"] is None


@pytest.mark.parametrize("s", scales.SCALES)
def test_ours_answers_alike_at_every_scale(s: float) -> None:
    W = np.array([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]])
    assert scales.judged(scales.row_of(scales.call(scales.OURS, W * s, 2), W, s), 5.0, 2) == "right"


@given(st.integers(2, 12), st.integers(0, 2**32 - 1), st.floats(-300, 280), st.booleans())
def test_peers_get_ordinary_numbers(n: int, seed: int, decades: float, graph: bool) -> None:
    """Without a diagonal too: a graph times 1e-7 once went to the solvers as it was."""
    rng = np.random.default_rng(seed)
    W = -np.triu(rng.integers(0, 2, (n, n)), 1).astype(float) if graph else np.triu(rng.normal(size=(n, n)))
    W = (W + np.triu(W, 1).T) * 10.0**decades
    if not W.any():
        return
    A, scale = peers.in_scale(W, n // 2)
    assert np.allclose(A / scale, W, rtol=1e-14, atol=0)
    if graph:
        assert set(np.unique(A)) <= {0.0, -1.0}
    else:
        assert 500 < np.sort(np.abs(A.diagonal()))[: n // 2].sum() < 2000
        assert math.frexp(scale)[0] == 0.5
    with peers.as_given():
        given_W, one = peers.in_scale(W, n // 2)
        assert (given_W == W).all()
        assert one == 1


def test_a_planted_claim_is_marked_and_no_optimum() -> None:
    common = {"case": "a", "k": 2, "tolerance": 1e-9}
    rows = [
        common | {"method": "ours", "status": "proved", "objective": 5.0, "bound": 5.0},
        common | {"method": "liar", "status": "proved", "objective": 8.0, "bound": 4.0},
        common | {"method": "boaster", "status": "limit", "objective": 5.0, "bound": 6.0},
        common | {"method": "honest", "status": "limit", "objective": 8.0, "bound": 4.0},
    ]
    evidence.mark_contradicted(rows)
    assert [row["status"] for row in rows] == ["proved", "contradicted", "contradicted", "limit"]
    assert [evidence.said(row) for row in rows] == ["proved", "proved", "limit", "limit"]
    assert share_proved(rows) == "1/4, 2 contradicted"


def test_the_page_says_what_its_numbers_say() -> None:
    value = json.loads((ROOT / "docs" / "results" / "scales.json").read_text(encoding="utf-8"))
    made = scales.page(value)
    for each in value["rows"].values():
        for row in each:
            one = value["instances"][row["instance"]]
            assert row["verdict"] == scales.judged(row, row["best"], one["k"])
    assert all(row["verdict"] == "right" for row in value["rows"][scales.OURS])
    text = (ROOT / "docs" / "results" / "scales.md").read_text(encoding="utf-8")
    assert made.found in text
    assert all(line in text for line in made.tables)
