"""learn_masks: its objective against plain numpy, its masks against enumeration, random and calibrated ones."""

from __future__ import annotations

import copy
import itertools
import json
import warnings

import accelerate
import numpy as np
import pytest
import torch

from grace_opt._util.tensor_files import TensorFormat
from grace_opt.attention.masks import ChannelMask
from grace_opt.errors import CacheError, CalibrationError, MaskError, OptionError, ProblemError
from grace_opt.hf import CompressedCache, calibrate, capture_attention, learn_masks
from grace_opt.hf.models import load_pocket
from grace_opt.hf.tools.learned import call, observe, stages
from grace_opt.hf.tools.learned.objective import output_error, sample_of
from grace_opt.hf.tools.learned.stages import learn_layer, mean_error
from grace_opt.hf.tools.needle import make_prompt

#: Small enough for a tiny model: windows of 24 tokens, of which a query sees the first and its last four dense.
SMALL = {"tokens": 24, "windows": 6, "queries": 8, "recent_window": 4, "sink_tokens": 1, "steps": (12, 6)}
#: A layer's mask that keeps eight of sixteen channels.
EIGHT = torch.arange(16).expand(2, 16) < 8


@pytest.fixture
def texts():
    """Token numbers of three texts, of unequal length."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (length,), generator=generator) for length in (60, 30, 50)]


def plain_error(queries, keys, values, projection, places, gates, recent, sinks, scaling=1.0, softcap=None):
    """The objective of one window, query by query; queries (Hq, L, d), keys and values (H, L, d), gates (H, d)."""
    change = size = 0.0
    group = len(queries) // len(keys)
    for place in places:
        outputs = []
        for gated in (False, True):
            heads = []
            for head, asked in enumerate(queries):
                kv = head // group
                logits = []
                for token in range(place + 1):
                    far = gated and sinks <= token <= place - recent
                    gate = gates[kv] if far else np.ones_like(gates[kv])
                    logit = scaling * float((asked[place] * gate) @ keys[kv][token])
                    logits.append(logit if softcap is None else softcap * np.tanh(logit / softcap))
                weights = np.exp(np.array(logits) - max(logits))
                heads.append((weights / weights.sum()) @ values[kv][: place + 1])
            outputs.append(np.concatenate(heads) @ projection)
        change += ((outputs[1] - outputs[0]) ** 2).sum()
        size += (outputs[0] ** 2).sum()
    return change / size


def drawn(seed, heads=2, group=2, count=5, length=11, d=6, softcap=None, windows=3, recent=2, sinks=1):
    """A sample of random numbers, and the same as arrays (windows, query heads, tokens, d) for the plain version."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(windows, heads * group, length, d, generator=generator)
    keys, values = torch.randn(2, windows, heads, length, d, generator=generator)
    projection = torch.randn(heads * group * d, 7, generator=generator)
    places = torch.stack([torch.randperm(length - 3, generator=generator)[:count] + 3 for _ in range(windows)])
    queries = torch.stack([each[:, at] for each, at in zip(full, places, strict=True)])
    token, at = torch.arange(length), places[..., None]
    visible, far = token <= at, (token <= at - recent) & (token >= sinks)
    sample = sample_of(
        queries.reshape(windows, heads, group * count, d), keys, values, visible, far, projection, softcap
    )
    arrays = [part.double().numpy() for part in (full, keys, values, projection)]
    return sample, arrays, places.tolist()


