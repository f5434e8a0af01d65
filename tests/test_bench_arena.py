"""The arena in small: prompts that were read, contenders, refusals, a run that goes on, its page."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("optimum.quanto")
pytest.importorskip("matplotlib")

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from bench import provenance, report, several
from bench.arena import __main__ as arena
from bench.arena import numbers, run, tables
from bench.arena.contenders import ABLATED, OURS, Subject, checked_bits, contenders, of_method, refused
from bench.arena.measure import Arena
from bench.arena.page import SHOWN, page
from bench.arena.prompt import Prompt
from bench.arena.run import BOTH_HALVES, CHAT, LONG, RETRIEVAL
from bench.arena.stored import Layer, Method, Stored
from bench.passages import cases, long_passages, passages
from bench.questions import Fact, Text, prompts
from grace_opt.errors import EvaluationError
from grace_opt.hf import CompressedCache, attention_implementation, calibrate
from grace_opt.hf.models import POCKET_FOLDER, load_pocket
from grace_opt.hf.tools.evaluation import compare_predictions
from grace_opt.hf.tools.needle import fact, filler, question

CALIBRATION = " ".join(filler(random.Random(number)) for number in range(150))
PASSWORDS = {"Rome": "amber fox", "Oslo": "jade whale", "Lima": "ivory panda"}
#: Competes in the run.
COMPETES = (
    *("bits-1", "bits-1-class-1", "bits-1-none", "bits-1-plain", "bits-2", "bits-2.25", "bits-3", "int4"),
    *("grace-0.5", "snapkv-at-2.25", "rounded-8", "finer-8"),
)


pytestmark = pytest.mark.usefixtures("one_thread")


def rounded(levels: int, bits: float):
    """Round every number to so many levels; says that it takes `bits` per element."""

    def store(layers: list[Layer], basis: object) -> list[Stored]:
        return [
            Stored(
                *((part * levels).round() / levels for part in (layer.keys, layer.values)),
                *(bits * part.numel() for part in (layer.keys, layer.values)),
                (layer.keys.shape[1],) * 2,
            )
            for layer in layers
        ]

    return store


def kept(bits: float):
    """Keep every number."""
    return lambda layers, basis: [
        Stored(one.keys, one.values, bits * one.keys.numel(), bits * one.values.numel(), (one.keys.shape[1],) * 2)
        for one in layers
    ]


PEERS = [
    Method("rounded-8", "rounded", "rounding", "nobody", rounded(16, 8.0)),
    Method("identity-32", "identity", "identity", "nobody", kept(32.0)),
    Method("finer-8", "fine rounding", "fine rounding", "nobody", rounded(64, 8.0)),
]


@pytest.fixture
def start(tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, calibrated on little text."""
    rng = random.Random(0)
    facts = ", ".join(
        "{" + f"says = '{fact(c, p)}', asks = '{question(c)}', answer = ['{p}']" + "}" for c, p in PASSWORDS.items()
    )
    asked = tmp_path / "asked.toml"
    asked.write_text(
        f"filler = [{json.dumps([filler(rng) for _ in range(40)])}]\n[[text]]\ntitle = 'a'\nfacts = [{facts}]"
    )
    sizes = "--tokens 200 --long 260 --later 12 --cases 2 --context 140 --chat 220 --new-tokens 2 --allow-dirty".split()
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
    texts = ["--text", *map(str, books), "--questions", str(asked), "--quick", "--methods", *COMPETES]

    def started(*changes: str) -> str:
        arena.main(["--model", str(POCKET_FOLDER), *texts, *sizes, *folders, *changes])
        return (tmp_path / "results" / "pocket.md").read_text()

    monkeypatch.setattr(arena, "peers", lambda: PEERS)
    monkeypatch.setattr(
        calibrate, "basis", lambda model, tokenizer, make=calibrate.basis: make(model, tokenizer, [CALIBRATION])
    )
    return started


# Prompts and contenders


