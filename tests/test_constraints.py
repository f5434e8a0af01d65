"""Groups, pairs and budgets: every method that takes them against enumeration; what contradicts itself; bad input."""

import dataclasses
import itertools
import json
import math
import os
from collections import Counter

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from grace_opt import Problem, Status, compare, registry, solve
from grace_opt.bounds import lagrangian
from grace_opt.bounds.qcr import solve_relaxation
from grace_opt.bounds.subproblem import Subproblem
from grace_opt.cli.app import app
from grace_opt.cli.constraints import ConstraintOptions
from grace_opt.errors import InfeasibleConstraintsError, OptionError, ProblemError, SolverError
from grace_opt.problem.constraints import UndecidedError, constraints_of, find_choice, program
from grace_opt.problem.constraints.costs import cost_row
from grace_opt.solvers.branch_and_bound.depth_first import ConstrainedDepthFirst
from grace_opt.testing import KINDS, check_solution, instance
from tests import oracle

METHODS = sorted(name for name, spec in registry.specs().items() if spec.constraints)
LAST_DIGITS = 64 * np.finfo(float).eps
W = np.array([[4.0, 1, -2, 0], [1, 3, 0, -5], [-2, 0, 5, 2], [0, -5, 2, 1]])
#: Instances of the large random check, a minute of them; ``make test-deep`` has more.
COUNT = int(os.environ.get("GRACE_TEST_INSTANCES", "3000")) * 3 // 20


def drawn_costs(rng, n):
    """Costs that are hard to compare: fractions, ties, whole numbers, and what int64 has no room for."""
    kind = rng.choice(["tenths", "whole", "uniform", "log-normal", "any scale", "zeros"])
    if kind == "tenths":
        return rng.integers(0, 10, n) / 10
    if kind == "whole":
        return rng.integers(0, 2000, n).astype(float)
    if kind == "uniform":
        return rng.random(n) * 10.0 ** rng.integers(-200, 200)
    if kind == "log-normal":
        return rng.lognormal(sigma=8.0, size=n)
    return 10.0 ** rng.uniform(-300, 300, n) if kind == "any scale" else np.zeros(n)


def drawn_case(rng, max_n=9):
    """An instance, what is required and protected, and constraints: often those of a set, so that they can hold."""
    n = int(rng.integers(1, max_n + 1))
    kind = str(rng.choice(KINDS))
    weights = instance(kind, n, int(rng.integers(2**32)))
    if kind != "scaled":
        weights = weights * 10.0 ** rng.choice([0, 0, 0, -300, -12, 12, 290])
    if kind == "integer" and rng.random() < 0.5:
        weights = np.round(instance(kind, n, int(rng.integers(2**32)))).astype(int)
    k = int(rng.integers(0, n + 1))
    hidden = set(rng.permutation(n)[:k].tolist()) if rng.random() < 0.85 else set()
    asked, tight = {}, rng.random()
    if rng.random() < 0.6:
        groups = rng.integers(0, rng.integers(1, 4) + 1, n).tolist()
        counts = {}
        for label in set(groups):
            inside = sum(groups[i] == label for i in hidden) if hidden else int(rng.integers(0, 3))
            low = inside if rng.random() < tight else max(0, inside - int(rng.integers(0, 2)))
            high = inside if rng.random() < tight else inside + int(rng.integers(0, 2))
            if rng.random() < 0.8 and low <= groups.count(label):
                counts[label] = (None if rng.random() < 0.2 else low, None if rng.random() < 0.2 else high)
        counts = {label: pair for label, pair in counts.items() if pair != (None, None)}
        if counts:
            asked |= {"groups": groups, "counts": counts}
    if rng.random() < 0.5 and n > 1:
        pairs = [rng.permutation(n)[:2].tolist() for _ in range(rng.integers(1, 2 * n))]
        asked["exclude"] = [pair for pair in pairs if not hidden or not {*pair} <= hidden]
    if rng.random() < 0.4 and n > 2:
        sets = [rng.permutation(n)[: rng.integers(2, 4)].tolist() for _ in range(rng.integers(1, 3))]
        asked["together"] = [one for one in sets if not hidden or len(hidden & {*one}) in (0, len(one))]
    if rng.random() < 0.5:
        costs = drawn_costs(rng, n)
        spent = math.fsum(costs[i] for i in hidden) if hidden else math.fsum(costs) * rng.random()
        budget = spent * float(rng.choice([1.0, 1.0, 1 + 2.0**-52, 1.3, 0.7, 1 - 2.0**-53]))
        asked |= {"costs": costs.tolist(), "budget": min(budget, np.finfo(float).max)}
    roles = rng.choice(3, n, p=(0.6, 0.2, 0.2)) if rng.random() < 0.5 else np.zeros(n, int)
    required = [i for i in np.flatnonzero(roles == 1).tolist() if not hidden or i in hidden][:k]
    protected = [i for i in np.flatnonzero(roles == 2).tolist() if i not in hidden][: n - k]
    return weights, k, asked, required, protected, bool(rng.integers(2))


