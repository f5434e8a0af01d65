"""Each kind of bad input gets its own error, of the right class, that says what was wrong and what to write instead."""

import json
import pickle
from fractions import Fraction
from pathlib import Path

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import grace_opt
from grace_opt import ChannelMask, GraceError, MaskProvider, Problem, allocate, instances, solve
from grace_opt.attention import interaction_matrix, prune_count, salient_channels
from grace_opt.errors import (
    ComparisonError,
    InfeasibleBudgetError,
    MaskError,
    OptionError,
    ProblemError,
    UnknownSolverError,
)

EYE = np.eye(4)
NAN, INF = EYE.copy(), EYE.copy()
NAN[1, 2], INF[0, 0] = np.nan, -np.inf
SKEW = EYE.copy()
SKEW[0, 1] = 0.5
DIRECTED = nx.DiGraph([(0, 1)])


def graph_with_node_weight(weight):
    """One node a, one edge to b."""
    graph = nx.Graph([("a", "b")])
    graph.nodes["a"]["weight"] = weight
    return graph


FRAME = pd.DataFrame([[1.0, 2.0, 0.5], [2.0, 3.0, 0.5], [0.5, 0.5, 4.0]], index=list("abc"), columns=list("abc"))
MISSING = FRAME.mask(FRAME == 2)


def renamed(*labels):
    return FRAME.set_axis(list(labels), axis=0).set_axis(list(labels), axis=1)


FRAMES = {
    "nan": (MISSING, r"W\[0, 1\] \(row 'a', column 'b'\) is nan: every weight must be finite"),
    "nullable": (MISSING.astype("Float64"), r"W\.loc\['a', 'b'\] is <NA>.*W\.fillna\(value\)"),
    "nullable bools": ((FRAME > 1).astype("boolean"), r"W\.loc\['a', 'a'\] is False, a bool: .*W\.astype\(float\)"),
    "None": (FRAME.astype(object).where(FRAME != 2, None), r"W\.loc\['a', 'b'\] is None.*fillna"),
    "text": (FRAME.astype(str), r"W\.loc\['a', 'a'\] is '1\.0', a str: .*W\.astype\(float\)"),
    "one object column": (FRAME.astype({"b": object}), r"column 'b' of W has dtype object: write W\.astype\(float\)"),
    "asymmetric": (FRAME.where(FRAME != 2, np.triu(FRAME)), r"= 2 \('a' and 'b'\), .*symmetrize\(W\); .*--symmetrize"),
    "nan label": (renamed("a", np.nan, "c"), "column 1 is called nan: give every vertex a label"),
    "None label": (renamed(*pd.Index(["a", None, 3], dtype=object)), "column 1 is called None: give every vertex"),
    "pandas.NA label": (renamed("a", 1, pd.NA), "column 2 is called <NA>"),
    "a list for a label": (renamed("a", ["b"], "c"), r"column 1 is called \['b'\], a list"),
    "label twice": (renamed("a", "b", "a"), "column 0 and column 2 are both called 'a'"),
    "row label twice": (FRAME.set_axis(list("aba"), axis=0), "row 0 and row 2 are both called 'a'"),
    "a list in another order": (
        [FRAME, FRAME.loc[list("acb"), list("acb")]],
        r"vertex 1 is called 'b' in W\[0\] and 'c' in W\[1\]: .*Write W\[1\]\.loc\[W\[0\]\.columns, W\[0\]\.columns\]",
    ),
    "a list with other labels": (
        (FRAME, FRAME, renamed("a", "b", "d")),
        r"'c' in W\[0\] and 'd' in W\[2\]: .*one by one",
    ),
    "a list of two sizes": ([FRAME, FRAME.iloc[:2, :2]], r"W\[0\] has 3 vertices and W\[1\] has 2"),
    "a list with an array": ([FRAME, FRAME.to_numpy()], r"W\[1\], a ndarray, has none: give all with labels"),
    "nan in a list": ([FRAME, MISSING], r"W\[1, 0, 1\] \(row 'a', column 'b'\) is nan"),
    "a list of wrong frames": ([FRAME, FRAME.iloc[:2]], r"W\[1\] is a DataFrame of shape \(2, 3\)"),
}

