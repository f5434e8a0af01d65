"""`GraphEviction`: its W and its choice against loops over numbers; values reach only evictions that read them."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

from grace_opt.attention.tokens import formed
from grace_opt.errors import OptionError, ProblemError
from grace_opt.hf import CacheConfig, GraphEviction, attach
from grace_opt.hf.evict.kept_tokens import kept_tokens
from grace_opt.hf.evict.names import eviction_from_dict, eviction_named, eviction_to_dict
from grace_opt.hf.models import load_pocket
from grace_opt.hf.tools.needle import make_prompt
from tests import oracle

SCALING = 0.7
SETTINGS = {"window": 3, "observed": 5, "averages": 4, "block": 1}


def draw(length, padding=(0,), heads=2, group=2, seed=0):
    """Queries, keys and values of some prompts, and which tokens are real; padding is loud."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys, values = (
        torch.randn(len(padding), count, length, 4, generator=generator, dtype=torch.float64)
        for count in (heads * group, heads, heads)
    )
    valid = torch.ones(len(padding), length, dtype=torch.bool)
    for row, count in enumerate(padding):
        valid[row, :count] = False
        for part in (queries, keys, values):
            part[row, :, :count] = 30.0
    return queries, keys, values, valid


def loops(method, queries, keys, softcap=None):
    """Of one head: the probabilities of every observed query and every average, and how much each counts."""
    length, rows, weights = len(keys), [], []
    places = [list(range(max(length - method.observed, 0), length))]
    places.append(list(range(length - 1, -1, -method.stride))[::-1] if method.stride else [])
    sets = []
    for some, share in zip(places, (1, 2), strict=True):
        count = min(method.averages, len(some))
        cuts = itertools.pairwise(number * len(some) // count for number in range(count + 1)) if count else ()
        sets.append((share, [some[first:end] for first, end in cuts]))
    total = sum(share for share, runs in sets if runs)
    for query in queries:
        seen = []
        for place in range(length):
            logits = [SCALING * float(np.dot(query[place], key)) for key in keys[: place + 1]]
            if softcap is not None:
                logits = [softcap * math.tanh(x / softcap) for x in logits]
            powers = [math.exp(x) for x in logits]
            seen.append([x / sum(powers) for x in powers] + [0.0] * (length - place - 1))
        for share, runs in sets:
            rows += [np.mean([seen[place] for place in run], axis=0) for run in runs]
            weights += [share / total / len(runs) / len(queries) for _ in runs]
    return rows, weights


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("changes", [{}, {"stride": 0}, {"observed": 0, "stride": 2}, {"stride": 5, "averages": 50}])
@pytest.mark.parametrize("renormalise", [False, True])
def test_the_choice_is_that_of_the_loops(softcap, changes, renormalise):
    method = GraphEviction(6, renormalise=renormalise, **{**SETTINGS, "stride": 1, **changes})
    queries, keys, values, _ = draw(13)
    needed = method.queries_needed
    seen = queries if needed is None else queries[:, :, max(13 - needed, 0) :]
    graph = method.graph(seen[0], keys[0], values[0], SCALING, softcap)
    W = formed(graph)
    found = method.scores(seen, keys, None, SCALING, softcap, values=values)
    for head in range(2):
        rows, weights = loops(method, queries[0, 2 * head : 2 * head + 2].numpy(), keys[0, head].numpy(), softcap)
        np.testing.assert_allclose(W[head], oracle.token_interaction(rows, values[0, head], weights), atol=1e-12)
        dropped = oracle.drop_tokens(rows, values[0, head].numpy(), weights, 7, renormalise, kept=(10, 11, 12))
        assert found[0, head].argsort()[:7].tolist() == dropped
        assert torch.isposinf(found[0, head, 10:]).all()


@pytest.mark.parametrize("scale", [1.0, 1e-60, 1e60])
@pytest.mark.parametrize("renormalise", [False, True])
def test_without_blocks_tokens_go_by_their_own_losses(renormalise, scale):
    method = GraphEviction(6, renormalise=renormalise, **{**SETTINGS, "stride": 2, "block": None})
    queries, keys, values, _ = draw(13)
    found = method.scores(queries, keys, None, SCALING, values=scale * values)
    assert torch.isposinf(found[..., 10:]).all()
    for head in range(2):
        rows, weights = loops(method, queries[0, 2 * head : 2 * head + 2].numpy(), keys[0, head].numpy())
        parts = np.array(rows), values[0, head].numpy(), weights
        losses = [oracle.dropped_tokens_error(*parts, [i], renormalise) for i in range(10)]
        assert found[0, head, :10].argsort().tolist() == np.argsort(losses).tolist()


@pytest.mark.parametrize("padded", [1, 5, 9])
def test_a_padded_row_keeps_what_it_keeps_alone(padded):
    method = GraphEviction(8, **SETTINGS)
    queries, keys, values, valid = draw(16, (0, padded))
    together = kept_tokens(method, queries, keys, valid, SCALING, 0, 1, values=values)
    if 16 - padded <= 8:
        assert together[1].tolist() == [list(range(8, 16))] * 2
        return
    alone = [part[1:, :, padded:] for part in (queries, keys, values)]
    expected = kept_tokens(method, *alone[:2], None, SCALING, 0, 1, values=alone[2])
    assert torch.equal(together[1:] - padded, expected)


def test_nothing_but_padding_and_other_numbers_of_heads_at_once(monkeypatch):
    method = GraphEviction(6, **SETTINGS)
    queries, keys, values, valid = draw(13, (0, 13))
    whole = method.scores(queries, keys, valid, SCALING, values=values)
    assert torch.isneginf(whole[1]).all()
    for name, few in (("evict.graph_eviction.MAX_WEIGHTS", 1), ("evict.received.CACHED_LOGITS", 2 * 13 * 2)):
        monkeypatch.setattr(f"grace_opt.hf.{name}", few)
        assert torch.equal(method.scores(queries, keys, valid, SCALING, values=values), whole)


def test_without_a_window_the_last_tokens_get_half_of_the_budget():
    queries, keys, values, _ = draw(13)
    settings = {**SETTINGS, "window": None}
    for budget, half in ((6, 3), (7, 3), (0.45, 3)):  # a share is of 13 tokens, rounded up
        found = GraphEviction(budget, **settings).scores(queries, keys, None, SCALING, values=values)
        same = GraphEviction(budget, **{**settings, "window": half}).scores(queries, keys, None, SCALING, values=values)
        assert torch.equal(found, same)
        assert torch.isposinf(found[..., -half:]).all()
        assert torch.isfinite(found[..., :-half]).all()


def test_tokens_without_attention_go_first_and_nothing_is_nan():
    method = GraphEviction(6, **SETTINGS)
    queries, keys, values, _ = (part.half() for part in draw(13))
    queries, page = queries.abs() + 0.1, torch.tensor([2, 3, 4])
    keys[:, :, page] = -1e4  # no query, all above zero, has a probability for these that is not zero
    found = method.scores(queries, keys, None, SCALING, values=values)
    assert found.dtype == torch.float32
    assert not found.isnan().any()
    assert (found[:, :, page] < 3).all()


def test_values_go_to_evictions_that_ask_for_them():
    class Old:
        queries_needed = 0

        def tokens(self, layer, layers, length):
            return 2

        def scores(self, queries, keys, valid, scaling, softcap=None):
            return keys[..., 0].float()

    class New(Old):
        def scores(self, queries, keys, valid, scaling, softcap=None, *, values=None):
            return values[..., 0].float()

    keys, values = torch.arange(5.0).view(1, 1, 5, 1), torch.arange(5.0).flip(0).view(1, 1, 5, 1)
    for method, kept in ((Old(), [3, 4]), (New(), [0, 1])):
        assert kept_tokens(method, keys[:, :, :0], keys, None, 1.0, 0, 1, values=values).tolist() == [[kept]]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.25, 100])
