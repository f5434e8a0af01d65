"""Prompts that were read once: answers are those of the same compressed tokens, and nothing is lost or wrong."""

from __future__ import annotations

import copy
import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import CompressedCache, PromptStore, SnapKV, TopTokens, attach, read_prompt
from grace_opt.hf.engine import prompt_store
from grace_opt.hf.engine.saving import FILE_FORMAT
from grace_opt.hf.models import load_pocket
from tests.hf.conftest import build
from tests.hf.test_saving import MIXED

PROMPT, QUESTION = 400, 40
#: Longer than a block and a recent window: what was dense at the prompt's end is coded by then.
GENERATE = {"max_new_tokens": 110, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return load_pocket()[0]


@pytest.fixture
def store(tmp_path):
    return PromptStore(tmp_path / "prompts", max_bytes="1GiB")


def tokens(count, seed=0):
    return torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(seed))


KEY = f"llama-{'a' * 32}"
MANUAL = tokens(PROMPT)
QUESTIONS = [torch.cat([MANUAL, tokens(QUESTION, seed)], 1) for seed in (1, 2, 3)]


def answers(model, prompts, texts, **settings):
    """What `generate` gives, and how many tokens each cache began with."""
    found, held, fill = [], [], prompt_store.PromptStore.longest

    def noted(self, *given):
        result = fill(self, *given)
        held.append(0 if result is None else result[1])
        return result

    options = {name: settings.pop(name) for name in ("num_beams", "num_return_sequences") if name in settings}
    with pytest.MonkeyPatch.context() as patch, attach(model, **settings, prompts=prompts):
        patch.setattr(PromptStore, "longest", noted)
        for text in texts:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                found.append(model.generate(text, **{**GENERATE, **options}))
    return found, held


def in_memory(model, first, texts, begins, **settings):
    """The same without a store: a cache that has read the first prompt, cropped to each beginning."""
    with attach(model, **settings) as attached, torch.no_grad():
        cache = attached.new_cache(first.shape[1])
        model(first, past_key_values=cache)
        found = []
        for text, begin in zip(texts, begins, strict=True):
            own = copy.deepcopy(cache)
            if begin < first.shape[1]:
                own.crop(begin - first.shape[1])
            found.append(model.generate(text, past_key_values=own, **GENERATE))
    return found


KINDS = {
    "bits": {"bits": 2.5},
    "channels as they are": {"bits": 3, "basis": "none"},
    "few channels": {"ratio": 0.5},
    "few are read": {"read": TopTokens(0.25)},
    "two settings": {"key_bits": 3, "value_bits": 2, "tail_block": 32, "recent_window": 16},
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_same_compressed_tokens(model, store, kind):
    """The first question is read whole, and stored; the others begin with what they share with it."""
    found, held = answers(model, store, QUESTIONS, **KINDS[kind])
    assert held == [0, PROMPT, PROMPT]
    with attach(model, **KINDS[kind]):
        plain = model.generate(QUESTIONS[0], **GENERATE)
    assert torch.equal(found[0], plain)
    expected = in_memory(model, QUESTIONS[0], QUESTIONS[1:], held[1:], **KINDS[kind])
    assert all(map(torch.equal, found[1:], expected))
    assert [kept.tokens for kept in store.prompts()] == [PROMPT + QUESTION]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [({"bits": 3, "evict": SnapKV(budget=200)}, {}), ({"quantize": "int4"}, {}), ({"bits": 3, "basis": "none"}, MIXED)],
    ids=["evicted", "quantised", "sliding"],
)
def test_where_nothing_can_be_cropped_prompts_serve_as_a_whole(store, kind, changes):
    model = build("Qwen2", max_position_embeddings=1024, **changes) if changes else load_pocket()[0]
    read_prompt(model, MANUAL, store, **kind)
    found, held = answers(model, store, QUESTIONS[:2], **kind)
    assert held == [PROMPT, PROMPT]
    expected = in_memory(model, MANUAL, QUESTIONS[:2], held, **kind)
    assert all(map(torch.equal, found, expected))
    # What differs earlier is read again, whole.
    other = MANUAL.clone()
    other[0, 300] += 1
    found, _ = answers(model, store, [other], **kind)
    with attach(model, **kind):
        assert torch.equal(found[0], model.generate(other, **GENERATE))


