"""tune: windows, measurements against plain ones, proofs that caches are used, the rule, records, and the command."""

from __future__ import annotations

import functools
import io
import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import DynamicCache
from typer.testing import CliRunner

pytest.importorskip("optimum.quanto")
pytest.importorskip("matplotlib")

from grace_opt.cli.app import app
from grace_opt.errors import EvaluationError, OptionError
from grace_opt.hf import CacheConfig, CompressedCache, SnapKV, attach, attention_implementation, tune
from grace_opt.hf.models import load_pocket
from grace_opt.hf.tools.evaluation import compare_predictions, next_token_log_probs, stored_bits
from grace_opt.hf.tools.tune import Candidate, call, measuring, recommend, rows, windows
from grace_opt.hf.tools.tune.candidates import FAMILIES, default_candidates
from grace_opt.hf.tools.tune.figure import frontier
from grace_opt.hf.tools.tune.foreign import quantized_bits
from grace_opt.sweep import Interval

pocket = functools.cache(load_pocket)
PRUNED = Candidate("ratio 0.5", "pruned", CacheConfig(ratio=0.5), words="ratio=0.5")
EVICTED = Candidate(
    "SnapKV", "evict=", CacheConfig(ratio=0.0, evict=SnapKV(budget=80)), words="evict=SnapKV(budget=80)"
)
FEW = {"windows": 2, "tokens": 256, "later": 24, "progress": False}


@pytest.fixture(scope="module")
def texts(books) -> dict[str, str]:
    return {path.stem: path.read_text() for path in books}


def ids(text: str) -> list[int]:
    return pocket()[1](text, add_special_tokens=False).input_ids


def cut(texts, **changes):
    given = {"count": 5, "tokens": 200, "later": 20, "seed": 0, "limit": 2048, **changes}
    return windows.windows_of_texts(texts, pocket()[1], **given)


# Windows


@pytest.mark.parametrize("count", [2, 5, 9])
def test_windows_are_pieces_that_do_not_overlap_with_facts_hidden_in_them(texts, count) -> None:
    places: dict[str, list[int]] = {}
    decode = pocket()[1].decode
    for window in cut(texts, count=count):
        name, _, where = window.name.partition(", tokens ")
        start, end = map(int, where.split(" to "))
        whole = ids(texts[name])
        assert end - start == 200 <= len(whole)
        assert window.later[0].tolist() == whole[end - 20 : end]
        facts = [decode(answer[0]) for _, answer in window.asked]
        assert len(set(facts)) == windows.FACTS
        context = decode(window.context[0])
        assert all(f": {fact}" in context for fact in facts)
        left = iter(window.context[0].tolist())
        assert all(token in left for token in whole[start : end - 20])  # in this order, nothing lost
        hidden = sum(len(ids(decode(q[0]).split("?")[1] + decode(a[0]) + ".")) for q, a in window.asked)
        assert window.context.shape[1] == 180 + hidden  # none of the later tokens
        assert window.fed.shape[1] == 20 + sum(q.shape[1] + a.shape[1] for q, a in window.asked)
        places.setdefault(name, []).append(start)
    assert all(b - a >= 200 for starts in places.values() for a, b in itertools.pairwise(starts))
    assert max(map(len, places.values())) - min(map(len, places.values())) <= 1


def test_the_longest_windows_that_fit_are_taken(texts) -> None:
    assert {one.context.shape[1] > 700 for one in cut(texts, count=2, tokens=None)} == {True}
    assert {one.context.shape[1] < 300 for one in cut(texts, count=8, tokens=None)} == {True}
    assert cut(texts)[0].digest == cut(texts)[0].digest != cut(texts, seed=1)[0].digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": {}}, "there is no text"),
        ({"texts": {"a": " \n"}}, "there is no text"),
        ({"texts": {"a": "the river " * 60}}, r"too short for 5 windows of 200 tokens .*a: 120"),
        ({"texts": {"a": "the river " * 60}, "tokens": None}, r"too short for 5 windows of 256 .*of at least 148"),
        ({"tokens": 147}, "tokens=147: give 148 to"),
        ({"limit": 300, "tokens": 200}, "tokens=200: give 148 to 140: .* context of 300"),
    ],
)
def test_texts_that_cannot_be_measured_on_say_why(texts, changes, message) -> None:
    with pytest.raises(OptionError, match=message):
        cut(changes.pop("texts", texts), **changes)


