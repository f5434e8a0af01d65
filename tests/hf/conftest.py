"""Tiny random models, caches with small windows, and the reference that prunes nothing but zeroes the same channels.

All offline: weights are drawn, not loaded, wide enough (`initializer_range`) that greedy tokens are far from ties.
"""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from transformers import DynamicCache

import grace_opt.hf
from grace_opt.attention.provider import DEFAULT_RATIO
from grace_opt.hf import CompressedCache
from grace_opt.hf.engine import saving
from grace_opt.hf.models import fingerprint

FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}
RECENT, OBSERVED = 8, 6
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@functools.cache
def build(name: str, **changes):
    """A tiny causal language model of a transformers class, always with the same weights."""
    if "layer_types" in changes:
        changes["layer_types"] = list(changes["layer_types"])
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(autouse=True)
def small_matrices(one_thread: None) -> None:
    """Every test here has one thread."""


@pytest.fixture(params=FAMILIES)
def family(request):
    """The families whose full-attention models are covered here."""
    return request.param


@pytest.fixture
def tiny():
    """`tiny("llama", **config)`: a model with grace_sdpa attention; a class name works as well."""

    def make(name="llama", attention="grace_sdpa", **changes):
        cls, defaults = FAMILIES.get(name, (name, {}))
        model = build(cls, **{**defaults, **changes})
        model.set_attn_implementation(attention)
        return model

    return make


class Written:
    """Stands for a file whose digest is right: what was written last is read, as JSON and safetensors give it back."""

    def write(self, path, tensors, about):
        self.about, self.tensors = json.dumps(about), tensors

    def read(self, path, mapped=False):
        return json.loads(self.about), {name: t.contiguous().clone() for name, t in self.tensors.items()}


@pytest.fixture
def digest_known(monkeypatch):
    """`digest_known(path)`: what is in the file; thousands of edits of it need no file, only the right digest.

    Nor do they change the model, so its own digest is made once.
    """

    def read(path):
        found = saving.FILE_FORMAT.read(path)
        monkeypatch.setattr(saving, "FILE_FORMAT", Written())
        monkeypatch.setattr(fingerprint, "weights_digest", functools.cache(fingerprint.weights_digest))
        return found

    return read


@pytest.fixture(scope="module")
def in_one_graph():
    """`in_one_graph(model)`: its forward pass, compiled; one for all tests, so that a prompt is traced once."""
    torch.compiler.reset()
    yield functools.cache(lambda model: torch.compile(model.forward, backend="eager", fullgraph=True))
    torch.compiler.reset()


#: What says how a cache is made smaller in another way than by dropping the usual share of the channels.
ELSE = {"ratio", "kept_channels", "method", "provider", "masks", "config", "bits", "key_bits", "total_bytes", "max_kl"}


@pytest.fixture
def prune():
    """`prune(model, method, ratio, **arguments)`: a cache with windows small enough for short prompts, that drops 0.3
    of the channels unless it is told otherwise; with `read=` by pages or samples, none.
    """

    def make(model, *arguments, **options):
        options = {"recent_window": RECENT, "observation_window": OBSERVED, **options}
        if not arguments and not ELSE & options.keys():
            by = getattr(options.get("read"), "by", options.get("read"))
            options["ratio"] = 0.0 if by in ("pages", "sampling") else DEFAULT_RATIO
        return CompressedCache(model.config, *arguments, **options)

    return make


@pytest.fixture
def prompt():
    """Two prompts of 40 tokens."""
    return torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def padded(prompt):
    """The same two prompts, of the second only the last 27 tokens real, and the attention mask that says so.

    The padding holds a loud token, not a padding token whose embedding is zero: whoever looks at it is found out.
    """
    mask = torch.ones_like(prompt)
    mask[1, :13] = 0
    return prompt.masked_fill(mask == 0, 50), mask


@pytest.fixture
def continuation():
    """Twelve tokens to feed to both, so that logits can be compared however the models would go on."""
    return torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def step():
    """`step(model, cache, prompt, continuation, mask, between, width)`: logits after prompt and continuation tokens."""

    @torch.no_grad()
    def run(model, cache, prompt, continuation, mask=None, between=None, width=1):
        mask = torch.ones_like(prompt) if mask is None else mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(prompt, attention_mask=mask, position_ids=positions, past_key_values=cache)
        logits = [out.logits[:, -1:]]
        if between is not None:
            between(cache)
        for tokens in continuation.split(width, dim=1):
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            positions = (mask.cumsum(-1) - 1)[:, -tokens.shape[1] :]
            out = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache)
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    return run


@pytest.fixture
def zeroed(step):
    """The reference: stock sdpa and DynamicCache, the same channels of the same tokens zeroed after the prompt."""

    def run(model, channel_mask, prompt, continuation, mask=None, width=1, recent=RECENT):
        def zero(cache):
            for layer, pruned in zip(cache.layers, channel_mask.pruned, strict=True):
                old = layer.keys[:, :, : prompt.shape[1] - recent]
                old.masked_fill_(pruned[:, :, None, :], 0.0)

        with grace_opt.hf.attention_implementation(model, "sdpa"):
            return step(model, DynamicCache(config=model.config), prompt, continuation, mask, zero, width)

    return run


@pytest.fixture
def close():
    """`close(a, b)`: whether logits agree to 1e-5 of the largest one."""

    def check(found, expected, tolerance=1e-5):
        return bool((found - expected).abs().max() <= tolerance * expected.abs().max())

    return check


@pytest.fixture
def generate():
    """`generate(model, cache, prompt, mask, **options)`: new tokens of the stock generate(), greedy by default."""

    def run(model, cache, prompt, mask=None, **options):
        mask = torch.ones_like(prompt) if mask is None else mask
        options = {"max_new_tokens": 16, "do_sample": False, **options}
        tokens = model.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
        return tokens[:, prompt.shape[1] :]

    return run


def reads_in_chunks(model) -> bool:
    """Whether transformers reads a prompt in chunks as it does at once, with its own cache; 5.2 does not."""
    ids = torch.randint(3, 97, (4, 120), generator=torch.Generator().manual_seed(2))
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    at_once, in_chunks = (
        model.generate(ids, past_key_values=DynamicCache(config=model.config), **given, **options)
        for options in ({}, {"prefill_chunk_size": 16})
    )
    return torch.equal(at_once, in_chunks)
