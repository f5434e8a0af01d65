"""Families × ways of generating: what one cell of the table runs, and what must be true of it.

A cell of the table has a family of tiny random models and a mode. It runs the mode with a dense cache and with pruned
ones, and says

* whether nothing pruned (λ = 0 on the fused path) gives the dense tokens, or in bfloat16 the dense logits to
  ``BFLOAT16_RTOL`` of the largest;
* whether the fused path gives the tokens of the zero-filled one at λ = 0.5;
* whether a padded row gives the tokens of the row alone.

Tokens are compared where the model's own dense run is indifferent to padding. `tests/hf/test_matrix.py` runs the cells.
"""

from __future__ import annotations

import copy
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, attach, attention_implementation
from tests.hf.conftest import OBSERVED, RECENT, SIZES

#: Relative to the largest logit. The dense models themselves are up to 6.1 % off in bfloat16 (Granite).
BFLOAT16_RTOL = 0.06
PROMPT, NEW, PADDING = 40, 8, 13
#: Different tokens among those that are generated.
ENOUGH = 5
WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
SIZES = {**SIZES, "tie_word_embeddings": False}
MIXED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}


def long_rope(limit: int, **more: float) -> dict[str, Any]:
    """Settings with which Phi-3 and its kin change their rotary embeddings after this many tokens."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 256 / limit}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": limit,
        **factors,
        **more,
    }
    return {"original_max_position_embeddings": limit, "rope_parameters": rope, "sliding_window": None}


#: Name in the table: class prefix, changes to SIZES (... leaves a name out); "config" names a class called otherwise.
FAMILIES = {
    "Llama": ("Llama", {}),
    "Llama, one KV head (MQA)": ("Llama", {"num_key_value_heads": 1}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, sliding window": ("Mistral", {"sliding_window": 12}),
    "Mixtral": ("Mixtral", {"num_local_experts": 2}),
    "Ministral": ("Ministral", MIXED),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, sliding window in half of the layers": ("Qwen2", {**MIXED, "use_sliding_window": True}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3 MoE": ("Qwen3Moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}),
    "Gemma": ("Gemma", {}),
    "Gemma 2": ("Gemma2", {"sliding_window": 12, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "Gemma 3": ("Gemma3", {**MIXED, "query_pre_attn_scalar": 16, "config": "Gemma3TextConfig"}),
    "Gemma 3n (layers share caches)": (
        "Gemma3n",
        {
            "config": "Gemma3nTextConfig",
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 12,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
            "altup_num_inputs": 2,
        },
    ),
    "Phi": ("Phi", {}),
    "Phi-3": ("Phi3", long_rope(PROMPT + 4)),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3": ("Olmo3", MIXED),
    "Granite": ("Granite", {}),
    "SmolLM3": ("SmolLM3", {}),
    "Cohere": ("Cohere", {}),
    "Cohere 2": ("Cohere2", MIXED),
    "StarCoder 2": ("Starcoder2", {}),
    "GLM-4": ("Glm4", {}),
    "StableLM": ("StableLm", {}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "OPT": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "EXAONE 4": ("Exaone4", MIXED),
    "ERNIE 4.5": ("Ernie4_5", {}),
    "Seed-OSS": ("SeedOss", {}),
    "GPT-OSS (attention sinks)": ("GptOss", {**MIXED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "DiffLlama": ("DiffLlama", {}),
    "Falcon": ("Falcon", {"head_dim": ...}),
    "Bloom": ("Bloom", {}),
}
#: Beyond these, CI runs greedy decoding only; `make test-matrix` runs every cell.
IN_FULL = ("Llama", "Qwen3", "Gemma 3")


@functools.cache
def model_of(family: str):
    """The tiny model of a family, always with the same weights; its attention is as transformers chooses it."""
    prefix, changes = FAMILIES[family]
    changes = dict(changes)
    config = getattr(transformers, changes.pop("config", f"{prefix}Config"))
    torch.manual_seed(0)
    sizes = {name: size for name, size in {**SIZES, **changes}.items() if size is not ...}
    model = getattr(transformers, f"{prefix}ForCausalLM")(config(**sizes)).eval()
    if base_of(model) == "eager":
        model.set_attn_implementation("eager")  # older versions drop soft-capping silently in sdpa
    return model


def base_of(model) -> str:
    """Which attention the model needs."""
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return "eager" if capped or not model._supports_sdpa else "sdpa"


def prompts(length=PROMPT):
    """Two prompts, the padded second one, and the mask; the padding holds a loud token."""
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids.masked_fill(mask == 0, 50), mask


class OffloadingCache(CompressedCache):
    """What ``offloading=True`` does around a layer's update, without an accelerator."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.layers[layer_idx].prefetch()
        updated = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.layers[layer_idx].offload()
        return updated


