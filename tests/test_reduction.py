"""``maximize=`` and ``required=``: every method against enumeration, at every scale; names, frames, distances."""

import dataclasses
import math

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grace_opt import Problem, SolverResult, Status, compare, registry, solve
from grace_opt.errors import OptionError, ProblemError, SolverError
from grace_opt.problem import Reduction, SparseWeights
from grace_opt.solvers import BeamOptions
from grace_opt.testing import KINDS, check_solution, instance
from tests import oracle

METHODS = sorted(name for name in registry.specs() if name != "sdp")
LAST_DIGITS = 64 * np.finfo(float).eps
W = np.array([[4.0, 1, -2, 0], [1, 3, 0, -5], [-2, 0, 5, 2], [0, -5, 2, 1]])


@st.composite
def wanted(draw, max_n=7, sizes=(1, 3)):
    """W (B, n, n) at any scale, k, protected, required, and whether the most is sought."""
    n, size = draw(st.integers(1, max_n)), draw(st.integers(*sizes))
    scale = 10.0 ** draw(st.sampled_from([0, 0, 0, -300, -12, 12, 290]))
    given_, blocked, needed, ks = [], [], [], []
    for _ in range(size):
        kind = draw(st.sampled_from([kind for kind in KINDS if scale == 1 or kind != "scaled"]))
        given_.append(scale * instance(kind, n, draw(st.integers(0, 2**32 - 1))))
        roles = draw(st.lists(st.sampled_from(["free", "free", "free", "never", "always"]), min_size=n, max_size=n))
        blocked.append([role == "never" for role in roles])
        needed.append([role == "always" for role in roles])
        ks.append(draw(st.integers(sum(needed[-1]), n - sum(blocked[-1]))))
    return np.stack(given_), np.array(ks), np.array(blocked), np.array(needed), draw(st.booleans())


def check(W, ks, blocked, needed, maximize, sol, exact):
    """An answer against enumeration: also what a bound claims, and what OPTIMAL claims."""
    check_solution(W, ks, sol, blocked, needed)
    sol.verify()
    sign = -1 if maximize else 1
    for b, k in enumerate(ks):
        best = oracle.optimum(W[b].tolist(), k, np.flatnonzero(blocked[b]), np.flatnonzero(needed[b]), maximize)
        f, mine = float(sol.objective[b]), W[b][np.ix_(sol.mask[b], sol.mask[b])]
        assert f == pytest.approx(math.fsum(mine.ravel().tolist()), rel=LAST_DIGITS, abs=0)
        allowed = max(1e-9 * abs(best), len(W[b]) * LAST_DIGITS * np.abs(mine).sum())
        assert sol.lower_bound[b] <= best + LAST_DIGITS * abs(best)
        assert sol.upper_bound[b] >= best - LAST_DIGITS * abs(best)
        assert sol.gap[b] >= 0
        if exact or sol.status[b] is Status.OPTIMAL:
            assert sol.status[b] is Status.OPTIMAL
            assert sign * (f - best) <= allowed


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wanted(), st.sampled_from([False, "fast", "tight"]))
def test_every_method_against_enumeration(drawn, certify):
    W, ks, blocked, needed, maximize = drawn
    for name in METHODS:
        sol = solve(W, ks, name, protected=blocked, required=needed, maximize=maximize, certify=certify)
        check(*drawn, sol, exact=registry.get(name).exact)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wanted(max_n=5))
def test_the_quick_ones_against_enumeration(drawn):
    W, ks, blocked, needed, maximize = drawn
    for name in ("mies", "exhaustive", "local_search"):
        sol = solve(W, ks, name, protected=blocked, required=needed, maximize=maximize, certify=True)
        check(*drawn, sol, exact=name == "exhaustive")


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wanted(max_n=5, sizes=(1, 1)))
def test_sdp_against_enumeration(drawn):
    pytest.importorskip("cvxpy")
    W, ks, blocked, needed, maximize = drawn
    check(*drawn, solve(W, ks, "sdp", protected=blocked, required=needed, maximize=maximize), exact=False)


