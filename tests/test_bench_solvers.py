"""The solver benchmark, end to end on a tiny data folder: resumable, not to be fooled, and honest in its report."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.solvers import cells, report, run, suites
from bench.solvers.evidence import Evidence, overran
from bench.solvers.rows import limits
from grace_opt.testing import instance

ROOT = Path(__file__).resolve().parent.parent
WANTED = {"names": ["real64", "heuristics", "kcluster"], "methods": ["exhaustive", "mies"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real-looking matrices, one k-cluster instance, and its optimum."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("interaction", "k-cluster"):
        (folder / name).mkdir()
    np.savez(folder / "interaction" / "W_smollm2_135m.npz", W=np.stack([instance("attention", 10, s) for s in (0, 1)]))
    path = [(i, i + 1) for i in range(1, 6)]
    lines = ["6 3 5", *(f"{i} {j} 0.5" for i, j in path)]
    (folder / "k-cluster" / "kcluster6_033_3_1.dat").write_text("\n".join(lines) + "\n")
    head = "instance,n,density,k,optimum_edges_maximised,min_f_for_W_eq_minus_adjacency"
    (folder / "k-cluster" / "optima.csv").write_text(f"{head}\nkcluster6_033_3_1,6,0.33,3,2,-4\n")
    return folder


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of one run."""
    out = tmp_path_factory.mktemp("runs")
    # exhaustive is planned in no suite, so it runs in all: 2 matrices × 2 k, one batch, one k-cluster; mies in its own.
    assert run.run(data, out, **WANTED) == 4 + 1 + 2
    return out


