"""The benchmark of a trellis, in small: its numbers, page and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("optimum.quanto")
pytest.importorskip("matplotlib")

from bench import trellis
from grace_opt.hf import calibrate
from grace_opt.hf.models import POCKET_FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, calibrated on little text."""

    make = calibrate.basis

    def little(model: object, tokenizer: object, texts: Sequence[str] = ("the old mill . " * 40,)) -> object:
        return make(model, tokenizer, texts)

    def run(*changes: str) -> str:
        sizes = "--tokens 260 --later 12 --cases 2 --context 150 --long 300 --steps 3 --rounds 1 --allow-dirty".split()
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        trellis.main(["--model", str(POCKET_FOLDER), "--text", *map(str, books), *sizes, *folders, *changes])
        return (tmp_path / "results" / "pocket.md").read_text()

    monkeypatch.setattr(calibrate, "basis", little)
    monkeypatch.setattr(trellis, "BITS", (2.25, 3.0, 1.0))
    return run


@pytest.mark.slow
def test_numbers_go_onto_a_page(start, tmp_path: Path) -> None:
    text = start()
    value = json.loads((tmp_path / "results" / "pocket.json").read_text())
    assert {each["kind"] for each in value["passages"]} == {"book", "Python", "JSON", "lines"}
    for each in value["passages"]:
        for bits, rows in each["rows"].items():
            assert rows.keys() == trellis.KINDS.keys()
            for row in rows.values():
                assert row["kl"] > 0
                assert row["bits"] <= float(bits)
            assert rows["one by one"] != rows["trellis"]
    assert len(value["cases"]) == 2
    assert [len(seconds) for seconds in value["read"].values()] == [1, 1, 1]
    assert [len(seconds) for seconds in value["decoded"].values()] == [3, 3, 3]
    assert "| 2.25 |" in text
    assert "| trellis, 2 bits |" in text
    assert "| step after 300 |" in text
    assert start("--report-only") == text


def test_what_cannot_be_measured_says_why(start, tmp_path: Path) -> None:
    for changes, message in (
        (["--later", "1"], "give at least 2, and fewer than the 260"),
        (["--long", "9000"], "the longest text, or the model's context, has"),
        (["--text", str(tmp_path / "none.txt")], "no text at"),
    ):
        with pytest.raises(SystemExit, match=message):
            start(*changes)
