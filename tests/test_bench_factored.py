"""The benchmark of W in factors, in small: its processes, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bench import factored


@pytest.mark.slow
def test_a_small_run_and_its_page(tmp_path: Path) -> None:
    out = tmp_path / "factored"
    factored.main(["--sizes", "64", "--limit", "0.5", "--out", str(out), "--allow-dirty"])
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