def test_what_is_stored_is_what_the_cache_held_when_the_prompt_was_over(model, store, tmp_path):
    """Although blocks have been coded since, and whether or not beams came of it."""
    files = []
    for number, more in enumerate(({}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True})):
        with attach(model, bits=3, prompts=(own := PromptStore(tmp_path / str(number)))) as attached:
            model.generate(MANUAL, **{**GENERATE, **more})
            assert attached.cache.get_seq_length() >= PROMPT + 100
        files.append(own.prompts()[0].path)
    read_prompt(model, MANUAL, store, bits=3)
    expected = load_file(store.prompts()[0].path)
    for path in files:
        found = load_file(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
    one_more = PromptStore(tmp_path / "at once")
    with attach(model, bits=3, prompts=one_more):
        model.generate(MANUAL, **{**GENERATE, "max_new_tokens": 1})
    assert FILE_FORMAT.read(one_more.prompts()[0].path)[0] == FILE_FORMAT.read(files[0])[0]


def test_beams_and_rows_begin_with_it(model, store):
    read_prompt(model, MANUAL, store, bits=3)
    (beams,), held = answers(model, store, QUESTIONS[:1], bits=3, num_beams=2)
    assert held == [PROMPT]
    with attach(model, bits=3) as attached, torch.no_grad():
        cache = attached.new_cache(PROMPT)
        model(MANUAL, past_key_values=cache)
        cache.reorder_cache(torch.tensor([0, 0]))
        expected = model.generate(QUESTIONS[0], past_key_values=cache, **{**GENERATE, "num_beams": 2})
    assert torch.equal(beams, expected)
    with attach(model, bits=3, prompts=store) as attached:
        several = model.generate(QUESTIONS[0], **{**GENERATE, "num_return_sequences": 2, "do_sample": True})
    assert len(several) == 2
    assert attached.cache.layers[0].rows == 2


@pytest.mark.parametrize("settings", [{"bits": 3}, {"bits": 3, "basis": "none"}])
def test_rows_find_theirs(model, store, settings):
    """Of different lengths, in prompts of different lengths: each is what it is alone, begun at the same place."""
    other, stored = tokens(333, 9), {}
    texts = [QUESTIONS[0], torch.cat([other, tokens(25, 10)], 1), QUESTIONS[1][:, : PROMPT + 5]]
    for each in (QUESTIONS[2], other):
        stored[len(each[0])] = read_prompt(model, each, store, **settings)
    longest = max(each.shape[1] for each in texts)
    padding = [longest - each.shape[1] for each in texts]
    ids = torch.cat([torch.nn.functional.pad(each, (first, 0)) for each, first in zip(texts, padding, strict=True)])
    mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
    with attach(model, **settings, prompts=store) as attached, pytest.MonkeyPatch.context() as patch:
        begun, real = [], CompressedCache.update

        def noted(self, keys, *given, **named):
            begun.append((self.get_seq_length(), keys.shape[2]))
            return real(self, keys, *given, **named)

        patch.setattr(CompressedCache, "update", noted)
        found = model.generate(ids, attention_mask=mask, **{**GENERATE, "max_new_tokens": 20})
        # In 301 places of the second row are its first tokens; the stores end before the recent windows.
        places = min(first + length for first, length in zip(padding, (PROMPT, 333 - 32, PROMPT), strict=True))
        assert begun[0] == (places, longest - places)
        assert attached.cache.memory_report().bits > 3
        beams = model.generate(ids, attention_mask=mask, num_beams=2, **{**GENERATE, "max_new_tokens": 5})
    assert len(beams) == 3
    assert len(store.prompts()) == 2
    for row, (text, first) in enumerate(zip(texts, padding, strict=True)):
        cache = copy.deepcopy(stored[333 if row == 1 else PROMPT + QUESTION])
        cache.crop(places - first - cache.get_seq_length())
        with attach(model, **settings):
            alone = model.generate(text, past_key_values=cache, **{**GENERATE, "max_new_tokens": 20})
        assert torch.equal(found[row, first:], alone[0])


def test_rows_are_stored_apart_and_padded_ones_not(model, store):
    other = tokens(PROMPT, 9)
    answers(model, store, [torch.cat([MANUAL, other])], bits=3)
    assert [kept.tokens for kept in store.prompts()] == [PROMPT, PROMPT]
    _, held = answers(model, store, [other], bits=3)
    assert held == [PROMPT - 1]
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), tokens(PROMPT, 10)], 1)
    with attach(model, bits=3, prompts=store):
        model.generate(padded, attention_mask=(torch.arange(PROMPT + 9) >= 9).long()[None], **GENERATE)
    assert len(store.prompts()) == 2


