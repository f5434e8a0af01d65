"""The experiment `bounds`: the mathematics behind it, its rows, and what is said of bad input."""

from __future__ import annotations

import doctest
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grace_opt
from bench.experiments import __main__ as command
from bench.experiments import bounds, families, problems, registry, restricted
from bench.experiments.problems import Named
from grace_opt.errors import GraceError, OptionError, ProblemError
from grace_opt.instances import generators
from grace_opt.sweep import Table
from grace_opt.sweep.lines import lines
from grace_opt.sweep.views import check_columns

INF = math.inf


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MODULES", ("bounds",))


def gram(n: int, rank: int, seed: int) -> Any:
    V = np.random.default_rng(seed).normal(size=(rank, n)) * np.random.default_rng(seed + 1).lognormal(0, 1, n)
    return V.T @ V


@pytest.mark.parametrize("module", [families, restricted])
def test_the_examples_in_docstrings(module: Any) -> None:
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0


@settings(max_examples=40, deadline=None)
@given(n=st.integers(3, 8), seed=st.integers(0, 2**20), data=st.data())
def test_restricted_eigenvalues_against_all_supports(n: int, seed: int, data: Any) -> None:
    k = data.draw(st.integers(1, n))
    W = gram(n, data.draw(st.integers(1, n + 2)), seed)
    # Every support of at most k vertices, one by one: fewer than k change nothing.
    supports = [T for size in range(1, k + 1) for T in itertools.combinations(range(n), size)]
    values = [np.linalg.eigvalsh(W[np.ix_(T, T)]) for T in supports]
    least, largest = min(v[0] for v in values), max(v[-1] for v in values)
    rounding = 1e-12 * n * np.linalg.norm(W)
    exact = restricted.restricted_eigenvalues(W, k)
    assert exact.exact
    assert exact.smallest == pytest.approx((least, least), abs=rounding, rel=0)
    assert exact.largest == pytest.approx((largest, largest), abs=rounding, rel=0)
    ranged = restricted.restricted_eigenvalues(W, k, enumerate_up_to=0)
    assert not ranged.exact
    assert ranged.smallest[0] <= least + rounding
    assert ranged.smallest[1] >= least - rounding
    assert ranged.largest[0] <= largest + rounding
    assert ranged.largest[1] >= largest - rounding
    assert ranged.kappa[0] <= exact.kappa[1]
    assert ranged.kappa[1] >= exact.kappa[0]


def test_ranges_are_not_trivial() -> None:
    W = families.equicorrelated(12, 0.5, seed=1)
    exact, ranged = (restricted.restricted_eigenvalues(W, 4, enumerate_up_to=most) for most in (10_000, 0))
    assert exact.kappa[1] / exact.kappa[0] < 1 + 1e-9
    assert ranged.kappa[0] == pytest.approx(exact.kappa[0], rel=0.2)  # elimination finds nearly the extreme supports
    assert ranged.largest[1] <= np.linalg.eigvalsh(W)[-1] * (1 + 1e-9)
    diagonal = restricted.restricted_eigenvalues(np.diag([5.0, 1.0, 3.0, 2.0]), 2, enumerate_up_to=0)
    assert diagonal.kappa == pytest.approx((5.0, 5.0))


def test_protection_leaves_fewer_supports() -> None:
    W = np.diag([1.0, 2.0, 4.0, 100.0])
    free = np.array([True, True, True, False])
    assert restricted.restricted_eigenvalues(W, 2).kappa == pytest.approx((100.0, 100.0))
    assert restricted.restricted_eigenvalues(W, 2, free).kappa == pytest.approx((4.0, 4.0))


def test_singular_supports_make_kappa_infinite() -> None:
    W = np.asarray(problems.make({"kind": "low_rank", "n": 10, "k": 6, "correlation": 0.5, "seed": 0})[0].W)
    assert np.linalg.matrix_rank(W) <= 4
    for most in (0, 10_000):
        assert restricted.restricted_eigenvalues(W, 6, enumerate_up_to=most).kappa[1] == INF


def test_restricted_eigenvalues_of_what_they_do_not_fit() -> None:
    with pytest.raises(ProblemError, match="positive semidefinite"):
        restricted.restricted_eigenvalues(np.array([[0.0, 1.0], [1.0, 0.0]]), 1)
    with pytest.raises(ProblemError, match="0 < k <= 1"):
        restricted.restricted_eigenvalues(np.eye(2), 2, np.array([True, False]))
    with pytest.raises(ProblemError, match="weight zero"):
        restricted.scaled(np.diag([1.0, 0.0]))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 9), seed=st.integers(0, 2**20), data=st.data())
