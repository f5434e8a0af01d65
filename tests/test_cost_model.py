"""The cost model's formulas are what can be counted: by hand, by torch's counter, and in the cache's own tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from bench import cost_model
from bench.cost_model import MODELS, Cost, Model, Rates
from bench.report import si
from grace_opt import interaction_matrix
from grace_opt.hf import CompressedCache

TINY = Model("tiny", layers=2, kv_heads=2, query_heads=4, head_dim=10, hidden=24, intermediate=36, vocabulary=50)
TOKENS = 50


pytestmark = pytest.mark.usefixtures("one_thread")


def llama(model: Model) -> LlamaConfig:
    """A Llama of this shape."""
    return LlamaConfig(
        num_hidden_layers=model.layers,
        num_attention_heads=model.query_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        vocab_size=model.vocabulary,
        tie_word_embeddings=False,
    )


def counted(run) -> int:
    """Operations of all products, by torch, but for the angles of RoPE, which are no weights and no attention."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    angles = [sum(of.values()) for name, of in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(angles)


@pytest.fixture(scope="module")
def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama(TINY)).to(torch.bfloat16).eval()


# ------------------------------------------------------------- by hand


def test_the_floor_is_the_longer_of_the_two() -> None:
    assert Cost(100, 6).floor(bandwidth=50, rate=6) == 2
    assert Cost(100, 6).floor(bandwidth=100, rate=2) == 3
    assert Cost(100, 6).times(3) == Cost(300, 18)


def test_passes_that_wait_for_each_other_add_up() -> None:
    rates = Rates("any", bandwidth=10, rate=10)
    assert cost_model.seconds([Cost(100, 0), Cost(0, 50)], rates) == 15
    assert cost_model.bound_by([Cost(100, 0), Cost(0, 50)], rates) == "bytes"
    assert cost_model.bound_by([Cost(10, 0), Cost(0, 50)], rates) == "products"


def test_small_cases_by_hand() -> None:
    # Keys: 2 heads of 50 tokens, queries: 4 heads of 3, all of 10 numbers of 2 bytes; W: 2 times 100 of 4 bytes.
    assert cost_model.gram(TINY, 50, observed=3) == Cost((100 + 12) * 20 + 800, 2 * 112 * 100)
    assert cost_model.gram(TINY, 50, batch=5, observed=3) == cost_model.gram(TINY, 50, observed=3).times(5)
    # 6 of 10 channels go: 7 rows of 10 numbers of 4 bytes, 60 updates of a product and a sum, in 2 heads.
    assert cost_model.mies(TINY, 0.6) == Cost(2 * 7 * 40, 2 * 120)
    # 50 × 10 numbers are read; written are 18 × 4, 32 × 10, and 4 indices of 8 bytes; in 2 heads.
    assert cost_model.gather(TINY, 50, 0.6) == Cost(2 * (1000 + 144 + 640 + 32), 0)
    # One layer has 2 · 24 · 40 + 2 · 24 · 20 + 3 · 24 · 36 weights, the head 24 · 50.
    assert (TINY.layer_weights, TINY.head_weights) == (5472, 1200)
    assert cost_model.decode(TINY, 50).bytes == 2 * (2 * 5472 + 1200) + 2 * (2 * 2 * 51 * 20)


@pytest.mark.parametrize(("name", "billions"), [("llama3-8b", 8.03), ("mistral-7b", 7.24), ("qwen3-8b", 8.19)])
def test_weights_are_those_that_the_models_are_known_by(name: str, billions: float) -> None:
    model = MODELS[name]
    total = model.layers * model.layer_weights + 2 * model.head_weights  # the embedding has a matrix of its own
    assert total / 1e9 == pytest.approx(billions, abs=0.005)


def test_pruning_saves_of_keys_and_values_what_the_rule_says() -> None:
    model = MODELS["llama3-8b"]
    assert cost_model.cache_ratio(model, 131072, 0.5) == pytest.approx(1 / (1 - 0.5 / 2), rel=1e-3)
    assert cost_model.cache_ratio(model, 131072, 0.6) == pytest.approx(1 / (1 - 0.6 / 2), rel=3e-3)


def test_a_step_gains_less_than_its_cache() -> None:
    for model in MODELS.values():
        cell = cost_model.summary(model, 8192, 0.6, 8, [cost_model.VENDOR])
        assert 1 < cell["step_bytes_ratio"] < cell["cache_ratio"]
        assert cell["floors"][0]["step_ratio"] == pytest.approx(cell["step_bytes_ratio"])  # bytes bind there


# -------------------------------------------------------- by torch's counter


@pytest.mark.parametrize("batch", [1, 3])
def test_gram_is_what_the_interaction_matrix_multiplies(batch: int) -> None:
    queries, keys = torch.randn(batch, 4, 7, 10), torch.randn(batch, 2, TOKENS, 10)
    flops = counted(lambda: interaction_matrix(queries, keys))
    assert cost_model.gram(TINY, TOKENS, batch, observed=7).flops == flops


def test_weights_are_the_matrices_of_a_model(network: LlamaForCausalLM) -> None:
    matrices = sum(p.numel() for p in network.parameters() if p.ndim == 2)
    assert TINY.layers * TINY.layer_weights + 2 * TINY.head_weights == matrices


