"""Models whose layers have heads of different widths: in Gemma 4, those with a sliding window have narrower ones."""

from __future__ import annotations

import pytest
import torch
import transformers

from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, attach
from grace_opt.hf.models.fingerprint import fingerprint
from tests.hf.conftest import OBSERVED, RECENT, SIZES
from tests.hf.every_family import sizes_of

if not hasattr(transformers, "Gemma4TextConfig"):
    pytest.skip("this transformers has no Gemma 4", allow_module_level=True)

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def gemma4(**changes):
    """A tiny model with heads of 16 in three layers, and of 32 in the last."""
    sizes = {
        **SIZES,
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "sliding_window": 12,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 0,
    }
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**sizes, **changes})).eval()


@pytest.mark.parametrize("changes", [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}], ids=str)
def test_full_attention_is_pruned(changes, padded) -> None:
    model, (ids, mask) = gemma4(**changes), padded
    heads = 1 if changes else 2
    about = {"num_key_value_heads": heads, "head_dim": 32}
    assert about.items() <= fingerprint(model).items()
    dense = model.generate(ids, attention_mask=mask, **GREEDY)
    with attach(model, ratio=0.0, **WINDOWS):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), dense)
    found = []
    for fused in (True, False):
        with attach(model, ratio=0.5, fused=fused, **WINDOWS) as attached:
            found.append(model.generate(ids, attention_mask=mask, **GREEDY))
        assert attached.cache.channel_mask().pruned.shape == (1, 2, heads, 32)
    assert torch.equal(*found)


def test_is_coded(tmp_path) -> None:
    model, ids = gemma4(), torch.randint(3, 97, (1, 150), generator=torch.Generator().manual_seed(1))
    with attach(model, bits=3, basis="none") as attached:
        model.generate(ids, **GREEDY)
    assert attached.cache.memory_report().bits == pytest.approx(3, abs=0.01)
    attached.cache.save(tmp_path / "cache.safetensors")
    assert CompressedCache.load(tmp_path / "cache.safetensors", model).get_seq_length() == 157


def test_layers_of_full_attention_that_differ_are_refused_by_name() -> None:
    config = transformers.LlamaConfig(**SIZES, per_layer_config={1: {"head_dim": 32}})
    with pytest.raises(CacheError, match=r"llama has layers of full attention with head_dim of \['16', '32'\]"):
        CompressedCache(config)


def test_other_numbers_of_heads_are_refused_by_name() -> None:
    """In Dots 3 Note, whose layers all choose their tokens or have a window, layers differ in their number of heads."""
    kind = transformers.CONFIG_MAPPING["dots3_note_text"]
    config = kind(**sizes_of(kind, {}, 12))
    assert "num_attention_heads" in config.per_layer_attributes
    with pytest.raises(CacheError, match="has no full-attention layer whose keys could be pruned"):
        CompressedCache(config)