def test_the_bound_holds_for_every_subset(n: int, seed: int, data: Any) -> None:
    k = data.draw(st.integers(1, n))
    W = gram(n, n + 3, seed)
    S, T = (data.draw(st.lists(st.sampled_from(range(n)), min_size=k, max_size=k, unique=True)) for _ in range(2))
    f, g = float(W[np.ix_(S, S)].sum()), float(W[np.ix_(T, T)].sum())
    kappa = restricted.restricted_eigenvalues(W, k).kappa[1]
    assert f <= kappa * g * (1 + 1e-9)
    # And for ThinK, with the diagonal scaled away.
    relative = restricted.restricted_eigenvalues(restricted.scaled(W), k).kappa[1]
    assert float(grace_opt.solve(W, k, "think").objective) <= relative * g * (1 + 1e-9)


@pytest.mark.parametrize("k", [2, 3, 5, 6])
@pytest.mark.parametrize("ridge", [0.5, 2.0**-10])
def test_the_family_on_which_greedy_is_bad(k: int, ridge: float) -> None:
    weight = 0.75
    W = families.simplex(k, ridge, weight)
    best = float(grace_opt.solve(W, k, "exhaustive").objective)
    assert best == pytest.approx(k * ridge)
    for method in ("mies", "think", "local_search"):
        found = grace_opt.solve(W, k, method)
        assert found.indices.tolist() == list(range(k))
        assert float(found.objective) / best == pytest.approx(1 + weight / ridge)
    assert float(grace_opt.solve(W, k, "drop_greedy").objective) == pytest.approx(best)
    kappa = restricted.restricted_eigenvalues(W, k).kappa
    assert kappa == pytest.approx([1 + k / ((k - 1) * ridge)] * 2, rel=1e-6)
    answer = grace_opt.solve(W, k, "mies", certify="fast")
    assert float(answer.objective / answer.lower_bound) == pytest.approx(1 + weight / ridge, rel=1e-3)


def test_rows_of_bounds() -> None:
    made = Named("one", "one", np.diag([1.0, 2.0, 3.0, 4.0]), 2, np.zeros(4, bool))
    config = {"study": "real", "seed": 0, "limit": 5.0, "enumerate_up_to": 100}
    rows = {row["what"]: row for row in bounds.evaluate(made, None, config)}
    assert rows["mies"]["factor"] == rows["think"]["factor"] == 1.0
    assert rows["worst set"]["factor"] == pytest.approx(7 / 3)
    assert rows["kappa"]["factor"] == pytest.approx(4.0)
    assert rows["kappa of W/diag"]["factor"] == pytest.approx(1.0)
    assert rows["certified tight"]["factor"] == pytest.approx(1.0)
    assert rows["mies"]["log10"] == 0.0
    kept = np.array([True, False, False, False])
    rows = {row["what"]: row for row in bounds.evaluate(made, kept, {**config, "study": "n"})}
    assert (rows["mies"]["f(mies)"], rows["kappa"]["factor"]) == (pytest.approx(5.0), pytest.approx(2.0))
    assert rows["mies"]["by n"] == 0.0
    assert "log10" not in rows["mies"]
    assert [bounds.ratio(*pair) for pair in ((4.0, 2.0), (1.0, 0.0), (1.0, -1.0), (0.0, 0.0))] == [2.0, INF, INF, 1.0]


def options(**changes: str) -> registry.Settings:
    return registry.Settings("smoke", 0, "", "cpu", bounds.EXPERIMENT.options("smoke", changes))


def test_instance_files(tmp_path: Path) -> None:
    heads, graph = tmp_path / "heads.npz", tmp_path / "graph.dat"
    grace_opt.instances.write(heads, np.stack([np.eye(5), 2 * np.eye(5)]), np.array([2, 3]))
    grace_opt.instances.write(graph, generators.k_cluster(6, seed=0).W, 3)
    (tmp_path / "README.md").write_text("no instance")
    (tmp_path / "optima.csv").write_text("no,instance")
    configs = problems.from_files(str(tmp_path), 0.5)
    assert [(Path(c["path"]).name, c["matrix"], c["k"]) for c in configs] == [
        ("graph.dat", 0, 3),
        ("heads.npz", 0, 2),
        ("heads.npz", 1, 3),
    ]
    assert [problems.make(c)[0].instance for c in configs] == ["graph.dat", "heads.npz#0", "heads.npz#1"]
    assert (2 * np.eye(5) == problems.make(configs[2])[0].W).all()
    grace_opt.instances.write(heads, np.eye(5))
    assert problems.from_files(str(heads), 0.5)[0]["k"] == 3  # ⌈0.5 · 5⌉, where the file states none
    problems._file.cache_clear()  # another process, some time later
    with pytest.raises(ProblemError, match="start again"):
        problems.make(configs[2])


