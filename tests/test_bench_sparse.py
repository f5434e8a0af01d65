"""The benchmark of sparse graphs, in small: its graphs, its peers, its processes and its page."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from bench import sparse
from bench.sparse_peers import KINDS, PEERS, dwave, highest, peel, peel_igraph, plain, uniform, weight_of
from grace_opt import solve
from tests import oracle


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_symmetric_and_of_the_stated_degree(kind: str) -> None:
    W = KINDS[kind](2000, np.random.default_rng(0))
    assert (W != W.T).nnz == 0
    assert not W.diagonal().any()
    assert -0.5 <= W.data.min() < W.data.max() <= 0
    assert 8 < W.nnz / 2000 < 14


def test_a_peel_takes_the_highest_cores_and_then_the_heaviest() -> None:
    W = uniform(60, np.random.default_rng(2))
    core, k = nx.core_number(nx.from_scipy_sparse_array(W)), 25
    chosen, weight = peel(W, k, 0.0), -W.sum(axis=1)
    assert len(set(chosen.tolist())) == k
    left = [v for v in range(60) if v not in chosen]
    assert min((core[v], weight[v]) for v in chosen) > max((core[v], weight[v]) for v in left)
    assert highest(W, np.zeros(60), 1).tolist() == [int(weight.argmax())]


@pytest.mark.slow
def test_plain_annealing_is_annealing() -> None:
    W = uniform(300, np.random.default_rng(3))
    chosen = plain(W, 30, 0.2)
    assert len(set(chosen.tolist())) == 30
    assert weight_of(W, chosen) == pytest.approx(-oracle.objective(W.toarray(), chosen.tolist()))
    assert weight_of(W, chosen) >= -float(solve(W, 30).objective)


@pytest.mark.parametrize(("module", "peer"), [("igraph", peel_igraph), ("dwave.samplers", dwave)])
def test_peers_that_are_installed(module: str, peer: object) -> None:
    try:
        pytest.importorskip(module)
    except ModuleNotFoundError:  # its parent is missing
        pytest.skip(f"{module} is not installed")
    W = uniform(100, np.random.default_rng(4))
    chosen = peer(W, 10, 0.1)  # type: ignore[operator]
    assert len(set(chosen.tolist())) == 10
    if peer is peel_igraph:
        assert sorted(chosen.tolist()) == sorted(peel(W, 10, 0.0).tolist())


@pytest.mark.slow
def test_a_small_run_and_its_page(tmp_path: Path) -> None:
    out, small = tmp_path / "sparse", ["--vertices", "200", "--largest", "500", "--seconds", "0.04", "--long", "0.1"]
    sparse.main([*small, "--out", str(out), "--allow-dirty"])
    text = out.with_suffix(".md").read_text()
    assert "With 500 vertices and 4,8" in text
    for kind in KINDS:
        assert f"| {kind} | 200 |" in text
    assert all(name in text for name in PEERS)  # in a table, or as not installed
    sparse.main(["--report-only", "--out", str(out), "--allow-dirty"])
    assert out.with_suffix(".md").read_text() == text


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse.sys, "executable", "false")
    with pytest.raises(SystemExit, match="the process of n = 40 failed"):
        sparse.measure_sizes([(40, 100)], 1.0)
