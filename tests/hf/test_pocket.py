"""The pocket model retrieves, and its pruned caches equal zeroing by hand: the same tests, on trained keys."""

import functools
import json
import random
import shutil
import sys
from unittest import mock

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from grace_opt import instances, solve
from grace_opt.attention import interaction_matrix
from grace_opt.cli.app import app
from grace_opt.errors import CacheError, MissingLibraryError, OptionError
from grace_opt.hf import CacheConfig, CompressedCache, SnapKV, attention_implementation, capture_attention
from grace_opt.hf.bases.at_hand import basis_for
from grace_opt.hf.models import POCKET_BASIS, POCKET_FOLDER, ModelError, load_model, load_pocket
from grace_opt.hf.tools.demo import run_demo
from grace_opt.hf.tools.needle import filler, make_prompt
from tests import oracle

pocket = functools.cache(load_pocket)


def needle_ids(tokens, depth, seed):
    _, tokenizer = pocket()
    prompt = make_prompt(tokens, depth, count=lambda text: len(tokenizer(text).input_ids), seed=seed)
    return prompt, tokenizer(prompt.text, return_tensors="pt").input_ids


@pytest.mark.slow
def test_the_dense_cache_finds_needles():
    model, tokenizer = pocket()
    found = 0
    cells = [(tokens, depth) for tokens in (256, 512, 1024) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)]
    for seed, (tokens, depth) in enumerate(cells):
        prompt, ids = needle_ids(tokens, depth, seed)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0
        )
        found += prompt.found_in(tokenizer.decode(output[0, ids.shape[1] :]))
    assert found == len(cells)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("method", ["think", "grace"])
def test_logits_equal_zeroing_the_same_channels(fused, method, step, zeroed, close):
    model, _ = pocket()
    _, ids = needle_ids(400, 0.5, 3)
    prompt, continuation = ids[:, :-6], ids[:, -6:]
    with attention_implementation(model, "grace_sdpa"):
        cache = CompressedCache(model.config, method=method, ratio=0.6, fused=fused)
        found = step(model, cache, prompt, continuation)
        assert close(found, zeroed(model, cache.channel_mask(), prompt, continuation, recent=32))


def test_nothing_pruned_gives_the_dense_tokens():
    model, _ = pocket()
    _, ids = needle_ids(300, 0.2, 4)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    dense = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    with attention_implementation(model, "grace_sdpa"):
        cache = CompressedCache(model.config, ratio=0.0)
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), dense)
    assert cache.memory_report().pruned_tokens > 0  # the fused path was taken


def test_a_used_cache_refuses_a_prompt_without_new_tokens():
    """What generate() makes of a shorter prompt on a used cache (transformers 5.2 itself fails before that)."""
    model, _ = pocket()
    _, ids = needle_ids(400, 0.2, 4)
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        cache = CompressedCache(model.config, "grace")
        model(ids, past_key_values=cache)
        with pytest.raises(CacheError, match="no new tokens"):
            model(ids[:, :0], past_key_values=cache)


@pytest.mark.slow
def test_the_demo_reports_what_the_caches_do(monkeypatch, tmp_path):
    """Sizes and predictions of each row are those of a cache that is filled here, and what is found was in the text."""
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path))
    model, tokenizer = load_pocket()
    model.config._name_or_path = ""  # as a GGUF file has: the tokenizer is at hand, but nobody knows where
    made = run_demo(model, tokenizer, tokens=300, ratios=(0.5,), bits=(3.0, 2.0))
    dense, int4, think, grace, searched, three, two = made.rows
    names = ["dense", "int4", "THINK", "GRACE", "GRACE + local search", "3 bits", "2 bits"]
    assert [row.method for row in made.rows] == names
    assert (dense.right, dense.bits, dense.kl, made.questions) == (5, 16, 0, 5)
    prompt = make_prompt(300, 0.5, count=lambda text: len(tokenizer(text).input_ids))
    ids = tokenizer(prompt.context, return_tensors="pt").input_ids
    assert made.context_tokens == ids.shape[1]
    assert dense.total_bytes == 3 * 2 * 2 * 64 * 2 * ids.shape[1]  # layers, K and V, heads, channels, bytes
    old = ids.shape[1] - 36  # 36 tokens stay dense
    for row, bits in ((three, 3), (two, 2)):
        assert bits - 0.1 < row.bits <= bits
        assert row.share == pytest.approx((36 + old * bits / 16) / ids.shape[1], abs=0.01)
    for row in made.rows[1:]:
        assert row.total_bytes == pytest.approx(row.share * dense.total_bytes, abs=1)
        assert 0 < row.kl < 1
        assert 0 < row.top1 < 1
    assert think.share == grace.share == searched.share > int4.share > three.share
    assert three.kl < two.kl
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        cache, reference = CompressedCache(model.config, method="think", ratio=0.5), DynamicCache(config=model.config)
        for each in (cache, reference):
            model(ids, past_key_values=each)
        rng = random.Random("later 0")
        later = tokenizer(" ".join(filler(rng) for _ in range(20)), return_tensors="pt").input_ids[:, :128]
        expected, found = (
            model(later, past_key_values=each).logits[0].double().softmax(-1) for each in (reference, cache)
        )
    assert think.kl == pytest.approx(float((expected * (expected / found).log()).sum(-1).mean()), rel=1e-6)
    total = 0.0
    for layer in capture_attention(model, ids).values():
        for head in interaction_matrix(layer.queries[0, :, -32:], layer.keys[0]).double().numpy():
            total += oracle.objective(head, oracle.think(head, 32))
    assert made.solvers[0].objective == pytest.approx(total, rel=1e-5)
    assert made.solvers[2].objective <= made.solvers[1].objective
    assert all(0 <= row.gap < 1 for row in made.solvers)


