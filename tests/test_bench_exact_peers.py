"""Other people's exact solvers in the benchmark: right where installed, and what their free editions refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import grace_opt
from bench import peers as page_of_peers
from bench.report import MARK
from bench.solvers import checks, editions, evidence, peers, report, run, suites, tables
from bench.solvers.editions import Found, OverLimitError
from bench.solvers.evidence import Evidence
from grace_opt.errors import OptionError
from grace_opt.sweep import Cell, Record, write_cell
from grace_opt.testing import KINDS, instance

SOURCE = {
    "date": "2026-01-01",
    "command": "python -m bench.peers",
    "commit": "abc1234",
    "cpu": "a CPU",
    "cores": 2,
    "python": "3.11",
    **dict.fromkeys(("numpy", "scipy", "torch", "numba", "transformers"), "1"),
}
LIMITED = {"gurobi": 200, "cplex": 1000, "copt": 2000, "xpress": 199}


def installed(method: str) -> None:
    if why := suites.missing(method):
        pytest.skip(why)


# The solvers, where they are installed


@pytest.mark.slow
@pytest.mark.parametrize("method", suites.EXACT)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_peers_prove_what_the_enumeration_finds(method: str, kind: str) -> None:
    installed(method)
    if method in ("cpsat", "highs") and suites.missing("cpsat") is None and suites.missing("highs") is None:
        pytest.skip("ortools and highspy cannot share a process")
    for seed, (n, k) in enumerate([(3, 1), (7, 3), (9, 5), (10, 9)]):
        W = instance(kind, n, seed)
        W = W.astype(np.int64) if (np.rint(W) == W).all() else W  # as the suites have them: a proof is within one step
        best = float(grace_opt.solve(W, k, "exhaustive").objective)
        answer = checks.check(W, k, peers.PEERS[method][0](W, k, 30.0, seed))
        assert answer["status"] == "proved", answer
        assert abs(answer["objective"] - best) <= answer["tolerance"]
        assert answer["bound"] is None or answer["bound"] <= best + answer["tolerance"]
        assert answer["time"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("method", LIMITED)
def test_a_free_edition_refuses_more_than_it_takes_and_says_so(method: str) -> None:
    installed(method)
    assert method in peers.FREE_LIMITS
    n = LIMITED[method] + 1
    answer = peers.PEERS[method][0](np.eye(n), 1, 1.0, 0)
    assert (answer["status"], "indices" in answer) == ("refused", False)
    assert answer["message"]


# What becomes of their answers


def test_an_edition_solves_w_in_another_scale_and_answers_in_ours() -> None:
    given: dict[str, Any] = {}

    def solve(A: Any, k: int, limit: float, seed: int, gap: float) -> Found:
        given.update(A=A, k=k, limit=limit, seed=seed, gap=gap)
        return Found(True, np.array([0.999, 1e-9, 1.0]), float(A[np.ix_([0, 2], [0, 2])].sum()), 0.5, 7)

    W = 1e-9 * np.array([[1.5, 2, 0], [2, 9, 4], [0, 4, 1]])
    answer = peers._edition(solve)(W, 2, 3.0, 4)
    A, _ = peers.in_scale(W, 2)
    assert np.array_equal(given["A"], A)
    assert (given["k"], given["limit"], given["seed"]) == (2, 3.0, 4)
    assert given["gap"] == peers.absolute_gap(A, 2)
    assert (answer["status"], answer["indices"], answer["nodes"], answer["time"]) == ("proved", [0, 2], 7, 0.5)
    assert answer["claimed"] == pytest.approx(2.5e-9, rel=1e-14)
    assert answer["bound"] == pytest.approx(2.5e-9, rel=1e-14)


def test_an_edition_may_have_no_bound_no_answer_or_no_licence() -> None:
    nothing = peers._edition(lambda A, k, limit, seed, gap: Found(False, None, -1e40, 1.0, 0))(np.eye(2), 1, 1.0, 0)
    assert (nothing["status"], nothing["bound"], nothing["message"]) == ("limit", None, "no solution found")

    def refuse(*given: Any) -> Found:
        raise OverLimitError("too many columns")

    assert peers._edition(refuse)(np.eye(2), 1, 1.0, 0) == {"status": "refused", "message": "too many columns"}


def test_every_edition_is_a_peer_with_a_stated_limit() -> None:
    for method in ("cplex", "copt", "xpress"):
        assert method in peers.PEERS
        assert method in suites.QUADRATIC
        assert method in peers.FREE_LIMITS
        assert hasattr(editions, method)
        assert method in tables.NAMES


# The tables


def row(method: str, case: str = "heads.npz#0", **more: Any) -> dict[str, Any]:
    found = {
        "suite": "beside",
        "method": method,
        "case": case,
        "k": 4,
        "n": 8,
        "limit": 10.0,
        "data": "heads of a test",
    }
    found |= {
        "status": "proved",
        "objective": 5.0,
        "bound": 5.0,
        "tolerance": 1e-6,
        "wall": 2.0,
        "cpu": 1.9,
        "time": 1.5,
    }
    return {**found, "version": f"{method} 1", "seed": 0, **more}


def test_cells_over_a_licences_limit_say_so() -> None:
    over = row("gurobi", status="refused", objective=None, bound=None, time=None)
    assert tables.share_proved([]) is None
    assert tables.share_proved([over, over]) == "over the free licence's limit"
    open_ = row("gurobi", status="limit")
    assert tables.share_proved([row("gurobi"), open_, over]) == "1/2, 1 over the free licence's limit"
    rows = [row(method, suite="synthetic", case="attention:8:0") for method in ("branch_and_bound", "scip")]
    (line,) = tables.proofs(Evidence([*rows, {**over, "suite": "synthetic"}], {}, {}))
    assert line["Gurobi: proved"] == tables.OVER_LIMIT
    assert line["SCIP: proved"] == "1/1"


def test_samplers_are_judged_by_the_best_that_anybody_found() -> None:
    """Where nothing is proved, as with 500 vertices, they were judged by nothing."""
    best = row("portfolio", "dispersion:8:0", suite="samplers", status="feasible", objective=-10.0)
    tabu = {**best, "method": "dwave_tabu", "objective": -9.0}
    tabu |= {f"wrong size at penalty {p:g}": 0.5 for p in peers.PENALTIES}
    tabu |= {"best at penalty 1": math.inf, "best at penalty 2": -9.0, "best at penalty 5": -8.0}
    lines = {line["method"]: line for line in tables.sampled(Evidence([best, tabu], {}, {}))}
    assert lines["portfolio"]["best of all"] == "1/1"
    assert lines["dwave_tabu"]["best of all"] == "0/1"
    assert lines["dwave_tabu"]["instances"] == "dispersion, n = 8"
    assert lines["dwave_tabu"]["worst above %"] == pytest.approx(10)
    assert lines["dwave_tabu"]["worst above at 1 %"] == math.inf
    assert lines["dwave_tabu"]["worst above at 5 %"] == pytest.approx(20)
    assert lines["dwave_tabu"]["wrong size at 2 %"] == 50


def test_a_penalty_keeps_k_vertices_where_the_diagonal_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unit was the mean diagonal: of dispersion 0, so that every sample had another size."""
    pytest.importorskip("dimod")
    from grace_opt.instances import generators

    installed("dwave_tabu")
    W = np.asarray(generators.dispersion(40, 0).W)
    answer = peers.PEERS["dwave_tabu"][0](W, 8, 1.0, 0)
    assert answer["status"] == "feasible"
    assert len(answer["indices"]) == 8


