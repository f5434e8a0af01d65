"""Comparison: a sequence that means what it shows, keeps what is done, and says what is missing."""

import copy
import io
import json
import pickle
import signal
import sys
import threading
import time

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from rich.console import Console

import grace_opt
from grace_opt import Comparison, SolverResult, Status, compare
from grace_opt._util import progress as progress_module
from grace_opt.errors import ComparisonError, FileError, OptionError, SolverError, UnknownSolverError
from grace_opt.testing import batches, check_solution, instance, instances
from tests import oracle

METHODS = ["think", "mies", "exhaustive"]
W3 = [[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]


@pytest.fixture
def register():
    """Register a solver for one test: a function of (problem, options, run)."""
    names = []

    def add(name, solver, **keywords):
        grace_opt.register_solver(name, **keywords)(solver)
        names.append(name)

    yield add
    for name in names:
        grace_opt.registry.unregister(name)


def first(problem, options, run):
    return SolverResult(problem.candidates & (problem.candidates.cumsum(-1) <= problem.k.unsqueeze(-1)))


def shown(thing):
    console = Console(file=io.StringIO(), width=200)
    console.print(thing)
    return console.file.getvalue()


def test_it_is_an_immutable_sequence():
    all_ = compare(W3, 2, METHODS)
    assert (len(all_), all_.methods, [s.method for s in all_]) == (3, tuple(METHODS), METHODS)
    assert all_[-1] is all_["exhaustive"] is list(all_)[2]
    assert isinstance(all_[:2], Comparison)
    assert all_[:2].methods == ("think", "mies")
    assert "mies" in all_
    assert all_[0] in all_
    assert "random" not in all_
    a, b, _ = all_
    assert (a, b) == (all_[0], all_[1])
    assert all_.index(b) == 1
    with pytest.raises(AttributeError):
        all_.solutions = ()
    with pytest.raises(TypeError):
        all_[0] = a
    with pytest.raises(TypeError):
        all_.left_out["mies"] = "no"
    with pytest.raises(IndexError):
        all_[3]
    with pytest.raises(UnknownSolverError, match="no solution by 'random' here, but by think, mies, exhaustive"):
        all_["random"]


@given(instances(max_n=7))
@settings(max_examples=40)
def test_gaps_are_to_the_optimum_once_a_method_proves_it(drawn):
    W, k, protected = drawn
    all_ = compare(W, k, METHODS, protected=protected)
    best = oracle.optimum(W, k, protected)
    size = max(np.abs(W).sum(), 1e-300)
    assert float(all_.best_bound) == pytest.approx(best, abs=1e-12 * size)
    for row, solution in zip(all_.rows(), all_, strict=True):
        f = oracle.objective(W, np.flatnonzero(solution.mask))
        scale = max(abs(f), np.trace(W))
        if row["optimal"]:
            assert f - best <= max(1e-9 * scale, 1e-9 * abs(f)) + 1e-12 * size
        else:
            floor = 1e-9 * max(np.abs(W[np.ix_(solution.mask, solution.mask)]).sum(), 1e-300)
            assert row["gap"] == pytest.approx((f - best) / max(abs(f), floor), rel=1e-6)
        assert row["certified"]
    assert all_["exhaustive"].status is Status.OPTIMAL
    assert float(all_.gaps("exhaustive")) == 0
    assert float(all_.best.objective) == float(all_["exhaustive"].objective)
    all_.verify()


@pytest.mark.slow
@given(batches(max_n=6))
@settings(max_examples=30)
def test_a_batch_is_what_its_instances_are(drawn):
    W, k, protected = drawn
    all_ = compare(W, k, METHODS, protected=protected, certify=True)
    best, rows = all_.best, all_.rows()
    check_solution(W, k, best, protected)
    assert all_.best_bound.shape == (len(W),)
    for b in range(len(W)):
        alone = compare(W[b], int(k[b]), METHODS, protected=protected[b], certify=True)
        assert float(alone.best.objective) == float(best.objective[b])
        assert float(alone.best_bound) == pytest.approx(float(all_.best_bound[b]), rel=1e-12)
        assert best.stats["methods"][b] == alone.best.method
        mine = [row for row in rows if row["instance"] == b]
        for one, row in zip(alone.rows(), mine, strict=True):
            assert (one["objective"], one["k"], one["status"]) == (row["objective"], row["k"], row["status"])
            assert one["gap"] == pytest.approx(row["gap"], rel=1e-9)


def test_the_best_bound_serves_methods_that_have_none():
    all_ = compare(W3, 2, ["mies", "exhaustive"])
    assert np.isinf(all_["mies"].gap)  # its own
    assert float(all_.gaps("mies")) == (8 - 5) / 8
    assert np.isinf(all_[:1].gaps(0))  # without the other, nothing is known
    assert np.isneginf(all_[:1].best_bound)


def test_integer_steps_do_not_leave_a_gap_behind_a_proof(register):
    def half(problem, options, run):
        return SolverResult(first(problem, options, run).mask, lower_bound=torch.full((1,), 3.5, dtype=torch.float64))

    register("half", half, batched=True)
    all_ = compare(np.diag([4, 4, 9]), 1, ["half", "mies"])
    assert all_["half"].status is Status.OPTIMAL
    assert float(all_["half"].lower_bound) == 4  # 3.5, and no whole number between
    assert [row["gap"] for row in all_.rows()] == [0, 0]
    assert float(all_.best_bound) == 4


GIANT = 1e17
#: Two of these weights nearly cancel, and leave less than their rounding.
CANCELLING = np.array(
    [[2.0, -1, 0.5, -1.4], [-1, GIANT, -GIANT, -0.34], [0.5, -GIANT, GIANT, -0.18], [-1.4, -0.34, -0.18, -0.8]]
)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_an_answer_that_is_proved_up_to_rounding_is_no_bound(shape, maximize, register):
    """The first method's choice is within the rounding of its weights of its bound, and another one is better."""

    def first_three(problem, options, run):
        mask = torch.zeros_like(problem.candidates)
        mask[:, :3] = True
        return SolverResult(mask, lower_bound=torch.full((len(mask),), -5000.0, dtype=torch.float64))

    register("first_three", first_three, batched=True)
    W = np.broadcast_to((-1 if maximize else 1) * CANCELLING, (*shape, 4, 4)).copy()
    both = compare(W, 3, ["first_three", "exhaustive"], maximize=maximize)
    sign = -1 if maximize else 1
    assert set(np.ravel(both["first_three"].status)) == {Status.OPTIMAL}
    assert (sign * np.asarray(both["first_three"].objective) > -1).all()
    assert np.asarray(both.best.objective) == pytest.approx(sign * -1.84)
    assert (sign * np.asarray(both.best_bound) <= sign * np.asarray(both.best.objective)).all()
    assert both.verify() is both
    both.best.verify()


def test_a_wrong_bound_is_found_among_giants(register):
    """However large the weights that cancel in the answer that contradicts it."""

    def wrong(problem, options, run):
        mask = torch.zeros_like(problem.candidates)
        mask[:, :3] = True
        return SolverResult(mask, lower_bound=torch.zeros(len(mask), dtype=torch.float64))

    register("wrong", wrong, batched=True)
    W = np.where(np.abs(CANCELLING) == GIANT, CANCELLING / 1e7, CANCELLING)
    with pytest.raises(SolverError, match=r"wrong claims that no answer to instance 0 is below 0, but exhaustive has"):
        compare(W, 3, ["wrong", "exhaustive"]).verify()


def test_torch_comes_back_as_torch():
    W = torch.eye(4, dtype=torch.float64).repeat(2, 3, 1, 1)
    all_ = compare(W, 2, ["think", "mies"], certify=True)
    for value in (all_.best_bound, all_.gaps(0), all_.best.objective):
        assert isinstance(value, torch.Tensor)
        assert value.shape == (2, 3)
    assert all_.best.mask.shape == (2, 3, 4)
    assert all_.best.indices.shape == (2, 3, 2)
    assert all_.best.status.shape == (2, 3)
    assert len(all_.rows()) == 12


def test_equals_go_to_the_proof_then_to_the_first(register):
    register("first", first, batched=True)
    W = np.diag([1.0, 1.0, 2.0])
    assert compare(W, 1, ["first", "think", "exhaustive"]).best.method == "exhaustive"
    assert compare(W, 1, ["first", "think"]).best.method == "first"


def test_labels_of_a_graph():
    graph = nx.Graph()
    graph.add_weighted_edges_from([("a", "b", -3.0), ("b", "c", 1.0)])
    assert sorted(compare(graph, 2, ["exhaustive"]).best.labels) == ["a", "b"]


def test_defaults_leave_out_what_cannot_and_say_why(register, monkeypatch):
    def refuses(problem, options, run):
        raise SolverError("would need 5 PB")

    register("refuses", refuses)
    register("missing", first, requires=("no_such_module:peers",))
    monkeypatch.setattr("grace_opt.api.DEFAULT_COMPARE_SECONDS", 0.5)
    all_ = compare(W3, 2)
    assert all_.left_out["refuses"] == "would need 5 PB"
    assert 'pip install ".[peers]"' in all_.left_out["missing"]
    assert {"mies", "exhaustive"} <= set(all_.methods)
    with pytest.raises(UnknownSolverError, match="left out: would need 5 PB"):
        all_["refuses"]
    for text in (repr(all_), str(all_), shown(all_)):
        assert "left out: missing, refuses" in " ".join(text.split())  # captions are as narrow as their table


def test_an_error_of_a_method_asked_for_keeps_what_is_done(register, monkeypatch):
    monkeypatch.setattr("grace_opt.api.DEFAULT_COMPARE_SECONDS", 0.5)

    def fails(problem, options, run):
        raise SolverError("status: numerical trouble")

    def has_a_bug(problem, options, run):
        return {}["nowhere"]

    register("fails", fails)
    register("has_a_bug", has_a_bug)
    with pytest.raises(ComparisonError, match=r"fails: status: numerical trouble.*\.partial: think, mies") as caught:
        compare(W3, 2, ["think", "mies", "fails", "exhaustive"])
    assert caught.value.partial.methods == ("think", "mies")
    for methods in (["mies", "has_a_bug"], None):  # a bug is no refusal: it is not swallowed, nor are the results
        with pytest.raises(KeyError, match="nowhere") as bug:
            compare(W3, 2, methods)
        assert "mies" in bug.value.partial or methods is None
        assert "has_a_bug" in bug.value.__notes__[0]
    with pytest.raises(ComparisonError) as at_once:
        compare(W3, 2, ["fails"])
    assert len(at_once.value.partial) == 0


def test_the_limit_is_each_methods_and_has_a_default(register, monkeypatch, clock):
    left = []

    def patient(problem, options, run):
        left.append(run.deadline - clock.now)
        return first(problem, options, run)

    register("patient", patient, batched=True)
    monkeypatch.setattr("grace_opt.api.DEFAULT_COMPARE_SECONDS", 0.5)
    compare(W3, 2)
    compare(W3, 2, ["patient"], time_limit=7.0)
    compare(W3, 2, ["patient"])
    assert 0.4 < left[0] <= 0.5
    assert 6.9 < left[1] <= 7
    assert left[2] == float("inf")


def test_wrong_names_and_options_are_refused_before_anything_runs(register):
    ran = []

    def counts(problem, options, run):
        ran.append(1)
        return first(problem, options, run)

    register("counts", counts, batched=True)
    for keywords, error, message in (
        ({"methods": ["counts", "meis"]}, UnknownSolverError, "Did you mean 'mies'"),
        ({"methods": ["counts"], "options": {"counts": {"x": 1}}}, OptionError, "takes no options"),
        ({"methods": "counts"}, OptionError, r"\['counts'\]"),
        ({"methods": ["counts"], "time_limit": 0}, OptionError, "time_limit=0"),
        ({"methods": ["counts"], "seed": -1}, OptionError, "seed=-1"),
        ({"methods": ["counts"], "progress": "yes"}, OptionError, "progress='yes'"),
    ):
        with pytest.raises(error, match=message):
            compare(W3, 2, **keywords)
    with pytest.raises(OptionError, match="leave k= and protected= out"):
        compare(grace_opt.Problem.of(W3, 2), 1)
    assert not ran


def test_interrupted(register):
    def interrupted(problem, options, run):
        raise KeyboardInterrupt

    register("interrupted", interrupted)
    all_ = compare(W3, 2, ["mies", "interrupted", "think"])
    assert all_.interrupted
    assert all_.methods == ("mies",)
    assert dict(all_.left_out) == {"interrupted": "interrupted", "think": "interrupted"}
    assert "interrupted" in repr(all_)
    assert all_.values()["interrupted"] is True
    with pytest.raises(KeyboardInterrupt):
        compare(W3, 2, ["interrupted", "mies"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_a_real_ctrl_c(register):
    def waits(problem, options, run):
        threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
        time.sleep(30)
        return first(problem, options, run)

    register("waits", waits)
    began = time.monotonic()
    all_ = compare(W3, 2, ["mies", "waits"], progress=True)
    assert time.monotonic() - began < 20
    assert all_.interrupted
    assert all_.methods == ("mies",)


def test_table_of_one_instance():
    text = shown(compare(W3, 2, ["mies", "exhaustive"]).table())
    (mies,) = (line for line in text.splitlines() if "mies" in line)
    assert mies.split()[:5] == ["mies", "8", "37.500%", "bounded", "FEASIBLE"]
    (exact,) = (line for line in text.splitlines() if "exhaustive" in line)
    assert exact.split()[:5] == ["exhaustive", "5", "0.000%", "optimal", "OPTIMAL"]
    assert "gap: to 5, the best lower bound of all methods" in text
    bare = shown(compare(W3, 2, ["mies"]).table())
    assert "no lower bound: certify=True adds one" in bare
    assert "unknown" in bare


def test_table_of_a_batch():
    W = np.stack([instance("wishart", 6, seed) for seed in range(25)])
    all_ = compare(W, 3, ["random", "mies", "exhaustive"])
    text = shown(all_)
    assert "25 instances" in text
    assert "25/25" in text
    assert "25 optimal" in text
    assert len(text.splitlines()) < 12
    one_by_one = shown(all_.table(per_instance=True))
    assert "the first 20 shown" in one_by_one
    assert len([line for line in one_by_one.splitlines() if " OPTIMAL" in line]) == 20
    assert repr(all_).startswith("<Comparison of random, mies, exhaustive: 25 instances, 25 solved to proved optimal")


@pytest.mark.parametrize("per_instance", [False, True])
def test_nodes_are_shown_where_a_method_counts_them(register, per_instance):
    def counted(problem, options, run):
        nodes = torch.arange(7, 7 + len(problem.W)) if per_instance else 1234
        return SolverResult(first(problem, options, run).mask, stats={"nodes": nodes})

    register("counted", counted, batched=True)
    assert "nodes" not in shown(compare(W3, 2, ["mies"]))
    all_ = compare(np.stack([W3, W3, W3]), 2, ["mies", "counted"])
    text = shown(all_)
    assert "nodes" in text
    assert ("24" if per_instance else "1,234") in text
    assert [row["nodes"] for row in all_.rows()] == [None] * 3 + ([7, 8, 9] if per_instance else [1234] * 3)


def test_text_and_notebook():
    all_ = compare(W3, 2, ["mies", "exhaustive"])
    assert repr(all_) == "<Comparison of mies, exhaustive: f = 5 by exhaustive, OPTIMAL>"
    assert "method" in str(all_)
    assert "\x1b" not in str(all_)
    assert "exhaustive" in all_._repr_mimebundle_(include=[], exclude=[])["text/plain"]


def test_json(tmp_path):
    path = tmp_path / "all.json"
    all_ = compare(np.stack([W3, W3]), [1, 2], ["mies", "think"])
    text = all_.to_json(path)
    assert path.read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["all.json"]
    values = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [s["method"] for s in values["solutions"]] == ["mies", "think"]
    assert values["best_bound"] == [None, None]
    assert values["solutions"][0]["lower_bound"] == [None, None]
    exact = json.loads(compare(W3, 2, ["mies", "exhaustive"]).to_json())
    assert exact["best_bound"] == 5
    assert [s["gap_to_best_bound"] for s in exact["solutions"]] == [0.375, 0]
    with pytest.raises(FileError, match="there is no folder"):
        all_.to_json(tmp_path / "no" / "where.json")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "all.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        compare(W3, 2, ["mies"]).to_json(path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_frame():
    pandas = pytest.importorskip("pandas")
    W = np.stack([instance("wishart", 6, seed) for seed in range(4)])
    frame = compare(W, 3, METHODS, certify=True).to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 12
    exact = frame[frame.method == "exhaustive"]
    assert exact.optimal.all()
    assert (frame.groupby("instance").objective.min().to_numpy() == exact.objective.to_numpy()).all()
    assert (frame.best_bound >= frame.lower_bound).all()


def test_frame_without_pandas_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(OptionError, match=r'pip install "\.\[bench\]"'):
        compare(W3, 2, ["mies"]).to_frame()


def test_verify_finds_methods_that_contradict_each_other(register):
    def boasts(problem, options, run):
        return SolverResult(first(problem, options, run).mask, lower_bound=torch.full((1,), 6.5, dtype=torch.float64))

    register("boasts", boasts, batched=True)  # 7 is f of the first two, and 5 the optimum
    all_ = compare([[4.0, -0.5, -2.0], [-0.5, 4.0, 0.0], [-2.0, 0.0, 5.0]], 2, ["boasts", "exhaustive"])
    with pytest.raises(SolverError, match=r"boasts claims .* 6\.5, but exhaustive has f = 5"):
        all_.verify()
    assert float(all_.gaps("exhaustive")) < 0  # and the gap does not hide it
    low = compare(instance("wishart", 9, 1).astype(np.float32), 4, METHODS, certify=True, check=False)
    assert low.verify() is low


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("certify", [False, True])
def test_a_wrong_claim_is_marked_and_nobody_takes_it_over(register, maximize, certify):
    """With certify=, all answers get the best bound: a wrong one made THINK's set "optimal" beside a better one."""

    def boasts(problem, options, run):
        mask = first(problem, options, run).mask
        return SolverResult(
            mask, lower_bound=torch.full((len(mask),), 6.5 if not maximize else -5.5, dtype=torch.float64)
        )

    register("boasts", boasts, batched=True)
    W = np.array([[4.0, -0.5, -2.0], [-0.5, 4.0, 0.0], [-2.0, 0.0, 5.0]])  # 7 is f of the first two, 5 and 9 the best
    W = W if not maximize else 11 * np.eye(3) / 2 - W  # 4 of the first two, 6 and 2 of the others
    all_ = compare(W, 2, ["boasts", "think", "exhaustive"], certify=certify, maximize=maximize)
    assert [row["contradicted"] for row in all_.rows()] == [True, False, False]
    assert all_["think"].status is not Status.OPTIMAL
    lines = str(all_).splitlines()
    assert "contradicted" in lines[2]
    assert not any("contradicted" in line for line in lines[3:5])
    assert "contradicted by another's answer: boasts" in " ".join(str(all_).split())
    with pytest.raises(SolverError, match="boasts claims"):
        all_.verify()
    batch = compare(np.stack([W, W]), 2, ["boasts", "exhaustive"], certify=certify, maximize=maximize)
    assert "2 contradicted" in str(batch)


def test_empty():
    none = Comparison((), {})
    assert len(none) == 0
    assert repr(none) == "<Comparison of no methods>"
    assert none.values()["solutions"] == []
    assert none.rows() == []
    assert "method" in str(none)
    with pytest.raises(OptionError, match="nothing to choose from"):
        none.best_bound  # noqa: B018
    with pytest.raises(OptionError, match="nothing to choose from"):
        none.best  # noqa: B018


@pytest.mark.slow
def test_progress(register, capsys, monkeypatch, clock):
    monkeypatch.setattr(progress_module.threading, "Timer", clock.timer)
    compare(W3, 2, ["mies"])
    assert capsys.readouterr() == ("", "")  # stderr is no terminal here
    compare(W3, 2, ["mies"], progress=True)
    assert "mies" in capsys.readouterr().err
    register("sleeps", lambda p, o, r: (clock.sleep(0.3), first(p, o, r))[1])
    monkeypatch.setattr(progress_module, "SECONDS_BEFORE_BAR", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    compare(W3, 2, ["sleeps"])
    assert "sleeps" in capsys.readouterr().err
    compare(W3, 2, ["sleeps"], progress=False)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress_module, "SECONDS_BEFORE_BAR", 30.0)
    compare(W3, 2, ["sleeps"])
    assert capsys.readouterr() == ("", "")  # quick enough to need none


def pickled(all_):
    return pickle.loads(pickle.dumps(all_))  # noqa: S301 - what a pool of processes does


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_of_another_process(copied):
    all_ = compare(np.diag([4.0, 1.0, 9.0]), 1, ["mies", "exhaustive"])
    found = copied(all_)
    assert str(found) == str(all_)
    assert found.methods == all_.methods
    assert found.left_out == all_.left_out
    with pytest.raises(TypeError):
        found.left_out["mies"] = "it cannot be changed"
