"""The regression gate's verdicts, on planted ratios; nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from bench import check
from bench.check import BaselineError, Ratio, compare, read_baselines

SOURCE = {"commit": "abc", "date": "2026-01-01", "cpu": "some", "cores": 2}


def planted(*values: float, up: bool = True) -> Ratio:
    """A ratio that is measured as these values, one after the other; measured more often, it raises."""
    left = iter(values)
    return Ratio("planted", lambda rounds: next(left), up_is_better=up)


@pytest.fixture
def baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a baseline of 40, which the check reads."""
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"version": check.VERSION, "provenance": SOURCE, "ratios": {"planted": 40.0}}))
    monkeypatch.setattr(check, "BASELINES", path)
    return path


@pytest.mark.parametrize(
    ("value", "up", "verdict"),
    [
        (40.0, True, "as before"),
        (30.0, True, "as before"),
        (29.9, True, "worse"),
        (50.1, True, "better"),
        (40.0, False, "as before"),
        (50.0, False, "as before"),
        (50.1, False, "worse"),
        (29.9, False, "better"),
    ],
)
def test_a_verdict_follows_the_direction_and_the_margin(value: float, up: bool, verdict: str) -> None:
    assert planted(up=up).verdict(value, 40.0) == verdict


def test_what_is_worse_is_measured_once_more() -> None:
    said: list[str] = []
    (once,) = compare([planted(40.0)], {"planted": 40.0}, 1, said.append)
    assert (once.value, len(said)) == (40.0, 1)
    (noise,) = compare([planted(10.0, 39.0)], {"planted": 40.0}, 1, said.append)
    assert (noise.value, noise.verdict) == (39.0, "as before")
    (real,) = compare([planted(10.0, 11.0)], {"planted": 40.0}, 1, said.append)
    assert (real.value, real.verdict) == (11.0, "worse")


def test_a_planted_regression_fails(
    baselines: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "RATIOS", (planted(20.0, 21.0),))
    with pytest.raises(SystemExit, match="worse than the baseline, twice: planted"):
        check.main([])
    out = capsys.readouterr().out
    assert "worse" in out
    assert "≥ 30" in out


def test_all_as_before_passes(baselines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "RATIOS", (planted(38.0),))
    check.main([])


def test_update_writes_what_the_next_run_compares_with(baselines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines.unlink()
    monkeypatch.setattr(check, "RATIOS", (planted(12.0, 12.0),))
    check.main(["--update"])
    values, source = read_baselines(baselines, check.RATIOS)
    assert values == {"planted": 12.0}
    assert source["commit"]
    check.main([])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there are no baselines at baselines.json"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ({"version": 0, "provenance": SOURCE, "ratios": {"planted": 40.0}}, "of version 0, and this check of version"),
        ({"version": check.VERSION, "provenance": SOURCE, "ratios": {}}, "no baseline of planted"),
    ],
)
def test_baselines_that_do_not_serve_are_named(
    text: object, said: str, baselines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baselines.unlink()
    if text is not None:
        baselines.write_text(text if isinstance(text, str) else json.dumps(text))
    monkeypatch.setattr(check, "RATIOS", (planted(),))
    with pytest.raises(BaselineError, match=said):
        read_baselines(baselines, check.RATIOS)
    with pytest.raises(SystemExit, match="--update"):
        check.main([])
