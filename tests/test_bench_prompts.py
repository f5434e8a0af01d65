"""The benchmark of stored prompts, in small: its numbers, records and page, and processes that are killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import caches, prompts, provenance
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.models import POCKET_FOLDER
from grace_opt.hf.models.loading import POCKET_BASIS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def test_numbers_go_into_records_and_onto_a_page(
    tmp_path: Path, books: list[Path], books_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    monkeypatch.setattr(caches.calibrate, "basis", lambda *given, **options: CalibratedBasis.load(POCKET_BASIS))
    monkeypatch.setattr(prompts, "PROCESSES", 1)
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
    given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "400", "--rounds", "1"]
    given += [*folders, "--questions", "2", "--kills", "1", "--allow-dirty"]
    prompts.main(given)
    text = (tmp_path / "results" / "pocket.md").read_text()
    (of,) = json.loads((tmp_path / "results" / "pocket.json").read_text())["models"].values()
    assert of["questions"] == [2, 2]
    assert of["bytes"]["16 bits"] == 400 * 3 * 2 * 2 * 64 * 2
    assert 0 < of["bytes"]["file"] < of["bytes"]["16 bits"]
    assert of["kills"]["kills"] == 1
    assert of["kills"]["damaged"] == of["kills"]["wrong"] == of["kills"]["left over"] == 0
    times = {way: 1 if way in (prompts.READ, prompts.DENSE, "storing") else 3 for way in of["seconds"]}
    assert {way: len(seconds) for way, seconds in of["seconds"].items()} == times
    assert min(min(seconds) for seconds in of["seconds"].values()) > 0
    assert "| pocket | from the store | " in text
    for name in ("measure_prompt", "measure_kills"):
        monkeypatch.setattr(prompts, name, lambda *rest: pytest.fail("measured again"))
    prompts.main(given)
