"""Blocks of attach in every order, interrupted anywhere, copied, decorated, forgotten: the model is as it was found."""

from __future__ import annotations

import copy
import gc
import itertools
import linecache
import pickle
import sys
import threading
import weakref
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, pipeline

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import CompressedCache, SnapKV, TopTokens, attach, attention_implementation, capture_attention
from grace_opt.hf.models import implementation, load_pocket
from tests.hf.conftest import OBSERVED, RECENT, build

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
OPTIONS = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def model(tiny):
    return tiny(attention="sdpa")


@pytest.fixture(autouse=True)
def nothing_stays_open():
    yield
    assert not implementation._ACTIVE


def as_found(model):
    hooked = {"generate", "prepare_inputs_for_generation"} & set(vars(model))
    return model.config._attn_implementation == "sdpa" and not hooked


def kept(attached):
    """How many channels the block's latest cache keeps, which tells its block."""
    return attached.cache.layers[0].compressed.kept_indices.shape[-1]


class Held:
    """A streamer whose call waits after the first tokens until it is let go."""

    def __init__(self):
        self.begun, self.go, self.tokens = threading.Event(), threading.Event(), []

    def put(self, value):
        self.tokens += value.flatten().tolist()
        if len(self.tokens) > 41:
            self.begun.set()
            assert self.go.wait(60)

    def end(self):
        self.tokens.append(None)


class TestCallsInFlight:
    """When their block ends, calls of other threads go on as they began."""

    @pytest.fixture
    def held(self, model, prompt):
        """Starts a call in a thread of its own, and returns it when the first new tokens are there."""
        started = []

        def start(**options):
            streamer, found = Held(), []
            call = {"streamer": streamer, **OPTIONS, **options}
            thread = threading.Thread(target=lambda: found.append(model.generate(prompt[:1], **call)))
            thread.start()
            assert streamer.begun.wait(60)
            started.append((streamer, thread))
            return streamer, thread, found

        yield start
        for streamer, thread in started:
            streamer.go.set()
            thread.join(60)

    def test_end_with_the_tokens_of_the_block(self, model, prompt, held):
        with attach(model, ratio=0.75, **WINDOWS):
            expected = model.generate(prompt[:1], **OPTIONS)
            streamer, thread, found = held()
        assert "generate" not in vars(model), "new calls are plain ones"
        assert torch.equal(model.generate(prompt[:1], **OPTIONS), model.generate(prompt[:1], **OPTIONS))
        streamer.go.set()
        thread.join(60)
        assert torch.equal(found[0], expected)
        assert streamer.tokens == [*expected[0].tolist(), None]
        assert as_found(model)

    def test_new_calls_are_dense_meanwhile(self, model, prompt, held):
        dense = model.generate(prompt, **OPTIONS)
        with attach(model, ratio=0.75, **WINDOWS):
            assert not torch.equal(model.generate(prompt, **OPTIONS), dense)
            held()
        assert torch.equal(model.generate(prompt, **OPTIONS), dense)

    @pytest.mark.parametrize("first", [0, 1])
    def test_the_last_of_several_puts_the_model_back(self, first, model, held):
        with attach(model, "grace", **WINDOWS), attach(model, kept_channels=4, **WINDOWS):
            calls = [held(), held()]
        for number in (first, 1 - first):
            assert not as_found(model)
            streamer, thread, found = calls[number]
            streamer.go.set()
            thread.join(60)
            assert found
        assert as_found(model)

    def test_a_call_that_raises_puts_the_model_back(self, model, held, monkeypatch):
        monkeypatch.setattr(threading, "excepthook", lambda raised: None)
        with attach(model, "grace", **WINDOWS):
            streamer, thread, found = held()
        streamer.put = None  # not callable
        streamer.go.set()
        thread.join(60)
        assert not found
        assert as_found(model)

    def test_the_block_can_not_be_opened_again_meanwhile(self, model, prompt, held):
        block = attach(model, "grace", **WINDOWS)
        with block:
            streamer, thread, _ = held()
        with pytest.raises(OptionError, match="calls in it are still running"):
            block.__enter__()
        streamer.go.set()
        thread.join(60)
        with block:
            model.generate(prompt, **OPTIONS)
        assert as_found(model)

    def test_a_call_that_comes_too_late_is_a_plain_one(self, model, prompt):
        """The hook had found its block open; then it ended."""
        dense = model.generate(prompt, **OPTIONS)
        with attach(model, kept_channels=4, **WINDOWS) as attached:
            plain = model.generate._plain
        assert torch.equal(attached.generate(plain, (prompt,), dict(OPTIONS)), dense)


