"""`bench.decode_bits` measures what it says, on small sizes; that its page is made from its numbers."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from bench import decode_bits, decode_bits_layer, decode_bits_page, several
from bench.decode_bits_page import BEFORE, CODED, COPIES, DENSE, HERE, NOTHING, OURS, PEER
from bench.provenance import write_json
from bench.report import RESULTS, read_results, write_results
from grace_opt.hf import calibrate
from grace_opt.hf.models import POCKET_FOLDER, load_pocket
from grace_opt.hf.stores.coded.in_place import attention_in_place

HEADS = 2, 8, 64


@pytest.mark.slow
def test_a_run_from_the_command_line(tmp_path, books, monkeypatch):
    pytest.importorskip("optimum.quanto")
    for name, size in {"PASSAGES": (400, 500), "LAYER": 400, "READ": 500}.items():
        monkeypatch.setattr(decode_bits, name, size)
    monkeypatch.setattr(decode_bits_layer, "COLD", 2**18)
    monkeypatch.setattr(decode_bits_layer, "KINDS", dict.fromkeys(decode_bits_layer.POORER, "of-tomorrow"))
    monkeypatch.setattr(decode_bits, "copy_bandwidth", lambda device: 1e9)
    made, text = calibrate.basis, books[1].read_text()[:2000]  # what is coded well matters little
    monkeypatch.setattr(calibrate, "basis", lambda model, tokenizer: made(model, tokenizer, [text]))
    out = tmp_path / "results" / "pocket"
    given = ["--text", str(books[0]), "--runs", str(tmp_path / "runs"), "--out", str(out), "--rounds", "2"]
    decode_bits.main([*given, "--model", str(POCKET_FOLDER), "--allow-dirty"])
    (of,) = read_results(out)["models"].values()
    assert [cell["tokens"] for cell in of["steps"]] == [400, 500]
    for cell in of["steps"]:
        assert set(cell["ms"]) == set(cell["bytes"]) == {DENSE, *CODED, COPIES, BEFORE, PEER, NOTHING}
        assert cell["bytes"][COPIES] < cell["bytes"][OURS]  # no addresses: nothing is read in place
        assert all(len(times) == 2 for times in cell["ms"].values())
        assert cell["bytes"][OURS] < cell["bytes"][BEFORE] < cell["bytes"][DENSE]
    assert {*of["peak"], COPIES, NOTHING} == set(cell["ms"])
    assert of["peak"][OURS] < of["peak"][DENSE]
    config = load_pocket()[0].config
    assert of["heads"] == [config.num_key_value_heads, config.num_attention_heads, config.head_dim]
    layer = of["layer"][HERE]
    assert of["layer"].keys() == {HERE}
    assert layer["dense_bytes"] > 10 * layer["bytes"]
    assert len(layer["ms"].keys() - {*CODED}) == 3
    assert decode_bits_page.best_dense(layer["ms"]) not in CODED
    assert of["elsewhere"] == []

    source, cells = several.require_clean(True), iter(of["steps"] * 2)
    monkeypatch.setattr(several, "require_clean", lambda allow_dirty: {**source, "cpu": "another"})
    monkeypatch.setattr(decode_bits, "calibrated", lambda *rest: None)
    monkeypatch.setattr(decode_bits, "one_layer", lambda *rest: layer)
    monkeypatch.setattr(decode_bits, "whole_steps", lambda *rest: without_peer(next(cells)))
    monkeypatch.setattr(decode_bits, "reading", lambda *rest: without_peer({"ms": of["peak"]})["ms"])
    other = shutil.copytree(POCKET_FOLDER, tmp_path / "other")
    decode_bits.main([*given, "--model", str(POCKET_FOLDER), str(other), "--allow-dirty"])
    models = read_results(out)["models"]
    assert [[one["provenance"]["cpu"] for one in of["elsewhere"]] for of in models.values()] == [[source["cpu"]], []]
    text = out.with_suffix(".md").read_text()
    assert "where it saves least of 2 models, a whole step takes " in text
    assert f"({POCKET_FOLDER.name}, {source['cpu']}) of the dense cache's time." in text
    assert "Beside QuantizedCache" not in text
    with pytest.raises(SystemExit, match=r"--rounds 400: 1302 tokens are fed, but the context of pocket has 1152"):
        decode_bits.main([*given, "--model", str(POCKET_FOLDER), str(other), "--rounds", "400", "--allow-dirty"])


def without_peer(cell: dict) -> dict:
    """Leave out transformers' QuantizedCache, as for a model with a sliding window."""
    return {**cell, "ms": {name: times for name, times in cell["ms"].items() if name != PEER}}