def generated(**options):
    """A mode that is one call of ``generate``."""

    def run(model, cache, ids, mask):
        torch.manual_seed(5)
        given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
        output = model.generate(ids, attention_mask=mask, past_key_values=cache, **given)
        if isinstance(cache, CompressedCache):
            assert cache.get_seq_length() >= output.shape[1] - 1, "the model has dropped its cache"
            assert not cache.is_dense
        return output[:, ids.shape[1] :]

    return run


def chunked(model, cache, ids, mask):
    """Chunks of 16, 16 and 8 tokens, declared."""
    if isinstance(cache, CompressedCache):
        cache.declare_prompt(ids.shape[1])
    return generated(prefill_chunk_size=16)(model, cache, ids, mask)


def assistant(model):
    """The model with disturbed weights: it guesses right often, not always."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    other.set_attn_implementation(base_of(model))
    return other


def assisted(model, cache, ids, mask):
    """Candidates from a smaller model; one sequence at a time, as transformers demands."""
    return one_by_one(model, cache, ids, mask, assistant_model=assistant(model))


def prompt_lookup(model, cache, ids, mask):
    """Candidates from the prompt, which repeats itself."""
    # Transformers 5.2 needs a token that ends the text; this one is never generated.
    return one_by_one(model, cache, *repeated(ids, mask), prompt_lookup_num_tokens=4, eos_token_id=1000)


def repeated(ids, mask):
    """Prompts whose end is a repetition."""
    return torch.cat([ids, ids[:, -12:-2]], dim=1), torch.cat([mask, torch.ones_like(mask[:, :10])], dim=1)


def one_by_one(model, cache, ids, mask, **options):
    rows = []
    for row, valid in zip(ids, mask, strict=True):
        own = copy.deepcopy(cache)
        if isinstance(own, CompressedCache):
            own.declare_prompt(len(row))
        rows.append(generated(**options)(model, own, row[None], valid[None]))
    return torch.cat(rows)


def turns(model, cache, ids, mask):
    """A second question after the answer, on the same cache."""
    first = generated()(model, cache, ids, mask)
    question = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(4))[-len(ids) :]
    longer = torch.cat([ids, first, question], dim=1)
    full = torch.cat([mask, torch.ones_like(longer[:, ids.shape[1] :])], dim=1)
    return torch.cat([first, generated()(model, cache, longer, full)], dim=1)


def logits(model, cache, ids, mask, compile_step=False):
    """Logits of the prompt's last token and of three more, fed one at a time."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    more = torch.randint(3, 97, (2, 3), generator=torch.Generator().manual_seed(6))[-len(ids) :]
    new = slice(cache.get_seq_length(), None)
    with torch.no_grad():
        first = model(ids[:, new], attention_mask=mask, position_ids=positions[:, new], past_key_values=cache)
        found = [first.logits[:, -1:]]
        step = torch.compile(model.forward, backend="eager", fullgraph=True) if compile_step else model
        for token in more.split(1, dim=1):
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            where = mask.sum(-1, keepdim=True) - 1
            found.append(step(token, attention_mask=mask, position_ids=where, past_key_values=cache).logits)
    return torch.cat(found, dim=1)


def compiled(model, cache, ids, mask):
    """Every decode step at λ = 0.5 through torch.compile, in one graph: each cache takes seconds."""
    torch._dynamo.reset()
    return logits(model, cache, ids, mask, compile_step=True).argmax(-1)


def steps(model, cache, ids, mask):
    """What compiled steps are compared with: the same ones as they are."""
    return logits(model, cache, ids, mask).argmax(-1)