# The page of bench.peers


def records(share: float = 0.95) -> list[Record]:
    """Two heads and a k-cluster instance: ours proves all, CPLEX both heads, SCIP one, and COPT is over its limit."""
    made = []
    for at, case in enumerate(("heads.npz#0", "heads.npz#1", "k_cluster:8:0.5:0")):
        for method in ("branch_and_bound", "cplex", "scip", "copt"):
            found = row(method, case, cpu=2.0 * share if method != "branch_and_bound" else None)
            if method == "copt":
                found |= {"status": "refused", "objective": None, "bound": None, "time": None}
            elif method != "branch_and_bound" and (at == 2 or (method == "scip" and at == 1)):
                found |= {"status": "limit", "bound": 4.0, "time": 10.0}
            config = {"suite": "beside", "instance": case, "n": 8, "ks": (4,), "data": found["data"], "method": method}
            config |= {"seed": 0, "limit": 10.0, "repeats": 1, "target": None}
            kept = {name: found[name] for name in found if name not in {*config, "suite"}}
            made.append(Record(Cell("beside", config), [kept], 0.1, SOURCE))
    return made


def test_the_page_says_who_proved_what(tmp_path: Path) -> None:
    for record in records():
        write_cell(tmp_path / "runs", record)
    kept, source = report.of_one_commit(tmp_path / "runs", False)
    value = {"provenance": source, **page_of_peers.content(kept)}
    lines = {line["solver"]: line for line in value["exact"]}
    assert list(lines) == ["ours", "CPLEX", "COPT", "SCIP"]
    assert [lines[name]["heads: proved"] for name in lines] == ["2/2", "2/2", tables.OVER_LIMIT, "1/2"]
    assert lines["CPLEX"]["k-cluster: worst gap %"] == pytest.approx(20)
    assert lines["CPLEX"]["free edition takes"] == "1,000 variables"
    assert value["missing"] == ["Gurobi", "Xpress", "CP-SAT", "HiGHS"]
    pytest.importorskip("matplotlib")
    text = page_of_peers.write_results(tmp_path / "peers", report.encode(value, "report"), page_of_peers.page)
    assert (
        "Of the heads, ours proved 2 of 2 (median 2 s), and CPLEX, the best of the others, 2 of 2 (median 1.5 s)"
        in text
    )
    assert "of the k-cluster instances, ours proved 1 of 1" in text
    assert "the others got 95 % of a core" in text
    assert "measure again" not in text
    assert "not installed: Gurobi, Xpress, CP-SAT, HiGHS" in text
    assert text.splitlines()[-1].startswith("Made by `python -m bench.peers`")
    before = (tmp_path / "peers.json").read_bytes()
    assert page_of_peers.main(["--report-only", "--out", str(tmp_path / "peers")]) == 0
    assert (tmp_path / "peers.md").read_text() == text
    assert (tmp_path / "peers.json").read_bytes() == before