@pytest.mark.slow
@given(wanted())
def test_the_reduced_objective_is_f_and_never_above_it(drawn):
    """The solvers' objective plus the constant: f but for the last digits, and below it, so that bounds hold."""
    W, ks, blocked, needed, maximize = drawn
    made = Reduction.of(Problem.of(W, ks, protected=blocked), required=needed, maximize=maximize)
    inner, sign = made.problem.flatten(), -1 if maximize else 1
    for b, k in enumerate(ks):
        free = np.flatnonzero(~blocked[b] & ~needed[b])
        rest = 0.0 if made.rest is None else float(made.rest[b])
        chosen = free[: k - needed[b].sum()].tolist()
        whole = [*chosen, *np.flatnonzero(needed[b]).tolist()]
        exactly = [sign * float(W[b][i][j]) for i in whole for j in whole]
        terms = [float(inner.W[b][i][j]) for i in chosen for j in chosen]
        above = math.fsum([*terms, rest, *(-w for w in exactly)])
        assert above <= 0
        assert -above <= 8 * len(whole) * np.finfo(float).eps * math.fsum(map(abs, exactly)) + len(whole) * 5e-324


def test_numpy_torch_problem_and_compare_agree():
    sol = solve(W, 3, "exhaustive", maximize=True, required=[3])
    assert (sol.indices.tolist(), float(sol.objective), float(sol.bound)) == ([0, 2, 3], 10.0, 10.0)
    assert sol.required.tolist() == [False, False, False, True]
    for given_ in (torch.from_numpy(W), torch.from_numpy(W).float(), Problem.of(torch.from_numpy(W), 3)):
        same = solve(given_, None if isinstance(given_, Problem) else 3, "exhaustive", maximize=True, required=[3])
        assert same.indices.tolist() == [0, 2, 3]
        assert isinstance(same.upper_bound, torch.Tensor)
        assert float(same.upper_bound) == float(same.objective) == float(same.lower_bound) == 10.0
        assert same.required.tolist() == [False, False, False, True]
    both = compare(W, 3, ["random", "exhaustive"], maximize=True, required=[3])
    assert both.best is both["exhaustive"]
    assert float(both.best_bound) == 10.0
    both.verify()


def test_nothing_is_asked_for_nothing_changes():
    plain = solve(W, 2)
    for same in (solve(W, 2, required=[]), solve(W, 2, maximize=False), solve(W, 2, required=np.zeros(4, bool))):
        assert (same.indices == plain.indices).all()
        assert same.required is None
        assert float(same.upper_bound) == float(same.objective) == float(plain.objective)


def test_no_answer_is_minus_zero():
    sol = solve(np.zeros((3, 3)), 2, maximize=True, certify=True)
    assert [str(float(value)) for value in (sol.objective, sol.lower_bound, sol.upper_bound)] == ["0.0"] * 3


def test_a_large_tie_does_not_hide_small_ones():
    """Every vertex is tied to the required one by 1e17: the shift takes that out before anything is rounded."""
    small = np.array([[0.0, 1e17, 1e17, 1e17], [1e17, 3, 0, 0], [1e17, 0, 1, 0], [1e17, 0, 0, 2]])
    small[0, 0] = -2e17
    sol = solve(small, 2, "branch_and_bound", required=[0])
    assert (sol.indices.tolist(), float(sol.objective)) == ([0, 2], 1.0)


def test_a_bound_is_rounded_downwards():
    problem = Problem.of(np.stack([W] * 5), 2)
    rest = torch.tensor([-1e-30, 1e-30, 1.0, 1e-30, 1e308], dtype=torch.float64)
    found = torch.tensor([1.0, 1.0, 1.0, -math.inf, 1.5e308], dtype=torch.float64)
    below = Reduction(problem, problem, rest=rest).bound(found).tolist()
    assert below == [math.nextafter(1.0, 0.0), 1.0, 2.0, -math.inf, -math.inf]


