"""Stores: the one of the guide passes the suite and every family, wrong ones do not, and nobody asks a store's type."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import CacheConfig, CompressedCache, attach
from grace_opt.hf.stores.counting import tensors_in
from grace_opt.hf.stores.maker import TensorStore
from grace_opt.testing import check_store
from tests.hf.matrix import FAMILIES, WINDOWS, base_of, drops_its_cache, generated, model_of, prompts, reads_again
from tests.hf.test_matrix import REFUSED

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("<!-- start: add a store -->")[2]
#: The store of the guide, executed.
MADE: dict[str, object] = {"__name__": __name__}
exec(compile(re.findall(r"```python\n(.*?)```", GUIDE, re.S)[0], "CONTRIBUTING.md", "exec", dont_inherit=True), MADE)
HalfTokens = MADE["HalfTokens"]
SMALL = {"recent_window": 8, "tail_block": 16}


class AsTheyAre(HalfTokens):
    """The same in the model's own type, which loses nothing."""

    @classmethod
    def of_tokens(cls, plan, old):
        return cls(old.length, old.keys, old.values, old.positions)

    def extended(self, plan, tokens):
        grown = super().extended(plan, tokens)
        keys, values = torch.cat([self.keys, tokens.keys], 2), torch.cat([self.values, tokens.values], 2)
        return replace(grown, keys=keys, values=values)


def test_the_guides_store_passes_the_suite():
    assert issubclass(HalfTokens, TensorStore)
    assert len(re.findall(r"```python\n(.*?)```", GUIDE, re.S)[0].splitlines()) <= 60
    check_store(HalfTokens, tolerance=0.01)
    check_store(AsTheyAre, tolerance=1e-6)  # whose parts are views of the prompt at first


@pytest.mark.parametrize("family", FAMILIES)
def test_a_store_that_loses_nothing_gives_the_dense_cache_in_every_family(family):
    if family in REFUSED:
        pytest.skip("no cache of ours")
    model, (ids, mask) = model_of(family), prompts()
    if drops_its_cache(model) and not reads_again(model):
        pytest.skip("this transformers forgets a text that outgrows its positions")
    expected = generated()(model, DynamicCache(config=model.config), ids, mask)
    with attach(model, store=AsTheyAre, **WINDOWS):
        found = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(found[:, ids.shape[1] :], expected)
    assert base_of(model) in ("sdpa", "eager")


class Forgets(HalfTokens):
    def extended(self, plan, tokens):
        return replace(self, length=self.length + tokens.length)


class Mixes(HalfTokens):
    def select(self, rows):
        return self.changed(lambda part: part[: len(rows)] if len(rows) <= len(part) else part[rows.clamp(max=0)])


class Loses(HalfTokens):
    def to_file(self):
        tensors, about = super().to_file()
        return {**tensors, "keys": tensors["keys"].roll(1, dims=2)}, about


class Keeps(HalfTokens):
    def cropped(self, length):
        return replace(self, length=length)


class Zeroes(HalfTokens):
    def dense(self, tail, value):
        keys, values = super().dense(tail, value)
        return keys * 0, values


class Hides(HalfTokens):
    def sizes(self):
        found = super().sizes()
        found["values"] //= 2
        return found


@pytest.mark.parametrize("wrong", [Forgets, Mixes, Loses, Keeps, Zeroes, Hides])
def test_a_wrong_store_is_found(wrong):
    with pytest.raises((AssertionError, RuntimeError)):
        check_store(wrong, tolerance=0.01)


@pytest.mark.parametrize("settings", [{"store": HalfTokens}, {"ratio": 0.5}, {"bits": 4, "basis": "none"}], ids=str)
def test_a_prompt_that_is_read_with_gradients_is_stored_without(settings, tiny, prompt):
    """A call of the model alone, as in a loop of one's own, has no `torch.no_grad`."""
    model = tiny()
    model.set_attn_implementation("grace_sdpa")
    cache = CompressedCache(model, recent_window=8, tail_block=16, **settings)
    ids = prompt.repeat(1, 3)
    model(ids, past_key_values=cache)
    assert not cache.is_dense
    parts = [part for layer in cache.layers for part in tensors_in(layer.compressed.parts())]
    assert len(parts) > 3
    assert all(part.grad_fn is None for part in parts)
    assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all()


class TestBadInput:
    @pytest.mark.parametrize(
        ("store", "says"),
        [
            (3, r"store=3 makes no stores; write a class, a subclass of .*TensorStore"),
            (TensorStore, r"lacks dense, extended, of_tokens, stored, which every store has"),
            (HalfTokens(1, torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)), "makes no stores, as it is one"),
        ],
    )
    def test_what_makes_no_stores(self, store, says, tiny):
        with pytest.raises(OptionError, match=says):
            CompressedCache(tiny(), store=store)

    @pytest.mark.parametrize("given", [{"bits": 2}, {"quantize": "int4"}, {"read": "pages"}, {"ratio": 0.5}])
    def test_two_ways_to_hold_tokens(self, given, tiny):
        with pytest.raises(OptionError, match="leave out"):
            CompressedCache(tiny(), store=HalfTokens, **given)

    def test_bits_of_a_config_are_no_wish(self, tiny):
        with pytest.raises(OptionError, match=r"store= holds the tokens in its own way, and bits= in another"):
            CompressedCache(tiny(), config=CacheConfig(tail_block=64), store=HalfTokens)

    def test_a_store_of_nothing(self, tiny, prompt):
        class Nothing(HalfTokens):
            @classmethod
            def of_tokens(cls, plan, old):
                return None

        model = tiny()
        model.set_attn_implementation("grace_sdpa")
        with torch.no_grad(), pytest.raises(CacheError, match=r"Nothing\.of_tokens\(\) returned NoneType"):
            model(prompt, past_key_values=CompressedCache(model, store=Nothing, **SMALL))

    def test_a_file_of_another_store(self, tiny, prompt, tmp_path):
        model = tiny()
        model.set_attn_implementation("grace_sdpa")
        cache = CompressedCache(model, store=HalfTokens, **SMALL)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        with pytest.raises(CacheError, match=r"holds tokens of .*HalfTokens, not of the usual stores; write .*store="):
            CompressedCache.load(tmp_path / "cache.safetensors", model)
        with pytest.raises(CacheError, match=r"not of .*AsTheyAre"):
            CompressedCache.load(tmp_path / "cache.safetensors", model, store=AsTheyAre)
        loaded = CompressedCache.load(tmp_path / "cache.safetensors", model, store=HalfTokens)
        assert loaded.get_seq_length() == prompt.shape[1]


def test_nobody_asks_a_stores_type():
    """Outside `hf/stores`: no isinstance on a class that is a store."""
    names = {"Store", "TensorStore", "Compressed", "ByHeads", "ChannelParts", "CodedTokens", "CodedParts"}
    asked = []
    for path in (ROOT / "grace_opt").rglob("*.py"):
        if "stores" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                found = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                asked += [f"{path.name}:{node.lineno}"] * bool(found & names)
    assert asked == []
