"""The efficiency benchmark end to end on a tiny model: complete, honest about what did not run, no word on times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import torch
from transformers.cache_utils import DynamicCache

from bench import machine
from bench.efficiency import __main__ as efficiency
from bench.efficiency import measure, report
from bench.efficiency.methods import METHODS, held_bytes, missing
from bench.efficiency.subject import TINY as SIZES
from bench.efficiency.subject import check_fits, random_weights
from bench.machine import MODELS, copy_bandwidth
from grace_opt.hf.models import POCKET_FOLDER

TINY = ["--shape", "tiny", "--context", "384", "--rounds", "2", "--new-tokens", "5", "--allow-dirty"]


@pytest.fixture(autouse=True)
def small():
    """Tiny matrices: threads only cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where results go."""
    return tmp_path / "results" / "tiny"


def rows(out: Path) -> list[dict]:
    """What was written, by method and λ."""
    return json.loads(out.with_suffix(".json").read_text())["rows"]


@pytest.mark.slow
def test_every_cache_is_measured(out: Path) -> None:
    efficiency.main([*TINY, "--ratio", "0.5", "0.6", "--attention", "sdpa", "eager", "--out", str(out)])
    found = rows(out)
    assert len(found) == 2 * (2 + 6 * 2)
    for row in found:
        if said := missing(row["method"]):
            assert row["status"] == said
            continue
        assert row["status"] == "measured"
        assert len(row["ttft_s"]) == len(row["tpot_s"]) == 2
        assert min(*row["ttft_s"], *row["tpot_s"], row["peak_bytes"], row["cache_bytes"]) > 0
        assert len(row["selection_s"]) == (2 if METHODS[row["method"]].ours else 0)
        assert all(c < f for c, f in zip(row["selection_s"], row["ttft_s"], strict=False))
        assert row["median"]["ttft_s"] == pytest.approx(sum(row["ttft_s"]) / 2)
    for attention in ("sdpa", "eager"):
        bytes_of = {(r["method"], r["ratio"]): r["cache_bytes"] for r in found if r["attention"] == attention}
        # K and V of 384 + 4 tokens, 2 KV heads of 16 channels, 2 layers, in float32.
        assert bytes_of["dense", None] == 2 * 388 * 2 * 16 * 2 * 4
        for method in ("think", "grace", "grace+local_search"):
            assert bytes_of[method, 0.6] < bytes_of[method, 0.5] < bytes_of["dense", None]
        if missing("grace+int4") is None:
            few = [bytes_of[f"grace+int4{values}", 0.6] for values in ("-kv", "")]
            assert few == sorted(few)
            assert few[1] < bytes_of["grace", 0.6]
            assert bytes_of["int4", None] < few[1]
    text = out.with_suffix(".md").read_text()
    assert text.count("| GRACE | 0.6 |") == 2
    assert "all 2 layers" in text
    assert "RTX 3090" not in text  # the paper has no such model
    assert str(out.parent) not in text + out.with_suffix(".json").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_real_model(out: Path) -> None:
    efficiency.main([*TINY[2:], "--model", str(POCKET_FOLDER), "--methods", "dense", "grace", "--out", str(out)])
    assert [row["status"] for row in rows(out)] == ["measured"] * 2


@pytest.mark.slow
def test_one_out_of_memory_does_not_lose_the_others(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = measure.turn

    def harmed(model, row, *rest):
        if row.method == "think":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if row.method == "grace+local_search":
            raise RuntimeError("no such kernel\nand more")
        turn(model, row, *rest)

    monkeypatch.setattr(measure, "turn", harmed)
    methods = ["dense", "think", "grace", "grace+local_search"]
    efficiency.main([*TINY, "--methods", *methods, "--out", str(out)])
    assert [row["status"] for row in rows(out)] == ["measured", "out of memory", "measured", "failed: no such kernel"]
    assert "| THINK | 0.6 | out of memory |" in out.with_suffix(".md").read_text()


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_measured(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, left = measure.turn, [None] * 7  # 2 caches, 3 turns each; then the first of the next size

    def interrupted(*arguments):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        turn(*arguments)

    monkeypatch.setattr(measure, "turn", interrupted)
    arguments = [*TINY, "--context", "384", "512", "--methods", "dense", "grace", "--out", str(out)]
    with pytest.raises(SystemExit, match=r"what was measured is in tiny\.json"):
        efficiency.main(arguments)
    assert [row["status"] for row in rows(out)] == ["measured"] * 2 + [measure.STOPPED] * 2
    before = out.with_suffix(".json").read_text()
    with pytest.raises(SystemExit, match="nothing was measured"):
        efficiency.main(arguments)
    assert out.with_suffix(".json").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "gpt9"], "--shape gpt9: write one of llama3-8b"),
        (["--methods", "dense", "magic"], "--methods magic: write one of dense"),
        (["--attention", "flash"], "write one of sdpa, eager"),
        (["--context", "9000"], "this model reads at most 8192"),
        (["--context", "32"], "--context: write at least 33"),
        (["--ratio", "1.5"], "--ratio: write shares between 0 and 1"),
        (["--ratio", "0.99"], "--ratio 0.99: .*may be protected"),
        (["--layers", "3"], "--layers 3: tiny has 2"),
        (["--new-tokens", "4"], "--new-tokens: write at least 5"),
        (["--rounds", "0"], "--rounds: write at least 1"),
        (["--model", "x", "--layers", "1"], "--layers cuts a --shape"),
        (["--model", "/no/such/model"], "--model: no folder at"),
    ],
)
def test_bad_input_says_what_to_write(arguments: list[str], said: str, out: Path) -> None:
    with pytest.raises(SystemExit, match=said):
        efficiency.main([*TINY, *arguments, "--out", str(out)])
    assert not out.parent.exists()


@pytest.mark.parametrize(("name", "billions"), [("llama3-8b", 8.03), ("mistral-7b", 7.24)])
def test_weights_are_those_that_the_models_are_known_by(name: str, billions: float) -> None:
    model = MODELS[name]
    total = model.layers * model.layer_weights + 2 * model.head_weights  # the embedding has a matrix of its own
    assert total / 1e9 == pytest.approx(billions, abs=0.005)


def test_the_rate_of_a_copy_is_that_of_the_median_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.COPIED, "cpu", 1000)
    ends = iter([0.0, 90.0, 0.0, 1.0, 0.0, 2.0, 0.0, 8.0])
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    assert copy_bandwidth("cpu", rounds=3) == 2 * 4 * 1000 / 2.0


def test_weights_that_do_not_fit_are_refused() -> None:
    sizes = replace(SIZES, hidden=10**6, intermediate=10**6, layers=1000)
    with pytest.raises(SystemExit, match=r"take .*B and there are .*B: write"):
        check_fits(sizes, "cpu", "float32")


def test_the_paper_stands_beside_its_own_shape() -> None:
    row = measure.Row("sdpa", 1, 2048, "grace", 0.6, "measured", [3.0], [0.1], [0.3], 10, 20)
    (line,) = [line for line in report.table([row], paper=True) if line.startswith("| GRACE")]
    assert line.endswith("| 2.8 s | 72.4 ms |")
    assert "| 10.0% |" in line
    assert "RTX 3090" in report.table([row], paper=True)[0]


def test_bytes_of_other_caches_are_those_of_their_storages() -> None:
    subject = random_weights("tiny", 1, "cpu", "bfloat16")
    cache = DynamicCache(config=subject.model.config)
    with torch.no_grad():
        subject.model(torch.zeros(2, 7, dtype=torch.long), past_key_values=cache)
    assert held_bytes(cache) == 2 * (2 * 2 * 7 * 16) * 2
