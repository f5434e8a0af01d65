"""Sweeps survive what kills them, on one machine and on a cluster; intervals cover; reports say what is missing."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.experiments import __main__ as command
from bench.experiments.registry import experiments
from grace_opt.cli.app import app
from grace_opt.errors import GraceError, OptionError
from grace_opt.sweep import (
    Cell,
    Description,
    Interval,
    Paper,
    Plot,
    Record,
    SweepError,
    Table,
    make_report,
    mean_interval,
    paired_interval,
    read_cell,
    read_description,
    run_sweep,
    write_cell,
    write_description,
)
from grace_opt.sweep import cells as cells_module
from grace_opt.sweep.report import MOST_NAMED, _found
from tests import children
from tests import sweep_worker as worker
from tests.clock import Clock


def results(directory: Path, experiment: str = "work") -> dict[str, Any]:
    """All records by key, all of them read, and nothing else in the folder."""
    folder = directory / experiment / "cells"
    assert not [path for path in folder.iterdir() if path.suffix != ".json" or path.name.startswith(".")]
    return {path.stem: read_cell(path) for path in sorted(folder.iterdir())}


def texts(directory: Path) -> dict[str, str]:
    """The rows of all records, as text, where NaN equals NaN."""
    return {key: json.dumps(record.rows) for key, record in results(directory).items()}


# Killed and started again


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
def test_killed_at_random_moments_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    run_sweep(worker.cells(), worker.work, tmp_path / "whole", progress=False)
    assert children.run(worker.killed_again_and_again, str(tmp_path / "killed"), 3) >= 5
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")
    assert set(texts(tmp_path / "killed")) == {cell.key for cell in worker.cells()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes as Linux has them")
def test_killed_with_two_workers(tmp_path: Path, forks: BaseContext) -> None:
    """First a worker, whose cell is made again; then the sweep, whose workers must end as well."""
    import psutil

    rng, folder = random.Random(5), tmp_path / "work" / "cells"

    def wait_for(more: int) -> None:
        until = time.monotonic() + 60
        wanted = more + (len(list(folder.glob("[!.]*.json"))) if folder.exists() else 0)
        while not folder.exists() or len(list(folder.glob("[!.]*.json"))) < wanted:
            assert time.monotonic() < until
            assert process.is_alive()
            time.sleep(rng.uniform(0.001, 0.02))

    process = forks.Process(target=worker.two_workers, args=(str(tmp_path),))
    process.start()
    try:
        wait_for(rng.randint(2, 6))
        started = psutil.Process(process.pid).children()  # one is multiprocessing's resource tracker
        next(child for child in started if "spawn_main" in " ".join(child.cmdline())).kill()
        wait_for(rng.randint(6, 9))  # more than the other worker can have had under way
        workers = psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.join(10)
    _, alive = psutil.wait_procs(workers, timeout=60)  # one that is still starting looks up its parent afterwards
    assert not alive, "workers are left behind"
    before = len(list(folder.glob("[!.]*.json")))
    assert 8 <= before < worker.COUNT
    done = run_sweep(worker.cells(), worker.quick, tmp_path, progress=False)
    assert (done.before, done.complete) == (before, True)
    found = results(tmp_path)
    assert {r.cell.config["n"]: r.rows[0]["value"] for r in found.values()} == {n: n * n for n in range(worker.COUNT)}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pools")
def test_a_cell_that_kills_its_worker_fails_alone(tmp_path: Path) -> None:
    done = run_sweep(worker.cells(4), worker.dies, tmp_path, workers=2, progress=False, retries=1)
    assert (done.made, [failure.config["n"] for failure in done.failures]) == (3, [2])
    assert "worker died 2 times" in done.failures[0].error
    assert len(results(tmp_path)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_dask_cluster_that_loses_a_worker(tmp_path: Path) -> None:
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    cells = [Cell("work", {"n": n}) for n in range(24)]
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        distributed.LocalCluster(2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        makers: list[int] = []

        class Watched:  # the executor, and a kill once some cells are back
            def __init__(self) -> None:
                self.inner = client.get_executor()

            def submit(self, *arguments: Any) -> Any:
                future = self.inner.submit(*arguments)
                future.add_done_callback(self.back)
                return future

            def back(self, future: Any) -> None:
                makers.append(future.result()["rows"][0]["pid"])
                if len(makers) == 6:  # on a busy machine the other worker may not have begun
                    os.kill(makers[-1], signal.SIGKILL)

        source = {"cpu": "the parent's", "python": "?", "date": "today", "numpy": "?"}
        done = run_sweep(cells, worker.slow, tmp_path, executor=Watched(), provenance=source, progress=False)
    assert (done.made, done.failures) == (24, ())
    found = results(tmp_path)
    assert {r.cell.config["n"]: r.rows[0]["value"] for r in found.values()} == {n: n * n for n in range(24)}
    pids = {record.rows[0]["pid"] for record in found.values()}
    assert makers[5] in pids
    assert len(pids) >= 2
    assert os.getpid() not in pids
    where = next(iter(found.values())).provenance
    assert (where["date"], where["numpy"]) == ("today", np.__version__)  # of the worker, not what the parent said
    assert where["cpu"] != "the parent's"


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_sweep(worker.cells(6), worker.interrupted, tmp_path, progress=False)
    assert len(results(tmp_path)) == 3


# A warm process for each method


@pytest.mark.slow
def test_each_method_has_a_process_that_stays_warm_and_methods_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = worker.warm_cells("a", "b")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = dict(os.environ)
    with worker.warm_processes(logs=tmp_path / "logs") as processes:
        done = run_sweep(cells, worker.timed, tmp_path, processes=processes, progress=False)
        assert processes.names == ("a", "b")
        assert processes.call("a", os.getpid) != os.getpid()
    assert dict(os.environ) == before
    assert (done.made, done.failures) == (6, ())
    records = {record.cell.key: record for record in results(tmp_path, "warm").values()}
    rows = [records[cell.key].rows[0] for cell in cells]  # in the order in which they were asked for
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    for at, method in enumerate("ab"):
        of_method = rows[at::2]
        assert len({row["pid"] for row in of_method}) == 1
        assert {row["warmed"] for row in of_method} == {method}  # once, and before the first cell
    assert rows[0]["pid"] != rows[1]["pid"]
    assert {row["threads"] for row in rows} == {1}
    assert max(record.seconds for record in records.values()) < 3000, "the warm-up is on the clock"
    assert (tmp_path / "logs" / "a.log").read_text() == "".join(f"cell {n} of a\n" for n in range(3))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pools")
def test_a_process_that_hangs_or_dies_is_a_record_and_is_started_anew(tmp_path: Path) -> None:
    cells = worker.warm_cells("a", "hangs", "dies", count=2)
    with worker.warm_processes(lost=worker.lost) as processes:
        done = run_sweep(cells, worker.timed, tmp_path, processes=processes, progress=False)
    assert (done.made, done.failures) == (6, ())
    rows = {(r.cell.config["method"], r.cell.config["n"]): r for r in results(tmp_path, "warm").values()}
    hung, died = rows["hangs", 0], rows["dies", 0]
    assert hung.rows[0] == {"failed": "no answer within 1 s: its process was ended.", "late": True}
    assert 1 <= hung.seconds < 60
    assert died.rows[0] == {"failed": "its process ended with code 3.", "late": False}
    for method in ("hangs", "dies"):
        assert rows[method, 1].rows[0]["warmed"] == method
    assert rows["a", 0].rows[0]["pid"] == rows["a", 1].rows[0]["pid"]  # nobody else's process was touched
    with worker.warm_processes(lost=worker.lost) as processes:
        again = run_sweep(cells, worker.timed, tmp_path, processes=processes, progress=False)
        assert processes.names == ()
    assert again.before == 6


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pools")
def test_a_lost_process_is_a_failure_where_nothing_says_what_its_record_is(tmp_path: Path) -> None:
    with worker.warm_processes() as processes:
        done = run_sweep(worker.warm_cells("dies", "a"), worker.timed, tmp_path, processes=processes, progress=False)
    assert [(f.config["method"], f.error) for f in done.failures] == [("dies", "its process ended with code 3.")]
    assert done.made == 5


@pytest.mark.slow
@pytest.mark.usefixtures("forked_pools")
def test_what_a_call_raises_comes_back_and_the_process_stays() -> None:
    with worker.warm_processes() as processes:
        pid = processes.call("a", os.getpid)
        with pytest.raises(ValueError, match="invalid literal"):
            processes.call("a", int, "x")
        assert processes.call("a", os.getpid) == pid


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes as Linux has them")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_ctrl_c_and_a_kill_leave_no_warm_process_and_keep_what_is_finished(
    how: signal.Signals, tmp_path: Path, forks: BaseContext
) -> None:
    import psutil

    process = forks.Process(target=worker.warm_program, args=(str(tmp_path),))
    process.start()
    log = tmp_path / "logs" / "hangs.log"
    try:
        until = time.monotonic() + 60
        while not log.exists() or "cell 0 of hangs" not in log.read_text():  # `a` is done, and this one is busy
            assert time.monotonic() < until
            assert process.is_alive()
            time.sleep(0.02)
        started = psutil.Process(process.pid).children()
        assert started
        os.kill(process.pid, how)
        process.join(20)
        assert process.exitcode
    finally:
        process.kill()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive, "processes are left behind"
    assert len(results(tmp_path, "warm")) >= 1


# What goes wrong


@pytest.mark.slow
def test_failing_cells_stop_no_other_and_are_tried_again(tmp_path: Path) -> None:
    done = run_sweep(worker.cells(7), worker.fails, tmp_path, progress=True)
    errors = {failure.config["n"]: failure.error for failure in done.failures}
    assert (done.made, done.complete, sorted(errors)) == (2, False, [1, 2, 3, 4, 5])
    assert errors[1] == "the data set is missing: download it."
    assert errors[2].startswith("KeyError: 'reference' (sweep_worker.py, line ")
    assert "no data" in errors[3]
    assert "'value': list is no number" in errors[4]
    assert "n=6" in errors[5]
    again = run_sweep(worker.cells(7), worker.quick, tmp_path, progress=False)
    assert (again.before, again.made, again.complete) == (2, 5, True)


@pytest.mark.parametrize("row", [{"text": "a\ud800"}, {"\udfff": 1}, {"text": np.str_("\ud83d\ude00")}])
def test_text_that_no_file_holds_fails_its_cell_alone(row: dict[str, Any], tmp_path: Path) -> None:
    """It was written as a record that no later start could read."""
    cells = [Cell("texts", {"n": n}) for n in range(2)]

    def measured(config: dict[str, Any]) -> list[dict[str, Any]]:
        return [row if config["n"] == 0 else {"text": "😀"}]

    for before in (0, 1):
        done = run_sweep(cells, measured, tmp_path, progress=False)
        assert (done.before, done.made) == (before, 1 - before)
        assert "half a surrogate pair" in done.failures[0].error
    for broken in ({"provenance": row}, {"config": row}):
        with pytest.raises(OptionError, match="half a surrogate pair"):
            run_sweep(
                [Cell("texts", broken.get("config", {"n": 2}))], measured, tmp_path, provenance=broken.get("provenance")
            )


@pytest.mark.parametrize("sign", [1, -1])
def test_a_whole_number_that_python_does_not_read_fails_its_cell_alone(sign: int, tmp_path: Path) -> None:
    cells = [Cell("numbers", {"n": n}) for n in (600, 640, 641, 5000)]

    def measured(config: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"number": sign * 10 ** (config["n"] - 1)}]

    done = run_sweep(cells, measured, tmp_path, progress=False)
    assert done.made == 2
    assert [failure.config["n"] for failure in done.failures] == [641, 5000]
    assert "write it as text" in done.failures[0].error
    assert run_sweep(cells[:2], measured, tmp_path, progress=False).before == 2


@pytest.mark.slow
@pytest.mark.parametrize("threads", [False, True])
def test_after_its_time_a_sweep_begins_no_cell_and_the_next_one_goes_on(
    threads: bool, tmp_path: Path, clock: Clock
) -> None:
    cells = [Cell("slow", {"n": n}) for n in range(40)]

    def slow(config: dict[str, Any]) -> list[dict[str, Any]]:
        clock.sleep(0.25)
        return [{"square": config["n"] ** 2}]

    with ThreadPoolExecutor(1) as executor:
        given = {"executor": executor} if threads else {}
        none = run_sweep(cells, slow, tmp_path, time_limit=0, progress=False, **given)
        assert (none.made, none.failures, none.complete) == (0, (), False)
        if not threads:  # an executor is given many cells at once, which it finishes
            some = run_sweep(cells, slow, tmp_path, time_limit=2.5, progress=False)
            assert some.made == 10
            assert not some.complete
        assert run_sweep(cells, slow, tmp_path, progress=False, **given).complete
    with pytest.raises(OptionError, match="path=None: give the name"):
        run_sweep(worker.cells(), worker.work, None, progress=False)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="time_limit=-1"):
        run_sweep(cells, slow, tmp_path, time_limit=-1)


def test_a_full_disk_stops_the_sweep_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sync = [], os.fsync

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) > 6:  # a file and its folder for each cell
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(cells_module.os, "fsync", full)
    with pytest.raises(SweepError, match=r"No space left.*The 3 finished cells are safe"):
        run_sweep(worker.cells(6), worker.work, tmp_path, progress=False)
    monkeypatch.undo()
    assert len(results(tmp_path)) == 3  # and nothing half written is left
    assert run_sweep(worker.cells(6), worker.work, tmp_path, progress=False).before == 3


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cut short", "edited", "of another version", "of another cell", "not ours"])
def test_a_harmed_record_is_named_and_not_overwritten(harm: str, tmp_path: Path) -> None:
    (cell,) = worker.cells(1)
    run_sweep([cell], worker.quick, tmp_path, progress=False)
    path = cell.path(tmp_path)
    whole = path.read_text()
    harmed = {
        "cut short": whole[: len(whole) // 2],
        "edited": whole.replace('"value": 0', '"value": 1'),
        "of another version": whole.replace('"format": 1', '"format": 99'),
        "not ours": "[1, 2]",
    }
    if harm == "of another cell":
        other = worker.cells(2)[1]
        run_sweep([other], worker.quick, tmp_path, progress=False)
        other.path(tmp_path).replace(path)
    else:
        path.write_text(harmed[harm])
    before = path.read_text()
    assert before != whole
    write_description(tmp_path, Description("work", "Work", "", "", "", [cell.key], []))
    for use in (lambda: run_sweep([cell], worker.quick, tmp_path, progress=False), lambda: make_report(tmp_path)):
        with pytest.raises(SweepError, match=path.name) as caught:
            use()
        assert "Move it away" in str(caught.value)
    assert path.read_text() == before
    path.unlink()
    assert run_sweep([cell], worker.quick, tmp_path, progress=False).made == 1


def test_two_sweeps_on_one_folder_do_not_mix(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")

    def inner(config: dict[str, Any]) -> list[dict[str, Any]]:
        run_sweep(worker.cells(1), worker.quick, tmp_path, progress=False)
        return []

    done = run_sweep(worker.cells(1), inner, tmp_path, progress=False)
    assert "another process works on" in done.failures[0].error


def test_bad_input_is_refused(tmp_path: Path) -> None:
    one = worker.cells(1)
    for wrong, options in (
        ("no cells", {"cells": []}),
        ("twice", {"cells": one * 2}),
        ("one experiment", {"cells": [*one, Cell("other", {})]}),
        ("workers=0", {"workers": 0}),
        ("retries=-1", {"retries": -1}),
        ("executor=3", {"executor": 3}),
        ("top of a module", {"workers": 2, "function": lambda config: []}),
        ("without workers", {"workers": 2, "processes": worker.warm_processes()}),
        ("give WarmProcesses", {"processes": 3}),
    ):
        with pytest.raises(OptionError, match=wrong):
            run_sweep(**{"cells": one, "function": worker.quick, "directory": tmp_path, "progress": False, **options})
    with pytest.raises(OptionError, match="time_limit=3: give a function"):
        worker.warm_processes(time_limit=3)
    for config in ({"x": object()}, {3: 4}, [1]):
        with pytest.raises(OptionError):
            Cell("work", config)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="lower-case"):
        Cell("../work", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match="cannot make"):
        run_sweep(one, worker.quick, tmp_path / "file", progress=False)


def test_configs_are_what_files_say(tmp_path: Path) -> None:
    cell = Cell("work", {"limit": math.inf, "ratios": (0.5, np.float32(0.25)), "n": np.int64(3)})
    assert cell.config == {"limit": math.inf, "ratios": [0.5, 0.25], "n": 3}
    assert cell.key == Cell("work", {"n": 3, "ratios": [0.5, 0.25], "limit": math.inf}).key
    assert cell.key != Cell("work", {**cell.config, "n": 4}).key
    run_sweep([cell], lambda config: [{"seen": str(config["ratios"])}], tmp_path, progress=False)
    record = read_cell(cell.path(tmp_path))
    assert (record.cell, record.rows) == (cell, [{"seen": "[0.5, 0.25]"}])


# Intervals


def test_the_bootstrap_of_two_pairs_is_its_enumeration() -> None:
    # Differences -3 and -1: a resample's mean is -3, -2, -2 or -1, each with probability 1/4.
    found = paired_interval([1.0, 4.0], [4.0, 5.0])
    assert (found.estimate, found.low, found.high, found.verdict) == (-2.0, -3.0, -1.0, "too few pairs")


def test_the_interval_is_near_students_for_normal_differences() -> None:
    from scipy.stats import t

    d = np.random.default_rng(1).normal(0.3, 1.0, 200)
    found = paired_interval(d + 5.0, np.full(200, 5.0), better="higher")
    half = t.ppf(0.975, 199) * d.std(ddof=1) / math.sqrt(200)
    assert (found.low, found.high) == pytest.approx((d.mean() - half, d.mean() + half), abs=0.03)
    assert found.verdict == "better"
    assert paired_interval(d, np.zeros(200), better="lower").verdict == "worse"
    assert paired_interval(d, np.zeros(200)) == paired_interval(d, np.zeros(200))


@pytest.mark.slow
def test_intervals_cover_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered, verdicts = 0, 0
    for _ in range(300):
        base = rng.lognormal(0.0, 1.0, 30)  # pairs vary far more than the difference does
        found = paired_interval(base + rng.normal(0.0, 0.1, 30), base, resamples=999)
        covered += found.low <= 0.0 <= found.high
        verdicts += found.verdict == "no difference shown"
    assert 0.89 <= covered / 300 <= 0.98
    assert verdicts == covered


def test_what_has_no_spread_gives_neither_nan_nor_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = paired_interval([1.0], [2.0])
        assert (one.estimate, one.low, one.high, one.verdict) == (-1.0, -math.inf, math.inf, "too few pairs")
        same = paired_interval([0.1 + 0.2] * 8, [0.3] * 8)
        assert same.verdict == "better" or same.estimate == pytest.approx(0.0)
        assert paired_interval([2.0] * 8, [2.0] * 8).verdict == "no difference shown"
        assert paired_interval([1.0] * 8, [2.0] * 8).verdict == "better"
        almost = paired_interval([1.0] * 7 + [3.0], [2.0] * 8)
        assert np.isfinite([almost.low, almost.high]).all()
        ratio = paired_interval([1.0, 2, 3, 4, 5, 6], [2.0, 4, 6, 8, 10, 12], compare="ratio")
        assert (ratio.estimate, ratio.low, ratio.high, ratio.verdict) == (0.5, 0.5, 0.5, "better")
        assert mean_interval([3.0]).low == -math.inf


@pytest.mark.parametrize("exponent", [-1000, -400, 400, 1020])
def test_intervals_scale_with_their_values(exponent: int) -> None:
    """Sums overflowed, with numpy's warning, and before that the cubes of BCa."""
    rng = np.random.default_rng(0)
    a, b = rng.lognormal(0.0, 0.3, (2, 12))
    huge_a, huge_b = np.ldexp(a, exponent), np.ldexp(b, exponent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for usual, huge in (
            (mean_interval(a), mean_interval(huge_a)),
            (paired_interval(a, b), paired_interval(huge_a, huge_b)),
            (paired_interval(a, b, compare="ratio"), paired_interval(huge_a, b, compare="ratio")),
            (paired_interval(a, b, compare="ratio"), paired_interval(a, np.ldexp(b, -exponent), compare="ratio")),
        ):
            expected = [math.ldexp(value, exponent) for value in (usual.estimate, usual.low, usual.high)]
            assert [huge.estimate, huge.low, huge.high] == pytest.approx(expected, rel=1e-12, abs=0)
        same = paired_interval(huge_a, huge_b, compare="ratio")
        assert same.verdict == paired_interval(a, b, compare="ratio").verdict
        largest = np.finfo(float).max
        assert mean_interval([1e308] * 3).estimate == 1e308
        for count in (3, 6, 7):
            assert mean_interval([largest] * count) == Interval(largest, largest, largest, count)


def test_a_difference_or_ratio_that_is_no_float64_is_refused() -> None:
    for values, baseline, compare in (
        ([1e308] * 8, [-1e308] * 8, "difference"),
        ([-1e308, 0, 0], [1e308, 0, 0], "difference"),  # the mean is a number, and an end of the interval is none
        ([1e200] * 8, [1e-200] * 8, "ratio"),
    ):
        with pytest.raises(OptionError, match=f"the {compare} of values and baseline.*beyond the largest float64"):
            paired_interval(values, baseline, compare=compare)


def test_few_pairs_that_differ_show_nothing() -> None:
    """Five signs that are all alike are no rarity, however many pairs are equal besides."""
    for differ, verdict in ((5, "too few differ"), (6, "better")):
        a = np.array([1.0] * differ + [2.0] * 14)
        assert paired_interval(a, np.full(len(a), 2.0)).verdict == verdict


def test_bad_pairs_are_refused() -> None:
    for values, baseline, options in (
        ([], [], {}),
        ([1.0], [1.0, 2.0], {}),
        ([math.nan], [1.0], {}),
        ([1.0], [0.0], {"compare": "ratio"}),
        ([1.0], [1.0], {"better": "least"}),
        ([1.0], [1.0], {"compare": "odds"}),
        ([1.0, 2.0], [1.0, 1.0], {"confidence": 2.0}),
    ):
        with pytest.raises(OptionError):
            paired_interval(values, baseline, **options)  # type: ignore[arg-type]


# Reports


def measured(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Eight prompts with two heads each: `mies` is lower by 0.5 ± 0.1 of the prompt, whatever the head."""
    rows = []
    for prompt in range(8):
        for head in range(2):
            base = 10 * prompt + head
            lower = 0.5 + 0.1 * (-1) ** prompt
            rows += [
                {"method": "think", "prompt": prompt, "head": head, "f": base, "time": 1.0},
                {"method": "mies", "prompt": prompt, "head": head, "f": base - lower, "time": math.inf},
            ]
    return rows


VIEWS: tuple[Table | Plot, ...] = (
    Table(
        "Objective & <b>more</b>",
        metrics=["f", "time"],
        rows=["ratio"],
        by="method",
        baseline="think",
        pair=["prompt", "head"],
        unit=["prompt"],
        paper=[
            Paper("f", {"ratio": 0.5, "method": "think"}, 40.0, "Table 1"),
            Paper("f", {"ratio": 0.5, "method": "mies"}, 38.5, "Table 1"),
            Paper("f", {"ratio": 0.9, "method": "mies"}, 12.0, "Table 1", "run --ratio 0.9"),
        ],
    ),
    Table("Means", metrics=["f"], rows=[], by="method"),
    *(Plot(kind, f"A {kind} plot", "prompt", "f", hue="method", facet="ratio") for kind in ("line", "bar", "box")),
    Plot("scatter", "A scatter plot", "time", "f", log=["y"], labels={"f": "$f$ of S_1"}),
    Plot("heatmap", "A heatmap", "prompt", "head", value="f"),
    Plot("bar", "Names", "method", "f", log=["x"]),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished cell of two, one experiment that could not run, and a record of other settings."""
    folder = tmp_path_factory.mktemp("results")
    cells = [Cell("first", {"ratio": ratio, "seed": 0}) for ratio in (0.5, 0.7)]
    source = {"commit": "abc<def>|", "device": "cpu", "python": "3"}
    run_sweep([cells[0], Cell("first", {"ratio": 0.1})], measured, folder, provenance=source, progress=False)
    keys = [cell.key for cell in cells]
    about = "A <script>alert(1)</script> | *paragraph*."
    write_description(folder, Description("first", "First <i>one</i>", "Fig. 5", about, "run it", keys, VIEWS))
    write_description(
        folder, Description("second", "Second", "", "", "run --device cuda", ["0" * 32], VIEWS, "no GPU was found")
    )
    assert make_report(folder)[0] == folder / "report" / "index.md"
    return folder


def test_many_contenders_are_counted_and_not_named() -> None:
    some = [("dense", f"int{at}", verdict) for at, verdict in enumerate(["better", "worse", "worse"])]
    description = SimpleNamespace(missing="")
    assert _found(description, [None], some) == (
        "Comparisons with dense in the first table: int0 1 better; int1 1 worse; int2 1 worse."
    )
    many = [("dense", f"int{at}", "worse") for at in range(MOST_NAMED)] + [("dense", "int99", "better")]
    assert _found(description, [None], many) == (
        f"Comparisons with dense in the first table: {MOST_NAMED + 1} others, {MOST_NAMED} worse, 1 better."
    )


@pytest.mark.slow
def test_a_report_shows_ours_the_papers_and_what_is_missing(directory: Path) -> None:
    import pandas

    _, first, second = (directory / "report" / f"{name}.md" for name in ("index", "first", "second"))
    text = first.read_text()
    lines = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in text.splitlines() if "|" in line}
    assert "| 40 (Table 1) | 35.5 |" in lines["0.5", "think"]
    mies = lines["0.5", "mies"]
    assert "| 38.5 (Table 1), -1.5 | 35 (-0.5 \\[-0.5" in mies
    assert ", better) |" in mies
    missing = lines["0.9", "mies"]
    assert "| 12 (Table 1) |" in missing
    assert "| not run here |" in missing
    assert "`run --ratio 0.9`" in missing
    assert text.index("![") < text.index("- **Asked**: ") < text.index("\n## ")
    assert "- **Found**: Comparisons with think in the first table: mies 1 better" in text
    assert text.index("<details>") < text.index("1 of 2 cells measured; 1 missing") < text.index("</details>")
    page = (directory / "report" / "first.html").read_text()
    assert page.count("<details><summary>Where the numbers come from</summary>") == page.count("</details>") == 1
    assert "16 of 16 are not finite" in text
    assert "1 of 2 cells measured; 1 missing, to measure them: `run it`; not shown: 1 records of other settings" in text
    assert "no GPU was found" in second.read_text()
    assert "`run --device cuda`" in second.read_text()
    frame = pandas.read_parquet(directory / "first" / "results.parquet")
    assert len(frame) == 32
    assert {"ratio", "seed", "prompt", "head", "method", "f", "cell"} <= set(frame.columns)
    for at in range(3, 9):
        assert (directory / "report" / f"first-{at}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (directory / "report" / f"first-{at}.svg").read_text()


@pytest.mark.slow
def test_pages_show_text_as_text(directory: Path) -> None:
    for name in ("first.html", "first.md", "index.html"):
        page = (directory / "report" / name).read_text()
        assert "<script" not in page
        assert "<i>" not in page
        assert "<b>" not in page
        assert "<def>" not in page
    page = (directory / "report" / "first.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt; | *paragraph*." in page
    assert "abc&lt;def&gt;|" in page
    assert 'href="first.html"' in (directory / "report" / "index.html").read_text()


@pytest.mark.slow
def test_equal_records_give_equal_pages(directory: Path, tmp_path: Path) -> None:
    make_report(directory, tmp_path)
    for path in (directory / "report").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_descriptions_come_back_as_they_were(directory: Path) -> None:
    assert read_description(directory / "first" / "experiment.json").views == VIEWS


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (Table("T", ["g"], ["ratio"], "method"), "reads column 'g', which no row has; there are .*method"),
        (Table("T", ["f"], [], "method", "think", ["prompt"]), "`pair` must name every column"),
        (Table("T", ["method"], [], "prompt"), "holds text"),
        (Plot("line", "P", "prompt", "method"), "holds text"),
        (Plot("line", "P", "layer", "f"), "reads column 'layer'"),
    ],
)
def test_views_that_do_not_fit_the_rows(view: Table | Plot, message: str, tmp_path: Path) -> None:
    cell = Cell("first", {"ratio": 0.5})
    run_sweep([cell], measured, tmp_path, progress=False)
    write_description(tmp_path, Description("first", "", "", "", "", [cell.key], [view]))
    with pytest.raises(GraceError, match=message):
        make_report(tmp_path)


def test_a_view_of_what_is_still_to_come(tmp_path: Path) -> None:
    """Half of a sweep may lack whole columns; the whole of it may not."""
    cells = [Cell("half", {"kind": kind}) for kind in ("a", "b")]
    views = [Table("Later", metrics=["g"], rows=[], by="method"), Plot("line", "Now", x="n", y="f")]
    keys = [cell.key for cell in cells]
    write_description(tmp_path, Description("half", "Half", "", "", "run it", keys, views))
    write_cell(tmp_path, Record(cells[0], [{"n": 1, "f": 2.0, "method": "m"}], 0.1, {}))
    page = make_report(tmp_path)[1].read_text()
    assert "Not run here, or not yet. To measure it: `run it`" in page
    assert "![Now](half-2.png)" in page
    write_cell(tmp_path, Record(cells[1], [{"n": 2, "f": 2.0, "method": "m"}], 0.1, {}))
    with pytest.raises(OptionError, match="reads column 'g', which no row has"):
        make_report(tmp_path)


def test_views_that_are_wrong_in_themselves() -> None:
    for wrong in (
        lambda: Table("T", [], [], "method"),
        lambda: Table("T", "f", [], "method"),
        lambda: Table("T", ["f"], [], "method", baseline="think"),
        lambda: Table("T", ["f"], [], "method", "think", ["prompt"], ["head"]),
        lambda: Table("T", ["f"], [], "method", better="least"),
        lambda: Table("T", ["f"], ["n"], "method", paper=[Paper("f", {"method": "mies"}, 1.0, "")]),
        lambda: Plot("pie", "P", "x", "y"),
        lambda: Plot("heatmap", "P", "x", "y"),
        lambda: Plot("line", "P", "x", "y", log=["z"]),
    ):
        with pytest.raises(OptionError, match=r"'[TP]'"):
            wrong()


@pytest.mark.slow
def test_a_plot_leaves_out_rows_of_other_views(tmp_path: Path) -> None:
    from pandas import DataFrame

    from grace_opt.sweep.plots import save_plot

    rows = [{"setting": "a", "f": 1.0}, {"setting": "b", "f": 2.0}]
    plot = Plot("bar", "P", x="setting", y="f")
    for name, more in (("alone", []), ("among others", [{"f": 3.0, "other": "c"}])):
        save_plot(plot, DataFrame([*rows, *more]), tmp_path / name)
    assert (tmp_path / "alone.png").read_bytes() == (tmp_path / "among others.png").read_bytes()


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plot: Plot, rows: list[dict[str, Any]]) -> Any:
    """The figure that `save_plot` writes."""
    from pandas import DataFrame

    from grace_opt.sweep import plots

    figures: list[Any] = []
    monkeypatch.setattr(plots, "_svg", lambda figure, picture: figures.append(figure))  # once its PNG is written
    plots.save_plot(plot, DataFrame(rows), tmp_path / "plot")
    figures[0].draw_without_rendering()  # at its own resolution again
    return figures[0]


