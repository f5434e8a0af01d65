"""Kernels against their torch references: the same choices bit for bit."""

import itertools
import math
import os
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grace_opt
from grace_opt import objective
from grace_opt.kernels._shared import threads
from grace_opt.kernels.cache import received
from grace_opt.kernels.cache.received import host
from grace_opt.kernels.solve import greedy
from grace_opt.kernels.solve.extremes import extremes
from grace_opt.kernels.solve.greedy import cpu as compiled
from grace_opt.run import Run
from grace_opt.solvers import local_search
from grace_opt.testing import batches


@settings(max_examples=80)
@given(batches(max_n=12), st.sampled_from([torch.float32, torch.float64]))
def test_compiled_greedy_is_the_reference(drawn, dtype):
    W, k, protected = drawn
    with np.errstate(over="ignore"):
        W = torch.from_numpy(W / max(np.abs(W).max(), 1e-300)).to(dtype)
    scores = W.diagonal(dim1=-2, dim2=-1).masked_fill(torch.from_numpy(protected), torch.inf)
    ks, width = torch.from_numpy(k), int(k.max())
    expected = greedy.reference.greedy_order(W, scores, ks, width)
    order, rise = np.full(tuple(expected.order.shape), -1, dtype=np.int64), np.full(len(k), np.nan)
    mask = np.zeros(tuple(scores.shape), dtype=np.bool_)
    compiled.greedy(W.numpy(), scores.contiguous().numpy(), ~protected, k, order, mask, rise)
    assert order.tolist() == expected.order.tolist()
    assert mask.tolist() == expected.mask.tolist()
    assert rise.tolist() == expected.rise.tolist()
    chosen = torch.zeros(len(k), W.shape[-1], dtype=torch.float64)
    for row, picked in zip(chosen, order, strict=True):
        row[picked[picked >= 0]] = 1.0
    f = torch.einsum("bi,bij,bj->b", chosen, W.double(), chosen)
    torch.testing.assert_close(expected.rise, f, rtol=0, atol=40 * torch.finfo(dtype).eps * W.shape[-1] ** 2)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_greedy_in_blocks_and_what_is_left(dtype, wide):
    """Around multiples of the vector length, with ties at every step, and scores wider than W (drop_greedy's)."""
    g = torch.Generator().manual_seed(0)
    for n in (1, 7, 31, 32, 33, 63, 64, 65, 97, 130):
        W = torch.randint(-2, 3, (11, n, n), generator=g).to(dtype)
        W = W + W.mT
        candidates = torch.rand(11, n, generator=g) < 0.9
        scores = greedy.first_scores(W, candidates).to(torch.promote_types(wide, dtype))
        k = (candidates.sum(-1) * torch.rand(11, generator=g)).long()
        for start in (scores, scores[:, :0]) if scores.dtype == dtype else (scores,):  # or from the diagonal
            found = [np.full((11, n), -1), np.zeros((11, n), dtype=np.bool_), np.zeros(11)]
            compiled.greedy(W.numpy(), start.numpy(), candidates.numpy(), k.numpy(), *found)
            for one, other in zip(found, greedy.reference.greedy_order(W, scores, k, n), strict=True):
                assert one.tolist() == other.tolist()