def test_prompts_are_windows_with_their_answers(texts) -> None:
    body = " ".join(texts["Mills"].split()[:160])
    found = windows.windows_of_prompts(
        [{"prompt": body, "answer": "old mill"}, {"prompt": body}], pocket()[1], count=5, later=8, seed=0, limit=2048
    )
    whole = ids(body)
    assert found[0].later[0].tolist() == [whole[-1], *ids("old mill")]
    assert found[1].later[0].tolist() == whole[-8:]
    many = [{"prompt": body}] * 10
    spread = windows.windows_of_prompts(many, pocket()[1], count=3, later=8, seed=0, limit=2048)
    assert [one.name for one in spread] == ["prompt 1", "prompt 4", "prompt 7"]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ([{"text": "x"}], r"prompt 1 is \{'text': 'x'\}: write"),
        ([{"prompt": "x", "answer": 3}], "prompt 1 is"),
        ([{"prompt": "the river"}], "prompt 1 has 2 tokens, too few"),
        ([{"prompt": "the river " * 500}], "prompt 1 has 1000 tokens, too many: the model's context has 800"),
    ],
)
def test_prompts_that_are_none_say_why(prompts, message) -> None:
    with pytest.raises(OptionError, match=message):
        windows.windows_of_prompts(prompts, pocket()[1], count=5, later=8, seed=0, limit=800)


# Measurements


@pytest.mark.slow
@pytest.mark.parametrize("one", [PRUNED, EVICTED])
def test_numbers_are_those_of_caches_that_the_model_fills_itself(texts, one) -> None:
    model = pocket()[0]
    (window,) = cut(texts, count=1)
    row, *times = measuring.Measurer(model, [window], {one.name: one})({"setting": one.name, "place": 0, "timed": True})
    caches = DynamicCache(config=model.config), CompressedCache(model, config=one.config)
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        for cache in caches:
            model(window.context, past_key_values=cache)
        sizes = stored_bits(caches[1])
        dense, small = (next_token_log_probs(model, cache, window.fed) for cache in caches)
    differs = compare_predictions(small[:20], dense[:20], window.later[0, 1:])
    assert row["kl"] == pytest.approx(differs.kl, rel=1e-3)
    assert (row["top1"], row["share"], row["bits"]) == (differs.top1, sizes.share, sizes.bits)
    assert row["compressed_tokens"] == caches[1].memory_report().pruned_tokens
    assert row["bytes"] == pytest.approx(sizes.mean_bits / 8 * window.context.shape[1] * 3 * 2 * 2 * 64)
    place, hits = 20, 0
    for question, answer in window.asked:
        place += question.shape[1]
        likeliest = small[place - 1 : place - 1 + answer.shape[1]].argmax(-1)
        hits, place = hits + torch.equal(likeliest, answer[0]), place + answer.shape[1]
    assert (row["found"], row["asked"]) == (hits, windows.FACTS)
    assert len(times) == measuring.ROUNDS
    assert all(time["ms"] > 0 < time["dense_ms"] for time in times)


class Dense(Candidate):
    """Calls itself a setting, and makes a dense cache."""

    def make(self, model):
        return DynamicCache(config=model.config)


class TooShort(Candidate):
    """Makes a cache that compresses nothing yet."""

    def make(self, model):
        return CompressedCache(model, ratio=0.5, prompt_length=10_000)


