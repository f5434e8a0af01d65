"""The day with a GPU: what is done counts, whatever becomes of the rest, and its loops are what they stand for."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
pytest.importorskip("matplotlib")

from bench import decode_gpu, gpu_day
from bench.decode_bits import OURS
from bench.report import RESULTS
from grace_opt import solve
from grace_opt.attention import interaction_matrix
from grace_opt.kernels._shared import dispatch

CLEAN = {"date": "2026-01-02", "command": "python -m bench.gpu_day", "commit": "1234567", "cpu": "x", "cores": 2}
CLEAN |= {"python": "3.11.0"}
MASKS = {
    "sizes": [128, 64, 2048, 32],
    "rounds": 3,
    "rows": [{"what": "MIES", "heads": 4096, "gpu_ms": [2.0, 2.0, 9.0], "cpu_ms": [50.0], "loop_ms": [8000.0]}],
}
LAYER = {"tokens": 32768, "prompts": 8, "us": {"cudnn": [200.0], OURS: [160.0]}, "coding_s": 0.25, "bytes": 10**8}
STEP = {"tokens": 8192, "prompts": 1, "ms": {"dense": [4.0], OURS: [2.0]}, "bytes": 10**8}
DECODE = {"device": "a GPU", "rounds": 1, "copy_bandwidth": 1e12, "layers": [LAYER], "steps": [STEP]}
TESTS = {"counts": {"passed": 1200, "failed": 1}, "failed": ["tests/test_gpu.py::test_x"]}


def part(found: object, status: str = gpu_day.MEASURED) -> dict:
    return {"status": status, "seconds": 30.4, "found": found}


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        out=tmp_path / "gpu_day", runs=tmp_path, minutes=8, small=True, only=None, allow_dirty=False
    )


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run these words of a shell in place of a part."""

    def write(words: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\n{words}\n")
        path.chmod(0o755)
        monkeypatch.setattr(gpu_day.sys, "executable", str(path))

    return write


def test_the_page_sets_what_was_measured_beside_what_is_wanted() -> None:
    page = gpu_day.page(
        {"device": "GPU", "parts": {"masks": part(MASKS), "decode": part(DECODE), "tests": part(TESTS)}}
    )
    assert "1,200 passed, 1 failed, 0 skipped" in page.found
    assert "MIES of 4,096 heads is 25.00 times as fast as on the CPU (wanted: at least 10)" in page.found
    assert "takes 0.80 times as long as dense attention with 32,768 × 8 tokens (wanted: at most 1.0" in page.found
    assert "| MIES | 4,096 | 2.00 | 50.00 | 8,000.00 |" in page.tables
    assert set(decode_gpu.page(DECODE).tables) <= {*page.tables}
    assert page.details[0] == ("Tests that failed", ["- `tests/test_gpu.py::test_x`"])
    assert page.sure.endswith("All parts ended in time.")


def test_parts_that_end_badly_are_named_and_the_others_count() -> None:
    parts = {"masks": part(MASKS, "ran out of its 9 s"), "decode": part(None, "failed: no memory")}
    page = gpu_day.page({"device": "GPU", "parts": parts})
    assert "*masks* ran out of its 9 s; *decode* failed: no memory; *tests* was not run." in page.sure
    assert "MIES of 4,096 heads is 25.00 times" in page.found
    assert "no test ended" in page.found


def test_a_part_is_killed_with_all_that_it_started_and_leaves_what_it_had(
    args, child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = gpu_day.subprocess.Popen.wait, tmp_path / "masks.json"

    def wait(self, timeout: float | None = None) -> int:
        """Let the time run out once the file is there."""
        while timeout and not written.exists():
            time.sleep(0.01)
        if timeout:
            raise subprocess.TimeoutExpired("masks", timeout)
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(gpu_day.subprocess.Popen, "wait", wait)
        child("""sleep 600 & echo $! > started; echo '{"rows": []}' > part; mv part masks.json; wait""")
        found = gpu_day.run("masks", args, 9)
    assert (found["status"], found["found"]) == ("ran out of its 9 s", {"rows": []})
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(int((tmp_path / "started").read_text()))
        while started.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    child("echo first; echo no memory >&2; exit 3")
    found = gpu_day.run("masks", args, 600)
    assert (found["status"], found["found"]) == ("failed: no memory", None)


def test_a_day_writes_its_page_after_each_part(args, monkeypatch: pytest.MonkeyPatch, clock) -> None:
    """What a part leaves, the next may use. A second day of the same commit keeps parts that it does not run."""
    limits, seen = [], []

    def run(name: str, args: argparse.Namespace, limit: float) -> dict:
        path = args.out.with_suffix(".json")
        seen.append([*json.loads(path.read_text())["parts"]] if path.exists() else [])
        limits.append(limit)
        clock.sleep(30)
        return part(TESTS if name == "tests" else None, gpu_day.MEASURED if name == "tests" else "failed: x")

    monkeypatch.setattr(gpu_day, "run", run)
    gpu_day.day(args, CLEAN)
    assert seen == [[], ["masks"], ["masks", "decode"]]
    assert limits == pytest.approx([90, 270, 420])
    args.only = "masks"
    assert [*gpu_day.day(args, CLEAN)["parts"]] == ["masks", "decode", "tests"]
    assert [*gpu_day.day(args, CLEAN | {"commit": "7654321"})["parts"]] == ["masks"]
    assert limits[3:] == pytest.approx([480, 480])


def test_outcomes_of_tests_are_kept_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "tests.json"
    recorder = gpu_day.Recorder(path)
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("setup", "skipped"), ("call", "failed")):
        report = SimpleNamespace(when=when, outcome=outcome, nodeid="x", passed=outcome == "passed")
        recorder.pytest_runtest_logreport(SimpleNamespace(**vars(report), failed=outcome == "failed"))
    assert json.loads(path.read_text()) == {"counts": {"passed": 1, "skipped": 1, "failed": 1}, "failed": ["x"]}
    recorder.pytest_collectreport(SimpleNamespace(outcome="failed", nodeid="y", passed=False, failed=True))
    assert json.loads(path.read_text())["failed"] == ["x", "y"]


def test_the_loops_over_heads_compute_the_same() -> None:
    draw = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(3, count, 16, generator=draw) for count in (8, 40))
    W = interaction_matrix(queries, keys)
    torch.testing.assert_close(torch.stack(gpu_day.looped_weights(queries, keys)), W)
    assert torch.equal(gpu_day.looped_mies(W, 7), solve(W, 7, "mies").mask)


@pytest.mark.slow
def test_small_masks_are_measured_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setattr(dispatch, "_tried", lambda kernel, device: True)  # trials take most of the time
    gpu_day.masks(tmp_path / "masks.json", small=True)
    found = json.loads((tmp_path / "masks.json").read_text())
    assert [(row["what"], row["heads"]) for row in found["rows"]] == [("W", 2), ("MIES", 2), ("W", 4), ("MIES", 4)]
    assert all(len(row[name]) == 1 and row[name][0] > 0 for row in found["rows"] for name in gpu_day.TIMES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    with pytest.raises(SystemExit, match=r"gpu_day needs a CUDA device, .*; with --small it is tried without one"):
        gpu_day.main([])
    with pytest.raises(SystemExit, match="times of a tiny model are no results; write --out PATH as well"):
        decode_gpu.main(["--small", "--out", str(RESULTS / "decode_gpu")])
