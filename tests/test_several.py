"""Several solutions: against enumeration, with constraints and without, and what is refused."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grace_opt
from grace_opt.errors import InfeasibleConstraintsError, OptionError, ProblemError, SolverError
from tests.oracle import objective

EXACT = ("exhaustive", "branch_and_bound")


def symmetric(n, seed, high=None):
    random = np.random.default_rng(seed)
    found = random.normal(size=(n, n)) if high is None else random.integers(-high, high + 1, (n, n))
    return found + found.T


def listed(solution):
    return [frozenset(one.indices[one.indices >= 0].tolist()) for one in (solution, *solution.others)]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 8),
    share=st.floats(0, 1),
    count=st.integers(1, 7),
    difference=st.integers(1, 3),
    high=st.sampled_from([None, 0, 1, 9]),
    exponent=st.sampled_from([-290, 0, 280]),
    maximize=st.booleans(),
    method=st.sampled_from(EXACT),
    seed=st.integers(0, 5),
)
def test_every_one_is_the_best_that_differs_from_those_before(
    n, share, count, difference, high, exponent, maximize, method, seed
):
    k = max(1, round(share * n))
    difference = min(difference, k)
    W = symmetric(n, seed, high) * (1.0 if high is not None else 10.0**exponent)
    found = grace_opt.solve(W, k, method, maximize=maximize, solutions=count, min_difference=difference)
    sets, sign = listed(found), -1 if maximize else 1
    every = [frozenset(each) for each in itertools.combinations(range(n), k)]
    before: list[frozenset[int]] = []
    for one, own in zip((found, *found.others), sets, strict=True):
        left = [each for each in every if all(len(other - each) >= difference for other in before)]
        best = min(sign * objective(W, sorted(each)) for each in left)
        assert own in left
        assert math.isclose(sign * float(one.objective), best, rel_tol=1e-8, abs_tol=1e-12 * np.abs(W).max())
        assert one.status.name == "OPTIMAL"
        assert one.verify() is one
        before.append(own)
    more = [each for each in every if all(len(other - each) >= difference for other in before)]
    assert len(sets) == count or not more


def test_constraints_required_and_labels_hold_for_all():
    import pandas as pd

    names = [*"abcdefgh"]
    W = pd.DataFrame(symmetric(8, 3), index=names, columns=names)
    given_ = {"groups": [0, 1] * 4, "counts": 2, "required": ["c"], "exclude": [("a", "b")]}
    found = grace_opt.solve(W, 4, "branch_and_bound", **given_, solutions=6, min_difference=2)
    sets = [frozenset(one.labels) for one in (found, *found.others)]
    assert len(sets) > 2
    for one, other in itertools.combinations(sets, 2):
        assert len(one - other) >= 2
    for each in sets:
        assert "c" in each
        assert not {"a", "b"} <= each
        assert sum(names.index(name) % 2 for name in each) == 2


def test_heuristics_give_different_choices_and_prove_nothing():
    W = symmetric(30, 1)
    found = grace_opt.solve(W, 10, "local_search", solutions=5, min_difference=3)
    values = [float(one.objective) for one in (found, *found.others)]
    assert values == sorted(values)
    assert {one.status.name for one in (found, *found.others)} == {"FEASIBLE"}
    assert all(len(one - other) >= 3 for one, other in itertools.combinations(listed(found), 2))


def test_all_choices_are_listed_if_there_are_no_more():
    found = grace_opt.solve(symmetric(4, 2), 2, "exhaustive", solutions=50)
    assert len({*listed(found)}) == 6
    assert found.others[-1].others == ()


def test_torch_in_torch_out_and_json():
    found = grace_opt.solve(torch.from_numpy(symmetric(6, 2)), 3, "exhaustive", solutions=2)
    assert all(isinstance(one.mask, torch.Tensor) for one in (found, *found.others))
    assert "1 others" in repr(found)
    read = json.loads(found.to_json())
    assert read["others"][0]["indices"] == found.others[0].indices.tolist()
    assert "others" not in json.loads(grace_opt.solve(symmetric(6, 2), 3).to_json())


def test_a_callback_and_a_time_limit_are_for_all_together():
    calls = []

    def stop(progress):
        calls.append(progress)
        return True

    found = grace_opt.solve(symmetric(40, 1), 15, "branch_and_bound", solutions=4, callback=stop)
    assert calls
    assert found.others == ()
    limited = grace_opt.solve(symmetric(12, 1), 5, "branch_and_bound", solutions=3, time_limit=60)
    assert len(limited.others) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"solutions": 0}, OptionError, "solutions"),
        ({"solutions": 2.5}, OptionError, "solutions"),
        ({"solutions": 2, "min_difference": 0}, OptionError, "min_difference"),
        ({"solutions": 2, "min_difference": 4}, OptionError, r"min_difference=4: .* k = 3"),
        ({"solutions": 2, "k": (2, 3)}, OptionError, "give k as a number"),
        ({"solutions": 2, "method": "mies"}, SolverError, r"'mies' takes no constraints \(solutions=\): use 'branch"),
        ({"solutions": 2, "W": np.zeros((2, 5, 5))}, ProblemError, "batch of shape"),
        (
            {"solutions": 2, "exclude": [(0, 1)], "together": [(0, 1)], "required": [0]},
            InfeasibleConstraintsError,
            "no choice",
        ),
    ],
)
def test_refusals(arguments, error, message):
    whole = {"W": symmetric(5, 0), "k": 3, "method": "exhaustive"} | arguments
    with pytest.raises(error, match=message):
        grace_opt.solve(**whole)


class _Clock:
    """A clock that only a solve moves."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize("module", ["several", "sizes"])
