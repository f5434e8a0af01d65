"""What docs/howto/transformers.md says of models that see, of `transformers serve` and of continuous batching."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig

from grace_opt.errors import CacheError
from grace_opt.hf import attach
from tests.hf.conftest import SIZES
from tests.hf.test_blocks import as_found

OPTIONS = {"max_new_tokens": 8, "do_sample": False}
IMAGE, START, END = 96, 95, 94
PATCHES = 16


def llava():
    """16 patches of an image of 24 × 24, seen by a CLIP of two layers."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=24, patch_size=6),
        image_token_id=IMAGE,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    return model, {"pixel_values": torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(2))}


def qwen2_vl():
    """Positions in three dimensions, of which an image takes two."""
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    del text["head_dim"]
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 4, "spatial_merge_size": 2}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=93,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    pixels = torch.randn(4 * PATCHES, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(2))
    return model, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 8]])}


@pytest.mark.parametrize("make", [llava, qwen2_vl])
def test_models_that_see_prune_what_their_decoder_reads(make):
    """Pictures are tokens of the prompt like others, and the vision tower has no cache."""
    model, picture = make()
    model.eval()
    ids = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(1))
    ids[0, 4], ids[0, 5 : 5 + PATCHES], ids[0, 5 + PATCHES] = START, IMAGE, END
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        picture["mm_token_type_ids"] = (ids == IMAGE).int()
    dense = model.generate(ids, **picture, **OPTIONS)
    other = {**picture, "pixel_values": -picture["pixel_values"]}
    assert not torch.equal(model.generate(ids, **other, **OPTIONS), dense), "it does see"
    with attach(model, ratio=0.0, recent_window=8):
        assert torch.equal(model.generate(ids, **picture, **OPTIONS), dense)
    with attach(model, ratio=0.75, recent_window=8) as attached:
        assert not torch.equal(model.generate(ids, **picture, **OPTIONS), dense)
    report = attached.cache.memory_report()
    assert (report.tokens, report.pruned_tokens, report.prunable_layers) == (67, 52, 2)
    assert as_found(model)


def test_transformers_serve_takes_no_cache():
    """Neither its options name one, nor does what it passes to generate(); inside attach, that gets one."""
    pytest.importorskip("transformers.cli.serving")  # its older form cannot be read without a web server's libraries
    serve = pytest.importorskip("transformers.cli.serve")
    names = inspect.signature(serve.Serve.__init__).parameters
    assert not [name for name in names if "cache" in name]


def test_what_serves_requests_calls_generate_and_gets_the_pruned_cache(tiny, prompt):
    utils = pytest.importorskip("transformers.cli.serving.utils")

    class Words:
        def decode(self, tokens, **options):
            return tokens.tolist()

    model, config = tiny(attention="sdpa"), GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    manager, inputs = utils.GenerateManager(), {"input_ids": prompt[:1]}
    attached = attach(model, ratio=0.75, recent_window=8).start()
    served, *_ = asyncio.run(manager.generate_non_streaming(model, Words(), inputs, config, "request"))
    assert attached.cache.memory_report().pruned_tokens == 32
    assert served == model.generate(prompt[:1], generation_config=config)[0, 40:].tolist()
    attached.stop()
    assert served != model.generate(prompt[:1], generation_config=config)[0, 40:].tolist()


def test_continuous_batching_has_a_cache_of_its_own_and_refuses_our_attention(tiny, prompt):
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("what older ones say was not read")
    model = tiny(attention="sdpa")
    with attach(model, "grace") as attached:
        with pytest.raises(ValueError, match="grace_sdpa is not supported for continuous batching"):
            model.generate_batch([prompt[0].tolist()], generation_config=GenerationConfig(max_new_tokens=2))
        with pytest.raises(CacheError, match="no cache yet"):
            _ = attached.cache
