"""The registry: names, entry points, options; and a solver of one's own in a few lines."""

import dataclasses
import time
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import scipy.sparse
import torch

import grace_opt
from grace_opt import Problem, objective, registry, solve, testing
from grace_opt.kernels._shared import threads
from grace_opt.solution import SolverResult


@pytest.fixture
def forget():
    names = set(registry.specs())
    yield
    for name in set(registry.specs()) - names:
        registry.unregister(name)


@pytest.mark.slow
def test_a_looped_solver_with_options(forget):
    @dataclasses.dataclass(frozen=True)
    class Options:
        reverse: bool = False

    @grace_opt.register_solver("by_degree", options=Options, guarantee="none")
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
        return SolverResult(mask, stats={"iterations": 1})

    sol = solve(torch.eye(4).expand(3, 4, 4), 2, "by_degree")
    assert sol.indices.tolist() == [[0, 1]] * 3
    assert sol.stats["iterations"] == 3
    assert registry.get("by_degree").summary == "Take the vertices of least row sum."
    testing.check_solver("by_degree")


PLUGIN = """
import torch
from grace_opt import SolverResult, register_solver

@register_solver("plugged_in", batched=True)
def plugged_in(problem, options, run):
    return SolverResult(torch.arange(problem.n).expand_as(problem.candidates) >= problem.n - problem.k.unsqueeze(-1))
"""


def test_entry_points_are_loaded_on_first_use(forget, monkeypatch, tmp_path):
    (tmp_path / "somebodys_package.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("other", "somebodys_package", registry.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(
        registry.methods, "entry_points", lambda group: points if group == registry.ENTRY_POINT_GROUP else []
    )
    monkeypatch.setattr(registry.methods, "_loaded", False)
    assert "plugged_in" in registry.specs()
    assert solve(torch.eye(3), 1, "plugged_in").indices.tolist() == [2]


def test_a_taken_name_and_loose_options(forget):
    with pytest.raises(grace_opt.errors.OptionError, match="registered already"):
        grace_opt.register_solver("mies")(lambda p, o, r: None)
    with pytest.raises(grace_opt.errors.OptionError, match=r"'loose' is 3: decorate a function"):
        grace_opt.register_solver("loose")(3)

    class Loose:
        pass

    for loose in (Loose, registry.NoOptions()):
        with pytest.raises(grace_opt.errors.OptionError, match="frozen dataclass"):
            grace_opt.register_solver("loose", options=loose)


def test_every_option_has_a_default(forget):
    """`compare`, presets and time limits call methods without options: a TypeError came of it."""

    @dataclasses.dataclass(frozen=True)
    class Wide:
        width: int

    with pytest.raises(grace_opt.errors.OptionError, match="option 'width' of 'wide' has no default"):
        grace_opt.register_solver("wide", options=Wide)


def test_what_a_method_requires(forget):
    """A text was read letter by letter, and the package of a missing submodule raised ModuleNotFoundError."""
    with pytest.raises(grace_opt.errors.OptionError, match=r"requires=\('cvxpy',\)"):
        grace_opt.register_solver("needs_one", requires="cvxpy")
    grace_opt.register_solver("needs_part", requires=("no_such_package.part",))(lambda p, o, r: None)
    with pytest.raises(grace_opt.errors.UnknownSolverError, match=r"pip install no_such_package\.part\."):
        solve(torch.eye(3), 1, "needs_part")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"requires": [3]}, r"requires=\[3\]: give a tuple of names"),
        ({"requires": ("",)}, "requires=.*give a tuple of names"),
        ({"forms": "sparse"}, r"forms='sparse': give a tuple, forms=\('sparse',\)"),
        ({"forms": ("foo",)}, "forms='foo': give 'sparse' or 'factored'"),
        ({"guarantee": 7}, "guarantee=7: give a text"),
        ({"exact": "yes"}, "exact='yes': give True or False"),
        ({"batched": None}, "batched=None: give True or False"),
    ],
)
def test_what_register_is_told_is_checked(forget, wrong, said):
    with pytest.raises(grace_opt.errors.OptionError, match=said):
        grace_opt.register_solver("mistaken", **wrong)
    grace_opt.register_solver("right", requires=["torch"], forms=["sparse"])(lambda p, o, r: None)
    assert (registry.get("right").requires, registry.get("right").forms) == (("torch",), ("sparse",))


