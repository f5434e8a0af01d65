"""What users give, in every kind there is: read as it was meant, or refused by name; each instance judged by itself."""

import sys

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from grace_opt import GraceError, Problem, solve, symmetrize
from grace_opt.bounds.fixing import fixed_vertices
from grace_opt.errors import OptionError, ProblemError
from grace_opt.kernels._shared import threads

W = np.array([[4.0, 1, 2], [1, 3, 0], [2, 0, 5]])
TINY = 5e-324  # the least float64


class Tagged(torch.Tensor):
    """A subclass that only adds a name."""


def _strided(flip):
    return W[::-1, ::-1].copy()[::-1, ::-1] if flip else np.asfortranarray(W)


def _read_only():
    copy = W.copy()
    copy.flags.writeable = False
    return copy


def _duplicates():
    half = sp.coo_array(W / 2)
    return sp.coo_array((np.tile(half.data, 2), (np.tile(half.coords[0], 2), np.tile(half.coords[1], 2))), shape=(3, 3))


READ = {
    "matrix": lambda: np.asmatrix(W),
    "DataFrame": lambda: pd.DataFrame(W),
    "nullable DataFrame": lambda: pd.DataFrame(W).astype("int64"),
    "Fortran order": lambda: _strided(False),
    "negative strides": lambda: _strided(True),
    "read-only": _read_only,
    "other bytes": lambda: W.astype(">f8"),
    "other bytes, half": lambda: W.astype(">f2"),
    "longdouble": lambda: W.astype(np.longdouble),
    **{
        f"{kind} sparse": lambda kind=kind: getattr(sp, f"{kind}_array")(W)
        for kind in ("coo", "csr", "lil", "dok", "dia")
    },
    "dok_matrix": lambda: sp.dok_matrix(W),
    "integer sparse": lambda: sp.csr_array(W.astype(np.int8)),
    "sparse with duplicates": _duplicates,
    "list of rows": lambda: list(W),
    "torch list": lambda: [torch.from_numpy(row) for row in W],
    "torch sparse": lambda: torch.from_numpy(W).to_sparse_csr(),
    "requires_grad": lambda: torch.from_numpy(W).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(torch.from_numpy(W)),
    "negative bit": lambda: torch.from_numpy(-1j * W).conj().imag,
    "subclass": lambda: torch.from_numpy(W).as_subclass(Tagged),
    "uint16": lambda: torch.from_numpy(W).to(torch.uint16),
    "uint64": lambda: torch.from_numpy(W.astype(np.uint64)),
    "expanded": lambda: torch.from_numpy(W).expand(1, 3, 3)[0].mT,
}


@pytest.mark.filterwarnings("ignore")  # of torch and numpy, about kinds that they would rather not have
@pytest.mark.parametrize("kind", READ)
def test_the_same_matrix_in_every_kind(kind):
    given = READ[kind]()
    sol = solve(given, 2, "exhaustive", certify=True)
    assert np.asarray(sol.indices).tolist() == [1, 2]
    assert float(sol.objective) == 8.0
    assert type(sol.mask) is (torch.Tensor if isinstance(given, torch.Tensor) else np.ndarray)


def test_a_memmap_and_inference_mode(tmp_path):
    np.save(tmp_path / "W.npy", W)
    assert solve(np.load(tmp_path / "W.npy", mmap_mode="r"), 2).indices.tolist() == [1, 2]
    with torch.inference_mode():
        inside = torch.from_numpy(W) * 1
        assert solve(inside, 2, "local_search", certify=True).indices.tolist() == [1, 2]
    assert solve(inside, 2, "local_search", certify="tight").indices.tolist() == [1, 2]


def _masked(array, mask):
    return np.ma.array(array, mask=mask)


