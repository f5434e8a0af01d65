"""Other libraries' models: their value at a choice is f, their minimum is the optimum, and solve reads graphs back."""

import itertools
import sys

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt import Problem, solve
from grace_opt.errors import OptionError, ProblemError
from grace_opt.instances import convert
from grace_opt.testing import instance, instances
from tests import oracle

W3 = [[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]


def choices(n, k, protected):
    return itertools.combinations([i for i in range(n) if i not in protected], k)


@pytest.mark.parametrize("form", convert.OBJECTIVE_FORMS)
@given(drawn=instances(max_n=6))
@settings(max_examples=20)
def test_cvxpy_objective_is_f_on_every_choice(form, drawn):
    W, k, protected = drawn
    model = convert.to_cvxpy(W, k, protected, form=form)
    x, y = model.var_dict["x"], model.var_dict.get("y")
    size = max(np.abs(W).sum(), 1e-300)
    for S in itertools.chain(*(itertools.combinations(range(len(W)), m) for m in range(len(W) + 1))):
        x.value = np.isin(np.arange(len(W)), S).astype(float)
        if y is not None:
            i, j = np.nonzero(np.triu(W, 1))
            y.value = x.value[i] * x.value[j]
        if not set(S) & set(protected):  # which count nothing: a giant among them would hide the others
            assert abs(model.objective.value - oracle.objective(W, S)) <= 1e-9 * size
        feasible = all(bool(np.all(c.value())) for c in model.constraints)
        assert feasible == (len(S) == k and not set(S) & set(protected))


@pytest.mark.parametrize("kind", ["wishart", "indefinite", "integer", "zero rows"])
@pytest.mark.parametrize("seed", range(2))
def test_cvxpy_solves_to_the_optimum(kind, seed):
    W = instance(kind, 7, seed)
    model = convert.to_cvxpy(W, 3, [2])
    model.solve(solver="HIGHS")
    best = solve(W, 3, "exhaustive", protected=[2])
    assert model.value == pytest.approx(float(best.objective), rel=1e-5, abs=1e-6)
    chosen = np.flatnonzero(model.var_dict["x"].value > 0.5).tolist()
    assert oracle.objective(W, chosen) == pytest.approx(float(best.objective), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("giant", [1e13, 1e17, -1e250])
def test_a_protected_giant_takes_no_part_in_models(giant):
    """Neither in the shift that makes the quadratic form convex nor in the penalty on sizes."""
    W = np.array([*W3, [giant] * 3])
    W = np.column_stack([W, [giant] * 4])
    model = convert.to_cvxpy(W, 2, [3], form="quadratic")
    model.var_dict["x"].value = np.array([1.0, 0, 1, 0])
    assert model.objective.value == pytest.approx(5.0)
    assert model.objective.is_dcp()
    assert (W[3] == giant).all()  # the caller's own
    pytest.importorskip("dimod")
    assert convert.to_dimod_bqm(W, 2, protected=[3]) == convert.to_dimod_bqm(W3, 2)


def test_the_shift_needs_no_eigenvalue(monkeypatch):
    """LAPACK does not converge for some weights that are far apart; its LinAlgError came through."""

    def fails(W):
        raise np.linalg.LinAlgError

    monkeypatch.setattr(np.linalg, "eigvalsh", fails)
    model = convert.to_cvxpy(W3, 2, form="quadratic")
    model.var_dict["x"].value = np.array([1.0, 0, 1])
    assert model.objective.value == pytest.approx(5.0)
    assert np.linalg.eigh(model.objective.expr.args[0].args[1].value)[0][0] >= 0


@given(instances(max_n=7))
def test_cvxpy_quadratic_form_is_convex(drawn):
    W, k, _ = drawn
    model = convert.to_cvxpy(W, k, form="quadratic")
    assert model.objective.is_dcp()
    P = model.objective.expr.args[0].args[1].value if len(W) > 1 else np.eye(1)
    assert np.linalg.eigvalsh(P)[0] >= 0 or np.abs(W).max() == 0


@given(instances(max_n=7))
def test_bqm_energy_is_f_and_its_minimum_has_size_k(drawn):
    pytest.importorskip("dimod")
    W, k, protected = drawn
    model = convert.to_dimod_bqm(W, k, protected=protected)
    free = [i for i in range(len(W)) if i not in protected]
    assert list(model.variables) == free
    size = np.abs(W).sum() * len(W) ** 2 + 1e-300
    energies = {}
    for bits in itertools.product((0, 1), repeat=len(free)):
        S = tuple(i for i, bit in zip(free, bits, strict=True) if bit)
        energies[S] = float(model.energy(dict(zip(free, bits, strict=True)))) if free else float(model.offset)
        if len(S) == k:
            assert abs(energies[S] - oracle.objective(W, S)) <= 1e-9 * size
    assert len(min(energies, key=energies.get)) == k


def test_the_examples_of_the_docstrings():
    pytest.importorskip("dimod")  # an extra, so that the doctests themselves cannot run everywhere
    assert float(convert.to_dimod_bqm([[2.0, 0.0], [0.0, 1.0]], 1).energy({0: 0, 1: 1})) == 1.0
    assert convert.to_dimod_cqm([[2.0, 0.0], [0.0, 1.0]], 1).check_feasible({0: 1, 1: 1}) is False


def test_too_small_a_penalty_is_the_users_choice():
    dimod = pytest.importorskip("dimod")
    W = -np.ones((4, 4))
    best = dimod.ExactSolver().sample(convert.to_dimod_bqm(W, 2, 0.01)).first
    assert sum(best.sample.values()) == 4  # what the default prevents
    best = dimod.ExactSolver().sample(convert.to_dimod_bqm(W, 2)).first
    assert (sum(best.sample.values()), best.energy) == (2, pytest.approx(-4))


@given(instances(max_n=6))
def test_cqm_objective_and_size(drawn):
    pytest.importorskip("dimod")
    W, k, protected = drawn
    model = convert.to_dimod_cqm(W, k, protected=protected)
    free = [i for i in range(len(W)) if i not in protected]
    if not free:
        return
    size = max(np.abs(W).sum(), 1e-300)
    for bits in itertools.product((0, 1), repeat=len(free)):
        sample = dict(zip(free, bits, strict=True))
        S = [i for i in free if sample[i]]
        assert abs(float(model.objective.energy(sample)) - oracle.objective(W, S)) <= 1e-9 * size
        assert model.check_feasible(sample) == (len(S) == k)


@pytest.mark.slow
@given(instances())
def test_networkx_round_trip(drawn):
    W, k, protected = drawn
    graph = convert.to_networkx(W)
    assert np.array_equal(Problem.of(graph, k).W.numpy(), W)
    a, b = solve(W, k, protected=protected), solve(graph, k, protected=protected)
    assert (a.mask == b.mask).all()
    assert float(a.objective) == float(b.objective)


def test_labels_of_a_graph_are_kept():
    graph = nx.relabel_nodes(convert.to_networkx(W3), {0: "a", 1: "b", 2: "c"})
    assert nx.utils.graphs_equal(convert.to_networkx(graph), graph)
    pytest.importorskip("dimod")
    assert list(convert.to_dimod_bqm(graph, 1, protected=["b"]).variables) == ["a", "c"]


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_networkx_weight_of_the_induced_subgraph_is_f(n, seed):
    W = instance("indefinite", n, seed)
    for S in itertools.combinations(range(n), n // 2):
        part = convert.to_networkx(W).subgraph(S)
        weight = sum(w for _, w in part.nodes(data="weight")) + part.size(weight="weight")
        assert weight == pytest.approx(oracle.objective(W, S))


def test_bad_input(monkeypatch):
    with pytest.raises(ProblemError, match="one instance"):
        convert.to_networkx(np.zeros((2, 3, 3)))
    with pytest.raises(ProblemError, match="k = 4"):
        convert.to_cvxpy(W3, 4)
    with pytest.raises(OptionError, match="form='mip'"):
        convert.to_cvxpy(W3, 1, form="mip")
    if "dimod" in sys.modules:
        for penalty in (0, -1.0, float("inf"), float("nan"), "1", True):
            with pytest.raises(OptionError, match="penalty="):
                convert.to_dimod_bqm(W3, 1, penalty)
    monkeypatch.setitem(sys.modules, "dimod", None)
    with pytest.raises(OptionError, match=r'pip install "\.\[peers\]"'):
        convert.to_dimod_cqm(W3, 1)