def test_in_a_cache_it_keeps_the_budget_and_comes_back_from_a_file(budget):
    model, tokenizer = load_pocket()
    task = make_prompt(300, depth=0.5, count=lambda text: len(tokenizer(text).input_ids), seed=1)
    inputs = tokenizer(task.text, return_tensors="pt")
    evict = GraphEviction(budget, block=None if budget == 100 else 0.1)
    with attach(model, ratio=0.0, evict=evict) as attached:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    layer, length = attached.cache.layers[0], inputs.input_ids.shape[1]
    assert layer.pruned_length + layer.plan.config.recent_window == evict.count(length)
    config = CacheConfig.from_dict(json.loads(json.dumps(CacheConfig(evict=evict).to_dict())))
    assert config.evict == evict
    assert CacheConfig(evict="graph").evict == eviction_named("Graph") == GraphEviction()
    assert eviction_from_dict(eviction_to_dict(evict)) == evict


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GraphEviction(16, window=32), "a budget of at least 32"),
        (lambda: GraphEviction(observed=0, stride=0), ">= 1"),
        (lambda: GraphEviction(block=0), ">= 1; or a share of the tokens left"),
        (lambda: GraphEviction(block=1.0), "give a number of tokens, an integer, or a share"),
        (lambda: GraphEviction(renormalise=1), "True or False"),
        (lambda: GraphEviction(window_size=4), "write window="),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_missing_or_other_values_are_named():
    queries, keys, values, _ = draw(13)
    for given, message in ((None, "values missing"), (values[:, :, 1:], r"values of shape \(1, 2, 12, 4\)")):
        with pytest.raises(ProblemError, match=message):
            GraphEviction(6, **SETTINGS).scores(queries, keys, None, SCALING, values=given)