def test_prefill_is_what_a_model_multiplies(network: LlamaForCausalLM) -> None:
    ids = torch.ones(2, TOKENS, dtype=torch.long)
    network.set_attn_implementation("eager")
    flops = counted(lambda: network(ids, logits_to_keep=1))
    above = TOKENS * (TOKENS - 1) // 2  # eager attention computes these too, and masks them
    masked = 2 * TINY.layers * TINY.query_heads * 4 * TINY.head_dim * above
    assert cost_model.prefill(TINY, TOKENS, 2).flops == flops - masked


@pytest.mark.parametrize("ratio", [None, 0.6])
def test_a_decoding_step_is_what_a_model_multiplies(network: LlamaForCausalLM, ratio: float | None) -> None:
    ids, step = torch.ones(2, TOKENS, dtype=torch.long), torch.ones(2, 1, dtype=torch.long)
    cache = None
    if ratio is not None:
        cache = CompressedCache(network, ratio=ratio)
    network.set_attn_implementation("eager" if ratio is None else "grace_eager")
    with torch.no_grad():
        cache = network(ids, past_key_values=cache, use_cache=True).past_key_values
    flops = counted(lambda: network(step, past_key_values=cache))
    assert cost_model.decode(TINY, TOKENS, ratio, 2).flops == flops


# -------------------------------------------------- by the cache's own tensors


def test_bytes_of_a_step_are_those_of_the_cache(network: LlamaForCausalLM) -> None:
    cache = CompressedCache(network, ratio=0.6)
    network.set_attn_implementation("grace_sdpa")
    with torch.no_grad():
        network(torch.ones(2, TOKENS, dtype=torch.long), past_key_values=cache)
    report = cache.memory_report()
    dense, pruned = (cost_model.decode(TINY, TOKENS, ratio, 2) for ratio in (None, 0.6))
    assert dense.bytes - pruned.bytes == report.dense_equivalent_key_bytes - report.key_bytes
    packed = cost_model.gather(TINY, TOKENS, 0.6, 2).times(TINY.layers)
    assert packed.bytes == report.dense_equivalent_key_bytes + report.key_bytes


# ---------------------------------------------------------- from the command line


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the script with these arguments; gives what it wrote."""

    def run(arguments: str) -> tuple[dict, str]:
        where = ["--allow-dirty", "--out", str(tmp_path / "cost_model")]
        monkeypatch.setattr(sys, "argv", ["cost_model", *arguments.split(), *where])
        cost_model.main()
        return json.loads((tmp_path / "cost_model.json").read_text()), (tmp_path / "cost_model.md").read_text()

    return run


def test_given_rates_are_used_and_called_so(start) -> None:
    value, text = start("--shape qwen3-8b --context 4096 --batch 2 --ratio .5 --bandwidth 100 --matrix-rate 2")
    assert value["machines"][0] == {"source": "here", "bandwidth": 1e11, "rate": 2e12}
    (cell,) = value["models"][0]["cells"]
    step = cost_model.decode(MODELS["qwen3-8b"], 4096, 0.5, 2)
    assert cell["floors"][0]["seconds"]["pruned decoding step"] == step.floor(1e11, 2e12)
    assert value["interaction_matrix"] is None
    assert "100 GB/s given, 2 TFLOP/s given" in text
    assert "**vendor's figures, nothing measured here**" in text


def test_rates_are_measured_where_none_is_given(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost_model.PROBES, "cpu", (torch.float32, 64, 2**12))
    value, text = start("--shape smollm2-135m --context 64 --batch 1 --rounds 2")
    here = value["machines"][0]
    assert min(here["bandwidth"], here["rate"]) > 0
    assert value["interaction_matrix"]["seconds"] > 0
    assert f"{si(here['bandwidth'], 'B/s')} measured (" in text
    assert f"{si(here['rate'], 'FLOP/s')} measured (" in text
    assert "For comparison, measured" in text


def test_a_rate_is_that_of_the_median(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost_model.PROBES, "cpu", (torch.float32, 64, 2**12))
    monkeypatch.setattr(cost_model, "timed", lambda runs, *_: {name: [1.0, 2.0, 9.0] for name in runs})
    value, _ = start("--shape smollm2-135m --context 64 --batch 1 --rounds 3")
    here = value["machines"][0]
    assert (here["bandwidth"], here["rate"]) == (2 * 4 * 2**12 / 2, 2 * 64**3 / 2)
    assert value["interaction_matrix"]["seconds"] == 2


def test_one_rate_given_leaves_the_other_to_be_measured(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cost_model.PROBES, "cpu", (torch.float32, 64, 2**12))
    value, text = start("--shape smollm2-135m --context 64 --batch 1 --rounds 2 --bandwidth 100")
    assert value["machines"][0]["bandwidth"] == 1e11
    assert "100 GB/s given" in text
    assert "FLOP/s measured (a float32 product, 64 × 64; the fastest" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--context 32", "more than the 32 tokens"),
        ("--batch 0", "at least 1"),
        ("--ratio 1", "between 0 and 1"),
        ("--bandwidth 0", "must be positive"),
    ],
)
def test_what_makes_no_sense_is_refused(start, arguments: str, message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        start(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [(0, "FLOP", "0 FLOP"), (15153, "s", "15,153 s"), (3e-7, "s", "0.3 µs"), (1.5e15, "FLOP", "1.5 PFLOP")],
)
def test_quantities_read_well(value: float, unit: str, words: str) -> None:
    assert si(value, unit) == words