@pytest.mark.slow
def test_a_second_run_does_nothing(data: Path, runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*.json") if path.parent.parent.parent == runs}
    assert len(before) == 7
    assert run.run(data, runs, **WANTED) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_answers_are_right(data: Path, runs: Path) -> None:
    W = suites.load(data, "interaction/W_smollm2_135m.npz#1")
    cell = cells.Cell("real64", "interaction/W_smollm2_135m.npz#1", (5,), "exhaustive", 0, 60.0)
    record = cells.read(runs, cell)
    assert record is not None
    chosen = record["indices"]
    assert record["status"] == "proved"
    assert not overran(record)
    assert record["objective"] == pytest.approx(W[np.ix_(chosen, chosen)].sum(), rel=1e-12)
    evidence = Evidence.of(runs)
    assert evidence.optimum["k-cluster/kcluster6_033_3_1.dat", 3] == -4
    (batch,) = evidence.of_method("heuristics", "exhaustive")
    assert evidence.ratios([batch]) == [0.0] * 4
    # The batch holds each matrix once for every k: 5 and 6.
    singles = {(i, k): f for (i, k), f in evidence.optimum.items() if i.startswith("interaction")}
    assert len(singles) == 4
    for at, one in enumerate(batch["answers"]):
        assert one["objective"] == singles[f"interaction/W_smollm2_135m.npz#{at % 2}", 5 + at // 2]


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cut short", "edited", "of another cell", "not text"])
def test_a_harmed_record_is_measured_again(harm: str, data: Path, runs: Path) -> None:
    cell = cells.Cell("kcluster", "k-cluster/kcluster6_033_3_1.dat", (3,), "exhaustive", 0, 60.0)
    path = cell.path(runs)
    whole = path.read_text()
    if harm == "cut short":
        path.write_text(whole[: len(whole) // 2])
    elif harm == "edited":
        path.write_text(whole.replace('"objective": -4.0', '"objective": -6.0'))
    elif harm == "of another cell":
        other = dataclasses.replace(cell, ks=(2,))
        cells.write(runs, other, {name: value for name, value in json.loads(whole).items() if name != "digest"})
        assert cells.read(runs, other) is not None
        other.path(runs).rename(path)
    else:
        path.write_bytes(b"\xff\xfe\x00")
    assert path.read_bytes() != whole.encode()
    assert cells.read(runs, cell) is None
    assert run.run(data, runs, **WANTED) == 1
    again = cells.read(runs, cell)
    assert again is not None
    assert again["objective"] == -4


def test_what_was_not_written_to_the_end_is_no_record(runs: Path) -> None:
    count = len(Evidence.of(runs).records)
    (runs / "real64" / "exhaustive" / "half.json.123.tmp").write_text('{"cell": ')
    assert len(Evidence.of(runs).records) == count


def test_the_report_says_what_is_missing_and_what_disagrees(runs: Path, tmp_path: Path) -> None:
    text = report.write(runs, tmp_path)
    content = json.loads((tmp_path / "solvers.json").read_text())
    assert (tmp_path / "solvers.md").read_text() == text
    assert len(content["goals"]) == 11
    # branch_and_bound's cells are planned but not on record: its goals are neither met nor missed.
    assert all(goal["met"] is None for goal in content["goals"] if "180" in goal["what"])
    assert content["contradictions"] == []
    assert "| exhaustive |" in text
    assert content["provenance"][0]["commit"] in text
    # A planted lie: somebody proves what the enumeration beats.
    cell = cells.Cell("kcluster", "k-cluster/kcluster6_033_3_1.dat", (3,), "liar", 0, 60.0)
    lie = {"status": "proved", "indices": [0, 2, 4], "claimed": 0.0, "bound": 0.0, "time": 0.0, "wall": 0.0}
    W = suites.load(Path(), "random:mdp:6:0") * 0
    cells.write(runs, cell, {**cells.check(W, 3, lie), "n": 6, "commit": "x"})
    try:
        assert len(json.loads(_reported(runs, tmp_path))["contradictions"]) >= 2
    finally:
        cell.path(runs).unlink()


def test_limits_are_judged_by_the_times_that_the_tables_show() -> None:
    """A call of 13.36 s with a limit of 10 was counted as kept: its method's own clock had said 10.0."""

    def record(wall: float | None, time: float | None, method: str = "tabu", **more: Any) -> dict[str, Any]:
        cell = cells.Cell("large", f"random:mdp:9:{wall}", (3,), method, limit=10.0)
        return {"cell": cell.as_dict(), "wall": wall, "time": time, "status": "limit", "n": 9, **more}

    kept = [record(10.4, 10.0), record(90.0, 10.0, "gurobi"), record(None, None, status="failed")]
    late, ended = record(13.36, 10.0), record(None, None, ended=True, status="failed")
    assert [overran(r) for r in [*kept, late, ended]] == [False, False, False, True, True]
    row = limits(Evidence([*kept, late], {}, {}))
    assert row.met is False
    assert row.ours.startswith("2 of 3 whole calls kept theirs, the worst took 3.36 s more")
    assert row.ours.endswith("as the limit does, 3 of 3")
    assert limits(Evidence(kept, {}, {})).met is True
    assert "inf s more" in limits(Evidence([ended], {}, {})).ours
    page = json.loads((ROOT / "docs" / "results" / "solvers.json").read_text())
    (told,) = (goal for goal in page["goals"] if goal["what"] == row.what)
    late = [one for one in page["large"] if not cells.kept_limit(one["limit s"], one["call s"])]
    assert told["met"] is (not late)
    assert told["ours"].startswith(f"{461 - len(late)} of 461 ") or not late


def _reported(runs: Path, folder: Path) -> str:
    report.write(runs, folder)
    return (folder / "solvers.json").read_text()


def test_check_takes_back_what_does_not_hold() -> None:
    W = np.array([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 5.0]])
    good = {"status": "proved", "indices": [1, 0], "claimed": 6.0, "bound": 6.0}
    assert cells.check(W, 2, good)["status"] == "proved"
    assert cells.check(W, 2, good)["objective"] == 6
    assert cells.check(W, 2, {**good, "bound": 5.0})["status"] == "limit"
    assert cells.check(W, 2, {**good, "indices": [0, 0]})["status"] == "failed"
    assert cells.check(W, 1, good)["status"] == "failed"
    assert cells.check(W, 2, {**good, "indices": [0, 3]})["status"] == "failed"
    assert "note" in cells.check(W, 2, {**good, "claimed": 5.0})
    assert "note" not in cells.check(W, 2, good)


def test_limits_and_samples() -> None:
    assert cells.kept_limit(None, 1e9)
    assert cells.kept_limit(10.0, 11.19)
    assert not cells.kept_limit(10.0, 11.21)
    assert cells.kept_limit(10.0, float("nan"))
    assert cells.spread(list(range(9)), 3) == [0, 4, 8]
    assert cells.spread([1, 2], None) == cells.spread([1, 2], 5) == [1, 2]
    assert cells.spread([1, 2, 3], 1) == [1]


@pytest.mark.slow
def test_a_method_that_fails_is_on_record_and_may_be_retried(data: Path, tmp_path: Path) -> None:
    wanted = {"names": ["heuristics"], "methods": ["bound:no_such_bound"]}
    said: list[str] = []
    assert run.run(data, tmp_path, **wanted, say=said.append) == 0
    assert "no_such_bound" in said[0]
    # There is no such option, which shows inside the worker.
    wanted["methods"] = ["bound:continuous_bound,colour=red"]
    assert run.run(data, tmp_path, **wanted) == 1
    (record,) = cells.read_all(tmp_path)
    assert record["status"] == "failed"
    assert run.run(data, tmp_path, **wanted) == 0
    assert run.run(data, tmp_path, **wanted, retry_failed=True) == 1


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_there(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.solvers", "run", "--data", str(data), "--out", str(tmp_path)]
    # Two methods: the second one's worker is still to be started when the first one's record appears.
    command += ["--suite", "real64", "--method", "exhaustive", "random"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 100
        while not list(cells.read_all(tmp_path)):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "stopped" in errors
    kept = len(list(cells.read_all(tmp_path)))
    assert 1 <= kept < 8
    assert run.run(data, tmp_path, ["real64"], ["exhaustive", "random"]) == 8 - kept