@pytest.mark.parametrize("function", [lambda problem, options: None, lambda p, o, r, more: None, lambda *, p: None])
def test_a_function_of_other_arguments_is_refused(forget, function):
    with pytest.raises(grace_opt.errors.OptionError, match=r"decorate a function of \(problem, options, run\)"):
        grace_opt.register_solver("mistaken")(function)
    for right in (lambda *given: None, lambda p, o, r, more=1: None):
        grace_opt.register_solver("right")(right)
        grace_opt.registry.unregister("right")


@pytest.mark.parametrize("named", [("zz",), "zz", None])
def test_statistics_that_are_values_of_f_are_among_the_statistics(forget, named):
    grace_opt.register_solver("named", batched=True)(lambda p, o, r: SolverResult(p.candidates, objective_stats=named))
    with pytest.raises(grace_opt.errors.SolverError, match="give a tuple of names that are in stats"):
        solve(torch.eye(3), 3, "named")


def test_options_with_a_default_factory_are_not_changed():
    @dataclasses.dataclass(frozen=True)
    class Listed:
        names: list[str] = dataclasses.field(default_factory=list)

    assert registry.changed(Listed()) == {}
    assert registry.changed(Listed(["a"])) == {"names": ["a"]}


def test_a_solver_that_answers_nonsense_is_reported(forget):
    grace_opt.register_solver("nonsense", batched=True)(
        lambda p, o, r: SolverResult(torch.ones(1, 2, dtype=torch.bool))
    )
    with pytest.raises(grace_opt.errors.SolverError, match="nonsense returned a mask"):
        solve(torch.eye(3), 1, "nonsense")
    grace_opt.register_solver("wrong_size", batched=True)(lambda p, o, r: SolverResult(p.candidates.clone()))
    with pytest.raises(grace_opt.errors.SolverError, match="chose"):
        solve(torch.eye(3), 1, "wrong_size")


@pytest.mark.parametrize("answer", [None, torch.ones(1, 3, dtype=torch.bool), SolverResult([True])])
@pytest.mark.parametrize("batched", [True, False])
def test_what_is_no_result_is_reported(forget, answer, batched):
    grace_opt.register_solver("beginner", batched=batched)(lambda p, o, r: answer)
    with pytest.raises(grace_opt.errors.SolverError, match=r"return SolverResult\(mask\)"):
        solve(torch.eye(3), 1, "beginner")


def test_register_needs_a_name(forget):
    for name in (lambda p, o, r: None, "a b/", ""):
        with pytest.raises(grace_opt.errors.OptionError, match="no valid method name"):
            grace_opt.register_solver(name)
    with pytest.raises(grace_opt.errors.UnknownSolverError, match="preset of MaskProvider"):
        solve(torch.eye(3), 1, "grace")


def test_methods_describes_them():
    table = {spec.name: spec for spec in grace_opt.methods()}
    assert {"exhaustive", "local_search", "mies", "random", "think"} <= set(table)
    assert table["exhaustive"].exact
    assert all(spec.summary and spec.guarantee for spec in table.values())


@pytest.mark.slow
def test_compiling_comes_before_the_time_limit_starts(forget, clock, monkeypatch):
    """Once per process, and only where there is a limit that it would eat."""
    calls = []

    @registry.register_solver("slow_start", batched=True, compiled=True)
    def slow_start(problem, options, run):
        """Takes its time at first."""
        if not calls:
            clock.sleep(0.3)
        calls.append(run.expired())
        return SolverResult(problem.candidates)

    monkeypatch.setattr(time, "perf_counter", clock)  # of the seconds that are reported
    W = torch.eye(3, dtype=torch.float64)
    for _ in range(2):
        assert grace_opt.solve(W, 3, "slow_start", time_limit=0.2).stats["time"] < 0.2
    assert calls == [False] * 3


