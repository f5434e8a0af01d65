"""When a basis is calibrated: for the first prompt that needs one, once, and not again in a block of `attach`."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import sys
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from grace_opt.cli.app import app
from grace_opt.errors import CacheError, CalibrationError
from grace_opt.hf import CompressedCache, SnapKV, attach
from grace_opt.hf.bases import at_hand, basis_folder, unfinished
from grace_opt.hf.bases import calibrate as basis_module
from grace_opt.hf.bases.at_hand import basis_for
from grace_opt.hf.models import POCKET_BASIS, POCKET_FOLDER, load_model
from tests import children
from tests.hf.matrix import model_of

SHORT, LONG = 5, 120
GREEDY = {"max_new_tokens": 2, "do_sample": False}


def ids(length, seed=1, rows=1):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def patched(folder, setattr_, calls):
    """Calibrate on three texts of token numbers, into a folder; note the calls."""
    folder.mkdir(exist_ok=True)
    original = at_hand.calibrate.basis

    def counted(*arguments, **options):
        calls.append(threading.get_ident())
        return original(*arguments, **options)

    setattr_(basis_folder, "cached_assets_path", lambda *names: folder)
    setattr_(at_hand, "shipped_texts", lambda: [ids(150, seed)[0] for seed in range(3)])
    setattr_(at_hand, "tokenizer_of", lambda model: None)
    setattr_(at_hand.calibrate, "basis", counted)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The threads that have calibrated."""
    found = []
    patched(tmp_path / "bases", monkeypatch.setattr, found)
    return found


@pytest.fixture
def model():
    """A model that nobody has calibrated."""
    return copy.deepcopy(model_of("Llama"))


def trained(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.01)


@pytest.mark.filterwarnings("ignore:.*stay.? dense")
@pytest.mark.parametrize("how", ["attach", "own cache", "forward", "declared", "padded", "evicted", "few bits"])
def test_a_prompt_that_stays_dense_waits_for_nothing(how, calls, model):
    settings, prompt, more = {"bits": 4}, ids(SHORT), {}
    if how == "padded":
        prompt, mask = ids(LONG, rows=2), torch.zeros(2, LONG, dtype=torch.long)
        mask[:, -SHORT:] = 1
        more = {"attention_mask": mask}
    if how == "evicted":
        settings, prompt = {"bits": 4, "evict": SnapKV(budget=50, window=4)}, ids(LONG)
    if how == "few bits":
        settings, prompt = {"bits": 0.3}, ids(LONG)
    if how in ("attach", "padded", "evicted", "few bits"):
        with attach(model, **settings) as attached:
            model.generate(prompt, **more, **GREEDY)
        cache = attached.cache
    else:
        cache = CompressedCache(model, **settings, prompt_length=SHORT if how == "declared" else None)
        model.set_attn_implementation("grace_sdpa")
        if how == "forward":
            model(prompt, past_key_values=cache)
        else:
            model.generate(prompt, past_key_values=cache, **GREEDY)
    assert not calls
    assert not cache.memory_report().pruned_tokens
    with attach(model, bits=4) as attached:
        model.generate(ids(LONG), **GREEDY)
        model.generate(ids(LONG), **GREEDY)
    assert len(calls) == 1
    assert attached.cache.memory_report().pruned_tokens


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_coded_is_as_if_it_had_been_calibrated_before(beams, grad, calls, model):
    """The calibration runs in the middle of the prompt's own forward pass."""
    prompts, other = ids(LONG, rows=2), copy.deepcopy(model)
    options = {**GREEDY, "max_new_tokens": 5, "num_beams": beams}
    asked = {"output_hidden_states": True, "output_logits": True, "return_dict_in_generate": True}
    basis_for(other)
    at_hand._MADE.pop(other)
    for file in basis_folder.folder().iterdir():
        file.unlink()
    with torch.set_grad_enabled(grad), attach(other, bits=4), attach(model, bits=4) as attached:
        found = model.generate(prompts, **options, **asked)
        at_hand._MADE[other] = at_hand._MADE[model]
        expected = other.generate(prompts, **options, **asked)
    assert len(calls) == 2
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(one, two) for one, two in zip(found.logits, expected.logits, strict=True))
    assert [len(each) for each in found.hidden_states] == [len(each) for each in expected.hidden_states]
    assert attached.cache.memory_report().pruned_tokens