PROBLEMS = {
    "not square": (np.ones((3, 4)), 1, {}, r"\(3, 4\).*square"),
    "a vector": (np.ones(4), 1, {}, r"\(4,\): give a square matrix.*pdist returns, 3 \(n = 3\) or 6 \(n = 4\)"),
    "an empty vector": (np.ones(0), 1, {}, r"1 \(n = 2\) of them"),
    "ragged": ([[1.0, 2.0], [3.0]], 1, {}, "ragged"),
    "empty": (np.ones((0, 0)), 0, {}, "empty"),
    "empty batch": (np.ones((0, 3, 3)), 1, {}, "empty"),
    "not symmetric": (SKEW, 1, {}, r"\[0, 1\].*= 0\.5.*symmetrize"),
    "nan": (NAN, 1, {}, r"W\[1, 2\] is nan"),
    "inf": (INF, 1, {}, r"W\[0, 0\] is -inf.*protected"),
    "bool W": (np.eye(3, dtype=bool), 1, {}, "bool"),
    "complex W": (EYE.astype(complex), 1, {}, "complex"),
    "object W": (EYE.astype(object), 1, {}, "object"),
    "strings": ([["a", "b"], ["c", "d"]], 1, {}, "dtype"),
    "integer overflow": (np.full((2, 2), 2**60), 1, {}, r"2\*\*53"),
    "least integer": (np.diag([-(2**63), 0]), 1, {}, r"2\*\*53"),
    "no data": (torch.empty(3, 3, device="meta"), 1, {}, "meta device"),
    "unsigned overflow": (np.full((2, 2), 2**64 - 1, dtype=np.uint64), 1, {}, r"2\*\*53"),
    "torch bool": (torch.eye(3, dtype=torch.bool), 1, {}, "bool"),
    "float64 overflow": (np.full((2, 2), 1e308), 1, {}, "Divide"),
    "k negative": (EYE, -1, {}, "k = -1"),
    "k too large": (EYE, 5, {}, "n = 4"),
    "k float": (EYE, 2.0, {}, "float"),
    "k bool": (EYE, True, {}, "bool"),
    "k string": (EYE, "2", {}, "str"),
    "k not broadcastable": (np.stack([EYE] * 3), [1, 2], {}, r"\(2,\).*\(3,\)"),
    "k array out of range": (np.stack([EYE] * 2), [1, 9], {}, "1 to 9"),
    "k float array": (np.stack([EYE] * 2), [1.0, 2.0], {}, "float64"),
    "too many protected": (EYE, 3, {"protected": [0, 1]}, "only 2 of 4"),
    "too many protected in one instance": (
        np.stack([EYE] * 2),
        2,
        {"protected": np.array([[0, 0, 0, 0], [1, 1, 1, 0]], bool)},
        r"instance \[1\].*only 1",
    ),
    "protected out of range": (EYE, 1, {"protected": [4]}, "vertex 4"),
    "protected negative": (EYE, 1, {"protected": [-1]}, "vertex -1"),
    "protected wrong shape": (EYE, 1, {"protected": np.zeros(5, bool)}, r"\(5,\)"),
    "protected batch shape": (np.stack([EYE] * 2), 1, {"protected": np.zeros((3, 4), bool)}, r"\(3, 4\)"),
    "protected float": (EYE, 1, {"protected": [0.5]}, "float"),
    "protected 0/1": (EYE, 1, {"protected": [0, 1, 1, 0]}, "0/1 mask"),
    "protected ragged": (EYE, 1, {"protected": [[0], [1, 2]]}, "ragged"),
    "a path": ("W.npy", 1, {}, r"instances\.read"),
    "a Path": (Path("W.npy"), 1, {}, r"instances\.read\('W\.npy'\)\.W"),
    "nothing": (None, 1, {}, "NoneType"),
    "protected 2-d indices": (EYE, 1, {"protected": [[0], [1]]}, "flat list"),
    "numpy and torch mixed": (torch.eye(3), 1, {"protected": np.zeros(3, bool)}, "mixed"),
    "directed graph": (DIRECTED, 1, {}, "to_undirected"),
    "graph weight": (nx.Graph([(0, 1, {"weight": "heavy"})]), 1, {}, "heavy"),
    "graph node unknown": (nx.path_graph(3), 1, {"protected": ["z"]}, "'z'"),
    "graph edge nan": (
        nx.Graph([("a", "b", {"weight": np.nan})]),
        1,
        {},
        r"edge \('a', 'b'\) is nan: every weight must be",
    ),
    "graph edge inf": (
        nx.Graph([("a", "b", {"weight": np.inf})]),
        1,
        {},
        r"edge \('a', 'b'\) is inf: every weight must be",
    ),
    "graph node nan": (graph_with_node_weight(np.nan), 1, {}, "node 'a' is nan: every weight must be finite"),
    "graph node beyond float64": (graph_with_node_weight(Fraction(10**400)), 1, {}, "node 'a' is .*must be finite"),
    "bools of a list": ([[True, False], [False, True]], 1, {}, r"np\.asarray\(W, dtype=float\)"),
    "imaginary": (EYE.astype(complex), 1, {}, r"W\.real where"),
    "a generator": ((row for row in EYE), 1, {}, "W is a generator: give an array"),
    "bools among numbers": ([[True, 0.5], [0.5, 1.0]], 1, {}, "give only numbers"),
    "condensed rows": (
        np.ones((2, 6)),
        1,
        {},
        r"\(2, 6\).*6 distances of scipy's pdist for n = 4, .*squareform\(row\)",
    ),
    "protected one bool": (np.eye(3), 1, {"protected": [True]}, r"one entry per vertex, shape \(3,\)\.$"),
}