@pytest.fixture(scope="module")
def read(books: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, Prompt, Tensor]:
    """The pocket model, a prompt that it read, and the tokens of that prompt."""
    model, tokenizer = load_pocket()
    basis = calibrate.basis(model, tokenizer, [CALIBRATION])
    file = tmp_path_factory.mktemp("basis") / "pocket.safetensors"
    basis.save(file)
    ids = passages(books, tokenizer, 200)[0].ids
    return Subject(model, basis, file), Prompt(model, ids), ids


@pytest.mark.slow
def test_layers_have_what_attention_and_output_need(read: tuple[Subject, Prompt, Tensor]) -> None:
    """From queries, keys, values and projections follows what each attention module returns."""
    subject, prompt, ids = read
    seen: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, _, out: seen.update({module.layer_idx: out[0][0]}))
        for layer in subject.model.model.layers
    ]
    with torch.no_grad():
        subject.model(ids)
    for hook in hooks:
        hook.remove()
    hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    for layer in prompt.layers:
        logits = torch.einsum("hgqd,hkd->hgqk", layer.queries, layer.keys) * layer.scaling
        shares = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        found = torch.einsum("hgqk,hkv,hgvo->qo", shares, layer.values, layer.output)
        assert torch.allclose(found, seen[layer.index], atol=1e-3)


@pytest.mark.parametrize("name", ["bits-2.25", "grace-0.5-int4", "snapkv-at-3", "pyramidkv-at-3", "h2o-at-3"])
def test_a_contender_has_the_cache_of_a_prompt_that_is_read(name: str, read: tuple[Subject, Prompt, Tensor]) -> None:
    subject, prompt, ids = read
    with attention_implementation(subject.model, "grace_sdpa"), torch.no_grad():
        cache, bits = contenders([])[name].make(subject, prompt)
        config = cache.layers[0].plan.config
        same = CompressedCache(subject.model, config=config)
        subject.model(ids, past_key_values=same)
    for one, other in zip(cache.layers, same.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.full_width(), other.full_width(), strict=True))
    assert 0 < bits.bits < 16


def test_evictions_take_the_bytes_of_ours(read: tuple[Subject, Prompt, Tensor]) -> None:
    subject, prompt, _ = read
    every = contenders([])
    for bits in ("2.25", "3"):
        ours = every[f"bits-{bits}"].make(subject, prompt)[1].share
        for name in ("snapkv", "pyramidkv", "h2o"):
            found = every[f"{name}-at-{bits}"].make(subject, prompt)[1].share
            assert 0.97 * ours < found <= 1.001 * ours


def test_variants_differ_and_go_no_further_than_their_block(read: tuple[Subject, Prompt, Tensor]) -> None:
    subject, prompt, _ = read
    every = contenders([])

    def keys(name: str) -> Tensor:
        return every[name].make(subject, prompt)[0].layers[0].full_width()[0]

    whole = keys("bits-2")
    for suffix in ("class-1", "none", "plain"):
        assert not torch.equal(keys(f"bits-2-{suffix}"), whole)
    assert not torch.equal(keys("bits-2-plain"), keys("bits-2-none"))
    assert torch.equal(keys("bits-2"), whole)


def test_a_method_is_counted_as_it_states_and_read_back(read: tuple[Subject, Prompt, Tensor]) -> None:
    subject, prompt, ids = read
    cache, bits = of_method(PEERS[0]).make(subject, prompt)
    assert (bits.bits, bits.share) == (8.0, 0.5)
    assert torch.equal(cache.layers[1].keys[0], (prompt.layers[1].keys * 16).round() / 16)
    assert cache.get_seq_length() == ids.shape[1]

    def windowed(layers: list[Layer], basis: object) -> list[Stored]:
        assert basis is subject.basis
        return [
            Stored(one.keys + 1, one.values + 1, 4.0 * one.keys.shape[0] * 64 * 100, 0.0, (100, 150)) for one in layers
        ]

    _, bits = of_method(Method("windowed", "", "", "", windowed)).make(subject, prompt)
    assert (bits.key_bits, bits.value_bits) == (4.0, 0.0)
    assert bits.bits == pytest.approx(4 * 100 / 250)
    assert bits.mean_bits == pytest.approx((4 * 100 + 16 * 150) / 400)