HIDDEN = [[True, False, False], [False] * 3, [False] * 3]
REFUSED = {
    "masked W": (lambda: _masked(W, HIDDEN), 1, None, r"W is a masked array.*W\.filled"),
    "unmasked masked W": (lambda: np.ma.array(W), 1, None, "masked array"),
    "list of masked": (lambda: [_masked(W, HIDDEN)], 1, None, "masked array"),
    "masked k": (lambda: np.stack([W] * 2), _masked([1, 2], [True, False]), None, "k is a masked array"),
    "masked protected": (lambda: W, 1, _masked([0, 1], [True, False]), "protected is a masked array"),
    "masked tensor": (
        lambda: torch.masked.masked_tensor(torch.from_numpy(W), torch.ones(3, 3, dtype=torch.bool)),
        1,
        None,
        "MaskedTensor.*plain tensor",
    ),
    "nested tensor": (lambda: torch.nested.nested_tensor([torch.eye(3), torch.eye(3)]), 1, None, "nested tensor"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
        1,
        None,
        r"quantised.*W\.dequantize",
    ),
    "float8": (lambda: torch.eye(3).to(torch.float8_e4m3fn), 1, None, r"float8_e4m3fn.*to\(torch\.float64\)"),
    "sparse of bools": (lambda: sp.csr_array(np.eye(3, dtype=bool)), 1, None, "bool"),
    "sparse complex": (lambda: sp.csr_array(W * 1j), 1, None, "complex"),
    "sparse nan": (lambda: sp.csr_array(np.diag([1.0, np.nan, 2])), 1, None, r"W\[1, 1\] is nan"),
    "torch uint64": (lambda: torch.from_numpy(np.full((2, 2), 2**64 - 1, np.uint64)), 1, None, str(2**64 - 1)),
    "python integers": (lambda: [[2**70, 0], [0, 1]], 1, None, f"W holds the integer {2**70}, beyond"),
    "large among fractions": (lambda: [[2**53 + 1, 0.5], [0.5, 1.0]], 1, None, f"{2**53 + 1}.*float64"),
    "large among negatives": (lambda: [[2**63, -1], [-1, 0]], 1, None, str(2**63)),
    "bools among numbers": (lambda: [[True, 2.0], [2.0, 1.0]], 1, None, "mixes bools"),
    "a dict": (lambda: {0: W}, 1, None, "dict"),
    "a scalar": (lambda: np.float64(3.0), 1, None, "square"),
    "missing values": (lambda: pd.DataFrame([[1.0, None], [None, 1.0]], dtype="Float64"), 1, None, r"\[0, 1\] is <NA>"),
    "no vertex": (lambda: np.ones((2, 0, 0)), 0, None, "empty"),
    "k of bools": (lambda: np.stack([W] * 2), [True, False], None, "bool"),
    "k bools among numbers": (lambda: np.stack([W] * 2), [True, 2], None, "k mixes bools"),
    "k numpy bool": (lambda: W, np.True_, None, "bool"),
    "k nan": (lambda: W, float("nan"), None, "float"),
    "k object": (lambda: W, np.array(1, dtype=object), None, "k has dtype object"),
    "k unsigned": (lambda: np.stack([W] * 2), np.array([1, 2**64 - 1], np.uint64), None, "k holds the integer"),
    "protected mixed": (lambda: W, 1, [True, 2], "protected mixes bools"),
    "protected set of bools": (lambda: W, 1, {True}, "no order"),
    "protected empty mask": (lambda: W, 1, np.zeros(0, bool), r"shape \(0,\)"),
    "protected scalar": (lambda: W, 1, 1, r"shape \(\)"),
    "protected generator": (lambda: W, 1, (i for i in range(2)), "protected is a generator: give a list of vertices"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    make, k, protected, message = REFUSED[case]
    with pytest.raises(ProblemError, match=message):
        solve(make(), k, protected=protected)


@pytest.mark.parametrize("mask", [[True, False, True], (True, False, True), np.array([1, 0, 1], bool)])
@pytest.mark.parametrize("graph", [nx.path_graph(3), nx.Graph([("a", "b"), ("b", "c")])])
def test_a_list_of_bools_is_a_mask_for_graphs_too(graph, mask):
    """Found by hand: True and False were taken for nodes 1 and 0, which then were protected, both of them."""
    names = list(graph)
    for form in (mask, torch.tensor(mask), pd.Series(mask)):
        assert solve(graph, 1, protected=form).labels == [names[1]]
    with pytest.raises(ProblemError, match=r"bool mask of shape \(2,\)"):
        solve(graph, 1, protected=[True, False])


GRAPH = nx.Graph([(0, 1), (1, 2), ("a", 0), ((0, 1), 0)])
NODES = {
    "set of bools": ({True}, "True, which is not a node"),
    "bool among nodes": ([True, "a"], "True, which is not a node"),
    "text": ("a", r"protected=\['a'\]"),
    "a tuple that is a node": ((0, 1), r"protected=\[\(0, 1\)\]"),
    "one node": (1, r"protected=\[1\]"),
    "a number": (17, "list of nodes"),
    "unhashable": ([[0]], r"\[0\], which is not a node"),
    "0/1": ([0, 1, 1, 0, 0], "0/1 mask"),
    "masked": (np.ma.array([0, 1], mask=[True, False]), "masked array"),
}


@pytest.mark.parametrize("case", NODES)
def test_nodes_that_are_not_meant(case):
    protected, message = NODES[case]
    with pytest.raises(ProblemError, match=message):
        solve(GRAPH, 1, protected=protected)


def test_nodes_in_every_kind():
    kinds = ([0, 1], {0, 1}, np.array([0, 1]), torch.tensor([0, 1]), (node for node in (0, 1)), [0.0, np.int64(1)])
    for protected in kinds:
        assert solve(GRAPH, 3, protected=protected).labels == [2, "a", (0, 1)]
    named = nx.Graph([("a", "b"), ("b", "c")])
    assert solve(named, 1, protected=np.array(["a", "b"])).labels == ["c"]
    bools = nx.Graph([(True, False), (False, "x")])
    assert solve(bools, 1, protected={True, "x"}).labels == [False]
    assert solve(bools, 1, protected=np.array([True, False, True])).labels == [False]
    with pytest.raises(ProblemError, match="a mask, or nodes"):
        solve(bools, 1, protected=[True, False, False])
    with pytest.raises(ProblemError, match="1, which is not a node"):
        solve(bools, 1, protected=[1])


def test_graph_weights_beyond_float64():
    with pytest.raises(ProblemError, match=r"edge \(0, 1\) holds the integer"):
        solve(nx.Graph([(0, 1, {"weight": 2**53 + 1})]), 1)
    with pytest.raises(ProblemError, match="holds the integer"):
        solve(nx.Graph([(0, 1, {"weight": 10**400})]), 1)


@pytest.mark.parametrize("start", [[0.0, 1.5], [True, 2], [[True], [False]], [True, False], np.ma.array([0, 1])])
def test_a_start_that_is_no_choice(start):
    with pytest.raises(GraceError, match="start"):
        solve(W, 2, "local_search", start=start)


def test_an_empty_start():
    assert solve(W, 0, "local_search", start=[]).indices.tolist() == []


def test_k_of_a_problem_is_its_own():
    k = torch.tensor([1, 2])
    problem = Problem.of(torch.from_numpy(np.stack([W] * 2)), k)
    k += 1
    assert problem.k.tolist() == [1, 2]


@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy, np.ndarray.tolist, sp.csr_array])
def test_integers_are_symmetric_exactly_also_beside_a_large_one(form):
    W = np.array([[2**52, 0, 0], [0, 0, 3], [0, 10, 1]])
    with pytest.raises(ProblemError, match=r"W\[1, 2\] - W\[2, 1\]\| = 7, allowed 0, as these are integers"):
        solve(form(W), 2)
    assert solve(form(np.maximum(W, W.T)), 1).objective == 0.0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
