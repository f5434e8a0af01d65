r"""Local search: best-improvement 1-swap from any start, batched, until no swap improves.

Maths: exchanging i ∈ S for j ∉ S changes f by :math:`W_{ii} - 2 s_i + W_{jj} + 2 s_j - 2 W_{ij}` with :math:`s = W
1_S`; the best exchange is made, s is updated in O(n), and the search stops when a freshly computed s shows no improving
exchange. Complexity O(n²) per step; compiled on the CPU, and on a GPU, for n up to 256, all steps in one launch of a
Triton kernel. Guarantee: a verified 1-swap-local optimum, never worse than its start: no exchange improves f by more
than what the weights of its own two vertices with S round to (`grace_opt.kernels.exchange`), whatever other weights
there are. Good after MIES: it repairs most of greedy's misses on attention's W. Reference: Ghosh (1996), and any work
on maximum diversity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grace_opt import objective
from grace_opt.errors import OptionError
from grace_opt.kernels.dispatch import use_triton
from grace_opt.kernels.exchange import REFRESH, tolerance
from grace_opt.kernels.threads import in_threads
from grace_opt.problem import Problem
from grace_opt.registry import register
from grace_opt.run import Run
from grace_opt.solution import Result
from grace_opt.starts import starting_masks

#: As in the Triton kernel, which is not imported without need.
LARGEST_ON_CHIP = 256
#: Pairs that the compiled search looks at, per instance, between two looks at the clock: some hundredths of a second.
PAIRS_PER_LOOK = 50_000_000


@dataclass(frozen=True)
class LocalSearchOptions:
    """Options of `local_search`.

    Attributes
    ----------
    start : str, bool mask (..., n), or int indices (..., k)
        Where to start: a method's name, or a choice of k vertices by number (of a graph, places in
        ``list(graph.nodes)``) or as a mask.
    max_steps : int or None
        Largest number of swaps per instance; None: until locally optimal.
    """

    start: Any = "mies"
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.start, str) and self.start == "local_search":
            raise OptionError("start='local_search' would start from itself: name another method, a mask or indices.")
        whole = isinstance(self.max_steps, int) and not isinstance(self.max_steps, bool)
        if self.max_steps is not None and not (whole and self.max_steps >= 0):
            raise OptionError(f"max_steps={self.max_steps!r}: give a non-negative integer, or None.")


@register("local_search", options=LocalSearchOptions, batched=True, guarantee="1-swap-local optimum", compiled=True)
def local_search(problem: Problem, options: LocalSearchOptions, run: Run) -> Result:
    """Improve a start by the best swap of two vertices until none improves."""
    mask = starting_masks(problem, options.start, run)
    run.ctrl_c_stops()
    if use_triton("exchanges", mask.device, _unsupported_reason(problem, options, run)):
        from grace_opt.kernels.triton.greedy import swap_refine

        return Result(swap_refine(problem.W, mask, problem.candidates, torch.iinfo(torch.int32).max))
    if mask.device.type == "cpu":
        return _compiled(problem, mask, options.max_steps, run)
    return _torch(problem, mask, options.max_steps, run)


def _torch(problem: Problem, mask: Tensor, max_steps: int | None, run: Run) -> Result:
    """The reference: every instance that still moves makes one exchange at a time, from sums computed afresh."""
    W, rounding = problem.W.to(torch.float64), tolerance(problem.n)
    limit = torch.zeros_like(problem.k, dtype=torch.bool)
    active = torch.arange(W.shape[0], device=W.device)
    steps = 0
    while active.numel():
        if run.expired() or (max_steps is not None and steps >= max_steps):
            limit[active] = True
            break
        here, chosen, free = W[active], mask[active], problem.candidates[active]
        sums = objective.row_sums(here, chosen)
        size = here.diagonal(dim1=-2, dim2=-1).abs() + 2 * objective.row_sums(here.abs(), chosen)
        change, pair = objective.swap_costs(here, chosen, sums, free).flatten(1).min(-1)
        ends = torch.stack([pair // problem.n, pair % problem.n], -1)
        sure = change + rounding * size.gather(-1, ends).sum(-1) < 0
        doubt = ~sure & (change < 0)
        if doubt.any():
            margin = rounding * size[doubt]
            cost = objective.swap_costs(here[doubt], chosen[doubt], sums[doubt], free[doubt], margin)
            change[doubt], pair[doubt] = cost.flatten(1).min(-1)
            sure = sure | (doubt & (change < 0))
        active, pair = active[sure], pair[sure]
        mask[active, pair // problem.n], mask[active, pair % problem.n] = False, True
        steps += bool(active.numel())
    return Result(mask, limit=limit, stats={"iterations": steps})


def _compiled(problem: Problem, mask: Tensor, max_steps: int | None, run: Run) -> Result:
    """On the CPU: all steps of an instance in one go, but with a look at the clock now and then."""
    from grace_opt.kernels.compiled.exchange import improve

    W, n = problem.W.contiguous().numpy(), problem.n
    chosen, candidates = mask.contiguous().numpy().copy(), problem.candidates.contiguous().numpy()
    done = np.zeros(len(W), dtype=np.int64)
    active = np.arange(len(W))
    steps, limit = 0, np.zeros(len(W), dtype=np.bool_)
    while active.size:
        if run.expired() or (max_steps is not None and steps >= max_steps):
            limit[active] = True
            break
        most = max(PAIRS_PER_LOOK // (n * n), 1)
        if not run.limited:  # whole stretches between fresh sums: the same answer as in one go, and time for Ctrl-C
            most = max(most // REFRESH, 1) * REFRESH
        most = most if max_steps is None else min(most, max_steps - steps)
        part, before = chosen[active], done[active]
        now = before.copy()
        shares = (W if len(active) == len(W) else W[active], part, candidates[active], now)
        in_threads(partial(improve, most, tolerance(n)), shares)
        chosen[active], done[active] = part, now
        steps += most
        active = active[now - before == most]
    stats = {"iterations": int(done.max(initial=0))}
    return Result(torch.from_numpy(chosen), limit=torch.from_numpy(limit), stats=stats)


def _unsupported_reason(problem: Problem, options: LocalSearchOptions, run: Run) -> str | None:
    """Why the GPU's kernel can not take this: once launched, it runs to the end."""
    if problem.n > LARGEST_ON_CHIP:
        return f"n is larger than {LARGEST_ON_CHIP}"
    if options.max_steps is not None or run.limited:
        return "it has no limit of steps or time"
    return None