def test_a_model_with_a_sliding_window_has_no_quantized_cache(tmp_path):
    model, _ = load_pocket()
    assert PEER in decode_bits.caches(model, tmp_path)
    model.config.sliding_window = 64
    assert PEER not in decode_bits.caches(model, tmp_path)


def test_with_less_only_what_this_processor_has_is_told(monkeypatch):
    monkeypatch.setattr(decode_bits_layer, "KINDS", {"x86-64-v3": "sse2", "x86-64-v4": "of-tomorrow"})
    monkeypatch.setattr(decode_bits_layer, "FEATURES", frozenset({"+sse2", "+avx2"}))
    said = "import json, os, sys; print('...'); json.dump({{'tokens': {}, **os.environ}}, sys.stdout)"
    monkeypatch.setattr(decode_bits_layer, "_ONE_LAYER", said)
    found = decode_bits_layer.with_less(HEADS, 400, 1)
    assert found.keys() == {"x86-64-v3"}
    assert found["x86-64-v3"]["tokens"] == [[*HEADS], 400, 1]
    assert found["x86-64-v3"]["NUMBA_CPU_FEATURES"] == "+sse2"
    assert found["x86-64-v3"]["ATEN_CPU_CAPABILITY"] == "avx2"


def test_dense_copies_are_read_where_it_is_said():
    old, query, keys, values = decode_bits_layer.coded_layer(HEADS, 300)
    given = torch.nn.Identity(), query, keys, values, None, old, 1.0
    with decode_bits.out_of_place():
        assert attention_in_place(*given) is None
    assert attention_in_place(*given) is not None


def test_wrong_numbers_are_not_timed():
    old, query, keys, values = decode_bits_layer.coded_layer(HEADS, 300)
    (row,) = old.rows
    row.table().units[0, 0] -= 8  # tokens of the first class
    with pytest.raises(SystemExit, match="nothing is worth timing"):
        decode_bits_layer.check((old, query, keys, values))
    decode_bits_layer.check((replace(old, rows=(replace(row),)), query, keys, values))
    assert torch.is_tensor(keys)


def test_the_page_says_what_other_machines_took(tmp_path):
    def seen(out):
        return decode_bits_page.elsewhere(out).get("smollm2-135m", [])

    value = read_results(RESULTS / "decode_bits")
    of, out = value["models"]["smollm2-135m"], tmp_path / "decode_bits"
    assert seen(out) == []
    here = of["provenance"]["cpu"]
    write_json(out.with_suffix(".json"), {**value, "models": {"smollm2-135m": {**of, "elsewhere": []}}})
    (other,) = seen(out)
    assert other["provenance"]["cpu"] == here
    moved = {**of, "elsewhere": [other], "provenance": {**of["provenance"], "cpu": "this one"}}
    text = write_results(out, {**value, "models": {"smollm2-135m": moved}}, decode_bits_page.page)
    last = of["steps"][-1]
    share = decode_bits_page.ratio(last["ms"], OURS, DENSE)
    said = f"that after {last['tokens']:,} tokens took {share:.2f} (smollm2-135m, {here}) of the dense cache's time."
    assert said in text
    rows = [
        line for line in text.splitlines() if line.startswith((f"| smollm2-135m | {here}, ", "| smollm2-135m | this"))
    ]
    assert [row.split("|")[3:] for row in rows[:1]] == [row.split("|")[3:] for row in rows[1:]]
    assert [one["provenance"]["cpu"] for one in seen(out)] == [here, "this one"]
