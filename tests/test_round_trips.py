"""W to files and to other libraries' models and back: every weight from 1e-300 to 1e300, of either sign, and offsets.

What is written or converted is read back as the same numbers, bit for bit; and what lists a weight twice is refused in
text files and added in memory, by one rule for all.
"""

import math

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from grace_opt import FactoredWeights, Problem, instances, solve
from grace_opt.errors import ProblemError
from grace_opt.instances import convert
from tests import oracle

WEIGHT = st.one_of(
    st.just(0.0),
    st.floats(1e-300, 1e300),
    st.floats(-1e300, -1e-300),
    st.builds(lambda digits, power: digits * 10.0**power, st.floats(-10, 10), st.integers(-290, 290)),
)


@st.composite
def wide(draw, max_n=5):
    """A symmetric matrix whose weights may be hundreds of powers of ten apart."""
    n = draw(st.integers(1, max_n))
    half = draw(st.lists(WEIGHT, min_size=n * (n + 1) // 2, max_size=n * (n + 1) // 2))
    W = np.zeros((n, n))
    W[np.triu_indices(n)] = half
    return np.triu(W) + np.triu(W, 1).T


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".csv", ".tsv", ".mtx", ".txt", ".csv.gz"])
@given(W=wide(), form=st.sampled_from(["array", "sparse", "named"]))
def test_files_keep_every_digit(tmp_path_factory, suffix, W, form):
    path = tmp_path_factory.mktemp("io") / f"w{suffix}"
    k = None
    if suffix == ".txt":  # MDPLIB has no diagonal
        W, k = W - np.diag(np.diag(W)), 1
    if form == "named" and suffix.startswith((".csv", ".tsv")):
        instances.write(path, W, labels=[f"v{i}" for i in range(len(W))])
    else:
        instances.write(path, sparse.coo_array(W) if form == "sparse" and suffix in (".npz", ".mtx") else W, k)
    again = instances.read(path).W
    assert np.array_equal(again.toarray() if sparse.issparse(again) else again, W)


@pytest.mark.slow
@given(W=wide())
def test_graphs_keep_every_digit(W):
    graph = convert.to_networkx(W)
    assert np.array_equal(Problem.of(graph, 0).W.numpy(), W)
    igraph = pytest.importorskip("igraph")
    other = convert.to_igraph(W)
    assert isinstance(other, igraph.Graph)
    assert other.vs["weight"] == np.diag(W).tolist()
    assert {edge.tuple: edge["weight"] for edge in other.es} == {
        (a, b): weight for a, b, weight in graph.edges(data="weight")
    }


@pytest.mark.slow
@given(W=wide(), data=st.data())
def test_dimod_keeps_every_digit_and_the_offset(W, data):
    dimod = pytest.importorskip("dimod")
    n = len(W)
    k = data.draw(st.integers(0, n))
    model = convert.to_dimod_cqm(W, k).objective
    assert model.offset == 0
    back = np.diag([model.get_linear(i) for i in range(n)])
    for i, j, weight in model.iter_quadratic():
        back[i, j] = back[j, i] = weight / 2
    assert np.array_equal(back, W)

    p = data.draw(st.floats(1e-3, 1e3)) * max(np.abs(W).max(), 1e-300)
    bqm = convert.to_dimod_bqm(W, k, p)
    assert bqm.offset == p * k**2
    kept = dimod.BinaryQuadraticModel.from_file(bqm.to_file())
    assert kept == bqm
    S = data.draw(st.permutations(range(n)))[:k]
    energy = float(kept.energy({i: int(i in S) for i in range(n)}))
    assert abs(energy - oracle.objective(W, S)) <= 1e-14 * (np.abs(W).sum() + p * (n + k) ** 2)


@pytest.mark.slow
@given(W=wide())
@settings(max_examples=25, deadline=None)
def test_cvxpy_keeps_every_digit(W):
    model = convert.to_cvxpy(W, 1)
    x, y = model.var_dict["x"], model.var_dict.get("y")
    i, j = np.nonzero(np.triu(W, 1))
    for at in range(len(W)):
        x.value = np.eye(len(W))[at]
        if y is not None:
            y.value = np.zeros(len(i))
        assert model.objective.value == W[at, at]
    x.value = np.zeros(len(W))
    for at in range(len(i)):
        y.value = np.eye(len(i))[at]
        assert model.objective.value == 2 * W[i[at], j[at]]


