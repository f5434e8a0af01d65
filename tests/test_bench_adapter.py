"""The benchmark of a real model in small: its numbers and page, and a run that was stopped goes on."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from bench import provenance, real_model, real_model_page
from grace_opt.hf import attention_implementation
from grace_opt.hf.models import POCKET_FOLDER
from grace_opt.hf.tools.needle import filler

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text that the pocket model can read, with the header of a book."""
    rng = random.Random(0)
    path = tmp_path / "book.txt"
    text = " ".join(filler(rng) for _ in range(40))
    path.write_text(f"# Title: On Rivers\n\n## Author: A. Nobody\n\n-----\n\n{text}")
    return path


@pytest.fixture
def start(tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark on two prompts, as from the command line."""

    def run(*changes: str) -> None:
        arguments = (
            f"--model {POCKET_FOLDER} --text {book} --prompts 2 --tokens 128 --new-tokens 4 --allow-dirty".split()
        )
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        monkeypatch.setattr(sys, "argv", ["real_model", *arguments, *folders, *changes])
        real_model.main()

    return run


@pytest.mark.slow
def test_real_model_writes_a_table_and_goes_on(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = real_model.measure, []

    def counting(*arguments):
        measured.append(1)
        return measure(*arguments)

    monkeypatch.setattr(real_model, "measure", counting)
    monkeypatch.setattr(real_model, "RATIOS", (0.5,))
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    other = tmp_path / "other"
    shutil.copytree(POCKET_FOLDER, other)
    start("--model", str(other))
    start()
    assert len(measured) == 4
    text, value = ((tmp_path / "results" / f"pocket{suffix}") for suffix in (".md", ".json"))
    before = text.read_text(), json.loads(value.read_text())
    assert "A. Nobody: On Rivers" in before[0]
    assert str(tmp_path) not in before[0] + value.read_text()
    models = before[1]["models"]
    assert set(models) == {POCKET_FOLDER.name, "other"}
    assert models["other"]["rows"] == models[POCKET_FOLDER.name]["rows"]  # the same weights
    for label, of in models.items():
        assert before[0].count(f"| {label} | GRACE − THINK |") == len(real_model.RATIOS)
        assert of["head_dim"] == 64
        for record in of["by prompt"]:
            assert all(cell["kl"] >= 0 and 0 <= cell["prefix"] <= 4 for cell in record["pruned"])
            assert all(cell["key_bytes"] < record["dense"]["key_bytes"] for cell in record["pruned"])
    (grace,) = (row["kl"] for row in of["rows"] if row["method"] == "GRACE")
    (think,) = (row["kl"] for row in of["rows"] if row["method"] == "THINK")
    assert f"GRACE has {grace / think:.2f} times the KL divergence of THINK at λ = 0.5 on " in before[0]
    assert "on all 2 models" in before[0]

    first, second = sorted((tmp_path / "runs" / POCKET_FOLDER.name).iterdir())
    untouched = first.stat().st_mtime_ns
    second.unlink()
    start()
    assert len(measured) == 5
    assert first.stat().st_mtime_ns == untouched
    assert json.loads(value.read_text())["models"] == models

    second.write_text(second.read_text()[:100])  # cut short: measured again
    start()
    assert len(measured) == 6
    with pytest.raises(SystemExit, match="new_tokens was 4 and is 3"):  # and the other model would stay on the page
        start("--new-tokens", "3")
    value.unlink()
    start("--new-tokens", "3")  # other settings: nothing of before counts
    assert len(measured) == 8


def test_layers_of_sliding_windows_count_in_every_cache() -> None:
    sizes = {"vocab_size": 9, "hidden_size": 32, "intermediate_size": 32, "head_dim": 64, "sliding_window": 16}
    heads = {"num_hidden_layers": 6, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**sizes, **heads)).eval()
    with attention_implementation(model, "grace_sdpa"):
        found = real_model.measure(model, torch.arange(100)[None] % 9, 2, lambda step: None)
    dense = found["dense"]
    assert dense["total_bytes"] == 2 * dense["key_bytes"] == 2 * 4 * 64 * (99 + 5 * 15)
    for cell in found["pruned"]:
        assert cell["key_bytes"] < dense["key_bytes"]
        assert cell["total_bytes"] - cell["key_bytes"] == dense["total_bytes"] - dense["key_bytes"]


def test_real_model_names_what_is_missing(start, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no text at"):
        start("--text", str(tmp_path / "nothing.txt"))
    with pytest.raises(SystemExit, match=r"no passage 1 of 900 tokens.*longer --text"):
        start("--tokens", "900")
    with pytest.raises(SystemExit, match="at most 1148"):
        start("--tokens", "1150")


def test_an_interval_covers_its_mean_and_is_a_point_where_all_agree() -> None:
    mean, low, high = real_model_page.interval([0.1, 0.2, 0.4])
    assert low < mean < high
    assert real_model_page.interval([0.25] * 4) == (0.25, 0.25, 0.25)