@pytest.mark.slow
def test_what_does_not_prove_that_it_was_compressed_is_named_and_not_shown(texts, monkeypatch) -> None:
    model, tokenizer = pocket()
    bad = [Dense("dense", "x", CacheConfig()), TooShort("too short", "x", CacheConfig())]
    result = tune(model, tokenizer, texts, candidates=[*bad, PRUNED], **FEW)
    assert [row.name for row in result.rows] == ["ratio 0.5"]
    assert "quantised nothing" in result.left_out["dense"]
    assert "nothing was compressed" in result.left_out["too short"]
    assert result.rows[0].compressed_tokens == result.rows[0].tokens - 2 * 32

    plain = measuring.next_token_log_probs

    def ignores(model, cache, fed):  # reads a dense copy, and only lets the given cache grow
        found = plain(model, cache, fed)
        return found if isinstance(cache, DynamicCache) else dense_answers[0]

    dense_answers: list[torch.Tensor] = []
    first = measuring.Measurer._read

    def remember(self, number):
        read = first(self, number)
        dense_answers[:] = [read.log_probs]
        return read

    monkeypatch.setattr(measuring.Measurer, "_read", remember)
    monkeypatch.setattr(measuring, "next_token_log_probs", ignores)
    result = tune(model, tokenizer, texts, candidates=[PRUNED], **FEW)
    assert result.recommendation is None
    assert "bit for bit" in result.left_out["ratio 0.5"]
    with pytest.raises(EvaluationError, match="no setting can be recommended"):
        _ = result.config


def test_the_caches_of_transformers_are_counted_by_what_they_hold() -> None:
    from transformers.cache_utils import QuantizedCache

    model = pocket()[0]
    cache = QuantizedCache("quanto", model.config, nbits=4)
    for layer in range(3):
        cache.update(*torch.randn(2, 1, 2, 128, 64, generator=torch.Generator().manual_seed(layer)), layer)
    elements = 3 * 2 * 128 * 64
    found = quantized_bits(cache, (elements, elements))
    assert found.bits == pytest.approx(4 + 2 * 16 / 64)  # codes; scale and zero point of each group of 64
    with pytest.raises(EvaluationError, match="quantised nothing"):
        quantized_bits(DynamicCache(config=model.config), (elements, elements))


# The rule


def row_of(name: str, share: float, kl: float, ours: bool = True, bits: float = 2.0) -> rows.TuneRow:
    one = Interval(0.5, 0.4, 0.6, 5)
    means = dict.fromkeys(("key_bits", "value_bits", "bytes", "top1", "nll", "retrieval"), one)
    return rows.TuneRow(
        candidate=Candidate(name, FAMILIES[0], CacheConfig() if ours else None),
        windows=5,
        share=replace(one, estimate=share),
        bits=replace(one, estimate=bits),
        kl=Interval(kl, kl / 2, kl * 2, 5),
        **means,
        **dict.fromkeys(("found", "kept", "asked", "dense_found", "compressed_tokens", "tokens"), 3),
        time=None,
        kls=(kl,) * 5,
    )


POINTS = st.lists(
    st.tuples(st.sampled_from([0.1, 0.2, 0.3, 0.5]), st.sampled_from([0.001, 0.01, 0.1]), st.booleans()), max_size=6
)


@given(POINTS, st.sampled_from([0.0005, 0.005, 0.01, 0.2]), st.sampled_from(["max_kl", "max_share"]))
def test_the_recommendation_is_the_best_that_fits(points, value, kind) -> None:
    found = [row_of(str(n), *point) for n, point in enumerate(points)]
    chosen = recommend.recommend(found, recommend.Target(kind, value))
    ours = [(share, kl) for share, kl, mine in points if mine]
    if not ours:
        assert chosen is None
        return
    here = chosen.row.share.estimate, chosen.row.kl.estimate
    assert here in ours
    if kind == "max_kl":
        fits = [point for point in ours if point[1] <= value]
        assert here == (min(fits) if fits else min(ours, key=lambda point: point[::-1]))
    else:
        fits = [point for point in ours if point[0] <= value]
        assert here == min(fits, key=lambda point: point[::-1]) if fits else here[0] == min(ours)[0]
    assert chosen.reached == bool(fits)
    assert ("no measured setting keeps" in str(chosen)) == (not fits)


