"""`Weights`: every form says the same of one W; a solve weighs it once; and nobody asks W which form it has."""

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grace_opt import solve
from grace_opt.errors import ProblemError, SolverError
from grace_opt.problem import DenseWeights, FactoredWeights, Problem, SparseWeights, Weights, dense
from tests import oracle

ROOT = Path(__file__).resolve().parent.parent
#: Each form of the same whole numbers.
FORMS = {
    "dense": lambda W: DenseWeights(torch.from_numpy(W)[None]),
    "sparse": lambda W: SparseWeights.of(csr_array(W))[0].reshape(1, *W.shape),
    "factored": lambda W: FactoredWeights([((np.eye(len(W))[None], W[None]), None)]),
}


@st.composite
def drawn(draw):
    """A symmetric W of small whole numbers, and a choice."""
    n = draw(st.integers(1, 6))
    upper = np.array(draw(st.lists(st.integers(-3, 3), min_size=n * n, max_size=n * n)), float).reshape(n, n)
    mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return np.triu(upper) + np.triu(upper, 1).T, np.array(mask)


@pytest.mark.parametrize("form", FORMS)
@given(case=drawn())
@settings(max_examples=40, deadline=None)
def test_every_form_says_the_same_of_w(form, case):
    W, mask = case
    n, weights, chosen = len(W), FORMS[form](W), torch.from_numpy(mask)[None]
    f, inside = oracle.objective(W, np.flatnonzero(mask)), np.flatnonzero(mask)
    assert (weights.form, weights.shape, weights.n, weights.batch) == (form, (1, n, n), n, (1,))
    assert weights.diagonal().tolist() == [W.diagonal().tolist()]
    assert weights.objective(chosen).tolist() == weights.objective_fast(chosen).tolist() == [f]
    assert weights.negated().objective(chosen).tolist() == [-f]
    assert float(weights.magnitude(chosen)) >= np.abs(W[np.ix_(inside, inside)]).sum()
    assert float(weights.largest()) >= np.abs(W).max()
    assert weights.dense("a test").tolist() == [W.tolist()]
    order = torch.from_numpy(inside)[None]
    assert weights.path(order)[0, : len(inside) + 1].tolist() == [
        oracle.objective(W, inside[:j]) for j in range(len(inside) + 1)
    ]
    for same in (weights.clone(), weights.reshape(1, n, n), weights[torch.tensor([0])]):
        assert same.objective(chosen).tolist() == [f]
        assert all(map(torch.equal, same.numbers(), weights.numbers()))
    assert weights[0].objective(chosen[0]).tolist() == weights.reshape(n, n).objective(chosen[0]).tolist() == f
    (step,) = weights.step(torch.ones(1, n, dtype=torch.bool)).tolist()
    if step:
        assert all(
            oracle.objective(W, S) % step == 0 for k in range(n + 1) for S in itertools.combinations(range(n), k)
        )


def _counted(monkeypatch, name):
    """How often a function of `grace_opt.problem.dense` was called, as the length of a list."""
    calls, function = [], getattr(dense, name)
    monkeypatch.setattr(dense, name, lambda *given: calls.append(1) or function(*given))
    return calls


@pytest.mark.parametrize("method", ["mies", "tabu"])
@pytest.mark.parametrize("maximize", [True, False])
def test_a_certified_solve_sums_its_choice_once(monkeypatch, method, maximize):
    """The choice was summed six times, and the step of whole numbers found three times."""
    W = np.random.default_rng(0).integers(-9, 10, (40, 40))
    summed, stepped = _counted(monkeypatch, "exact_sums"), _counted(monkeypatch, "_step_of")
    solve(W + W.T, 12, method, certify=True, maximize=maximize)
    assert (len(summed), len(stepped)) == (1, 1)
    solve((W + W.T) / 7, 12, method, certify=True, maximize=maximize)
    assert len(summed) == 2


def test_what_is_known_of_w_is_not_that_of_an_array_changed_in_between():
    W = np.random.default_rng(1).normal(size=(30, 30))
    W += W.T
    problem = Problem.of(W, 8)
    first = solve(problem, method="tabu", certify=True)
    assert first.verify() is first
    W *= 2.0  # in the memory that the problem shares
    assert float(solve(problem, method="tabu", certify=True).objective) == 2 * float(first.objective)
    with pytest.raises(SolverError, match="stored objective"):
        first.verify()


def test_a_callers_change_of_f_changes_nothing_that_is_known():
    weights, mask = DenseWeights(torch.eye(3)[None]), torch.tensor([[True, True, False]])
    weights.objective(mask).zero_()
    assert weights.objective(mask).tolist() == [2.0]


@pytest.mark.parametrize("form", ["sparse", "factored"])
def test_w_of_another_form_is_no_tensor_and_says_what_to_read(form):
    problem = Problem.of(FORMS[form](np.eye(3)), 1)
    with pytest.raises(ProblemError, match=f"in its {form} form: read problem.weights, or write problem.dense"):
        _ = problem.W
    assert problem.dense("a test").W.tolist() == [np.eye(3).tolist()]


def _names(node):
    """The last names in an expression of classes, a | or a tuple of them."""
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", None) for each in ast.walk(node)}


def test_nobody_asks_w_which_form_it_has():
    """W was a tensor by its type and another class by `cast`; 28 places asked which. Forms are dispatched on."""
    classes, left = {"Weights"}, [Weights]
    while left:
        found = left.pop().__subclasses__()
        classes |= {kind.__name__ for kind in found}
        left += found
    assert {"DenseWeights", "SparseWeights", "FactoredWeights"} <= classes
    asked = []
    for file in [*(ROOT / "grace_opt").rglob("*.py"), *(ROOT / "solvers").rglob("*.py")]:
        if (ROOT / "grace_opt" / "problem") in file.parents:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named, kinds = "", set()
            if isinstance(node, ast.Call) and len(node.args) == 2:
                named = getattr(node.func, "id", getattr(node.func, "attr", ""))
                kinds = _names(node.args[0 if named == "cast" else 1])
            elif isinstance(node, ast.MatchClass):
                named, kinds = "isinstance", _names(node.cls)
            if (named == "cast" and kinds & {"Tensor", *classes}) or (
                named in ("isinstance", "issubclass") and kinds & classes
            ):
                asked.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not asked, f"make it a method of Weights, or a functools.singledispatch function of W: {asked}"
