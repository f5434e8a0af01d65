"""The benchmark of ``max_bytes=``, in small: its numbers, records and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import caches, max_bytes, provenance
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.models import POCKET_FOLDER
from grace_opt.hf.models.loading import POCKET_BASIS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def test_numbers_go_into_records_and_onto_a_page(
    tmp_path: Path, books: list[Path], books_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    monkeypatch.setattr(caches.calibrate, "basis", lambda *given, **options: CalibratedBasis.load(POCKET_BASIS))
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
    given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "300", "--tokens", "512"]
    given += [*folders, "--limit", "220", "--allow-dirty"]
    max_bytes.main(given)
    text = (tmp_path / "results" / "pocket.md").read_text()
    (of,) = json.loads((tmp_path / "results" / "pocket.json").read_text())["models"].values()
    (one,) = of["texts"]
    assert one["bytes"] == 220 * 3 * 2 * 2 * 64 * 4
    for name in ("unknown", "known"):
        assert 0.6 < one[name]["share"] <= 1
        assert len(one[name]["kl"]) == 2
    assert len(one["known"]["history"]) == 1 < len(one["unknown"]["history"])
    assert one["at_once"]["share"] <= 1
    assert one["seconds"][0] > 0
    assert "| pocket | " in text
    monkeypatch.setattr(max_bytes, "measure_limit", lambda *rest: pytest.fail("measured again"))
    max_bytes.main(given)