@given(POINTS)
def test_the_frontier_is_what_no_other_row_beats(points) -> None:
    found = [row_of(str(n), *point) for n, point in enumerate(points)]
    line = {(row.share.estimate, row.kl.estimate) for row in frontier(found)}
    every = {point[:2] for point in points}
    assert line == {p for p in every if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in every)}


def test_settings_are_compared_on_the_same_windows() -> None:
    cell = dict.fromkeys(rows.MEANS, 0.5)
    cell |= dict.fromkeys(("found", "kept", "asked", "dense_found", "compressed_tokens", "tokens"), 1)
    measured = {(name, n): [cell | {"kl": n + 1.0}] for name in ("a", "b") for n in range(3)}
    candidates = [Candidate(name, "x", CacheConfig()) for name in ("a", "b")]
    del measured["b", 2]
    assert [(row.name, row.windows, row.kl.estimate) for row in rows.rows_of(candidates, measured, 0)] == [
        ("a", 2, 1.5),
        ("b", 2, 1.5),
    ]
    only = {("a", 0): measured["a", 0]}
    (row,) = rows.rows_of(candidates, only, 0)
    assert (row.windows, row.values()["kl_low"]) == (1, None)
    assert rows.rows_of(candidates, {}, 0) == []


def test_targets_and_defaults() -> None:
    assert str(recommend.target_of(None, 0.2, None)) == "at most 20.0% of the dense cache's bytes"
    assert recommend.target_of(None, None, [2, 3]).value == 3
    assert recommend.target_of(0.01, None, [2, 3]).kind == "max_kl"
    for asked, message in (
        ((0.1, 0.1, None), "one of the two"),
        ((-1, None, None), "max_kl"),
        ((None, 2, None), "max_s"),
    ):
        with pytest.raises(OptionError, match=message):
            recommend.target_of(*asked)
    names = [one.name for one in default_candidates(500)]
    assert len(names) == len(set(names))
    assert {one.family for one in default_candidates(500)} == set(FAMILIES)
    with pytest.raises(OptionError, match="only once"):
        default_candidates(500, bits=[2, 2])


# The call


@pytest.mark.slow
def test_equal_seeds_equal_answers_and_records_are_used_again(texts, tmp_path, monkeypatch) -> None:
    model, tokenizer = pocket()
    kept = {"candidates": [PRUNED, EVICTED], "max_share": 0.9, "folder": tmp_path, **FEW}
    first = tune(model, tokenizer, texts, **kept)
    assert not first.interrupted
    assert not first.out_of_time
    assert not first.left_out
    assert {row.windows for row in first.rows} == {2}
    assert first.rows[0].time.low <= first.rows[0].time.estimate
    assert next(row for row in first.rows if row.name == first.recommendation.row.name).against.estimate == 0
    again = tune(model, tokenizer, texts, **{**kept, "folder": None})
    assert [row.kls for row in again.rows] == [row.kls for row in first.rows]
    monkeypatch.setattr(measuring.Measurer, "__call__", lambda *rest: pytest.fail("measured again"))
    third = tune(model, tokenizer, texts, **kept)
    assert [row.values() for row in third.rows] == [row.values() for row in first.rows]
    assert list(third.to_frame()["setting"]) == ["ratio 0.5", "SnapKV"]
    third.plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(third.to_json(tmp_path / "x.json"))["recommended"] == third.recommendation.row.name


