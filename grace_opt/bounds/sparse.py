r"""Lower bounds for sparse W, from its edges alone: O(edges) a round, and valid in spite of rounding.

* `degree_bound`: every chosen vertex has k - 1 chosen neighbours, at best its k - 1 least entries, zeros included.
* `load_bound`: each edge of negative weight is divided between its two ends, so that no load is heavier than it must
  be; f is at least minus the k heaviest loads. Edges of positive weight are left out. For densest subgraphs it is the
  value of the linear relaxation, in the limit: k times the largest density if one part of the graph is densest.
* `plane_bound`: W - λI is convex on the plane ``sum x = k`` for λ the least eigenvalue there, and f is at least the
  minimum of the convex form, less what the tangent plane at any point shows. Lanczos guesses λ, and only a Cholesky
  factorisation proves it, which takes n² numbers and O(n³): for thousands of vertices, not more. The strongest of all
  for graphs without a dense part. (A residual shows that an eigenvalue is near, never that it is the least.)

When: `certificate`, for a problem whose W is sparse; it adds the bounds for tensors where n is small. Sums are made
with margins as in `grace_opt.kernels.solve.sparse.cpu.loads`. Sources: Gilmore (1962) and Lawler (1963); Charikar
(2000); Boob et al., Flowless: extracting densest subgraphs without flow computations (2020);
`grace_opt.bounds.convexity`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._util.memory import free_memory
from .._util.parameters import integer
from ..kernels.solve.sparse.forms import Graph
from ..problem import Problem, SparseWeights
from ..run import Run
from .convexity import convex_shift
from .of_batch import of_batch

#: Approximate seconds per stored entry of W: of `degree_bound`, and of one round of `load_bound`.
DEGREE_SECONDS, ROUND_SECONDS = 2e-8, 3e-8
#: Fewest rounds of `load_bound` for which it is begun.
LEAST_ROUNDS = 4
#: Rounds of `load_bound`, by level; and the least share of itself by which the bound must rise in `PATIENCE` rounds.
ROUNDS, RTOL, PATIENCE = {"fast": 60, "tight": 1000}, 1e-4, 10
#: Up to how many vertices `plane_bound` is computed, its seconds by n³, and most steps.
LARGEST_FACTORISED, CUBE_SECONDS, MOST_STEPS = {"fast": 5000, "tight": 15_000}, 4e-11, 200
#: Weight of the direction that leaves the plane, relative to W's norm and to the root of n.
PLANE_PENALTY = 10.0
_EPS = float(np.finfo(np.float64).eps)


@of_batch
def degree_bound(problem: Problem) -> Tensor:
    """The k least sums of a vertex with its k - 1 least entries.

    Parameters
    ----------
    problem : Problem
        A flattened batch of one, with sparse W.

    Returns
    -------
    Tensor, shape (1,), float64

    Notes
    -----
    O(edges), times the logarithm of the degree where it exceeds k.

    Examples
    --------
    >>> from scipy.sparse import csr_array
    >>> W, _ = SparseWeights.of(csr_array([[0.0, -1.0, 0.0], [-1.0, 0.0, -3.0], [0.0, -3.0, 0.0]]))
    >>> round(float(degree_bound(Problem.of(W, 2).flatten())), 6)  # the optimum is -6
    -6.0
    """
    from ..kernels.solve.sparse.cpu.loads import rows

    graph, free, k = _parts(problem, "degree_bound")
    cost = np.empty(len(free))
    rows(graph, free, k, cost)
    return _bound(cost, k)


@of_batch
def load_bound(problem: Problem, run: Run | None = None, *, rounds: int = ROUNDS["fast"]) -> Tensor:
    """Minus the k heaviest loads, after edges were divided between their ends.

    Parameters
    ----------
    problem : Problem
        A flattened batch of one, with sparse W.
    run : Run, optional
        Rounds that do not fit into its time are left out.
    rounds : int
        Most passes over the edges; fewer if the bound hardly rises any more.

    Returns
    -------
    Tensor, shape (1,), float64

    Notes
    -----
    O(edges) per round; 8 bytes per edge besides W.

    Examples
    --------
    >>> from scipy.sparse import csr_array
    >>> W, _ = SparseWeights.of(csr_array([[0.0, -1.0, 0.0], [-1.0, 0.0, -3.0], [0.0, -3.0, 0.0]]))
    >>> round(float(load_bound(Problem.of(W, 2).flatten())), 6)  # the optimum is -6
    -6.0
    """
    from ..kernels.solve.sparse.cpu import loads

    run, rounds = Run() if run is None else run, integer("rounds", rounds, at_least=0)
    graph, free, k = _parts(problem, "load_bound")
    shares, load = np.empty(loads.count_shared(graph, free)), np.empty(len(free))
    loads.begin(graph, free, shares, load)
    least, stale, seconds = math.inf, 0, ROUND_SECONDS * len(graph.data)
    for _ in range(rounds if len(shares) else 0):
        if stale >= PATIENCE or run.stopped or not run.has_time(2 * seconds):
            break
        loads.balance(graph, free, shares, load)
        heaviest = -_least_sum(np.where(free, -load, math.inf), k)
        stale = stale + 1 if heaviest > least - RTOL * abs(least) else 0
        least = least if stale else heaviest
    loads.sum_loads(graph, free, shares, load)
    return _bound(-load, k)


@of_batch
def plane_bound(problem: Problem, run: Run | None = None) -> Tensor:
    """The convex relaxation on the plane ``sum x = k``, with W shifted by its least eigenvalue there.

    Parameters
    ----------
    problem : Problem
        A flattened batch of one, with sparse W.
    run : Run, optional
        Ends the steps towards the minimum early, not the factorisation.

    Returns
    -------
    Tensor, shape (1,), float64

    Notes
    -----
    O(n³) and 32 n² bytes, however few edges there are; O(edges) for each of up to 200 Frank-Wolfe steps.

    Examples
    --------
    >>> from scipy.sparse import csr_array
    >>> W, _ = SparseWeights.of(csr_array([[0.0, -1.0, 0.0], [-1.0, 0.0, -3.0], [0.0, -3.0, 0.0]]))
    >>> -9 < float(plane_bound(Problem.of(W, 2).flatten())) <= -6  # the optimum is -6
    True
    """
    run = Run() if run is None else run
    weights = problem.weights.in_form(SparseWeights, "plane_bound")
    free, k = problem.candidates[0], int(problem.k[0])
    m, largest = int(free.sum()), float(weights.largest())
    if k == 0 or largest == 0.0:
        return torch.zeros(1, dtype=torch.float64, device="cpu")
    scale = 2.0 ** max(math.floor(math.log2(largest)), -1000)  # its inverse must be finite
    from scipy.sparse import diags_array

    A = weights.between(free, free) / scale + diags_array(weights.nodes[free].numpy() / scale)
    C = A.toarray()
    C += PLANE_PENALTY * float(np.linalg.norm(C)) / math.sqrt(m) / m  # leaves the plane's own eigenvalues
    shift = convex_shift(C) + 4 * m * _EPS * float(np.linalg.norm(C))
    del C
    size, best = abs(A), -math.inf
    z = np.full(m, k / m)
    for step in range(MOST_STEPS):
        Az, sizes = A @ z + shift * z, size @ z + abs(shift) * z
        gradient, form = 2 * Az, float(z @ Az)
        places = np.argpartition(gradient, k - 1)[:k]
        error = 8 * m * _EPS * (float(z @ sizes) + k * float(sizes.max()) + abs(shift) * k)
        dual = float(gradient[places].sum()) - form - shift * k - error
        rise, best = dual - best, max(best, dual)
        if (step and (rise < RTOL / 10 * abs(best) and step > PATIENCE)) or run.expired():
            break
        towards = -z
        towards[places] += 1.0
        curve = float(towards @ (A @ towards + shift * towards))
        slope = float(gradient @ towards)
        z = np.clip(z + (min(1.0, -slope / (2 * curve)) if curve > 0 else 1.0) * towards, 0.0, 1.0)
        z *= k / z.sum()
    return torch.tensor([best * scale], dtype=torch.float64, device="cpu")


def sparse_bound(problem: Problem, run: Run, level: str) -> Tensor:
    """The best of this file that fits into the time; -inf if nothing does."""
    best = torch.full((1,), -math.inf, dtype=torch.float64, device="cpu")
    entries = problem.weights.numel()
    if not run.stopped and run.has_time(DEGREE_SECONDS * entries):
        best = torch.maximum(best, degree_bound(problem))
    if not run.stopped and run.has_time(LEAST_ROUNDS * ROUND_SECONDS * entries):
        best = torch.maximum(best, load_bound(problem, run, rounds=ROUNDS[level]))
    if may_factorise(problem, level) and not run.stopped and run.has_time(CUBE_SECONDS * problem.n**3):
        best = torch.maximum(best, plane_bound(problem, run))
    return best


def may_factorise(problem: Problem, level: str) -> bool:
    """Whether `plane_bound` takes little enough for this level."""
    return problem.n <= LARGEST_FACTORISED[level] and free_memory() > 32.0 * problem.n**2


def seconds_to_bound(problem: Problem, level: str) -> float:
    """Approximate seconds of `sparse_bound`, if as many rounds are useful as there usually are."""
    edges = (DEGREE_SECONDS + {"fast": 30, "tight": 100}[level] * ROUND_SECONDS) * problem.weights.numel()
    return edges + (CUBE_SECONDS * problem.n**3 if may_factorise(problem, level) else 0.0)


def least_seconds(problem: Problem) -> float:
    """Approximate seconds of the least of `sparse_bound` that says much."""
    return (DEGREE_SECONDS + (LEAST_ROUNDS + 1) * ROUND_SECONDS) * problem.weights.numel()


def _parts(problem: Problem, name: str) -> tuple[Graph, npt.NDArray[np.bool_], int]:
    weights = problem.weights.in_form(SparseWeights, name)
    return weights.graph(), np.ascontiguousarray(problem.candidates[0].numpy()), int(problem.k[0])


def _bound(cost: npt.NDArray[np.float64], k: int) -> Tensor:
    """The sum of the k least, rounded downwards, as a tensor."""
    least = np.partition(cost, k - 1)[:k] if k else cost[:0]
    value = float(least.sum()) - 2.0 * (k + 2) * _EPS * float(np.abs(least).sum())
    return torch.tensor([value], dtype=torch.float64, device="cpu")


def _least_sum(values: npt.NDArray[np.float64], k: int) -> float:
    return float(np.partition(values, k - 1)[:k].sum()) if k else 0.0