MODES = {
    "greedy": generated(),
    "sampling": generated(do_sample=True, temperature=2.0),
    "beam search": generated(num_beams=3),
    "several sequences": generated(do_sample=True, num_return_sequences=3, temperature=2.0),
    "turns": turns,
    "chunked prefill": chunked,
    "assisted": assisted,
    "prompt lookup": prompt_lookup,
    "compiled step": compiled,
    "offloading": generated(),
    "bfloat16": logits,
}


def pruning_attention(model) -> AbstractContextManager[Any]:
    """A block in which ``generate`` takes pruned caches."""
    if drops_its_cache(model):
        return attach(model, ratio=0.5, **WINDOWS)  # which gives back the cache that is passed
    return attention_implementation(model, f"grace_{base_of(model)}")


def drops_its_cache(model) -> bool:
    """Whether the model reads its text again, without the cache, when it becomes longer than some limit."""
    return hasattr(model.config, "original_max_position_embeddings")


def reads_again(model) -> bool:
    """Whether such a model then reads the whole text; in transformers 5.2 it reads the last token alone."""
    limit = model.config.original_max_position_embeddings
    ids = torch.randint(3, 80, (1, limit - 2), generator=torch.Generator().manual_seed(3))
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    return torch.equal(*(model.generate(ids, **given, use_cache=use_cache) for use_cache in (True, False)))


def cell(family: str, mode: str) -> str:
    """Run one cell; `cell_of` says what it returns."""
    return cell_of(model_of(family), mode)


def cell_of(model, mode: str) -> str:
    """Run one cell with a model.

    Returns
    -------
    str
        ``"pass"``, or ``"fused=False"`` if only zero-filled keys can do it, or ``"raises: ..."`` with the error that a
        user sees, or ``"not in transformers: ..."`` if a dense cache cannot do it either.

    Raises
    ------
    AssertionError
        If one of the three comparisons fails.
    """
    run = MODES[mode]
    reference = steps if mode == "compiled step" else run
    if mode == "bfloat16":
        model = copy.deepcopy(model).to(torch.bfloat16)
    kind = OffloadingCache if mode == "offloading" else CompressedCache
    ids, mask = prompts()
    if drops_its_cache(model) and not reads_again(model):
        return "not in transformers: a text that outgrows its original positions is forgotten"

    def dense(ids, mask):
        return reference(model, DynamicCache(config=model.config), ids, mask)

    def pruned(ids, mask, ratio, fused=True, run=reference):
        with pruning_attention(model):
            return run(model, kind(model, "grace", ratio, fused=fused, **WINDOWS), ids, mask)

    try:
        expected = dense(ids, mask)
    except ValueError as error:  # transformers 5.2 cannot crop sliding windows, for instance
        return f"not in transformers: {error}"
    if mode == "greedy":
        assert len(set(expected.flatten().tolist())) >= ENOUGH, "a constant output would prove little"
    fused, answer = True, "pass"
    try:
        found = pruned(ids, mask, 0.0)
    except CacheError as error:
        if "fused=False" not in str(error):
            return f"raises: {error}"
        fused, answer = False, "fused=False"
        found = pruned(ids, mask, 0.0, fused=False)
    agree(found, expected, "nothing pruned against dense")
    half = pruned(ids, mask, 0.5, fused, run)
    if fused:
        agree(half, pruned(ids, mask, 0.5, fused=False), "fused against zero-filled")
    # Padding counts where the text outgrows its positions, so the row alone does so later, and compresses other tokens.
    together = not drops_its_cache(model) or ids.shape[1] > model.config.original_max_position_embeddings
    if together and mode not in ("several sequences", "sampling"):  # whose random numbers depend on the batch
        real = ids[1:, PADDING:], mask[1:, PADDING:]
        if same(dense(*real), expected[1:]):
            agree(pruned(*real, 0.5, fused), half[1:], "padded row against the row alone")
    return answer


def same(found, expected) -> bool:
    """Tokens equal, or bfloat16 logits to `BFLOAT16_RTOL` of the largest."""
    if not found.is_floating_point():
        return torch.equal(found, expected)
    return bool((found - expected).abs().max() <= BFLOAT16_RTOL * expected.abs().max())


def agree(found, expected, what: str) -> None:
    """Raise, naming what was compared, unless `same`."""
    assert same(found, expected), f"{what}: {found.tolist()} instead of {expected.tolist()}"