@pytest.mark.slow
def test_no_two_lines_look_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eleven methods and more in panels of their own, as in the pages of solvers: each has its own colour or marker."""
    rows = [{"method": f"m{at}", "family": at % 2, "x": x, "f": float(at + x)} for at in range(20) for x in range(3)]
    figure = drawn(monkeypatch, tmp_path, Plot("line", "P", "x", "f", hue="method", facet="family"), rows)
    looks = [(bar[0].get_color(), bar[0].get_marker()) for axis in figure.axes for bar in axis.containers]
    assert len(set(looks)) == len(looks) == 20
    assert len({colour for colour, _ in looks}) == 11


@pytest.mark.slow
def test_lines_at_one_place_are_one_line_under_all_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rows(panels: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
        return [
            {"panel": panel, "method": method, "x": x, "f": f + x}
            for panel, heights in panels.items()
            for method, f in heights.items()
            for x in range(3)
        ]

    plot = Plot("line", "P", "x", "f", hue="method", facet="panel")
    one = {"kappa": 9.0, "think": 0.02, "mies": 0.0}
    figure = drawn(monkeypatch, tmp_path, plot, rows({"a": one, "b": one}))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["kappa", "think, mies"]
    apart = drawn(monkeypatch, tmp_path, plot, rows({"a": one, "b": {**one, "think": 1.0}}))
    assert [text.get_text() for text in apart.legends[0].get_texts()] == ["kappa", "think", "mies"]


@pytest.mark.slow
def test_a_small_heatmap_shows_its_numbers_and_a_large_one_does_not_lose_its_colours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plot = Plot("heatmap", "P", "x", "y", value="f", facet="panel")
    same = [{"panel": p, "x": x, "y": y, "f": 1.0} for p in "ab" for x in range(2) for y in range(2)]
    figure = drawn(monkeypatch, tmp_path, plot, same)
    assert [text.get_text() for axis in figure.axes[:2] for text in axis.texts] == ["1"] * 8
    assert len(figure.axes) == 3  # one colour bar for both panels
    large = [{"panel": 0, "x": x, "y": y, "f": 1e6 if x == y == 0 else x / 10} for x in range(10) for y in range(10)]
    image = drawn(monkeypatch, tmp_path, plot, large).axes[0].images[0]
    assert image.get_clim() == pytest.approx((0.0, 0.9), abs=0.01)


@pytest.mark.slow
def test_long_names_of_axes_do_not_run_into_the_next_panel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [{"panel": p, "x": x, "f": float(x)} for p in range(6) for x in range(3)]
    labels = {"f": "log10(factor over the optimum)", "x": "log10 kappa"}
    for panels in (6, 1):
        plot = Plot("scatter", "P", "x", "f", facet="panel", labels=labels)
        figure = drawn(monkeypatch, tmp_path, plot, [row for row in rows if row["panel"] < panels])
        texts = [figure._supylabel] if panels > 1 else []
        texts += [axis.yaxis.label for axis in figure.axes if axis.get_ylabel()]
        texts += [axis.xaxis.label for axis in figure.axes if axis.get_xlabel()]
        assert [text.get_text() for text in texts].count(labels["f"]) == 1
        boxes = [text.get_window_extent() for text in texts]
        assert all(figure.bbox.containsx(box.x0) and figure.bbox.containsy(box.y0 + box.height) for box in boxes)
        inside = [axis.get_window_extent() for axis in figure.axes]
        assert not any(box.overlaps(axes) for box in boxes for axes in inside)


def test_columns_of_numbers_and_text_are_refused(tmp_path: Path) -> None:
    cells = [Cell("mixed", {"n": n}) for n in range(2)]
    run_sweep(cells, lambda config: [{"value": 1 if config["n"] else "one"}], tmp_path, progress=False)
    write_description(tmp_path, Description("mixed", "", "", "", "", [cell.key for cell in cells], []))
    with pytest.raises(OptionError, match="'value' holds text"):
        make_report(tmp_path)


# Command lines


def test_grace_opt_report(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(directory / "second", tmp_path / "some" / "second")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "some"), "--out", str(tmp_path / "pages")])
    assert (done.exit_code, "1 experiment" in done.output) == (0, True)
    assert (tmp_path / "pages" / "index.html").exists()
    empty = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (empty.exit_code, "holds no experiments" in empty.output) == (2, True)
    (tmp_path / "file").write_text("")
    assert CliRunner().invoke(app, ["report", str(directory), "--out", str(tmp_path / "file")]).exit_code == 2


def test_an_unknown_generator_is_one_error_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["solver_quality", "--smoke", "--out", str(tmp_path), "--set", "kinds=attention,foo"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: --set kinds=foo: no such generator; there are attention, ")
    assert said.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bench_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["solver_quality", "--smoke", "--out", str(tmp_path), "--set", "kinds=attention,k_cluster"]
    assert command.main([*common, "--only", "seed=1"]) == 0
    assert "2 of 2 cells done, 2 of them now" in capsys.readouterr().out
    assert command.main(common) == 0
    assert "4 of 4 cells done, 2 of them now" in capsys.readouterr().out
    _, page = make_report(tmp_path)
    assert "4 of 4 cells measured" in page.read_text()
    assert "too few pairs" in page.read_text()
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in experiments())
    assert command.main([*common[:-1], "kinds=planted", "--set", "instances=1"]) == 1
    assert "failed: {" in capsys.readouterr().err
    for wrong in (["nothing"], [*common, "--set", "x=1"], [*common, "--set", "n=a"], [*common, "--only", "x=1"]):
        assert command.main(wrong) == 2
        assert capsys.readouterr().err.startswith("error: ")
