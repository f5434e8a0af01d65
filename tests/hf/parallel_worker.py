"""What every rank of a tensor-parallel run does; `tests/hf/test_parallel.py` does the same in one process.

Each rank reads a model, static masks and a basis from a folder, and writes ``rank<r>.json`` with what it saw there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from grace_opt.attention.masks import ChannelMask
from grace_opt.errors import GraceError
from grace_opt.hf import CompressedCache, LayerBudgets, LayerLosses, attach
from grace_opt.hf.evict.eviction import SnapKV

WINDOWS = {"recent_window": 8, "observation_window": 6}
LOSSES = LayerLosses((0, 1), (0.25, 0.5), (((0.4, 0.1), (0.01, 0.001)), ((0.02, 0.01), (0.3, 0.1))))
CASES = {
    "dense": {"ratio": 0.0},
    "half": {"ratio": 0.5},
    "sinks": {"ratio": 0.5, "sink_tokens": 2},
    "evicted": {"ratio": 0.5, "evict": SnapKV(budget=24, window=6), "tail_block": 4},
    "budgets of heads": {"ratio": 0.5, "evict": LayerBudgets(SnapKV(budget=24, window=6), LOSSES)},
    "zero-filled": {"ratio": 0.5, "fused": False},
}

WITH_BITS = {"bits": {"bits": 2.25}, "bits of K and V": {"key_bits": 3, "value_bits": 2}}


def load(folder):
    """The model, split over the ranks if there are several; what to write for that has changed."""
    parallel = {}
    if dist.is_torchelastic_launched():
        known = {field.name for field in dataclasses.fields(DistributedConfig)}
        parallel = {"tp_plan": "auto"}
        if "tp_plan" in known:
            parallel = {"distributed_config": DistributedConfig(**parallel)}
    model = AutoModelForCausalLM.from_pretrained(folder, **parallel).eval()
    model.set_attn_implementation("grace_sdpa")
    return model


def outcomes(model, masks, basis):
    """By case, the new tokens of a left-padded batch and the kept channels ``[layer][sequence][head]``."""
    prompt = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(prompt)
    padding[1, :13] = 0
    prompt = prompt.masked_fill(padding == 0, 50)
    found = {}

    def generate(cache, prompt=prompt, padding=padding, **options):
        options = {"max_new_tokens": 12, "do_sample": False, **options}
        tokens = model.generate(prompt, attention_mask=padding, past_key_values=cache, **options)
        return {"tokens": tokens[:, prompt.shape[1] :].tolist()}

    for name, settings in CASES.items():
        cache = CompressedCache(model, "grace", **WINDOWS, **settings)
        found[name] = {**generate(cache), "kept": kept(cache)}
    cache = CompressedCache(model, masks=masks, **WINDOWS)
    found["static masks"] = {**generate(cache), "kept": kept(cache)}
    cache = CompressedCache(model, "grace", **WINDOWS)
    found["beams"] = generate(cache, num_beams=3)
    with attach(model, "grace", 0.5, **WINDOWS) as attached:
        found["attached"] = {**generate(None), "kept": kept(attached.cache)}
    longer = torch.cat([padding, torch.ones_like(prompt), torch.ones_like(prompt)], dim=1)
    for name, settings in WITH_BITS.items():
        cache = CompressedCache(model, basis=basis, **settings)
        found[name] = {**generate(cache, prompt.repeat(1, 3), longer, max_new_tokens=72), "kept": widths(cache)}
    return found


def widths(cache):
    """The bits of every channel, ``[layer][sequence][head]``."""
    return [
        [
            torch.cat([each.keys.widths(), each.values.widths()], dim=-1).transpose(0, 1).flatten(1).tolist()
            for row in layer.compressed.rows
            for each in row.segments
        ]
        for layer in cache.layers
    ]


def kept(cache):
    """The kept channels as the layers store them."""
    return [layer.compressed.kept_channels().tolist() for layer in cache.layers]


def saved(model, folder, rank):
    """What reading one's own and another rank's file does."""
    prompt = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(3))
    cache = CompressedCache(model, "grace", **WINDOWS)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        cache.save(folder / f"rank{rank}.safetensors")
        dist.barrier()
        own = CompressedCache.load(folder / f"rank{rank}.safetensors", model)
        logits = [model(prompt[:, :1], past_key_values=each).logits for each in (cache, own)]
    refused = []
    for reading in (
        lambda: CompressedCache.load(folder / f"rank{1 - rank}.safetensors", model),
        lambda: CompressedCache(model, masks=ChannelMask.load(folder / f"mask{1 - rank}.safetensors")),
    ):
        own.channel_mask().save(folder / f"mask{rank}.safetensors")
        dist.barrier()
        try:
            reading()
        except GraceError as error:
            refused.append(str(error))
    return {"equal": torch.equal(*logits), "refused": refused}


def main(folder: Path, rank: int, ranks: int, port: int) -> None:
    """Run on one rank, with the environment that ``torch.distributed.run`` gives to those that it starts."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    model = load(folder / "model")
    assert rank == dist.get_rank()
    found = {
        "outcomes": outcomes(model, ChannelMask.load(folder / "masks.safetensors"), folder / "basis.safetensors"),
        "fingerprint": CompressedCache(model, "grace").fingerprint(),
        "saved": saved(model, folder, rank),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
