"""With the switches off the answers are the same: hand-made LLVM beside plain loops, torch's threads beside ours."""

import os
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from grace_opt.errors import CacheError
from grace_opt.kernels._shared import stand_ins, threads, vectors
from grace_opt.kernels.cache import decode
from grace_opt.kernels.cache.decode import host, reference
from tests import starter

ROOT = Path(__file__).resolve().parent.parent
#: Large enough for every loop to be a compiled one.
SOLVE = """
import json, sys, torch, grace_opt
from grace_opt.kernels._shared import inner
from grace_opt.kernels.solve.extremes import extremes
W = torch.randn(30, 97, 97, generator=torch.Generator().manual_seed(0))
W, skew = W + W.mT, W
found = [grace_opt.solve(W, 40, method).indices.tolist() for method in ("mies", "drop_greedy", "local_search")]
found += [one.tolist() for one in extremes(skew)]
print(json.dumps([inner.least.__module__.rpartition(".")[2], found]))
"""


def both(name, *parameters):
    """A function of `vectors`, and of `stand_ins`, to be called from Python."""
    names = ", ".join(parameters)
    scope = {}
    for module in (vectors, stand_ins):
        code = f"def call({names}):\n    return function({names})"
        function = getattr(module, name)
        space = {"function": numba.njit(function) if module is stand_ins else function}
        exec(code, space)
        scope[module] = numba.njit(space["call"])
    return scope[vectors], scope[stand_ins]


def numbers(n, dtype, seed=0):
    """Many ties, and infinite ones."""
    rng = np.random.default_rng(seed)
    found = rng.integers(-4, 5, n).astype(dtype) + rng.choice([0.0, 0.25], n).astype(dtype)
    found[rng.random(n) < 0.1] = np.inf
    return found


@pytest.mark.parametrize(
    ("dtype", "wide"), [(np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float64)]
)
@pytest.mark.slow
def test_plain_loops_do_what_the_instructions_do(dtype, wide):
    """Around multiples of the vector length; scores at least as wide as W."""
    add_twice, least, first = both("add_twice", "a", "b"), both("least", "a"), both("first_place", "a", "v")
    exchange, largest = both("least_exchange", "a", "b", "c"), both("largest_bits", "a")
    for n in (1, 31, 32, 33, 65, 130):
        scores, row = numbers(n, wide), numbers(n, dtype, 1) / dtype(3)
        row[~np.isfinite(row)] = 0.1
        changed = [scores.copy(), scores.copy()]
        assert len({float(call(kept, row)) for call, kept in zip(add_twice, changed, strict=True)}) == 1
        assert changed[0].tolist() == changed[1].tolist()
        assert len({float(call(scores)) for call in least}) == 1
        for value in (scores.min(), scores[-1], wide(99)):
            assert len({call(scores, value) for call in first}) == 1
        assert len({float(call(row, scores, wide(0.3))) for call in exchange}) == 1
        # Of any two rows both take the same one for the larger: an infinite one, or one that is no number, is largest.
        rows = [row, row * 2, row * 0, np.full(n, np.nan, dtype), np.full(n, np.inf, dtype)]
        orders = [[call(one) > call(other) for one in rows[:4] for other in rows[:3]] for call in largest]
        assert orders[0] == orders[1]


@pytest.mark.slow
def test_plain_squares_differ_where_the_instructions_say_so():
    W = np.arange(16.0)[:, None] + np.arange(16.0)
    calls = both("differ", "a", "i", "j")
    for at in [None, (3, 12), (12, 3), (9, 9), (8, 15)]:
        changed = W.copy()
        if at is not None:
            changed[at] += 1.0
        for square in [(0, 0), (8, 0), (8, 8)]:
            assert calls[0](changed, *square) == calls[1](changed, *square)


@pytest.mark.slow
def test_answers_are_the_same_without_the_instructions():
    answers = {}
    for switch in ("1", "0"):
        env = os.environ | {"GRACE_OPT_LLVM": switch, "GRACE_OPT_OPENMP": switch, "PYTHONPATH": str(ROOT)}
        done = starter.python(SOLVE, env)
        assert done.returncode == 0, done.stderr
        answers[switch] = done.stdout
    assert answers["1"].replace('"vectors"', '"stand_ins"') == answers["0"]
    assert '"vectors"' in answers["1"]


def case():
    """Enough to read for several threads: query, what is stored, and values."""
    g = torch.Generator().manual_seed(0)
    kept = torch.rand(1, 2, 64, generator=g).argsort(-1)[..., :24].sort(-1).values
    shapes = (1, 4, 1, 64), (1, 2, 3000, 24), (1, 2, 4, 64), (1, 2, 32, 64), (1, 2, 3004, 64), (1, 2, 32, 64)
    query, keys, sinks, tail, old, new = (torch.randn(shape, generator=g) for shape in shapes)
    return query, keys, kept, sinks, tail, old, new


def test_decoding_is_the_same_in_threads_of_ours(monkeypatch, switch):
    """Bit for bit, as the result does not depend on who computes what."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "scarce", lambda: False)
    calls, original = [], threads.split_batch
    monkeypatch.setattr(threads, "split_batch", lambda *a, **kw: (calls.append(1), original(*a, **kw))[1])
    there = host.decode_attention(*case())
    in_team = not calls
    switch("GRACE_OPT_OPENMP", "0")
    calls.clear()
    assert threads.torch_team() is None
    assert threads.no_team_reason() == "GRACE_OPT_OPENMP=0"
    assert torch.equal(host.decode_attention(*case()), there)
    assert calls
    switch("GRACE_OPT_OPENMP", None)
    assert in_team == (threads.torch_team() is not None)


def test_decoding_without_the_instructions_is_torch_s(switch):
    query, keys, _, sinks, tail, old, new = case()
    assert decode.kernel_for(query, keys, sinks, tail, old, new) is host.decode_attention
    torch.testing.assert_close(host.decode_attention(*case()), reference.attention(*case())[0], rtol=0, atol=1e-5)
    switch("GRACE_OPT_LLVM", "0")
    assert decode.kernel_for(query, keys, sinks, tail, old, new) is None
    with pytest.raises(CacheError, match="GRACE_OPT_LLVM=0"):
        host.decode_attention(*case())
