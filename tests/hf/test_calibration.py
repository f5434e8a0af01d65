"""calibrate: the masks of a plain numpy mean over texts, which the cache then uses without observing anything."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch

import grace_opt
from grace_opt.attention.masks import ChannelMask
from grace_opt.attention.provider import DEFAULT_RATIO, MaskProvider
from grace_opt.attention.weights import PROTECT_HIGH, PROTECT_LOW
from grace_opt.errors import CacheError, MaskError, OptionError, ProblemError
from grace_opt.hf import CacheConfig, CompressedCache, Quantize, SnapKV, calibrate, capture_attention
from grace_opt.hf.bases.texts import shipped_texts
from grace_opt.hf.calibrate import static_masks
from grace_opt.hf.models import load_pocket
from tests import oracle

WINDOWS = {"recent_window": 8, "observation_window": 6}
TEXTS = ("the quiet river runs past the old mill", "a late singer", "the miner painted the sharp compass . " * 3)
MIXED = {"use_sliding_window": True, "sliding_window": 12, "layer_types": ("sliding_attention", "full_attention")}
pocket = functools.cache(load_pocket)


@pytest.fixture
def texts():
    """Token numbers of four texts, of unequal length."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (length,), generator=generator) for length in (40, 7, 23, 1)]


def averaged(model, texts, layer, last=None):
    """W and squared key norms of every KV head: per token of a text, and then the mean over the texts."""
    Ws, squares = [], []
    for ids in texts:
        seen = capture_attention(model, ids.reshape(1, -1), layers=[layer])[layer]
        queries, keys = seen.queries[0].double().numpy(), seen.keys[0].double().numpy()
        queries = queries if last is None else queries[:, -last:]
        Ws.append(oracle.interaction(queries, keys) / keys.shape[1])
        squares.append((keys**2).sum(1) / keys.shape[1])
    return sum(Ws) / len(Ws), sum(squares) / len(squares)


def expected(model, texts, method, ratio, protect=None, layers=(0, 1), last=None, **options):
    """The masks by numpy and `grace_opt.solve`, one head at a time."""
    masks = []
    for layer in layers:
        W, squares = averaged(model, texts, layer, last)
        for head, square in zip(W, squares, strict=True):
            d = len(square)
            protected = np.zeros(d, bool)
            if protect is not None:  # one key whose entries are the norms has these norms
                protected[oracle.salient(np.sqrt(square)[None], *protect)] = True
            masks.append(grace_opt.solve(head, math.ceil(ratio * d), method, protected=protected, **options).mask)
    return torch.tensor(np.stack(masks)).view(len(layers), -1, masks[0].shape[-1])