def test_what_cannot_be_calibrated_is_told_at_the_call(calls, model, monkeypatch):
    def refuse(model):
        raise CalibrationError("the tokenizer is not on this machine")

    monkeypatch.setattr(at_hand, "tokenizer_of", refuse)
    for call in (attach, CompressedCache):
        with pytest.raises(CalibrationError, match="not on this machine"):
            call(model, bits=4)
    with pytest.raises(CalibrationError, match="configuration has no weights"):
        CompressedCache(model.config, bits=4)
    basis_for(model, tokenizer=len)  # given, it is not looked for; and once it was made, none is needed
    CompressedCache(model, bits=4)
    CompressedCache(copy.deepcopy(model), bits=4)  # as in another process
    assert len(calls) == 1


def test_hooks_that_drop_tokens_are_no_part_of_a_calibration(calls, model):
    """kvpress has such hooks on the model while it reads a prompt, in which the calibration now runs."""

    def drop(module, args, kwargs, output):
        cache = kwargs.get("past_key_values")
        if type(cache) is DynamicCache:
            layer = cache.layers[0]
            layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]

    model.model.layers[0].self_attn.register_forward_hook(drop, with_kwargs=True)
    with attach(model, bits=4), pytest.raises(CalibrationError, match="drops tokens of LlamaForCausalLM while"):
        model.generate(ids(LONG), **GREEDY)


@pytest.mark.filterwarnings("ignore:.*stays dense")
def test_the_tokenizer_is_read_once(calls, model, monkeypatch):
    read = []
    monkeypatch.setattr(at_hand, "tokenizer_of", read.append)
    with attach(model, bits=4):
        for _ in range(3):
            model.generate(ids(SHORT), **GREEDY)
    assert len(read) == 1


def test_a_cache_whose_model_is_gone_says_so(calls, model):
    other = copy.deepcopy(model)
    cache = CompressedCache(other, bits=4)
    del other
    gc.collect()
    model.set_attn_implementation("grace_sdpa")
    with pytest.raises(CalibrationError, match="the model that this cache was made for is gone"):
        model(ids(LONG), past_key_values=cache)


def test_copies_of_a_cache_share_the_basis(calls, model):
    with attach(model, bits=4) as attached:
        model.generate(ids(LONG), **GREEDY)
    copied = copy.deepcopy(attached.cache)
    assert copied.budget.calibrated is attached.cache.budget.calibrated


@pytest.mark.filterwarnings("ignore:.*stays dense")
@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 4, "evict": SnapKV(budget=50, window=4)}])
def test_a_saved_cache_that_is_dense_needs_no_basis(settings, calls, model, tmp_path):
    with attach(model, **settings) as attached:
        model.generate(ids(LONG if "evict" in settings else SHORT), **GREEDY)
        file = tmp_path / "cache.safetensors"
        attached.cache.save(file)
        loaded = CompressedCache.load(file, model)
        assert not calls
        basis_for(model).save(tmp_path / "basis.safetensors")
        for cache in (loaded, CompressedCache.load(file, model, basis=tmp_path / "basis.safetensors")):
            assert cache.get_seq_length() == attached.cache.get_seq_length()


def test_codes_without_the_name_of_their_basis_are_refused(calls, model, tmp_path, monkeypatch):
    with attach(model, bits=4) as attached:
        model.generate(ids(LONG), **GREEDY)
    monkeypatch.setattr(CompressedCache, "_basis_digest", lambda self, needed=False: None)
    attached.cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(CacheError, match="does not say in which basis"):
        CompressedCache.load(tmp_path / "cache.safetensors", model)


# Weights that change