@st.composite
def cases(draw, max_n=8):
    return drawn_case(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), max_n)


def check(case, method, certify=False, **options):
    """One answer against enumeration: it keeps everything, its bounds hold, and OPTIMAL is; whether there is one."""
    weights, k, asked, required, protected, maximize = case
    best = oracle.optimum(weights.tolist(), k, protected, required, maximize, **asked)
    common = {"required": required, "protected": protected, "maximize": maximize, "certify": certify}
    if best is None:
        with pytest.raises(InfeasibleConstraintsError, match="no choice keeps"):
            solve(weights, k, method, **asked, **common, **options)
        return False
    sol = solve(weights, k, method, **asked, **common, **options).verify()
    check_solution(weights, k, sol, protected, required)
    assert oracle.keeps(np.flatnonzero(sol.mask).tolist(), **asked)
    f, sign, mine = float(sol.objective), -1 if maximize else 1, np.abs(weights[np.ix_(sol.mask, sol.mask)]).sum()
    allowed = max(1e-9 * abs(best), len(weights) * LAST_DIGITS * mine)
    assert sign * (f - best) >= -LAST_DIGITS * abs(best)
    assert sol.lower_bound <= best + LAST_DIGITS * abs(best)
    assert sol.upper_bound >= best - LAST_DIGITS * abs(best)
    if registry.get(method).exact:
        assert sol.status is Status.OPTIMAL
    if sol.status is Status.OPTIMAL:
        assert sign * (f - best) <= (0 if weights.dtype.kind == "i" else allowed)
    return True


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(max_n=6))
def test_exhaustive_against_enumeration(case):
    check(case, "exhaustive")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), certify=st.sampled_from([False, "fast", "tight"]))
def test_every_method_against_enumeration(method, case, certify):
    check(case, method, certify)


@pytest.mark.slow
def test_hundreds_of_instances_with_every_combination_and_none_wrong():
    found = Counter()
    for seed in range(COUNT):
        case = drawn_case(np.random.default_rng(seed))
        for method in METHODS:
            try:
                found[check(case, method)] += 1
            except BaseException as error:
                error.add_note(f"drawn_case(np.random.default_rng({seed})), {method}")
                raise
        found.update(case[2].keys())
    assert min(found.values()) > COUNT / 10, found


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_the_tree_search_alone_finds_the_least_that_keeps_the_rows(seed):
    """Without an incumbent and without fixing, at any prices of the rows: only the tree decides."""
    rng = np.random.default_rng(seed)
    weights, k, asked, _, _, _ = drawn_case(rng, max_n=9)
    n = len(weights)
    rows, (sub, scale) = constraints_of(n, **asked), Subproblem.of(Problem.of(weights, k))
    if rows is None or sub is None or sub.decided:
        return
    kept = rows.integers
    size = np.maximum(np.abs(kept.A).max(1, initial=1), 1)
    prices = np.where(rng.random(len(size)) < 0.5, 0.0, rng.normal(size=len(size)) / size)
    prices[(prices > 0) & (kept.upper > 2**60) | (prices < 0) & (kept.lower < -(2**60))] = 0.0
    paying = lagrangian._paying(sub, kept.A.astype(float), kept.lower.astype(float), kept.upper.astype(float), prices)
    search, value, answer = ConstrainedDepthFirst(paying, solve_relaxation(paying), kept, prices), math.inf, None
    while search.top:
        _, _, found = search.advance(value, 0.0, 7)
        if found is not None:
            chosen = np.flatnonzero(sub.whole_mask(found, n)).tolist()
            assert len(chosen) == k
            assert oracle.keeps(chosen, **asked)
            if (f := oracle.objective(weights, chosen)) / scale < value:
                value, answer = f / scale, f
    best = oracle.optimum(weights.tolist(), k, **asked)
    assert (answer is None) == (best is None)
    assert best is None or answer == pytest.approx(best, rel=1e-9, abs=n**2 * LAST_DIGITS * np.abs(weights).max())


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_exchanges_keep_the_rows_and_none_is_left(seed):
    """Every exchange of up to two for two that keeps all constraints, tried one by one, where weights are whole."""
    rng = np.random.default_rng(seed)
    drawn, k, asked, _, _, _ = drawn_case(rng, max_n=8)
    n, rows = len(drawn), constraints_of(len(drawn), **asked)
    if rows is None or oracle.optimum(np.zeros((n, n)).tolist(), k, **asked) is None:
        return
    weights = np.triu(rng.integers(-9, 10, (n, n))).astype(float)
    weights += weights.T
    chosen = {*solve(weights, k, "local_search", **asked).indices.tolist()}
    f, units = oracle.objective(weights, chosen), rows.units
    for other in itertools.combinations(range(n), k):
        leave, enter = ({*units[list(a - b)].tolist()} for a, b in ((chosen, {*other}), ({*other}, chosen)))
        if len(leave) <= 2 and len(enter) <= 2 and oracle.keeps(other, **asked):
            assert oracle.objective(weights, other) >= f