def large_and_sparse(seed=0, n=1200, edges=400):
    """W of so many vertices and so few edges that it stays sparse, as its edges are given: some of them twice."""
    rng = np.random.default_rng(seed)
    i, j = rng.integers(0, n, (2, edges))
    weights = rng.normal(size=edges) * 10.0 ** rng.integers(-200, 200, edges)
    i, j, weights = np.append(i, i[:50]), np.append(j, j[:50]), np.append(weights, weights[:50])
    return sparse.coo_array((np.tile(weights, 2), (np.append(i, j), np.append(j, i))), shape=(n, n))


def test_w_that_stays_sparse_is_converted():
    """Each conversion ended in an AttributeError of ours, 'SparseWeights' object has no attribute 'detach'."""
    W = large_and_sparse()
    problem, dense = Problem.of(W, 3), W.toarray()
    assert problem.weights.form == "sparse"
    graph = convert.to_networkx(W)
    back = nx.to_numpy_array(graph, nodelist=range(len(dense)))
    assert np.array_equal(back / 2 * (1 - np.eye(len(dense))), dense * (1 - np.eye(len(dense))))
    assert [weight for _, weight in graph.nodes(data="weight")] == np.diag(dense).tolist()
    model = convert.to_cvxpy(W, 3)
    assert model.var_dict["y"].shape == (graph.number_of_edges(),)


def test_factored_w_is_converted():
    A, B, C, D = np.random.default_rng(0).normal(size=(4, 3, 6))
    W = FactoredWeights([((A, A), (C, C)), ((B, B), (D, D))])
    dense = Problem.of(W, 2).dense("this test").W.numpy()
    assert np.allclose(Problem.of(convert.to_networkx(W), 0).W.numpy(), dense, rtol=1e-15, atol=0)


def test_sparse_models_of_dimod_and_igraph():
    pytest.importorskip("dimod")
    W = large_and_sparse()
    graph = convert.to_networkx(W)
    model = convert.to_dimod_cqm(W, 3, protected=[0]).objective
    edges = {frozenset((a, b)): weight for a, b, weight in graph.edges(data="weight") if 0 not in (a, b)}
    assert {frozenset((a, b)): weight for a, b, weight in model.iter_quadratic()} == edges
    pytest.importorskip("igraph")
    other = convert.to_igraph(W)
    assert {frozenset(edge.tuple): edge["weight"] for edge in other.es} == {
        frozenset((a, b)): weight for a, b, weight in graph.edges(data="weight")
    }


def test_igraph_keeps_names_and_what_its_own_conversion_loses():
    """igraph's symmetric reading of a sparse matrix makes a negative weight 0."""
    igraph = pytest.importorskip("igraph")
    W = np.array([[0.0, -1.5, 0.0], [-1.5, 3.0, 2.0], [0.0, 2.0, 0.0]])
    graph = nx.relabel_nodes(convert.to_networkx(W), {0: "a", 1: "b", 2: "c"})
    made = convert.to_igraph(graph)
    assert made.vs["name"] == ["a", "b", "c"]
    assert (made.vs["weight"], made.es["weight"]) == ([0.0, 3.0, 0.0], [-3.0, 4.0])
    advised = igraph.Graph.Weighted_Adjacency(sparse.csr_matrix(2 * W), mode="upper", loops=False)
    assert advised.es["weight"] == made.es["weight"]


# One rule for weights that are given twice, and for halves.