class TestOrder:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_of_leaving_does_not_matter(self, order, model, prompt):
        dense = model.generate(prompt, **OPTIONS)
        blocks = [attach(model, kept_channels=4 * number, **WINDOWS) for number in (1, 2, 3)]
        for block in blocks:
            block.__enter__()
        left = [0, 1, 2]
        for number in order:
            model.generate(prompt, **OPTIONS)
            assert kept(blocks[left[-1]]) == 4 * (left[-1] + 1), "the innermost that is open"
            blocks[number].__exit__(None, None, None)
            left.remove(number)
        assert as_found(model)
        assert torch.equal(model.generate(prompt, **OPTIONS), dense)

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_of_other_choices_of_attention_does_not_matter(self, order, model):
        with ExitStack() as first:
            stacks = [ExitStack() for _ in range(3)]
            first.callback(lambda: [stack.close() for stack in stacks])
            for stack, block in zip(
                stacks,
                (
                    attention_implementation(model, "eager"),
                    attach(model, "grace"),
                    attention_implementation(model, "sdpa"),
                ),
                strict=True,
            ):
                stack.enter_context(block)
            for number in order:
                stacks[number].close()
            assert as_found(model)

    def test_of_generators_that_hold_blocks_does_not_matter(self, model, prompt):
        def answers(channels):
            with attach(model, kept_channels=channels, **WINDOWS) as attached:
                while True:
                    model.generate(prompt, **OPTIONS)
                    yield attached

        first, second = answers(4), answers(8)
        next(first), next(second)
        first.close()
        assert kept(next(second)) == 8
        second.close()
        assert as_found(model)

    def test_of_a_generator_that_nobody_closes_is_that_of_the_collector(self, model, prompt):
        def answer():
            with attach(model, "grace", **WINDOWS):
                yield model.generate(prompt, **OPTIONS)

        next(answer())
        gc.collect()
        assert as_found(model)

    def test_of_blocks_in_two_threads_does_not_matter(self, model, prompt):
        """Each thread's calls belong to its own block, wherever the other one is."""
        inside, go_on, found = threading.Event(), threading.Event(), []

        def other():
            with attach(model, kept_channels=4, **WINDOWS) as attached:
                inside.set()
                assert go_on.wait(30)
                model.generate(prompt, **OPTIONS)
                found.append(kept(attached))

        thread = threading.Thread(target=other, daemon=True)
        with attach(model, kept_channels=8, **WINDOWS) as attached:
            thread.start()
            assert inside.wait(30)
            model.generate(prompt, **OPTIONS)
            assert kept(attached) == 8
        go_on.set()
        thread.join(30)
        assert found == [4]
        assert as_found(model)

    def test_leaves_what_others_have_put_around_generate(self, model, prompt, monkeypatch):
        with attach(model, "grace", **WINDOWS):
            ours = model.generate
            monkeypatch.setattr(model, "generate", lambda *args, **kwargs: ours(*args, **kwargs))
            theirs = model.generate
        assert model.generate is theirs
        assert model.config._attn_implementation == "sdpa"
        dense = model.generate(prompt, **OPTIONS)
        monkeypatch.undo()
        del model.generate
        assert torch.equal(dense, model.generate(prompt, **OPTIONS)), "whoever kept ours calls the plain one"