@pytest.mark.parametrize("kind", ["calibrated", "file"])
def test_in_a_block_the_basis_of_its_start_stays(kind, calls, model, tmp_path):
    settings = {"bits": 4}
    if kind == "file":
        basis_for(model).save(tmp_path / "basis.safetensors")
        settings["basis"] = tmp_path / "basis.safetensors"
    with attach(model, **settings) as attached, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model.generate(ids(LONG), **GREEDY)
            assert attached.cache.memory_report().pruned_tokens
            trained(model)
        with attach(model, **settings):  # one within another belongs to it
            model.generate(ids(LONG), **GREEDY)
    (one,) = (each for each in said if "The basis stays" in str(each.message))
    assert "the weights differ" in str(one.message)
    assert one.filename == __file__
    assert len(calls) == 1
    assert len(list(basis_folder.folder().iterdir())) == 1
    if kind == "calibrated":
        for _ in range(2):  # outside, the weights count
            with attach(model, bits=4) as attached:
                model.generate(ids(LONG), **GREEDY)
        assert attached.cache.budget.calibrated.fingerprint["weights"] == attached.cache.fingerprint()["weights"]
        assert len(calls) == 2


def test_adapters_that_are_switched_back_and_forth_are_calibrated_once_each(calls, model):
    """They share the weights, and so they shared a file, which each of them wrote over."""
    for name in ("a", "b", "a", "b"):
        model.model.layers[0].self_attn.active_adapters = [name]
        assert basis_for(model).fingerprint["adapters"] == name
        at_hand._MADE.clear()
    assert len(calls) == 2


# At the same time


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stays dense")
def test_threads_that_come_at_the_same_time_calibrate_once(calls, model):
    start = threading.Barrier(6)
    with attach(model, bits=4):

        def answer(number):
            start.wait(60)
            return model.generate(ids(LONG if number % 2 else SHORT), **GREEDY)

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(answer, range(6)))
    assert len(calls) == 1
    assert all(torch.equal(each, answers[number % 2]) for number, each in enumerate(answers))


def _calibrates(folder, mine, other):
    """In a process: calibrate, after the other one has begun too; return how often it was done here."""
    calls = []
    patched(folder, setattr, calls)
    mine.touch()
    while not other.exists():
        time.sleep(0.01)
    torch.set_num_threads(1)
    return len(calls), basis_for(copy.deepcopy(model_of("Llama"))).digest(), len(calls)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no lock that processes share")
def test_processes_that_come_at_the_same_time_calibrate_once(tmp_path):
    names = tmp_path / "one", tmp_path / "other"
    with ProcessPoolExecutor(2, mp_context=children.context()) as pool:
        found = list(pool.map(_calibrates, [tmp_path / "bases"] * 2, names, names[::-1]))
    assert sorted(count for _, _, count in found) == [0, 1]
    assert found[0][1] == found[1][1]
    assert len(list((tmp_path / "bases").iterdir())) == 1


# Ctrl-C