class TestObjective:
    @pytest.mark.parametrize("softcap", [None, 1.5])
    def test_is_the_plain_one(self, softcap):
        sample, (queries, keys, values, projection), places = drawn(0, softcap=softcap)
        gates = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
        for window in range(3):
            one = sample_of(
                *(getattr(sample.of(torch.tensor([window])), name) for name in ("queries", "keys", "values")),
                *(getattr(sample, name)[window : window + 1] for name in ("visible", "far")),
                sample.projection,
                softcap,
            )
            expected = plain_error(
                queries[window], keys[window], values[window], projection, places[window], gates.double().numpy(), 2, 1,
                softcap=softcap,
            )  # fmt: skip
            assert float(output_error(one, gates)) == pytest.approx(expected, rel=1e-4)
        assert float(output_error(sample, torch.ones(2, 6))) < 1e-12

    def test_of_a_model_is_that_of_its_own_attention(self, tiny, texts):
        """Heads, positions, padding and the output projection are where the model has them."""
        model = tiny()
        windows = observe.cut([ids[None] for ids in texts], 24, 3, 8, 5, torch.Generator().manual_seed(0))
        with torch.no_grad():
            readings = observe.observe(model, windows, [0, 1], 4, 1)
            samples = {layer: reading.sample() for layer, reading in readings.items()}
        gates = torch.rand(2, 16, generator=torch.Generator().manual_seed(1))
        for layer, sample in samples.items():
            projection = model.model.layers[layer].self_attn.o_proj.weight.detach().double().numpy().T
            errors, energies = [], []
            for window in windows:
                seen = capture_attention(model, window.ids, layers=[layer])[layer]
                arrays = [part[0].double().numpy() for part in (seen.queries, seen.keys, seen.values)]
                each = (*arrays, projection, window.positions.tolist(), gates.double().numpy(), 4, 1, seen.scaling)
                outputs = [plain_outputs(*each)]
                energies.append(outputs[0])
                errors.append(plain_error(*each) * outputs[0])
            assert mean_error(sample, gates) == pytest.approx(sum(errors) / sum(energies), rel=1e-4)


def plain_outputs(queries, keys, values, projection, places, gates, recent, sinks, scaling):
    """Sum of the squared dense outputs: the change from them of outputs that values of zero give, times their size."""
    total = 0.0
    group = len(queries) // len(keys)
    for place in places:
        heads = []
        for head, asked in enumerate(queries):
            logits = scaling * keys[head // group][: place + 1] @ asked[place]
            weights = np.exp(logits - logits.max())
            heads.append((weights / weights.sum()) @ values[head // group][: place + 1])
        total += ((np.concatenate(heads) @ projection) ** 2).sum()
    return total


class TestStages:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(3))
    def test_find_nearly_the_best_set_of_all(self, seed):
        sample, _, _ = drawn(seed, heads=1, count=6, windows=4)
        found = learn_layer(sample, 3, (60, 40), torch.Generator().manual_seed(0))
        errors = []
        for kept in itertools.combinations(range(6), 3):
            errors.append(mean_error(sample, torch.zeros(1, 6).index_fill(1, torch.tensor(kept), 1.0)))
        assert found.error == pytest.approx(mean_error(sample, (~found.pruned).float()))
        assert sum(error < found.error - 1e-6 for error in errors) <= 1, "one of the two best of twenty"

    @pytest.mark.slow
    @pytest.mark.parametrize("share", [0.25, 0.5])
    def test_steer_the_price_until_the_gates_keep_the_budget(self, share):
        sample, _, _ = drawn(2, d=16)
        gates, taken = stages._gates(sample, share, 200, torch.Generator().manual_seed(0), float("inf"), lambda: None)
        assert taken == 200
        assert gates.mean(-1).tolist() == pytest.approx([share, share], abs=0.03)
        assert gates.min() == 0
        assert gates.max() <= 1

    def test_keep_the_channels_that_keys_have(self):
        sample, _, _ = drawn(5, d=12)
        idle = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(head))[:7] for head in range(2)])
        keys = sample.keys.clone()
        for head in range(2):
            keys[:, head, :, idle[head]] = 0.0
        bare = (sample.queries, keys, sample.values, sample.visible, sample.far, sample.projection)
        found = learn_layer(sample_of(*bare), 5, (40, 0), torch.Generator().manual_seed(0))
        assert [set(row.nonzero()[:, 0].tolist()) for row in found.pruned] == [set(row.tolist()) for row in idle]
        assert found.error < 1e-10

    def test_without_time_keep_the_largest_channels(self):
        """As THINK ranks them: gates that are all open say nothing."""
        sample, _, _ = drawn(3, d=12)
        found = learn_layer(sample, 5, (40, 5), torch.Generator().manual_seed(0), deadline=0.0)
        sizes = sample.queries.square().sum((0, 2)) * sample.keys.square().sum((0, 2))
        assert torch.equal(found.pruned, sizes.argsort(-1).argsort(-1) < 7)
        assert found.steps == 0

    def test_refining_never_returns_a_worse_mask(self):
        sample, _, _ = drawn(7, d=16, windows=5)
        first = learn_layer(sample, 6, (20, 0), torch.Generator().manual_seed(0))
        both = learn_layer(sample, 6, (20, 40), torch.Generator().manual_seed(0))
        assert both.error < first.error
        assert (both.steps, first.steps) == (60, 20)


