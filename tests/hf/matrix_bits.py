"""The same families and ways of generating with ``bits=``: what one cell runs, and what must be true of it.

The reference is a dense cache that holds, after the prompt, the very numbers that the codes stand for: from there on
every mode must give the same tokens, in bfloat16 the same logits. Where a mode reads the prompt in another way (in
chunks, or candidates along with it), the reference is greedy decoding from the same kind of cache. A padded row must
give what the row alone does. Once per family, 16 bits (8 in fact) must be several times closer to dense than 2 are.
"""

from __future__ import annotations

import copy
from unittest.mock import patch

import torch
from transformers import DynamicCache

from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache
from grace_opt.hf.stores.coded.code_prompt import MIN_TOKENS
from grace_opt.kernels.cache import coded as kernels
from tests.hf.matrix import (
    MODES,
    PADDING,
    OffloadingCache,
    agree,
    generated,
    logits,
    model_of,
    one_by_one,
    prompts,
    pruning_attention,
    repeated,
    same,
    steps,
)

SETTINGS = {"bits": 2, "basis": "none", "recent_window": 8}
#: Enough that the padded row alone is coded.
LENGTH = MIN_TOKENS + 8 + 4 + PADDING + 11
#: How often a mode repeats each sequence, which a cache that is already full must know beforehand.
REPEATS = {"beam search": 3, "several sequences": 3}
#: Modes that read the prompt in their own way, and what must give the same tokens.
LIKE = {
    "chunked prefill": generated(),
    "assisted": one_by_one,
    "prompt lookup": lambda model, cache, ids, mask: one_by_one(model, cache, *repeated(ids, mask)),
}
#: Random numbers depend on the batch, and compiling takes seconds.
NOT_ALONE = ("sampling", "several sequences", "compiled step")
#: What error with 16 bits is small beside that with 2; Granite's is an eighth.
CLOSE = 0.2


def coded(model, kind=CompressedCache, **settings):
    """An empty cache."""
    return kind(model, **{**SETTINGS, **settings})


def filled(model, ids, mask, kind):
    """A cache that has read all but the last token, and coded what is older than the recent window."""
    cache = coded(model, kind)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], past_key_values=cache)
    assert cache.memory_report().bits <= 2.01, "one bit for each place says whether it is padding"
    return cache


def twin(cache, config):
    """A dense cache with the numbers that the codes stand for."""
    dense = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        if number in cache.prunable_layers:
            dense.layers[number].update(*(tensor.clone() for tensor in layer.full_width()), {})
        else:
            dense.layers[number] = copy.deepcopy(layer)
    return dense


def coded_cell(family: str, mode: str) -> str:
    """Run one cell; return "pass", or "raises: ..." with the error that a user sees.

    Raises
    ------
    AssertionError
        If one of the comparisons fails.
    """
    return coded_cell_of(model_of(family), mode)


def coded_cell_of(model, mode: str, may_mind_padding: bool = False) -> str:
    """Run one cell with a model; one that may mind padding, with a dense cache too, is then not asked about it."""
    with patch.object(kernels, "CPU_MIN_TOKENS", 0):  # as with longer prompts: codes are read where they lie
        return _cell(model, mode, may_mind_padding)


def _cell(model, mode, may_mind_padding):
    if mode == "bfloat16":
        model = copy.deepcopy(model).to(torch.bfloat16)
    ids, mask = prompts(LENGTH)
    try:
        with pruning_attention(model):
            if mode in LIKE:
                _check_like(model, mode, ids, mask)
            else:
                _check_twin(model, mode, ids, mask, may_mind_padding)
            if mode == "greedy":
                _check_close(model, ids, mask)
    except CacheError as error:
        return f"raises: {error}"
    return "pass"


def _check_twin(model, mode, ids, mask, may_mind_padding):
    run, times = MODES[mode], REPEATS.get(mode, 1)
    reference = steps if mode == "compiled step" else run
    alone = ids[1:, PADDING:], mask[1:, PADDING:]
    found = {}
    for name, rows in {"both": (ids, mask), "alone": alone}.items():
        if name == "alone" and mode in NOT_ALONE:
            continue
        cache = filled(model, *rows, OffloadingCache if mode == "offloading" else CompressedCache)
        dense = twin(cache, model.config)
        for each in (cache, dense) if times > 1 else ():
            each.batch_repeat_interleave(times)
        found[name] = run(model, cache, *rows)
        agree(found[name], reference(model, dense, *rows), f"codes against their numbers, {name}")
    if mode in NOT_ALONE:
        return
    if may_mind_padding:
        empty = [reference(model, DynamicCache(config=model.config), *rows) for rows in ((ids, mask), alone)]
        if not same(empty[1], empty[0][1:]):
            return
    agree(found["alone"], found["both"][1:], "padded row against the row alone")


def _check_like(model, mode, ids, mask):
    caches = coded(model), coded(model)
    for cache in caches:
        cache.declare_prompt((repeated(ids, mask)[0] if mode == "prompt lookup" else ids).shape[1])
    agree(MODES[mode](model, caches[0], ids, mask), LIKE[mode](model, caches[1], ids, mask), "against greedy decoding")


def _check_close(model, ids, mask):
    dense = logits(model, DynamicCache(config=model.config), ids, mask)
    errors = [(logits(model, coded(model, bits=bits), ids, mask) - dense).abs().max() for bits in (16, 2)]
    assert errors[0] < CLOSE * errors[1], errors
