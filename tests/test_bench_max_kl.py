"""The benchmark of ``max_kl=``, in small: its numbers, records and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import caches, max_kl, provenance
from grace_opt.hf import CalibratedBasis
from grace_opt.hf.models import POCKET_FOLDER
from grace_opt.hf.models.loading import POCKET_BASIS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def test_numbers_go_into_records_and_onto_a_page(
    tmp_path: Path, books: list[Path], books_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    monkeypatch.setattr(caches.calibrate, "basis", lambda *given, **options: CalibratedBasis.load(POCKET_BASIS))
    monkeypatch.setattr(max_kl, "ASKED", (0.005, 0.02))
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
    given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "300", "--tokens", "32"]
    given += [*folders, "--passages", "2", "--allow-dirty"]
    max_kl.main(given)
    text = (tmp_path / "results" / "pocket.md").read_text()
    (of,) = json.loads((tmp_path / "results" / "pocket.json").read_text())["models"].values()
    assert [bits for bits, _ in of["curve"]] == [1, 1.5, 2.25, 3, 4]
    for one in of["passages"]:
        few, more = one["kl"]["0.02"], one["kl"]["0.005"]
        assert few["bits"] < more["bits"]
        assert 0 < more["kl"] < few["kl"] < 1
    assert "| pocket | 0.005 |" in text
    monkeypatch.setattr(max_kl, "measure", lambda *rest: pytest.fail("measured again"))
    max_kl.main(given)
