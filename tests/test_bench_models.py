"""The benchmark of several models, in small: its rows, its page, and a run that resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import models
from grace_opt.hf import calibrate
from grace_opt.hf.models import POCKET_FOLDER

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def start(tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line on two models, calibrated on little text; returns the page."""
    make = calibrate.basis
    monkeypatch.setattr(calibrate, "basis", lambda *given, **more: make(*given, ["the old mill . " * 90], **more))
    other = tmp_path / "other"
    shutil.copytree(POCKET_FOLDER, other)

    def run(*changes: str) -> str:
        texts = ["--text", *map(str, books), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "page")]
        sizes = "--tokens 300 --later 12 --passages 2 --allow-dirty".split()
        models.main(["--model", str(POCKET_FOLDER), str(other), *texts, *sizes, *changes])
        return (tmp_path / "page.md").read_text()

    return run


def test_every_row_of_every_model_is_on_the_page(start, tmp_path: Path) -> None:
    text = start()
    value = json.loads((tmp_path / "page.json").read_text())
    assert list(value["models"]) == [POCKET_FOLDER.name, "other"]
    for each in value["models"].values():
        assert all(list(passage["rows"]) == list(models.ROWS) for passage in each["passages"])
        assert min(row["kl"] for passage in each["passages"] for row in passage["rows"].values()) > 0
        assert all(passage["rows"]["bits=3"]["bits"] <= 3 for passage in each["passages"])
    assert all(f"| {row} |" in text.replace("`", "") for row in models.ROWS)
    worst = max(value["models"], key=lambda name: models.mean(value, name, models.USUAL))
    assert f"is {worst}, with a KL of {models.mean(value, worst, models.USUAL):.4f}" in text
    before = text
    models.main(["--report-only", "--out", str(tmp_path / "page"), "--allow-dirty"])
    assert (tmp_path / "page.md").read_text() == before


def test_wrong_lengths_are_refused(start) -> None:
    with pytest.raises(SystemExit, match="--later 300: give at least 2, and fewer than the 300 --tokens"):
        start("--later", "300")