#: What is given as k, protected= and start= is refused in words that fit it, not in those that fit W.
VERTICES = r"give a list of vertices by number, from 0 to 3, or a bool mask of shape \(4,\)"
ARGUMENTS = {
    "protected names": ({"protected": ["a"]}, rf"protected has dtype <U1: {VERTICES}\.$"),
    "protected text": ({"protected": "0"}, rf"protected is a str: {VERTICES}\.$"),
    "protected iterator": ({"protected": iter([0])}, rf"protected is a list_iterator: {VERTICES}\.$"),
    "protected dict": ({"protected": {0: 1}}, rf"protected is a dict: {VERTICES}\.$"),
    "protected fraction": ({"protected": [0.5]}, rf"protected has dtype float64: {VERTICES}\.$"),
    "protected complex": ({"protected": np.array([1j])}, rf"dtype complex128: {VERTICES}\.$"),
    "protected ragged": ({"protected": [[0], [1, 2]]}, rf"ragged sequence: {VERTICES}"),
    "protected mixed": ({"protected": [True, 2]}, rf"mixes bools and numbers: {VERTICES}\.$"),
    "protected masked": ({"protected": np.ma.masked_equal([0, 1], 1)}, rf"would be lost: {VERTICES}\.$"),
    "protected beyond int64": ({"protected": np.array([2**63], dtype=np.uint64)}, rf"{2**63}: {VERTICES}\.$"),
    "protected in a huge int": ({"protected": [2**70]}, rf"the integer {2**70}: {VERTICES}\.$"),
    "k of objects": ({"k": np.array(2, dtype=object)}, r"k has dtype object: give an int, .*e\.g\. k=2\.$"),
    "k of bools and numbers": ({"k": [True, 2]}, r"k mixes bools and numbers: give an int, .*e\.g\. k=2\.$"),
    "k of a whole float": ({"k": 3.0}, r"k = 3\.0 \(float\): give an int, .*e\.g\. k=3\.$"),
    "k names": ({"k": ["2"]}, r"k has dtype <U1: give an int, .*e\.g\. k=2\.$"),
    "start names": (
        {"method": "tabu", "start": ["a"]},
        r"start has dtype <U1: give a method's name, .* from 0 to 3, .*mask",
    ),
    "start fractions": (
        {"method": "tabu", "start": [0.5]},
        r"start has dtype float64: give a method's name, .* from 0",
    ),
    "start iterator": ({"method": "tabu", "start": iter([0])}, "start is a list_iterator: give a method's name"),
}