@pytest.mark.filterwarnings("ignore:attach.model")
class TestInterrupts:
    """Ctrl-C, at any line of ours that entering and leaving a block runs through."""

    OURS = ("attach.py", "calls.py", "given_cache.py", "hook.py", "implementation.py")

    @staticmethod
    def run(interrupt_at, model, **call):
        """Enter and leave a block; raise at that line of ours. Returns how many lines there were."""
        block, lines = attach(model, "grace", **WINDOWS), 0

        def trace(frame, event, argument):
            nonlocal lines
            if not frame.f_code.co_filename.endswith(TestInterrupts.OURS):
                return None
            # At a leading `try:`, and where a lock is taken or given back, Python handles no signal.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if event == "line" and line not in ("try:", "with _LOCK:", "with LOCK:", "with self._opening:"):
                lines += 1
                if lines == interrupt_at:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            with block:
                block.generate(lambda **call: None, (), call)
        finally:
            sys.settrace(before)
        return lines

    @pytest.mark.filterwarnings("ignore:generate.. has put nothing")
    @pytest.mark.parametrize("use_cache", [False, True])
    def test_leave_the_model_as_it_was_found(self, use_cache, model, prompt):
        call = {"use_cache": use_cache, "input_ids": prompt}
        lines = self.run(0, model, **call)
        assert lines > 20
        for line in range(1, lines + 1):
            with pytest.raises(KeyboardInterrupt):
                self.run(line, model, **call)
            assert as_found(model), line
            assert not implementation._ACTIVE


class TestCopies:
    def test_of_the_model_are_plain_ones_with_their_own_weights(self, model, prompt):
        dense = model.generate(prompt, **OPTIONS)
        with attach(model, ratio=0.75, **WINDOWS) as attached:
            twin = copy.deepcopy(model)
            assert twin.config._attn_implementation == "sdpa"
            assert torch.equal(twin.generate(prompt, **OPTIONS), dense)
            with torch.no_grad():
                twin.lm_head.weight.neg_()
            assert not torch.equal(twin.generate(prompt, **OPTIONS), dense)
            assert not torch.equal(model.generate(prompt, **OPTIONS), dense), "the original still prunes"
            assert attached.cache.memory_report().pruned_tokens
        assert as_found(model)
        with attach(twin, "grace", **WINDOWS) as attached:
            twin.generate(prompt, **OPTIONS)
            assert attached.cache.memory_report().pruned_tokens

    def test_of_a_model_with_a_generate_of_its_own_keep_it(self, model, prompt, monkeypatch):
        monkeypatch.setattr(model, "generate", print)
        with attach(model, "grace", **WINDOWS):
            assert copy.deepcopy(model).generate is print

    def test_by_pickle_are_refused(self):
        # Of its own: once a model has returned attentions, old transformers leave hooks on it that cannot be pickled.
        model = build.__wrapped__("Llama")
        with attach(model, "grace"), pytest.raises(CacheError, match="leave the block before you pickle"):
            pickle.dumps(model)