def test_whole_numbers_stay_whole():
    """So that a bound within one step proves the optimum: the shift of 7 / 2 is rounded to 3, and 1 is left."""
    whole = np.array([[7, 1, 0, 2], [1, 0, 1, 1], [0, 1, 0, 3], [2, 1, 3, 0]])
    made = Reduction.of(Problem.of(whole, 3), required=[0])
    assert made.problem.W.diagonal().tolist() == [0, 5, 3, 7]
    assert made.rest.tolist() == [1.0]
    assert made.targets([9.0]) == (8.0,)
    assert Reduction.of(Problem.of(whole, 3), required=[0], maximize=True).targets([9.0]) == (-10.0,)
    assert solve(whole, 3, "branch_and_bound", required=[0]).status is Status.OPTIMAL


@pytest.mark.parametrize("form", [np.asarray, lambda graph: SparseWeights.of(csr_array(graph))[0]])
@pytest.mark.parametrize("times", [1, 3])
def test_multiples_of_a_step_stay_multiples(times, form):
    """A graph's f is even: a shift of 1 would halve the step that proves its optimum."""
    graph = times * np.array([[0, 1, 0, 2], [1, 0, 1, 1], [0, 1, 0, 3], [2, 1, 3, 0]])
    problem = dataclasses.replace(Problem.of(form(graph), 4), integer=True)
    made = Reduction.of(problem, required=[0, 1])
    assert made.problem.diagonal.tolist() == [0, 0, 2 * times, 6 * times]
    assert made.rest.tolist() == [2 * times]
    assert float(made.problem.step) == float(made.given.step) == 2 * times


def test_callback_target_and_start_speak_of_the_problem_as_given(clock):
    clock.per_look = 0.01
    big = instance("indefinite", 40, 1)
    needed, seen = [3, 17, 39], []
    common = {"maximize": True, "required": needed}
    sol = solve(big, 12, "branch_and_bound", **common, callback=seen.append, time_limit=2)
    assert seen
    for progress in seen:
        assert progress.mask.sum() == 12
        assert progress.mask[needed].all()
        exact = oracle.objective(big, np.flatnonzero(progress.mask))
        assert progress.objective == pytest.approx(exact, rel=1e-12)
        assert progress.objective == progress.lower_bound <= progress.upper_bound
    f = float(sol.objective)
    start = solve(big, 12, "random", **common)
    easy = solve(big, 12, "tabu", **common, start="random", target=0.5 * f)
    assert start.objective < 0.5 * f <= easy.objective <= f
    same = solve(big, 12, "local_search", **common, start=sol.mask, max_steps=0)
    assert (same.mask == sol.mask).all()
    with pytest.raises(OptionError, match=r"start= chose \[14\] vertices with the required ones where k = \[12\]"):
        solve(big, 12, "local_search", **common, start=[*range(4), *range(20, 28)])


@pytest.mark.parametrize("method", ["mies", "drop_greedy"])
def test_f_for_every_k_has_the_users_sign(method):
    path = solve(W, 2, method, maximize=True, path=True).stats
    for k in range(5):
        assert path["path"][k] == oracle.objective(W, path["order"][:k])
    with pytest.raises(OptionError, match="path=True gives f for every k"):
        solve(W, 2, method, required=[0], path=True)
    with pytest.raises(OptionError, match="path=True"):
        compare(W, 2, [method], options={method: {"path": True}}, required=[0])


def test_a_relaxations_value_has_the_users_sign():
    pytest.importorskip("cvxpy")
    sol = solve(instance("wishart", 8, 0), 4, "sdp", maximize=True, required=[1])
    (value,) = sol.stats["relaxation"]
    assert sol.objective * (1 - 1e-4) <= value <= sol.upper_bound * (1 + 1e-4)