def test_what_is_compiled_is_what_will_run(forget):
    """Loops of float32, and those that only large W need, were compiled within the time limit."""
    seen = []

    @registry.register_solver("slow_start", batched=True, compiled=True)
    def slow_start(problem, options, run):
        """Runs once for each dtype before its clock starts."""
        seen.append((problem.W.dtype, threads.enough_steps(1)))
        return SolverResult(_first(problem))

    for dtype in (torch.float32, torch.float64):
        for _ in range(2):
            grace_opt.solve(torch.eye(3, dtype=dtype), 1, "slow_start", time_limit=1)
        assert seen == [(dtype, True), (dtype, False), (dtype, False)]
        seen.clear()


def test_all_searches_are_compiled_before_their_time_starts():
    """beam and exhaustive were not, and a limit of a second was over before the first step."""
    assert all(spec.compiled for spec in grace_opt.methods() if spec.searches)


def _first(problem):
    return problem.candidates & (problem.candidates.cumsum(-1) <= problem.k.unsqueeze(-1))


def _spoiled(write):
    def solver(problem, options, run):
        write(problem)
        return SolverResult(_first(problem), torch.zeros_like(problem.k, dtype=torch.float64) - 100)

    return solver


WRITES = {
    "W in torch": lambda p: p.W.fill_diagonal_(0.0) if p.W.ndim == 2 else p.W.diagonal(dim1=-2, dim2=-1).zero_(),
    "W in numpy": lambda p: p.W.numpy().fill(0.0),
    "W without its version": lambda p: p.W.data.mul_(2),
    "k": lambda p: p.k.sub_(1),
    "candidates": lambda p: p.candidates.logical_not_(),
}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("what", WRITES)
def test_a_solver_that_writes_into_its_problem_is_refused(forget, what, batched):
    """check_solver saw it; solve answered by a W that was no longer the user's, and left them with it."""
    grace_opt.register_solver("writes", batched=batched)(_spoiled(WRITES[what]))
    W, k = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1), torch.tensor([1, 2])
    before = W.clone()
    problem = Problem.of(W, k)
    for call in (
        lambda: solve(W, k, "writes"),
        lambda: solve(W.numpy(), k.numpy(), "writes"),
        lambda: solve(W, k, "local_search", start="writes"),
        lambda: solve(problem, None, "writes"),
    ):
        with pytest.raises(grace_opt.errors.SolverError, match=rf"writes wrote into problem\.{what.split()[0]} "):
            call()
        assert torch.equal(W, before)
        assert k.tolist() == [1, 2]
        assert bool(problem.candidates.all())
    with pytest.raises(AssertionError, match="wrote into"):
        testing.check_solver("writes")


def _zero(term):
    for factor in term[:4]:
        factor.zero_()


WRITES_INTO_FORMS = {
    "edges": lambda W: W.edges.data.fill(0.0),
    "one edge": lambda W: W.edges.__setitem__((1, 0), 7.0),
    "sparse nodes": lambda W: W.nodes.zero_(),
    "factors": lambda W: [_zero(term) for term in W.terms],
    "one factor": lambda W: W.terms[0].A.numpy().fill(3.0),
    "factored nodes": lambda W: W.nodes.sub_(1),
}


def _in_form(form, n):
    """Arrays of the user, and W made of them without a copy."""
    rng = np.random.default_rng(0)
    if form == "sparse":
        W = scipy.sparse.diags_array([np.ones(n - 1), rng.random(n), np.ones(n - 1)], offsets=[-1, 0, 1]).tocsr()
        return [W.data], W
    Q, K, nodes = torch.from_numpy(rng.random((3, n))), torch.from_numpy(rng.random((2, n))), torch.ones(n).double()
    return [Q, K, nodes], grace_opt.FactoredWeights([((Q, Q), (K, K))], diagonal=nodes)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("what", WRITES_INTO_FORMS)
