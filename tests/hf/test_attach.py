"""attach: the same tokens as with a cache in hand, and a model that is afterwards as it was found."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, T5Config, pipeline

from grace_opt.attention.masks import ChannelMask
from grace_opt.attention.provider import MaskProvider
from grace_opt.errors import CacheError, MaskError, OptionError, UnknownSolverError
from grace_opt.hf import CacheConfig, CompressedCache, attach, attention_implementation
from grace_opt.hf.models import load_pocket
from tests.hf.conftest import OBSERVED, RECENT

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "return_tensors": True}
#: Old transformers look for candidates only where there is an end token; no model here has this one.
LOOKUP = {"prompt_lookup_num_tokens": 4, "eos_token_id": 1000}
pocket = functools.cache(load_pocket)


@pytest.fixture
def model(tiny):
    return tiny(attention="sdpa")


@pytest.fixture
def new(prompt):
    """`new(model, ids, mask, **options)`: the greedy tokens that a plain generate() adds."""

    def run(model, ids=prompt, mask=None, **options):
        mask = torch.ones_like(ids) if mask is None else mask
        options = {"max_new_tokens": 10, "do_sample": False, **options}
        return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]

    return run


@pytest.fixture
def explicit(tiny, new):
    """The tokens with a cache that is passed, and the cache."""

    def run(ids, mask=None, arguments=("grace",), **options):
        model = tiny()
        cache = CompressedCache(model, *arguments, prompt_length=ids.shape[1], **WINDOWS)
        tokens = new(model, ids, mask, past_key_values=cache, **options)
        model.set_attn_implementation("sdpa")
        return tokens, cache

    return run


def as_found(model):
    hooked = {"generate", "prepare_inputs_for_generation"} & set(vars(model))
    return model.config._attn_implementation == "sdpa" and not hooked


def unused(attached):
    """No call of the block has been given a cache, and asking for one says so."""
    with pytest.raises(CacheError, match=r"no cache yet: attached\.cache is the cache of the latest model\.generate"):
        _ = attached.cache
    return True


class TestTokens:
    @pytest.mark.parametrize("arguments", [("grace", 0.5), ("mies", [0.75, 0.25]), ("grace", 0.0)])
    @pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
    def test_equal_those_with_an_explicit_cache(self, options, arguments, model, padded, new, explicit):
        expected, cache = explicit(*padded, arguments=arguments, **options)
        with attach(model, *arguments, **WINDOWS) as attached:
            assert torch.equal(new(model, *padded, **options), expected)
        rows = slice(None, None, options.get("num_beams", 1))  # beams of a prompt have its mask
        assert torch.equal(attached.cache.channel_mask().pruned[:, rows], cache.channel_mask().pruned[:, rows])
        if arguments == ("grace", 0.0):
            assert torch.equal(new(model, *padded, **options), expected), "nothing pruned is the plain model"

    def test_differ_from_the_dense_ones(self, model, new):
        with attach(model, ratio=0.75, **WINDOWS):
            pruned = new(model)
        assert not torch.equal(pruned, new(model))

    @pytest.mark.parametrize("how", ["config", "provider", "masks"])
    def test_follow_every_way_to_say_what_goes(self, how, model, prompt, new):
        pruned = torch.zeros(2, 2, 16, dtype=torch.bool)
        pruned[..., 3:11] = True
        given = {
            "config": {"config": CacheConfig("think", 0.5, **WINDOWS)},
            "provider": {
                "provider": lambda queries, keys, attention_mask=None: ChannelMask(pruned[0].expand(len(keys), -1, -1)),
                **WINDOWS,
            },
            "masks": {"masks": ChannelMask(pruned), **WINDOWS},
        }[how]
        with attach(model, **given) as attached:
            new(model)
        found = attached.cache.channel_mask().pruned
        assert found.sum(-1).eq(8).all()
        if how != "config":
            assert torch.equal(found, pruned[:, None].expand(-1, 2, -1, -1))
        assert attached.cache.layers[0].pruned_length == 32

    @pytest.mark.parametrize("call", ["inputs", "input_ids", "by position"])
    def test_of_a_prompt_however_it_is_passed(self, call, model, prompt, explicit):
        expected, _ = explicit(prompt)
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 10, "do_sample": False}
        args, named = ((prompt,), {}) if call == "by position" else ((), {call: prompt})
        with attach(model, "grace", **WINDOWS) as attached:
            assert torch.equal(model.generate(*args, **named, **options)[:, 40:], expected)
        assert attached.cache.layers[0].prompt.declared == 40

    def test_of_embeddings(self, model, padded, explicit):
        prompt, mask = padded
        expected, cache = explicit(prompt, mask)
        embedded = model.get_input_embeddings()(prompt).detach()
        with attach(model, "grace", **WINDOWS) as attached:
            found = model.generate(inputs_embeds=embedded, attention_mask=mask, max_new_tokens=10, do_sample=False)
        assert torch.equal(found[:, -10:], expected)
        assert attached.cache.layers[0].prompt.declared == 40
        assert torch.equal(attached.cache.channel_mask().pruned, cache.channel_mask().pruned)

    def test_of_soft_capped_models_come_from_eager_attention(self, tiny, prompt, new):
        changes = {"sliding_window": 12, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}
        model = tiny("Gemma2", attention="eager", **changes)
        dense = new(model)
        with attach(model, ratio=0.0, **WINDOWS) as attached:
            assert model.config._attn_implementation == "grace_eager"
            assert torch.equal(new(model), dense)
        assert attached.cache.memory_report().pruned_tokens == 32
        assert model.config._attn_implementation == "eager"


class TestPromptEnd:
    @pytest.mark.parametrize(
        "options",
        [{"prefill_chunk_size": 16}, {"prefill_chunk_size": 8}, LOOKUP],
        ids=["chunks", "chunks that divide the prompt", "prompt lookup"],
    )
    def test_is_known(self, options, model, prompt, new):
        """Chunked, and with candidates behind it, the prompt gives the masks and tokens of the plain prompt."""
        # Prompt lookup takes one sequence, and finds candidates where the prompt repeats itself.
        ids = torch.cat([prompt[:1, :30], prompt[:1, 18:28]], dim=1)
        if not torch.equal(new(model, ids, **options), new(model, ids)):
            pytest.skip("these transformers get the positions of chunks wrong, with any cache")
        found = []
        for extra in ({}, options):
            with attach(model, "grace", **WINDOWS) as attached:
                tokens = new(model, ids, **extra)
            found.append((tokens, attached.cache.channel_mask().pruned))
            assert attached.cache.layers[0].compressed.length == 32
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])

    @pytest.mark.parametrize("kind", ["early exit", "itself"])
    def test_drafts_of_the_model_itself_stay_dense(self, kind, tiny, prompt, new):
        """Its layers are as many as ever, and `attached.cache` is the one that drafts are checked on."""
        model = copy.deepcopy(tiny(num_hidden_layers=2))  # whose number of layers changes meanwhile
        drafting = {"assistant_early_exit": 1} if kind == "early exit" else {"assistant_model": model}
        try:
            new(copy.deepcopy(model), prompt[:1], **drafting)
        except TypeError:
            pytest.skip("these transformers cannot draft so, with any cache")
        with attach(model, ratio=[0.3, 0.5], **WINDOWS) as attached:
            expected = new(model, prompt[:1])
        with attach(model, ratio=[0.3, 0.5], **WINDOWS) as attached:
            assert torch.equal(new(model, prompt[:1], **drafting), expected)
        assert len(attached.cache.layers) == 2
        assert attached.cache.layers[1].compressed is not None
        assert attached.cache.get_seq_length() == prompt.shape[1] + expected.shape[1] - 1

    def test_is_what_the_candidates_would_hide_from_a_cache_without_it(self, tiny, prompt, new):
        with pytest.raises(CacheError, match=r"with grace_opt\.hf\.attach\(model\)"):
            new(tiny(), prompt[:1], past_key_values=CompressedCache(tiny(), "grace", **WINDOWS), **LOOKUP)


class TestModel:
    def test_is_as_found_after_the_block(self, model, new):
        before, dense = model.generate, new(model)
        with attach(model, "grace", **WINDOWS):
            assert model.config._attn_implementation == "grace_sdpa"
            assert vars(model)["generate"].__name__ == "generate"
        assert as_found(model)
        assert model.generate == before
        assert torch.equal(new(model), dense)

    def test_is_as_found_after_an_exception(self, model, new):
        with pytest.raises(ZeroDivisionError), attach(model, "grace", **WINDOWS):
            new(model, max_new_tokens=1 // 0)
        assert as_found(model)

    def test_is_as_found_after_a_failing_generate(self, model, new):
        def fail(queries, keys, attention_mask=None):
            raise ZeroDivisionError

        dense = new(model)
        with pytest.raises(ZeroDivisionError), attach(model, provider=fail, **WINDOWS):
            new(model)
        assert as_found(model)
        assert torch.equal(new(model), dense)

    def test_is_as_found_by_each_of_nested_blocks(self, model, new):
        """The inner block decides what happens inside it, and the outer one again afterwards."""
        with attach(model, kept_channels=8, **WINDOWS) as outer:
            with attach(model, kept_channels=4, **WINDOWS) as inner:
                new(model)
            assert unused(outer)
            assert inner.cache.layers[0].compressed.pruned_keys.shape[-1] == 4
            assert model.config._attn_implementation == "grace_sdpa"
            new(model)
            assert outer.cache.layers[0].compressed.pruned_keys.shape[-1] == 8
        assert as_found(model)

    def test_is_as_found_by_nested_blocks_when_the_inner_one_raises(self, model, new):
        with attach(model, kept_channels=8, **WINDOWS) as outer:
            with pytest.raises(ZeroDivisionError), attach(model, kept_channels=4, **WINDOWS):
                _ = 1 / 0
            new(model)
        assert outer.cache.layers[0].compressed.pruned_keys.shape[-1] == 8
        assert as_found(model)

    def test_keeps_a_generate_of_its_own(self, model, new, monkeypatch):
        calls, plain = [], model.generate

        def own(*args, **kwargs):
            calls.append(kwargs.get("past_key_values"))
            return plain(*args, **kwargs)

        monkeypatch.setattr(model, "generate", own, raising=False)
        with attach(model, "grace", **WINDOWS) as attached:
            new(model)
        assert calls == [attached.cache], "it is still what runs"
        assert vars(model)["generate"] is own
        assert model.config._attn_implementation == "sdpa"

    def test_is_left_alone_beside_others_of_its_class(self, model, tiny, new):
        other = tiny("qwen2", attention="sdpa")
        with attach(model, "grace", **WINDOWS) as attached:
            new(other)
        assert unused(attached)

    @pytest.mark.parametrize(
        ("wrong", "error", "says"),
        [
            ({"ratio": 2}, OptionError, "ratio=2"),
            ({"ratio": [0.5]}, OptionError, "ratio has 1 entries and the model 2 layers"),
            ({"method": "miess"}, UnknownSolverError, "miess"),
            ({"no_such_option": 1}, OptionError, "no_such_option"),
            ({"sink_tokens": -1}, OptionError, "sink_tokens"),
            ({"dense_layers": 2}, CacheError, "dense_layers=2 leaves no layer"),
            ({"prompt_length": 40}, OptionError, "leave out prompt_length"),
            ({"masks": ChannelMask(torch.zeros(3, 2, 16, dtype=torch.bool))}, MaskError, "3 layers, the model has 2"),
            ({"config": CacheConfig(), "ratio": 0.6}, OptionError, "leave out ratio"),
        ],
    )
    def test_is_untouched_by_wrong_arguments_which_raise_on_entering(self, wrong, error, says, model):
        entered = False
        with pytest.raises(error, match=says), attach(model, **wrong):
            entered = True
        assert not entered
        assert as_found(model)

    def test_must_be_a_model(self, model):
        for wrong in (model.config, T5Config(num_layers=1, d_model=16, num_heads=2), "a-model"):
            with pytest.raises(OptionError, match=f"not {type(wrong).__name__}; write attach"), attach(wrong):
                pass


class TestCache:
    def test_is_not_there_before_the_first_call(self, model):
        with attach(model, "grace", **WINDOWS) as attached:
            assert unused(attached)

    def test_is_a_new_one_for_every_call(self, model, prompt, new):
        with attach(model, "grace", **WINDOWS) as attached:
            first, one = new(model), attached.cache
            again, two = new(model), attached.cache
            new(model, prompt[:1, :20])
        assert torch.equal(first, again)
        assert one is not two
        assert attached.cache.get_seq_length() == 29
        assert (one.get_seq_length(), two.get_seq_length()) == (49, 49)

    def test_is_returned_by_generate_as_well(self, model, prompt):
        with attach(model, "grace", **WINDOWS) as attached:
            found = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, return_dict_in_generate=True
            )
        assert found.past_key_values is attached.cache

    def test_that_is_passed_is_left_alone(self, model, new):
        dense = new(model)
        passed = DynamicCache(config=model.config)
        with attach(model, ratio=0.75, **WINDOWS) as attached:
            assert torch.equal(new(model, past_key_values=passed), dense)
        assert unused(attached)
        assert passed.get_seq_length() == 49

    def test_goes_on_with_the_conversation_when_passed_again(self, model, prompt, continuation, new):
        with attach(model, "grace", **WINDOWS) as attached:
            first = new(model)
            cache = attached.cache
            longer = torch.cat([prompt, first, continuation], dim=1)
            second = new(model, longer, past_key_values=cache)
            assert attached.cache is cache
        assert cache.get_seq_length() == longer.shape[1] + 9
        assert cache.layers[0].pruned_length == 32, "nothing is pruned anew"
        assert second.shape == (2, 10)

    def test_is_not_used_where_use_cache_is_off(self, model, new):
        dense = new(model)
        with attach(model, ratio=0.75, **WINDOWS) as attached:
            assert torch.equal(new(model, use_cache=False), dense)
        assert unused(attached)

    # attach() looks at the keyword alone. transformers feeds the whole sequence again at every step then, which a
    # cache takes for new tokens: the output is wrong without a word.
    @pytest.mark.parametrize("where", ["passed", "the model's"])
    def test_is_not_used_where_the_generation_config_has_it_off(self, where, model, prompt, new, monkeypatch):
        dense, options = new(model), {}
        if where == "passed":
            off = GenerationConfig(max_new_tokens=10, do_sample=False, use_cache=False, pad_token_id=0)
            options = {"generation_config": off}
        else:
            monkeypatch.setattr(model.generation_config, "use_cache", False)
        with attach(model, ratio=0.0, **WINDOWS) as attached:
            assert torch.equal(new(model, **options), dense)
        assert unused(attached)

    def test_of_a_short_prompt_stays_dense_and_says_so(self, model, prompt, new):
        dense = new(model, prompt[:, :6])
        with (
            attach(model, "grace", **WINDOWS),
            pytest.warns(UserWarning, match="6 tokens and the last recent_window=8") as found,
        ):
            assert torch.equal(new(model, prompt[:, :6]), dense)
        assert len(found) == 1


class TestPipeline:
    PROMPTS = ("the quiet river runs " * 12, "a late singer " * 25)

    @staticmethod
    def explicit(text, ratio=0.75):
        """The tokens that generate() adds with a cache in hand."""
        model, tokenizer = pocket()
        inputs = tokenizer(text, return_tensors="pt")
        length = inputs.input_ids.shape[1]
        with attention_implementation(model, "grace_sdpa"):
            cache = CompressedCache(model, ratio=ratio)
            options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            tokens = model.generate(**inputs, past_key_values=cache, **options)
        assert cache.layers[0].pruned_length == length - 32 > 0
        return tokens[0, length:].tolist()

    @staticmethod
    def made():
        model, tokenizer = pocket()
        return pipeline("text-generation", model=model, tokenizer=tokenizer)

    @pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made before"])
    def test_of_one_prompt(self, inside):
        model, _ = pocket()
        pipe = None if inside else self.made()
        with attach(model, ratio=0.75) as attached:
            (answer,) = (pipe or self.made())(self.PROMPTS[0], **OPTIONS)
        assert attached.cache.memory_report().pruned_tokens > 0
        assert answer["generated_token_ids"][-8:] == self.explicit(self.PROMPTS[0])
        assert answer["generated_token_ids"][-8:] != self.explicit(self.PROMPTS[0], ratio=0.0)
        assert "generate" not in vars(model)

    @pytest.mark.parametrize("batch_size", [1, 2])
    @pytest.mark.slow
    def test_of_a_list_of_prompts(self, batch_size, monkeypatch):
        model, tokenizer = pocket()
        monkeypatch.setattr(tokenizer, "padding_side", "left")
        pipe = self.made()
        with attach(model, ratio=0.75) as attached:
            answers = pipe(list(self.PROMPTS), batch_size=batch_size, **OPTIONS)
        found = [answer["generated_token_ids"][-8:] for (answer,) in answers]
        assert found == [self.explicit(text) for text in self.PROMPTS]
        assert attached.cache.channel_mask().pruned.shape[1] == batch_size

    def test_writes_text(self):
        with attach(pocket()[0], ratio=0.75):
            (answer,) = self.made()(self.PROMPTS[0], max_new_tokens=8, do_sample=False, return_full_text=False)
        assert len(answer["generated_text"].split()) > 3


def test_a_turn_after_one_that_was_too_short_is_pruned(tiny, prompt):
    """Its candidates are not observed either: attach says anew where the prompt ends."""
    model = tiny()
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 1000}
    with attach(model, "grace", **WINDOWS) as attached:
        with pytest.warns(UserWarning, match="6 tokens"):
            first = model.generate(prompt[:1, :6], **options)
        longer = torch.cat([first, prompt[:1], prompt[:1, 4:12]], dim=1)
        model.generate(longer, past_key_values=attached.cache, prompt_lookup_num_tokens=4, **options)
    assert attached.cache.layers[0].compressed.length == longer.shape[1] - WINDOWS["recent_window"]


@pytest.mark.parametrize("new", [1, 3])
def test_going_on_without_our_attention_is_named_before_it_fails(new, tiny, prompt, continuation):
    model = tiny(attention="sdpa")
    with attach(model, "grace", **WINDOWS) as attached:
        model.generate(prompt, max_new_tokens=2, do_sample=False)
    with (
        pytest.raises(CacheError, match=r'the attention of the model that it was made for is "sdpa"'),
        torch.no_grad(),
    ):
        model(continuation[:, :new], past_key_values=attached.cache)


def test_a_cache_implementation_is_refused(tiny, prompt):
    model = tiny()
    with attach(model, "grace", **WINDOWS), pytest.raises(OptionError, match="leave out cache_implementation"):
        model.generate(prompt, cache_implementation="static", max_new_tokens=2)


@pytest.mark.parametrize(("name", "here"), [("compression_ratio", "ratio"), ("nbits", "bits"), ("recent_windw", "rec")])
def test_settings_by_other_names_are_recognised(name, here, tiny):
    with pytest.raises(OptionError, match=rf"a cache has no setting {name}\. For {name}, write {here}"):
        CompressedCache(tiny(), **{name: 3})


def test_the_default_method_is_among_the_known_ones(tiny):
    with pytest.raises(UnknownSolverError, match=r"no method is called 'xyz'.* Here, 'grace' .* is known as well\.$"):
        CompressedCache(tiny(), "xyz")


@pytest.mark.parametrize(
    ("wrong", "meant"), [("GRACE", "grace"), ("grce", "grace"), ("MIES", "mies"), ("Think", "think")]
)
def test_near_misses_of_a_method_are_recognised_in_any_case(wrong, meant, tiny):
    for make in (lambda: attach(tiny(), wrong), lambda: CompressedCache(tiny(), wrong), lambda: MaskProvider(wrong)):
        with pytest.raises(UnknownSolverError, match=f"Did you mean '{meant}'"):
            make()


@pytest.mark.parametrize(
    ("name", "says"), [("device", "leave it out"), ("layers", "write one ratio per layer"), ("mask", "write masks=")]
)
def test_what_no_method_has_names_the_method_that_was_written(name, says, tiny):
    with pytest.raises(OptionError, match=rf"a cache has no setting {name}\. For {name}, {says}"):
        attach(tiny(), **{name: "x"})


def test_a_model_without_its_head_is_refused(tiny, prompt):
    model = tiny(attention="sdpa")
    with pytest.raises(OptionError, match=r"LlamaModel has no generate\(\): .*attach\(model\) with the full model"):
        attach(model.model)
    with attach(model, "grace", **WINDOWS):  # what the message says works
        model.generate(prompt, max_new_tokens=1)
    with attention_implementation(model.model, "grace_sdpa"), torch.no_grad():
        model.model(prompt, past_key_values=CompressedCache(model.model, "grace", **WINDOWS))


@pytest.mark.parametrize("count", [1, 30, 45])
def test_an_input_shorter_than_the_cache_is_refused(count, tiny, prompt):
    """transformers would drop its first tokens, or all of them."""
    model = tiny()
    with attach(model, "grace", **WINDOWS) as attached:
        model.generate(prompt, max_new_tokens=8)
        with pytest.raises(CacheError, match=f"has {count} tokens and the cache holds 47: .* takes its input for the"):
            model.generate(prompt.repeat(1, 2)[:, :count], past_key_values=attached.cache)
        assert attached.cache.get_seq_length() == 47


def test_a_cache_that_nothing_is_put_into(tiny, prompt, monkeypatch):
    """As where a model trains with gradient checkpointing."""
    model = tiny()
    plain = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda self, x, past_key_values=None, **k: plain(self, x, **k))
    with attach(model, "grace", **WINDOWS), pytest.warns(UserWarning, match="put nothing into its cache") as warned:
        model.generate(prompt, max_new_tokens=2)
    assert [each.filename for each in warned if "nothing into" in str(each.message)] == [__file__]
