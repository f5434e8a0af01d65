"""The benchmark of a real model in small: its numbers and page, and a run that was stopped goes on."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")


from bench import provenance, real_model, real_model_page
from grace_opt.hf.models import POCKET_FOLDER
from grace_opt.hf.tools.needle import filler

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text that the pocket model can read, with the header of a book."""
    rng = random.Random(0)
    path = tmp_path / "book.txt"
    text = " ".join(filler(rng) for _ in range(40))
    path.write_text(f"# Title: On Rivers\n\n## Author: A. Nobody\n\n-----\n\n{text}")
    return path


@pytest.fixture
def start(tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark on two prompts, as from the command line."""

    def run(*changes: str) -> None:
        arguments = (
            f"--model {POCKET_FOLDER} --text {book} --prompts 2 --tokens 128 --new-tokens 4 --allow-dirty".split()
        )
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        monkeypatch.setattr(sys, "argv", ["real_model", *arguments, *folders, *changes])
        real_model.main()

    return run


@pytest.mark.slow
def test_real_model_writes_a_table_and_goes_on(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = real_model.measure, []

    def counting(*arguments):
        measured.append(1)
        return measure(*arguments)

    monkeypatch.setattr(real_model, "measure", counting)
    monkeypatch.setattr(real_model, "RATIOS", (0.5,))
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    start()
    assert len(measured) == 2
    text, value = ((tmp_path / "results" / f"pocket{suffix}") for suffix in (".md", ".json"))
    before = text.read_text(), json.loads(value.read_text())
    assert "A. Nobody: On Rivers" in before[0]
    assert str(tmp_path) not in before[0] + value.read_text()
    assert before[0].count("| GRACE − THINK |") == len(real_model.RATIOS)
    for record in before[1]["by prompt"]:
        assert all(cell["kl"] >= 0 and 0 <= cell["prefix"] <= 4 for cell in record["pruned"])
        assert all(cell["key_bytes"] < record["dense"]["key_bytes"] for cell in record["pruned"])

    first, second = sorted((tmp_path / "runs").iterdir())
    untouched = first.stat().st_mtime_ns
    second.unlink()
    start()
    assert len(measured) == 3
    assert first.stat().st_mtime_ns == untouched
    after = json.loads(value.read_text())
    assert [after[part] for part in ("dense", "rows")] == [before[1][part] for part in ("dense", "rows")]

    second.write_text(second.read_text()[:100])  # cut short: measured again
    start()
    assert len(measured) == 4
    start("--new-tokens", "3")  # other settings: nothing of before counts
    assert len(measured) == 6


def test_real_model_names_what_is_missing(start, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no text at"):
        start("--text", str(tmp_path / "nothing.txt"))
    with pytest.raises(SystemExit, match=r"no passage 1 of 900 tokens.*longer --text"):
        start("--tokens", "900")
    with pytest.raises(SystemExit, match="at most 1148"):
        start("--tokens", "1150")


def test_an_interval_covers_its_mean_and_is_a_point_where_all_agree() -> None:
    mean, low, high = real_model_page.interval([0.1, 0.2, 0.4])
    assert low < mean < high
    assert real_model_page.interval([0.25] * 4) == (0.25, 0.25, 0.25)
