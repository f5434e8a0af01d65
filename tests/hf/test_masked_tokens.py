"""What masked tokens contain changes no bit of what follows, whatever is done to the cache."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grace_opt.hf import PrunedKeyCache, Quantization
from grace_opt.hf.compression import with_real_alone
from tests.hf.test_defaults import CACHES, WINDOWS, model, tokens

MORE = {
    "8 bits": {"quantize": Quantization(keys=8, values=8, group_size=8, backend="hqq")},
    "8 bits, sinks, blocks": {
        "quantize": Quantization(keys=8, values=8, group_size=16, backend="hqq"),
        "sink_tokens": 3,
        "tail_block": 16,
        "recent_window": 24,
    },
}
PADDING = 30  # of the first row; of the second, all but the last ten tokens, so that the recent window has some too


@torch.no_grad()
def answers(settings, loud, name):
    """The logits of a prompt's last token and of 20 more, where all masked tokens are this one; and the report."""
    ids, mask = tokens(2, 170), torch.ones(2, 190, dtype=torch.int64)
    mask[0, :PADDING], mask[1, :160] = 0, 0
    ids = ids.masked_fill(mask[:, :170] == 0, loud)
    more, positions = tokens(2, 20, seed=3), (mask.cumsum(-1) - 1).clamp(min=0)
    cache = PrunedKeyCache(model(), **{**WINDOWS, **settings})
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
