"""Torch's default dtype and device are the user's: with any of them, caches of every kind give the same bits."""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import grace_opt
from grace_opt.hf import (
    CompressedCache,
    GraphEviction,
    Quantize,
    SnapKV,
    TopTokens,
    attach,
    calibrate,
    learn_masks,
)
from grace_opt.hf.evict.names import eviction_named
from grace_opt.hf.tools.evaluation import compare_predictions, next_token_log_probs, stored_bits
from tests import children
from tests.hf.conftest import build

ROOT = Path(grace_opt.__file__).parent
PROMPT, MORE = 160, 26
EVICTIONS = ("snapkv", "pyramidkv", "h2o", "streaming_llm", "graph")
WINDOWS = {"recent_window": 8}
QUANT = Quantize(keys=4, values=4, group_size=8)
#: Settings of caches by what they are about.
CACHES = {
    "ratio": {"ratio": 0.5, "observation_window": 6},
    "local_search": {"method": "local_search", "ratio": 0.5},
    "think, spectral weights": {"method": "think", "ratio": 0.5, "fused": False},
    "sinks, blocks, a dense layer": {"ratio": 0.3, "sink_tokens": 3, "tail_block": 4, "dense_layers": 1},
    **{name: {"evict": replace(eviction_named(name), budget=48)} for name in EVICTIONS},
    "graph, one pass": {"evict": GraphEviction(budget=40, block=None)},
    "graph, blocks": {"evict": GraphEviction(budget=40, block=0.5)},
    "evicted, quantised": {"evict": SnapKV(budget=40), "quantize": QUANT},
    "quanto": {"quantize": QUANT, "tail_block": 8},
    "hqq": {"quantize": Quantize(keys=8, values=3, group_size=8, backend="hqq"), "tail_block": 8},
    "read=pages": {"read": TopTokens(share=0.2)},
    "read=channels": {"read": TopTokens(by="channels", top_p=0.9)},
    "read=sampling": {"read": TopTokens(by="sampling", tables=20, hash_bits=4)},
    "bits": {"bits": 3.0, "basis": "none", "tail_block": 16},
    "bits, one by one": {"key_bits": 6.0, "value_bits": 6.0, "basis": "none", "trellis": False},
    "bits, evicted": {"bits": 3.0, "basis": "none", "evict": SnapKV(budget=120)},
    "bits of all": {"total_bytes": 40_000, "basis": "none"},
}


@functools.cache
def model():
    """Made once, with torch's own defaults."""
    return build("Llama", max_position_embeddings=1024)


def tokens(rows, count, seed=0):
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed), device="cpu")


def digest(*values):
    """The bits of whatever numbers there are."""
    found = hashlib.sha256()
    for value in tree_leaves(values):
        found.update(
            f"{value.dtype} {tuple(value.shape)}".encode() if isinstance(value, torch.Tensor) else str(value).encode()
        )
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@torch.no_grad()
def fed(cache):
    """The logits of a padded prompt and of tokens after it, one by one, as far as any cache keeps them."""
    ids, mask = tokens(2, PROMPT + MORE), torch.ones(2, PROMPT + MORE, dtype=torch.int64, device="cpu")
    mask[1, :13] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found, start = [], 0
    for stop in (PROMPT, *range(PROMPT + 1, PROMPT + MORE + 1)):
        part = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        found.append(model()(ids[:, start:stop], past_key_values=cache, **part).logits[:, -1])
        start = stop
    return found


def cache_of(name, folder):
    """What a cache of these settings answers and holds, and again after it was saved."""
    settings = CACHES[name]
    cache = CompressedCache(model(), **WINDOWS, **settings)
    logits = fed(cache)
    cache.save(folder / "cache")
    loaded = CompressedCache.load(folder / "cache", model())
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0], dtype=torch.int64, device="cpu"))
    with torch.no_grad():
        after = [model()(tokens(2, 1, seed=5), past_key_values=each).logits for each in (cache, loaded)]
    return digest(logits, after, str(cache.memory_report()))


def others(folder):
    """Everything else that makes tensors."""
    texts = [tokens(1, 600, seed=seed) for seed in (1, 2)]
    basis = calibrate.basis(model(), None, texts, tokens=600)
    losses = calibrate.budgets(model(), None, [tokens(1, 768)], tokens=768, heads=False)
    masks = calibrate.masks(model(), texts=texts, ratio=0.5)
    learned = learn_masks(model(), None, texts, 0.5, tokens=100, windows=4, steps=(6, 3), progress=False)
    losses.save(folder / "losses")
    basis.save(folder / "basis")
    found = {}
    for name, cache in (
        ("basis", CompressedCache(model(), bits=2.25, basis=folder / "basis")),
        ("masks", CompressedCache(model(), masks=masks, **WINDOWS)),
        ("learned", CompressedCache(model(), masks=learned, **WINDOWS)),
    ):
        found[name] = digest(fed(cache), str(cache.memory_report()))
    found["losses"] = digest(losses.losses)
    with attach(model(), ratio=0.5, **WINDOWS) as attached:
        said = model().generate(tokens(1, 60), max_new_tokens=4, do_sample=False, pad_token_id=0)
    cache, dense = CompressedCache(model(), ratio=0.5, **WINDOWS), DynamicCache(config=model().config)
    with torch.no_grad():
        for each in (cache, dense):
            model()(tokens(1, 60), past_key_values=each)
    found["evaluation"] = digest(str(stored_bits(cache)))
    pair = [next_token_log_probs(model(), each, tokens(1, 9, seed=3)) for each in (cache, dense)]
    found["evaluation"] += str(compare_predictions(*pair, tokens(1, 9, seed=3)[0, 1:]))
    return {**found, "attach": digest(said, str(attached.cache.memory_report()))}


def everything(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model().set_attn_implementation("grace_sdpa")
        return {name: cache_of(name, folder) for name in CACHES} | others(folder)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("usual"))


class OfTheDefaultType(TorchDispatchMode):
    """Notes where the library makes numbers of a type that it was neither given nor asks for."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.found = dtype, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made, given = function(*args, **(kwargs or {})), tree_leaves((args, kwargs))
        known = {leaf for leaf in given if isinstance(leaf, torch.dtype)}
        known |= {leaf.dtype for leaf in given if isinstance(leaf, torch.Tensor)}
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if self.dtype not in known and any(tensor.dtype == self.dtype for tensor in tensors):
            ours = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(ROOT)]
            self.found |= {f"{Path(ours[-1].filename).name}:{ours[-1].lineno}: {ours[-1].line}"} if ours else set()
        return made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_bit(dtype, usual, tmp_path):
    before, notes = torch.get_default_dtype(), OfTheDefaultType(dtype)
    torch.set_default_dtype(dtype)
    try:
        with notes:
            found = everything(tmp_path)
    finally:
        torch.set_default_dtype(before)
    assert [name for name in usual if found[name] != usual[name]] == []
    assert dtype == torch.float64 or notes.found == set()  # in which much is computed, by name


def on_the_default_device(device, folder):
    """`everything` in a fork that imports the library anew; the model is the user's, and where it was."""
    for name in [name for name in sys.modules if name == __name__ or name.partition(".")[0] == "grace_opt"]:
        del sys.modules[name]
    again = importlib.import_module(__name__)
    again.model()
    torch.set_default_device(device)
    return again.everything(folder)


@pytest.mark.slow
def test_the_default_device_changes_no_bit(usual, tmp_path):
    found = children.run(on_the_default_device, "meta", tmp_path)
    assert [name for name in usual if found[name] != usual[name]] == []
