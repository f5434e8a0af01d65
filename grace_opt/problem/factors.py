r"""The factors of `FactoredWeights`, checked: `Term`, :math:`(A^\top C) \circ (B^\top D)`, and `read_terms`.

When: `grace_opt.problem.factored` alone. Every kind of wrong input has its own message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._util.array_like import as_tensor
from .._util.arrays import Backend, backend_of, to_floats
from ..errors import ProblemError

#: Products of factors that are not 0 lie between the inverse of this number and it: no sum under- or overflows.
RANGE = 1e140
#: What one term is, for messages.
FORM = "((A, C), (B, D)) with factors (..., d, n), or None in place of a pair of all ones"


class Term(NamedTuple):
    """sign · (AᵀC) ∘ (BᵀD), factors (..., d, n) float64; the same object twice if the factors are the same."""

    A: Tensor
    C: Tensor
    B: Tensor
    D: Tensor
    sign: float = 1.0

    @property
    def is_gram(self) -> bool:
        """Whether it is (AᵀA) ∘ (BᵀB): symmetric, and semidefinite but for the sign."""
        return self.A is self.C and self.B is self.D

    def each(self, function: Callable[[Tensor], Tensor]) -> Term:
        """Return the term with a function of every factor; what was one factor stays one."""
        of = {id(factor): function(factor) for factor in self[:4]}
        A, C, B, D = (of[id(factor)] for factor in self[:4])
        return Term(A, C, B, D, self.sign)

    def turned(self) -> Term:
        """Return the transpose."""
        return Term(self.C, self.A, self.D, self.B, self.sign)

    def rows(self) -> tuple[int, int]:
        """Return the numbers of rows of A and of B."""
        return self.A.shape[-2], self.B.shape[-2]


class Given(NamedTuple):
    """What the user gave, checked; factors of all terms have the batch's dimensions."""

    terms: tuple[Term, ...]
    nodes: Tensor | None
    backend: Backend
    kept: tuple[Any, ...]
    integer: bool


def read_terms(terms: Any, diagonal: Any, names: Sequence[str] = ()) -> Given:
    """Check terms ((A, C), (B, D)) and a diagonal, and convert them to float64.

    Raises
    ------
    ProblemError
        The message names the factor by its place in `terms`, or by `names`: those of A and B in the only term.
    """
    named = list(_named(_listed(terms), names))
    kept = tuple({id(value): value for _, value in named}.values())
    backend = backend_of(*kept, diagonal)
    raw: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}
    for name, value in named:
        if id(value) not in made:
            raw[id(value)] = as_tensor(value, name)
            made[id(value)] = _finite(raw[id(value)], name, 2)
    own = None if diagonal is None else as_tensor(diagonal, "diagonal")
    nodes = None if own is None else _finite(own, "diagonal", 1)
    sizes = [(name, made[id(value)], 2) for name, value in named]
    n, batch = _common(sizes if nodes is None else [*sizes, ("diagonal", nodes, 1)])
    wide = {key: factor.expand(*batch, *factor.shape[-2:]) for key, factor in made.items()}
    ones = torch.ones(1, n, dtype=torch.float64, device=backend.device).expand(*batch, 1, n)
    found, names_left = [], iter(name for name, _ in named)
    for pairs in _listed(terms):
        two = []
        for pair in pairs:
            factors = (ones, ones) if pair is None else (wide[id(pair[0])], wide[id(pair[1])])
            if pair is not None:
                _check_rows(next(names_left), next(names_left), *factors)
            two.append(factors)
        found.append(Term(*two[0], *two[1]))
    integer = not any(tensor.dtype.is_floating_point for tensor in (*raw.values(), *([] if own is None else [own])))
    return Given(tuple(found), None if nodes is None else nodes.expand(*batch, n), backend, kept, integer)


def _listed(terms: Any) -> list[Any]:
    if not isinstance(terms, list | tuple) or not all(
        isinstance(term, list | tuple) and len(term) == 2 for term in terms
    ):
        raise ProblemError(f"terms is no list of terms: give [term, ...], each {FORM}.")
    for at, term in enumerate(terms):
        for pair in term:
            if not (pair is None or (isinstance(pair, list | tuple) and len(pair) == 2)):
                raise ProblemError(f"terms[{at}] is no term: give {FORM}.")
    if not any(pair is not None for term in terms for pair in term):
        raise ProblemError(f"terms holds no factor, so that the number of vertices is unknown: give terms {FORM}.")
    return list(terms)


def _named(terms: list[Any], names: Sequence[str]) -> Iterable[tuple[str, Any]]:
    for at, term in enumerate(terms):
        for place, pair in enumerate(term):
            if pair is not None:
                for which, value in enumerate(pair):
                    yield (names[2 * at + place] if names else f"terms[{at}][{place}][{which}]"), value


def _finite(given: Tensor, name: str, ndim: int) -> Tensor:
    shape = tuple(given.shape)
    wanted = "(..., d, n), one row for each dimension and one column for each vertex" if ndim == 2 else "(..., n)"
    if len(shape) < ndim:
        raise ProblemError(f"{name} has shape {shape}: give an array {wanted}.")
    if given.numel() == 0:
        raise ProblemError(f"{name} is empty, shape {shape}: give an array {wanted}.")
    wide = to_floats(given, name).to(torch.float64)
    if not bool(torch.isfinite(wide).all()):
        at = (~torch.isfinite(wide)).nonzero()[0].tolist()
        raise ProblemError(f"{name}{at} is {wide[tuple(at)].item()}: every entry of a factor must be finite.")
    # Libraries round alike only where arrays begin at the same place in a line of the processor's cache.
    return wide.contiguous() if wide.data_ptr() % 64 == 0 else wide.clone(memory_format=torch.contiguous_format)


def _common(sizes: list[tuple[str, Tensor, int]]) -> tuple[int, tuple[int, ...]]:
    """The number of vertices and the batch that all have."""
    first, tensor, _ = sizes[0]
    n, batch = tensor.shape[-1], torch.Size()
    for name, each, ndim in sizes:
        if each.shape[-1] != n:
            raise ProblemError(
                f"{first} has {n} vertices (its last axis) and {name} has {each.shape[-1]}: give all factors one "
                "column for each vertex; transpose those that have a row for each."
            )
        try:
            batch = torch.broadcast_shapes(batch, each.shape[:-ndim])  # type: ignore[no-untyped-call]
        except RuntimeError:
            raise ProblemError(
                f"{name} has shape {tuple(each.shape)}, and its leading dimensions do not broadcast to the batch "
                f"{tuple(batch)} of the factors before: give all the same, or none."
            ) from None
    return n, tuple(batch)


def _check_rows(one: str, other: str, A: Tensor, C: Tensor) -> None:
    if A.shape[-2] != C.shape[-2]:
        raise ProblemError(
            f"{one} has {A.shape[-2]} rows and {other} has {C.shape[-2]}: AᵀC sums over rows, give both as many."
        )
    sizes = float(A.abs().max()), float(C.abs().max())
    size = sizes[0] * sizes[1]
    if min(sizes) > 0 and not 1 / RANGE < size < RANGE / A.shape[-2]:
        way, what = ("Divide", "over") if size > 1 else ("Multiply", "under")
        raise ProblemError(
            f"products of {one} and {other} reach {size:.3g}: sums of them {what}flow float64. {way} the factors by a "
            "power of two; f scales with it."
        )