def test_bad_instance_files(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="nothing is there"):
        problems.from_files(str(tmp_path / "missing.npz"), 0.5)
    with pytest.raises(ProblemError, match="no instance in this folder"):
        problems.from_files(str(tmp_path), 0.5)
    (tmp_path / "notes.xyz").write_text("")
    with pytest.raises(ProblemError, match="unknown kind"):
        problems.from_files(str(tmp_path / "notes.xyz"), 0.5)
    for name, arrays, message in (
        ("flat", {"W": np.zeros((3, 4))}, "shape"),
        ("k", {"W": np.eye(4), "k": np.array(9)}, "k is 9"),
        ("all", {"W": np.eye(4), "k": np.array(4)}, "k = 4"),
        ("ks", {"W": np.zeros((2, 4, 4)), "k": np.array([1, 2, 3])}, "one for each matrix"),
        ("names", {"A": np.eye(2), "B": np.eye(2)}, "'W'"),
    ):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(ProblemError, match=message):
            problems.from_files(str(tmp_path / f"{name}.npz"), 0.5)
    (tmp_path / "short.npz").write_bytes((tmp_path / "k.npz").read_bytes()[:100])
    assert command.main(["bounds", "--smoke", "--set", f"instances={tmp_path / 'short.npz'}"]) == 2


def test_bounds_refuses_what_is_not_semidefinite(tmp_path: Path) -> None:
    path = tmp_path / "graph.dat"
    grace_opt.instances.write(path, generators.k_cluster(6, seed=0).W, 3)
    with pytest.raises(ProblemError, match=r"graph\.dat, matrix 0.*negative"):
        bounds.cells(options(instances=str(path)))


@pytest.mark.parametrize(
    ("change", "message"), [({"kinds": "cliques"}, "there are attention"), ({"n": "3"}, "at least 4")]
)
def test_bad_options(change: dict[str, str], message: str) -> None:
    with pytest.raises(GraceError, match=message):
        bounds.cells(options(**change))


def test_families_say_what_they_take() -> None:
    with pytest.raises(OptionError, match="k >= 2"):
        families.simplex(1, 0.1)
    with pytest.raises(OptionError, match="from 0 to 1"):
        families.equicorrelated(4, 1.5, 0)
    assert families.ridged(8, 3, 0, 0.5).trace() == generators.planted(8, 3, 0).W.trace() + 4.0


def test_correlation_is_what_it_says() -> None:
    W = families.equicorrelated(6, 0.8, seed=0, rows=4000, sigma=0.0)
    off = W[~np.eye(6, dtype=bool)] / np.mean(np.diag(W))
    assert off == pytest.approx(np.full(30, 0.64), abs=0.06)  # the square: of queries and of keys


def test_heads_of_the_pocket_model() -> None:
    configs = problems.from_heads(registry.Settings("smoke", 3, "", "cpu", None), 2, 160, 0.6)
    assert [c["seed"] for c in configs] == [3, 4]
    first, second = (problems.make(c) for c in configs)
    assert len(first) == len(second) > 1
    assert {named.instance for named in first}.isdisjoint({named.instance for named in second})
    assert [named.unit for named in first] == ["prompt 3"] * len(first)
    assert first[0].W.shape == (64, 64)
    assert first[0].k == 39
    assert 3 <= first[0].protected.sum() <= 10
    assert np.linalg.eigvalsh(first[0].W)[0] > -1e-6 * first[0].W.trace()


def test_smoke() -> None:
    asked = options(prompts="0")
    one_of_each = {(config["kind"], config["study"]): config for config in bounds.cells(asked)}
    assert len(one_of_each) >= 2
    rows = [{**config, **row} for config in one_of_each.values() for row in bounds.run(config)]
    for view in bounds.views(asked):
        check_columns("bounds", view, {column for row in rows for column in row})
        if isinstance(view, Table):
            assert lines(view, rows, "").body
            assert not [line for line in lines(view, rows, "").body if "no pairs" in line]


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--smoke", "--out", str(tmp_path), "--set", "prompts=0"]
    assert command.main(["bounds", *common, "--only", "kind=simplex"]) == 0
    assert "1 of 1 cells done" in capsys.readouterr().out
    nothing = ["bounds", "--smoke", "--out", str(tmp_path / "new"), "--only", "kind=words"]
    assert command.main(nothing) == 2
    assert "--only leaves no cell of bounds, whose cells have kind: attention, " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert command.main(["bounds", *common, "--set", f"instances={tmp_path / 'missing.npz'}"]) == 2
    assert "nothing is there; give an instance file or a folder" in capsys.readouterr().err