@pytest.fixture(scope="module")
def pocket():
    """The pocket model, texts to learn from, and samples of others."""
    model, tokenizer = load_pocket()
    made = [
        make_prompt(200, depth=0.08 * seed, count=lambda text: len(tokenizer(text).input_ids), seed=seed).text
        for seed in range(12)
    ]
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in made]
    windows = observe.cut(ids[8:], 200, 4, 32, 32, torch.Generator().manual_seed(0))
    with torch.no_grad():
        readings = observe.observe(model, windows, range(3), 32, 0)
        held_out = {layer: reading.sample() for layer, reading in readings.items()}
    return model, tokenizer, made[:8], held_out


class TestMasks:
    @pytest.mark.slow
    def test_beat_random_ones_and_are_no_worse_than_calibrated_ones(self, pocket):
        model, tokenizer, texts, held_out = pocket

        def error(masks):
            return sum(mean_error(sample, (~masks.pruned[layer]).float()) for layer, sample in held_out.items())

        masks = learn_masks(model, tokenizer, texts, 0.5, tokens=200, steps=(50, 20))
        assert masks.pruned.shape == (3, 2, 64)
        assert masks.pruned_per_head == 32
        assert masks.pruned.sum(-1).eq(32).all()
        generator = torch.Generator().manual_seed(0)
        random = [ChannelMask(torch.rand(3, 2, 64, generator=generator).argsort(-1) < 32) for _ in range(5)]
        worst = max(
            error(calibrate.masks(model, tokenizer, texts, method=name, ratio=0.5)) for name in ("grace", "think")
        )
        assert error(masks) < 0.9 * min(map(error, random))
        assert error(masks) <= worst

    def test_depend_on_the_seed_alone(self, tiny, texts):
        model = tiny()
        torch.manual_seed(1)
        found = learn_masks(model, texts=texts, **SMALL)
        torch.manual_seed(2)
        assert torch.equal(found.pruned, learn_masks(model, texts=texts, **SMALL).pruned)
        others = [learn_masks(model, texts=texts, **SMALL, seed=seed).pruned for seed in (1, 2, 3)]
        assert not all(torch.equal(found.pruned, other) for other in others), "windows and queries are drawn"

    def test_do_not_depend_on_how_many_layers_are_held_at_once(self, tiny, texts, monkeypatch):
        found = learn_masks(tiny(), texts=texts, **SMALL)
        monkeypatch.setattr(call, "HELD_BYTES", 1)
        assert torch.equal(found.pruned, learn_masks(tiny(), texts=texts, **SMALL).pruned)

    def test_are_the_same_of_a_model_that_accelerate_has_offloaded(self, tiny, texts):
        model = copy.deepcopy(tiny())  # the fixture's own is everybody's
        whole = learn_masks(model, texts=texts, **SMALL)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert {weights.device.type for weights in model.parameters()} == {"meta"}
        assert torch.equal(learn_masks(model, texts=texts, **SMALL).pruned, whole.pruned)

    def test_keep_multiples_and_have_a_ratio_per_layer(self, tiny, texts):
        model = tiny()
        assert learn_masks(model, texts=texts, ratio=0.3, **SMALL, multiple=4).pruned.sum(-1).eq(8).all()
        assert learn_masks(model, texts=texts, ratio=0.5, **SMALL, multiple=4).pruned.sum(-1).eq(8).all()
        assert learn_masks(model, texts=texts, ratio=[0, 0.75], **SMALL).pruned.sum(-1).tolist() == [[0, 0], [12, 12]]
        assert learn_masks(model, texts=texts, ratio=0.5, **SMALL, dense_layers=1).pruned.shape == (1, 2, 16)

    def test_serve_a_cache_and_survive_a_file(self, tiny, texts, prompt, generate, tmp_path):
        model = tiny()
        masks = learn_masks(model, texts=texts, ratio=0.5, **SMALL)
        masks.save(tmp_path / "masks.safetensors")
        loaded = ChannelMask.load(tmp_path / "masks.safetensors")
        assert dict(loaded.fingerprint) == dict(masks.fingerprint)
        caches = [CompressedCache(model, masks=each, recent_window=8) for each in (masks, loaded)]
        assert torch.equal(*(generate(model, cache, prompt) for cache in caches))
        assert torch.equal(caches[0].channel_mask().pruned[:, 0], masks.pruned)

    @pytest.mark.parametrize(
        "block",
        [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
        ids=["no_grad", "inference_mode", "autocast"],
    )
    def test_are_learned_in_any_mode_of_torch(self, block, tiny, texts):
        with block():
            assert learn_masks(tiny(), texts=texts, ratio=0.5, **SMALL).pruned.sum() == 32


class TestInterruption:
    def test_goes_on_from_the_checkpoint(self, tiny, texts, tmp_path, monkeypatch):
        model, path = tiny(), tmp_path / "layers.safetensors"
        whole = learn_masks(model, texts=texts, **SMALL)
        learned = []

        def interrupted(sample, *rest, **given):
            learned.append(sample)
            if len(learned) == 2:
                raise KeyboardInterrupt
            return learn_layer(sample, *rest, **given)

        monkeypatch.setattr(call, "learn_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learn_masks(model, texts=texts, **SMALL, checkpoint=path)
        assert torch.equal(learn_masks(model, texts=texts, **SMALL, checkpoint=path).pruned, whole.pruned)
        assert len(learned) == 3, "the first layer was learned once"
        monkeypatch.setattr(call, "learn_layer", None)
        assert torch.equal(learn_masks(model, texts=texts, **SMALL, checkpoint=path).pruned, whole.pruned)

    @pytest.mark.parametrize("ends", [None, CalibrationError, KeyboardInterrupt], ids=["done", "refused", "ctrl-c"])
    @pytest.mark.parametrize("where", ["record", "learn_layer"])
    def test_leaves_the_model_as_it_was(self, ends, where, tiny, texts, monkeypatch):
        model = tiny(attention="eager")
        model.train()
        model.model.layers[0].eval()
        model.model.norm.weight.requires_grad_(False)
        before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
        modes = [module.training for module in model.modules()]
        place = observe if where == "record" else call
        wrapped, calls = getattr(place, where), []

        def ending(*given, **named):
            calls.append(model.training)
            found = wrapped(*given, **named)
            if ends is not None and len(calls) == 2:
                raise ends("here")
            return found

        monkeypatch.setattr(place, where, ending)
        try:
            if ends is None:
                learn_masks(model, texts=texts, **SMALL)
            else:
                with pytest.raises(ends):
                    learn_masks(model, texts=texts, **SMALL)
            assert not any(calls), "read without dropout"
            assert [module.training for module in model.modules()] == modes
            assert model.config._attn_implementation == "eager"
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, before[name][0])
                assert parameter.requires_grad == before[name][1]
                assert parameter.grad is None
        finally:
            model.eval()
            model.requires_grad_(True)

    def test_of_time_hardens_what_was_learned(self, tiny, texts, tmp_path):
        path = tmp_path / "layers.safetensors"
        with pytest.warns(UserWarning, match=r"time_limit=0\.001 cut 2 of 2 layers short"):
            found = learn_masks(tiny(), texts=texts, ratio=0.5, **SMALL, checkpoint=path, time_limit=0.001)
        assert found.pruned.sum(-1).eq(8).all()
        assert not path.exists(), "a later run learns these layers in full"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            learn_masks(tiny(), texts=texts, ratio=0.5, **SMALL, checkpoint=path, time_limit=60)

    def test_is_shown_step_by_step(self, tiny, texts, capsys):
        learn_masks(tiny(), texts=texts, **SMALL, progress=True)
        shown = capsys.readouterr().err
        assert "36/36" in shown
        assert "learning layer 1, 2 of 2" in shown


class TestCheckpoint:
    @pytest.fixture
    def made(self, tiny, texts, tmp_path):
        path = tmp_path / "layers.safetensors"
        learn_masks(tiny(), texts=texts, ratio=0.5, **SMALL, checkpoint=path)
        return path

    def test_of_another_model(self, made, tiny, texts):
        tuned = copy.deepcopy(tiny())
        with torch.no_grad():
            tuned.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        for model, says in ((tiny("qwen2"), "model_type: checkpoint llama"), (tuned, "the weights differ")):
            with pytest.raises(MaskError, match=rf"is for another model \({says}.*\): give what it was made with"):
                learn_masks(model, texts=texts, ratio=0.5, **SMALL, checkpoint=made)

    def test_of_other_texts(self, made, tiny, texts):
        with pytest.raises(MaskError, match="is for other texts"):
            learn_masks(tiny(), texts=texts[:2], ratio=0.5, **SMALL, checkpoint=made)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"ratio": 0.25}, r"kept: checkpoint \[8, 8\], here \[12, 12\]"),
            ({"seed": 4}, "seed: checkpoint 0, here 4"),
            ({"steps": (12, 7)}, r"steps: checkpoint \[12, 6\], here \[12, 7\]"),
            ({"recent_window": 5}, "recent_window: checkpoint 4, here 5"),
        ],
        ids=str,
    )
    def test_of_other_settings(self, change, says, made, tiny, texts):
        with pytest.raises(MaskError, match=rf"is for other settings \({says}\)"):
            learn_masks(tiny(), texts=texts, **{"ratio": 0.5, **SMALL, **change}, checkpoint=made)

    def test_that_is_none(self, made, tiny, texts, tmp_path):
        masks = tmp_path / "masks.safetensors"
        ChannelMask(torch.zeros(2, 2, 16, dtype=torch.bool)).save(masks)
        with pytest.raises(MaskError, match="but not a checkpoint of learned masks"):
            learn_masks(tiny(), texts=texts, ratio=0.5, **SMALL, checkpoint=masks)
        made.write_bytes(made.read_bytes()[:-3])
        with pytest.raises(MaskError, match="cannot be read as a checkpoint"):
            learn_masks(tiny(), texts=texts, ratio=0.5, **SMALL, checkpoint=made)

    @pytest.mark.parametrize(
        ("tensors", "about", "says"),
        [
            ({"layer 0": EIGHT[:, :8]}, {}, "as layer 0, no mask of 16 channels for 2 KV heads that fits the ratio"),
            ({"layer 7": EIGHT}, {}, "as layer 7, no mask"),
            ({"layer 0": EIGHT.float()}, {}, "as layer 0, no mask"),
            ({"layer 1": torch.zeros_like(EIGHT)}, {}, "as layer 1, no mask"),
            ({}, {"settings": 3}, "does not say what it is for"),
            ({}, {"fingerprint": None}, "does not say what it is for"),
        ],
        ids=["shape", "layer", "dtype", "count", "settings", "fingerprint"],
    )
    def test_whose_content_cannot_be(self, tensors, about, says, made, tiny, texts):
        kind = TensorFormat("grace_opt.learned_layers", "1", "a checkpoint", MaskError)
        kind.write(made, tensors, {**json.loads(json.dumps(kind.read(made)[0])), **about})
        with pytest.raises(MaskError, match=says):
            learn_masks(tiny(), texts=texts, ratio=0.5, **SMALL, checkpoint=made)

    def test_that_cannot_be_written(self, tiny, texts, tmp_path):
        with pytest.raises(MaskError, match="there is no folder"):
            learn_masks(tiny(), texts=texts, **SMALL, checkpoint=tmp_path / "none" / "layers.safetensors")


