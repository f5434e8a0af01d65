r"""`FactoredWeights`: W as a sum of products of factors, never formed, in memory proportional to the factors.

.. math:: W = \tfrac12 (T + T^\top), \qquad T = \sum_t (A_t^\top C_t) \circ (B_t^\top D_t)

When: W comes from vectors, one per vertex, as in attention: :math:`W = (Q^\top Q) \circ (K^\top K)`. With d rows in
each factor, f of k vertices takes :math:`O(k d^2)`, a column :math:`O(n d)`, a product with a vector :math:`O(nd^2)`.

Rounding: a sum over W (f, a product with a vector, a bound) is off by at most `additions` times 2⁻⁵² times the same sum
over factors without their signs, `magnitude`: Higham, Accuracy and Stability of Numerical Algorithms (2002), section
3.1. Whole numbers are exact while those sums stay below 2⁵². Where node weights replace a larger diagonal, sums leave
that out, and take as long as W's entries take.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from .._util.arrays import backend_of, to_float_tensor
from ..errors import ProblemError
from ..kernels.solve.columns import source
from ..kernels.solve.columns.reference.greedy import cost_path
from ..kernels.solve.columns.source import EPS, EXACT, blocks
from .dense import small_weights
from .factors import RANGE, Given, Term, read_terms
from .steps import common_divisor
from .weights import Weights

#: Approximate seconds per multiplication of a product with a vector.
SECONDS_TO_MULTIPLY = 4e-10


class FactoredWeights(Weights):
    r"""W, the symmetric part of a sum of terms :math:`(A^\top C) \circ (B^\top D)`; give it to `solve` in place of W.

    Parameters
    ----------
    terms : sequence of ((A, C), (B, D))
        Factors, array_like (..., d, n): vertices along the last axis, real numbers. A and C have the same number of
        rows, and so have B and D; leading dimensions are a batch and broadcast. A pair that is None is all ones.
    diagonal : array_like (..., n), optional
        Node weights in place of the terms' own.

    Raises
    ------
    ProblemError
        If a factor is empty, has NaN or infinite entries, another number of vertices or rows than its partners, a batch
        that does not broadcast, or products of a size that float64 does not hold.

    Notes
    -----
    The module has complexity and rounding. Methods that take this form never hold more than 64 MiB of W: if all of it
    takes no more (n up to 2,896), they form it, an instance or a few at a time, since that is faster. Others form all
    of W, if there is memory for it.

    Examples
    --------
    >>> import numpy as np
    >>> import grace_opt
    >>> Q, K = np.array([[1.0, 2.0, -1.0]]), np.array([[1.0, 0.0, 1.0], [2.0, 1.0, 1.0]])
    >>> W = grace_opt.FactoredWeights.product(Q, K)  # (QᵀQ) ∘ (KᵀK)
    >>> W.shape, W.diagonal().tolist()
    ((3, 3), [5.0, 4.0, 2.0])
    >>> grace_opt.solve(W, 2, "local_search").indices.tolist()
    [0, 2]
    >>> apart = grace_opt.FactoredWeights([((Q, Q), None)], diagonal=np.zeros(3))  # QᵀQ between different vertices
    >>> apart.dense("this example").tolist()
    [[0.0, 2.0, -1.0], [2.0, 0.0, -2.0], [-1.0, -2.0, 0.0]]
    """

    form = "factored"
    is_rounded = True
    #: Whether W is semidefinite although its terms do not show it.
    convex = False

    def __init__(self, terms: Sequence[Any], *, diagonal: Any = None) -> None:
        self._take(read_terms(terms, diagonal))

    def __repr__(self) -> str:
        """One short line: the factors are large."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, terms={len(self.terms)}, device={str(self.device)!r})"

    @classmethod
    def product(cls, Q: Any, K: Any) -> Self:
        r"""Return :math:`(Q^\top Q) \circ (K^\top K)`: attention's W of queries (..., L, n) and keys (..., T, n).

        Examples
        --------
        >>> FactoredWeights.product([[1, 2]], [[3, 1]]).block(None, None).tolist()
        [[9.0, 6.0], [6.0, 4.0]]
        """
        made = cls.__new__(cls)
        made._take(read_terms([((Q, Q), (K, K))], None, ("Q", "K")))
        return made

    @classmethod
    def tokens(cls, attention: Any, values: Any, outputs: Any) -> Self:
        r"""Return W of tokens: f(S) is how far outputs of observed queries move, to first order, if S is dropped.

        .. math:: W_{ij} = \sum_q p_{qi} p_{qj} (v_i - o_q)^\top (v_j - o_q)

        Parameters
        ----------
        attention : array_like (..., q, n)
            Probabilities p of observed queries.
        values : array_like (..., n, d)
        outputs : array_like (..., q, d)
            o, attention times values.

        Notes
        -----
        Two terms: :math:`(P^\top P) \circ (V^\top V)` and, with :math:`X = |o|^2 P - 2 P \circ (O V)`, the symmetric
        part of :math:`X^\top P`. W is semidefinite, which bounds make use of.

        Examples
        --------
        >>> p, v = torch.tensor([[0.25, 0.75]], dtype=torch.float64), torch.tensor([[1.0], [5.0]], dtype=torch.float64)
        >>> FactoredWeights.tokens(p, v, p @ v).block(None, None).tolist()
        [[0.5625, -0.5625], [-0.5625, 0.5625]]
        """
        arrays = {"attention": attention, "values": values, "outputs": outputs}
        backend = backend_of(*arrays.values())
        P, V, means = (to_float_tensor(value, name).to(torch.float64) for name, value in arrays.items())
        shapes = [tuple(each.shape) for each in (P, V, means)]
        fits = all(len(shape) >= 2 for shape in shapes)
        if not fits or (P.shape[-1], P.shape[-2], V.shape[-1]) != (V.shape[-2], means.shape[-2], means.shape[-1]):
            raise ProblemError(
                f"attention, values and outputs have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}: give (..., q, "
                "n), (..., n, d) and (..., q, d) for q queries and n tokens."
            )
        V = V.mT
        X = means.square().sum(-1, keepdim=True) * P - 2 * P * (means @ V)
        made = cls.__new__(cls)
        made._take(read_terms([((P, P), (V, V)), ((X, P), None)], None, ("attention", "values", "outputs")))
        made.backend, made.arrays, made.convex = backend, tuple(arrays.values()), True
        return made

    def _take(self, given: Given) -> None:
        self.terms, self.nodes, self.arrays = given.terms, given.nodes, given.kept
        self.backend, self.batch = given.backend, tuple(given.terms[0].A.shape[:-2])
        total = self._everything().sum(-1)
        if not bool((total < RANGE * RANGE).all()):
            raise ProblemError(
                f"sums of the factors' products reach {float(total.max()):.3g} and overflow float64: divide the "
                "factors or diagonal= by a power of two; f scales with it."
            )
        self.integer = given.integer and bool((total <= EXACT).all())

    def _like(self, terms: Sequence[Term], nodes: Tensor | None, convex: bool = False) -> Self:
        """Return W of other terms, which are trusted."""
        new = copy.copy(self)
        new.terms, new.nodes, new.batch = tuple(terms), nodes, tuple(terms[0].A.shape[:-2])
        new.convex = convex and self.convex
        return new

    def of_terms(self, terms: Sequence[Term]) -> Self:
        """Return W of other terms with as many vertices, which are trusted, and their own node weights."""
        return self._like(terms, None)

    def _each(self, of_factor: Callable[[Tensor], Tensor], of_nodes: Callable[[Tensor], Tensor]) -> Self:
        """Return W with functions of every factor and of the node weights."""
        nodes = None if self.nodes is None else of_nodes(self.nodes)
        return self._like([term.each(of_factor) for term in self.terms], nodes, convex=True)

    @property
    def n(self) -> int:
        return self.terms[0].A.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.terms[0].A.device

    @property
    def additions(self) -> int:
        """Sums are off by at most this times 2⁻⁵² times `magnitude`: over vertices twice, and over rows."""
        return 2 * self.n + max(d * e + d + e for d, e in (t.rows() for t in self.terms)) + 4 * len(self.terms) + 16

    @property
    def is_semidefinite(self) -> bool:
        """True if xᵀWx ≥ 0 is known, up to rounding: sums of (AᵀA) ∘ (BᵀB), by Schur's theorem, and W of tokens."""
        return self.nodes is None and (self.convex or all(term.is_gram and term.sign > 0 for term in self.terms))

    def numel(self) -> int:
        """Return how many numbers the factors have."""
        own = {id(factor): factor.numel() for term in self.terms for factor in term[:4]}
        return sum(own.values())

    def work(self) -> float:
        """Return the number of multiplications of a product with a vector, for all instances together."""
        rows = [min(2 * d * e, self.n * (d + e)) * (1 if t.is_gram else 2) for t in self.terms for d, e in [t.rows()]]
        return float(math.prod(self.batch) * self.n * sum(rows))

    def product_seconds(self) -> float:
        """Return the approximate seconds of a product with a vector, for all instances together."""
        return SECONDS_TO_MULTIPLY * self.work()

    def whole_at_once(self) -> int:
        """Return of how many instances W may be formed at a time; 0 if W of one takes more than `BLOCK_BYTES`."""
        return source.BLOCK_BYTES // (8 * self.n**2)

    def rounding(self, k: Tensor, candidates: Tensor) -> Tensor:
        """Return how far f of any k candidates may be off, (...): by rounding of W's entries and of their sum."""
        rows = self.magnitude_rows().masked_fill(~candidates, 0.0).sort(-1, descending=True).values
        taken = torch.arange(self.n, device=rows.device) < k.unsqueeze(-1)
        return 2.0 * self.additions * EPS * torch.where(taken, rows, 0.0).sum(-1)

    def diagonal(self) -> Tensor:
        return self._own_diagonal() if self.nodes is None else self.nodes

    def _own_diagonal(self) -> Tensor:
        """The diagonal of the sum of terms."""
        parts = [t.sign * (t.A * t.C).sum(-2) * (t.B * t.D).sum(-2) for t in self.terms]
        return torch.stack(parts).sum(0)

    def with_diagonal(self, diagonal: Tensor) -> Self:
        """Return the same edges with these node weights (..., n)."""
        return self._like(self.terms, diagonal.to(torch.float64).expand(*self.batch, self.n))

    def negated(self) -> Self:
        nodes = None if self.nodes is None else 0.0 - self.nodes
        return self._like([term._replace(sign=-term.sign) for term in self.terms], nodes)

    def without(self, vertices: Tensor) -> Self:
        """Return W with rows and columns of these vertices, (..., n) bool, set to zero."""
        gone = vertices.expand(*self.batch, self.n)
        return self._each(lambda f: f.masked_fill(gone.unsqueeze(-2), 0.0), lambda w: w.masked_fill(gone, 0.0))

    def reshape(self, *shape: int) -> Self:
        lead = shape[:-2]
        if -1 in lead:  # a factor alone has no number of instances that could be told from it
            lead = tuple(torch.empty(self.batch, dtype=torch.bool, device="meta").reshape(lead).shape)
        return self._each(lambda f: f.reshape(*lead, *f.shape[-2:]), lambda w: w.reshape(*lead, self.n))

    def __getitem__(self, at: Any) -> Self:
        return self._each(lambda f: f[at], lambda w: w[at])

    def path(self, order: Tensor) -> Tensor:
        return cost_path(self, order)

    def largest(self) -> Tensor:
        """Return at least the largest entry: by the sums over rows."""
        return self.magnitude_rows().amax(-1)

    def small(self) -> Weights:
        """Return a small tensor: what methods get where factors are few enough for one."""
        return small_weights()

    def clone(self) -> Self:
        new = self._each(_in_own_memory, _in_own_memory)
        kept = [each.detach().clone() if isinstance(each, Tensor) else copy.deepcopy(each) for each in self.arrays]
        new.arrays = tuple(kept)
        return new

    def numbers(self) -> list[Tensor]:
        """Return all factors, their signs, and the node weights if there are any."""
        signs = torch.tensor([term.sign for term in self.terms], dtype=torch.float64, device="cpu")
        factors = [factor for term in self.terms for factor in term[:4]]
        return [*factors, signs, *([] if self.nodes is None else [self.nodes])]

    def _instances(self) -> Iterator[Self]:
        """Yield all instances one after the other, beginning at the same place in a line of the processor's cache."""
        flat = self.reshape(-1, self.n, self.n) if self.batch else self.reshape(1, self.n, self.n)
        for b in range(flat.terms[0].A.shape[0]):
            yield flat[b]._each(lambda f: f if f.data_ptr() % 64 == 0 else f.clone(), lambda w: w)

    def columns(self, indices: Tensor) -> Tensor:
        """Return columns of W, (..., n, m) float64, for indices (m,) or (..., m)."""
        indices = indices.expand(*self.batch, indices.shape[-1])
        if self.device.type == "cpu":  # one by one: a batched product may round differently
            places = indices.reshape(-1, indices.shape[-1])
            parts = [one.block(None, at) for one, at in zip(self._instances(), places, strict=True)]
            return torch.stack(parts).reshape(*self.batch, self.n, indices.shape[-1])
        return self.block(None, indices)

    def block(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        """Return some rows and columns, float64; None means all of them."""
        total: Tensor | None = None
        for term in self.terms:
            for A, C, B, D, sign in (term,) if term.is_gram else (term, term.turned()):
                part = (_at(A, rows).mT @ _at(C, columns)).mul_(_at(B, rows).mT @ _at(D, columns))
                part.mul_(sign if term.is_gram else sign / 2)
                total = part if total is None else total.add_(part)
        assert total is not None  # there is at least one term
        if self.nodes is not None:
            everyone = torch.arange(self.n, device=self.device)
            left, right = (everyone if at is None else at for at in (rows, columns))
            same = left.unsqueeze(-1) == right.unsqueeze(-2)
            total = torch.where(same, _at(self.nodes.unsqueeze(-2), rows).mT, total)
        return total

    def times(self, x: Tensor) -> Tensor:
        """Return W x for x (..., n), float64."""
        flat = x.to(torch.float64).expand(*self.batch, self.n).reshape(-1, self.n)
        parts = [one._times(its) for one, its in zip(self._instances(), flat, strict=True)]
        return torch.stack(parts).reshape(*self.batch, self.n)

    def _times(self, x: Tensor) -> Tensor:
        """W x of a single instance: by sums over pairs of rows, or by blocks of columns if that is less work."""
        total = torch.zeros_like(x)
        fast = all(d * e <= self.n * (d + e) for d, e in (term.rows() for term in self.terms))
        if fast and not self._replaces_most(x):
            for term in self.terms:
                for A, C, B, D, sign in (term,) if term.is_gram else (term, term.turned()):
                    between = (C * x) @ D.mT
                    part = _pairs(A, B, between)
                    total += (sign if term.is_gram else sign / 2) * part
            return total if self.nodes is None else total + (self.nodes - self._own_diagonal()) * x
        for columns in blocks(self.n, self.n, x.device):
            total += self.block(None, columns) @ x[columns]
        return total

    def _replaces_most(self, x: Tensor) -> bool:
        """Whether what node weights replace would take the digits of a row of W x along."""
        if self.nodes is None:
            return False
        terms, size = self.positive(), x.abs()
        own = terms.diagonal() * size
        return bool((own > terms.times(size) - own + self.nodes.abs() * size).any())

    def objective(self, mask: Tensor) -> Tensor:
        """Return f of masks (..., n), float64, off by at most `additions` times 2⁻⁵² times `magnitude`."""
        return self._sums(mask, positive=False)

    def _sums(self, mask: Tensor, positive: bool) -> Tensor:
        """f of masks, or what it would be without the factors' signs."""
        lead = torch.broadcast_shapes(self.batch, mask.shape[:-1])  # type: ignore[no-untyped-call]
        masks, own = mask.expand(*lead, self.n).reshape(-1, self.n), list(self._instances())
        of = torch.arange(len(own), device="cpu").reshape(self.batch).expand(lead).flatten().tolist()
        found = [own[b]._sum(chosen.nonzero().squeeze(-1), positive) for b, chosen in zip(of, masks, strict=True)]
        return torch.stack(found).reshape(lead) if found else torch.zeros(lead, dtype=torch.float64, device=self.device)

    def _sum(self, chosen: Tensor, positive: bool) -> Tensor:
        """f of some vertices of a single instance, or what it would be without the factors' signs."""
        part = self._each(lambda f: f[:, chosen], lambda w: w[chosen])
        if part.nodes is None:
            return _total(part.positive().terms if positive else part.terms)
        sizes = part.positive()
        total, replaced, weights = _total(sizes.terms), sizes.diagonal().sum(), part.nodes.abs().sum()
        if apart := bool(replaced > total - replaced + weights):
            # What the node weights replace would take their digits along: it is left out, though that is more work.
            total = _total(sizes.terms, apart)
        if positive:
            return total + weights
        return _total(part.terms, apart) + (part.nodes if apart else part.nodes - part._own_diagonal()).sum()

    def magnitude(self, mask: Tensor) -> Tensor:
        """Return at least the sum of ``|W_ij|`` over the chosen vertices: f of factors without their signs."""
        return self._sums(mask, positive=True) * (1 + 2 * self.additions * EPS)

    def step(self, candidates: Tensor) -> Tensor:
        """Return what divides f of every choice of integers' products, (...): the product of what divides the factors.

        0 for real factors, whose products are rounded.
        """
        found = [0.0] * math.prod(self.batch) if not self.integer else [one._step() for one in self._instances()]
        return torch.tensor(found, dtype=torch.float64, device=self.device).reshape(self.batch)

    def _step(self) -> float:
        parts = [math.prod(common_divisor(factor.cpu()) for factor in term[:4]) for term in self.terms]
        return common_divisor(parts, [] if self.nodes is None else self.nodes.cpu())

    def magnitude_rows(self) -> Tensor:
        """Return at least the sum of ``|W_ij|`` over j, (..., n), for each i: what `magnitude` is made of."""
        if self.nodes is None:
            return self._everything()
        terms, ones = self.positive(), torch.ones(self.n, dtype=torch.float64, device=self.device)
        rows = terms.with_diagonal(self.nodes.abs()).times(ones) * (1 + 4 * self.additions * EPS)
        return rows + terms.diagonal().minimum(rows)  # no sum has more of what node weights replace

    def _everything(self) -> Tensor:
        """The same with the terms' own node weights, also where others replace them."""
        ones = torch.ones(self.n, dtype=torch.float64, device=self.device)
        terms = self.positive().times(ones)
        return (terms if self.nodes is None else terms + self.nodes.abs()) * (1 + 2 * self.additions * EPS)

    def lengths(self) -> Tensor:
        """Return numbers (..., n) with ``|W_ij| <= lengths_i lengths_j`` for all i but j: by Cauchy and Schwarz."""
        # (AᵀC)_ij (BᵀD)_ij is a product of vectors a_i ⊗ b_i and c_j ⊗ d_j; all terms' are laid end to end.
        squares = [
            ((t.A * t.A).sum(-2) * (t.B * t.B).sum(-2), (t.C * t.C).sum(-2) * (t.D * t.D).sum(-2)) for t in self.terms
        ]
        left, right = (torch.stack(parts).sum(0) for parts in zip(*squares, strict=True))
        return (left.maximum(right)).sqrt() * (1 + self.additions * EPS)

    def positive(self) -> Self:
        """Return W of factors without their signs, with the node weights that these have."""
        return self.of_terms([term.each(torch.abs)._replace(sign=1.0) for term in self.terms])

    def _to_dense(self) -> Tensor:
        parts = [one.block(None, None) for one in self._instances()]
        W = torch.stack([part.add_(part.mT.clone()).div_(2) for part in parts])
        return W.reshape(*self.shape)


def _in_own_memory(values: Tensor) -> Tensor:
    """Return a copy; a batch that shares its numbers still does."""
    once = values[tuple(slice(0, 1) if step == 0 else slice(None) for step in values.stride())]
    return once.clone(memory_format=torch.contiguous_format).expand(values.shape)


def _at(tensor: Tensor, columns: Tensor | None) -> Tensor:
    """Some columns (..., d, m), for indices (m,) or (..., m); all of them for None."""
    if columns is None:
        return tensor
    if columns.ndim == 1:
        return tensor[..., columns]
    return tensor.gather(-1, columns.unsqueeze(-2).expand(*tensor.shape[:-1], columns.shape[-1]))


def _total(terms: Sequence[Term], apart: bool = False) -> Tensor:
    """The sum over all pairs of a single instance's vertices, or only over those of different ones."""
    total = torch.zeros((), dtype=torch.float64, device=terms[0].A.device)
    for term in terms:
        A, C, B, D, sign = term
        (d, e), count = term.rows(), A.shape[-1]
        if d * e <= count * (d + e) and not apart:
            one = A @ B.mT
            total += sign * (one * (one if term.is_gram else C @ D.mT)).sum()
            continue
        for at in blocks(count, count, A.device):
            part = (A.mT @ C[:, at]).mul_(B.mT @ D[:, at])
            if apart:
                part[at, at - at[0]] = 0.0
            total += sign * part.sum()
    return total


def _pairs(A: Tensor, B: Tensor, between: Tensor) -> Tensor:
    """Return the sum over rows a and b of A_ai between_ab B_bi, (n,), a block at a time."""
    parts = [(A[:, at] * (between @ B[:, at])).sum(0) for at in blocks(A.shape[0], A.shape[1], A.device)]
    return torch.cat(parts)