GRAPH = nx.Graph([("a", "b", {"weight": 3.0}), ("b", "c", {"weight": 2.0}), ("c", "d", {"weight": 7.0})])
FRAME = pd.DataFrame({"colour": ["red", "blue", "red", "blue"], "price": [1.0, 2.0, 3.0, 4.0]})
GROUPS = ["a", "a", "b", "b"]
REFUSED = {
    "groups of wrong length": ({"groups": ["a", "b"], "counts": 1}, "groups has 2 entries, W has 4 vertices"),
    "counts without groups": ({"counts": 1}, "counts= is given without groups="),
    "groups without counts": ({"groups": GROUPS}, "groups= is given without counts="),
    "budget without costs": ({"budget": 1.0}, "budget= is given without costs="),
    "costs without budget": ({"costs": [1, 1, 1, 1]}, "costs= is given without budget="),
    "data without columns": ({"data": FRAME}, "data= has the columns that groups= and costs= name"),
    "no frame": ({"groups": "colour", "counts": 1, "data": [1]}, r"data=\[1\]: give a DataFrame"),
    "a column without a frame": (
        {"groups": "colour", "counts": 1},
        "groups='colour': give one entry for each vertex, or",
    ),
    "no such column": (
        {"groups": "color", "counts": 1, "data": FRAME},
        "groups='color' is no column of data=; there are 'colour', 'price'. Did you mean 'colour'",
    ),
    "more than there are": ({"groups": GROUPS, "counts": {"a": 3}}, r"counts\['a'\]=3: group 'a' has 2 vertices"),
    "unknown group": ({"groups": GROUPS, "counts": {"c": 1}}, "counts names 'c', and no vertex has that label"),
    "upside down": ({"groups": GROUPS, "counts": (2, 1)}, r"counts=\(2, 1\): at least 2 and at most 1 cannot be"),
    "negative": ({"groups": GROUPS, "counts": -1}, "counts=-1: give an int .* at least 0"),
    "a fraction": ({"groups": GROUPS, "counts": 1.5}, "counts=1.5: give an int for exactly so many, or a pair"),
    "a bool": ({"groups": GROUPS, "counts": True}, "counts=True: give an int"),
    "three numbers": ({"groups": GROUPS, "counts": (1, 2, 3)}, r"counts=\(1, 2, 3\): give an int"),
    "nothing": ({"groups": GROUPS, "counts": (None, None)}, r"counts=\(None, None\): give an int"),
    "no label": ({"groups": ["a", None, "b", "b"], "counts": 1}, "groups: vertex 1 has the label None"),
    "NaN": ({"groups": [1.0, math.nan, 1.0, 1.0], "counts": 1}, "groups: vertex 1 has the label nan"),
    "no name": ({"groups": ["a", ["b"], "b", "b"], "counts": 1}, r"groups: vertex 1 has the label \['b'\], a list"),
    "counts of several": ({"groups": {"x": GROUPS}, "counts": 1}, "counts=1: groups= names several partitions, 'x'"),
    "unknown partition": ({"groups": {"x": GROUPS}, "counts": {"y": 1}}, "counts names 'y', which groups= has not"),
    "of several, too many": ({"groups": {"x": GROUPS}, "counts": {"x": 3}}, r"counts\['x'\]=3: group 'a' has 2"),
    "a pair with itself": ({"exclude": [(1, 1)]}, r"exclude\[0\]=\(1, 1\) names vertex 1 twice"),
    "three to exclude": ({"exclude": [(0, 1), (0, 1, 2)]}, r"exclude\[1\]=\(0, 1, 2\) has 3 vertices"),
    "no pairs": ({"exclude": [0, 1]}, r"exclude\[0\]=0: give a list of pairs"),
    "one together": ({"together": [(1,)]}, r"together\[0\]=\(1,\) has 1 vertices"),
    "a text": ({"together": "ab"}, "together='ab': give a list of sets"),
    "out of range": ({"exclude": [(0, 4)]}, r"exclude\[0\] names 4: vertices are 0 to 3"),
    "from the end": ({"exclude": [(0, -1)]}, r"exclude\[0\] names -1: vertices are 0 to 3"),
    "unknown label": (
        {"W": GRAPH, "exclude": [("a", "e")]},
        r"exclude\[0\] names 'e', which is no label of W; there are",
    ),
    "numbers of a graph": ({"W": GRAPH, "together": [(0, 1)]}, r"together\[0\] names 0, which is no label of W"),
    "negative costs": ({"costs": [1, -1, 1, 1], "budget": 9}, r"costs\[1\]=-1: give a finite number >= 0"),
    "NaN costs": ({"costs": [1, math.nan, 1, 1], "budget": 9}, r"costs\[1\]=nan: give a finite number >= 0"),
    "a negative budget": ({"costs": [1, 1, 1, 1], "budget": -1}, "budget=-1: give a number >= 0"),
    "NaN for a budget": ({"costs": [1, 1, 1, 1], "budget": math.nan}, "budget=nan: give a number >= 0"),
    "few costs": ({"costs": [1, 1], "budget": 1}, "costs has 2 entries, W has 4 vertices"),
    "a batch": (
        {"W": np.stack([W, W]), "exclude": [(0, 1)]},
        r"W is a batch of shape \(2,\), and constraints \(exclude=\)",
    ),
    "a series of others": (
        {"W": GRAPH, "groups": pd.Series(GROUPS, index=list("abce")), "counts": 1},
        "groups has no entry for vertex 'd': its index has to have W's labels",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    arguments, message = REFUSED[case]
    with pytest.raises((ProblemError, OptionError), match=message):
        solve(**({"W": W, "k": 2, "method": "exhaustive"} | arguments))
    with pytest.raises((ProblemError, OptionError), match=message):
        compare(**({"W": W, "k": 2, "methods": ["exhaustive"]} | arguments))


CONFLICTS = {
    "budget below the cheapest": ({"costs": [3, 4, 5, 6], "budget": 6.5}, {"k = 2", "budget 6.5"}),
    "counts above k": (
        {"groups": [0, 0, 1, 1], "counts": (2, None)},
        {"k = 2", "at least 2 of group 0", "at least 2 of group 1"},
    ),
    "counts below k": ({"groups": [0, 0, 0, 1], "counts": {0: (None, 0)}}, {"k = 2", "exactly 0 of group 0"}),
    "required and excluded": (
        {"required": [0, 1], "exclude": [(1, 0), (2, 3)]},
        {"required [0]", "required [1]", "exclude (0, 1)"},
    ),
    "required and together": (
        {"required": [0], "protected": [2], "together": [(0, 2), (1, 3)]},
        {"required [0]", "protected [2]", "together (0, 2)"},
    ),
    "together and excluded": (
        {"exclude": [(0, 1)], "together": [(0, 1)], "required": [0]},
        {"exclude (0, 1)", "together (0, 1)", "required [0]"},
    ),
    "too large a set": ({"together": [(0, 1, 2)], "required": [3]}, {"k = 2", "together (0, 1, 2)"}),
    "one vertex too dear": ({"costs": [3, 1, 1, 1], "budget": 2, "required": [0]}, {"budget 2", "required [0]"}),
    "partitions": (
        {"groups": {"x": [0, 0, 1, 1], "y": [0, 0, 0, 1]}, "counts": {"x": {1: 2}, "y": {1: 0}}},
        {"exactly 2 of group 1 in 'x'", "exactly 0 of group 1 in 'y'"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFLICTS)
def test_a_smallest_contradiction_is_named(case):
    asked, expected = CONFLICTS[case]
    for method in METHODS:
        with pytest.raises(InfeasibleConstraintsError, match="no choice keeps these") as caught:
            solve(W, 2, method, **asked)
        assert {*caught.value.conflict} == expected
        assert all(words in str(caught.value) for words in expected)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_a_contradiction_is_one_and_no_part_of_it_is(seed):
    """Every constraint by its words: those that are named contradict each other, and all but one of them do not."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 6))
    k = int(rng.integers(1, n + 1))
    pool = {f"k = {k}": lambda S: len(S) == k}
    asked = {"required": rng.permutation(n)[: rng.integers(0, k + 1)].tolist(), "exclude": [], "together": []}
    asked["protected"] = [i for i in range(n) if i not in asked["required"]][: rng.integers(0, n - k + 1)]
    for i in asked["required"]:
        pool[f"required [{i}]"] = lambda S, i=i: i in S
    for i in asked["protected"]:
        pool[f"protected [{i}]"] = lambda S, i=i: i not in S
    for _ in range(rng.integers(0, 5)):
        pair = tuple(sorted(rng.permutation(n)[:2].tolist()))
        kind = ("exclude", "together")[rng.integers(2)]
        asked[kind].append(pair)
        refused = 2 if kind == "exclude" else 1
        pool[f"{kind} {pair}"] = lambda S, pair=pair, refused=refused: len(S & {*pair}) != refused
    groups = rng.integers(0, 2, n).tolist()
    low = int(rng.integers(1, 3))
    asked |= {"groups": groups, "counts": {g: (low, None) for g in set(groups) if groups.count(g) >= low}}
    for g in asked["counts"]:
        pool[f"at least {low} of group {g}"] = lambda S, g=g: sum(groups[i] == g for i in S) >= low
    asked |= {"costs": rng.integers(0, 5, n).tolist(), "budget": float(rng.integers(0, 8))}
    pool[f"budget {asked['budget']:g}"] = lambda S: sum(asked["costs"][i] for i in S) <= asked["budget"]
    every = [{i for i in range(n) if bits >> i & 1} for bits in range(2**n)]
    try:
        solve(np.zeros((n, n)), k, "exhaustive", **asked)
    except InfeasibleConstraintsError as error:
        conflict = [pool[words] for words in error.conflict]
        assert not any(all(keeps(S) for keeps in conflict) for S in every)
        for left_out in range(len(conflict)):
            others = conflict[:left_out] + conflict[left_out + 1 :]
            assert any(all(keeps(S) for keeps in others) for S in every)
    else:
        assert any(all(keeps(S) for keeps in pool.values()) for S in every)


def test_methods_that_take_none_refuse_and_name_those_that_do():
    with pytest.raises(
        SolverError, match=r"'mies' takes no constraints .* use 'branch_and_bound', 'exhaustive', 'local"
    ):
        solve(W, 2, exclude=[(0, 1)])
    found = compare(W, 2, exclude=[(0, 2)])
    assert sorted(sol.method for sol in found) == METHODS
    assert "takes no constraints" in found.left_out["tabu"]
    assert {tuple(sol.indices) for sol in found} == {(1, 3)}


@pytest.mark.slow
def test_frames_series_labels_and_arrays_say_the_same():
    expected = solve(W, 2, "exhaustive", groups=["red", "blue", "red", "blue"], counts=1, costs=[1, 2, 3, 4], budget=5)
    assert expected.indices.tolist() == [0, 3]
    names = list("abcd")
    table = pd.DataFrame(W, index=names, columns=names)
    labelled = FRAME.set_axis(names).iloc[::-1]  # by label, whatever the order
    for weights, more in (
        (W, {"groups": "colour", "costs": "price", "data": FRAME}),
        (W, {"groups": FRAME.colour, "costs": FRAME.price.to_numpy()}),
        (table, {"groups": "colour", "costs": "price", "data": labelled}),
        (table, {"groups": labelled.colour, "costs": labelled.price}),
        (table, {"groups": "colour", "costs": "price", "data": FRAME}),
        (W, {"groups": np.array(["red", "blue"] * 2), "costs": torch.tensor([1, 2, 3, 4])}),
    ):
        assert (solve(weights, 2, "exhaustive", counts=1, budget=5, **more).mask == expected.mask).all()
    several = solve(W, 2, "exhaustive", groups=["colour"], counts={"colour": 1}, data=FRAME)
    assert (
        several.indices.tolist()
        == solve(W, 2, "exhaustive", groups={"c": FRAME.colour}, counts={"c": 1}).indices.tolist()
    )
    assert solve(table, 2, "exhaustive", exclude=[("b", "d")], together=[["a", "c"]]).labels == ["a", "c"]


@pytest.mark.slow
def test_a_budget_is_that_of_fsum():
    tenths = [0.1, 0.2, 0.3, 0.1]
    assert cost_row("budget", tenths, 0.3).holds({2})
    assert not cost_row("budget", tenths, 0.3).holds({0, 1})
    for _ in range(200):
        rng = np.random.default_rng(_)
        costs, chosen = drawn_costs(rng, 6), set(rng.permutation(6)[:3].tolist())
        total = math.fsum(costs[i] for i in chosen)
        for budget in (total, math.nextafter(total, 0), math.nextafter(total, math.inf)):
            kept = cost_row("budget", costs.tolist(), budget)
            assert kept.holds(chosen) == (total <= budget)
            limbs = constraints_of(6, costs=costs, budget=budget).integers
            assert kept.upper is None or len(limbs.limit) in (0, sum(kept.coefficients).bit_length() // 32 + 1)


def test_a_doctored_solution_is_found():
    sol = solve(W, 2, "exhaustive", exclude=[(0, 2)], costs=[1, 2, 3, 4], budget=7)
    wrong = np.array([True, False, True, False])
    with pytest.raises(SolverError, match=r"breaks constraints: exclude \(0, 2\)"):
        dataclasses.replace(sol, mask=wrong).verify()


def test_what_is_not_certain_is_not_said(monkeypatch):
    """HiGHS may err within its tolerances: what it finds is checked, and what it rules out by less is not ruled out."""
    dear = 0.5 + 2.0**-52
    rows, every = constraints_of(3, costs=[0.5, dear, 0.5], budget=1.0), torch.ones(3, dtype=torch.bool)
    assert find_choice(rows, 2, every).tolist() == [True, False, True]
    costs = {"costs": [0.5, dear, dear], "budget": 1.0}
    assert find_choice(constraints_of(3, **costs), 2, every) is None  # after excluding all three, one by one
    monkeypatch.setattr(program, "EXCLUDED", 1)
    with pytest.raises(UndecidedError):
        find_choice(constraints_of(3, **costs), 2, every)
    with pytest.raises(InfeasibleConstraintsError):
        solve(np.eye(3), 2, "exhaustive", **costs)
    with pytest.raises(SolverError, match="was found, though there may be one"):
        solve(np.eye(3), 2, "local_search", **costs)


@pytest.mark.slow
def test_limits_targets_and_callbacks_go_together_with_constraints():
    big = instance("indefinite", 30, 1)
    wanted = {"groups": [i % 3 for i in range(30)], "counts": (3, 4), "exclude": [(0, 1), (2, 3)], "required": [5]}
    best = solve(big, 10, "branch_and_bound", **wanted)
    assert best.status is Status.OPTIMAL
    f = float(best.objective)
    easy = solve(big, 10, "local_search", **wanted, target=0.5 * f)
    assert f <= easy.objective <= 0.5 * f
    seen = []
    solve(big, 10, "branch_and_bound", **wanted, callback=lambda progress: seen.append(progress))
    assert seen
    for progress in seen:
        assert oracle.keeps(np.flatnonzero(progress.mask).tolist(), wanted["groups"], dict.fromkeys(range(3), (3, 4)))
        assert progress.mask.sum() == 10
        assert progress.mask[5]
    stopped = solve(big, 10, "branch_and_bound", **wanted, node_limit=1)
    assert stopped.verify().lower_bound <= f <= stopped.objective
    short = solve(big, 10, "portfolio", **wanted, time_limit=1e-3)
    assert short.verify().lower_bound <= f <= short.objective
    again = solve(best.problem, None, "local_search", required=[5], start=best.mask)
    assert (again.mask == best.mask).all()
    with pytest.raises(OptionError, match=r"start= breaks constraints: 3 to 4 of group 0"):
        solve(big, 10, "local_search", **wanted, start=[*range(0, 27, 3), 5])


@pytest.mark.slow
def test_every_method_may_give_the_start():
    wanted = {"groups": [0, 0, 1, 1], "counts": 1}
    for name in registry.specs():
        if name not in ("sdp", "local_search"):
            assert solve(W, 2, "local_search", **wanted, start=name).verify().mask.sum() == 2
    kept = solve(W, 2, "local_search", **wanted, start=[0, 2], max_steps=0)
    assert kept.indices.tolist() == [0, 2]
    assert kept.status is Status.LIMIT


def test_double_exchanges_get_past_what_blocks_single_ones():
    """A latin pattern: with one vertex of each row and each column, no single exchange is possible."""
    n = 3
    places = [(r, c) for r in range(n) for c in range(n)]
    wanted = {"groups": {"row": [r for r, _ in places], "column": [c for _, c in places]}}
    wanted["counts"] = {"row": 1, "column": 1}
    weights = np.diag([0.0 if r == (c + 1) % n else 1.0 for r, c in places])
    sol = solve(weights, n, "local_search", **wanted, start=[places.index(p) for p in ((0, 1), (1, 0), (2, 2))])
    assert sol.objective == 1.0 or sol.objective == 0.0
    swapped = np.diag([0.0 if (r, c) in ((0, 1), (1, 0), (2, 2)) else 1.0 for r, c in places])
    assert solve(swapped, n, "local_search", **wanted, start=[0, 4, 8]).objective == 0.0
    pairs = solve(np.diag([1.0, 1, 0, 0]), 2, "local_search", together=[(0, 1), (2, 3)], start=[0, 1])
    assert pairs.indices.tolist() == [2, 3]


def test_problems_do_not_take_them():
    with pytest.raises(OptionError, match="constraints belong to solve and compare"):
        Problem.of(W, 2, exclude=[(0, 1)])


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cases(max_n=7), st.integers(0, 2), st.sampled_from(["exhaustive", "branch_and_bound", "local_search", "portfolio"])
)
def test_a_range_of_sizes_against_enumeration(case, more, method):
    weights, k, asked, required, protected, maximize = case
    low, high = max(k - more, len(required)), min(k + more, len(weights) - len(protected))
    sizes = [
        oracle.optimum(weights.tolist(), size, protected, required, maximize, **asked) for size in range(low, high + 1)
    ]
    common = {"required": required, "protected": protected, "maximize": maximize, "certify": True}
    if all(value is None for value in sizes):
        with pytest.raises(InfeasibleConstraintsError, match="no choice keeps"):
            solve(weights, (low, high), method, **asked, **common)
        return
    best = (max if maximize else min)(value for value in sizes if value is not None)
    sol = solve(weights, (low, high), method, **asked, **common).verify()
    chosen = np.flatnonzero(sol.mask).tolist()
    assert low <= len(chosen) <= high
    assert oracle.keeps(chosen, **asked)
    sign, f = -1 if maximize else 1, float(sol.objective)
    assert sol.lower_bound <= best + LAST_DIGITS * abs(best)
    assert sol.upper_bound >= best - LAST_DIGITS * abs(best)
    if registry.get(method).exact or sol.status is Status.OPTIMAL:
        mine = np.abs(weights[np.ix_(chosen, chosen)]).sum()
        assert sign * (f - best) <= max(1e-9 * abs(best), len(weights) * LAST_DIGITS * mine)


def test_a_range_of_sizes():
    sol = solve(W, (1, 3), "exhaustive")
    assert (sol.indices.tolist(), float(sol.objective), sol.status) == ([1, 3], -6.0, Status.OPTIMAL)
    assert float(sol.lower_bound) == -6.0
    assert solve(W, (0, 4), "exhaustive", maximize=True, exclude=[(2, 3)]).indices.tolist() == [0, 1, 2]
    assert solve(np.stack([W, W]), (1, 3), "exhaustive").mask.sum(1).tolist() == [1, 3]  # a size for each instance
    assert solve([W.tolist(), W.tolist()], (1, 3)).mask.sum(1).tolist() == [1, 3]
    seen = []
    stopped = solve(
        instance("indefinite", 30, 0), (5, 9), "branch_and_bound", callback=lambda p: seen.append(p) or True
    )
    assert stopped.status is Status.LIMIT
    assert stopped.lower_bound == -np.inf
    assert len({progress.mask.sum() for progress in seen}) == 1
    assert solve(W, (1, 3), "exhaustive", target=100.0).indices.tolist() == [3]
    with pytest.raises(InfeasibleConstraintsError, match=r"k = 1 to 2; at least 2 of group 0; at least 2 of group 1"):
        solve(W, (1, 2), "exhaustive", groups=[0, 0, 1, 1], counts=(2, None))
    for wrong, message in (
        ((3, 1), "range of sizes as"),
        ((1, 5), "must lie between 0 and n = 4"),
        ((1, 2.5), "k=2.5: give"),
    ):
        with pytest.raises(ProblemError, match=message):
            solve(W, wrong, "exhaustive")


@pytest.fixture
def command(tmp_path):
    """``grace-opt`` on a file of four named vertices, and a table of these, in another order."""
    names = ["Ann", "Bo", "Cy", "Di"]
    pd.DataFrame(W, index=names, columns=names).to_csv(tmp_path / "W.csv")
    FRAME.set_axis(names).iloc[::-1].to_csv(tmp_path / "table.csv", index_label="name")

    def run(name, *arguments):
        return CliRunner().invoke(app, [name, str(tmp_path / "W.csv"), "-k", "2", *map(str, arguments)])

    return lambda *arguments, name="solve": run(name, *arguments, "--data", tmp_path / "table.csv")


def test_the_command_reads_groups_and_costs_from_a_table(command):
    table = (
        "--groups",
        "colour",
        "--counts",
        "1",
        "--costs",
        "price",
        "--budget",
        "5",
        "--method",
        "exhaustive",
        "--json",
    )
    (found,) = json.loads(command(*table).stdout)
    assert found["labels"] == ["Ann", "Di"]
    (found,) = json.loads(command(*table, "--exclude", "Ann,Di").stdout)
    assert found["labels"] == ["Bo", "Cy"]
    (found,) = json.loads(command("--groups", "colour", "--counts", "red=:1,blue=1:", *table[4:]).stdout)
    assert found["labels"] == ["Ann", "Di"]
    (found,) = json.loads(command("--together", "Ann,Cy", "--exclude", "Bo,Di", *table[4:]).stdout)
    assert found["labels"] == ["Ann", "Cy"]
    assert json.loads(command(*table[:-3], "--method", "exhaustive", "--json", name="compare").stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--groups", "color", "--counts", "1"), "has no column 'color'; there are 'name', 'colour', 'price'"),
        (("--groups", "colour"), "there are 1 --groups and 0 --counts: give one for each"),
        (("--groups", "colour", "--counts", "1:2:3"), "write 2 for exactly so many, or a range"),
        (("--groups", "colour", "--counts", "red=x"), "write 2 for exactly so many, or a range"),
        (("--costs", "colour", "--budget", "1"), "--costs colour: 'red' is no number"),
        (("--costs", "price"), "costs= is given without budget="),
        (("--exclude", "Ann,Ann"), "names vertex 'Ann' twice"),
    ],
)
def test_the_command_refuses_in_one_line(command, arguments, message):
    refused = command(*arguments, "--method", "exhaustive")
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_tables_that_cannot_be_read(tmp_path):
    wrong = {"none.csv": None, "ragged.csv": "name,colour\nAnn\n", "empty.csv": "", "quotes.csv": 'a,b\n"x,y\n'}
    for name, text in wrong.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(OptionError, match=r"cannot be read as CSV|has 1 entries, the header 2"):
            ConstraintOptions(tmp_path / name, groups=["colour"], counts=["1"]).arguments(None)
    with pytest.raises(OptionError, match="give it with --data FILE"):
        ConstraintOptions(groups=["colour"], counts=["1"]).arguments(None)
