"""The benchmark of learned masks, in small: its numbers, records, page and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import learned, passages, provenance
from bench.learned import CALIBRATED, LEARNED, PROMPT
from bench.material import read_text
from grace_opt.hf.models import POCKET_FOLDER, load_pocket

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], books_alone: None):
    """Run the benchmark as from the command line, on two books alone."""

    def run(*changes: str) -> str:
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "200", "--tokens", "8"]
        learned.main([*given, "--learn", "200", "--steps", "4", "2", *folders, "--allow-dirty", *changes])
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
        assert list(one["kl"]) == [*learned.MAKERS, PROMPT]
        assert all(0 < kl < 20 for row in one["kl"].values() for kl in row.values())
    assert set(of["seconds"]) == {f"{name}, {ratio:g}" for name in learned.MAKERS for ratio in learned.RATIOS}
    assert all(f"| pocket | {name} |" in text for name in (LEARNED, CALIBRATED, PROMPT))
    monkeypatch.setattr(learned, "measure", lambda *rest: pytest.fail("measured again"))
    monkeypatch.setattr(learned, "learn_masks", lambda *rest, **given: pytest.fail("learned again"))
    assert start("--passages", "2") == text
    text = start("--passages", "2", "--model", str(second_model()))
    assert all(f"| {name} | {LEARNED} |" in text for name in ("pocket", "other"))
    assert "on 2 small models" in text


def test_what_is_reported_is_no_text_that_was_learned_from(books: list[Path], books_alone: None) -> None:
    _, tokenizer = load_pocket()
    ids = tokenizer(read_text(books[0])[1], add_special_tokens=False, return_tensors="pt").input_ids
    first = next(each for each in passages.passages(books[:1], tokenizer, 200) if each.half == "A")
    later = passages.later_passages(books[:1], tokenizer, 200)
    places = [int(share * ids.shape[1]) for share in (0.3, 0.5, 0.75)]
    for one, place in zip((first, *later), places, strict=True):
        assert one.ids.equal(ids[:, place : place + 200])
    assert places[0] + 200 < places[1]


def test_what_cannot_be_measured_says_why(start, tmp_path: Path) -> None:
    for changes, message in (
        (["--prompt", "50"], "give prompts of at least 64 tokens"),
        (["--tokens", "1"], "2 tokens after them"),
        (["--learn", "100"], "128 of each source"),
        (["--prompt", "3000"], "too few for two passages of 3008"),
        (["--text", str(tmp_path / "none.txt")], "no text at"),
    ):
        with pytest.raises(SystemExit, match=message):
            start(*changes)