@pytest.mark.slow
def test_a_setting_that_misses_the_target_is_not_recommended(texts, tmp_path) -> None:
    model, tokenizer = pocket()
    result = tune(model, tokenizer, texts, candidates=[PRUNED], max_kl=1e-9, **FEW)
    assert result.recommendation.row.name == "ratio 0.5"
    for use in (lambda: result.config, lambda: result.save(tmp_path / "cache.json")):
        with pytest.raises(
            EvaluationError, match=r"can be recommended: no measured setting keeps .*; the closest is rat"
        ):
            use()
    assert not list(tmp_path.iterdir())
    shown = io.StringIO()
    Console(file=shown, width=200).print(result.table())
    assert "ratio 0.5" in shown.getvalue()
    assert "→" not in shown.getvalue()


@pytest.mark.slow
def test_bits_that_were_asked_for_are_measured_first(texts, monkeypatch) -> None:
    model, tokenizer = pocket()
    plain, calls = measuring.Measurer.__call__, []

    def stops(self, config):
        calls.append(config["setting"])
        if len(calls) > 2:
            raise KeyboardInterrupt
        return plain(self, config)

    monkeypatch.setattr(measuring.Measurer, "__call__", stops)
    result = tune(model, tokenizer, texts, bits=[4, 3], basis="none", **FEW)
    assert calls[:2] == ["bits 4", "bits 3"]
    assert result.recommendation.reached
    assert result.config.bits.bits == 4


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(texts, monkeypatch) -> None:
    model, tokenizer = pocket()
    plain, calls = measuring.Measurer.__call__, []

    def stops(self, config):
        calls.append(config)
        if len(calls) > allowed:
            raise KeyboardInterrupt
        return plain(self, config)

    monkeypatch.setattr(measuring.Measurer, "__call__", stops)
    allowed = 3
    result = tune(model, tokenizer, texts, candidates=[PRUNED, EVICTED], **FEW)
    assert result.interrupted
    assert [(row.name, row.windows) for row in result.rows] == [("ratio 0.5", 1), ("SnapKV", 1)]
    calls.clear()
    allowed = 1
    result = tune(model, tokenizer, texts, candidates=[PRUNED, EVICTED], **FEW)
    assert result.left_out == {"SnapKV": "not measured before Ctrl-C"}
    calls.clear()
    allowed = 0
    with pytest.raises(KeyboardInterrupt):
        tune(model, tokenizer, texts, candidates=[PRUNED], **FEW)


def test_a_time_limit_says_what_was_left_out(texts, monkeypatch) -> None:
    model, tokenizer = pocket()
    result = tune(model, tokenizer, texts, candidates=[PRUNED], time_limit=1e-9, **FEW)
    assert result.out_of_time
    assert result.recommendation is None
    assert result.left_out == {"ratio 0.5": "not measured before the time limit"}
    coded = Candidate("bits 3", "bits=", CacheConfig(bits=3.0))

    def reads_a_text(model, wanted, *, tokenizer, advance):
        advance(1)

    monkeypatch.setattr(call, "basis_for", reads_a_text)
    result = tune(model, tokenizer, texts, candidates=[coded], time_limit=1e-9, **FEW)
    assert "was not calibrated within the time limit" in result.left_out["bits 3"]


def test_arguments_that_cannot_be_say_what_to_write(texts) -> None:
    model, tokenizer = pocket()
    for positional, message in (
        ((model, None, texts), "write tune\\(model, tokenizer\\)"),
        ((model.config, tokenizer, texts), "model must be a transformers model"),
        ((model, tokenizer, ["a", 3]), "text 2 is a int"),
    ):
        with pytest.raises(OptionError, match=message):
            tune(*positional)
    for named, message in (
        ({"candidates": []}, "at least one"),
        ({"candidates": [PRUNED, PRUNED]}, "a name of its own"),
        ({"candidates": [PRUNED], "bits": [2]}, "leave out bits"),
        ({"prompts": [{"prompt": "x"}]}, "leave out texts"),
    ):
        with pytest.raises(OptionError, match=message):
            tune(model, tokenizer, texts, **named)


