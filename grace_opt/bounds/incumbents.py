"""A default incumbent for bounds: greedy, then exchanges until none improves; uses kernels alone.

Bounds that fix vertices need a known choice, and a better choice gives a better bound. `solve` passes the answer of its
method. Code that calls `grace_opt.bounds` directly may pass ``incumbent=``; this is the default.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._util.array_like import as_tensor
from ..errors import OptionError
from ..kernels._shared.threads import split_batch
from ..kernels.solve.exchange.rounding import tolerance
from ..kernels.solve.greedy import greedy_order
from ..problem import Problem


def checked_incumbent(problem: Problem, incumbent: Any) -> Tensor:
    """The incumbent's masks, checked; those of `local_optimum` if it is None, which needs a flattened batch.

    Raises
    ------
    OptionError, ProblemError
        If the incumbent is not a mask of k candidates per instance.
    """
    if incumbent is None:
        return local_optimum(problem)
    mask = as_tensor(incumbent, "incumbent").to(problem.weights.device)
    if mask.dtype != torch.bool or mask.shape != problem.candidates.shape:
        raise OptionError(
            f"incumbent has dtype {mask.dtype} and shape {tuple(mask.shape)}: give bool masks of shape "
            f"{tuple(problem.candidates.shape)}, one choice per instance."
        )
    if bool(((mask & problem.candidates).sum(-1) != problem.k).any() | (mask & ~problem.candidates).any()):
        raise OptionError("incumbent must choose exactly k unprotected vertices in every instance.")
    return mask


def local_optimum(problem: Problem) -> Tensor:
    """Masks (B, n) by the greedy steps of MIES, then the best exchange until none improves, at most n times.

    Examples
    --------
    >>> p = Problem.of(np.array([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]), 2).flatten()
    >>> local_optimum(p).tolist()
    [[True, False, True]]
    """
    from ..kernels.solve.exchange.cpu import improve

    mask = greedy_order(problem.W, None, problem.candidates, problem.k, problem.k_max).mask
    W, chosen = problem.W.detach().cpu().contiguous().numpy(), mask.cpu().contiguous().numpy().copy()
    rounding = tolerance(problem.n)

    def exchange(W: Any, chosen: Any, candidates: Any, done: Any) -> None:
        improve(problem.n, rounding, W, chosen, candidates, done)

    split_batch(exchange, (W, chosen, problem.candidates.cpu().contiguous().numpy(), np.zeros(len(W), np.int64)))
    return torch.from_numpy(chosen).to(problem.W.device)