class TestMasks:
    @pytest.mark.parametrize(
        ("method", "ratio", "options"),
        [
            ("grace", 0.5, {}),
            ("grace", 0.75, {"protect": (0.1, 0.25)}),
            ("mies", 0.5, {}),
            ("think", 0.25, {}),
            ("exhaustive", 0.5, {}),
            ("local_search", 0.5, {"start": "think"}),
        ],
    )
    def test_equal_those_of_the_mean_in_numpy(self, method, ratio, options, tiny, texts):
        model = tiny()
        masks = calibrate.masks(model, texts=texts, method=method, ratio=ratio, **options)
        others = dict(options)
        protect = others.pop("protect", (PROTECT_LOW, PROTECT_HIGH) if method == "grace" else None)
        solver = "mies" if method == "grace" else method
        assert torch.equal(masks.pruned, expected(model, texts, solver, ratio, protect, **others))

    def test_would_notice_a_sum_a_forgotten_text_and_tokens_that_count_once_per_text(self, tiny, texts):
        """The comparison above can fail: leaving out the shares, or a text, changes the masks."""
        model = tiny()
        found = calibrate.masks(model, texts=texts, method="mies").pruned
        assert not torch.equal(found, calibrate.masks(model, texts=texts[:1], method="mies").pruned)
        unweighted = [
            sum(averaged(model, [ids], layer)[0] * len(ids) for ids in texts) for layer in (0, 1)
        ]  # a long text counts more
        masks = [grace_opt.solve(head, 8, "mies").mask for W in unweighted for head in W]
        assert not torch.equal(found, torch.tensor(np.stack(masks)).view(2, 2, 16))

    @pytest.mark.parametrize("last", [1, 5, 100])
    def test_of_an_observation_window_count_each_texts_last_queries(self, last, tiny, texts):
        model = tiny()
        masks = calibrate.masks(model, texts=texts, method="mies", observation_window=last)
        assert torch.equal(masks.pruned, expected(model, texts, "mies", DEFAULT_RATIO, last=last))

    @pytest.mark.parametrize("method", ["grace", "mies", "think"])
    def test_of_one_text_are_what_the_provider_chooses_on_it(self, method, tiny, texts):
        model, ids = tiny(), texts[0]
        masks = calibrate.masks(model, texts=[ids], method=method, ratio=0.5)
        for layer, seen in capture_attention(model, ids[None]).items():
            chosen = MaskProvider(method, 0.5)(seen.queries[0], seen.keys[0])
            assert torch.equal(masks.layer(layer).pruned, chosen.pruned)

    def test_of_one_text_give_the_tokens_of_a_cache_that_observes_all_of_it(self, tiny, prompt, generate):
        model = tiny()
        observing = CompressedCache(model, ratio=0.75, recent_window=8, observation_window=40)
        expected = generate(model, observing, prompt[:1])
        static = CompressedCache(model, masks=calibrate.masks(model, texts=[prompt[0]], ratio=0.75), recent_window=8)
        assert torch.equal(generate(model, static, prompt[:1]), expected)

    def test_do_not_depend_on_the_order_of_the_texts(self, tiny, texts):
        model = tiny()
        first, *others = [
            calibrate.masks(model, texts=list(order)).pruned for order in itertools.permutations(texts[:3])
        ]
        assert all(torch.equal(first, other) for other in others)

    def test_do_not_depend_on_how_often_all_texts_are_repeated(self, tiny, texts):
        assert torch.equal(
            calibrate.masks(tiny(), texts=texts).pruned, calibrate.masks(tiny(), texts=[*texts, *texts]).pruned
        )

    @pytest.mark.slow
    def test_come_from_strings_as_from_their_tokens(self):
        model, tokenizer = pocket()
        tokens = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
        by_text = calibrate.masks(model, tokenizer, TEXTS)
        for same in (tokens, [ids[0] for ids in tokens], [TEXTS[0], tokens[1], tokens[2][0]]):
            assert torch.equal(by_text.pruned, calibrate.masks(model, tokenizer, same).pruned)
        assert torch.equal(by_text.pruned, calibrate.masks(model, tokenizer, iter(TEXTS)).pruned)
        bounds = PROTECT_LOW, PROTECT_HIGH
        assert torch.equal(by_text.pruned, expected(model, tokens, "mies", DEFAULT_RATIO, bounds, layers=(0, 1, 2)))

    def test_have_a_ratio_per_layer_or_a_number_of_kept_channels(self, tiny, texts):
        model = tiny()
        assert calibrate.masks(model, texts=texts, ratio=[0.25, 0.75]).pruned.sum(-1).tolist() == [[4, 4], [12, 12]]
        assert calibrate.masks(model, texts=texts, kept_channels=5).pruned.sum(-1).eq(11).all()
        by_config = calibrate.masks(model, texts=texts, config=CacheConfig("think", [0.25, 0.75]))
        assert torch.equal(by_config.pruned[0], expected(model, texts, "think", 0.25, layers=[0])[0])
        assert torch.equal(by_config.pruned[1], expected(model, texts, "think", 0.75, layers=[1])[0])

    def test_cover_the_layers_that_can_be_pruned(self, tiny, texts):
        mixed = tiny("Qwen2", **MIXED)
        masks = calibrate.masks(mixed, texts=texts, method="mies")
        assert torch.equal(masks.pruned, expected(mixed, texts, "mies", DEFAULT_RATIO, layers=[1]))
        assert calibrate.masks(tiny(), texts=texts, dense_layers=1).pruned.shape == (1, 2, 16)

    def test_do_not_depend_on_the_attention_that_the_model_runs_with(self, tiny, texts):
        found = [calibrate.masks(tiny(attention=name), texts=texts).pruned for name in ("sdpa", "grace_sdpa", "eager")]
        assert all(torch.equal(found[0], other) for other in found)

    def test_leave_the_model_as_it_was(self, tiny, texts):
        model = tiny(attention="sdpa")
        calibrate.masks(model, texts=texts[:1])
        assert model.config._attn_implementation == "sdpa"

    def test_are_reported_text_by_text(self, tiny, texts):
        done = []
        calibrate.masks(tiny(), texts=texts, advance=done.append)
        assert done == [1, 2, 3, 4]


