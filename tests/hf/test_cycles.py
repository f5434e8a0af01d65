"""Models that run through their layers several times, and write to another layer of the cache each time: HRM."""

from __future__ import annotations

import pytest
import torch
import transformers

from grace_opt.errors import CacheError
from grace_opt.hf import attach, calibrate, capture_attention
from tests.hf.conftest import OBSERVED, RECENT, SIZES

if not hasattr(transformers, "HrmTextConfig"):
    pytest.skip("this transformers has no HRM", allow_module_level=True)

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}


@pytest.mark.parametrize("settings", [{"ratio": 0.5}, {"ratio": 0.5, "fused": False}, {"ratio": 0.0}], ids=str)
def test_every_layer_of_the_cache_is_pruned(settings, padded) -> None:
    ids, mask = padded
    torch.manual_seed(0)
    model = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**SIZES)).eval().double()
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    dense = model.generate(ids, **options)
    with attach(model, **settings, **WINDOWS) as attached:
        output = model.generate(ids, **options)
    layers = attached.cache.layers
    assert len(layers) > model.config.num_layers_per_stack
    assert all(layer.pruned_length == ids.shape[1] - RECENT for layer in layers)
    if not settings["ratio"]:
        assert torch.equal(output, dense)


def test_a_calibration_says_what_to_write() -> None:
    torch.manual_seed(0)
    config = transformers.HrmTextConfig(**{**SIZES, "max_position_embeddings": 1024})
    model = transformers.HrmTextForCausalLM(config).eval()
    ids = torch.randint(3, 97, (1, 600), generator=torch.Generator().manual_seed(1))
    with pytest.raises(CacheError, match=r'cannot be calibrated; write basis="none"'):
        calibrate.basis(model, None, [ids[0]])
    with attach(model, bits=3, basis="none") as attached:
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert attached.cache.memory_report().bits == pytest.approx(3, abs=0.01)


@pytest.mark.parametrize("layers", [None, [0, 1]])
def test_capture_refuses_layers_that_attend_several_times(layers, prompt) -> None:
    """Which of the calls is meant, nobody can say: the last one was returned, as if it were the layer's only one."""
    model = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**SIZES)).eval()
    with pytest.raises(CacheError, match=r"layers \[0, 1\] of HrmTextForCausalLM attend several times in one pass"):
        capture_attention(model, prompt, layers=layers)