def test_the_basis_that_ships_is_the_pocket_models():
    """Calibrated on documents of its grammar; the demo does not calibrate again."""
    model, _ = pocket()
    assert basis_for(model, POCKET_BASIS).texts == 6


@pytest.mark.slow
def test_a_cache_that_lost_the_passwords_is_not_right(monkeypatch):
    """Answers are looked for in the smaller cache: with few channels left, some are not found."""
    monkeypatch.setattr("grace_opt.hf.tools.demo.LATER_TOKENS", 8)
    model, tokenizer = pocket()
    dense, _, think, *_ = run_demo(model, tokenizer, tokens=300, ratio=0.84, ratios=(), bits=()).rows
    assert dense.right == 5
    assert think.right < 5


@pytest.mark.slow
def test_the_demo_command_writes_its_files(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    settings = tmp_path / "cache.json"
    CacheConfig(ratio=0.0, evict=SnapKV(budget=99)).to_json(settings, pocket()[0])
    done = CliRunner().invoke(app, ["demo", "--tokens", "250", "--config", str(settings), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "5 of 5" in done.output
    assert "Start with attach(model, bits=2.25)" in done.output
    report = json.loads((out / "demo.json").read_text())
    assert [row["ratio"] for row in report["solvers"]] == [*[0.3] * 3, *[0.5] * 3, *[0.6] * 3]
    assert [row["method"] for row in report["rows"][-3:]] == ["3 bits", "2 bits", "your settings"]
    assert report["rows"][-1]["share"] < 0.5
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in out.iterdir()) == ["demo.json", "demo.png"]


@pytest.mark.slow
def test_demo_errors(tmp_path):
    pytest.importorskip("matplotlib")
    run = CliRunner().invoke
    assert run(app, ["demo", "--model", str(tmp_path)]).exit_code == 2
    assert run(app, ["demo", "--depth", "2"]).exit_code == 2
    assert run(app, ["demo", "--tokens", "3"]).exit_code == 2
    assert run(app, ["demo", "--seed", "-1"]).exit_code == 2
    beyond = run(app, ["demo", "--tokens", "1500"])
    assert beyond.exit_code == 2
    assert "at most 1024" in beyond.stderr
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run(app, ["demo", "--tokens", "200", "--out", str(blocked)]).exit_code == 2


def test_models_that_can_not_be_loaded(tmp_path):
    with pytest.raises(ModelError, match="cannot load a model"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="no GGUF file"):
        load_model(str(tmp_path / "none.gguf"))
    for missing in (str(tmp_path / "none"), "./none", "one/two/three"):
        with pytest.raises(ModelError, match="no folder at"):
            load_model(missing)


def test_a_gguf_file_needs_gguf(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "small.gguf").touch()
    with pytest.raises(MissingLibraryError, match=r"reading small.gguf needs gguf, .*pip install"):
        load_model(str(tmp_path / "small.gguf"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda content: content[:1000]),
        ("config.json", lambda content: b"[]"),
        ("config.json", lambda content: content.replace(b'"hidden_size": 256', b'"hidden_size": "many"')),
        ("config.json", lambda content: content.replace(b'"hidden_size": 256', b'"hidden_size": 128')),
        ("tokenizer.json", lambda content: b"{"),
    ],
)
def test_damaged_files_of_a_model(name, change, tmp_path):
    shutil.copytree(POCKET_FOLDER, tmp_path / "model")
    file = tmp_path / "model" / name
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    assert file.read_bytes() != whole
    with pytest.raises(ModelError, match=r"cannot load a model from .*transformers said: \w+: "):
        load_model(str(tmp_path / "model"))


def test_errors_of_several_lines_are_quoted_in_one(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "grace_opt.hf.models.loading.AutoTokenizer.from_pretrained", mock.Mock(side_effect=ValueError("a:\nb"))
    )
    with pytest.raises(ModelError, match=r"ValueError: a: b$"):
        load_model(str(tmp_path))


def test_a_captured_head_is_an_instance_for_the_command_line(tmp_path):
    model, _ = pocket()
    _, ids = needle_ids(200, 0.5, 0)
    layer = capture_attention(model, ids, layers=[1])[1]
    W = interaction_matrix(layer.queries[0, :, -32:], layer.keys[0])
    instances.write(tmp_path / "w.safetensors", W.numpy(), 39)
    done = CliRunner().invoke(app, ["solve", str(tmp_path / "w.safetensors"), "--certify", "--json"])
    (answer,) = json.loads(done.stdout)
    assert len(answer["objective"]) == 2
    assert max(answer["gap"]) < 0.9


def test_prompts_too_short_for_their_facts():
    _, tokenizer = pocket()
    with pytest.raises(OptionError, match="at least that"):
        make_prompt(20, 0.5, count=lambda text: len(tokenizer(text).input_ids))


def test_the_default_certificate_of_a_head_leaves_a_gap_below_one_percent():
    model, _ = pocket()
    _, ids = needle_ids(400, 0.5, 3)
    heads = [interaction_matrix(c.queries[0], c.keys[0]) for _, c in sorted(capture_attention(model, ids).items())]
    W = torch.stack(heads).double()
    best = solve(W, W.shape[-1] // 2, "portfolio").verify()
    assert best.gap.median() <= 0.01