def test_compiled_greedy_stays_inside_its_arrays():
    """check=False lets numbers through that are none; the choice is worthless then, and nothing else is touched."""
    W = np.full((2, 40, 40), np.nan, dtype=np.float32)
    order, mask = np.full((2, 3), -1), np.zeros((2, 40), dtype=np.bool_)
    compiled.greedy(W, W[:, 0], mask | True, np.array([3, 3]), order, mask, np.zeros(2))
    assert ((order >= 0) & (order < 40)).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_large_batches_take_the_compiled_loop(monkeypatch, transposed):
    g = torch.Generator().manual_seed(0)
    G = torch.randn(30, 90, 90, generator=g)
    W = (G @ G.mT) / 90
    W = W.mT if transposed else W
    scores = W.diagonal(dim1=-2, dim2=-1)
    before = scores.clone()
    k = torch.full((30,), 80)
    used, original = [], compiled.greedy
    monkeypatch.setattr(compiled, "greedy", lambda *a: (used.append(1), original(*a)))
    every = torch.ones(30, 90, dtype=torch.bool)
    found, expected = greedy.greedy_order(W, scores, every, k, 80), greedy.reference.greedy_order(W, scores, k, 80)
    assert torch.equal(greedy.greedy_order(W, None, every, k, 80).order, expected.order)
    assert used
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.rise, expected.rise)
    assert torch.equal(scores, before)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_exchanges_are_the_reference_s(whole):
    """Ties included where W is whole; the same number of steps, the same limits."""
    g = torch.Generator().manual_seed(int(whole))
    spec = grace_opt.registry.get("local_search")
    for n in (1, 2, 5, 31, 33, 64, 70):
        W = torch.randint(-3, 4, (5, n, n), generator=g).float() if whole else torch.randn(5, n, n, generator=g)
        protected = torch.rand(5, n, generator=g) < 0.2
        k = ((~protected).sum(-1) * torch.rand(5, generator=g)).long()
        problem = grace_opt.problem.Problem.of(W + W.mT, k, protected=protected)
        start = grace_opt.solve(W + W.mT, k, "random", protected=protected).mask
        for most in (None, 0, 1, 3):
            found = spec.solve(problem, spec.make_options({"start": start, "max_steps": most}), Run())
            expected = local_search._torch(problem, start.clone(), most, Run())
            assert torch.equal(found.mask, expected.mask)
            assert torch.equal(found.limit, expected.limit)
            assert found.stats == expected.stats


def test_compiled_exchanges_look_at_the_clock(monkeypatch):
    """With a look after every step nothing changes."""
    W = torch.randn(4, 40, 40, generator=torch.Generator().manual_seed(0))
    W = W + W.mT
    free = grace_opt.solve(W, 15, "local_search", start="random")
    monkeypatch.setattr(local_search, "PAIRS_PER_LOOK", 1)
    looked = grace_opt.solve(W, 15, "local_search", start="random", time_limit=60.0)
    assert torch.equal(free.mask, looked.mask)
    assert free.stats["iterations"] == looked.stats["iterations"] > 3


