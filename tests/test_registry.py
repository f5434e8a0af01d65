"""The registry: names, entry points, options; and a solver of one's own in a few lines."""

import dataclasses
import time
from importlib.metadata import EntryPoint

import pytest
import torch

import grace_opt
from grace_opt import registry, solve, testing
from grace_opt.solution import Result


@pytest.fixture
def forget():
    names = set(registry.specs())
    yield
    for name in set(registry.specs()) - names:
        registry.unregister(name)


def test_a_looped_solver_with_options(forget):
    @dataclasses.dataclass(frozen=True)
    class Options:
        reverse: bool = False

    @grace_opt.register("by_degree", options=Options, guarantee="none")
    def by_degree(problem, options, run):
        """Take the vertices of least row sum."""
        assert problem.W.ndim == 2
        order = (
            problem.W.sum(-1)
            .masked_fill(~problem.candidates, torch.inf)
            .argsort(stable=True, descending=options.reverse)
        )
        mask = torch.zeros(problem.n, dtype=torch.bool)
        mask[order[: int(problem.k)]] = True
        return Result(mask, stats={"iterations": 1})

    sol = solve(torch.eye(4).expand(3, 4, 4), 2, "by_degree")
    assert sol.indices.tolist() == [[0, 1]] * 3
    assert sol.stats["iterations"] == 3
    assert registry.get("by_degree").summary == "Take the vertices of least row sum."
    testing.check_solver("by_degree")


PLUGIN = """
import torch
from grace_opt import Result, register

@register("plugged_in", batched=True)
def plugged_in(problem, options, run):
    return Result(torch.arange(problem.n).expand_as(problem.candidates) >= problem.n - problem.k.unsqueeze(-1))
"""


def test_entry_points_are_loaded_on_first_use(forget, monkeypatch, tmp_path):
    (tmp_path / "somebodys_package.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("other", "somebodys_package", registry.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.ENTRY_POINT_GROUP else [])
    monkeypatch.setattr(registry, "_loaded", False)
    assert "plugged_in" in registry.specs()
    assert solve(torch.eye(3), 1, "plugged_in").indices.tolist() == [2]


def test_a_taken_name_and_loose_options(forget):
    with pytest.raises(grace_opt.OptionError, match="registered already"):
        grace_opt.register("mies")(lambda p, o, r: None)

    class Loose:
        pass

    with pytest.raises(grace_opt.OptionError, match="frozen dataclass"):
        grace_opt.register("loose", options=Loose)


def test_a_solver_that_answers_nonsense_is_reported(forget):
    grace_opt.register("nonsense", batched=True)(lambda p, o, r: Result(torch.ones(1, 2, dtype=torch.bool)))
    with pytest.raises(grace_opt.SolverError, match="nonsense returned a mask"):
        solve(torch.eye(3), 1, "nonsense")
    grace_opt.register("wrong_size", batched=True)(lambda p, o, r: Result(p.candidates.clone()))
    with pytest.raises(grace_opt.SolverError, match="chose"):
        solve(torch.eye(3), 1, "wrong_size")


@pytest.mark.parametrize("answer", [None, torch.ones(1, 3, dtype=torch.bool), Result([True])])
@pytest.mark.parametrize("batched", [True, False])
def test_what_is_no_result_is_reported(forget, answer, batched):
    grace_opt.register("beginner", batched=batched)(lambda p, o, r: answer)
    with pytest.raises(grace_opt.SolverError, match=r"return Result\(mask\)"):
        solve(torch.eye(3), 1, "beginner")


def test_register_needs_a_name(forget):
    for name in (lambda p, o, r: None, "a b/", ""):
        with pytest.raises(grace_opt.OptionError, match="no name for a method"):
            grace_opt.register(name)
    with pytest.raises(grace_opt.UnknownSolverError, match="preset of MaskProvider"):
        solve(torch.eye(3), 1, "grace")


def test_methods_describes_them():
    table = {spec.name: spec for spec in grace_opt.methods()}
    assert {"exhaustive", "local_search", "mies", "random", "think"} <= set(table)
    assert table["exhaustive"].exact
    assert all(spec.summary and spec.guarantee for spec in table.values())


def test_compiling_comes_before_the_time_limit_starts(forget):
    """Once per process, and only where there is a limit that it would eat."""
    calls = []

    @registry.register("slow_start", batched=True, compiled=True)
    def slow_start(problem, options, run):
        """Takes its time at first."""
        if not calls:
            time.sleep(0.3)
        calls.append(run.expired())
        return Result(problem.candidates)

    W = torch.eye(3, dtype=torch.float64)
    for _ in range(2):
        assert grace_opt.solve(W, 3, "slow_start", time_limit=0.2).stats["time"] < 0.2
    assert calls == [False] * 3
