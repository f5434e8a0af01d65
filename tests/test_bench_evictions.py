"""The benchmark of evictions, in small: its numbers, records, page and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import evictions, provenance
from bench.evictions_page import FAST, OURS
from grace_opt.hf.models import POCKET_FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], books_alone: None, monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, on two books alone, with short prompts."""
    monkeypatch.setattr(evictions, "SHARES", (0.5, 0.25))

    def run(*changes: str) -> str:
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "140", "--tokens", "8"]
        evictions.main([*given, *folders, "--allow-dirty", *changes])
        return (tmp_path / "results" / "pocket.md").read_text()

    return run


@pytest.mark.slow
def test_numbers_go_into_records_and_onto_a_page(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    monkeypatch.setattr(evictions, "TIMES", 1)
    text = start("--passages", "2")
    value = json.loads((tmp_path / "results" / "pocket.json").read_text())
    (of,) = value["models"].values()
    assert [one["name"] for one in of["passages"]] == ["Rivers", "Rivers"]
    for one in of["passages"]:
        assert set(one["kl"]) == set(evictions.EVICTIONS)
        assert all(0 < kl < 20 for row in one["kl"].values() for kl in row.values())
    assert set(of["seconds"]) == {"prefill", *evictions.EVICTIONS}
    assert all(f"| pocket | {name} |" in text for name in (OURS, FAST, "SnapKV"))
    monkeypatch.setattr(evictions, "measure", lambda *rest: pytest.fail("measured again"))
    start("--passages", "2")


def test_what_cannot_be_measured_says_why(start, tmp_path: Path) -> None:
    for changes, message in (
        (["--prompt", "128"], "give prompts of more than 128 tokens"),
        (["--tokens", "1"], "at least 2 tokens after them"),
        (["--prompt", "3000"], "too few for two passages of 3008"),
        (["--text", str(tmp_path / "none.txt")], "no text at"),
    ):
        with pytest.raises(SystemExit, match=message):
            start(*changes)