def test_other_packages_methods_have_them_too():
    def last(problem, options, run):
        """The last k candidates."""
        order = torch.arange(problem.n) + 1000 * problem.candidates
        mask = torch.zeros_like(problem.candidates)
        mask[order.argsort(descending=True)[: int(problem.k)]] = True
        f = float((problem.W * mask * mask[:, None]).sum())
        return SolverResult(mask, stats={"f": f}, objective_stats=("f",))

    registry.register_solver("last")(last)
    try:
        sol = solve(np.stack([W, 2 * W]), [2, 3], "last", maximize=True, required=[0])
    finally:
        registry.unregister("last")
    assert sol.mask.tolist() == [[True, False, False, True], [True, False, True, True]]
    assert sol.stats["f"] == pytest.approx(sol.objective.tolist())


GRAPH = nx.Graph([("a", "b", {"weight": 3.0}), ("b", "c", {"weight": 2.0}), ("c", "d", {"weight": 7.0})])
REFUSED = {
    "both": ({"required": [1, 2], "protected": [2]}, "vertex 2 is both in required= and in protected="),
    "too many": ({"required": [0, 1, 2]}, "required names 3 vertices, but k = 2"),
    "too few are left": ({"required": [0], "protected": [1, 2, 3]}, "only 1 of 4 vertices are unprotected"),
    "out of range": ({"required": [4]}, "required holds vertex 4"),
    "names": ({"required": ["a"]}, "required has dtype <U1"),
    "torch": ({"required": torch.tensor([0])}, "numpy arrays and torch tensors are mixed"),
    "in an instance": (
        {"W": np.stack([W, W]), "required": np.array([[0, 0, 0, 0], [1, 1, 1, 0]], bool)},
        r"required names 3 vertices in instance \[1\], but k = 2",
    ),
    "both in an instance": (
        {"W": np.stack([W, W]), "required": [1], "protected": np.array([[0, 0, 0, 0], [0, 1, 0, 0]], bool)},
        r"protected= in instance \[1\]",
    ),
    "of a graph": ({"W": GRAPH, "required": ["e"]}, "'e', which is not a node or label of W; there are 'a', 'b'"),
    "both of a graph": ({"W": GRAPH, "required": ["a"], "protected": ["a"]}, "vertex 'a' is both"),
    "overflow": ({"W": np.full((4, 4), 1e306), "required": [0]}, "required vertices overflow"),
    "unchecked": ({"required": [0], "check": False}, "required= reads W's data"),
    "no bool": ({"maximize": "yes"}, "maximize='yes'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    arguments, message = REFUSED[case]
    arguments = {"W": W} | arguments
    with pytest.raises((ProblemError, OptionError), match=message):
        solve(arguments.pop("W"), 2, **arguments)
    arguments = {"W": W} | REFUSED[case][0]
    with pytest.raises((ProblemError, OptionError), match=message):
        compare(arguments.pop("W"), 2, ["mies"], **arguments)


def test_a_doctored_solution_is_found():
    sol = solve(W, 2, "exhaustive", maximize=True, required=[3])
    with pytest.raises(SolverError, match=r"upper bound .* below the objective"):
        dataclasses.replace(sol, upper_bound=sol.objective - 1).verify()
    with pytest.raises(SolverError, match="did not choose all required"):
        dataclasses.replace(sol, required=np.array([True, True, True, True])).verify()


def test_a_comparison_of_a_batch_in_the_users_sign():
    many = np.stack([instance("wishart", 8, seed) for seed in range(5)])
    found = compare(many, 3, ["think", "exhaustive", "random"], maximize=True, required=[2], certify=True)
    found.verify()
    best = found.best
    assert (best.objective == found["exhaustive"].objective).all()
    assert (best.objective >= found["random"].objective).all()
    assert (found.gaps("random") >= 0).all()
    rows = found.rows()
    assert all(row["lower_bound"] == row["objective"] <= row["upper_bound"] for row in rows)
    assert all(row["best_bound"] >= row["objective"] * (1 - 1e-9) for row in rows)
    assert "no method found a larger objective" in str(found)
    assert "best upper bound" in str(found)
    assert next(line for line in str(found).splitlines() if line.startswith("exhaustive")).split()[2] == "5/5"
    text = str(compare(W, 2, ["think", "exhaustive"], maximize=True))
    assert "the best upper bound of all methods" in text


def test_one_options_object_and_beam():
    assert solve(W, 2, BeamOptions(width=2), maximize=True, required=[0]).mask[0]


class TestDataFrames:
    names = tuple("wxyz")
    frame = pd.DataFrame(W, index=names, columns=names)

    def test_labels_come_back_and_names_are_taken(self):
        for needed in (["w"], {"w"}, pd.Index(["w"]), pd.Series(["w"]), np.array(["w"]), [True, False, False, False]):
            sol = solve(self.frame, 2, "exhaustive", required=needed, protected=["y"], maximize=True)
            assert sol.labels == ["w", "x"]
        assert "vertices ['w', 'x']" in repr(sol)
        assert solve(self.frame, 2, "exhaustive", protected=self.frame["y"] > 4).labels == ["x", "z"]
        assert solve(self.frame, 2, "local_search", start=["y", "z"], max_steps=0).labels == ["y", "z"]
        assert isinstance(sol.mask, np.ndarray)

    def test_labels_of_a_batch(self):
        made = Problem.of(np.stack([W, W]), [1, 2], labels=self.names)
        assert solve(made, method="exhaustive", required=["w"]).labels == [["w"], ["w", "y"]]
        assert compare(made, methods=["random", "exhaustive"], required=["w"]).best.labels == [["w"], ["w", "y"]]

    @pytest.mark.parametrize(
        ("frame", "message"),
        [
            (frame.rename(index={"y": "q"}), r"row 2 is called 'q' and column 2 'y'.*set_axis"),
            (frame.loc[["w", "x", "z", "y"]], r"row 2 is called 'z' and column 2 'y'.*W\.loc\[W\.columns\]"),
            (frame.iloc[:3], r"shape \(3, 4\)"),
            (pd.DataFrame(W, index=list("aabc"), columns=list("aabc")), "column 0 and column 1 are both called 'a'"),
            (pd.DataFrame([[2**53 + 1, 0.5], [0, 1.0]]), "holds the integer 9007199254740993"),
        ],
    )
    def test_frames_that_are_no_matrix(self, frame, message):
        with pytest.raises(ProblemError, match=message):
            solve(frame, 1)

    def test_a_series_of_bools_for_other_vertices(self):
        with pytest.raises(ProblemError, match=r"Series of bools .*reindex"):
            solve(self.frame, 1, protected=(self.frame["y"] > 4)[::-1])

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            (["a"], "1 names, W has 4"),
            (["a", "b", "c", "a"], "0 and vertex 3 are both called 'a'"),
            ("wxyz", "give a list of 4"),
        ],
    )
    def test_labels_that_do_not_fit(self, labels, message):
        with pytest.raises(ProblemError, match=message):
            Problem.of(W, 1, labels=labels)
        with pytest.raises(ProblemError, match="labels of its own"):
            Problem.of(self.frame, 1, labels=self.names)


def test_condensed_distances_are_those_of_squareform():
    from scipy.spatial.distance import pdist, squareform

    distances = pdist(np.random.default_rng(0).normal(size=(9, 3)))
    full = solve(squareform(distances), 4, "exhaustive", maximize=True)
    for form in (distances, distances.tolist(), torch.from_numpy(distances)):
        sol = solve(form, 4, "exhaustive", maximize=True)
        assert (np.asarray(sol.indices) == full.indices).all()
        assert float(sol.objective) == float(full.objective)