class TestUse:
    def test_observes_and_solves_nothing(
        self, tiny, texts, padded, generate, zeroed, step, continuation, close, monkeypatch
    ):
        model = tiny()
        masks = calibrate.masks(model, texts=texts)

        def fail(*_, **__):
            raise AssertionError("nothing is to be computed")

        monkeypatch.setattr(MaskProvider, "interactions", fail)
        monkeypatch.setattr(MaskProvider, "__call__", fail)
        monkeypatch.setattr(MaskProvider, "choose", fail)
        monkeypatch.setattr(grace_opt.attention.weights, "salient_channels", fail)
        cache = CompressedCache(model, masks=masks, **WINDOWS)
        found = step(model, cache, padded[0], continuation, padded[1])
        everywhere = ChannelMask(masks.pruned[:, None].expand(-1, 2, -1, -1))
        assert torch.equal(cache.channel_mask().pruned, everywhere.pruned)
        assert close(found, zeroed(model, everywhere, padded[0], continuation, padded[1]))
        with pytest.raises(AssertionError, match="nothing is to be computed"):
            generate(model, CompressedCache(model, "grace", **WINDOWS), padded[0])  # what fails can fail

    def test_survives_a_file(self, tiny, texts, tmp_path, prompt, generate):
        model = tiny()
        masks = calibrate.masks(model, texts=texts)
        masks.save(tmp_path / "masks.safetensors")
        loaded = ChannelMask.load(tmp_path / "masks.safetensors")
        assert dict(loaded.fingerprint) == dict(masks.fingerprint)
        caches = [CompressedCache(model, masks=m, **WINDOWS) for m in (masks, loaded)]
        assert torch.equal(*(generate(model, cache, prompt) for cache in caches))

    def test_by_another_fine_tune_is_refused(self, tiny, texts):
        model = tiny()
        masks = calibrate.masks(model, texts=texts)
        assert "weights" in masks.fingerprint
        tuned = copy.deepcopy(model)
        with torch.no_grad():
            tuned.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        with pytest.raises(MaskError, match=r"made for another model \(weights: mask '.*', model '.*'\)"):
            CompressedCache(tuned, masks=masks)
        assert CompressedCache(model, masks=masks).prunable_layers == (0, 1)
        # By the configuration alone, there are no weights to compare.
        assert CompressedCache(tuned.config, masks=masks).prunable_layers == (0, 1)

    def test_by_the_same_weights_in_bfloat16_is_not_refused(self, tiny, texts):
        masks = calibrate.masks(tiny(), texts=texts)
        assert CompressedCache(copy.deepcopy(tiny()).to(torch.bfloat16), masks=masks).prunable_layers == (0, 1)

    def test_by_a_model_of_another_size_is_refused(self, tiny, texts):
        with pytest.raises(MaskError, match="num_hidden_layers: mask 2, model 3"):
            CompressedCache(tiny(num_hidden_layers=3).config, masks=calibrate.masks(tiny(), texts=texts))