@pytest.mark.parametrize("case", ARGUMENTS, ids=str)
def test_what_to_write_fits_the_argument(case):
    arguments, message = ARGUMENTS[case]
    with pytest.raises((ProblemError, OptionError), match=message):
        solve(EYE, **{"k": 2, **arguments})


def test_a_graph_takes_a_start_by_number_or_name():
    graph = nx.path_graph(["a", "b", "c", "d"])
    for names in (["a", "b"], np.array(["a", "b"])):
        assert solve(graph, 2, "local_search", start=names, max_steps=0).labels == ["a", "b"]
    with pytest.raises(OptionError, match=r"start has dtype float64.*numbers count the nodes or labels"):
        solve(graph, 2, "local_search", start=[0.5])
    with pytest.raises(ProblemError, match=r"protected has dtype complex128: give a list of nodes"):
        solve(graph, 2, protected=np.array([1j]))
    first = solve(graph, 2, "mies")
    assert solve(graph, 2, "local_search", start=first.indices).objective <= first.objective


def test_queries_are_no_file_and_an_attention_mask_no_numbers():
    x = np.ones((1, 3, 2))
    with pytest.raises(ProblemError, match=r"queries is a str: give an array of numbers\.$"):
        interaction_matrix("q.npy", x)
    with pytest.raises(ProblemError, match=r"attention_mask has dtype <U1: give a mask of shape .*True"):
        interaction_matrix(x, x, attention_mask=["a", "b", "c"])


@pytest.mark.parametrize("case", PROBLEMS, ids=str)
def test_problem_errors(case):
    W, k, extra, message = PROBLEMS[case]
    with pytest.raises(ProblemError, match=message) as caught:
        solve(W, k, **extra)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("case", FRAMES)
def test_frames_are_refused_by_label_and_place(case, tmp_path):
    W, message = FRAMES[case]
    with pytest.raises(ProblemError, match=message):
        solve(W, 1)
    if case not in ("asymmetric", "a list in another order"):
        with pytest.raises(ProblemError):
            instances.write(tmp_path / "w.npz", W)


def test_frames_with_nullable_columns_and_lists_of_frames():
    assert solve(FRAME.convert_dtypes(), 1).labels == ["a"]
    whole = Problem.of((2 * FRAME).astype("Int64"), 1)
    assert whole.integer
    assert whole.W.tolist() == (2 * FRAME).to_numpy().tolist()
    with pytest.raises(ProblemError, match=r"2\*\*53"):  # rounded beside a column of fractions
        solve((FRAME * 2**54).astype({"a": "Int64", "b": "Float64", "c": "Int64"}), 1)
    batch = solve([FRAME, 9 - 3 * FRAME, FRAME], 1, protected=["a"])
    assert batch.labels == [["b"], ["c"], ["b"]]
    graphs = [nx.Graph([("x", "y", {"weight": w})]) for w in (1, -1)]
    assert solve(graphs, 1, required=["y"]).labels == [["y"], ["y"]]
    with pytest.raises(ProblemError, match="labels: vertex 1 is called nan"):
        Problem.of(EYE, 1, labels=["a", float("nan"), "c", "d"])
    with pytest.raises(ProblemError, match="labels: vertex 0 and vertex 1 are both called 'a'"):
        Problem.of(EYE, 1, labels=["a", "a", "c", "d"])