class TestSymmetry:
    """Each pair is judged by the largest entries of its vertices, in numpy's, torch's and the compiled passes alike."""

    @pytest.fixture(autouse=True)
    def _passes(self, compiled, monkeypatch):
        monkeypatch.setattr(threads, "COMPILE_FROM", 0 if compiled else 10**12)

    def test_a_small_triangle_beside_a_large_instance(self, dtype):
        W = torch.zeros(2, 2, 9, 9, dtype=dtype)
        W[0] = W[1, 1] = 1e12 if dtype != torch.float16 else 6e4
        W[1, 0, 3, 1] = 1e-6
        small = rf"W\[1, 0, 1, 3\] - W\[1, 0, 3, 1\]\| = {float(W[1, 0, 3, 1]):.3g}, allowed"
        for form in (W, W.numpy() if dtype != torch.bfloat16 else W.tolist()):
            with pytest.raises(ProblemError, match=small):
                solve(form, 1)
        with pytest.raises(ProblemError, match="not symmetric"):
            solve(W[1, 0], 1)

    def test_a_giant_elsewhere_excuses_nothing(self, dtype):
        W = torch.eye(9, dtype=dtype)
        W[8, 8] = torch.finfo(dtype).max / 2000
        W[0, 1], W[1, 0] = 1, 2
        batch = torch.stack([W.mT.maximum(W), W])
        for form, at in ((W, ""), (batch, "1, ")):
            pair = rf"W\[{at}0, 1\] - W\[{at}1, 0\]\| = 1, allowed .*rounding, by the two vertices"
            with pytest.raises(ProblemError, match=pair):
                solve(form, 1)
        W = torch.ones(9, 9, dtype=dtype)
        W[0, 1] += 32 * torch.finfo(dtype).eps  # of the largest weight, half of it is allowed
        with pytest.raises(ProblemError, match="not symmetric"):
            solve(W, 1)
        scale = torch.linspace(-3, 3, 9).exp2().to(dtype)  # vertices of several sizes, entries that round
        W = (scale[:, None] * scale) * 0.3
        W[2, 6] *= 1 + 4 * torch.finfo(dtype).eps
        made = Problem.of(W, 3).W
        assert torch.equal(made, made.mT)
        assert made[2, 6] == (W[2, 6].double() + W[6, 2].double()).div(2).to(made.dtype)

    def test_denormal_triangles(self, dtype):
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # one unit of the denormal numbers
        W = torch.zeros(9, 9, dtype=dtype)
        W[0, 1] = least
        for form in (W, torch.stack([W, torch.ones_like(W)]), torch.stack([torch.zeros_like(W), W])):
            with pytest.raises(ProblemError, match="not symmetric"):
                solve(form, 1)
        W[1, 0] = least
        assert torch.equal(Problem.of(W, 1).W.to(torch.float64), W.to(torch.float64))
        assert torch.equal(symmetrize(W), W)

    def test_rounding_is_made_exact_at_every_scale(self, dtype):
        limits = torch.finfo(dtype)
        for scale in (1.0, limits.max / 2000, limits.smallest_normal * 4):
            W = torch.full((9, 9), 1.0, dtype=dtype) * scale
            W[2, 5] *= 1 + limits.eps
            W[5, 2] *= 1 + 3 * limits.eps
            problem = Problem.of(W, 3)
            assert torch.equal(problem.W, problem.W.mT)
            mean = (W[2, 5].double() + W[5, 2].double()) / 2
            assert float(problem.W[2, 5]) == float(mean.to(problem.W.dtype))
            assert float(problem.W[0, 1]) == float(W[0, 1])

    def test_opposite_ends(self, dtype):
        W = torch.zeros(9, 9, dtype=dtype)
        W[0, 1] = torch.finfo(dtype).max
        W[1, 0] = -W[0, 1]
        with pytest.raises(ProblemError, match="not symmetric"):
            solve(W, 1)
        assert torch.equal(symmetrize(W), torch.zeros_like(W))
        W[1, 0] = W[0, 1]
        assert torch.equal(symmetrize(W), W)


