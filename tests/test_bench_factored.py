"""The benchmark of W in factors, in small: its processes, and its page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench import factored
from tests import children


def executed(code: str, *words: str) -> None:
    """What ``python -c`` does."""
    sys.argv = ["-c", *words]
    exec(code, {"__name__": "__main__"})


@pytest.fixture
def one_start(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The first process starts as always, which takes three seconds; those that follow run the same code in forks."""
    commands, start = list[list[str]](), subprocess.run

    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return start(command, **given) if len(commands) == 1 else children.completed(executed, *command[2:])

    monkeypatch.setattr(factored, "subprocess", SimpleNamespace(run=run))
    return commands


@pytest.mark.slow
def test_a_small_run_and_its_page(tmp_path: Path, one_start: list[list[str]]) -> None:
    out = tmp_path / "factored"
    factored.main(["--sizes", "64", "--limit", "0.5", "--out", str(out), "--allow-dirty"])
    assert len(one_start) == 4
    text = out.with_suffix(".md").read_text()
    assert "| 64, in factors |" in text
    assert "| 64, formed |" in text
    assert "With 64 vertices" in text
    factored.main(["--report-only", "--out", str(out), "--allow-dirty"])
    assert out.with_suffix(".md").read_text() == text


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored, "_CHILD", "raise ValueError('planted')")
    with pytest.raises(SystemExit, match=r"n = 8, formed, failed:(.|\n)*planted"):
        factored.measure(8, "formed", 1.0)