def test_layers_that_slide_stay_dense_whatever_the_method() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4},
        **{"num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": 64, "max_position_embeddings": 512},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    model = Gemma3ForCausalLM(config).eval()
    prompt = Prompt(model, torch.randint(99, (1, 200)))
    assert [layer.index for layer in prompt.layers] == [1]
    cache, bits = of_method(PEERS[0]).make(Subject(model, None, None), prompt)
    for index, (one, dense) in enumerate(zip(cache.layers, prompt.dense().layers, strict=True)):
        assert one.keys.shape == dense.keys.shape
        assert torch.equal(one.keys, dense.keys) == torch.equal(one.values, dense.values) == (index != 1)
    assert bits.bits == 8
    assert bits.share == pytest.approx((200 / 2 + 2 * 63) / (200 + 2 * 63))
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        ours = contenders([])["int4"].make(Subject(model, None, None), prompt)[1]
    assert ours.share == pytest.approx(((200 - 36) * ours.bits / 16 + 36 + 2 * 63) / (200 + 2 * 63), rel=0.01)
    assert list(refused(model)) == ["transformers-4"]
    with pytest.raises(ValueError, match="only full attention"):
        contenders([])["transformers-4"].make(Subject(model, None, None), prompt)
    assert refused(load_pocket()[0]) == {}


def test_what_is_no_compression_is_refused(read: tuple[Subject, Prompt, Tensor]) -> None:
    subject, prompt, _ = read
    layers = prompt.layers
    rows, everything = rounded(16, 8.0)(layers, None), 2 * sum(one.keys.numel() for one in layers)
    first = rows[0]

    def with_first(**changes: object) -> list[Stored]:
        return [Stored(**{**vars(first), **changes}), *rows[1:]]

    for stored, message in (
        (kept(32.0)(layers, None), "32 bits per element: this cache was not compressed"),
        (kept(8.0)(layers, None), "says that it stores keys in 8 bits per element, and returns them unchanged"),
        (rows[1:], f"returned {len(layers) - 1} of {len(layers)} layers"),
        (with_first(keys=first.keys[:, 1:]), r"bad, layer 0, keys: \(2, 199, 64\) for \(2, 200, 64\)"),
        (with_first(values=first.values * torch.nan), "bad, layer 0, values: some numbers are not finite"),
        (with_first(compressed=(201, 200)), "201 compressed tokens of 200"),
        (with_first(key_bits=float("nan")), "key_bits=nan"),
    ):
        with pytest.raises(EvaluationError, match=message):
            checked_bits("bad", layers, stored, everything)
    with pytest.raises(EvaluationError, match="32 bits"):
        of_method(PEERS[1]).make(subject, prompt)
    with pytest.raises(SystemExit, match="two methods are called 'rounded-8'"):
        contenders([PEERS[0], PEERS[0]])


# What is measured


@pytest.fixture
def small(books: list[Path], read: tuple[Subject, Prompt, Tensor]) -> Arena:
    """Two passages, two hidden words and a text, with one method."""
    _, tokenizer = load_pocket()
    facts = tuple(Fact(fact(city, word), question(city), (word,)) for city, word in PASSWORDS.items())
    text = Text("a", facts, (tuple(filler(random.Random(n)) for n in range(9)),))
    asked = [prompts(text, tokenizer, 220)]
    found = passages(books, tokenizer, 200)
    return Arena(
        *(read[0], tokenizer, contenders(PEERS), found[:2], found[2:3], cases(books, tokenizer, 2, 140), asked),
        **{"later": 12, "new_tokens": 2},
    )