class TestBadInput:
    def test_too_little_text(self, tiny, texts):
        few = [texts[0][:20]]
        with pytest.raises(
            CalibrationError, match=r"15 queries see .*besides the first 5 of every window; at least 64"
        ):
            learn_masks(tiny(), texts=few, **SMALL)

    def test_windows_that_are_dense_as_a_whole(self, tiny, texts):
        with pytest.raises(OptionError, match=r"tokens=24: 24 tokens that a query sees stay dense .* at least 88"):
            learn_masks(tiny(), texts=texts, **{**SMALL, "recent_window": 23})

    @pytest.mark.parametrize(
        ("wrong", "error", "says"),
        [
            ({"ratio": 1}, OptionError, "ratio=1"),
            ({"ratio": -0.1}, OptionError, r"ratio=-0\.1"),
            ({"ratio": [0.5]}, OptionError, "ratio has 1 entries and the model 2 layers"),
            ({"multiple": 5}, ProblemError, "multiple=5 does not divide the heads' 16 channels"),
            ({"multiple": 8, "ratio": 0.7}, ProblemError, r"leaves 4 of 16 .* at most 0\.5, or a smaller multiple"),
            ({"multiple": 0}, OptionError, "multiple=0"),
            ({"steps": 5}, OptionError, "steps=5: give two numbers"),
            ({"steps": (5,)}, OptionError, r"steps=\(5,\): give two numbers"),
            ({"steps": (0, 5)}, OptionError, r"steps\[0\]=0"),
            ({"queries": 0}, OptionError, "queries=0"),
            ({"windows": 1.5}, OptionError, r"windows=1\.5"),
            ({"time_limit": 0}, OptionError, "time_limit=0"),
            ({"dense_layers": 2}, CacheError, "leaves no layer"),
            ({"recent_window": -1}, OptionError, "recent_window=-1"),
        ],
        ids=str,
    )
    def test_options_out_of_range(self, wrong, error, says, tiny, texts, monkeypatch):
        monkeypatch.setattr(call, "observe", None)  # told before any text is read
        with pytest.raises(error, match=says):
            learn_masks(tiny(), texts=texts, **{**SMALL, **wrong})

    def test_texts_and_tokenizers_that_are_none(self, tiny, texts):
        for given, says in (
            ((None, []), r"texts is an empty list; leave it out for the texts that ship with grace_opt"),
            ((None, ["a text"]), r"texts need their tokenizer; write learn_masks\(model, tokenizer, texts\)"),
            ((texts, len), r"the tokenizer comes before the texts; write learn_masks\(model, tokenizer, texts\)"),
            ((0.5, texts), "a float is not a tokenizer"),
        ):
            with pytest.raises(OptionError, match=says):
                learn_masks(tiny(), *given)
        with pytest.raises(OptionError, match="model must be a transformers model with its weights"):
            learn_masks(tiny().config, texts=texts)

    def test_a_process_with_a_part_of_the_model(self, tiny, texts, monkeypatch):
        whole = call.fingerprint
        monkeypatch.setattr(call, "fingerprint", lambda model: {**whole(model), "tensor_parallel": "rank 0 of 2"})
        with pytest.raises(CalibrationError, match="only rank 0 of 2 of the model; learn the masks in one process"):
            learn_masks(tiny(), texts=texts, **SMALL)

    def test_numbers_that_are_not_finite(self, tiny, texts):
        model = tiny("qwen2")
        bias = model.model.layers[1].self_attn.k_proj.bias
        before = bias.detach().clone()
        try:
            with torch.no_grad():
                bias[3] = torch.inf
            with pytest.raises(CalibrationError, match=r"keys or values of layer 1 are not finite"):
                learn_masks(model, texts=texts, **SMALL)
        finally:
            with torch.no_grad():
                bias.copy_(before)

    def test_attention_that_is_more_than_a_softmax(self, tiny, texts, monkeypatch):
        monkeypatch.setattr(observe, "sample_of", lambda queries, *rest: sample_of(2 * queries, *rest))
        with pytest.raises(CacheError, match="the attention of layer 0 is more than the softmax of its causal logits"):
            learn_masks(tiny(), texts=texts, **SMALL)