def test_a_busy_machine_is_told() -> None:
    value = {"provenance": SOURCE, **page_of_peers.content(records(share=0.13))}
    assert "got 13 % of a core: the machine was busy, so measure again" in page_of_peers.page(value).sure


def test_a_page_of_changed_files_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page_of_peers, "require_clean", lambda allow: (_ for _ in ()).throw(SystemExit("changed")))
    with pytest.raises(SystemExit, match="changed"):
        page_of_peers.main(["--out", str(tmp_path / "peers"), "--runs", str(tmp_path)])
    for record in records():
        write_cell(tmp_path / "runs", Record(record.cell, record.rows, 0.1, {**SOURCE, "commit": "abc1234+"}))
    with pytest.raises(SystemExit, match="differ from commit"):
        report.of_one_commit(tmp_path / "runs", False)
    kept, source = report.of_one_commit(tmp_path / "runs", True)
    assert page_of_peers.content(kept)["exact"]
    pytest.importorskip("matplotlib")
    value = report.encode({"provenance": source, **page_of_peers.content(kept)}, "report")
    assert MARK in page_of_peers.write_results(tmp_path / "peers", value, page_of_peers.page, allow_dirty=True)
    assert json.loads((tmp_path / "peers.json").read_text())["limit"] == 10.0


def test_the_suite_of_the_page_gives_every_solver_the_same_cases(tmp_path: Path) -> None:
    np.savez(tmp_path / "heads.npz", W=np.stack([instance("attention", 10, s) for s in range(12)]), source="a test")
    configs = suites.beside(tmp_path, suites.SIZES["small"])
    by_method = {
        method: [config["instance"] for config in configs if config["method"] == method]
        for method in ("branch_and_bound", *suites.EXACT)
    }
    cases = by_method["branch_and_bound"]
    assert sum(case.startswith("heads.npz#") for case in cases) == 10
    assert sum(case.startswith("k_cluster:40:") for case in cases) == 3
    assert all(given == cases for given in by_method.values())
    assert {config["ks"] for config in configs if config["instance"].startswith("heads")} == {(5,)}
    said: list[str] = []
    everything = run._planned(tmp_path, "smoke", None, ["branch_and_bound"], said.append)
    assert "beside" not in everything
    assert list(run._planned(tmp_path, "smoke", ["beside"], ["branch_and_bound"], said.append)) == ["beside"]
    with pytest.raises(OptionError, match="no suite is called 'beneath'"):
        run._planned(tmp_path, "smoke", ["beneath"], None, said.append)


def test_what_was_measured_is_read_in_order(tmp_path: Path) -> None:
    for record in records():
        write_cell(tmp_path, record)
    assert len(evidence.read_all(tmp_path)) == 12