class TestPasses:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
    def test_extremes_are_torch_s(self, shape, dtype, monkeypatch):
        g = torch.Generator().manual_seed(1)
        W = torch.randn(*shape, 45, 45, generator=g, dtype=dtype)
        symmetric = (W + W.mT) / 2
        nearly = symmetric.clone()
        nearly[..., 40, 3] += 1e-3
        spoiled = [symmetric.clone() for _ in range(3)]
        for one, bad in zip(spoiled, (torch.inf, -torch.inf, torch.nan), strict=True):
            one[..., 44, 0] = bad
        tiny, huge = 1e-43 * W, (W.double() * 1e38).to(dtype)
        if shape:  # instances are judged by themselves
            tiny[0], spoiled[0][-1] = 1.0, 1.0
        for case in (W, symmetric, nearly, -symmetric, *spoiled, symmetric * 0, symmetric.mT * 1e30, tiny, huge):
            found = []
            for start in (0, 10**12):
                monkeypatch.setattr(threads, "COMPILE_FROM", start)
                found.append(extremes(case))
            assert all(torch.equal(a, b) and a.shape == shape for a, b in zip(*found, strict=True))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("n", [7, 19])
    def test_every_entry_is_looked_at(self, n, dtype, monkeypatch):
        monkeypatch.setattr(threads, "COMPILE_FROM", 0)
        W = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=dtype)
        W = W + W.mT
        for i, j in itertools.product(range(n), repeat=2):
            changed, spoiled = W.clone(), W.clone()
            changed[i, j] += 100
            spoiled[i, j] = torch.nan
            worst = 0.0 if i == j else float((changed.double() - changed.mT.double()).abs().max())
            assert [x.item() for x in extremes(changed)] == [True, float(changed.abs().max()), worst]
            assert not extremes(spoiled).finite

    def test_indices_are_torch_s(self, monkeypatch):
        mask = torch.rand(9, 45, generator=torch.Generator().manual_seed(0)) < 0.3
        mask[2], mask[3] = False, True
        found = []
        for start in (0, 10**12):
            monkeypatch.setattr(threads, "COMPILE_FROM", start)
            found.append(objective.indices_from_mask(mask, 45).tolist())
        assert found[0] == found[1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_objective_is_the_sum(self, dtype, monkeypatch):
        monkeypatch.setattr(threads, "COMPILE_FROM", 0)
        g = torch.Generator().manual_seed(1)
        W, mask = torch.randn(3, 2, 40, 40, generator=g, dtype=dtype), torch.rand(3, 2, 40, generator=g) < 0.5
        mask[0, 0] = False
        x = mask.double()
        found = objective.evaluate(W, mask)
        assert found.shape == (3, 2)
        torch.testing.assert_close(found, torch.einsum("abi,abij,abj->ab", x, W.double(), x), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("start", [0, 10**12])
    def test_objective_is_rounded_once(self, start, monkeypatch):
        """Pairs of numbers do not hold what decides on which side of a tie the sum lies."""
        monkeypatch.setattr(threads, "COMPILE_FROM", start)
        for tail in (1e-30, -1e-30, 1e-300, -(2.0**-60), 0.0):
            for terms in ([2.0**53 + 2, 1.0, tail], [2.0**53, 1.0, tail], [2.0**53, -0.5, tail], [1.0, 2.0**-54, tail]):
                W = torch.diag(torch.tensor(terms, dtype=torch.float64)).expand(2, 3, 3)
                found = objective.evaluate(W, torch.ones(2, 3, dtype=torch.bool))
                assert found.tolist() == [math.fsum(terms)] * 2

    @pytest.mark.parametrize("start", [0, 10**12])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_objective_of_few_digits_is_rounded_once(self, dtype, start, monkeypatch):
        """Their sums often lie in the middle of two numbers, and pairs hold them unless some are tiny."""
        monkeypatch.setattr(threads, "COMPILE_FROM", start)
        for terms in ([2.0**30, 2.0**-23], [2.0**30 + 2.0**7, 2.0**-23], [2.0**30, -(2.0**-24)], [2.0**30, -(2.0**30)]):
            for tail in (0.0, 2.0**-100, -(2.0**-100), 2.0**-40, 2.0**-76, -(2.0**-77), 2.0**-130):
                W = torch.diag(torch.tensor([*terms, tail])).expand(2, 3, 3)
                found = objective.evaluate(W, torch.ones(2, 3, dtype=torch.bool))
                assert found.tolist() == [math.fsum([*terms, tail])] * 2
        g = torch.Generator().manual_seed(2)
        wide = 3 if dtype == torch.float16 else 9
        W = torch.randn(40, 30, 30, generator=g).mul_(torch.randn(40, 30, 30, generator=g).mul_(wide).exp2_()).to(dtype)
        mask = torch.rand(40, 30, generator=g) < 0.5
        expected = [math.fsum(w[own][:, own].flatten().tolist()) for w, own in zip(W, mask, strict=True)]
        assert objective.evaluate(W, mask).tolist() == expected

    def test_a_forked_process_has_threads_of_its_own(self):
        """The pool's threads do not survive a fork; the child must not wait for them."""
        g = torch.Generator().manual_seed(0)
        W = torch.randn(40, 80, 80, generator=g)
        W = W + W.mT
        expected = grace_opt.solve(W, 40).indices.tolist()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(2)
            os._exit(0 if grace_opt.solve(W, 40).indices.tolist() == expected else 1)
        deadline = time.monotonic() + 60
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        if done == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert done != (0, 0), "the child waits for threads that it does not have"
        assert os.waitstatus_to_exitcode(done[1]) == 0


@pytest.mark.parametrize("team", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_sums_of_attention_are_the_reference_s(team, dtype, monkeypatch):
    """For numbers of queries and keys that fill their blocks, and those that do not; whatever the threads are."""
    if not team:
        monkeypatch.setattr(threads, "torch_team", lambda: None)
    g = torch.Generator().manual_seed(1)
    for heads, rows, length, width in ((1, 1, 1, 1), (2, 4, 24, 8), (1, 17, 25, 3), (3, 261, 95, 16), (1, 515, 49, 20)):
        queries, keys = (torch.randn(heads, n, width, generator=g).to(dtype) for n in (rows, length))
        keys[:, :1] += 8  # one that takes nearly all of the attention
        weights = torch.rand(rows, generator=g)
        found = host.attention_received(queries, weights, keys, 0.7)
        expected = received.reference.attention_received(queries, weights, keys, 0.7, None, 64)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-12)
        assert torch.allclose(found[0].sum(1), weights.sum().expand(heads), rtol=1e-4)
