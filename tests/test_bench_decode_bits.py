"""`bench.decode_bits` measures what it says, on small sizes; that its page is made from its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import decode_bits
from bench.decode_bits import BEFORE, CODED, COPIES, DENSE, NOTHING, OURS, PEER
from bench.report import RESULTS, read_results, write_results
from grace_opt.hf import calibrate
from grace_opt.hf.models import load_pocket
from grace_opt.hf.stores.coded.in_place import attention_in_place


@pytest.fixture(scope="module")
def pocket(tmp_path_factory, books):
    model, tokenizer = load_pocket()
    file = tmp_path_factory.mktemp("basis") / "pocket.safetensors"
    calibrate.basis(model, tokenizer, [books[1].read_text()[:1000]]).save(file)  # what is coded well matters little
    ids = tokenizer(books[0].read_text(), return_tensors="pt").input_ids[:, :600]
    return model, ids, file


@pytest.mark.slow
def test_whole_steps_and_memory(pocket, monkeypatch):
    pytest.importorskip("optimum.quanto")
    monkeypatch.setattr(decode_bits, "READ", 500)
    model, ids, file = pocket
    found = decode_bits.whole_steps(model, ids, 500, file, rounds=2)
    assert set(found["ms"]) == {DENSE, *CODED, COPIES, BEFORE, PEER, NOTHING}
    assert found["bytes"][COPIES] < found["bytes"][OURS]  # no addresses: nothing is read in place
    assert all(len(times) == 2 for times in found["ms"].values())
    assert found["bytes"][OURS] < found["bytes"][BEFORE]
    most = decode_bits.reading(model, ids, file)
    assert {*most, COPIES, NOTHING} == set(found["ms"])
    assert most[OURS] < most[DENSE]


@pytest.mark.slow
def test_one_layer(monkeypatch):
    monkeypatch.setattr(decode_bits, "COLD", 2**20)
    found = decode_bits.one_layer(400, rounds=1)
    assert found["dense_bytes"] > 10 * found["bytes"]
    assert len(found["ms"].keys() - {*CODED}) == 3
    assert decode_bits.best_dense(found["ms"]) not in CODED


def test_with_less_only_what_this_processor_has_is_told(monkeypatch):
    monkeypatch.setattr(decode_bits, "KINDS", {"x86-64-v3": "sse2", "x86-64-v4": "of-tomorrow"})
    monkeypatch.setattr(decode_bits, "FEATURES", frozenset({"+sse2", "+avx2"}))
    said = "import json, os, sys; print('...'); json.dump({{'tokens': {}, **os.environ}}, sys.stdout)"
    monkeypatch.setattr(decode_bits, "_ONE_LAYER", said)
    found = decode_bits.with_less(400, 1)
    assert found.keys() == {"x86-64-v3"}
    assert found["x86-64-v3"]["tokens"] == [400, 1]
    assert found["x86-64-v3"]["NUMBA_CPU_FEATURES"] == "+sse2"
    assert found["x86-64-v3"]["ATEN_CPU_CAPABILITY"] == "avx2"


def test_dense_copies_are_read_where_it_is_said():
    old, query, keys, values = decode_bits.coded_layer(300)
    given = torch.nn.Identity(), query, keys, values, None, old, 1.0
    with decode_bits.out_of_place():
        assert attention_in_place(*given) is None
    assert attention_in_place(*given) is not None


def test_wrong_numbers_are_not_timed():
    old, query, keys, values = decode_bits.coded_layer(300)
    (row,) = old.rows
    row.table().units[0, 0] -= 8  # tokens of the first class
    with pytest.raises(SystemExit, match="nothing is worth timing"):
        decode_bits.check((old, query, keys, values))
    decode_bits.check((replace(old, rows=(replace(row),)), query, keys, values))
    assert torch.is_tensor(keys)


def test_the_page_says_what_other_machines_took(tmp_path):
    value = read_results(RESULTS / "decode_bits")
    out = tmp_path / "decode_bits"
    assert decode_bits.elsewhere(out, "this one") == []
    here = value["provenance"]["cpu"]
    write_results(out, {**value, "elsewhere": []}, decode_bits.page)
    (other,) = found = decode_bits.elsewhere(out, "this one")
    assert other["provenance"]["cpu"] == here
    assert decode_bits.elsewhere(out, here) == []
    moved = {**value, "elsewhere": found, "provenance": {**value["provenance"], "cpu": "this one"}}
    text = write_results(out, moved, decode_bits.page)
    last = value["steps"][-1]
    share = decode_bits.ratio(last["ms"], OURS, DENSE)
    assert f"On {here}, the step after {last['tokens']:,} took {share:.2f} of the dense cache's time." in text
    rows = [line for line in text.splitlines() if line.startswith((f"| {here}, ", "| this one, "))]
    assert [row.split("|")[2:] for row in rows[:1]] == [row.split("|")[2:] for row in rows[1:]]
    assert [one["provenance"]["cpu"] for one in decode_bits.elsewhere(out, here)] == ["this one"]
    assert [one["provenance"]["cpu"] for one in decode_bits.elsewhere(out, "a third")] == [here, "this one"]
