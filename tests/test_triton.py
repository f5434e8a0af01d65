"""The kernels for the GPU, on one if there is one and else in triton's interpreter, against their references."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt import solve
from grace_opt.attention import weights
from grace_opt.errors import OptionError, ProblemError
from grace_opt.kernels.solve.greedy import cost_path, reference
from tests.mutants import mutant

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
triton = pytest.importorskip("triton")
from grace_opt.kernels.solve.exchange import gpu as exchange  # noqa: E402 (only after that)
from grace_opt.kernels.solve.greedy import gpu as greedy  # noqa: E402
from grace_opt.kernels.solve.interaction import gpu as interaction  # noqa: E402
from tests import interpreter  # noqa: E402, F401 (cheaper launches)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = [torch.float16, torch.bfloat16]
SEEDS = st.integers(0, 2**32 - 1)


def test_these_tests_run_something():
    jit = isinstance(greedy._greedy_kernel, triton.JITFunction)
    assert jit == (DEVICE == "cuda"), "triton was imported before TRITON_INTERPRET=1 was set: set it in the environment"


def random_W(size, n, dtype, integer, seed):
    """Symmetric and not positive semidefinite; integers are small, so that there are ties."""
    g = torch.Generator().manual_seed(seed)
    W = torch.randint(-2, 3, (size, n, n), generator=g).float() if integer else torch.randn(size, n, n, generator=g)
    return (W + W.mT).to(dtype)


# The greedy order


def check_greedy(W, scores, k, k_max):
    """The same as the reference, bit for bit."""
    before = scores.clone()
    expected = reference.greedy_order(W, scores, k, k_max)
    # Views with other strides than the reference gets, entries between theirs being NaN.
    spread = torch.full((*W.shape, 2), torch.nan, dtype=W.dtype, device=DEVICE)[..., 0].copy_(W).mT
    there, ks = scores.to(DEVICE).mT.contiguous().mT, torch.stack([k, -k - 1], 1).to(DEVICE)[:, 0]
    taken = greedy.greedy_order(spread, there, ks, k_max)
    assert taken.order.tolist() == expected.order.tolist()
    assert taken.order.dtype == torch.int64
    assert taken.rise.tolist() == expected.rise.tolist()
    assert torch.equal(there.cpu(), before)
    plain = greedy.greedy_order(W.to(DEVICE), there, ks, k_max)
    assert torch.equal(plain.order, taken.order)
    return taken


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 7, 8, 13, 17]),
    st.sampled_from([torch.float32, torch.float32, torch.float64, *HALF]),
    st.booleans(),
    st.booleans(),
    SEEDS,
)
def test_greedy_takes_what_the_reference_takes(size, n, dtype, integer, wide, seed):
    rng = np.random.default_rng(seed)
    W = random_W(size, n, dtype, integer, seed)
    scores = W.diagonal(dim1=-2, dim2=-1).to(torch.float64 if wide else torch.promote_types(dtype, torch.float32))
    allowed = torch.from_numpy(rng.random((size, n)) < rng.choice([0.5, 0.9, 1.0]))
    k = torch.from_numpy(rng.integers(0, allowed.sum(-1).numpy() + 1))
    k_max = int(k.max()) + int(rng.integers(0, 3))
    taken = check_greedy(W, scores.masked_fill(~allowed, torch.inf), k, k_max)
    if integer:
        path = cost_path(W, taken.order.cpu())
        assert torch.equal(taken.rise.cpu(), path.gather(1, k[:, None])[:, 0])


@pytest.mark.parametrize("n", [128, 200, 256])
def test_greedy_of_many_vertices(n):
    W = random_W(2, n, torch.float32, True, n)
    check_greedy(W, W.diagonal(dim1=-2, dim2=-1).contiguous(), torch.tensor([12, 5]), 12)


def test_greedy_of_nothing():
    for size, n, k_max in ((0, 4, 2), (2, 4, 0), (2, 0, 0)):
        W, scores = torch.zeros(size, n, n, device=DEVICE), torch.zeros(size, n, device=DEVICE)
        taken = greedy.greedy_order(W, scores, torch.zeros(size, dtype=torch.int64, device=DEVICE), k_max)
        assert taken.order.tolist() == [[-1] * k_max] * size
        assert taken.rise.tolist() == [0.0] * size


def test_greedy_refuses():
    W, scores, k = torch.zeros(2, 3, 3), torch.zeros(2, 3), torch.ones(2, dtype=torch.int64)
    for bad in (
        (torch.zeros(3, 3), scores, k),
        (torch.zeros(2, 3, 4), scores, k),
        (W.long(), scores, k),
        (W, torch.zeros(2, 4), k),
        (W, scores.long(), k),
        (W, scores, k[:1]),
        (W, scores, k.int()),
        (W, scores.to("meta"), k),
        (torch.zeros(2, 257, 257), torch.zeros(2, 257), k),
    ):
        with pytest.raises(ProblemError):
            greedy.greedy_order(*bad, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("score + (row + row)", "score + row"),
        ('vertex == best, float("inf"), score', "vertex == best, score, score"),
        ("for step in range(k)", "for step in range(k_max)"),
        ('mask=inside, other=float("inf"))', "mask=inside, other=-99.0)"),
        ("least, best = tl.min(score", "least, best = tl.max(score"),
        ("row_of = W + b * W_b + vertex * W_j\n    order", "row_of = W + vertex * W_j\n    order"),
    ],
)
def test_a_wrong_greedy_is_noticed(monkeypatch, tmp_path, old, new):
    monkeypatch.setattr(greedy, "_greedy_kernel", mutant(greedy, old, new, tmp_path)._greedy_kernel)
    W = random_W(2, 9, torch.float32, True, 5)
    with pytest.raises(AssertionError):
        check_greedy(W, W.diagonal(dim1=-2, dim2=-1).contiguous(), torch.tensor([3, 6]), 7)


# Exchanges


def check_swap(W, mask, candidates, steps):
    before = mask.clone()
    start = torch.stack([mask, ~mask], -1).to(DEVICE)[..., 0]
    found = exchange.swap_refine(W.to(DEVICE).mT, start, candidates.to(DEVICE), steps)
    k = mask.sum(-1)
    expected = solve(W, k, "local_search", protected=~candidates, start=mask, max_steps=steps).mask
    assert found.tolist() == expected.tolist()
    assert found.dtype == torch.bool
    assert torch.equal(start.cpu(), before)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(1, 3), st.sampled_from([2, 3, 7, 8, 13, 17]), st.sampled_from([0, 1, 2, 50]), SEEDS, st.booleans())
def test_exchanges_are_those_of_local_search(size, n, steps, seed, in_parts):
    rng = np.random.default_rng(seed)
    W = random_W(size, n, torch.float32, True, seed) * int(rng.choice([1, 1000]))
    candidates = torch.from_numpy(rng.random((size, n)) < rng.choice([0.6, 1.0]))
    mask = candidates & torch.from_numpy(rng.random((size, n)) < 0.5)
    with pytest.MonkeyPatch.context() as patch:
        if in_parts:
            patch.setattr(exchange, "ENTRIES_AT_ONCE", 64)
        check_swap(W, mask, candidates, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_exchanges_of_real_numbers_end_in_local_optima(dtype):
    W = random_W(2, 24, dtype, False, 1)
    mask = torch.arange(24).expand(2, 24) < 9
    check_swap(W, mask.clone(), torch.ones_like(mask), 100)


@pytest.mark.slow
@pytest.mark.parametrize("n", [128, 201])
def test_exchanges_of_many_vertices(n):
    W = random_W(1, n, torch.float32, True, 2)
    check_swap(W, torch.arange(n)[None] < 60, torch.ones(1, n, dtype=torch.bool), 3)


@pytest.mark.slow
@pytest.mark.parametrize("giant", [2.0**30, 2.0**60, 1e280])
def test_exchanges_beside_giants(giant):
    """A protected giant, one that is never chosen, one that leaves, and giants whose exchange is in doubt."""
    W = random_W(4, 9, torch.float64, True, 7)
    W[0, 8, 8] = W[1, 0, 0] = giant
    W[2, 0, :] = W[2, :, 0] = giant
    W[3, :3, :3] = torch.tensor([[1.0, 1, -1], [1, 1, -1], [-1, -1, 1]], dtype=torch.float64) * giant
    W[3, 1, 1] -= torch.finfo(torch.float64).eps * giant
    W[3, 3:, :3], W[3, :3, 3:] = 0, 0
    W[3, 3, 3] += 50
    candidates, start = torch.ones(4, 9, dtype=torch.bool), torch.tensor([[0, 1, 2], [1, 2, 3], [0, 1, 2], [0, 2, 3]])
    candidates[0, 8] = False
    mask = torch.zeros(4, 9, dtype=torch.bool).scatter_(1, start, True)
    for steps in (1, 50):
        check_swap(W, mask, candidates, steps)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("change + tolerance * ends) < 0", "change) < 0"),
        ("& (careful == 0), 1, 0)", "& (careful == 0), 0, 0)"),
        ("2 * tl.sum(tl.abs(w), 0)", "1e20 * tl.sum(tl.abs(w), 0)"),
    ],
)
def test_exchanges_that_miscount_rounding_are_noticed(monkeypatch, tmp_path, old, new):
    monkeypatch.setattr(exchange, "_swap_kernel", mutant(exchange, old, new, tmp_path)._swap_kernel)
    with pytest.raises(AssertionError):
        test_exchanges_beside_giants(2.0**60)


def test_exchanges_of_nothing():
    for size, n in ((0, 3), (2, 0)):
        mask = torch.zeros(size, n, dtype=torch.bool, device=DEVICE)
        assert exchange.swap_refine(torch.zeros(size, n, n, device=DEVICE), mask, mask, 3).shape == mask.shape


def test_exchanges_refuse():
    W, mask = torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.bool)
    for bad in ((W, mask[:1], mask), (W, mask, mask.int()), (torch.zeros(1, 257, 257), mask, mask)):
        with pytest.raises(ProblemError):
            exchange.swap_refine(*bad, 1)
    with pytest.raises(OptionError):
        exchange.swap_refine(W, mask, mask, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- 2 * _rows(", "- 1 * _rows("),
        ("start + place", "place"),
        ("least < change", "least <= change"),
        ("sums += ", "sums = "),
        ("(chosen == 0) & (free != 0)", "chosen == 0"),
        ("left = tl.where(improves, left - 1,", "left = tl.where(improves, left - 1000,"),
        ("diagonal - 2 * sums", "diagonal + 2 * sums"),
        ("tl.abs(diagonal)", "1e17 + tl.abs(diagonal)"),
    ],
)
def test_wrong_exchanges_are_noticed(monkeypatch, tmp_path, old, new):
    monkeypatch.setattr(exchange, "_swap_kernel", mutant(exchange, old, new, tmp_path)._swap_kernel)
    monkeypatch.setattr(exchange, "ENTRIES_AT_ONCE", 256)
    W = random_W(5, 17, torch.float32, True, 4)
    vertex = torch.arange(17).expand(5, 17)

    def check_all():
        for steps in (1, 8):
            check_swap(W, (vertex % 3 == 1) & (vertex < 15), vertex < 15, steps)

    with pytest.raises(AssertionError):
        check_all()


# W from queries and keys


def random_attention(size, heads, group, observed, length, d, dtype, seed, padded=True):
    """Queries and keys as views of token-major storage, every second channel of it; the mask is None or pads some."""
    g = torch.Generator().manual_seed(seed)
    queries = torch.randn(size, observed, heads * group, 2 * d, generator=g).to(dtype).to(DEVICE)
    keys = torch.randn(size, length, heads, 2 * d, generator=g).to(dtype).to(DEVICE)
    mask = None
    if padded:
        mask = (torch.rand(size, length, generator=g) < 0.7).to(DEVICE)
        keys[~mask] = torch.nan  # padding is whatever was there
        queries[~mask[:, length - observed :]] = torch.inf
    return queries.transpose(1, 2)[..., ::2], keys.transpose(1, 2)[..., ::2], mask


def check_interaction(queries, keys, mask):
    W = interaction.interaction_matrix(queries, keys, mask)
    exact = [None if t is None else t.double().cpu() for t in (queries, keys, mask)]
    reference = weights.interaction_matrix(*exact)
    size = weights.interaction_matrix(exact[0].abs(), exact[1].abs(), exact[2])
    assert W.dtype == torch.float32
    assert W.shape == reference.shape
    assert torch.equal(W, W.mT)
    assert ((W.cpu() - reference).abs() <= 1e-5 * size).all()


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 5, 40]),
    st.sampled_from([0, 1, 60]),
    st.sampled_from([1, 5, 16, 20, 64]),
    st.sampled_from([torch.float32, *HALF]),
    st.booleans(),
    SEEDS,
)
def test_interaction_matrix_is_exact_to_rounding(size, heads, group, observed, more, d, dtype, padded, seed):
    check_interaction(*random_attention(size, heads, group, observed, observed + more, d, dtype, seed, padded))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "tile", "dtype"),
    [(128, 128, torch.float16), (200, 128, torch.bfloat16), (40, 32, torch.float32), (40, 32, torch.bfloat16)],
)
def test_interaction_matrix_in_parts(monkeypatch, d, tile, dtype):
    monkeypatch.setattr(interaction, "CHUNK", 32)
    monkeypatch.setattr(interaction, "PARTS", 3)
    monkeypatch.setattr(interaction, "TILE", tile)
    monkeypatch.setattr(interaction, "PRODUCT_TILE", tile // 2)
    queries, keys, mask = random_attention(2, 1, 2, 35, 131, d, dtype, d)
    check_interaction(queries, keys, mask)
    one = interaction.interaction_matrix(queries[1:], keys[1:], mask[1:])
    assert torch.equal(interaction.interaction_matrix(queries, keys, mask)[1:], one)


def test_interaction_matrix_of_mixed_dtypes_and_whole_masks():
    queries, keys, mask = random_attention(1, 2, 2, 7, 30, 16, torch.float32, 0)
    check_interaction(queries.half(), keys, mask.long() * 2)
    check_interaction(queries[:, :, -3:].nan_to_num(0, 0, 0), keys.nan_to_num(0).bfloat16(), None)
    nothing = interaction.interaction_matrix(queries, keys, torch.zeros_like(mask))
    assert not nothing.any()


def test_interaction_matrix_refuses():
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8)
    for bad in (
        (q[0], k),
        (q[:, :, :0], k),
        (q[:, :, :0], k[:, :, :0]),
        (q[:0], k[:0]),
        (q[:, :3], k),
        (q[..., :7], k),
        (q.double(), k),
        (q, k[:, :, :2]),
        (q.expand(2, 4, 3, 8), k),
        (q, k, torch.ones(1, 4)),
        (q, k, torch.ones(1, 5, device="meta")),
        (torch.zeros(1, 2, 3, 300), torch.zeros(1, 2, 5, 300)),
    ):
        with pytest.raises(ProblemError):
            interaction.interaction_matrix(*bad)


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("_gram_kernel", "(row // length)", "(row // (length + 1))"),
        ("_gram_kernel", "(first + token) * valid_l", "token * valid_l"),
        ("_gram_kernel", "here = row < end", "here = row < end - 1"),
        ("_gram_kernel", "valid + b * valid_b", "valid"),
        ("_gram_kernel", "h * GROUP * x_h", "h * x_h"),
        ("_product_kernel", "product *= _sym", "product += _sym"),
    ],
)
def test_a_wrong_interaction_matrix_is_noticed(monkeypatch, tmp_path, kernel, old, new):
    monkeypatch.setattr(interaction, kernel, getattr(mutant(interaction, old, new, tmp_path), kernel))
    with pytest.raises(AssertionError):
        check_interaction(*random_attention(2, 2, 2, 9, 30, 16, torch.float32, 3))
