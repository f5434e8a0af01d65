"""The benchmark of blocks, in small: its codecs, records, page and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench import blocks, provenance
from grace_opt.hf.models import POCKET_FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], books_alone: None, monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, on books alone, with shorter blocks."""
    monkeypatch.setattr(blocks, "BLOCK", 128)

    def run(*changes: str) -> str:
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        given = ["--model", str(POCKET_FOLDER), "--text", *map(str, books), "--prompt", "256", "--tokens", "8"]
        blocks.main([*given, "--passages", "1", *folders, "--allow-dirty", *changes])
        return (tmp_path / "results" / "pocket.md").read_text()

    return run


@pytest.mark.slow
def test_numbers_go_into_records_and_onto_a_page(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    monkeypatch.setattr(blocks, "ROUNDS", 1)
    text = start()
    (of,) = json.loads((tmp_path / "results" / "pocket.json").read_text())["models"].values()
    (case,) = of["cases"]
    assert list(case["blocks"]["kl"]) == list(case["blocks"]["bits"]) == list(blocks.LOOKS)
    assert all(0 <= kl < 20 for kl in case["blocks"]["kl"].values())
    for bits in blocks.BITS:
        assert case["blocks"]["bits"][blocks.OURS.format(bits)] == pytest.approx(bits, rel=0.01)
    assert all(f"| {name} |" in text for name in blocks.LOOKS)
    monkeypatch.setattr(blocks, "measure", lambda *rest: pytest.fail("measured again"))
    assert start() == text


def test_codecs_of_lmcache_take_the_bits_of_their_layout() -> None:
    block = torch.randn(2, 6, 32, 128)
    read, bits = blocks.turboquant(range(6), 2, 0, block)
    assert bits == block[0].numel() * (4 + 4) + 6 * 2 * 32 * (
        16 + 32
    )  # a norm per key, a scale and an offset per value
    assert 0 < (read - block).square().mean() < 0.02
    whole, more = blocks.turboquant(range(6), 2, 2, block)
    assert torch.equal(whole[:, [0, 1, 4, 5]], block[:, [0, 1, 4, 5]])
    assert torch.equal(whole[:, 2:4], read[:, 2:4])
    assert more == 16 * block[:, :4].numel() + bits / 3
    halved, eight = blocks.fp8([1], block)
    assert eight == 8 * block[:, 1].numel()
    assert torch.equal(halved[:, 0], block[:, 0])


@pytest.mark.parametrize(
    "changes", [("--prompt", "255"), ("--tokens", "1"), ("--passages", "0")], ids=lambda changes: changes[0]
)
def test_refusals(start, changes: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match=" ".join(changes)):
        start(*changes)
