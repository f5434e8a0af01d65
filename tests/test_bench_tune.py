"""Each text left out in turn, in small: recommendations by hand, the page, and records that are used again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("optimum.quanto")
pytest.importorskip("matplotlib")

from bench import tune as bench_tune
from bench.tune_page import left_out_in_turn, summary
from grace_opt.hf import CacheConfig, calibrate
from grace_opt.hf.models import POCKET_FOLDER
from grace_opt.hf.tools.tune import Candidate, measuring

pytestmark = pytest.mark.usefixtures("one_thread")

#: Three settings on two windows of "a" and one each of "b" and "c".
VALUE = {
    "texts": ["a", "a", "b", "c"],
    "settings": {
        "small": {"share": [0.1] * 4, "kl": [0.01, 0.03, 0.004, 0.004]},
        "middle": {"share": [0.2] * 4, "kl": [0.006, 0.006, 0.003, 0.003]},
        "large": {"share": [0.3] * 4, "kl": [0.001] * 4},
    },
}


def test_a_text_is_measured_by_what_the_others_recommend() -> None:
    rows = {row["text"]: row for row in left_out_in_turn(VALUE, 0.005)}
    # Without "a", the smallest is enough; "a" itself needs the largest.
    assert rows["a"] == {
        **{"text": "a", "setting": "small", "reached": True, "said": 0.004},
        **{"share": 0.1, "kl": 0.02, "best": "large", "least": pytest.approx(0.3)},
    }
    # With it, windows 0.006, 0.006 and 0.003: just 0.005.
    assert (rows["b"]["setting"], rows["b"]["said"], rows["b"]["best"]) == ("middle", pytest.approx(0.005), "small")
    found = summary(list(rows.values()), 0.005)
    assert found["worst_kl"] == pytest.approx(4)
    assert found["mean_kl"] == pytest.approx((4 + 0.6 + 0.6) / 3)
    assert found["worst_bytes"] == pytest.approx(2)
    none = summary(left_out_in_turn(VALUE, 1e-6), 1e-6)
    assert none["texts"] == 0
    assert math.isnan(none["worst_kl"])


@pytest.mark.slow
def test_numbers_go_onto_a_page(tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = [
        Candidate("ratio 0.5", "pruned", CacheConfig(ratio=0.5)),
        Candidate("ratio 0.3", "pruned", CacheConfig(ratio=0.3)),
    ]
    monkeypatch.setattr(bench_tune, "default_candidates", lambda context, basis: candidates)
    monkeypatch.setattr(
        calibrate, "basis", lambda model, tokenizer, make=calibrate.basis: make(model, tokenizer, ["the mill " * 200])
    )
    monkeypatch.setattr(bench_tune, "is_clean", lambda source: True)
    given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--tokens", "240", "--later", "16"]
    given += ["--windows", "1", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
    bench_tune.main([*given, "--allow-dirty"])
    page = tmp_path / "results" / "pocket.md"
    text, value = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    (of,) = value["models"].values()
    assert {"Rivers", "Mills", "generated JSON"} <= set(of["texts"])
    assert all(len(one["kl"]) == len(of["texts"]) == 6 for one in of["settings"].values())
    assert "| pocket | 0.005 |" in text
    assert "ratio 0.3" in text
    monkeypatch.setattr(measuring.Measurer, "__call__", lambda *rest: pytest.fail("measured again"))
    bench_tune.main([*given, "--allow-dirty"])
    assert page.read_text() == text
    other = shutil.copytree(POCKET_FOLDER, tmp_path / "other")
    shutil.copytree(tmp_path / "runs" / POCKET_FOLDER.name, tmp_path / "runs" / "other")  # equal weights: equal records
    bench_tune.main([*given, "--model", str(other), "--allow-dirty"])
    models = json.loads(page.with_suffix(".json").read_text())["models"]
    assert models == {POCKET_FOLDER.name: of, "other": of}
    assert "the worst of 2 models" in page.read_text()