class TestBadInput:
    @pytest.mark.parametrize(
        ("none", "says"),
        [
            *((none, "texts is an empty list; leave it out") for none in ([], (), iter([]))),
            *((none, r"texts must be a list; write calibrate\.masks\(model, tokenizer, \[") for none in ("a text", 3)),
            (None, r"ship with grace_opt need the model's tokenizer; write calibrate\.masks\(model, tokenizer\)"),
        ],
    )
    def test_no_texts(self, none, says, tiny):
        with pytest.raises(OptionError, match=says):
            calibrate.masks(tiny(), texts=none)

    def test_texts_without_their_tokenizer(self):
        with pytest.raises(
            OptionError, match=r"texts need their tokenizer; write calibrate\.masks\(model, tokenizer, texts\)"
        ):
            calibrate.masks(pocket()[0], texts=TEXTS)

    @pytest.mark.parametrize(
        "texts", [TEXTS, tuple(TEXTS), TEXTS[0], torch.arange(9)], ids=["list", "tuple", "one", "ids"]
    )
    def test_texts_and_tokenizer_in_the_wrong_order(self, texts):
        model, tokenizer = pocket()
        with pytest.raises(
            OptionError,
            match=r"the tokenizer comes before the texts; write calibrate\.masks\(model, tokenizer, texts\), or "
            r"calibrate\.masks\(model, texts=\.\.\.\) if they are token numbers",
        ):
            calibrate.masks(model, texts, tokenizer)

    def test_something_that_is_no_tokenizer(self):
        with pytest.raises(
            OptionError, match=r"a int is not a tokenizer; write calibrate\.masks\(model, tokenizer, texts\)"
        ):
            calibrate.masks(pocket()[0], 5, TEXTS)

    def test_without_texts_those_that_ship_with_grace_opt(self):
        model, tokenizer = pocket()
        assert torch.equal(
            calibrate.masks(model, tokenizer).pruned, calibrate.masks(model, tokenizer, shipped_texts()).pruned
        )

    @pytest.mark.parametrize(
        "setting",
        [
            {"evict": SnapKV(64)},
            {"tail_block": 32},
            {"quantize": Quantize(keys=4)},
            {"recent_window": 4},
            {"sink_tokens": 4},
            {"fused": False},
        ],
        ids=str,
    )
    def test_settings_on_which_no_channel_depends(self, setting, tiny, texts):
        (name,) = setting
        with pytest.raises(OptionError, match=rf"do not depend on {name}; .*masks=masks, {name}=\.\.\.\)"):
            calibrate.masks(tiny(), texts=texts, **setting)
        both = (
            calibrate.masks(tiny(), texts=texts, config=CacheConfig(ratio=0.3, **setting)),
            calibrate.masks(tiny(), texts=texts),
        )
        assert torch.equal(both[0].pruned, both[1].pruned), "of a whole configuration they are not read"

    @pytest.mark.parametrize("name", ["prompt_length", "offloading"])
    def test_arguments_of_a_cache(self, name, tiny, texts):
        with pytest.raises(OptionError, match=rf"do not depend on {name}; .*masks=masks, {name}=\.\.\.\)"):
            calibrate.masks(tiny(), texts=texts, **{name: 9})

    @pytest.mark.parametrize(
        ("given", "named", "leave_out"),
        [
            ({"bits": 2}, "bits=", "bits"),
            ({"total_bytes": 10**6, "basis": "none"}, "total_bytes, basis=", "total_bytes, basis"),
            ({"basis": "none"}, "basis=", "basis"),
            ({"config": CacheConfig(key_bits=2, value_bits=3)}, "key_bits, value_bits=", "config="),
        ],
        ids=str,
    )
    def test_bits_drop_no_channels(self, given, named, leave_out, tiny, texts, monkeypatch, tmp_path):
        monkeypatch.setattr(static_masks, "CompressedCache", None)  # which would calibrate a basis first
        path = tmp_path / "settings.json"
        if "config" in given:
            given["config"].to_json(path)
        for each in (given, {"config": path}) if "config" in given else (given,):
            with pytest.raises(OptionError, match=rf"and {named} drops none: write calibrate\.basis\(.*") as error:
                calibrate.masks(tiny(), texts=texts, **each)
            assert str(error.value).endswith(f"to drop channels, leave out {leave_out}")

    def test_an_empty_text(self):
        model, tokenizer = pocket()
        with pytest.raises(OptionError, match=r"text 2 is empty; leave it out"):
            calibrate.masks(model, tokenizer, [TEXTS[0], ""])

    @pytest.mark.parametrize("shape", [(2, 5), (0,), (1, 0), (), (1, 1, 5)])
    def test_token_numbers_of_another_shape(self, shape, tiny, texts):
        ids = torch.full(shape, 5)
        with pytest.raises(OptionError) as error:
            calibrate.masks(tiny(), texts=[texts[0], ids])
        given = (1, 0) if shape == (0,) else shape
        assert f"text 2 has token numbers of shape {given}; give one sequence" in str(error.value)

    def test_one_text_in_place_of_a_list(self, tiny, texts):
        with pytest.raises(OptionError, match="texts must be a list; write calibrate"):
            calibrate.masks(tiny(), texts=texts[0])

    @pytest.mark.parametrize("text", [3, None, [5, 6]])
    def test_something_that_is_no_text(self, text):
        model, tokenizer = pocket()
        says = f"text 1 is of type {type(text).__name__}; write a string or a tensor of its tokens"
        with pytest.raises(OptionError, match=says):
            calibrate.masks(model, tokenizer, [text])

    @pytest.mark.parametrize("window", [0, -1, "a", 1.5])
    def test_a_window_out_of_range(self, window, tiny, texts):
        with pytest.raises(OptionError, match=r"observation_window=.*: give an integer >= 1"):
            calibrate.masks(tiny(), texts=texts, observation_window=window)

    @pytest.mark.parametrize("name", ["provider", "masks"])
    def test_what_chooses_by_itself(self, name, tiny, texts):
        given = {"provider": MaskProvider("mies"), "masks": ChannelMask(torch.zeros(2, 2, 16, dtype=torch.bool))}[name]
        with pytest.raises(OptionError, match=f"chooses the channels by a method; leave out {name}"):
            calibrate.masks(tiny(), texts=texts, **{name: given})

    @pytest.mark.parametrize(
        ("wrong", "error", "says"),
        [
            ({"ratio": 2}, OptionError, "ratio=2"),
            ({"ratio": [0.5]}, OptionError, "ratio has 1 entries and the model 2 layers"),
            ({"kept_channels": 17}, ProblemError, "give at most 16"),
            ({"dense_layers": 2}, CacheError, "leaves no layer"),
            ({"no_such_option": 1}, OptionError, "no_such_option"),
            ({"config": CacheConfig(ratio=0.3), "ratio": 0.6}, OptionError, "leave out ratio"),
        ],
    )
    def test_settings_are_told_before_any_text_is_read(self, wrong, error, says, tiny, texts, monkeypatch):
        monkeypatch.setattr(static_masks, "capture_attention", None)
        with pytest.raises(error, match=says):
            calibrate.masks(tiny(), texts=texts, **wrong)

    def test_a_configuration_has_no_weights(self, tiny, texts):
        with pytest.raises(
            OptionError, match="model must be a transformers model with its weights, not LlamaConfig; write calibrate"
        ):
            calibrate.masks(tiny().config, texts=texts)

    def test_a_compiled_model_is_the_model(self, tiny, texts):
        model = tiny()
        found = calibrate.masks(torch.compile(model), texts=texts, ratio=0.5)  # wrapped, not compiled: nothing calls it
        assert torch.equal(found.pruned, calibrate.masks(model, texts=texts, ratio=0.5).pruned)