@pytest.mark.parametrize("home", [True, False])
def test_ctrl_c_leaves_nothing_broken_and_goes_on(home, calls, model, monkeypatch, capsys):
    monkeypatch.setattr(unfinished, "REST", 0)
    model.train()
    if not home:
        monkeypatch.setattr(at_hand, "_place", lambda here: None)
    read, original = [], at_hand.calibrate.basis

    def interrupted(*arguments, advance, **options):
        def stop(done):
            advance(done)
            if done == int(done):
                read.append(done)
                if read == [0, 1, 2]:
                    raise KeyboardInterrupt

        return original(*arguments, advance=stop, **options)

    monkeypatch.setattr(at_hand.calibrate, "basis", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught, attach(model, bits=4):
        model.generate(ids(LONG), **GREEDY)
    notes = " ".join(caught.value.__notes__)
    assert ("2 of its 3 texts are kept, and the same call goes on" if home else "nothing of it is kept") in notes
    assert 'basis="none"' in notes
    assert model.config._attn_implementation == "sdpa"
    assert "generate" not in vars(model)
    assert all(module.training for module in model.modules())
    assert [path.name.endswith("-unfinished.safetensors") for path in basis_folder.folder().iterdir()] == [True] * home
    with attach(model, bits=4) as attached:
        model.generate(ids(LONG), **GREEDY)
    assert attached.cache.memory_report().pruned_tokens
    assert read[3:] == ([2, 3] if home else [0, 1, 2, 3])
    assert ("2 of 3 texts were done before, and it goes on from there" in capsys.readouterr().err) == home
    assert len(list(basis_folder.folder().iterdir())) == home


# The folder


def test_files_that_nobody_uses_go_and_the_least_recently_used_beyond_a_number(calls, model, monkeypatch):
    folder, now, day = basis_folder.folder(), time.time(), 86400
    basis_for(model)
    (file,) = folder.iterdir()

    def put(name, days):
        path = folder / name
        path.write_bytes(file.read_bytes())
        os.utime(path, (now - days * day, now - days * day))
        return path

    new, old, lock = put("new.safetensors", 170), put("old.safetensors", 190), put(".x.lock", 8)
    part, stale = put("x-unfinished.safetensors", 6), put("y-unfinished.safetensors", 8)
    trained(model)
    basis_for(model)
    assert [path.exists() for path in (file, new, part)] == [True] * 3
    assert [path.exists() for path in (old, lock, stale)] == [False] * 3
    basis_folder.read(new)  # is use
    assert basis_folder.kept_bases(folder)[0].path == new
    monkeypatch.setattr(basis_folder, "FILES", 3)
    os.utime(file, (now - day, now - day))
    trained(model)
    basis_for(model)
    kept = basis_folder.kept_bases(folder)
    assert len(kept) == 3
    assert file not in {one.path for one in kept}
    monkeypatch.setattr(basis_folder, "BYTES", file.stat().st_size if file.exists() else kept[0].bytes)
    trained(model)
    basis_for(model)
    (only,) = basis_folder.kept_bases(folder)
    assert only.made == time.strftime("%Y-%m-%d")
    assert only.model == "llama"


@pytest.fixture
def run():
    return lambda *given: CliRunner().invoke(app, ["calibrate", "basis", *map(str, given)])


def test_the_command_keeps_a_basis_where_bits_find_it(calls, run, tmp_path, monkeypatch):
    text, folder = "the quiet river runs past a late singer " * 20, tmp_path / "pocket"
    shutil.copytree(POCKET_FOLDER, folder, ignore=shutil.ignore_patterns(POCKET_BASIS.name))
    monkeypatch.setattr(at_hand, "shipped_texts", lambda: [text])
    made = run(folder)
    assert made.exit_code == 0, made.output
    assert "3 layers, 2 KV heads; 1 text, 160 tokens" in made.output
    attach(load_model(str(folder))[0], bits=4).new_cache()
    assert basis_for(load_model(str(folder))[0]).texts == 1
    assert len(calls) == 1
    listed = run("--list")
    (one,) = basis_folder.kept_bases(basis_folder.folder())
    for word in (os.fspath(folder), time.strftime("%Y-%m-%d"), "1 file,", os.fspath(basis_folder.folder())):
        assert word in "".join(listed.output.split("\n")), word
    (one.path.parent / "x-unfinished.safetensors").write_bytes(b"damaged")
    assert "unfinished" in run("--list").output
    assert "removed 0 files" in run("nobody", "--clear").output
    assert "removed 1 file," in run(folder, "--clear").output
    assert "removed 1 file," in run("--clear").output
    assert not list(one.path.parent.iterdir())
    assert "0 files" in run("--list").output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "write which MODEL"),
        (("pocket", "--tokens", 10), "write -o FILE as well"),
        (("--list", "--clear"), "different things"),
        (("--clear", "-o", "b.safetensors"), "different things"),
    ],
)
def test_commands_that_contradict_themselves_are_refused(given, words, calls, run):
    refused = run(*given)
    assert refused.exit_code == 2
    assert words in " ".join(refused.output.split())


def test_the_command_goes_on_after_ctrl_c(calls, run, tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "REST", 0)
    files, out = [], tmp_path / "b.safetensors"
    for number in range(3):
        files += ["--text", tmp_path / f"{number}.txt"]
        files[-1].write_text(f"the quiet river runs past a late singer {number} " * 20)
    original, presses = basis_module.Unfinished.keep, [None]

    def keep(self, texts, layers):
        original(self, texts, layers)
        if presses:
            presses.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(basis_module.Unfinished, "keep", keep)
    stopped = run("pocket", *files, "-o", out)
    assert stopped.exit_code == 130
    assert "1 of its 3 texts are kept, and the same call goes on" in " ".join(stopped.output.split())
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["b-unfinished.safetensors"]
    assert run("pocket", *files, "-o", out).exit_code == 0
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["b.safetensors"]
