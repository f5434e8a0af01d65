"""W of the attention's output, against the oracle and against what attention does; padding, GQA, precision, ranges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grace_opt import MaskProvider
from grace_opt.attention import output_matrix, outputs
from grace_opt.errors import OptionError, ProblemError
from tests import oracle


@st.composite
def attention(draw):
    kv, group, d, width = (draw(st.integers(1, high)) for high in (3, 3, 6, 6))
    length = draw(st.integers(1, 50))
    observed = draw(st.integers(1, min(length, 12)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    valid = np.ones(length, bool)
    valid[: draw(st.integers(0, length - 1))] = False
    shapes = (kv * group, observed, d), (kv, length, d), (kv, length, width)
    return *(rng.normal(size=shape) for shape in shapes), valid


@given(attention(), st.booleans(), st.sampled_from([None, 0.1, 1.0]), st.sampled_from([2**24, 40]))
def test_is_the_definition(drawn, padded, scaling, numbers):
    Q, K, V, valid = drawn
    mask = valid if padded else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "MAX_NUMBERS", numbers)  # in parts, too
        found = output_matrix(Q, K, V, mask, scaling=scaling)
    expected = oracle.output_interaction(Q, K, V, mask, scaling=scaling)
    np.testing.assert_allclose(found, expected, atol=1e-9 * max(1, np.abs(expected).max()))
    assert (found == found.swapaxes(-1, -2)).all()


def test_f_is_the_squared_change_of_the_output_to_first_order():
    rng = np.random.default_rng(0)
    Q, K, V = rng.normal(size=(2, 6, 8)), rng.normal(size=(1, 48, 8)), rng.normal(size=(1, 48, 5))
    W, pruned, step = output_matrix(Q, K, V)[0], np.arange(8) % 3 == 0, 1e-5
    total = 0.0
    for head in range(2):
        for t in range(6):
            last = 42 + t
            places = np.arange(last + 1)
            changed = np.where((places <= last - outputs.NEAR)[:, None] & pruned, 1 - step, 1) * K[0, : last + 1]
            found = []
            for keys in (K[0, : last + 1], changed):
                p = np.exp(keys @ Q[head, t] / np.sqrt(8))
                found.append(p / p.sum() @ V[0, : last + 1])
            total += ((found[1] - found[0]) ** 2).sum() / step**2
    assert W[np.ix_(pruned, pruned)].sum() == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("real", [1, 32, 33, 60])
def test_padding_does_not_matter(real):
    generator = torch.Generator().manual_seed(real)
    observed = min(real, 9)
    q = torch.randn(4, observed, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, real, size, generator=generator, dtype=torch.float64) for size in (8, 6))
    mask = torch.tensor([0] * 7 + [1] * real)
    padded = (
        torch.cat([torch.full((2, 7, size), torch.nan, dtype=torch.float64), x], 1) for size, x in ((8, k), (6, v))
    )
    torch.testing.assert_close(output_matrix(q, *padded, mask), output_matrix(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types(dtype):
    q, k, v = torch.randn(4, 8, 16).to(dtype), torch.randn(2, 50, 16).to(dtype), torch.randn(2, 50, 12).to(dtype)
    W = output_matrix(q, k, v)
    assert W.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = oracle.output_interaction(q.double(), k.double(), v.double())
    np.testing.assert_allclose(W, expected, rtol=1e-4, atol=1e-4 * expected.max())


@given(st.integers(-300, 300), st.integers(-150, 130))
def test_scales(of_keys, of_values):
    """Queries and keys may have any scales that cancel each other; values scale W."""
    rng = np.random.default_rng(0)
    Q, K, V = rng.normal(size=(2, 6, 8)), rng.normal(size=(1, 48, 8)), rng.normal(size=(1, 48, 5))
    W = output_matrix(Q * 10.0**-of_keys, K * 10.0**of_keys, V)
    np.testing.assert_allclose(W, output_matrix(Q, K, V), rtol=1e-9, atol=1e-12)
    if of_values < -146:
        with pytest.raises(ProblemError, match="values are so small"):
            output_matrix(Q, K, V * 10.0**of_values)
    else:
        scaled = output_matrix(Q, K, V * 10.0**of_values)
        np.testing.assert_allclose(scaled / 10.0 ** (2 * of_values), W, rtol=1e-9, atol=1e-12)


def test_leading_dimensions_and_numpy():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, *shape)) for shape in ((4, 5, 8), (2, 40, 8), (2, 40, 7)))
    W = output_matrix(q, k, v)
    assert isinstance(W, np.ndarray)
    assert W.shape == (2, 3, 2, 8, 8)
    np.testing.assert_allclose(W[1, 2], output_matrix(q[1, 2], k[1, 2], v[1, 2]), rtol=1e-9, atol=1e-12)


class TestBadInput:
    q, k, v = torch.randn(4, 8, 16), torch.randn(2, 40, 16), torch.randn(2, 40, 12)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("which", range(3))
    def test_not_finite(self, bad, which):
        given = [self.q.clone(), self.k.clone(), self.v.clone()]
        given[which][0, 1, 2] = bad
        with pytest.raises(ProblemError, match="not finite"):
            output_matrix(*given)

    @pytest.mark.parametrize("which", range(3))
    def test_too_large(self, which):
        given = [self.q, self.k, self.v]
        given[which] = given[which] * 1e38
        with pytest.raises(ProblemError, match="so large"):
            output_matrix(*given)

    @pytest.mark.parametrize("shape", [(2, 39, 12), (1, 40, 12), (2, 40, 0)])
    def test_values_do_not_fit(self, shape):
        with pytest.raises(ProblemError, match="values has shape"):
            output_matrix(self.q, self.k, torch.ones(shape))

    @pytest.mark.parametrize("scaling", [0, -1, float("nan"), "1"])
    def test_scaling(self, scaling):
        with pytest.raises(OptionError, match="scaling"):
            output_matrix(self.q, self.k, self.v, scaling=scaling)

    def test_a_provider_says_that_it_needs_values(self):
        provider = MaskProvider("think", 0.5, weight="output")
        with pytest.raises(ProblemError, match="values="):
            provider(self.q, self.k)
        W = output_matrix(self.q, self.k, self.v).diagonal(dim1=1, dim2=2)
        chosen = provider(self.q, self.k, values=self.v).pruned
        for weights, pruned in zip(W, chosen, strict=True):
            assert weights[pruned].max() <= weights[~pruned].min()
