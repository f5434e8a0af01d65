"""From queries and keys to W and protection, against the oracle; GQA, padding, precision."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grace_opt import MaskProvider
from grace_opt.attention import interaction_matrix, prune_count, salient_channels
from grace_opt.errors import OptionError, ProblemError
from tests import oracle


@st.composite
def attention(draw):
    kv, group, d = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    length = draw(st.integers(1, 12))
    observed = draw(st.integers(1, length))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    valid = np.ones(length, bool)
    valid[: draw(st.integers(0, length - 1))] = False
    return rng.normal(size=(kv * group, observed, d)), rng.normal(size=(kv, length, d)), valid


@given(attention(), st.booleans())
def test_interaction_matrix_is_the_definition(drawn, padded):
    Q, K, valid = drawn
    mask = valid if padded else None
    np.testing.assert_allclose(interaction_matrix(Q, K, mask), oracle.interaction(Q, K, mask), atol=1e-9)


@given(attention())
def test_f_is_the_squared_change_of_the_logits(drawn):
    Q, K, _ = drawn
    W = interaction_matrix(Q, K)
    d, group = Q.shape[-1], len(Q) // len(K)
    pruned = np.arange(d) % 2 == 0
    for h in range(len(K)):
        change = sum(np.sum((Q[h * group + g][:, pruned] @ K[h][:, pruned].T) ** 2) for g in range(group))
        assert W[h][np.ix_(pruned, pruned)].sum() == pytest.approx(change, rel=1e-9, abs=1e-12)


def test_padding_rows_do_not_matter():
    q, k = torch.randn(4, 3, 8), torch.randn(2, 10, 8)
    junk = torch.full((2, 5, 8), 1e4)
    mask = torch.tensor([0] * 5 + [1] * 10)
    padded = interaction_matrix(q, torch.cat([junk, k], 1), mask)
    assert torch.equal(padded, interaction_matrix(q, k))
    protected = salient_channels(torch.cat([junk, k], 1), attention_mask=mask)
    assert torch.equal(protected, salient_channels(k))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_accumulate_without_overflow(dtype):
    q, k = torch.full((4, 32, 64), 1e4, dtype=dtype), torch.full((1, 4096, 64), 1e4, dtype=dtype)
    W = interaction_matrix(q, k)
    assert W.dtype == torch.float32
    value = float(torch.tensor(1e4, dtype=dtype)) ** 4 * 128 * 4096
    torch.testing.assert_close(W, torch.full_like(W, value), rtol=1e-5, atol=0)


def test_leading_dimensions_and_numpy():
    q, k = np.random.default_rng(0).normal(size=(2, 3, 4, 5, 8)), np.random.default_rng(1).normal(size=(2, 3, 2, 9, 8))
    W = interaction_matrix(q, k)
    assert isinstance(W, np.ndarray)
    assert W.shape == (2, 3, 2, 8, 8)
    np.testing.assert_allclose(W[1, 2], interaction_matrix(q[1, 2], k[1, 2]))


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 70), st.sampled_from([(0.05, 0.15), (0, 0), (0.3, 1)])
)
def test_salient_channels_are_the_oracles(seed, length, d, bounds):
    rng = np.random.default_rng(seed)
    K = rng.normal(size=(length, d)) * rng.lognormal(sigma=1.5, size=d)
    if seed % 3 == 0:
        K = np.round(K)  # ties
    assert salient_channels(K, *bounds).nonzero()[0].tolist() == oracle.salient(K, *bounds)


def test_salient_channels_of_a_single_head_without_its_padding():
    keys = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.full((3, 20), 9.0), keys])
    assert torch.equal(salient_channels(padded, attention_mask=torch.arange(10) >= 3), salient_channels(keys))


@pytest.mark.parametrize(
    ("ratio", "d", "k"), [(0.6, 128, 77), (0.5, 64, 32), (0.6, 64, 39), (0.7, 10, 7), (0, 64, 0), (0.99, 64, 64)]
)
def test_prune_count_rounds_up_what_the_decimal_means(ratio, d, k):
    assert prune_count(ratio, d) == k


def test_the_threshold_uses_the_population_deviation():
    keys = np.array([[1.0, 0.52, 0.0]])  # mean + std: .915 with ddof 0, 1.007 with ddof 1
    assert salient_channels(keys, 0.0, 1.0).tolist() == [True, False, False]


class TestNumbersOutOfRange:
    """W or its norms would be infinite, zero or NaN, and the choice of channels made of nothing."""

    q, k = torch.randn(4, 8, 16), torch.randn(2, 32, 16)

    @pytest.mark.parametrize("scale", [1e10, 1e20, 1e-12, 1e-25])
    def test_weights_leave_float32(self, scale):
        for dtype in (torch.float32, torch.bfloat16):
            q, k = (self.q * scale).to(dtype), (self.k * scale).to(dtype)
            for call in (lambda: interaction_matrix(q, k), lambda: MaskProvider("mies")(q, k)):  # noqa: B023
                with pytest.raises(ProblemError, match="power of two"):
                    call()
        wide = MaskProvider("mies")(self.q.double() * scale, self.k.double() * scale)
        assert torch.equal(wide.pruned, MaskProvider("mies")(self.q.double(), self.k.double()).pruned)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_not_finite(self, bad):
        q, k = self.q.clone(), self.k.clone()
        q[0, 0, 0] = k[1, 5, 3] = bad
        for call in (
            lambda: interaction_matrix(q, self.k),
            lambda: MaskProvider("mies")(self.q, k),
            lambda: salient_channels(k),
        ):
            with pytest.raises(ProblemError, match="not finite"):
                call()
        valid = torch.ones(32, dtype=torch.bool)
        valid[5] = False  # what padding holds does not count
        assert interaction_matrix(self.q, k, valid).isfinite().all()
        assert salient_channels(k, attention_mask=valid).sum() > 0

    def test_a_head_of_zeros_is_one(self):
        k = self.k.clone()
        k[0] = 0
        assert not interaction_matrix(self.q, k)[0].any()

    def test_half_precision_does_not_overflow(self):
        q, k = (torch.full((1, length, 4), 60000.0, dtype=torch.float16) for length in (8, 100))
        assert float(interaction_matrix(q, k).max()) == pytest.approx(60000.0**4 * 800)

    @pytest.mark.parametrize("mask", [[0.0] * 31 + [-1e9], [float("-inf")] * 32, [float("nan")] * 32])
    def test_a_mask_that_is_added_is_refused(self, mask):
        """0 stands for real tokens there: it was read upside down."""
        for form in (mask, torch.tensor(mask)):
            with pytest.raises(ProblemError, match="attention_mask == 0"):
                interaction_matrix(self.q, self.k, form)


@pytest.mark.parametrize("seed", [1.5, True, -1, "0", None])
def test_a_provider_s_seed(seed):
    with pytest.raises(OptionError, match="seed="):
        MaskProvider("random", seed=seed)


@pytest.mark.parametrize("protect", [(False, True), ("0", "1"), (0.1, np.nan)])
def test_protection_of_other_kinds(protect):
    with pytest.raises(OptionError, match="protect"):
        MaskProvider(protect=protect)


@pytest.mark.parametrize("d", [4.7, -4, True])
def test_a_number_of_channels(d):
    with pytest.raises(OptionError, match="d="):
        prune_count(0.5, d)
