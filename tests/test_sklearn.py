"""`grace_opt.sklearn`: the selector is one of scikit-learn's kind, and solves the criterion of mRMR."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grace_opt
from grace_opt.errors import GraceError, MissingLibraryError, OptionError, ProblemError
from grace_opt.solution import Status
from grace_opt.solvers import TabuOptions
from tests import oracle

sklearn = pytest.importorskip("sklearn")

import pandas as pd  # noqa: E402
import scipy.sparse  # noqa: E402
from joblib import parallel_config  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.compose import make_column_transformer  # noqa: E402
from sklearn.datasets import load_iris, load_wine  # noqa: E402
from sklearn.feature_selection import (  # noqa: E402
    SelectKBest,
    f_classif,
    f_regression,
    mutual_info_classif,
    mutual_info_regression,
)
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import OneHotEncoder, StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from grace_opt.sklearn import SubsetSelector, from_relevance_redundancy, selector  # noqa: E402
from grace_opt.sklearn.inputs import unit_columns  # noqa: E402

WINE = load_wine(as_frame=True)


@pytest.mark.slow
@parametrize_with_checks(
    [
        SubsetSelector(),
        SubsetSelector(1, relevance=None, method="mies"),
        SubsetSelector(relevance="f_regression", alpha=0.9),
        SubsetSelector(relevance="mutual_info_classif", redundancy="mutual_info", random_state=None),
        SubsetSelector(1.0, relevance="mutual_info_regression", time_limit=60),
    ]
)
def test_passes_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[int]]:
    """A few columns of a few rows, with ties, constant and repeated ones, on one scale each; and classes."""
    rows, n = draw(st.integers(3, 6)), draw(st.integers(1, 5))
    X = np.array(draw(st.lists(st.lists(st.integers(-3, 3), min_size=rows, max_size=rows), min_size=n, max_size=n)))
    scale = 10.0 ** np.array(draw(st.lists(st.sampled_from([-300, -9, 0, 8, 300]), min_size=n, max_size=n)))
    offset = np.array(draw(st.lists(st.sampled_from([0, 0, 1e4]), min_size=n, max_size=n)))
    y = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows).filter(lambda y: 1 < len(set(y)) < len(y)))
    return (X.T + offset) * scale, y


@pytest.mark.slow
@given(table=tables(), alpha=st.sampled_from([0.0, 0.3, 0.5, 1.0]), data=st.data())
@pytest.mark.parametrize("relevance", [None, "f_classif", "f_regression"])
def test_f_is_the_criterion_and_its_optimum_has_no_constant_column(table: Any, relevance: Any, alpha: Any, data: Any):
    X, y = table
    n = X.shape[1]
    k = data.draw(st.integers(1, n))
    W = from_relevance_redundancy(X, y, k, relevance=relevance, alpha=alpha)
    varying = np.flatnonzero((X[0] != X).any(axis=0)).tolist()
    measure = {"f_classif": oracle.correlation_ratio, "f_regression": oracle.correlation, None: lambda column, y: 0.0}
    relevances = [measure[relevance](X[:, i], y) for i in range(n)]
    weight = alpha if relevance else 0.0
    pairs = [[oracle.correlation(a, b) for a in X.T] for b in X.T]
    for S in itertools.combinations(varying, k):
        expected = oracle.relevance_redundancy(pairs, relevances, S, weight)
        assert oracle.objective(W, S) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    best = grace_opt.solve(W, k, "exhaustive")
    if weight < 1:
        assert set(best.indices.tolist()) <= set(varying) or set(varying) <= set(best.indices.tolist())


def test_columns_keep_their_last_digits_and_do_not_overflow() -> None:
    steps, signs = np.array([0.0, 1.0, 3.0, 2.0, 2.0, 1.0, 0.0]), np.array([1, -1, 1, 1, -1, -1, 1])
    units = unit_columns(np.column_stack([steps, 2.0**52 + steps, 5e-324 * steps, signs, 1.7e308 * signs]))
    assert (units[:, 0] == units[:, 1]).all()
    assert (units[:, 0] == units[:, 2]).all()
    assert units[:, 4] == pytest.approx(units[:, 3], rel=1e-15)
    assert not unit_columns(np.full((7, 2), [0.1, 1e308])).any()  # whose means are not exactly these


@pytest.mark.slow
@pytest.mark.parametrize(("relevance", "score"), [("f_classif", f_classif), ("f_regression", f_regression)])
def test_relevance_alone_chooses_as_SelectKBest(relevance: str, score: Any) -> None:
    chosen = SubsetSelector(5, relevance=relevance, alpha=1).fit(WINE.data, WINE.target)
    best = SelectKBest(score, k=5).fit(WINE.data, WINE.target)
    assert (chosen.get_support() == best.get_support()).all()
    assert chosen.solution_.status is Status.OPTIMAL


def test_relevance_is_a_function_of_F() -> None:
    X, y = WINE.data.to_numpy(), WINE.target.to_numpy()
    F, within = f_classif(X, y)[0] * 2, len(y) - 3
    assert -np.diagonal(from_relevance_redundancy(X, y, 1, alpha=1)) == pytest.approx(np.sqrt(F / (F + within)))
    apart = from_relevance_redundancy([[0.0], [0.0], [7.0]], ["a", "a", "b"], 1, alpha=1)
    assert apart == pytest.approx(np.array([[-1.0]]))  # where F is infinite


@pytest.mark.slow
def test_redundancy_is_what_numpy_and_scikit_learn_say() -> None:
    X, y = WINE.data.to_numpy()[:, :6], WINE.target.to_numpy()
    off = ~np.eye(6, dtype=bool)
    W = from_relevance_redundancy(X, None, 1, relevance=None)
    assert W[off] == pytest.approx(np.abs(np.corrcoef(X, rowvar=False))[off])
    assert (np.diagonal(W) == 0).all()
    units = unit_columns(X)
    both = from_relevance_redundancy(X, y, 2, relevance="mutual_info_classif", redundancy="mutual_info", alpha=0.25)
    pair = mutual_info_regression(units[:, [4, 5]], units[:, 3], random_state=0)
    assert both[3, 4:] == pytest.approx(0.75 / 4 * pair)
    assert (both == both.T).all()
    assert np.diagonal(both) == pytest.approx(-0.125 * mutual_info_classif(units, y, random_state=0))
    numbers = from_relevance_redundancy(X, X[:, 0], 1, relevance="mutual_info_regression", alpha=1)
    assert np.diagonal(numbers).argmin() == 0


@pytest.mark.parametrize("discrete", [True, [True] * 3, [0, 1, 2]])
def test_mutual_information_of_categories_is_that_of_their_table(discrete: Any) -> None:
    rng = np.random.default_rng(0)
    X = rng.integers(0, 3, (60, 3)) * 0.7
    X[:, 2] = X[:, 0]
    given = {"relevance": None, "redundancy": "mutual_info"}
    W = from_relevance_redundancy(X, None, 1, discrete_features=discrete, **given)
    shares = np.unique(X[:, 0], return_counts=True)[1] / 60
    assert W[0, 2] == pytest.approx(-(shares * np.log(shares)).sum())  # a copy tells all: the entropy
    assert W[0, 1] < 0.1
    mixed = from_relevance_redundancy(
        np.column_stack([X[:, 0], X[:, 0] + 0.01 * rng.normal(size=60)]), None, 1, discrete_features=[0], **given
    )
    assert mixed[0, 1] == pytest.approx(W[0, 2], abs=0.1)
    # Correlations are those of the numbers, also where mutual information sees categories.
    y, F = [0, 1] * 30, {"relevance": "f_classif", "alpha": 1}
    plain = from_relevance_redundancy(X, y, 1, **F)
    assert (
        plain == from_relevance_redundancy(X, y, 1, redundancy="mutual_info", discrete_features=discrete, **F)
    ).all()


@pytest.mark.slow
def test_a_choice_is_the_best_of_all() -> None:
    X, y = WINE.data.to_numpy()[::6], WINE.target.to_numpy()[::6]
    relevance = [oracle.correlation_ratio(column, y) for column in X.T]
    pairs = np.abs(np.corrcoef(X, rowvar=False))
    value = {S: oracle.relevance_redundancy(pairs, relevance, S, 0.5) for S in itertools.combinations(range(13), 4)}
    proved = SubsetSelector(4, method="branch_and_bound").fit(X, y)
    assert float(proved.solution_.objective) == pytest.approx(min(value.values()))
    assert tuple(proved.get_support(indices=True)) == min(value, key=value.__getitem__)
    assert proved.solution_.status is Status.OPTIMAL
    default = SubsetSelector(4).fit(X, y).solution_
    assert default.lower_bound <= proved.solution_.objective <= default.objective


@pytest.mark.slow
def test_in_a_pipeline_and_a_grid_search() -> None:
    model = make_pipeline(StandardScaler(), SubsetSelector(), LogisticRegression())
    grid = {"subsetselector__n_features_to_select": [1, 4], "subsetselector__alpha": [0.5, 1.0]}
    with parallel_config("threading"):
        search = GridSearchCV(model, grid, cv=2, n_jobs=2).fit(WINE.data, WINE.target)
    assert search.best_params_["subsetselector__n_features_to_select"] == 4
    assert search.best_score_ > 0.9
    assert search.best_estimator_[1].n_features_in_ == 13
    again = clone(search.best_estimator_).fit(WINE.data, WINE.target)
    assert (again[1].support_ == search.best_estimator_[1].support_).all()


@pytest.mark.slow
def test_columns_keep_their_names_and_types() -> None:
    frame = WINE.data.assign(magnesium=WINE.data.magnesium.astype("int32"), ash=WINE.data.ash.astype("float32"))
    chosen = SubsetSelector(13).set_output(transform="pandas").fit_transform(frame, WINE.target)
    pd.testing.assert_frame_equal(chosen, frame)
    fitted = SubsetSelector(3).fit(frame, WINE.target.map({0: "red", 1: "white", 2: "rosé"}))
    names = frame.columns[fitted.get_support()].tolist()
    assert fitted.get_feature_names_out().tolist() == names
    assert fitted.feature_names_in_.tolist() == frame.columns.tolist()
    back = fitted.inverse_transform(fitted.transform(frame))
    assert (back[:, fitted.support_] == frame[names].to_numpy()).all()
    assert (back[:, ~fitted.support_] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda X: X.set_axis(range(13), axis=1),
        lambda X: X.astype(object),
        lambda X: X.astype("Float64"),
        lambda X: X.to_numpy().tolist(),
        lambda X: np.asfortranarray(X),
        lambda X: X * 1e290,
        lambda X: X * -1e-300,
        lambda X: X + 1e5,
    ],
)
def test_the_same_numbers_give_the_same_choice(change: Any) -> None:
    chosen = SubsetSelector(4).fit(WINE.data, WINE.target)
    assert (SubsetSelector(4).fit(change(WINE.data), WINE.target.to_numpy()).support_ == chosen.support_).all()


@pytest.mark.slow
def test_tables_of_any_shape() -> None:
    rng = np.random.default_rng(0)
    assert SubsetSelector().fit(rng.normal(size=(9, 1)), [0, 1, 1] * 3).support_.tolist() == [True]
    wide = rng.normal(size=(4, 60))
    assert SubsetSelector(0.1).fit(wide, [0, 0, 1, 1]).support_.sum() == 6
    assert SubsetSelector(1e-9).fit(wide, [0, 0, 1, 1]).support_.sum() == 1
    assert SubsetSelector(np.int64(2)).fit(rng.random((20, 5)) > 0.5, [True, False] * 10).transform(
        wide[:, :5]
    ).shape == (4, 2)
    constant = SubsetSelector(2).fit(np.ones((4, 3)), [0, 0, 1, 1])
    assert constant.support_.sum() == 2
    copies = np.column_stack([wide[:, 0]] * 3 + [wide[:, 1], np.full(4, 7.0)])
    kept = SubsetSelector(2, relevance=None).fit(copies).support_
    assert (kept[3], kept[4], kept[:3].sum()) == (True, False, 1)


def test_inside_a_column_transformer() -> None:
    frame = WINE.data.assign(kind=["a", "b"] * 89)
    columns = make_column_transformer(
        (SubsetSelector(3), WINE.data.columns.tolist()), (OneHotEncoder(sparse_output=False), ["kind"])
    ).set_output(transform="pandas")
    made = columns.fit_transform(frame, WINE.target)
    assert made.shape == (178, 5)
    assert made.columns[-1] == "onehotencoder__kind_b"


@pytest.mark.slow
def test_equal_seeds_give_equal_answers() -> None:
    given = {"relevance": "mutual_info_classif", "redundancy": "mutual_info", "method": TabuOptions(iterations=50)}
    X, y = load_iris(return_X_y=True)
    for state in (3, np.random.RandomState(3)):
        selectors = [SubsetSelector(2, random_state=state, **given) for _ in range(2)]
        if isinstance(state, int):
            first, second = (each.fit(X, y).solution_ for each in selectors)
            assert first.seed == second.seed == 3
            assert (first.problem.W == second.problem.W).all()
            assert (first.mask == second.mask).all()
        else:  # drawn from, so the second differs
            assert selectors[0].fit(X, y).solution_.seed != selectors[1].fit(X, y).solution_.seed
    seeds = {SubsetSelector(2, random_state=None, method="mies").fit(X, y).solution_.seed for _ in range(5)}
    assert len(seeds) > 1


X = np.array([[0.0, 1.0, 5.0], [1.0, 0.0, 5.0], [2.0, 5.0, 5.0], [3.0, 1.0, 5.0], [1.0, 1.0, 5.0]])
Y = [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("changed", "y", "error", "says"),
    [
        (
            {"n_features_to_select": 4},
            Y,
            OptionError,
            "=4, and X has 3 columns: give at most 3, or a share such as 0.5",
        ),
        ({"n_features_to_select": 0}, Y, OptionError, "n_features_to_select=0: give an integer >= 1; or a share"),
        ({"n_features_to_select": True}, Y, OptionError, "n_features_to_select=True: give an integer >= 1"),
        ({"n_features_to_select": "all"}, Y, OptionError, "n_features_to_select='all': give an integer >= 1"),
        ({"n_features_to_select": None}, Y, OptionError, "n_features_to_select=None: give an integer >= 1"),
        ({"n_features_to_select": 1.5}, Y, OptionError, "=1.5: give a number > 0 and <= 1; a share of the columns"),
        ({"n_features_to_select": float("nan")}, Y, OptionError, "=nan: give a number > 0 and <= 1"),
        ({"relevance": "f"}, Y, OptionError, "relevance='f': give 'f_classif', .* or 'mutual_info_regression'"),
        ({"relevance": f_classif}, Y, OptionError, "relevance=<function f_classif.*>: give 'f_classif'"),
        ({"redundancy": "mi"}, Y, OptionError, "redundancy='mi': give 'correlation' or 'mutual_info'"),
        ({"alpha": 1.1}, Y, OptionError, "alpha=1.1: give a number >= 0 and <= 1"),
        ({"alpha": None}, Y, OptionError, "alpha=None: give a number"),
        ({"random_state": -1}, Y, OptionError, "random_state=-1: give an integer >= 0"),
        ({"random_state": "no"}, Y, ValueError, "cannot be used to seed"),
        ({"method": "greedy"}, Y, LookupError, "greedy"),
        ({"time_limit": 0}, Y, OptionError, "time_limit=0: give a number > 0"),
        ({}, None, ValueError, "requires y to be passed, but the target y is None"),
        ({}, [0, 0, 0, 0, 0], ProblemError, "y has one class, 0: .* relevance=None"),
        ({}, ["a"] * 5, ProblemError, "y has one class, 'a'"),
        ({}, [0, 1, 2, 3, 4], ProblemError, "a class of its own for each of the 5 rows: .*'f_regression'"),
        ({}, [0.5, 1, 1, 2, 2], OptionError, "needs classes, and y holds numbers with fractions: .*'f_regression'"),
        (
            {"relevance": "mutual_info_classif"},
            [0.5, 1, 1, 2, 2],
            OptionError,
            "write relevance='mutual_info_regression'",
        ),
        ({}, np.array(["a", 1, 1, "a", "a"], dtype=object), ProblemError, r"y mixes labels .*: write y\.astype\(str\)"),
        ({}, [0, 1], ValueError, "inconsistent numbers of samples"),
        ({}, [[0, 1]] * 5, ValueError, "y should be a 1d array"),
        ({}, [0, 1, np.nan, 1, 0], ValueError, "Input y contains NaN"),
        ({"relevance": "f_regression"}, [2.5] * 5, ProblemError, r"y is 2\.5 in every row: .* relevance=None"),
        ({"relevance": "f_regression"}, list("abcde"), ValueError, "could not convert string to float"),
        (
            {"relevance": "mutual_info_classif", "discrete_features": "auto"},
            Y,
            OptionError,
            "discrete_features='auto': give",
        ),
        (
            {"relevance": "mutual_info_classif", "discrete_features": None},
            Y,
            OptionError,
            "discrete_features=None: give",
        ),
        (
            {"relevance": "mutual_info_classif", "discrete_features": [3]},
            Y,
            OptionError,
            "numbers of columns, from 0 to 2",
        ),
        (
            {"relevance": "mutual_info_classif", "discrete_features": [True]},
            Y,
            OptionError,
            r"a bool mask of shape \(3,\)",
        ),
    ],
)
def test_what_is_wrong_is_said(changed: Any, y: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        SubsetSelector(**{"n_features_to_select": 2, **changed}).fit(X, y)
    assert isinstance(caught.value, GraceError) or error is ValueError


@pytest.mark.parametrize(
    ("table", "error", "says"),
    [
        (np.where(X == 2, np.nan, X), ValueError, "Input X contains NaN"),
        (np.where(X == 2, np.inf, X), ValueError, "Input X contains infinity"),
        (scipy.sparse.csr_array(X), TypeError, "dense data is required"),
        (X[0], ValueError, "Expected 2D array, got 1D array"),
        (X[:1], ValueError, r"Found array with 1 sample\(s\)"),
        (X[:, :0], ValueError, r"Found array with 0 feature\(s\)"),
        (X.astype(str).astype(object) + "cm", ValueError, "could not convert string to float: '0.0cm'"),
        (X * 1j, ValueError, "Complex data not supported"),
    ],
)
def test_what_is_no_table_of_numbers_is_said(table: Any, error: Any, says: str) -> None:
    for relevance, y in (("f_classif", Y[: len(table.shape) and table.shape[0]]), (None, None)):
        with pytest.raises(error, match=says):
            SubsetSelector(1, relevance=relevance).fit(table, y)


def test_mutual_information_needs_rows_and_categories_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"relevance": None, "redundancy": "mutual_info"}
    with pytest.raises(ProblemError, match=r"X has 3 rows: .* at least 4"):
        from_relevance_redundancy(X[:3], None, 1, **given)
    with pytest.raises(ProblemError, match=r"column 1 of X .* a value of its own for each of the 5 rows: leave it out"):
        from_relevance_redundancy(np.column_stack([X[:, 0], range(5)]), None, 1, discrete_features=True, **given)
    with pytest.raises(OptionError, match="k=4: give an integer >= 1 and <= 3"):
        from_relevance_redundancy(X, None, 4, relevance=None)
    monkeypatch.setattr("grace_opt.sklearn.inputs.free_memory", lambda: 100.0)
    with pytest.raises(ProblemError, match=r"X has 3 columns, whose pairs take .* GiB, .* SelectKBest"):
        from_relevance_redundancy(X, None, 2, relevance=None)


def test_ctrl_c_ends_a_search_over_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        return replace(grace_opt.solve(*args, **options), status=Status.INTERRUPTED)

    monkeypatch.setattr(selector, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        GridSearchCV(SubsetSelector(), {"alpha": [0.5]}, scoring=lambda *_: 0.0).fit(WINE.data, WINE.target)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("grace_opt.sklearn")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingLibraryError, match=r'grace_opt\.sklearn needs sklearn.*pip install "\.\[sklearn\]"'):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
