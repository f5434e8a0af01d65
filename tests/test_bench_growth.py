"""The benchmark of a long generation, in small: its numbers, records, page and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("optimum.quanto")
pytest.importorskip("matplotlib")

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from bench import growth, provenance
from grace_opt.hf import attention_implementation, calibrate
from grace_opt.hf.models import POCKET_FOLDER
from grace_opt.hf.stores.coded import waiting as waits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, calibrated on little text."""

    make = calibrate.basis

    def little(model: object, tokenizer: object, texts: Sequence[str] = ("the old mill . " * 40,)) -> object:
        return make(model, tokenizer, texts)

    def run(*changes: str) -> str:
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "150", "--tokens", "512"]
        growth.main([*given, *folders, "--allow-dirty", *changes])
        return (tmp_path / "results" / "pocket.md").read_text()

    monkeypatch.setattr(calibrate, "basis", little)
    return run


@pytest.mark.slow
def test_numbers_go_into_records_and_onto_a_page(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    monkeypatch.setattr(waits, "SETTLED", 128)
    monkeypatch.setattr(waits, "NEWEST", 0)
    text = start()
    value = json.loads((tmp_path / "results" / "pocket.json").read_text())
    (of,) = value["models"].values()
    assert [one["name"] for one in of["texts"]] == ["Rivers", "Mills"]
    for one in of["texts"]:
        assert len(one["kl"]) == len(one["int4"]) == len(one["exact"]) == len(one["bits"]) == 2
        assert 0 < one["exact"][1] != one["kl"][1] > 0 < one["at_once"]
        assert max(map(abs, one["int4"])) < 0.1
        assert 2 < min(one["bits"]) <= max(one["bits"]) < 4
    assert "| 0 to 512 |" in text
    assert "Mills" in text
    monkeypatch.setattr(growth, "measure_growth", lambda *rest: pytest.fail("measured again"))
    assert start() == text

    value["models"]["other"] = {**of, "texts": [{**one, "trellis": one} for one in of["texts"]]}
    for one in value["models"]["other"]["texts"]:
        one["kl"] = [2 * max(one["kl"] + one["trellis"]["kl"])] * 2
    (tmp_path / "results" / "pocket.json").write_text(json.dumps(value))
    both = start("--report-only")
    assert "On other, KL is" in both
    assert f"the most of 2 models ({POCKET_FOLDER.name}: " in both
    assert "| other | 0 to 512 |" in both


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["sliding full", "full sliding"])
def test_coding_alone_takes_all_tokens_of_layers_with_sliding_windows(
    kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(growth, "WINDOW", growth.STEP)
    config = Gemma3TextConfig(
        **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024, "sliding_window": 32},
        layer_types=[f"{kind}_attention" for kind in kinds.split()],
        initializer_range=0.2,
    )
    model, ids, calls = Gemma3ForCausalLM(config).eval(), torch.randint(0, 300, (1, 150 + 2 * growth.STEP)), []
    settings = {"bits": growth.BITS, "basis": "none", "recent_window": growth.RECENT, "sink_tokens": growth.SINKS}
    with attention_implementation(model, "grace_sdpa"):
        found = growth.measure_growth(model, ids, settings, 150, lambda: calls.append(1))
    assert len(calls) == growth.RUNS
    # Only what comes after a coded layer passes errors on.
    assert (found["exact"] == pytest.approx(found["kl"], rel=0.01)) == (kinds == "sliding full")
    assert min(found["exact"]) > 0


def test_what_cannot_be_measured_says_why(start, tmp_path: Path) -> None:
    for changes, message in (
        (["--tokens", "100"], "give a multiple of 256"),
        (["--tokens", "1024"], "the context of pocket has 1152"),
        (["--prompt", "0"], "the context of pocket has 1152"),
        (["--prompt", "640"], "has .* tokens after its first 30 %, of 1152 needed"),
        (["--text", str(tmp_path / "none.txt")], "no text at"),
    ):
        with pytest.raises(SystemExit, match=message):
            start(*changes)