def test_symmetrize_loses_nothing():
    largest = sys.float_info.max
    for form, dense in ((np.array, np.asarray), (sp.csr_array, lambda found: found.toarray())):
        for kept in ([[0.0, TINY], [TINY, 0.0]], [[0.0, largest], [largest, -largest]], [[TINY, -1.0], [-1.0, 3.0]]):
            assert dense(symmetrize(form(kept))).tolist() == kept
        for lost in ([[1.0, TINY], [0.0, 4.0]], [[0.0, 0.0], [3 * TINY, 0.0]]):
            with pytest.raises(ProblemError, match=r"W\[0, 1\] \+ W\[1, 0\] = \S+ is too small to be halved"):
                symmetrize(form(lost))


def test_bool_seeds():
    for seed in (True, np.True_, torch.tensor(True)):
        with pytest.raises(OptionError, match="seed="):
            solve(W, 1, seed=seed)


def test_the_least_edge_weight_is_not_halved_to_nothing():
    with pytest.raises(ProblemError, match="too small to be halved"):
        solve(nx.Graph([(0, 1, {"weight": TINY})]), 2)
    assert float(solve(nx.Graph([(0, 1, {"weight": 2 * TINY})]), 2).objective) == 2 * TINY


def test_what_is_no_callback_and_no_target():
    with pytest.raises(OptionError, match="callback=3"):
        solve(W, 1, callback=3)
    with pytest.raises(OptionError, match="target=nan"):
        solve(W, 1, "tabu", target=float("nan"))


def test_fixed_vertices_of_a_problem_take_nothing_twice():
    problem = Problem.of(W, 2)
    with pytest.raises(OptionError, match="holds k"):
        fixed_vertices(problem, 1)
    for incumbent in ([True, False, False], [0, 1]):
        with pytest.raises(OptionError, match="incumbent"):
            fixed_vertices(problem, incumbent=incumbent)


@pytest.mark.parametrize("name", ["required", "protected"])
def test_the_last_of_an_order_read_backwards(name):
    """One entry is contiguous whatever its stride, and torch takes none that is negative."""
    order = np.array([0, 1, 2])[::-1]
    assert solve(np.eye(3), 1, **{name: order[:1]}).mask[2] == (name == "required")
    assert solve(np.eye(3)[None], order[2:], **{name: order[:0]}).mask.sum() == 0
