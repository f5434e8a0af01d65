"""What masked tokens contain changes no bit of what follows, whatever is done to the cache."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from grace_opt.hf import CompressedCache, Quantize
from grace_opt.hf.stores.packed.masked import with_real_alone
from tests.hf.test_defaults import CACHES, WINDOWS, model, tokens

MORE = {
    "8 bits": {"quantize": Quantize(keys=8, values=8, group_size=8, backend="hqq")},
    "8 bits, sinks, blocks": {
        "quantize": Quantize(keys=8, values=8, group_size=16, backend="hqq"),
        "sink_tokens": 3,
        "tail_block": 16,
        "recent_window": 24,
    },
}
#: Of each row: more than a group; all but the last ten tokens, so that the recent window has some too; and less than a
#: group, so that one has masked and real tokens.
PADDING = 30, 160, 7


@torch.no_grad()
def answers(settings, loud, name):
    """The logits of a prompt's last token and of 20 more, where all masked tokens are this one; and the report."""
    ids = tokens(len(PADDING), 170)
    mask = (torch.arange(190) >= torch.tensor(PADDING)[:, None]).long()
    ids = ids.masked_fill(mask[:, :170] == 0, loud)
    more, positions = tokens(len(PADDING), 20, seed=3), (mask.cumsum(-1) - 1).clamp(min=0)
    cache = CompressedCache(model(), **{**WINDOWS, **settings})
    part = {"attention_mask": mask[:, :170], "position_ids": positions[:, :170]}
    found = [model()(ids, past_key_values=cache, **part).logits[:, -1]]
    for at in range(20):
        part = {"attention_mask": mask[:, : 171 + at], "position_ids": positions[:, 170 + at : 171 + at]}
        found.append(model()(more[:, at : at + 1], past_key_values=cache, **part).logits[:, -1])
    return torch.stack(found), str(cache.memory_report())


@pytest.mark.filterwarnings("ignore:.*prompts? stays? dense")
@pytest.mark.parametrize("name", [*CACHES, *MORE])
def test_masked_tokens_may_contain_anything(name):
    settings = {**CACHES, **MORE}[name]
    if "quantize" in settings and importlib.util.find_spec("hqq") is None:
        pytest.skip("hqq is not installed")
    model().set_attn_implementation("grace_sdpa")
    one, other = (answers(settings, loud, name) for loud in (50, 7))
    assert torch.equal(one[0], other[0])
    assert one[1] == other[1]


@torch.no_grad()
def test_candidates_behind_a_padded_prompt_are_real():
    """Candidates of assisted decoding come with the prompt, and are no part of it."""
    if importlib.util.find_spec("hqq") is None:
        pytest.skip("hqq is not installed")
    model().set_attn_implementation("grace_sdpa")
    ids, mask = tokens(1, 175), torch.ones(1, 175, dtype=torch.int64)
    mask[:, :7] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    cache = CompressedCache(model(), **{**WINDOWS, **MORE["8 bits, sinks, blocks"]}, prompt_length=170)
    dense = DynamicCache()
    for each in (cache, dense):
        model()(ids, past_key_values=each, **given)
    cache.layers[0].settle()
    assert torch.equal(cache.layers[0].tail.keys[:, :, -5:], dense.layers[0].keys[:, :, -5:])
    assert torch.equal(cache.layers[0].tail.values[:, :, -5:], dense.layers[0].values[:, :, -5:])


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(0, 100))
def test_masked_tokens_have_the_numbers_of_real_ones(real, seed):
    """By the plainest loop: the next real token's, else the last one's, else zeros."""
    numbers = torch.randn(1, 2, len(real), 3, generator=torch.Generator().manual_seed(seed))
    numbers[:, :, ~torch.tensor(real)] = torch.nan
    found = with_real_alone(numbers, torch.tensor(real)[None, None])
    places = [at for at, is_real in enumerate(real) if is_real]
    for at in range(len(real)):
        source = next((place for place in places if place >= at), places[-1] if places else None)
        expected = torch.zeros(2, 3) if source is None else numbers[0, :, source]
        assert torch.equal(found[0, :, at], expected)