def test_a_solver_that_writes_into_sparse_or_factored_w_is_refused(forget, monkeypatch, what, batched):
    """These were given as they are: the user's arrays changed, and f was that of another W."""
    monkeypatch.setattr("grace_opt.kernels.solve.columns.source.BLOCK_BYTES", 0)  # a small W would be formed
    form = "sparse" if "edge" in what or "sparse" in what else "factored"
    write = _spoiled(lambda problem: WRITES_INTO_FORMS[what](problem.weights))
    grace_opt.register_solver("writes", batched=batched, forms=(form,))(write)
    arrays, W = _in_form(form, 1000)
    before, problem = [torch.as_tensor(each).clone() for each in arrays], Problem.of(W, 2)
    value = objective.evaluate(problem.weights, _first(problem))
    for call in (lambda: solve(W, 2, "writes"), lambda: solve(problem, None, "writes")):
        with pytest.raises(grace_opt.errors.SolverError, match=r"writes wrote into problem\.W "):
            call()
        assert all(torch.equal(torch.as_tensor(now), then) for now, then in zip(arrays, before, strict=True))
        assert objective.evaluate(problem.weights, _first(problem)) == value


def test_a_solver_that_only_writes_into_the_users_arrays_leaves_them_alone(forget, monkeypatch):
    """Factors are made of them, and may be others: float32 becomes float64."""
    monkeypatch.setattr("grace_opt.kernels.solve.columns.source.BLOCK_BYTES", 0)
    write = _spoiled(lambda problem: [array.zero_() for array in problem.weights.arrays])
    grace_opt.register_solver("writes", batched=True, forms=("factored",))(write)
    arrays, W = _in_form("factored", 1000)
    before = [torch.as_tensor(each).clone() for each in arrays]
    found = solve(W, 2, "writes")
    assert found.objective == objective.evaluate(Problem.of(W, 2).weights, torch.arange(1000) < 2)
    assert all(torch.equal(torch.as_tensor(now), then) for now, then in zip(arrays, before, strict=True))


def test_a_solver_that_writes_into_what_is_required_is_refused(forget):
    grace_opt.register_solver("writes", batched=True)(_spoiled(lambda problem: problem.required.logical_not_()))
    with pytest.raises(grace_opt.errors.SolverError, match=r"writes wrote into problem\.required "):
        solve(torch.eye(4), 2, "writes", required=[0])


def _bounded(bound, **more):
    return lambda p, o, r: SolverResult(_first(p), bound(p) if callable(bound) else bound, **more)


