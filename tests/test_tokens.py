"""Tokens as vertices: W in factors, and the greedy order of drops, against loops that form everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt import solve
from grace_opt.attention.tokens import TokenGraph, drop_order, formed, output_change, own_losses
from grace_opt.errors import ProblemError
from tests import oracle


def draw(seed, tokens=9, queries=4, width=3, heads=2):
    """Some heads' attention and values, float64, and how much each query counts; no two tokens are alike."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(heads, queries, tokens, generator=generator, dtype=torch.float64)
    values = torch.randn(heads, tokens, width, generator=generator, dtype=torch.float64) + 3  # not centred
    return TokenGraph.of(logits.softmax(-1), values, torch.rand(queries, generator=generator, dtype=torch.float64))


def of_head(graph, head):
    return graph.attention[head].numpy(), graph.values[head].numpy(), graph.weights.tolist()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 7), queries=st.integers(1, 4))
def test_formed_weights_and_errors_are_those_of_the_loops(seed, tokens, queries):
    graph = draw(seed, tokens, queries)
    dropped = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
    dropped[:, 0] = False
    W = formed(graph)
    for head in range(2):
        S, parts = dropped[head].nonzero()[:, 0].tolist(), of_head(graph, head)
        np.testing.assert_allclose(W[head], oracle.token_interaction(*parts), atol=1e-12)
        assert oracle.objective(W[head], S) == pytest.approx(
            oracle.dropped_tokens_error(*parts, S, False), abs=1e-12
        )  # f is the error to first order
        for renormalise in (False, True):
            expected = oracle.dropped_tokens_error(*parts, S, renormalise)
            assert float(output_change(graph, dropped, renormalise)[head]) == pytest.approx(
                expected, rel=1e-6, abs=1e-12
            )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), renormalise=st.booleans(), count=st.integers(0, 6))
def test_one_at_a_time_is_the_greedy_order_of_the_loops(seed, renormalise, count):
    graph = draw(seed)
    candidates = torch.ones(9, dtype=torch.bool)
    candidates[[2, 8]] = False
    order = drop_order(graph, count, candidates, 1, renormalise)
    for head in range(2):
        expected = oracle.drop_tokens(*of_head(graph, head), count, renormalise, kept=(2, 8))
        assert order[head, :count].tolist() == expected
        assert sorted(order[head].tolist()) == candidates.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("block", [1, 5, 40])
def test_without_renormalisation_it_is_mies_on_the_formed_weights(block):
    graph = draw(3, tokens=40, queries=8)
    found = drop_order(graph, 20, torch.ones(40, dtype=torch.bool), block, renormalise=False)[:, :20]
    expected = solve(formed(graph), 20, "mies", path=True).stats["order"][:, :20]
    if block in (1, 40):  # one round whose shortlist has all tokens is exact, too
        assert torch.equal(found, expected)
    mine, best = (
        output_change(graph, torch.zeros(2, 40, dtype=torch.bool).scatter_(1, order, True))
        for order in (found, expected)
    )
    assert (mine <= 3 * best).all()  # blocks may lose something, and not much


@pytest.mark.parametrize("renormalise", [False, True])
def test_without_rounds_each_token_is_judged_by_its_own_loss(renormalise):
    graph = draw(4)
    found = own_losses(graph, renormalise)
    for head in range(2):
        alone = [oracle.dropped_tokens_error(*of_head(graph, head), [i], renormalise) for i in range(9)]
        np.testing.assert_allclose(found[head], alone, rtol=1e-9)
    graph = TokenGraph.of(graph.attention.float(), graph.values.float())
    far = TokenGraph.of(graph.attention, graph.values + 1000)
    torch.testing.assert_close(own_losses(far, renormalise), own_losses(graph, renormalise), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("block", [1, 4, 0.25])
def test_heads_together_are_heads_one_by_one(renormalise, block):
    graph, candidates = draw(5, tokens=30, queries=6, heads=3), torch.arange(30) < 26
    together = drop_order(graph, 17, candidates, block, renormalise)
    for head in range(3):
        some = slice(head, head + 1)
        alone = TokenGraph(graph.attention[some], graph.outputs[some], graph.values[some], graph.weights)
        assert torch.equal(drop_order(alone, 17, candidates, block, renormalise), together[some])


def test_smaller_counts_of_a_share_are_nested_in_larger_ones():
    graph, every = draw(7, tokens=30, queries=6), torch.ones(30, dtype=torch.bool)
    one, two = (drop_order(graph, count, every, 3) for count in (9, 21))
    assert torch.equal(one[:, :9], two[:, :9])


def test_unseen_tokens_go_first_and_values_may_be_far_from_zero():
    graph = draw(9, tokens=20)
    attention = graph.attention.float()
    attention[:, :, [3, 11]] = 0
    attention /= attention.sum(-1, keepdim=True)
    every = torch.ones(20, dtype=torch.bool)
    plain = drop_order(TokenGraph.of(attention, graph.values.float()), 10, every, 1)
    assert plain[:, :2].tolist() == [[3, 11]] * 2
    far = drop_order(TokenGraph.of(attention, graph.values.float() + 1000), 10, every, 1)
    assert torch.equal(far[:, :5], plain[:, :5])


def test_all_attention_may_be_dropped():
    graph = draw(11, tokens=12)
    order = drop_order(graph, 12, torch.ones(12, dtype=torch.bool), 3)
    assert sorted(order[0].tolist()) == list(range(12))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenGraph.of(torch.ones(1, 2, 3), torch.ones(1, 4, 5)), r"expected \(B, R, T\)"),
        (lambda: TokenGraph.of(torch.ones(1, 2, 3), torch.ones(1, 3, 5), torch.ones(3)), r"expected \(2,\)"),
        (lambda: drop_order(draw(0), 8, torch.arange(9) < 7), "there are 7 tokens to drop from"),
    ],
)
def test_what_does_not_fit(make, message):
    with pytest.raises(ProblemError, match=message):
        make()


@pytest.mark.parametrize("block", [0.2, None])
def test_a_token_with_nearly_all_attention_stays_also_in_single_precision(block):
    attention = torch.full((16, 6, 50), 2e-6)
    attention[..., 0] = 1 - 49 * 2e-6
    values = torch.randn(16, 50, 8, generator=torch.Generator().manual_seed(0)) + 3
    values[:, 0] = 0.5
    graph = TokenGraph.of(attention, values)
    if block is None:
        order = own_losses(graph).argsort(dim=-1)
    else:
        order = drop_order(graph, 49, torch.ones(50, dtype=torch.bool), block)
    assert (order[:, -1] == 0).all()