@pytest.mark.slow
def test_each_passage_is_compared_with_its_own_dense_run(small: Arena) -> None:
    model, _ = load_pocket()
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        for turn in ((False, 0), (False, 1), (True, 0), (False, 0)):
            config = {"long": turn[0], "passage": turn[1], "method": "rounded-8"}
            (row,) = small.measure_passage(config)
            ids = (small.long if turn[0] else small.passages)[turn[1]].ids
            dense = model(ids).logits[0, -12:].double().log_softmax(-1)
            cache, _ = small.contenders["rounded-8"].make(small.subject, Prompt(model, ids[:, :-12]))
            found = model(ids[:, -12:], past_key_values=cache).logits[0].double().log_softmax(-1)
            expected = compare_predictions(found, dense, ids[0, -11:])
            assert row["kl"] == pytest.approx(expected.kl, rel=1e-2)
            assert row["nll"] == pytest.approx(expected.nll, abs=1e-5)
            assert row["bits"] == 8.0


@pytest.mark.slow
def test_words_and_questions_are_asked_of_the_cache_of_their_own_text(
    small: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_pocket()
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        for number, case in enumerate(small.cases):
            ids = torch.cat([case.context, case.question, case.answer], dim=1)
            whole = model(ids).logits[0].double().log_softmax(-1)
            length = case.answer.shape[1]
            expected = -float(whole[-length - 1 : -1].gather(1, case.answer[0][:, None]).sum())
            dense, rough = (small.measure_case({"case": number, "method": each})[0] for each in ("dense", "rounded-8"))
            assert dense["nll"] == pytest.approx(expected, abs=1e-3)
            assert rough["nll"] != pytest.approx(dense["nll"], abs=1e-6)
        answer, fed = small._answer, []
        monkeypatch.setattr(
            small, "_answer", lambda cache, ids: fed.append(cache.get_seq_length() + ids.shape[1]) or answer(cache, ids)
        )
        rows = small.measure_text({"text": 0, "questions": [2, 0], "method": "dense"})
        assert fed == [len(small.texts[0][number].ids) for number in (2, 0)]
        assert [row["question"] for row in rows] == [2, 0]
        for row in rows:
            one = small.texts[0][row["question"]]
            output = model.generate(torch.tensor([one.ids]), max_new_tokens=2, do_sample=False)
            said = tokenizer.decode(output[0, len(one.ids) :], skip_special_tokens=True)
            assert row["answer"] == " ".join(said.split())
            assert row["right"] == (one.fact.answer[0] in said)


def test_plans_name_what_competes() -> None:
    """So that nothing is left out by a slip of the pen."""
    pytest.importorskip("bench.arena.peers")
    every = contenders(arena.peers())
    beside = [other for _, _, other in tables.RATIOS if isinstance(other, str)]
    assert {*BOTH_HALVES, *LONG, *RETRIEVAL, *CHAT, *SHOWN, *beside} <= set(every)


@pytest.mark.slow
def test_long_passages_are_of_the_second_half(books: list[Path]) -> None:
    _, tokenizer = load_pocket()
    short, long = long_passages(books, tokenizer, 100), long_passages(books, tokenizer, 500)
    reported = [one for one in passages(books, tokenizer, 100) if one.half == "B"]
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(short, reported, strict=True))
    assert {one.half for one in (*short, *long)} == {"B"}
    assert all(one.ids.shape == (1, 500) for one in long)


# The run