def test_a_basis_is_named_so_that_it_is_found_from_every_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert call._as_setting("b.safetensors") == str(tmp_path / "b.safetensors")
    assert [call._as_setting(name) for name in ("calibrated", "none")] == ["calibrated", "none"]


# The command


@pytest.fixture
def run(monkeypatch, tmp_path, books):
    monkeypatch.setattr("grace_opt.cli.app.console.width", 200)
    monkeypatch.setattr(call, "default_candidates", lambda context, **given: [PRUNED, EVICTED])

    def start(*arguments, text=True):
        files = [word for path in books for word in ("--text", str(path))] if text else []
        few = ["--windows", "2", "--out", str(tmp_path / "out"), *(["--tokens", "256"] if text else [])]
        return CliRunner().invoke(app, ["tune", "pocket", *files, *few, *map(str, arguments)])

    return start


@pytest.mark.slow
def test_the_command_writes_settings_that_attach_and_the_demo_take(run, tmp_path, monkeypatch) -> None:
    shown = run("--max-kl", 10)
    assert shown.exit_code == 0, shown.output
    assert "recommended: SnapKV" in shown.output
    assert "attach(model, evict=SnapKV(budget=80))" in shown.output
    assert f"attach(model, config={str(tmp_path / 'out' / 'cache.json')!r})" in shown.output
    value = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert (value["recommended"], value["reached"]) == ("SnapKV", True)
    assert value["provenance"]["seed"] == 0
    assert all(row["kl_low"] <= row["kl"] <= row["kl_high"] for row in value["rows"])
    model, tokenizer = pocket()
    file = tmp_path / "out" / "cache.json"
    given = tokenizer("the quiet river runs past the old mill . " * 20, return_tensors="pt")
    with attach(model, config=str(file)) as attached:
        model.generate(**given, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert attached.cache.config == EVICTED.config
    assert attached.cache.memory_report().pruned_tokens > 0
    other = load_pocket()[0]
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(OptionError, match=r"cache.json were measured on another model \(the weights differ"):
        attach(other, config=file)
    assert CacheConfig.from_json(file) == EVICTED.config  # the settings alone fit any model


@pytest.mark.slow
def test_exit_codes_mean_something(run, tmp_path, monkeypatch, books) -> None:
    shown = run("--max-kl", 1e-9)
    assert shown.exit_code == 3
    assert "not reached: no measured setting keeps a KL of at most 1e-09; the closest is ratio 0.5" in shown.output
    for word in ("recommended:", "to use it", "→"):  # a setting that misses the target is no recommendation
        assert word not in shown.output
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"tune", "tune.json", "tune.png"}
    assert "tune.png, and no cache.json" in shown.output
    value = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert (value["recommended"], value["reached"]) == (None, False)
    assert run("--max-kl", 10).exit_code == 0
    before = (tmp_path / "out" / "cache.json").read_bytes()
    shown = run("--max-kl", 1e-9)
    assert f"{tmp_path / 'out' / 'cache.json'} is of an earlier run" in shown.output
    assert (tmp_path / "out" / "cache.json").read_bytes() == before
    assert run("--max-kl", 1, "--max-share", 1).exit_code == 2
    assert run("--bits", "a").exit_code == 2
    assert run("--tokens", 5).exit_code == 2
    bad = tmp_path / "prompts.jsonl"
    bad.write_text('{"prompt": "x"}\nnonsense\n')
    shown = run("--prompts", bad, text=False)
    assert shown.exit_code == 2
    assert "line 2 is no JSON" in shown.stderr
    assert run("--out", tmp_path / "new", "--time-limit", 1e-9).exit_code == 3
    monkeypatch.setattr(call, "default_candidates", lambda *rest, **given: [Dense("dense", "x", CacheConfig())])
    shown = run("--out", tmp_path / "third")
    assert shown.exit_code == 4
    assert "quantised nothing" in shown.output

    def stop(self, config):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring.Measurer, "__call__", stop)
    assert run("--out", tmp_path / "fourth").exit_code == 130
