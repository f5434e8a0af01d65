"""A cache stays with its ``generate``: handed back by models that drop it, and told of where it is left out.

Phi-3 and PhiMoE read their text again without the cache once it is longer than ``original_max_position_embeddings``;
Phi-4-multimodal, and transformers 5.2 with all three, go on without most of the text then.
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache

from grace_opt.errors import OptionError
from grace_opt.hf import CompressedCache, SnapKV, attach
from grace_opt.hf.engine.given_cache import GivenCache
from tests.hf.conftest import OBSERVED, RECENT, SIZES
from tests.hf.every_family import tiny as tiny_family
from tests.hf.matrix import assistant, long_rope, reads_again

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20}
LIMIT = 48
#: Short enough that what is generated crosses the limit, and longer than it.
PROMPTS = {"generated": slice(0, 40), "prompt": slice(0, 60)}
KINDS = ("Phi3", "Phimoe")


@functools.cache
def build(kind, limit=LIMIT):
    """A model that changes its rotary embeddings after so many tokens."""
    parts = {
        "Phimoe": {
            **long_rope(limit, short_mscale=1.0, long_mscale=1.2),
            **{"num_local_experts": 2, "num_experts_per_tok": 1},
        },
        "Phi4Multimodal": {
            "vision_config": {
                **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
                **{"crop_size": 28, "image_size": 28, "patch_size": 14, "image_token_id": 90},
            },
            "audio_config": {
                **{"hidden_size": 16, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
                **{"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16},
                **{"input_size": 16, "audio_token_id": 91},
            },
        },
    }
    sizes = {**SIZES, "tie_word_embeddings": False, **long_rope(limit), **parts.get(kind, {})}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def switching(kind, limit=LIMIT, where="generated"):
    """The model, if it reads the whole text again where it is asked to."""
    found = build(kind, limit)
    if where == "generated" and not reads_again(found):
        pytest.skip("this transformers forgets the text at the limit: see test_a_model_that_forgets_its_text")
    return found


@pytest.fixture(params=KINDS)
def model(request):
    return switching(request.param)


@pytest.fixture
def ids():
    """Two texts of 60 tokens."""
    return torch.randint(3, 80, (2, 60), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def quiet():
    """No warning, of whatever kind, inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def mask_of(ids):
    mask = torch.ones_like(ids)
    mask[1:, :13] = 0
    return mask


def repeated(ids):
    """One text whose end is a repetition of its middle."""
    return torch.cat([ids[:1, :-10], ids[:1, 12:22]], dim=1)


#: What is done with a model and texts: returns texts and options for generate().
WAYS = {
    "greedy": lambda model, ids: (ids, {}),
    "padded": lambda model, ids: (ids, {"attention_mask": mask_of(ids)}),
    "sampling": lambda model, ids: (ids, {"do_sample": True, "temperature": 2.0}),
    "several sequences": lambda model, ids: (ids, {"do_sample": True, "num_return_sequences": 3}),
    "beams": lambda model, ids: (ids, {"num_beams": 3}),
    "beam sequences": lambda model, ids: (ids, {"num_beams": 4, "num_return_sequences": 2}),
    "small chunks": lambda model, ids: (ids, {"prefill_chunk_size": 16}),
    "large chunks": lambda model, ids: (ids, {"prefill_chunk_size": 52}),
    "assisted": lambda model, ids: (ids[:1], {"assistant_model": assistant(model)}),
    "prompt lookup": lambda model, ids: (repeated(ids), {"prompt_lookup_num_tokens": 4, "eos_token_id": 1000}),
    "dictionary": lambda model, ids: (ids, {"return_dict_in_generate": True}),
    "one token": lambda model, ids: (ids, {"max_new_tokens": 1}),
    "stopped": lambda model, ids: (
        ids,
        {"stopping_criteria": [lambda text, scores, **_: torch.full(text.shape[:1], text.shape[1] > LIMIT + 2)]},
    ),
}


def said(model, ids, **options):
    torch.manual_seed(5)
    output = model.generate(ids, **{**GREEDY, "attention_mask": torch.ones_like(ids), **options})
    return getattr(output, "sequences", output)


