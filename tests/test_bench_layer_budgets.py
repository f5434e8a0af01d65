"""The benchmark of divided budgets, in small: its numbers, records, page and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import layer_budgets, provenance
from grace_opt.hf import SnapKV, StreamingLLM, calibrate
from grace_opt.hf.models import POCKET_FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], books_alone: None, monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, on two books alone, with short prompts and quick evictions."""
    monkeypatch.setattr(layer_budgets, "SHARES", (0.5, 0.25))
    monkeypatch.setattr(layer_budgets, "ROUNDS", 3)
    quick = {"GraphEviction": lambda share: SnapKV(budget=share), "SnapKV": lambda share: StreamingLLM(budget=share)}
    monkeypatch.setattr(layer_budgets, "EVICTIONS", quick)
    texts = [path.read_text() for path in books]
    monkeypatch.setattr(calibrate, "budgets", partial(calibrate.budgets, texts=texts, evict=SnapKV()))

    def run(*changes: str) -> str:
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "140", "--tokens", "8"]
        layer_budgets.main([*given, "--calibrated", "768", *folders, "--allow-dirty", *changes])
        return (tmp_path / "results" / "pocket.md").read_text()

    return run


@pytest.mark.slow
def test_numbers_go_into_records_and_onto_a_page(
    start, second_model: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    text = start("--passages", "2")
    value = json.loads((tmp_path / "results" / "pocket.json").read_text())
    (of,) = value["models"].values()
    assert [one["name"] for one in of["passages"]] == ["Rivers", "Rivers"]
    for one in of["passages"]:
        assert set(one["kl"]) == {"GraphEviction", "SnapKV"}
        assert all(0 < kl < 20 for row in one["kl"].values() for three in row.values() for kl in three)
    for share, counts in of["divided"].items():
        heads = [count for row in counts for count in row]
        assert len(heads) == 6
        assert sum(heads) <= 6 * 140 * float(share)
        assert len({*heads}) > 1
    assert (of["calibration_seconds"] > 0, of["layers"]) == (True, [0, 1, 2])
    assert {len(times) for times in of["steps"].values()} == {3}
    assert "| eviction | kept | pocket |" in text
    assert "| pocket | GraphEviction | 50% |" in text
    monkeypatch.setattr(layer_budgets, "measure", lambda *rest: pytest.fail("measured again"))
    monkeypatch.setattr(calibrate, "budgets", lambda *rest: pytest.fail("measured again"))
    monkeypatch.setattr(layer_budgets, "steps", lambda *rest: pytest.fail("measured again"))
    assert start("--passages", "2") == text
    text = start("--passages", "2", "--model", str(second_model()))
    assert "| eviction | kept | pocket | other |" in text
    assert "on 2 small models" in text


def test_what_cannot_be_measured_says_why(start, tmp_path: Path) -> None:
    for changes, message in (
        (["--prompt", "128"], "give prompts of more than 128 tokens"),
        (["--tokens", "1"], "at least 2 tokens after them"),
        (["--text", str(tmp_path / "none.txt")], "no text at"),
    ):
        with pytest.raises(SystemExit, match=message):
            start(*changes)