def test_turns_are_stored_when_they_are_a_quarter(model, store):
    sizes = []
    for length in (400, 440, 520, 600, 800):
        answers(model, store, [torch.cat([MANUAL, tokens(400, 5)], 1)[:, :length]], bits=3)
        sizes.append(sorted(kept.tokens for kept in store.prompts()))
    assert sizes[1:3] == [[400], [400]]
    assert sizes[-1] == [400, 600, 800]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=6), st.lists(st.integers(0, 1), min_size=1)
)
def test_the_longest_beginning_is_found(tmp_path_factory, stored, asked):
    found = PromptStore(tmp_path_factory.mktemp("store"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_store, "FEWEST", 1)
        for each in stored:
            array = np.array(each)
            found.add(
                KEY, array, lambda path, array=array: FILE_FORMAT.write(path, {"tokens": torch.tensor(array)}, {})
            )
        result = found.longest(KEY, np.array(asked))
        best = 0
        for each in stored:
            common = 0
            while common < min(len(each), len(asked) - 1) and each[common] == asked[common]:
                common += 1
            best = max(best, common if common >= len(each) / 2 else 0)
        assert (0 if result is None else result[1]) == best
        assert found.longest(KEY.replace("a", "b"), np.array(asked)) is None
    assert len(found.prompts()) == len({tuple(each) for each in stored})


class TestNothingOfOthers:
    def test_models_types_settings_and_adapters_are_apart(self, model, store):
        read_prompt(model, MANUAL, store, bits=3, basis="none")
        changed = copy.deepcopy(model)
        changed.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
        half = copy.deepcopy(model).bfloat16()
        for other, own in ((changed, {}), (half, {}), (model, {"bits": 4}), (model, {"recent_window": 16})):
            _, held = answers(other, store, QUESTIONS[:1], **{"bits": 3, "basis": "none", **own})
            assert held == [0]
        _, held = answers(model, store, QUESTIONS[:1], bits=3, basis="none")
        assert held == [PROMPT]
        model.model.layers[0].self_attn.k_proj.active_adapters = ["mine"]
        try:
            _, held = answers(model, store, QUESTIONS[:1], bits=3, basis="none")
        finally:
            del model.model.layers[0].self_attn.k_proj.active_adapters
        assert held == [0]

    @pytest.mark.parametrize("place", [0, 200, PROMPT - 2])
    def test_a_token_that_differs_ends_it(self, model, store, place):
        read_prompt(model, MANUAL, store, bits=3)
        other = QUESTIONS[0].clone()
        other[0, place] = (other[0, place] + 1) % 90
        _, held = answers(model, store, [other], bits=3)
        assert held == [place if place >= 200 else 0]

    def test_folders_and_files_are_the_owners(self, model, store):
        read_prompt(model, MANUAL, store, bits=3)
        path = store.prompts()[0].path
        for folder in (store.path, path.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


class TestDamage:
    @pytest.mark.parametrize("where", [0.3, 0.9, "end"])
    def test_is_found_before_use_and_the_prompt_is_read_again(self, model, store, where):
        (expected,), _ = answers(model, store, QUESTIONS[:1], bits=3)
        path = store.prompts()[0].path
        whole = path.read_bytes()
        for each in (store, PromptStore(store.path)):  # one that has seen it before, and one that has not
            content = bytearray(whole)
            if where == "end":
                content = content[:-100]
            else:
                content[int(where * len(content))] ^= 4
            path.write_bytes(content)
            with attach(model, bits=3, prompts=each), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = model.generate(QUESTIONS[0], **GENERATE)
            assert torch.equal(found, expected)
            told = any("stored prompt cannot be used, so it was removed" in str(one.message) for one in said)
            assert told == (each is store or where != "end")  # whose tokens cannot be read is not found
            assert len(FILE_FORMAT.read(path)[1]) > 10

    def test_files_that_are_no_prompts_are_left_alone_until_verified(self, model, store):
        read_prompt(model, MANUAL, store, bits=3)
        folder = store.prompts()[0].path.parent
        bad = folder / f"{'0' * 32}.safetensors"
        bad.write_text("no tensors")
        (folder / "note.txt").write_text("a note")
        (store.path / "note.txt").write_text("another")
        _, held = answers(model, store, QUESTIONS[:1], bits=3)
        assert held == [PROMPT]
        assert store.verify() == [bad]
        content = bytearray(store.prompts()[0].path.read_bytes())
        content[-1] ^= 1
        store.prompts()[0].path.write_bytes(content)
        assert len(store.verify()) == 1
        assert store.prompts() == []
        assert (folder / "note.txt").exists()


class TestRoom:
    def test_the_least_recently_used_go(self, model, store):
        every = [tokens(PROMPT, seed) for seed in range(20, 24)]
        for number, each in enumerate(every[:3]):
            read_prompt(model, each, store, bits=3)
            os.utime(max(store.prompts(), key=lambda kept: kept.used).path, (number, number))
        answers(model, store, [every[0]], bits=3)  # used again
        store.max_bytes = sum(kept.bytes for kept in store.prompts()) + 100
        read_prompt(model, every[3], store, bits=3)
        key = store.prompts()[0].model
        found = [store.longest(key, each[0].numpy()) for each in every]
        assert [each is not None for each in found] == [True, False, True, True]
        assert sum(kept.bytes for kept in store.prompts()) <= store.max_bytes

    def test_one_that_is_too_large_is_said(self, model, tmp_path):
        store = PromptStore(tmp_path, max_bytes=1000)
        with pytest.warns(UserWarning, match=r"prompt of 400 tokens was not stored: it takes .* max_bytes=1000"):
            read_prompt(model, MANUAL, store, bits=3)
        assert store.prompts() == []

    def test_what_killed_writers_left_goes(self, model, store):
        read_prompt(model, MANUAL, store, bits=3)
        folder = store.prompts()[0].path.parent
        old, new = (folder / f".{each * 32}.{each * 16}.safetensors" for each in "ab")
        for path in (old, new):
            path.write_bytes(b"half")
        os.utime(old, (time.time() - 2 * prompt_store.ABANDONED,) * 2)
        read_prompt(model, tokens(PROMPT, 30), store, bits=3)
        assert (old.exists(), new.exists()) == (False, True)
        assert store.clear() == 2
        assert list(store.path.iterdir()) == []

    def test_what_is_no_prompt_is_never_removed(self, model, tmp_path):
        """In whatever folder somebody makes a store, and even if that was a mistake."""
        others = [".profile", "a.safetensors", "work/.settings", "work/model.safetensors", "llama/model.safetensors"]
        others += [
            f"{'a' * 32}/{'b' * 32}.safetensors",
            f"llama-{'a' * 32}/model.safetensors",
            f"llama-{'a' * 32}/.env",
        ]
        for name in others:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("somebody's")
        (tmp_path / "empty").mkdir()
        store = PromptStore(tmp_path, max_bytes=1_000_000)
        for seed in range(6):
            read_prompt(model, tokens(PROMPT, seed), store, bits=3)
        assert store.verify() == []
        assert 0 < store.clear() < 6
        left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
        assert left == sorted(others)
        assert (tmp_path / "empty").is_dir()

    def test_a_full_disk_is_said_and_the_answer_is_there(self, model, store, monkeypatch):
        def full(self, path, **given):
            raise CacheError("cannot write: No space left on device. Make room, or choose another place.")

        with attach(model, bits=3):
            expected = model.generate(MANUAL, **GENERATE)
        monkeypatch.setattr(CompressedCache, "save", full)
        with attach(model, bits=3, prompts=store), pytest.warns(UserWarning, match="not stored in .*: cannot write"):
            found = model.generate(MANUAL, **GENERATE)
        assert torch.equal(found, expected)


WRITER = """
import sys, torch
from grace_opt.hf import PromptStore, read_prompt
from grace_opt.hf.models import load_pocket
torch.set_num_threads(1)
model, store = load_pocket()[0], PromptStore(sys.argv[1])
print("ready", flush=True)
for seed in range(int(sys.argv[2]), 10**6):
    ids = torch.randint(3, 97, (1, 300), generator=torch.Generator().manual_seed(seed % 7))
    store.clear() if seed % 5 == 0 else read_prompt(model, ids, store, bits=3)
"""


class TestAtOnce:
    @pytest.mark.slow
    def test_killed_writers_leave_whole_prompts_or_none(self, model, store):
        """Processes that store, remove and are killed; what is there can be used."""
        for turn in range(3):
            running = [
                subprocess.Popen([sys.executable, "-c", WRITER, str(store.path), str(seed)], stdout=subprocess.PIPE)
                for seed in (turn, turn + 1)
            ]
            for each in running:
                assert each.stdout.readline().strip() == b"ready"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a prompt may be removed while it is read
                for seed in range(10):
                    ids = torch.randint(3, 97, (1, 300), generator=torch.Generator().manual_seed(seed % 7))
                    assert read_prompt(model, ids, store, bits=3).get_seq_length() == 300
            for each in running:
                each.kill()
                each.wait()
            for kept in store.prompts():
                CompressedCache.load(kept.path, model)
            assert store.verify() == []

    def test_threads_that_store_the_same_prompt_make_one(self, model, store):
        failures, barrier = [], threading.Barrier(4)

        def run(own):
            try:
                barrier.wait()
                read_prompt(own, MANUAL, store, bits=3)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(copy.deepcopy(model),)) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not failures
        assert len(store.prompts()) == 1
        assert [path for path in store.prompts()[0].path.parent.iterdir() if path.name[0] == "."] == []


class TestBadInput:
    def test_folders(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        with pytest.raises(CacheError, match="it is a file"):
            PromptStore(tmp_path / "file")
        for path in (3, "", ["a"]):
            with pytest.raises(OptionError, match=r"path=.*: give the name of a folder"):
                PromptStore(path)
        with pytest.raises(OptionError, match="prompts=None: give a PromptStore"):
            read_prompt(load_pocket()[0], MANUAL, None, bits=3)
        with pytest.raises(OptionError, match=r'max_bytes="much"|max_bytes=.much.'):
            PromptStore(tmp_path, max_bytes="much")
        monkeypatch.setattr(os, "access", lambda *given: False)
        with pytest.raises(CacheError, match="no folder that prompts can be written to"):
            PromptStore(tmp_path / "new")

    @pytest.mark.parametrize("given", [{"max_bytes": "1MiB"}, {"provider": lambda *given: None, "bits": None}])
    def test_settings_that_a_store_cannot_know(self, model, store, given):
        with pytest.raises(OptionError, match="prompts="):
            attach(model, **{name: value for name, value in given.items() if value is not None}, prompts=store)

    def test_embeddings_and_other_tensors(self, model, store):
        embeddings = model.get_input_embeddings()(MANUAL)
        with attach(model, bits=3, prompts=store):
            with pytest.raises(OptionError, match="inputs_embeds beside prompts="):
                model.generate(inputs_embeds=embeddings, **GENERATE)
            places = torch.arange(PROMPT)[None]
            with pytest.warns(UserWarning, match="position_ids= is given"):
                model.generate(MANUAL, position_ids=places, **GENERATE)
        assert store.prompts() == []

    def test_prompts_that_are_too_short_are_read_as_ever(self, model, store):
        with attach(model, bits=3, prompts=store), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they stay dense
            for length in (1, 50, prompt_store.FEWEST):
                model.generate(MANUAL[:, :length], **GENERATE)
            read_prompt(model, MANUAL[:, : prompt_store.FEWEST], store, bits=3)
        assert store.prompts() == []

    @pytest.mark.parametrize("ids", [MANUAL[0], MANUAL.repeat(2, 1), MANUAL[:, :1], MANUAL.float(), [1, 2, 3], None])
    def test_prompts_to_read(self, model, store, ids):
        with pytest.raises(OptionError, match="input_ids: give one prompt's tokens"):
            read_prompt(model, ids, store, bits=3)


def test_a_relative_folder_stays_where_it_was(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = PromptStore("prompts")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    read_prompt(model, MANUAL, store, bits=3)
    assert len(store.prompts()) == 1
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_store_that_is_cleared_while_it_is_written_to(model, store, monkeypatch):
    save, times = CompressedCache.save, []

    def cleared(self, path, **given):
        times.append(len(times) or store.clear())
        save(self, path, **given)

    monkeypatch.setattr(CompressedCache, "save", cleared)
    read_prompt(model, MANUAL, store, bits=3)
    assert len(store.prompts()) == 1
    assert len(times) == 2


def test_a_path_will_do_and_home_is_expanded(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with attach(model, bits=3, prompts="~/prompts"):
        model.generate(MANUAL, **GENERATE)
    assert len(PromptStore(Path(tmp_path) / "prompts").prompts()) == 1