@pytest.mark.slow
@pytest.mark.parametrize("where", PROMPTS)
@pytest.mark.parametrize(("kind", "way"), [*(("Phi3", way) for way in WAYS), ("Phimoe", "greedy"), ("Phimoe", "beams")])
def test_a_cache_that_the_model_drops_is_handed_back(kind, way, where, ids, quiet):
    """With nothing pruned the text is the dense one, and the cache holds it; pruned, it holds it smaller."""
    model = switching(kind, where=where)
    # In float32, rounding alone makes beams of random weights change places. PhiMoE's experts take no float64.
    exact = copy.deepcopy(model).double() if (kind, way) == ("Phi3", "beams") else model
    texts, options = WAYS[way](exact, ids[:, PROMPTS[where]])
    dense = said(exact, texts, **options)
    with attach(exact, ratio=0.0, **WINDOWS) as attached:
        assert torch.equal(said(exact, texts, **options), dense)
    assert attached.cache.get_seq_length() == dense.shape[1] - 1
    texts, options = WAYS[way](model, ids[:, PROMPTS[where]])
    with attach(model, ratio=0.5, **WINDOWS) as attached:
        text = said(model, texts, **options)
    assert attached.cache.get_seq_length() == text.shape[1] - 1
    report = attached.cache.memory_report()
    assert report.pruned_tokens > 0
    assert report.left_out is None
    assert "prepare_inputs_for_generation" not in vars(model)


@pytest.mark.parametrize("settings", [{}, {"evict": SnapKV(budget=24, window=4)}, {"sink_tokens": 3}], ids=str)
def test_at_the_switch_the_text_so_far_is_the_prompt(settings, model, ids, quiet):
    """As if that text, which one token has made too long, had been the prompt of a new cache."""
    with attach(model, ratio=0.5, **WINDOWS, **settings) as attached:
        text = said(model, ids[:, :40])
        crossed = attached.cache
        again = said(model, text[:, : LIMIT + 1], max_new_tokens=11)
    assert torch.equal(again, text)
    assert attached.cache is not crossed
    assert crossed.layers[0].pruned_length == attached.cache.layers[0].pruned_length > 0
    assert torch.equal(crossed.channel_mask().pruned, attached.cache.channel_mask().pruned)


def test_candidates_that_cross_the_limit_are_not_taken_for_the_prompt(ids, quiet):
    """The text is one token short of the limit's when candidates are read along with it."""
    model = switching("Phi3")
    one = repeated(ids[:, :45])
    with attach(model, ratio=0.5, **WINDOWS) as attached:
        expected = said(model, one, max_new_tokens=3)  # before the limit
        text = said(model, expected, prompt_lookup_num_tokens=8, max_matching_ngram_size=1, eos_token_id=1000)
    layer = attached.cache.layers[0]
    assert layer.prompt.assisted
    assert layer.prompt.declared <= LIMIT + 1
    assert attached.cache.get_seq_length() == text.shape[1] - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_with_bits_too(kind, ids, quiet):
    """Long enough that the text is coded on both sides of the limit."""
    model = switching(kind, 100)
    text = torch.cat([ids, ids.flip(1)], dim=1)[:, :96]
    with attach(model, bits=2, basis="none", recent_window=RECENT) as attached:
        found = said(model, text)
        assert attached.cache.get_seq_length() == found.shape[1] - 1
        assert attached.cache.memory_report().bits < 2.1
        assert torch.equal(said(model, found[:, :101], max_new_tokens=15), found)


@pytest.mark.parametrize("turn", [5, 30])
def test_a_conversation_that_crosses_the_limit_goes_on_with_its_cache(turn, model, ids, quiet):
    """The question crosses it, or the answer to it does."""

    def talk(block):
        with block as attached:
            first = said(model, ids[:, :30], max_new_tokens=8)
            longer = torch.cat([first, ids[:, -turn:]], dim=1)
            cache = attached.cache
            return said(model, longer, past_key_values=cache), cache

    with attach(model, ratio=0.0, **WINDOWS):
        first = said(model, ids[:, :30], max_new_tokens=8)
    dense = said(model, torch.cat([first, ids[:, -turn:]], dim=1))
    found, cache = talk(attach(model, ratio=0.0, **WINDOWS))
    assert torch.equal(found, dense)
    found, cache = talk(attach(model, ratio=0.5, **WINDOWS))
    assert cache.get_seq_length() == found.shape[1] - 1
    assert not cache.is_dense


