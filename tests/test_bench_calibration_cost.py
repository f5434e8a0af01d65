"""The benchmark of calibrations, in small: its numbers, page and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import calibration_cost
from grace_opt.hf.models import POCKET_FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, calibrated on little text; returns the page."""
    asked, make = [], calibration_cost.calibrate.basis

    def little(model: object, tokenizer: object, *, tokens: int) -> object:
        asked.append(tokens)
        return make(model, tokenizer, ["the old mill . " * 90], tokens=tokens // 4)

    def run(*changes: str) -> str:
        sizes = "--tokens 260 --later 12 --allow-dirty".split()
        calibration_cost.main(
            [
                "--model",
                str(POCKET_FOLDER),
                "--text",
                *map(str, books),
                *sizes,
                *("--out", str(tmp_path / "page"), "--runs", str(tmp_path / "runs")),
                *changes,
            ]
        )
        return (tmp_path / "page.md").read_text()

    run.asked = asked  # type: ignore[attr-defined]
    monkeypatch.setattr(calibration_cost.calibrate, "basis", little)
    return run


@pytest.mark.slow
def test_numbers_go_onto_a_page(start, tmp_path: Path) -> None:
    text = start()
    value = json.loads((tmp_path / "page.json").read_text())
    there = [each.tokens for each in calibration_cost.VARIANTS.values()]
    assert start.asked == there + there[::-1]
    rows = value["models"]["pocket"]["rows"]
    assert list(rows) == list(calibration_cost.VARIANTS)
    assert {len(row["kl"]) for row in rows.values()} == {len(value["models"]["pocket"]["passages"])}
    assert min(kl for row in rows.values() for kl in row["kl"]) > 0
    assert rows["the same, without gaps"]["kl"] != rows[calibration_cost.DEFAULT]["kl"]
    found = calibration_cost.ratios(rows)
    assert next(iter(found.values())) == (1.0, 1.0)
    assert f"{found[calibration_cost.DEFAULT][1]:.2f} times the KL" in text
    assert start("--report-only") == text


def test_what_cannot_be_measured_is_refused(start) -> None:
    with pytest.raises(SystemExit, match="--later 1"):
        start("--later", "1")