@pytest.mark.slow
def test_a_run_from_the_command_line_goes_on_and_makes_its_page(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (provenance, run):
        monkeypatch.setattr(module, "is_clean", lambda source: True)
    text = start()
    whole = json.loads((tmp_path / "results" / "pocket.json").read_text())
    assert str(tmp_path) not in text + json.dumps(whole)
    value = whole["models"]["pocket"]
    chosen, reported = (one["rows"] for one in value["passages"])
    assert set(reported) == set(COMPETES)
    assert set(chosen) == set(COMPETES) & set(BOTH_HALVES)
    assert 0 < reported["bits-3"]["kl"] < reported["bits-2.25"]["kl"] < reported["bits-1"]["kl"]
    assert reported["bits-1"]["kl"] < reported["bits-1-plain"]["kl"]
    assert reported["finer-8"]["kl"] < reported["rounded-8"]["kl"]
    assert set(value["long"][0]["rows"]) == set(COMPETES) & set(LONG)
    for case in value["cases"]:
        assert set(case["rows"]) == {"dense", *(set(COMPETES) & set(RETRIEVAL))}
    right = [one["rows"]["dense"]["right"] for one in value["chat"]]
    assert True in right
    for one in value["chat"]:
        assert set(one["rows"]) == (
            {"dense", *(set(COMPETES) & set(CHAT))} if one["rows"]["dense"]["right"] else {"dense"}
        )
    for said in (
        "| `bits=2.25` | 2.2",
        "KL, half B | KL, half A",
        "`bits=1`, of GRACE",
        "| method | pocket: bits | pocket: KL |",
        "**Hidden words**",
        "**Answers**",
        "| pocket | no calibration |",
        "**Left out** on pocket: all but those of --methods.",
        "| rounding | nobody |",
    ):
        assert said in text, said
    assert (tmp_path / "results" / "pocket.png").stat().st_size > 20_000

    # Measured cells are taken as they are; one that is gone is measured again, and nothing else.
    cells = tmp_path / "runs" / "pocket" / "passages" / "cells"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("cells/*.json")}
    gone = next(path for path in cells.iterdir() if json.loads(path.read_text())["config"]["method"] == "bits-1")
    gone.unlink()
    again = start()
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("cells/*.json")}
    assert set(after) == set(before)
    assert {path for path in after if after[path] != before[path]} == {gone}
    assert [line for line in again.splitlines() if line.startswith("| `bits=")] != []

    # Another model stands beside it, though it was measured with fewer methods and has fewer parts.
    shutil.copytree(POCKET_FOLDER, tmp_path / "other")
    fewer = ("--long", "1200", "--cases", "0", "--chat", "1200", "--methods", "bits-2.25", "rounded-8")
    text = start("--model", str(tmp_path / "other"), *fewer)
    both = json.loads((tmp_path / "results" / "pocket.json").read_text())["models"]
    assert both.keys() == {"pocket", "other"}
    assert {part: both["pocket"][part] for part in ("weights", "cases")} == {
        part: value[part] for part in ("weights", "cases")
    }
    for one, same in zip(both["other"]["passages"], both["pocket"]["passages"], strict=True):
        assert {name: row["kl"] for name, row in one["rows"].items()} == {
            name: same["rows"][name]["kl"] for name in one["rows"]
        }
    assert [both["other"][part] for part in ("long", "cases", "chat")] == [[], [], []]
    context = "(its context has 1,152 tokens)"
    assert f"on other: all but those of --methods, long passages {context}, hidden words, questions {context}." in text
    assert "| method | pocket: bits | pocket: KL | other: bits | other: KL |" in text
    assert "| cache | pocket: hits | pocket: NLL over dense |" in text
    shutil.rmtree(tmp_path / "runs" / "other")

    # A cell of another version is named, and left as it is.
    damaged = gone.read_text().replace('"format": 1', '"format": 0')
    gone.write_text(damaged)
    with pytest.raises(SystemExit, match=rf"{gone.name} has format 0"):
        start()
    assert gone.read_text() == damaged
    shutil.rmtree(tmp_path / "runs")


@pytest.mark.slow
def test_changed_files_are_measured_again(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "is_clean", lambda source: False)
    few = ("--methods", "bits-2", "rounded-8", "--passages-only")
    for times in (1, 2):
        text = start(*few)
        assert len(list((tmp_path / "runs" / "pocket" / "passages" / "cells").iterdir())) == 3 * times
    assert "Hidden words" not in text
    assert "2 passages" not in text


