r"""Local search: from any start, make the best exchange of two vertices until none improves f; batched.

Maths: exchanging i ∈ S for j ∉ S changes f by :math:`W_{ii} - 2 s_i + W_{jj} + 2 s_j - 2 W_{ij}` with :math:`s = W
1_S`; the best exchange is made, s is updated in O(n), and the search stops when a recomputed s shows no improving
exchange. Complexity O(n²) per step. Compiled on the CPU; on a GPU, for n up to 256, all steps run in one launch of a
Triton kernel. For sparse W, a step costs about the degrees of its two vertices, and with weights above 0 those of their
neighbours, times log n. Guarantee: a verified 1-swap-local optimum, never worse than its start: no exchange improves f
by more than the rounding error of its own two vertices' weights with S (`grace_opt.kernels.solve.exchange.rounding`),
whatever the other weights are. On W in factors with more than some thousand vertices, exchanges are made among some
promising ones at a time; the promise is the same, up to the rounding error of f itself. Under constraints, from the
answer of an integer program near the start, exchanges that keep them, of up to two vertices, or sets that are chosen
together, for two (`grace_opt.kernels.solve.constrained.exchange`); on the CPU. Good after MIES: it improves most of
greedy's non-optimal answers on attention's W.
Reference: Ghosh (1996), and any work on maximum diversity.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grace_opt._util.arrays import power_of_two_scale
from grace_opt.errors import OptionError
from grace_opt.kernels._shared.dispatch import use_triton
from grace_opt.kernels._shared.limits import LARGEST_ON_CHIP
from grace_opt.kernels._shared.threads import split_batch
from grace_opt.kernels.solve.columns.reference.exchange import ACCEPTING, BEGINNING, ExchangeState, window_size
from grace_opt.kernels.solve.constrained.exchange import ConstrainedExchanges
from grace_opt.kernels.solve.exchange import KERNEL, reference
from grace_opt.kernels.solve.exchange.rounding import REFRESH, tolerance
from grace_opt.kernels.solve.sparse.exchange import Exchanges
from grace_opt.kernels.solve.sparse.pace import Pace
from grace_opt.problem import Constraints, FactoredWeights, Problem, SparseWeights, Weights
from grace_opt.registry import check_fields, integer, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult
from grace_opt.starts import starting_masks

#: Pairs per instance that the compiled search tries between two looks at the clock: some hundredths of a second.
PAIRS_PER_LOOK = 50_000_000
#: Most exchanges in a sparse graph between two looks at the clock, and at a target.
SPARSE_STEPS_PER_LOOK, SPARSE_STEPS_TO_TARGET = 3_000, 16
#: Approximate seconds per stored entry of sparse W until the first exchange.
SECONDS_TO_BEGIN = 3e-8


@dataclass(frozen=True)
class LocalSearchOptions:
    """Options of `local_search`.

    Attributes
    ----------
    start : str, bool mask (..., n), or int indices (..., k)
        Where to start: a method's name, or a choice of k vertices by number (for a graph, positions in
        ``list(graph.nodes)``) or as a mask.
    max_steps : int or None
        Maximum number of swaps per instance; None: until locally optimal.
    """

    start: Any = "mies"
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.start, str) and self.start == "local_search":
            raise OptionError("start='local_search' would start from itself: name another method, a mask or indices.")
        check_fields(self, integer, "max_steps", at_least=0, optional=True)


@register_solver(
    "local_search",
    options=LocalSearchOptions,
    batched=True,
    guarantee="1-swap-local optimum",
    compiled=True,
    searches=True,
    forms=("sparse", "factored"),
    constraints=True,
)
def local_search(problem: Problem, options: LocalSearchOptions, run: Run) -> SolverResult:
    """Exchange two vertices, the best pair at a time, until no exchange improves f."""
    mask = starting_masks(problem, options.start, run)
    run.ctrl_c_stops()
    run.begin()
    if problem.constraints is not None:
        return _constrained(problem.dense("local_search under constraints"), mask, options.max_steps, run)
    return _improved(problem.weights, problem, mask, options.max_steps, run)


@singledispatch
def _improved(W: Weights, problem: Problem, mask: Tensor, max_steps: int | None, run: Run) -> SolverResult:
    """Search W as a tensor, where its device does it fastest."""
    if use_triton(KERNEL, mask.device, _unsupported_reason(problem, max_steps, run)):
        from grace_opt.kernels.solve.exchange.gpu import swap_refine

        return SolverResult(swap_refine(problem.W, mask, problem.candidates, torch.iinfo(torch.int32).max))
    if mask.device.type == "cpu":
        return _compiled(problem, mask, max_steps, run)
    return _torch(problem, mask, max_steps, run)


def _torch(problem: Problem, mask: Tensor, max_steps: int | None, run: Run) -> SolverResult:
    """Run the torch reference, checking the clock at every step."""
    limit = torch.zeros_like(problem.k, dtype=torch.bool)

    def going_on(steps: int, active: Tensor) -> Tensor:
        if run.watches:
            active = _open(problem, mask, active, limit, run)
        if run.expired() or (max_steps is not None and steps >= max_steps):
            limit[active] = True
            return active[:0]
        return active

    steps = reference.improve(problem.W, mask, problem.candidates, going_on)
    return SolverResult(mask, limit=limit, stats={"iterations": steps})


def _open(problem: Problem, mask: Tensor, active: Tensor, limit: Tensor, run: Run) -> Tensor:
    """The active instances that neither target nor patience ends; `limit` is set for the others."""
    its = run.instances(active.tolist())
    its.note(problem.weights[active].objective(mask[active]).tolist())
    still = torch.tensor(its.open(), dtype=torch.bool, device=active.device)
    limit[active[~still]] = True
    return active[still]


def _compiled(problem: Problem, mask: Tensor, max_steps: int | None, run: Run) -> SolverResult:
    """Run the compiled loop on the CPU: many steps of an instance at once, checking the clock now and then."""
    from grace_opt.kernels.solve.exchange.cpu import improve

    W, n = problem.W.contiguous().numpy(), problem.n
    chosen, candidates = mask.contiguous().numpy().copy(), problem.candidates.contiguous().numpy()
    done = np.zeros(len(W), dtype=np.int64)
    active = np.arange(len(W))
    steps, limit = 0, torch.zeros(len(W), dtype=torch.bool, device="cpu")
    while active.size:
        if run.watches:
            active = _open(problem, torch.from_numpy(chosen), torch.from_numpy(active), limit, run).numpy()
        if run.expired() or (max_steps is not None and steps >= max_steps):
            limit[active] = True
            break
        most = 1 if run.targets else max(PAIRS_PER_LOOK // (n * n), 1)
        if not run.limited and not run.targets:
            # Stop only where sums are recomputed: the same answer as in one go, with pauses for Ctrl-C.
            most = max(most // REFRESH, 1) * REFRESH
        most = most if max_steps is None else min(most, max_steps - steps)
        part, before = chosen[active], done[active]
        now = before.copy()
        shares = (W if len(active) == len(W) else W[active], part, candidates[active], now)
        split_batch(partial(improve, most, tolerance(n)), shares)
        chosen[active], done[active] = part, now
        steps += most
        active = active[now - before == most]
    stats = {"iterations": int(done.max(initial=0))}
    return SolverResult(torch.from_numpy(chosen), limit=limit, stats=stats)


def _constrained(problem: Problem, mask: Tensor, max_steps: int | None, run: Run) -> SolverResult:
    """Make exchanges that keep the constraints, one at a time."""
    rows: Constraints = problem.constraints  # type: ignore[assignment]
    free = problem.candidates[0].cpu().numpy()
    W = problem.W[0].to("cpu", torch.float64).numpy() * np.outer(free, free)  # nothing that cannot be chosen matters
    chosen, steps, limit = mask[0].cpu().numpy(), 0, torch.zeros_like(problem.k, dtype=torch.bool)
    search = ConstrainedExchanges(W / power_of_two_scale(W), chosen, free, rows.units, *rows.integers)
    value, active = problem.weights.objective(mask), torch.zeros(1, dtype=torch.int64, device=mask.device)
    while True:
        if run.watches:
            active = _open(problem, mask, active, limit, run)
        if run.expired() or not len(active) or (max_steps is not None and steps >= max_steps):
            limit[:] = True
            break
        if not search.step():
            break
        found = torch.from_numpy(search.chosen).to(mask.device)[None]
        lower = problem.weights.objective(found)
        if not bool(lower < value):  # sums of weights so far apart that the small ones vanish
            break
        mask, value, steps = found, lower, steps + 1
    return SolverResult(mask, limit=limit, stats={"iterations": steps})


@_improved.register
def _sparse(W: SparseWeights, problem: Problem, mask: Tensor, max_steps: int | None, run: Run) -> SolverResult:
    """Run the compiled loop over edges, in slices that keep a time limit."""
    free, limit = problem.candidates[0], torch.zeros_like(problem.k, dtype=torch.bool)
    search = Exchanges(W.graph(free), mask[0][free].numpy())
    steps, active, pace = 0, torch.zeros(1, dtype=torch.int64, device="cpu"), Pace(SPARSE_STEPS_PER_LOOK)
    while True:
        mask[0, free] = torch.from_numpy(search.x)
        if run.watches:
            active = _open(problem, mask, active, limit, run)
        begun = steps or run.has_time(SECONDS_TO_BEGIN * W.numel())
        if run.expired() or not begun or not len(active) or (max_steps is not None and steps >= max_steps):
            limit[:] = True
            break
        most = min(pace.steps, SPARSE_STEPS_TO_TARGET) if run.targets else pace.steps
        most = most if max_steps is None else min(most, max_steps - steps)
        began = time.monotonic()
        made = search.improve(most)
        pace.took(most, time.monotonic() - began)
        steps += made
        if made < most:
            mask[0, free] = torch.from_numpy(search.x)
            break
    return SolverResult(mask, limit=limit, stats={"iterations": steps})


@_improved.register
def _by_columns(W: FactoredWeights, problem: Problem, mask: Tensor, max_steps: int | None, run: Run) -> SolverResult:
    """Search among promising vertices, small dense problems, until a look at all exchanges finds none to improve f."""
    if max_steps is not None:
        raise OptionError(
            f"max_steps={max_steps} counts single exchanges, and on {W.n:,} vertices in factors local_search makes "
            "many at a time: leave it out, or give time_limit=."
        )
    limit, steps, seconds = torch.zeros_like(problem.k, dtype=torch.bool), 0, W.product_seconds() / len(mask)
    inner = replace(run.beside_search(), callback=None, numbers=None).leaving(ACCEPTING * seconds)
    for b in range(len(mask)):
        its = run.instance(b)
        if not its.has_time(BEGINNING * seconds):
            limit[b] = True
            continue
        choice = ExchangeState(W[b], mask[b], problem.candidates[b])
        vertices: Tensor | None = choice.promising(window_size())
        while vertices is not None and len(vertices):
            its.note([choice.value])
            if not its.has_time(ACCEPTING * seconds):
                vertices = None
                break
            block, k, inside = choice.window(vertices)
            part = Problem.of(block[None], k, check=False)
            found = local_search(part, LocalSearchOptions(start=inside[None]), inner)
            steps += int(found.stats["iterations"])
            if choice.accept(vertices, found.mask[0]):
                vertices = choice.promising(window_size())
                continue
            before, vertices = (
                vertices,
                choice.improving(window_size(), partial(_is_late, its, ACCEPTING * seconds)),
            )
            if vertices is not None and torch.equal(before, vertices):
                break  # what is left to gain is less than the rounding of f
        limit[b], mask[b] = vertices is None, choice.mask
        its.note([choice.value])
    return SolverResult(mask, limit=limit, stats={"iterations": steps})


def _is_late(run: Run, seconds: float) -> bool:
    """Whether a step of so many seconds would not fit."""
    return not run.has_time(seconds)


def _unsupported_reason(problem: Problem, max_steps: int | None, run: Run) -> str | None:
    """Why the GPU kernel cannot do this, or None; once launched, it runs to the end."""
    if problem.n > LARGEST_ON_CHIP:
        return f"n is larger than {LARGEST_ON_CHIP}"
    if max_steps is not None or run.limited or run.watches:
        return "it cannot stop at a limit of steps or time, or at a target"
    return None
