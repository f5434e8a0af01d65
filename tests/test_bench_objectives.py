"""The benchmark of objectives, in small: its numbers, records, page and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import objectives, provenance
from grace_opt.hf.models import POCKET_FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], books_alone: None):
    """Run the benchmark as from the command line, on books alone."""

    def run(*changes: str) -> str:
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "256", "--tokens", "8"]
        objectives.main([*given, "--kinds", "book", *folders, "--allow-dirty", *changes])
        return (tmp_path / "results" / "pocket.md").read_text()

    return run


@pytest.mark.slow
def test_numbers_go_into_records_and_onto_a_page(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    text = start()
    (cases,) = json.loads((tmp_path / "results" / "pocket.json").read_text())["models"].values()
    (one,) = cases["cases"]
    assert list(one["kl"]) == list(one["errors"]) == list(objectives.WAYS)
    assert all(0 < kl < 20 for row in one["kl"].values() for kl in row.values())
    for way in one["errors"].values():
        assert all(0 < error < 1 for row in way.values() for error in row)
    assert all(f"| {name} |" in text for name in objectives.WAYS)
    monkeypatch.setattr(objectives, "measure", lambda *rest: pytest.fail("measured again"))
    assert start() == text


@pytest.mark.parametrize(
    ("changes", "message"), [(["--prompt", "100"], "--prompt 100"), (["--kinds", "poem"], "--kinds poem")]
)
def test_refusals(start, changes: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        start(*changes)
