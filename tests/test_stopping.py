"""`target=` and `patience=`: the same for every method that searches, for each instance of a batch by itself."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import grace_opt
from grace_opt import Problem, SolverResult, Status, bounds, compare, instances, methods, registry, solve
from grace_opt.cli.app import app
from grace_opt.errors import OptionError
from grace_opt.run import Run

SEARCHING = sorted(spec.name for spec in methods() if spec.searches)
#: Methods that end early where the first choice, a greedy one, is good enough.
OTHERS = sorted(spec.name for spec in methods() if not spec.searches)


def hard(n: int, *size: int) -> np.ndarray:
    W = np.random.default_rng(0).normal(size=(*size, n, n))
    return W + W.swapaxes(-1, -2)


@pytest.fixture
def forget():
    names = set(registry.specs())
    yield
    for name in set(registry.specs()) - names:
        registry.unregister(name)


def test_who_searches():
    assert SEARCHING == ["annealing", "beam", "branch_and_bound", "exhaustive", "local_search", "portfolio", "tabu"]


@pytest.mark.parametrize("method", SEARCHING)
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_each_instance_stops_at_its_own_target(method, kind):
    """One is there at once, one on the way, one never; each as it is alone."""
    W, k = hard(20, 3), 10
    greedy = solve(W, k, "mies").objective
    best = solve(W, k, method).objective
    target = np.array([greedy[0], (greedy[1] + best[1]) / 2, -np.inf])
    sol = solve(kind(W), k, method, target=kind(target))
    f = np.asarray(sol.objective)
    assert (f <= target).tolist() == [True, True, False]
    assert f[2] == best[2]
    assert Status.LIMIT not in set(sol.status)
    if method != "exhaustive":  # which is through before it looks
        assert f[0] == greedy[0], "the first choice was good enough"
    for b in range(3):
        alone = solve(kind(W[b]), k, method, target=float(target[b]))
        assert (np.asarray(alone.mask) == np.asarray(sol.mask[b])).all()
        assert alone.status is sol.status[b]


@pytest.mark.parametrize("method", ["tabu", "annealing", "local_search", "branch_and_bound", "portfolio", "beam"])
def test_a_start_that_is_good_enough_is_the_answer(method):
    W = hard(30)
    first = solve(W, 15, "mies")
    sol = solve(W, 15, method, target=float(first.objective))
    assert (sol.mask == first.mask).all()
    assert sol.status is Status.FEASIBLE
    assert sol.stats.get("nodes", 0) == 0


@pytest.mark.parametrize("method", ["tabu", "local_search", "branch_and_bound"])
def test_a_given_start_counts_as_well(method):
    W = hard(30)
    best = solve(W, 15, "tabu")
    sol = solve(W, 15, method, start=best.mask, target=float(best.objective))
    assert (sol.mask == best.mask).all()
    assert not sol.stats.get("iterations")


@pytest.mark.parametrize("method", [*SEARCHING, *OTHERS])
def test_every_method_takes_them(method, clock):
    clock.per_look = 0.001
    W = hard(8, 2)
    plain = solve(W, 4, method)
    assert (solve(W, 4, method, target=-1e300, patience=0.2).objective <= plain.objective + 1e-9).all()
    reached = solve(W, 4, method, target=math.inf)
    assert Status.LIMIT not in set(reached.status)
    reached.verify()


def test_an_exhaustive_search_stops_between_its_slices(monkeypatch):
    from grace_opt.solvers import exhaustive

    monkeypatch.setattr(exhaustive, "WORK_BETWEEN_CLOCK_CHECKS", 2000)
    W = hard(20)
    greedy = float(solve(W, 10, "mies").objective)
    whole, early = solve(W, 10, "exhaustive"), solve(W, 10, "exhaustive", target=greedy)
    assert float(early.objective) <= greedy
    assert early.stats["subsets"] < whole.stats["subsets"]
    assert early.status is Status.FEASIBLE
    assert float(early.lower_bound) == -math.inf, "what was not seen may be better"


@pytest.mark.parametrize("stop", [{"target": -1e9}, {"patience": 60.0}])
def test_an_exhaustive_search_out_of_time_leaves_the_rest_of_a_batch_to_mies(stop):
    W, k = hard(20, 3), 10
    sol = solve(W, k, "exhaustive", time_limit=1e-9, **stop)
    assert (sol.mask[1:] == solve(W, k, "mies").mask[1:]).all()
    assert sol.status[1:].tolist() == [Status.LIMIT] * 2


def test_a_target_does_not_make_a_search_longer():
    W = hard(40)
    plain, aimed = solve(W, 20, "tabu"), solve(W, 20, "tabu", target=-math.inf)
    assert aimed.stats["iterations"] == plain.stats["iterations"]
    assert (aimed.mask == plain.mask).all()


def test_branch_and_bound_keeps_a_valid_bound_where_a_target_ends_it():
    W = hard(22)
    best = solve(W, 11, "branch_and_bound")
    assert best.status is Status.OPTIMAL
    aimed = solve(W, 11, "branch_and_bound", start="random", target=float(best.objective) + 1)
    assert -math.inf < float(aimed.lower_bound) <= float(best.objective)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tabu", "annealing", "branch_and_bound", "portfolio", "beam"])
def test_patience_ends_what_would_go_on(method, clock):
    W = hard(110, 2)
    clock.per_look = 0.02
    solve(hard(24), 12, method, time_limit=0.01)  # compiled, which no limit counts
    began = clock.now
    options = {"width": 64, "lookahead": 64} if method == "beam" else {}
    sol = solve(W, 55, method, patience=0.1, **options)
    assert clock.now - began < 20
    assert all(status is Status.LIMIT for status in sol.status)
    if method in ("branch_and_bound", "portfolio"):
        assert np.isfinite(sol.lower_bound).all()


@pytest.mark.slow
def test_patience_of_an_instance_begins_with_its_own_search(clock):
    """Trees grow one after the other, a few at a time: the last begins long after the first ones lost patience."""
    W = hard(110, 4)
    clock.per_look = 0.02
    sol = solve(W, 55, "branch_and_bound", patience=0.3)
    rows = bounds.row_bound(Problem.of(W, 55).flatten()).numpy()
    assert (sol.lower_bound > rows).all()


@pytest.mark.slow
def test_patience_lets_tabu_go_on_beyond_its_iterations(clock):
    W = hard(60)
    clock.per_look = 0.01
    plain = solve(W, 30, "tabu")
    assert solve(W, 30, "tabu", patience=0.3).stats["iterations"] > plain.stats["iterations"]
    assert solve(W, 30, "tabu", patience=0.3, iterations=50).stats["iterations"] == 50


@pytest.mark.parametrize("bad", [[1.0, 2.0, 3.0], ["a", "b"], np.array([np.nan, 1.0]), [True, False], [[1.0]] * 3])
def test_targets_that_fit_no_batch(bad):
    with pytest.raises(OptionError, match=r"target=.*give a number, or one for each instance, of shape \(2,\)"):
        solve(hard(5, 2), 2, target=bad)


def test_a_comparison_hands_them_on():
    W = hard(30)
    first = float(solve(W, 15, "mies").objective)
    both = compare(W, 15, ["mies", "tabu", "branch_and_bound"], target=first, patience=5)
    assert [float(s.objective) for s in both] == [first] * 3
    assert {s.status for s in both} == {Status.FEASIBLE}


def test_patience_begins_anew_with_each_better_choice(clock):
    run = Run(patience=5.0).instances([0, 1])
    assert run.limited
    clock.now += 100
    assert not run.expired(), "nothing has begun"
    run.begin()
    clock.now += 4
    run.instance(1).note([3.0])
    assert run.open() == [True, True]
    assert not run.has_time(6)
    clock.now += 2
    assert run.open() == [False, True]
    assert run.instance(0).expired()
    assert not run.expired()
    run.instance(1).note([3.0])  # no better
    run.report(0, 1.0, -math.inf, np.zeros(2, bool))
    assert run.open() == [True, True]
    clock.now += 4
    assert run.open() == [True, False]
    assert run.until(0.5).open() == [False, False]
    assert run.beside_search().has_time(1e9)
    clock.now += 4
    assert run.expired()


def test_targets_follow_the_instances():
    run = Run(targets=(1.0, 2.0, 3.0)).instances(range(3))
    part = run.instances([2, 0])
    part.note([3.0, 1.5])
    assert run.reached() == [False, False, True]
    assert part.open() == [False, True]
    assert not part.expired()
    part.instance(1).note([1.0])
    part.instance(1).note([7.0])  # what was found is not lost
    assert part.expired()
    assert not run.expired()
    assert not run.limited
    assert part.beside_search().has_time(1.0)
    copies = run.instances([1, 1, 1])
    copies.note([9.0, 2.0, 9.0])
    assert run.reached() == [True, True, True]


def test_a_search_of_somebody_elses_uses_them(forget):
    """One instance at a time: it reports, and asks its run."""

    @grace_opt.register_solver("stepwise", searches=True)
    def stepwise(problem: Problem, options, run: Run) -> SolverResult:
        """Move one vertex at a time."""
        mask = torch.zeros(problem.n, dtype=torch.bool)
        mask[: int(problem.k)] = True
        for step in range(50):
            run.report(0, -float(step), -math.inf, mask.numpy())
            if run.expired():
                return SolverResult(mask, limit=torch.tensor(True), stats={"iterations": step})
        return SolverResult(mask, stats={"iterations": 50})

    W = np.zeros((3, 4, 4))
    assert solve(W, 2, "stepwise").stats["iterations"] == 150
    sol = solve(W, 2, "stepwise", target=[-3, -7, -1000])
    assert sol.stats["iterations"] == 3 + 7 + 50


@pytest.mark.slow
def test_the_command_line_has_them(tmp_path):
    path = tmp_path / "w.npy"
    instances.write(path, hard(110))
    runner = CliRunner()
    first = json.loads(runner.invoke(app, ["solve", str(path), "-k", "55", "--json"]).stdout)[0]["objective"]
    common = ["solve", str(path), "-k", "55", "--method", "tabu", "--json"]
    met = runner.invoke(app, [*common, "--target", str(first)])
    assert (met.exit_code, json.loads(met.stdout)[0]["objective"]) == (0, first)
    out = runner.invoke(app, [*common, "--patience", "0.1"])
    assert out.exit_code == 3
    assert json.loads(out.stdout)[0]["status"] == "LIMIT"
    bad = runner.invoke(app, [*common, "--patience", "0"])
    assert bad.exit_code == 2
    assert "patience=0.0: give a number > 0" in bad.output
    several = ["compare", str(path), "-k", "55", "--method", "tabu", "--method", "mies", "--no-certify"]
    assert runner.invoke(app, [*several, "--target", str(first)]).exit_code == 0