@pytest.mark.slow
def test_a_method_that_compresses_nothing_makes_no_page(start, tmp_path: Path) -> None:
    few = ("--long", "0", "--cases", "0", "--chat", "0")
    with pytest.raises(SystemExit, match=r"identity-32 on passage 2: 32 bits per element: .* --without NAME"):
        start(*few, "--methods", "bits-2", "identity-32")
    assert not (tmp_path / "results").exists()
    text = start(*few, "--methods", "bits-2", "identity-32", "--without", "identity-32")
    assert "on pocket: identity-32, all but those of --methods, long passages, hidden words, questions." in text


def test_what_cannot_be_measured_says_why(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, message in (
        (["--methods", "bits-7"], "no method is called 'bits-7'; there are bits-1, "),
        (["--without", "bits-7"], "no method is called 'bits-7'"),
        (["--methods", "int4", "--without", "int4"], "leave no method"),
        (["--later", "1"], "--later 1: give at least 2"),
        (["--later", "180"], "fewer than --tokens 200 that more than the 36 dense tokens are left"),
        (["--long", "40"], "fewer than --long 40"),
        (["--new-tokens", "0"], "at least 1"),
        (["--text", str(tmp_path / "none.txt")], "no text at"),
        (["--tokens", "1200"], "--tokens 1200: the context of pocket has 1152"),
    ):
        with pytest.raises(SystemExit, match=message):
            start(*changes)
    model, _ = load_pocket()
    monkeypatch.setattr(several, "open_models", lambda args: [(model, None, "pocket")])
    with pytest.raises(SystemExit, match="there is no tokenizer with it"):
        start()


# The page


def made_up(kls: dict[str, tuple[float, list[float]]], part: str = "passages") -> dict:
    """What a run would give: bits and KL of every passage, by method; a family is a name's first part."""
    count = len(next(iter(kls.values()))[1])
    families = {"bits": OURS, "turboquant": "TurboQuant"}
    rows = [
        {
            name: {
                **dict.fromkeys(("bits", "key_bits", "value_bits"), bits),
                **{"share": bits / 16, "kl": kl[at], "top1": 0.9, "nll": 0.0, "seconds": 1.0},
            }
            for name, (bits, kl) in kls.items()
        }
        for at in range(count)
    ]
    of = {
        "methods": {
            name: {"title": name, "family": families.get(name.split("-")[0], name.split("-")[0]), "source": "x"}
            for name in kls
        },
        **{"long_tokens": 7168, "chat_tokens": 1950, "calibration": {"texts": 1, "tokens": 2, "seconds": 3.0}},
        **{"passages": [], "long": [], "cases": [], "chat": [], "without": []},
    }
    of[part] = [{"kind": "book", "name": "n", "half": "B", "rows": row} for row in rows]
    return of


def value_of(**models: dict) -> dict:
    return {"tokens": 2048, "later": 256, "sinks": 4, "window": 32, "models": models}


KL = [0.001, 0.002, 0.003, 0.004, 0.005, 0.006]


def test_ratios_are_those_of_means() -> None:
    of = made_up(
        {
            "bits-3": (3.0, [0.1 * x for x in KL]),
            "bits-2.25": (2.25, KL),
            "turboquant-3": (3.25, KL),
            "turboquant-4": (4.25, [x / 2 for x in KL]),
            "kivi-2-g32": (3.0, [20 * x for x in KL]),
            "turboquant-2": (2.25, [25 * x for x in KL]),
        }
    )
    text = "\n".join(tables.ratios({"m": of}))
    assert "`bits=3`, of TurboQuant, 3 bits | 0.100 <small>" in text
    assert "best of others at 2.2 to 3 bits | 0.050 <small>[0.050, 0.050]</small> <small>kivi-2-g32</small>" in text
    assert "`bits=2.25`, of TurboQuant, 4 bits | 2.000 <small>[2.000, 2.000]</small> |" in text
    assert "GRACE" not in text
    assert numbers.best(of, "passages", 2.2, 3.05) == "kivi-2-g32"


def test_both_halves_are_compared_where_both_were_measured() -> None:
    of = made_up({"bits-2": (2.0, [1.0] * 12), "turboquant-4": (4.25, [2.0] * 12)})
    for number, one in enumerate(of["passages"]):
        if number % 2:
            one["half"] = "A"
            one["rows"]["bits-2"]["kl"] = 3.0
    assert "TurboQuant, 4 bits | 0.500 <small>[0.500, 0.500]</small> |" in "\n".join(tables.ratios({"m": of}))
    assert "TurboQuant, 4 bits | 1.000 <small>[" in "\n".join(tables.ratios({"m": of}, half=numbers.BOTH))
    del of["passages"][1]["rows"]["turboquant-4"]
    assert tables.ratios({"m": of}) != []
    assert tables.ratios({"m": of}, half=numbers.BOTH) == []


def test_long_passages_have_ratios_of_their_own() -> None:
    of = made_up({"bits-3": (3.0, [0.0005] * 6), "turboquant-3": (3.25, [0.001] * 6)}, "long")
    assert "TurboQuant, 3 bits | 0.500 <small>" in "\n".join(tables.ratios({"m": of}, "long"))
    assert tables.ratios({"m": of}) == []
    assert tables.ratios({"m": made_up({"bits-3": (3.0, [0.0005] * 6)})}) == []


def test_one_half_is_not_to_be_reported() -> None:
    of = made_up({"bits-2.25": (2.25, [0.001] * 6)})
    assert "This is one small model and 6 passages" in page(value_of(m=of)).sure
    for one in of["passages"]:
        one["half"] = "A"
    assert "not to be reported" in page(value_of(m=of)).sure


def test_the_page_names_the_worst_model_and_what_a_model_lacks(tmp_path: Path) -> None:
    """One of two passages, whose dense cache knows nothing; and one without another method, and questions."""
    ours = {"bits-2.25": (2.25, KL)}
    models = {
        "good": made_up(ours | {"rdkv-2.5": (2.77, [10 * x for x in KL])}),
        "bad": made_up({"bits-2.25": (2.25, KL[:2]), "rdkv-2.5": (2.5, [2 * x for x in KL[:2]])}),
        "alone": made_up(ours),
    }
    models["bad"]["cases"] = [{"tokens": 9, "rows": {"dense": {"exact": False, "nll": 9.0}}}]
    models["bad"]["chat"] = [{"text": 0, "asks": "?", "rows": {"dense": {"right": False, "answer": ""}}}]
    models["alone"]["without"] = ["questions"]
    made = page(value_of(**models))
    assert made.found == (
        "`bits=2.25` has 0.50 times the KL of the best of others at 2.2 to 3 bits on bad, where it does worst (good: "
        "0.10): 0.0015 nats beside 0.0030 of rdkv-2.5, at 2.50 bits."
    )
    less, where = "bits=2.25 leaves a KL 2.0 times smaller than", "(rdkv-2.5; bad, the worst of 2 models)"
    assert made.headline == f"{less} the best other at 2.2 to 3 bits {where}"
    assert "These are 3 small models and, for each, 2 to 6 passages" in made.sure
    assert made.sure.endswith("**Left out** on alone: questions.")
    text = "\n".join(made.tables)
    assert re.search(r"\| rdkv-2.5 \| 2.77 \| 0.0350 .* \| 2.50 \| 0.0030 .* \| – \| – \|", text)
    assert "The dense cache of bad hits none." in text
    assert "The dense cache of bad answers no question." in text
    report.save(made, tmp_path / "page.png")
    models["bad"] = made_up({"bits-2.25": (2.25, KL), "rdkv-2.5": (2.5, [x / 2 for x in KL])})
    assert page(value_of(**models)).headline == (
        "rdkv-2.5 leaves a KL 2.0 times smaller than bits=2.25, at 2.2 to 3 bits (bad, the worst of 2 models)"
    )


def test_ablation_is_measured_where_ours_is() -> None:
    every = contenders([])
    for bits in ABLATED:
        assert {f"bits-{bits:g}", *(f"bits-{bits:g}-{suffix}" for suffix in ("class-1", "none", "plain"))} <= set(every)