BANNER = "%%MatrixMarket matrix coordinate"
TWICE = {
    "same entry.mtx": (f"{BANNER} real general\n2 2 3\n1 2 1\n2 1 1\n1 2 1\n", "entry 1 2 .* in lines 3 and 5"),
    "both halves.mtx": (f"{BANNER} real symmetric\n% c\n2 2 2\n2 1 5\n1 2 5\n", "2 1 .* 4 and 5: .*symmetric .* half"),
    "both signs.mtx": (f"{BANNER} integer skew-symmetric\n2 2 2\n2 1 5\n1 2 -5\n", "entry 2 1 .* in lines 3 and 4"),
    "both ways.txt": ("2 1\n0 1 2\n1 0 2\n", "promises 1 lines"),
    "twice.txt": ("3 1\n0 1 2\n\n0 2 1\n1 0 2\n", "MDPLIB pair 1 0|0 1 .* in lines 2 and 5"),
    "twice.dat": ("3 1 3\n1 2 .5\n2 3 .5\n2 1 .5\n", "k-cluster pair .* in lines 2 and 4"),
    "twice.clq": ("p edge 3 3\ne 1 2\ne 2 3\ne 1 2\n", "3 lines name 2 DIMACS edges"),
}


@pytest.mark.parametrize("name", TWICE)
def test_text_files_that_give_a_weight_twice_are_refused(tmp_path, name):
    content, message = TWICE[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ProblemError, match=message):
        instances.read(tmp_path / name)


def given_twice(tmp_path, kind):
    """W_01 = W_10 = 5 in two parts, 2 and 3, and W_11 = 7 in two, 3 and 4."""
    at, parts = ([0, 1, 1, 0, 1, 1], [1, 0, 1, 1, 0, 1]), np.array([2.0, 2.0, 3.0, 3.0, 3.0, 4.0])
    entries = sparse.coo_array((parts, at), shape=(2, 2))
    if kind == "torch":
        return torch.sparse_coo_tensor(torch.tensor(at), torch.from_numpy(parts), (2, 2))
    if kind == "networkx":
        graph = nx.MultiGraph()
        graph.add_nodes_from([(0, {}), (1, {"weight": 3.0})])
        graph.add_weighted_edges_from([(0, 1, 4.0), (1, 0, 6.0), (1, 1, 4.0)])  # an edge counts W_ij + W_ji
        return graph
    if kind == "scipy's file":
        sparse.save_npz(tmp_path / "w.npz", entries)
        return instances.read(tmp_path / "w.npz").W
    return entries


@pytest.mark.parametrize("kind", ["scipy", "torch", "networkx", "scipy's file"])
def test_in_memory_weights_given_twice_add_up_everywhere(tmp_path, kind):
    W = given_twice(tmp_path, kind)
    want = [[0.0, 5.0], [5.0, 7.0]]
    assert Problem.of(W, 1).W.tolist() == want
    assert float(solve(W, 2).objective) == 17.0
    assert Problem.of(convert.to_networkx(W), 1).W.tolist() == want  # networkx's own reading keeps the last of each
    for suffix in (".mtx", ".npz"):
        if kind.startswith("scipy"):
            instances.write(tmp_path / f"again{suffix}", W)
            assert Problem.of(instances.read(tmp_path / f"again{suffix}").W, 1).W.tolist() == want


@pytest.mark.parametrize("form", ["array", "csr", "torch", "csv", "mtx", "npz", "large"])
def test_half_of_w_is_refused_and_the_message_says_how_to_fill_it(tmp_path, form):
    W = np.triu(np.arange(1.0, 10.0).reshape(3, 3))
    if form in ("csv", "mtx", "npz"):
        instances.write(tmp_path / f"w.{form}", sparse.csr_array(W) if form == "npz" else W)
        W = instances.read(tmp_path / f"w.{form}").W
    if form == "csr":
        W = sparse.csr_array(W)
    if form == "torch":
        W = torch.from_numpy(W).to_sparse()
    if form == "large":
        W = sparse.triu(large_and_sparse())
    with pytest.raises(ProblemError, match=r"not symmetric.* fill it, W \+ W\.T with the diagonal once.*symmetrize"):
        solve(W, 1)


# Numbers as other programs write them.


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.5D2", 150.0), ("1.5d+02", 150.0), ("-.15D3", -150.0), ("1.D-3", 0.001), ("1e3", 1000.0), ("+5", 5.0),
     ("0.12345678901234567890123", 0.12345678901234568), ("1.7976931348623157D308", 1.7976931348623157e308),
     ("0D0", 0.0), ("-0.0e9", 0.0), ("5D-324", 5e-324)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["w.mtx", "array.mtx", "w.csv", "w.txt"])