class TestUse:
    def test_without_with_is_noticed(self, model):
        with pytest.warns(UserWarning, match="alone changes nothing; write `with attach") as found:
            attach(model, "grace")
        assert [warning.filename for warning in found] == [__file__]
        assert as_found(model)

    def test_twice_at_once_is_refused_and_one_after_the_other_works(self, model, prompt):
        block = attach(model, "grace", **WINDOWS)
        with block, pytest.raises(OptionError, match="open already"):
            block.__enter__()
        with block as attached:
            model.generate(prompt, **OPTIONS)
        assert attached.cache.memory_report().pruned_tokens
        assert as_found(model)

    def test_as_a_decorator_opens_a_block_for_every_call(self, model, prompt):
        block = attach(model, ratio=0.75, **WINDOWS)

        @block
        def answer(again):
            return answer(False) if again else model.generate(prompt, **OPTIONS)

        dense = model.generate(prompt, **OPTIONS)
        assert not torch.equal(answer(True), dense)
        assert as_found(model)

    def test_what_is_yielded_is_no_cache(self, model, prompt):
        with attach(model, "grace", **WINDOWS) as attached:
            with pytest.raises(OptionError, match=r"write past_key_values=attached\.cache"):
                model.generate(prompt, past_key_values=attached, **OPTIONS)
            with pytest.raises(AttributeError, match=r"write attached\.cache\.memory_report"):
                attached.memory_report()
            with pytest.raises(AttributeError, match="no attribute 'cash'"):
                _ = attached.cash
        with pytest.raises(AttributeError, match=r"write attached\.cache\.get_seq_length"):
            model(prompt, past_key_values=attached)

    def test_of_what_only_holds_a_model(self):
        model, tokenizer = load_pocket()
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        for wrong, says in (
            (pipe, r"a TextGenerationPipeline contains one; write \w+\(pipe\.model, \.\.\.\), and call pipe as before"),
            (torch.nn.DataParallel(model), r"a DataParallel contains one; write \w+\(x\.module, \.\.\.\)"),
            (
                SimpleNamespace(peft_config={}, get_base_model=lambda: model),
                r"peft wraps one; write \w+\(model\.get_base_model\(\), \.\.\.\)",
            ),
            ("gpt2", r"write \w+\(model, \.\.\.\) with model = AutoModelForCausalLM\.from_pretrained\('gpt2'\)"),
        ):
            for take in (attach, CompressedCache):
                with pytest.raises(OptionError, match=says):
                    take(wrong)

    def test_of_a_compiled_model_is_that_of_the_model(self, model, prompt):
        compiled = torch.compile(model, backend="eager")
        with attach(compiled, "grace", **WINDOWS) as attached:
            found = compiled.generate(prompt, **OPTIONS)
            assert torch.equal(found, model.generate(prompt, **OPTIONS))
        assert attached.cache.memory_report().pruned_tokens == 32
        assert as_found(model)
        assert CompressedCache(compiled, "grace").fingerprint() == CompressedCache(model, "grace").fingerprint()


