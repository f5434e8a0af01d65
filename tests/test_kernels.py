"""Kernels against their torch references: the same choices bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt.kernels import greedy
from grace_opt.testing import batches


@settings(max_examples=80)
@given(batches(max_n=12), st.sampled_from([torch.float32, torch.float64]))
def test_compiled_greedy_is_the_reference(drawn, dtype):
    W, k, protected = drawn
    with np.errstate(over="ignore"):
        W = torch.from_numpy(W / max(np.abs(W).max(), 1e-300)).to(dtype)
    scores = W.diagonal(dim1=-2, dim2=-1).masked_fill(torch.from_numpy(protected), torch.inf)
    ks, width = torch.from_numpy(k), int(k.max())
    expected = greedy.torch_order(W, scores, ks, width)
    order = np.full(tuple(expected.shape), -1, dtype=np.int64)
    greedy._compiled()(W.numpy(), scores.contiguous().numpy().copy(), k, order)
    assert order.tolist() == expected.tolist()


@pytest.mark.parametrize("transposed", [False, True])
def test_large_batches_take_the_compiled_loop(monkeypatch, transposed):
    g = torch.Generator().manual_seed(0)
    G = torch.randn(30, 90, 90, generator=g)
    W = (G @ G.mT) / 90
    W = W.mT if transposed else W
    scores = W.diagonal(dim1=-2, dim2=-1)
    before = scores.clone()
    k = torch.full((30,), 80)
    used = []
    compiled = greedy._compiled()
    monkeypatch.setattr(greedy, "_compiled", lambda: lambda *a: (used.append(1), compiled(*a)))
    order = greedy.greedy_order(W, scores, k, 80)
    assert used
    assert torch.equal(order, greedy.torch_order(W, scores, k, 80))
    assert torch.equal(scores, before)