UNKNOWN = {
    "solve": (lambda: solve(EYE, 1, maximise=True), "no option 'maximise'.*Did you mean 'maximize'"),
    "required": (lambda: solve(EYE, 1, require=[0]), "Did you mean 'required'"),
    "protected": (lambda: solve(EYE, 1, protect=[0]), "Did you mean 'protected'"),
    "compare": (lambda: grace_opt.compare(EYE, 1, maximise=True), "compare has no argument 'maximise'.*'maximize'"),
    "Problem": (lambda: Problem.of(EYE, 1, protect=5), "Problem.of has no argument 'protect'.*'protected'"),
    "of solve": (lambda: Problem.of(EYE, 1, required="a"), r"solve\(Problem.of\(W, k\), required="),
    "allocate": (
        lambda: allocate(EYE, [0] * 4, budgets=1),
        "allocate has no argument 'budgets'.*Did you mean 'budget'",
    ),
    "allocate, once": (
        lambda: allocate(EYE, [0] * 4, 1, interaction=EYE),
        "allocate has no argument 'interaction'.*W's diagonal as the losses of level 0",
    ),
    "no method": (lambda: grace_opt.compare(EYE, 3, []), r"methods=\[\] names no method.*leave methods= out"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_arguments_say_what_may_be_meant(case):
    call, message = UNKNOWN[case]
    with pytest.raises(OptionError, match=message):
        call()


def test_devices_differ():
    with pytest.raises(ProblemError, match=r"several devices \(cpu, meta\)"):
        solve(torch.eye(3), 1, protected=torch.zeros(3, dtype=torch.bool, device="meta"))


OPTIONS = {
    "unknown option": ({"method": "local_search", "strat": "mies"}, "accepts start, max_steps.*'start'"),
    "takes no options": ({"method": "think", "x": 1}, "takes no options"),
    "max_steps": ({"method": "local_search", "max_steps": -1}, "max_steps=-1"),
    "max_steps text": ({"method": "local_search", "max_steps": "abc"}, "max_steps='abc'"),
    "max_steps fraction": ({"method": "local_search", "max_steps": 1.5}, r"max_steps=1\.5"),
    "start itself": ({"method": "local_search", "start": "local_search"}, "itself"),
    "start vertex": ({"method": "local_search", "start": [99]}, "vertex 99"),
    "max_subsets": ({"method": "exhaustive", "max_subsets": 0}, "max_subsets=0"),
    "seed": ({"seed": -1}, "seed=-1"),
    "seed float": ({"seed": 1.5}, r"seed=1\.5"),
    "time limit": ({"time_limit": 0}, "time_limit=0"),
    "time limit nan": ({"time_limit": float("nan")}, "time_limit=nan"),
    "certify": ({"certify": "loose"}, "'fast'"),
    "certify array": ({"certify": np.array([True, False])}, "'fast'"),
}


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_option_errors(case):
    options, message = OPTIONS[case]
    with pytest.raises(OptionError, match=message) as caught:
        solve(EYE, 2, **options)
    assert isinstance(caught.value, TypeError)


def test_k_is_missing():
    with pytest.raises(OptionError, match="k is missing"):
        solve(EYE)


def test_a_start_of_the_wrong_shape():
    """Indices were called a mask."""
    for start, shape in ((np.zeros((3, 2), int), r"\(3, 2\)"), (np.ones(5, bool), r"\(5,\)"), (True, r"\(\)")):
        with pytest.raises(OptionError, match=rf"start has shape {shape}: give a method's name, .*each of 2 instances"):
            solve(np.stack([EYE] * 2), 2, "local_search", start=start)


def test_a_start_of_the_wrong_size():
    with pytest.raises(OptionError, match=r"start= chose \[1\] vertices where k = \[2\]"):
        solve(EYE, 2, "local_search", start=[1])
    with pytest.raises(OptionError, match="start names vertex 1 twice"):
        solve(EYE, 2, "local_search", start=[1, 1])
    with pytest.raises(OptionError, match=r"start= chose protected vertices: \[0\]"):
        solve(EYE, 1, "tabu", start=[0], protected=[0])


@pytest.mark.parametrize("count", [2**62, 2**64, 10**30])
def test_counts_beyond_64_bits_are_forever(count):
    W = np.cos(np.arange(400.0).reshape(20, 20))
    for name in ("tenure", "restart_after"):
        found, same = (solve(W + W.T, 8, "tabu", iterations=500, **{name: number}) for number in (count, 2**40))
        assert (found.mask == same.mask).all()
        assert found.objective == same.objective


def test_unknown_method_suggests_the_nearest():
    with pytest.raises(UnknownSolverError, match="Did you mean 'mies'"):
        solve(EYE, 1, method="meis")


def test_missing_extra_is_named():
    grace_opt.register_solver("needs_it", requires=("no_such_module:peers",))(lambda p, o, r: None)
    try:
        with pytest.raises(UnknownSolverError, match=r'pip install "\.\[peers\]"'):
            solve(EYE, 1, method="needs_it")
    finally:
        grace_opt.registry.unregister("needs_it")


def test_compare_names_a_stray_option():
    for stray in ({"exhaustiv": {}}, {"exhaustiv": {}, 5: {}}):
        with pytest.raises(OptionError, match="'exhaustiv'"):
            grace_opt.compare(EYE, 1, ["mies"], options=stray)


@pytest.mark.parametrize("options", [["mies"], {"mies": None}, {"mies": 5}, "mies", []])
def test_compare_needs_options_by_method(options):
    with pytest.raises(OptionError, match="give a dict of dicts"):
        grace_opt.compare(EYE, 1, ["mies"], options=options)


def test_compare_needs_a_list_of_methods():
    with pytest.raises(OptionError, match="methods=5: give a list of methods"):
        grace_opt.compare(EYE, 1, 5)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan"), "0.5", True, None])
def test_ratio(ratio):
    with pytest.raises(OptionError, match="ratio="):
        prune_count(ratio, 64)
    with pytest.raises(OptionError, match="ratio="):
        MaskProvider(ratio=ratio)


Q, K = torch.randn(4, 8, 16), torch.randn(2, 20, 16)
SHAPES = {
    "L_obs > L": (torch.randn(4, 21, 16), K, None, "L_obs = 21"),
    "heads": (torch.randn(3, 8, 16), K, None, "3 query heads"),
    "head_dim": (torch.randn(4, 8, 15), K, None, "head_dim"),
    "batch": (torch.randn(5, 4, 8, 16), K, None, "leading"),
    "empty": (torch.randn(4, 0, 16), K, None, "empty"),
    "mask": (Q, K, torch.ones(19), "attention_mask"),
    "2-d": (Q[0], K, None, "queries has shape"),
}


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_attention_shapes(case):
    q, k, mask, message = SHAPES[case]
    with pytest.raises(ProblemError, match=message):
        interaction_matrix(q, k, mask)


@pytest.mark.parametrize("bounds", [(0.2, 0.1), (-0.1, 0.1), (0.0, 1.1), (0.1,), "ab", 3])
def test_protection_bounds(bounds):
    with pytest.raises(OptionError, match=r"protect"):
        MaskProvider(protect=bounds)


def test_protection_that_leaves_too_few():
    with pytest.raises(ProblemError, match=r"lower ratio to at most 0\.843,"):
        MaskProvider("grace", ratio=0.9)(torch.randn(4, 8, 64), torch.randn(2, 20, 64))
    with pytest.raises(OptionError, match=r"low=0\.5"):
        salient_channels(K, 0.5, 0.1)


def test_provider_weight_and_options():
    with pytest.raises(OptionError, match="'frobenius'"):
        MaskProvider(weight="l1")
    with pytest.raises(OptionError, match="no option 'start'; it accepts path"):
        MaskProvider("grace", start="think")
    with pytest.raises(UnknownSolverError):
        MaskProvider("gracce")


def test_mask_files(tmp_path):
    good = tmp_path / "good.safetensors"
    ChannelMask(torch.eye(4, dtype=torch.bool)).save(good)
    content = good.read_bytes()
    (tmp_path / "cut").write_bytes(content[:-3])
    (tmp_path / "head").write_bytes(content[:9])
    (tmp_path / "noise").write_bytes(b"\x00\xff" * 200)
    (tmp_path / "none").write_bytes(b"")
    save_file({"weight": torch.ones(3)}, tmp_path / "foreign")
    save_file({"pruned": torch.ones(3, 3)}, tmp_path / "later", {"format": "grace_opt.channel_mask", "version": "9"})
    mask_file = grace_opt.attention.masks.FILE_FORMAT
    mask_file.write(tmp_path / "json", {"pruned": torch.eye(3, dtype=torch.bool)}, {"fingerprint": [1]})
    mask_file.write(tmp_path / "floats", {"pruned": torch.eye(3)}, {"fingerprint": {}})
    mask_file.write(tmp_path / "flat", {"pruned": torch.ones(3, dtype=torch.bool)}, {"fingerprint": {}})
    mask_file.write(tmp_path / "hollow", {"pruned": torch.ones(0, 3, dtype=torch.bool)}, {"fingerprint": {}})
    mask_file.write(
        tmp_path / "more", {"pruned": torch.eye(3, dtype=torch.bool), "x": torch.ones(1)}, {"fingerprint": {}}
    )
    (tmp_path / "folder").mkdir()
    messages = {
        "cut": "cannot be read",
        "head": "cannot be read",
        "noise": "cannot be read",
        "none": "cannot be read",
        "foreign": "not a channel mask",
        "later": "version '9'",
        "json": "fingerprint of names",
        "floats": "bool tensor",
        "flat": "bool tensor",
        "hollow": "bool tensor",
        "more": "nothing else",
        "folder": "not a regular file",
        "missing": "no channel mask at",
    }
    for name, message in messages.items():
        with pytest.raises(MaskError, match=message):
            ChannelMask.load(tmp_path / name)
    with pytest.raises(MaskError, match="cannot be read"):
        ChannelMask.load(tmp_path)  # a folder


def test_a_mask_saved_nowhere(tmp_path):
    with pytest.raises(MaskError, match="no folder"):
        ChannelMask(torch.eye(4, dtype=torch.bool)).save(tmp_path / "none" / "m.safetensors")


def test_a_mask_for_another_model():
    mask = ChannelMask(torch.eye(4, dtype=torch.bool), {"model_type": "llama", "head_dim": 4})
    mask.require_fit({"model_type": "llama", "head_dim": 4, "num_hidden_layers": 3})
    with pytest.raises(MaskError, match="head_dim: mask 4, model 8"):
        mask.require_fit({"model_type": "llama", "head_dim": 8})
    assert json.dumps(dict(mask.fingerprint))


def test_channel_mask_shapes():
    for bad in (torch.eye(3), torch.ones(3, dtype=torch.bool), [[True]]):
        with pytest.raises(MaskError, match="bool tensor"):
            ChannelMask(bad)
    with pytest.raises(MaskError, match="stack"):
        ChannelMask.stack([ChannelMask(torch.eye(n, dtype=torch.bool)) for n in (3, 4)])
    with pytest.raises(MaskError, match="no layer dimension"):
        ChannelMask(torch.eye(3, dtype=torch.bool)).layer(0)


def kinds_of(error):
    return [error, *(kind for below in error.__subclasses__() for kind in kinds_of(below))]


@pytest.mark.parametrize("kind", kinds_of(GraceError), ids=lambda kind: kind.__name__)
def test_errors_come_back_from_a_pool_of_processes(kind):
    assert str(pickled(kind("what was wrong"))) == "what was wrong"


def test_what_errors_carry_comes_back_too():
    with pytest.raises(InfeasibleBudgetError) as error:
        allocate([[9.0, 4.0], [8.0, 5.0]], [1, 2], 1)
    assert (str(pickled(error.value)), pickled(error.value).smallest) == (str(error.value), 2.0)
    partial = grace_opt.compare([[1.0, 0.0], [0.0, 2.0]], 1, ["mies"])
    back = pickled(ComparisonError("one failed", partial))
    assert (str(back), back.partial["mies"].objective) == ("one failed", 1.0)


def pickled(error):
    return pickle.loads(pickle.dumps(error))  # noqa: S301 - what a pool of processes does


@pytest.mark.parametrize(
    ("old", "new"),
    [("Factored", "FactoredWeights"), ("Result", "SolverResult"), ("register", "register_solver")],
)
def test_names_that_moved_say_the_new_one(old, new):
    with pytest.raises(OptionError, match=rf"grace_opt\.{old} has another name now: write grace_opt\.{new}\.$"):
        exec(f"from grace_opt import {old}")
    assert hasattr(grace_opt, new)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        grace_opt.Nothing  # noqa: B018