class TestWhatTheUserChose:
    def test_eager_attention_stays_eager(self, tiny, padded):
        """So attention weights are there, as without attach."""
        prompt, mask = padded
        model = tiny(attention="eager")
        options = {"attention_mask": mask, "output_attentions": True, "return_dict_in_generate": True, **OPTIONS}
        dense = model.generate(prompt, **options)
        with attach(model, ratio=0.0, **WINDOWS):
            assert model.config._attn_implementation == "grace_eager"
            found = model.generate(prompt, **options)
        assert model.config._attn_implementation == "eager"
        assert torch.equal(found.sequences, dense.sequences)
        for step, expected in zip(found.attentions, dense.attentions, strict=True):
            for weights, wanted in zip(step, expected, strict=True):
                torch.testing.assert_close(weights, wanted, atol=1e-5, rtol=0)

    @pytest.mark.parametrize(
        "settings", [{"sink_tokens": 2}, {"sink_tokens": 2, "fused": False}, {"read": TopTokens(share=1.0)}]
    )
    def test_weights_are_in_the_order_of_the_sequence(self, settings, tiny, padded):
        """The sink tokens of a padded row are stored before its padding."""
        model, options = tiny(attention="eager"), {"attention_mask": padded[1], "output_attentions": True}
        options |= {"return_dict_in_generate": True, **OPTIONS}
        dense = model.generate(padded[0], **options)
        with attach(model, ratio=0.0, **settings, **WINDOWS) as attached:
            found = model.generate(padded[0], **options)
        assert attached.cache.layers[0].compressed.positions is not None
        for step, expected in zip(found.attentions, dense.attentions, strict=True):
            for weights, wanted in zip(step, expected, strict=True):
                torch.testing.assert_close(weights, wanted, atol=1e-5, rtol=0)

    def test_weights_of_evicted_tokens_are_zero(self, tiny, padded):
        model, options = tiny(attention="eager"), {"attention_mask": padded[1], "output_attentions": True}
        options |= {"return_dict_in_generate": True, **OPTIONS}
        with attach(model, ratio=0.0, evict=SnapKV(budget=20, window=4), **WINDOWS) as attached:
            found = model.generate(padded[0], **options)
        places = attached.cache.layers[0].compressed.positions.long()
        for number, step in enumerate(found.attentions[1:], start=1):
            older = step[0][:, :, 0, :32].unflatten(1, (places.shape[1], -1))
            assert step[0].shape[-1] == 40 + number
            stored = torch.zeros(2, places.shape[1], 1, 32).scatter(-1, places[:, :, None], 1.0).bool()
            assert not older[~stored.expand_as(older)].any()
            assert older.any(-1).all()

    @pytest.mark.parametrize("where", ["passed", "the model's"])
    @pytest.mark.parametrize("name", ["static", "hybrid", "offloaded"])
    def test_a_configured_cache_is_set_aside(self, name, where, model, prompt, monkeypatch):
        with attach(model, "grace", **WINDOWS):
            expected = model.generate(prompt, **OPTIONS)
        changed, options = copy.deepcopy(model.generation_config), dict(OPTIONS)
        changed.cache_implementation = name
        given = []
        if where == "passed":
            changed.update(**options)
            options = {"generation_config": changed}
            plain = type(model).generate
            monkeypatch.setattr(type(model), "generate", lambda *a, **k: (given.append(k), plain(*a, **k))[1])
        else:
            monkeypatch.setattr(model, "generation_config", changed)
        with attach(model, "grace", **WINDOWS) as attached:
            assert torch.equal(model.generate(prompt, **options), expected)
            assert attached.cache.memory_report().pruned_tokens == 32
            if where == "passed":  # in any position
                assert torch.equal(model.generate(prompt, changed), expected)
        assert changed.cache_implementation == name
        assert not any("cache_implementation" in kwargs for kwargs in given)  # which transformers would warn of


def test_capturing_while_another_thread_decodes_leaves_its_tokens_alone(model, prompt):
    """Between any two of its steps the attention implementation changes, and changes back."""
    with attach(model, ratio=0.75, **WINDOWS):
        expected = model.generate(prompt, **OPTIONS)

        def between(*_, **__):
            captured = []
            thread = threading.Thread(
                target=lambda: captured.append(capture_attention(model, prompt[:1, :12])), daemon=True
            )
            thread.start()
            thread.join(30)
            assert captured[0][1].keys.shape[2] == 12
            return torch.zeros(len(prompt), dtype=torch.bool)

        found = model.generate(prompt, stopping_criteria=[between], **OPTIONS)
        assert torch.equal(found, expected)
        with attention_implementation(model, "grace_capture_sdpa"):
            assert torch.equal(model.generate(prompt, **OPTIONS), expected)
    assert as_found(model)


def test_a_dense_cache_of_ones_own_is_left_alone(model, prompt, monkeypatch):
    dense = model.generate(prompt, **OPTIONS)
    with attach(model, ratio=0.75, **WINDOWS):
        assert torch.equal(model.generate(prompt, past_key_values=DynamicCache(config=model.config), **OPTIONS), dense)


def test_a_block_that_is_over_is_freed_at_once(model, prompt):
    """Its cache would otherwise live until the garbage collector comes by."""
    gc.disable()
    try:
        with attach(model, "grace", **WINDOWS) as attached:
            model.generate(prompt, **OPTIONS)
        gone = weakref.ref(attached)
        del attached
        assert gone() is None
    finally:
        gc.enable()