def test_no_more_queries_than_the_longest_window_has():
    """Asked for millions, every query of the longest window is observed once; stacking needs as many of each."""
    texts = [torch.arange(30)[None], torch.arange(15)[None]]
    windows = observe.cut(texts, 25, 9, 10**7, 5, torch.Generator().manual_seed(0))
    assert sorted(len(window.positions) for window in windows) == [20, 20]
    longest = max(windows, key=lambda window: window.ids.shape[1])
    assert longest.positions.tolist() == list(range(5, 25))


def test_a_ratio_that_leaves_nothing_names_no_multiple_that_was_not_given():
    with pytest.raises(ProblemError, match=r"^the ratio leaves 0 of 64 channels; give a ratio of at most 0\.984$"):
        call._kept(0, 64, 1)
    with pytest.raises(ProblemError, match=r"multiple=8: the ratio leaves 3 of 64 channels.*or a smaller multiple"):
        call._kept(3, 64, 8)


@pytest.mark.parametrize("function", [learn_masks, calibrate.masks])
def test_a_tokenizer_of_another_model_is_named(function, tiny):
    with pytest.raises(OptionError, match=r"text 2 has the token number 10000000, and the model knows 0 to"):
        function(tiny("llama"), texts=[torch.arange(9), torch.tensor([1, 10**7, 2])])