def test_no_further_solve_begins_after_the_time_limit(module, monkeypatch):
    import importlib

    part, clock, shares = importlib.import_module(f"grace_opt.comparison.{module}"), _Clock(), []
    monkeypatch.setattr(part, "time", clock)
    W = symmetric(6, 1)

    def slow(what, time_limit, callback):
        shares.append(time_limit)
        clock.now += 1.0
        return grace_opt.solve(W, what if module == "sizes" else 3, "exhaustive")

    if module == "several":
        found = part.several_solutions(5, 1, slow, time_limit=1.5, callback=None)
        assert len(found.others) == 1
    else:
        found = part.best_of_sizes(range(1, 6), slow, maximize=False, time_limit=1.5, target=None, callback=None)
        assert found.status.name == "LIMIT"
        assert found.lower_bound == -math.inf
    assert shares == [0.3, 0.125]


@pytest.mark.parametrize("maximize", [False, True])
def test_progress_of_a_range_is_of_all_sizes(maximize):
    W, seen = symmetric(14, 2), []
    found = grace_opt.solve(
        W, (3, 9), "branch_and_bound", maximize=maximize, callback=lambda progress: seen.append(progress)
    )
    best = float(found.objective)
    assert found.status.name == "OPTIMAL"
    values = [progress.objective for progress in seen]
    assert values == sorted(values, reverse=not maximize)
    for progress in seen:
        assert progress.lower_bound <= best + 1e-9 * abs(best)
        assert progress.upper_bound >= best - 1e-9 * abs(best)
        assert math.isclose(objective(W, np.flatnonzero(progress.mask)), progress.objective, rel_tol=1e-9)


def test_sizes_that_cannot_be_are_left_out():
    W = symmetric(6, 4)
    assert grace_opt.solve(W, (1, 6), "exhaustive", protected=[0]).status.name == "OPTIMAL"
    both = grace_opt.solve(W, (0, 3), "exhaustive", required=[0, 1])
    assert both.status.name == "OPTIMAL"
    assert {0, 1} <= set(both.indices.tolist())
    assert isinstance(both.mask, np.ndarray)
    with pytest.raises(ProblemError, match="unprotected"):
        grace_opt.solve(W, (4, 6), "exhaustive", protected=[0, 1, 2])
    with pytest.raises(ProblemError, match="required names 3 vertices, but k = 2"):
        grace_opt.solve(W, (0, 2), "exhaustive", required=[0, 1, 2])


def test_a_range_that_is_stopped_says_so():
    found = grace_opt.solve(symmetric(14, 2), (3, 9), "branch_and_bound", callback=lambda progress: True)
    assert found.status.name == "LIMIT"
    assert found.lower_bound == -math.inf


def test_columns_with_missing_labels_or_in_another_order_are_refused():
    import pandas as pd

    W = symmetric(4, 1)
    for dtype in ("Int64", "string", "object"):
        column = pd.Series([None, "1" if dtype != "Int64" else 1, None, None], dtype=dtype)
        with pytest.raises(ProblemError, match="vertex 0 has the label"):
            grace_opt.solve(W, 2, "exhaustive", groups=column, counts=1)
    turned = pd.DataFrame({"g": [*"xxyy"]}, index=[3, 2, 1, 0])
    with pytest.raises(ProblemError, match=r"sort_index\(\)"):
        grace_opt.solve(W, 2, "exhaustive", groups="g", counts=1, data=turned)
    other = pd.DataFrame({"g": [*"xxyy"]}, index=[10, 20, 30, 40])
    assert grace_opt.solve(W, 2, "exhaustive", groups="g", counts=np.array(1), data=other).status.name == "OPTIMAL"