def test_numbers_are_read_right(tmp_path, name, text, value):
    """SciPy reads 1.5D2 as 1.5; we refused it, without the line."""
    content = {
        "w.mtx": f"{BANNER} real symmetric\n2 2 2\n2 1 {text}\n2 2 1.5\n",
        "array.mtx": f"%%MatrixMarket matrix array real symmetric\n2 2\n0\n{text}\n1.5\n",
        "w.csv": f"0,{text}\n{text},1.5\n",
        "w.txt": f"2 1\n0 1 {text}\n",
    }[name]
    (tmp_path / name).write_text(content)
    assert instances.read(tmp_path / name).W[0, 1] == (-value if name == "w.txt" else value)


@pytest.mark.parametrize(
    "text",
    [
        "1.5.",
        "1_000",
        "0x1p3",
        "1,5,2",
        "1.5+02",
        "--5",
        "1e",
        "D2",
        "1.5F2",
        "\uff11",
        "2 3",
        "1e-400",
        "-1D-999",
        "1D400",
        "-9e308",
    ],
)
@pytest.mark.parametrize(
    ("name", "line"), [("w.mtx", 4), ("array.mtx", 5), ("w.csv", 2), ("w.txt", 3), ("w.dat", 3), ("vertex.dat", 3)]
)
def test_what_is_no_number_is_refused_by_its_line(tmp_path, name, line, text):
    content = {
        "w.mtx": f"{BANNER} real symmetric\n2 2 2\n2 2 1.5\n2 1 {text}\n",
        "array.mtx": f"%%MatrixMarket matrix array real symmetric\n% c\n2 2\n0\n{text}\n1.5\n",
        "w.csv": f"1;2\n2;{text}\n",
        "w.txt": f"3 1\n0 1 1\n0 2 {text}\n1 2 1\n",
        "w.dat": f"3 1 2\n1 2 1\n1 3 {text}\n",
        "vertex.dat": f"3 1 2\n1 2 1\n1 {text} 1\n",
    }[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ProblemError, match=rf"line {line}\b"):
        instances.read(tmp_path / name)


@pytest.mark.parametrize("field", ["integer", "unsigned-integer"])
@pytest.mark.parametrize("text", ["1e3", "1.5D2", "1.0", "1.", "nan", "0.5", "1_0", "-5"])
def test_integer_fields_hold_integers(tmp_path, field, text):
    """SciPy reads 1e3 there as 1."""
    (tmp_path / "w.mtx").write_text(f"{BANNER} {field} symmetric\n% c\n2 2 2\n2 2 7\n2 1 {text}\n")
    if text == "-5" and field == "integer":
        assert instances.read(tmp_path / "w.mtx").W.tolist() == [[0, -5], [-5, 7]]
        return
    with pytest.raises(ProblemError, match=rf"line 5: '{text}' is not a 64-bit integer as the field {field} has them"):
        instances.read(tmp_path / "w.mtx")


@given(
    sign=st.sampled_from(["", "-", "+"]),
    digits=st.from_regex(r"([0-9]{1,25}\.?[0-9]{0,25}|\.[0-9]{1,25})", fullmatch=True),
    letter=st.sampled_from("eEdD"),
    power=st.integers(-330, 330),
)
def test_a_number_is_the_nearest_float64_or_refused(tmp_path_factory, sign, digits, letter, power):
    path = tmp_path_factory.mktemp("io") / "w.mtx"
    path.write_text(f"{BANNER} real general\n1 1 1\n1 1 {sign}{digits}{letter}{power}\n")
    value = float(f"{sign}{digits}e{power}")
    if value == 0 and any(digit in "123456789" for digit in digits):
        with pytest.raises(ProblemError, match=r"line 3: .* would become 0.* scale the weights up"):
            instances.read(path)
    elif value in (float("inf"), -float("inf")):
        with pytest.raises(ProblemError, match=r"line 3: .* would become inf.* scale the weights down"):
            instances.read(path)
    else:
        read = instances.read(path).W[0, 0]
        assert read == value
        assert math.isinf(read) == math.isinf(value)
