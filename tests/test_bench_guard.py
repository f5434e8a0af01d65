"""The benchmark of ``guard=``, in small: its numbers, records and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import caches, guard, provenance
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.models import POCKET_BASIS, POCKET_FOLDER

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def test_numbers_go_into_records_and_onto_a_page(
    tmp_path: Path, books: list[Path], books_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    monkeypatch.setattr(caches.calibrate, "basis", lambda *given, **options: CalibratedBasis.load(POCKET_BASIS))
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
    given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "300"]
    given += [*folders, "--passages", "2", "--allow-dirty"]
    guard.main(given)
    text = (tmp_path / "results" / "pocket.md").read_text()
    (of,) = json.loads((tmp_path / "results" / "pocket.json").read_text())["models"].values()
    first, second = (one["shares"] for one in of["passages"])
    assert list(first) == ["text"]
    assert {"another layer's basis", "swapped heads", "turned coordinates", "keys 900 far out", "noise as keys"} <= {
        *second
    }
    assert min(second["turned coordinates"]) > 1 > max(second["text"])
    assert min(second["keys 900 far out"]) > 100
    assert "| pocket | turned coordinates |" in text
    monkeypatch.setattr(guard, "measure", lambda *rest: pytest.fail("measured again"))
    guard.main(given)
