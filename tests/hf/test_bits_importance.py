"""The attention that tokens of a prompt receive: which queries are observed, by which heads, how much each counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt.hf.bases.importance import KEPT, attention_moments, observed_queries, queries_of_row, spread_queries
from grace_opt.hf.models.observation import Observation
from grace_opt.kernels._shared.threads import always_compiled
from tests.oracle import received_attention


def observed(length, padding=0, heads=6, width=8):
    """What is known of two prompts, the second of which begins with padding."""
    queries = torch.randn(2, heads, length, width, generator=torch.Generator().manual_seed(length))
    places = torch.arange(length).expand(2, -1)
    valid = None
    if padding:
        valid = torch.ones(2, length, dtype=torch.bool)
        valid[1, :padding] = False
    return Observation(queries, valid, length, 0.3, None, places)


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 127, 200, 511, 512, 1000])
def test_three_sets_of_queries_count_alike(length):
    found = queries_of_row(observed(length), 0)
    every = torch.arange(length)
    places = every[(observed_queries(length) > 0) | (every % KEPT == 0)]
    assert found.weights.sum() == pytest.approx(1)
    expected = torch.zeros(length, dtype=torch.float64)
    spread = range(0, length, 8 if length < 512 else 16)
    for members in (range(max(length - 32, 0), length), range(max(length - 128, 0), length), spread):
        expected[list(members)] += 1 / 3 / len(members)
    torch.testing.assert_close(found.weights, expected[places])
    assert torch.equal(found.spread, places % KEPT == 0)
    assert torch.equal(found.whole, (places >= length - 32) | torch.tensor(length < 512))
    assert torch.equal(found.queries, observed(length).queries[0][:, places])


@pytest.mark.parametrize("padding", [1, 30, 150])
def test_a_padded_row_has_the_queries_that_it_would_have_alone(padding):
    over = observed(200, padding)
    alone = over._replace(
        queries=over.queries[1:, :, padding:],
        length=200 - padding,
        valid=None,
        places=torch.arange(200 - padding).expand(1, -1),
    )
    for padded, own in zip(queries_of_row(over, 1), queries_of_row(alone, 0), strict=True):
        torch.testing.assert_close(padded, own)


@pytest.mark.parametrize("length", [1, 7, 128, 129, 131, 600])
def test_the_queries_that_are_kept_of_a_prompt_are_those_that_count(length):
    """Of one that is read at once, in pieces, and with a mask that hides nothing."""
    over = observed(length)._replace(places=None)
    visible = torch.ones(2, length, dtype=torch.bool)
    first = max(length // 3, 1)
    pieces, before = [(0, first), (first, length)][: 1 + (length > first)], None
    for start, stop in pieces:
        before = spread_queries(over._replace(queries=over.queries[:, :, start:stop], length=stop), before)
    ways = before, spread_queries(over, None), spread_queries(over._replace(valid=visible), None)
    for kept in ways:
        assert kept.queries.data_ptr() != over.queries.data_ptr()
        for row in (0, 1):
            for found, expected in zip(queries_of_row(kept, row), queries_of_row(observed(length), row), strict=True):
                assert torch.equal(found, expected)


@settings(max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(1, 50),
    st.sampled_from([None, 5.0]),
    st.integers(0, 2**20),
)
def test_heads_of_a_group_take_turns(heads, group, asked, whole, length, softcap, seed):
    random = np.random.default_rng(seed)
    queries, keys = random.normal(size=(heads * group, asked, 6)), random.normal(size=(heads, length, 6))
    weights, all_heads = random.random(asked), np.arange(asked) >= asked - whole
    weights[:-1][random.random(asked - 1) < 0.3] = 0  # kept for other ends
    weights /= weights.sum()
    found = attention_moments(
        *(torch.from_numpy(each).float() for each in (queries, weights, keys)),
        0.5,
        softcap,
        torch.from_numpy(all_heads),
    )
    expected = received_attention(queries, weights, keys, 0.5, softcap, all_heads)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(found[0].sum(-1), 1, rtol=1e-4)


def test_all_heads_count_if_nothing_is_said():
    random = np.random.default_rng(0)
    queries, keys, weights = random.normal(size=(6, 50, 8)), random.normal(size=(2, 30, 8)), random.random(50)
    found = attention_moments(*(torch.from_numpy(each).float() for each in (queries, weights, keys)), 0.5)
    expected = received_attention(queries, weights, keys, 0.5, None, np.ones(50, bool))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4)


@pytest.mark.parametrize("layout", ["tokens apart", "channels apart", "bfloat16", "one key", "narrow"])
def test_keys_may_lie_in_any_way(layout):
    """The compiled loop turns keys where they lie; `always_compiled` has it do so for few."""
    random = np.random.default_rng(1)
    width = 3 if layout == "narrow" else 37
    queries, weights = random.normal(size=(4, 50, width)), random.random(50)
    keys = torch.from_numpy(random.normal(size=(2, 1 if layout == "one key" else 101, width))).float()
    if layout == "tokens apart":
        keys = torch.cat([keys, keys + 1], dim=-1)[..., :width]
    elif layout == "channels apart":
        keys = keys.mT.contiguous().mT
    elif layout == "bfloat16":
        keys = keys.bfloat16()
    expected = received_attention(queries, weights, keys.double().numpy(), 0.5, None, np.ones(50, bool))
    with always_compiled():
        found = attention_moments(*(torch.from_numpy(each).float() for each in (queries, weights)), keys, 0.5)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4)
