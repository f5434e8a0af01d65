r"""Convert instances to models of other libraries, to check results with solvers that share no code with ours.

* `to_cvxpy`: a mixed-integer problem for Gurobi, SCIP, HiGHS, …
* `to_dimod_bqm`, `to_dimod_cqm`: for D-Wave's samplers, classical and quantum.
* `to_networkx`, `to_igraph`: a graph; `grace_opt.solve` reads networkx's back as the same W.

At every choice of k vertices, the value of the model is f(S). Each call converts one instance, of W in any form that
`grace_opt.solve` takes; entries that a sparse W gives twice are added first. All coefficients are exact, but for the
rounding that a penalty or a shift brings. Sources: Glover &
Woolsey, Oper. Res. 22 (1974) for the linear form; Hammer & Rubin, RAIRO 3 (1970) for the shifted one; the default
penalty is ours.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.arrays import least_eigenvalue
from .._util.optional import require
from .._util.parameters import choice, number
from ..errors import ProblemError
from ..problem import Problem, SparseWeights, Weights

OBJECTIVE_FORMS = ("linear", "quadratic")
#: Relative to its largest entry and n, the shifted W is PSD up to this much, despite rounding in the eigenvalue.
SHIFT_MARGIN = 1e-12


def to_cvxpy(W: Any, k: int, protected: Any = None, *, form: str = "linear") -> Any:
    r"""Convert to a mixed-integer program in cvxpy, valid for W of any sign.

    ``form="linear"`` replaces the products by variables, :math:`y_{ij} = x_i x_j`,

    .. math:: \min \sum_i W_{ii} x_i + 2 \sum_{i<j} W_{ij} y_{ij}, \quad 1^\top x = k, \; x \in \{0, 1\}^n,

    with :math:`y_{ij} \ge x_i + x_j - 1,\ y_{ij} \ge 0` where :math:`W_{ij} > 0` and
    :math:`y_{ij} \le x_i,\ y_{ij} \le x_j` where :math:`W_{ij} < 0`: solvable by every mixed-integer linear solver
    (HiGHS comes with scipy), with one variable per edge. ``form="quadratic"`` shifts W instead,
    :math:`x^\top (W - \lambda I) x + \lambda 1^\top x` with :math:`\lambda = \min(0, \lambda_{\min}(W))`, which is
    convex and equal to f on 0/1 points; it needs a mixed-integer *quadratic* solver (Gurobi, SCIP).

    Parameters
    ----------
    W : array_like (n, n), or what else `grace_opt.solve` takes
        Symmetric weights.
    k : int
        Number of vertices to choose.
    protected : array_like, optional
        Vertices that must not be chosen.
    form : str
        "linear" or "quadratic".

    Returns
    -------
    cvxpy.Problem
        Its variable "x" holds the choice: ``model.var_dict["x"].value > 0.5`` once it is solved.

    Raises
    ------
    ProblemError, OptionError

    Notes
    -----
    O(n²) to build, O(n³) for the eigenvalue of the quadratic form.

    Examples
    --------
    >>> model = to_cvxpy([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]], 2)
    >>> round(float(model.solve(solver="HIGHS")), 6), (model.var_dict["x"].value > 0.5).tolist()
    (5.0, [True, False, True])
    """
    cp = require("cvxpy", "peers", "to_cvxpy()")
    choice("form", form, OBJECTIVE_FORMS)
    problem = _single(W, k, protected)
    n = problem.n
    x = cp.Variable(n, boolean=True, name="x")
    constraints = [cp.sum(x) == int(problem.k)]
    if blocked := (~problem.candidates).nonzero().flatten().tolist():
        constraints.append(x[blocked] == 0)
    if form == "quadratic":
        weights = _array(problem, "to_cvxpy(form='quadratic')")
        # Set protected vertices to 0: a huge one would otherwise shift all others by more than their weights.
        free = problem.candidates.cpu().numpy()
        weights = np.where(np.outer(free, free), weights, 0.0)
        shift = min(0.0, least_eigenvalue(weights)) - SHIFT_MARGIN * n * float(np.abs(weights).max())
        convex = cp.psd_wrap(weights - shift * np.eye(n))
        return cp.Problem(cp.Minimize(cp.quad_form(x, convex) + shift * cp.sum(x)), constraints)
    nodes, i, j, edges = _parts(problem.weights, problem, "to_cvxpy()")
    objective = nodes @ x
    if len(i):
        y = cp.Variable(len(i), nonneg=True, name="y")
        objective = objective + 2 * edges @ y
        positive, negative = np.flatnonzero(edges > 0), np.flatnonzero(edges < 0)
        if len(positive):
            constraints.append(y[positive] >= x[i[positive]] + x[j[positive]] - 1)
        if len(negative):
            constraints += [y[negative] <= x[i[negative]], y[negative] <= x[j[negative]]]
    return cp.Problem(cp.Minimize(objective), constraints)


def to_dimod_bqm(W: Any, k: int, penalty: float | None = None, *, protected: Any = None) -> Any:
    r"""Convert to a dimod binary quadratic model; a penalty enforces the number of chosen vertices.

    .. math:: E(x) = x^\top W x + p\, (1^\top x - k)^2

    For every x with k ones, E(x) is f. The default :math:`p > \max_i (|W_{ii}| + 2 \sum_{j \ne i} |W_{ij}|)`, the most
    by which one vertex can change f, makes every minimiser of E an optimal choice of k vertices: adding or removing d
    vertices to correct the size costs less than the penalty :math:`p d^2` that it saves. A heuristic sampler may still
    return other sizes, more often the smaller p is; a large p hides the differences in W, and rounds them: the model's
    coefficients are those of W plus p. Its offset is :math:`p k^2`. To save it, write ``model.to_file()``, which keeps
    all digits and the offset; dimod's COO text keeps six decimals and no offset.

    Parameters
    ----------
    W : array_like (n, n), or what else `grace_opt.solve` takes
        Symmetric weights.
    k : int
        Number of vertices to choose.
    penalty : float, optional
        p > 0, instead of the default; if too small, minimisers may have other sizes.
    protected : array_like, optional
        Vertices that must not be chosen; the model has no variables for them.

    Returns
    -------
    dimod.BinaryQuadraticModel
        Its variables are the numbers of the vertices, or the nodes of a networkx graph.

    Raises
    ------
    ProblemError, OptionError

    Examples
    --------
    >>> float(to_dimod_bqm([[2.0, 0.0], [0.0, 1.0]], 1).energy({0: 0, 1: 1}))  # doctest: +SKIP
    1.0
    """
    dimod = require("dimod", "peers", "to_dimod_bqm()")
    problem = _single(W, k, protected)
    weights, size = _array(problem, "to_dimod_bqm()"), int(problem.k)
    if penalty is None:
        free = problem.candidates.cpu().numpy()  # protected vertices are not in the model
        among = np.abs(weights[np.ix_(free, free)])
        most = float((2 * among.sum(1) - np.diagonal(among)).max(initial=0.0))
        penalty = 1.01 * most if most > 0 else 1.0
    p = number("penalty", penalty, above=0, hint="or None for one that is large enough")
    i, j = np.triu_indices(problem.n, 1)
    linear = np.diagonal(weights) + p * (1 - 2 * size)
    return _quadratic(dimod, problem, linear, i, j, 2 * (weights[i, j] + p), p * size**2)


def to_dimod_cqm(W: Any, k: int, *, protected: Any = None) -> Any:
    """Convert to a dimod constrained quadratic model: objective f, and a constraint "size" that k are chosen.

    Its coefficients are exactly those of W.

    Parameters
    ----------
    W : array_like (n, n), or what else `grace_opt.solve` takes
        Symmetric weights.
    k : int
        Number of vertices to choose.
    protected : array_like, optional
        Vertices that must not be chosen; the model has no variables for them.

    Returns
    -------
    dimod.ConstrainedQuadraticModel
        Its variables are the numbers of the vertices, or the nodes of a networkx graph.

    Raises
    ------
    ProblemError, OptionError

    Examples
    --------
    >>> to_dimod_cqm([[2.0, 0.0], [0.0, 1.0]], 1).check_feasible({0: 1, 1: 1})  # doctest: +SKIP
    False
    """
    dimod = require("dimod", "peers", "to_dimod_cqm()")
    problem = _single(W, k, protected)
    nodes, i, j, edges = _parts(problem.weights, problem, "to_dimod_cqm()")
    objective = _quadratic(dimod, problem, nodes, i, j, 2 * edges, 0.0)
    model = dimod.ConstrainedQuadraticModel()
    model.set_objective(objective)
    if objective.num_variables:
        ones = dimod.BinaryQuadraticModel(dict.fromkeys(objective.variables, 1.0), {}, 0.0, dimod.BINARY)
        model.add_constraint(ones, sense="==", rhs=int(problem.k), label="size")
    return model


def to_networkx(W: Any) -> Any:
    """Convert to a graph with node weights ``W_ii`` and edge weights ``2 W_ij``; f is an induced subgraph's weight.

    `grace_opt.solve` reads it back as the same W. Edges of weight 0 are left out.

    Parameters
    ----------
    W : array_like (n, n), or what else `grace_opt.solve` takes
        Symmetric weights.

    Returns
    -------
    networkx.Graph
        Nodes 0 to n - 1, attribute ``weight`` on nodes and edges.

    Raises
    ------
    ProblemError

    Examples
    --------
    >>> graph = to_networkx([[3.0, -1.0], [-1.0, 0.0]])
    >>> graph.nodes[0]["weight"], graph.edges[0, 1]["weight"]
    (3.0, -2.0)
    """
    nx = require("networkx", "peers", "to_networkx()")
    problem = _single(W, 0, None)
    nodes, i, j, edges = _parts(problem.weights, problem, "to_networkx()")
    names, graph = _names(problem), nx.Graph()
    graph.add_nodes_from((name, {"weight": weight}) for name, weight in zip(names, nodes.tolist(), strict=True))
    ends = zip(i.tolist(), j.tolist(), (2 * edges).tolist(), strict=True)
    graph.add_weighted_edges_from((names[a], names[b], weight) for a, b, weight in ends)
    return graph


def to_igraph(W: Any) -> Any:
    """Convert to a graph of igraph with the weights of `to_networkx`, as attributes of its vertices and edges.

    The edges are passed one by one. ``igraph.Graph.Weighted_Adjacency`` of a sparse symmetric matrix loses the
    negative ones unless it is given ``mode="upper"``, and knows no node weights.

    Parameters
    ----------
    W : array_like (n, n), or what else `grace_opt.solve` takes
        Symmetric weights.

    Returns
    -------
    igraph.Graph
        Attribute ``weight`` on vertices and edges, and ``name`` on vertices if W has names.

    Raises
    ------
    ProblemError, OptionError

    Examples
    --------
    >>> graph = to_igraph([[3.0, -1.0], [-1.0, 0.0]])  # doctest: +SKIP
    >>> graph.vs["weight"], graph.es["weight"]  # doctest: +SKIP
    ([3.0, 0.0], [-2.0])
    """
    igraph = require("igraph", "peers", "to_igraph()")
    problem = _single(W, 0, None)
    nodes, i, j, edges = _parts(problem.weights, problem, "to_igraph()")
    graph = igraph.Graph(n=problem.n, edges=np.column_stack([i, j]))
    graph.vs["weight"], graph.es["weight"] = nodes.tolist(), (2 * edges).tolist()
    if problem.labels is not None:
        graph.vs["name"] = [str(label) for label in problem.labels]
    return graph


def _single(W: Any, k: Any, protected: Any) -> Problem:
    problem = Problem.of(W, k, protected=protected)
    if problem.batch_shape:
        raise ProblemError(
            f"W has shape {problem.weights.shape}: a model holds one instance, shape (n, n); convert one at a time."
        )
    return problem


def _array(problem: Problem, wanted_by: str) -> npt.NDArray[np.float64]:
    """Return W as an array, whatever form it has."""
    return np.asarray(problem.dense(wanted_by).W.detach().cpu().numpy(), dtype=np.float64)


@singledispatch
def _parts(W: Weights, problem: Problem, wanted_by: str) -> tuple[npt.NDArray[Any], ...]:
    """Return the diagonal, and i < j and W_ij of every edge; sparse W stays sparse."""
    weights = _array(problem, wanted_by)
    i, j = np.nonzero(np.triu(weights, 1))
    return np.diagonal(weights), i, j, weights[i, j]


@_parts.register
def _sparse_parts(W: SparseWeights, problem: Problem, wanted_by: str) -> tuple[npt.NDArray[Any], ...]:
    from scipy.sparse import triu

    half = triu(W.edges, 1).tocoo()
    row, column = half.coords if hasattr(half, "coords") else (half.row, half.col)
    return W.nodes.numpy(), row, column, half.data


def _names(problem: Problem) -> list[Any]:
    return list(range(problem.n) if problem.labels is None else problem.labels)


def _quadratic(dimod: Any, problem: Problem, linear: Any, i: Any, j: Any, quadratic: Any, offset: float) -> Any:
    """Return a BQM over the candidates; protected vertices are 0, so leaving them out changes no energy."""
    names, free = _names(problem), problem.candidates.cpu().numpy()
    model = dimod.BinaryQuadraticModel(dimod.BINARY)
    model.add_linear_from({names[at]: float(linear[at]) for at in np.flatnonzero(free)})
    kept = free[i] & free[j]
    ends = zip(i[kept].tolist(), j[kept].tolist(), quadratic[kept].tolist(), strict=True)
    model.add_quadratic_from((names[a], names[b], weight) for a, b, weight in ends)
    model.offset = offset
    return model