BOUNDS = {
    "above f": (lambda p: p.W.sum((-1, -2)).double() + 1, "at most f"),
    "infinite": (lambda p: torch.full((2,), torch.inf), "at most f"),
    "nan": (lambda p: torch.full((2,), torch.nan), "lower bound nan"),
    "one nan": (lambda p: torch.tensor([0.0, torch.nan]), "nan for instance 1"),
    "a column": (lambda p: torch.zeros(2, 1), r"shape \(2, 1\)"),
    "too few": (lambda p: torch.zeros(1), r"shape \(1,\)"),
    "a number": (1.0, r"shape \(\)"),
    "complex": (lambda p: torch.zeros(2, dtype=torch.complex64), "complex"),
    "bools": (lambda p: torch.zeros(2, dtype=torch.bool), "numbers of shape"),
    "text": ("low", "lower_bound is a str"),
    "elsewhere": (lambda p: torch.zeros(2, device="meta"), "meta"),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_a_bound_that_is_none_is_refused(forget, case):
    bound, message = BOUNDS[case]
    grace_opt.register_solver("bounds", batched=True)(_bounded(bound))
    W = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    with pytest.raises(grace_opt.errors.SolverError, match=f"bounds.*{message}"):
        solve(W, 1, "bounds")
    with pytest.raises(grace_opt.errors.SolverError, match=f"bounds.*{message}"):
        solve(W, 1, "bounds", certify=True)
    with pytest.raises(grace_opt.errors.ComparisonError, match=message):
        grace_opt.compare(W, 1, ["mies", "bounds"])


@pytest.mark.parametrize("bound", [torch.zeros(1), torch.tensor([[0.0]]), float("nan"), 2.0, 1 + 1e-12, True, "low"])
def test_a_bound_of_one_instance_that_is_none_is_refused(forget, bound):
    grace_opt.register_solver("bounds")(_bounded(bound))
    with pytest.raises(grace_opt.errors.SolverError, match=r"bounds.*bound"):
        solve(torch.eye(3), 1, "bounds")


@pytest.mark.parametrize("bound", [0, 0.5, np.float32(0.5), torch.tensor(0.5)])
def test_a_bound_of_one_instance_may_be_a_number(forget, bound):
    grace_opt.register_solver("bounds")(_bounded(bound))
    sol = solve(torch.eye(3), 1, "bounds")
    assert float(sol.lower_bound) == float(bound)
    assert sol.gap > 0


LIMITS = {
    "numbers": torch.zeros(2),
    "one for all": torch.tensor(False),
    "a column": torch.zeros(2, 1, dtype=torch.bool),
    "a bool": True,
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_that_is_none_is_refused(forget, limit):
    grace_opt.register_solver("limits", batched=True)(_bounded(None, limit=LIMITS[limit]))
    with pytest.raises(grace_opt.errors.SolverError, match=r"limits: SolverResult\.limit"):
        solve(torch.eye(3).repeat(2, 1, 1), 1, "limits")


@pytest.mark.parametrize(
    "answer",
    [
        lambda p: SolverResult(_first(p).to("meta")),
        lambda p: SolverResult(_first(p).float()),
        lambda p: SolverResult(_first(p)[..., :2]),
        lambda p: SolverResult(_first(p), stats=[1]),
        lambda p: SolverResult(_first(p), objective=torch.zeros(2, 2)),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_answers_of_another_form_are_refused(forget, answer, batched):
    grace_opt.register_solver("formless", batched=batched)(lambda p, o, r: answer(p))
    for check in (True, False):
        with pytest.raises(grace_opt.errors.SolverError, match="formless"):
            solve(torch.eye(3).repeat(2, 1, 1), 1, "formless", check=check)


def test_statistics_are_one_per_instance(forget):
    grace_opt.register_solver("counts", batched=True)(
        lambda p, o, r: SolverResult(_first(p), stats={"steps": torch.zeros(3)})
    )
    with pytest.raises(grace_opt.errors.SolverError, match=r"counts.*'steps'.*\(2, '...'\)"):
        solve(torch.eye(3).repeat(2, 1, 1), 1, "counts")


def test_statistics_of_instances_are_added_whatever_numbers_they_are(forget):
    """numpy's and torch's were lost where instances are solved one at a time."""
    counts = {"steps": np.int64(3), "moves": torch.tensor(2), "seconds": np.float32(0.5), "name": "x"}
    grace_opt.register_solver("counts")(lambda p, o, r: SolverResult(_first(p), stats=counts))
    stats = solve(torch.eye(3).repeat(2, 1, 1), 1, "counts").stats
    assert {name: stats.get(name) for name in counts} == {"steps": 6, "moves": 4, "seconds": 1.0, "name": None}


def test_a_bound_above_f_by_rounding_is_f(forget):
    """f is a sum of floats: a bound summed in another order is no lie, and leaves no negative gap."""
    W = torch.from_numpy(testing.instance("wishart", 40, 0))
    grace_opt.register_solver("rounds", batched=True)(lambda p, o, r: SolverResult(_first(p), _value(p) * (1 + 4e-16)))
    grace_opt.register_solver("lies", batched=True)(lambda p, o, r: SolverResult(_first(p), _value(p) * (1 + 1e-11)))

    def _value(problem):
        return objective.evaluate(problem.W, _first(problem))

    sol = solve(W, 20, "rounds")
    assert sol.lower_bound == sol.objective
    assert sol.gap == 0
    assert solve(W, 20, "lies", check=False).gap == 0  # trusted, but never negative
    with pytest.raises(grace_opt.errors.SolverError, match=r"lies.*at most f"):
        solve(W, 20, "lies")