@pytest.mark.parametrize("where", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_passed_by_hand_in_the_block_stays_too(kind, where, ids, quiet):
    model = switching(kind, where=where)
    cache = CompressedCache(model, ratio=0.0, **WINDOWS)
    texts = ids[:, PROMPTS[where]]
    with attach(model, ratio=0.5, **WINDOWS):
        assert torch.equal(said(model, texts, past_key_values=cache), said(model, texts, use_cache=False))
    assert cache.get_seq_length() == texts.shape[1] + 19
    assert not cache.is_dense


def test_threads_keep_their_own(model, ids, quiet):
    """Each its cache; their tokens may differ, as transformers changes the one model's embeddings for all threads."""
    with attach(model, ratio=0.5, **WINDOWS) as attached:
        expected = [said(model, each) for each in (ids[:, :40], ids[:, :30])]
        found = {}
        begin = threading.Barrier(2)

        def run(index, texts):
            begin.wait(60)
            found[index] = model.generate(texts, **GREEDY), attached.cache

        threads = [threading.Thread(target=run, args=each) for each in enumerate((ids[:, :40], ids[:, :30]))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for index, text in enumerate(expected):
        assert found[index][0].shape == text.shape
        assert found[index][1].get_seq_length() == text.shape[1] - 1
    assert "prepare_inputs_for_generation" not in vars(model)


def test_a_block_that_ends_meanwhile_leaves_the_call_its_cache(model, ids, quiet):
    """The block ends before the call in another thread crosses the limit."""
    begun, go, found = threading.Event(), threading.Event(), []

    def wait(text, scores, **_):
        begun.set()
        assert go.wait(60)
        return torch.zeros(len(text), dtype=torch.bool)

    with attach(model, ratio=0.5, **WINDOWS) as attached:
        expected = said(model, ids[:, :40])
        call = {**GREEDY, "stopping_criteria": [wait]}
        thread = threading.Thread(target=lambda: found.append(model.generate(ids[:, :40], **call)))
        thread.start()
        assert begun.wait(60)
        cache = attached._latest
    go.set()
    thread.join(60)
    assert torch.equal(found[0], expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    assert not {"generate", "prepare_inputs_for_generation"} & set(vars(model))


@pytest.mark.parametrize("kind", ["Phi4Multimodal", *KINDS])
def test_a_model_that_forgets_its_text(kind, ids):
    """Its own text is another one than without a cache: so is ours, and a warning and the report say why."""
    model = build(kind)
    if reads_again(model):
        assert kind != "Phi4Multimodal", "transformers has mended it: it belongs to KINDS now"
        return
    one = ids[:1, :40]
    with attach(model, ratio=0.0, **WINDOWS) as attached, pytest.warns(UserWarning, match="into its cache") as warned:
        found = said(model, one)
    assert torch.equal(found, said(model, one))
    (ours,) = [each for each in warned if "into its cache" in str(each.message)]
    assert ours.filename == __file__
    assert "has put only 48 of 59 tokens into its cache" in str(ours.message)
    assert "ForCausalLM leaves its cache out where the text outgrows original_max_position_embeddings=48" in str(
        ours.message
    )
    assert "reads the last 1 of 49 tokens alone" in str(ours.message)
    report = attached.cache.memory_report()
    assert report.left_out == str(ours.message) == report.to_dict()["left_out"]
    assert str(report).endswith(report.left_out)
    with warnings.catch_warnings(), attach(model, ratio=0.5, **WINDOWS) as attached:
        warnings.simplefilter("error")
        said(model, ids[:1])  # longer from the start: nothing is forgotten
    assert attached.cache.get_seq_length() == 79
    assert attached.cache.memory_report().left_out is None


def test_embeddings_count_although_no_output_has_them(tiny, ids):
    """A model that drops its cache after 60 of them and some tokens is found out by as many as are missing."""
    model = tiny(attention="grace_sdpa")
    cache = CompressedCache(model, ratio=0.0, **WINDOWS)
    model(inputs_embeds=model.get_input_embeddings()(ids[:1]).detach(), past_key_values=cache)
    call = GivenCache(model, cache, 60, unsaid=60)
    assert call.check(torch.zeros(1, 1), whole=True) is None
    assert "put only 60 of 64 tokens into its cache" in call.check(torch.zeros(1, 5), whole=True)
    assert "put only 60 of 64 tokens into its cache" in cache.memory_report().left_out
    assert call.check(torch.zeros(1, 5), whole=False) is None


def test_training_with_gradient_checkpointing_is_named(tiny, prompt):
    model = copy.deepcopy(tiny(attention="sdpa")).train()
    model.gradient_checkpointing_enable()
    with attach(model, "grace", **WINDOWS) as attached, pytest.warns(UserWarning, match="into its cache") as warned:
        model.generate(prompt, **GREEDY)
    (ours,) = [each for each in warned if "into its cache" in str(each.message)]
    assert "put nothing into its cache, so nothing is compressed: transformers does so where" in str(ours.message)
    assert "model.eval() ends that" in attached.cache.memory_report().left_out
    assert ours.filename == __file__
    model.eval()
    with warnings.catch_warnings(), attach(model, "grace", **WINDOWS) as attached:
        warnings.simplefilter("error")
        model.generate(prompt, **GREEDY)
    assert attached.cache.memory_report().left_out is None


def test_a_cache_beside_use_cache_false_is_refused(tiny, prompt):
    """transformers would store the whole text again in every step."""
    model = tiny(attention="sdpa")
    with attach(model, "grace", **WINDOWS):
        cache = CompressedCache(model, "grace", **WINDOWS)
        with pytest.raises(OptionError, match=r"use_cache=False beside past_key_values: .* leave out one of them"):
            model.generate(prompt, past_key_values=cache, use_cache=False)


#: As `WAYS`, of models that keep their cache; and how many tokens are not in the output.
MORE_WAYS = {
    "embeddings": lambda model, ids: (None, {"inputs_embeds": model.get_input_embeddings()(ids).detach()}),
    "embeddings and tokens": lambda model, ids: (ids, {"inputs_embeds": model.get_input_embeddings()(ids).detach()}),
    "beams that end early": lambda model, ids: (ids, {"num_beams": 3, "eos_token_id": list(range(3, 50))}),
    "rows that end early": lambda model, ids: (ids, {"eos_token_id": list(range(3, 20)), "do_sample": True}),
    "drafts that end early": lambda model, ids: (
        ids[:1],
        {"assistant_model": model, "eos_token_id": list(range(3, 20)), "do_sample": True},
    ),
    "evicted": lambda model, ids: (ids, {}),
}
FAMILIES = ["llama", "gemma2", "lfm2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("way", [*WAYS, *MORE_WAYS])
def test_every_way_of_generating_fills_the_cache(way, kind, ids, quiet):
    """All tokens but the last, in whatever layers: nothing is warned of."""
    model = tiny_family(kind)
    if kind == "lfm2" and not hasattr(transformers.cache_utils, "LinearAttentionLayer"):
        pytest.skip("this transformers keeps the states of hybrid models in other caches")
    if way in ("assisted", "prompt lookup", "drafts that end early") and (kind == "lfm2" or _cannot_crop(kind)):
        pytest.skip("transformers has no candidates for it")
    texts, options = {**WAYS, **MORE_WAYS}[way](model, ids)
    settings = {"evict": SnapKV(budget=24, window=4)} if way == "evicted" else {}
    with attach(model, ratio=0.5, **WINDOWS, **settings) as attached:
        torch.manual_seed(5)
        output = model.generate(*(() if texts is None else (texts,)), **{**GREEDY, **options})
    output = getattr(output, "sequences", output)
    expected = output.shape[1] + (60 if texts is None else 0) - 1
    held = attached.cache.get_seq_length()
    assert held >= expected if "num_beams" in options else held == expected
    assert not attached.cache.is_dense


def _cannot_crop(kind):
    return kind == "gemma2" and transformers.__version__.startswith("5.2.")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_other_models_whose_embeddings_change_with_length(kind, ids, quiet):
    """They keep what is cached, with a dense cache too."""
    rope = {"rope_type": "dynamic", "factor": 2.0} if kind == "dynamic" else long_rope(LIMIT)["rope_parameters"]
    sizes = {**SIZES, "max_position_embeddings": LIMIT if kind == "dynamic" else 256}
    config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_theta": 10_000.0, **rope})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    # A copy, as a model of transformers 5.2 remembers how long its texts were.
    dense = said(copy.deepcopy(model), ids[:, :40], past_key_values=DynamicCache(config=config))
    with attach(model, ratio=0.0, **WINDOWS) as attached:
        assert torch.equal(said(model, ids[:, :40]), dense)
    assert attached.cache.get_seq_length() == 59


def test_code_that_wraps_the_hook_is_not_lost(tiny, prompt):
    """It copies the attributes of what it wraps, which are of a hook that is gone."""
    model, seen = copy.deepcopy(tiny(attention="sdpa")), []
    with attach(model, "grace", **WINDOWS):
        hook = model.generate

        @functools.wraps(hook)
        def wrapper(*args, **kwargs):
            seen.append(len(args))
            return hook(*args, **kwargs)

        model.generate = wrapper
    with attach(model, "grace", **WINDOWS) as attached:
        model.generate(prompt, **GREEDY)
    assert seen == [1]
    assert attached.cache.get_seq_length() == 59
