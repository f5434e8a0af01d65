"""The benchmark of reading few tokens, in small: its numbers, page and refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import reading
from grace_opt.hf import TopTokens
from grace_opt.hf.models import POCKET_FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_numbers_go_onto_a_page(tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    few = (*reading.TIMED, "channels, epsilon=0.1")
    monkeypatch.setattr(reading, "SETTINGS", {name: reading.SETTINGS[name] for name in few} | {"one": TopTokens(1.0)})
    out = tmp_path / "results" / "pocket"
    given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "300", "--tokens", "8"]
    reading.main([*given, "--rounds", "2", "--out", str(out), "--allow-dirty"])
    value, text = json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md").read_text()
    (of,) = value["models"].values()
    assert [one["name"] for one in of["texts"]] == ["Rivers", "Mills"]
    for one in of["texts"]:
        for name, row in one["rows"].items():
            assert row["unread"] <= row["first_bound"] + 1e-9
            assert name == "one" or 0 < row["share"] < 1
        assert one["rows"]["pages, 0.25"]["share"] <= 0.25
        assert one["rows"]["pages, 0.25"]["kl"] > one["rows"]["one"]["kl"]
        assert one["rows"]["one"]["share"] == 1.0
        assert max(abs(one["rows"]["one"][each]) for each in ("unread", "kl")) < 1e-6
        assert one["rows"]["channels, epsilon=0.1"]["unread"] <= 0.1
    assert of["ms"].keys() == {*reading.TIMED}
    assert all(len(each) == 2 for times in of["ms"].values() for each in (times["own"], times["all"]))
    assert "| pages, 0.25 |" in text
    assert "true share unread" in text

    value["models"]["other"] = copy.deepcopy(of)
    for one in value["models"]["other"]["texts"]:
        for row in one["rows"].values():
            row["share"] = 1.0
    out.with_suffix(".json").write_text(json.dumps(value))
    reading.main(["--report-only", "--out", str(out), "--allow-dirty"])
    both = out.with_suffix(".md").read_text()
    assert f"(other, where every way reads more; {POCKET_FOLDER.name}: " in both
    assert "| other: share read | other: KL, nats |" in both


def test_what_cannot_be_measured_says_why(tmp_path: Path, books: list[Path]) -> None:
    given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--out", str(tmp_path / "x"), "--allow-dirty"]
    with pytest.raises(SystemExit, match="feed at least 4 tokens"):
        reading.main([*given, "--prompt", "300", "--tokens", "2"])
