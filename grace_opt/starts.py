"""`starting_masks`: the meaning of ``start=``, for every method that improves a given choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import objective, registry
from ._util.array_like import as_tensor
from ._util.vertices import vertex_mask
from .errors import OptionError, SolverError
from .problem import Problem
from .problem.constraints import Constraints, UndecidedError, find_choice
from .run import Run
from .solution import check_mask

#: Most integer programs that `near` solves, and seconds of one at most, and at least.
LINEARISED, SECONDS, LEAST_SECONDS = 4, 10.0, 1.0


def starting_masks(problem: Problem, start: Any, run: Run) -> Tensor:
    """Masks to start from: a method's answers, or the user's own choice, checked.

    Parameters
    ----------
    problem : Problem
        A flattened batch.
    start : str, bool mask (..., n), int indices (..., k), or a list of names
        A registered method's name (where there are constraints that it does not take, a choice near its answer that
        keeps them), or a choice of k vertices, for one instance or for each; required vertices may be
        left out. Numbers are positions, as in `Solution.indices`, of labelled vertices too; names are taken if they
        are text.
    run : Run
        Passed on to the method.

    Returns
    -------
    Tensor (B, n), bool
        A new tensor, which the caller may change.

    Raises
    ------
    OptionError
        If indices are out of range or repeated, a mask does not have one entry per vertex, or the wrong number of
        vertices is chosen, or protected ones, or constraints are broken.
    SolverError
        If no choice that keeps the constraints is found, nor shown to be impossible.

    Notes
    -----
    O(n) per instance, plus the method's own work.

    Examples
    --------
    >>> p = Problem.of([[2.0, 0.0], [0.0, 1.0]], 1).flatten()
    >>> starting_masks(p, [0], Run()).tolist(), starting_masks(p, "mies", Run()).tolist()
    ([[True, False]], [[False, True]])
    """
    if isinstance(start, str):
        spec = registry.get(start)
        if problem.constraints is not None and not spec.constraints:
            free = replace(problem, constraints=None)
            return near(problem, spec.solve(free, spec.make_options({}), run).mask, run)
        return spec.solve(problem, spec.make_options({}), run).mask.clone()
    n, batch, device = problem.n, len(problem.k), problem.weights.device
    wanted = f"a method's name, vertices by number from 0 to {n - 1}, or a bool mask (..., {n})"
    if problem.labels is not None:
        wanted += ", or names; numbers count the nodes or labels, as Solution.indices does"
        named = getattr(getattr(start, "dtype", None), "kind", "") in tuple("UO")
        if named or (isinstance(start, list | tuple | set) and any(isinstance(each, str) for each in start)):
            start = vertex_mask(start, "start", problem.labels, (), n, device)
    given = as_tensor(start, "start", wanted)
    shape, twice = tuple(given.shape), []
    if given.dtype != torch.bool:
        if given.dtype.is_floating_point and given.numel():  # an empty list has no numbers to tell a kind by
            kind = str(given.dtype).removeprefix("torch.")
            raise OptionError(f"start has dtype {kind}: give {wanted}.")
        if given.numel() and not (int(given.min()) >= -1 and int(given.max()) < n):
            raise OptionError(
                f"start holds vertex {int(given[(given < -1) | (given >= n)][0])}: vertices are 0 to {n - 1}."
            )
        ordered = given.sort(-1).values if given.dim() else given[None]
        twice = ordered[..., 1:][(ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)].tolist()
        given = objective.mask_from_indices(given.to(torch.int64), n)
    rows = given.numel() // n
    if given.shape[-1:] != (n,) or rows not in (1, batch):
        each = f", one choice or one for each of {batch} instances" if batch > 1 else ", one choice"
        raise OptionError(f"start has shape {shape}: give {wanted}{each}.")
    if twice:
        raise OptionError(f"start names vertex {twice[0]} twice: give each vertex once.")
    mask = given.to(device).reshape(rows, n).expand(problem.candidates.shape).clone()
    if problem.required is not None:  # chosen already; a mask from another solver is without them
        mask &= ~problem.required
    try:
        check_mask(problem, mask, "start=")
    except SolverError as error:  # here it is the caller's, not a method's
        raise OptionError(str(error)) from None
    if run.watches:
        run.note(problem.weights.objective(mask).tolist())
    return mask


def near(problem: Problem, mask: Tensor, run: Run) -> Tensor:
    r"""A choice that keeps the constraints, near one that need not, of least f to first order.

    Linearised at x: :math:`f(y) \approx f(x) + 2 (y - x)^\top W x`, with node weights kept as they are. The integer
    program is solved there, then where it led, as long as f falls (Frank & Wolfe's method, with whole steps).

    Parameters
    ----------
    problem : Problem
        A flattened batch of one instance, with constraints.
    mask : Tensor (1, n), bool
    run : Run
        After its time, no further program is solved; one gets `LEAST_SECONDS` at least.

    Raises
    ------
    SolverError
        If none is found, nor shown to be impossible.
    """
    rows: Constraints = problem.constraints  # type: ignore[assignment]
    candidates, k, device = problem.candidates[0].cpu(), int(problem.k[0]), mask.device
    W = problem.dense("a start that keeps the constraints").W[0].to("cpu", torch.float64)
    best, least, x = None, np.inf, mask[0].cpu()
    for _ in range(LINEARISED):
        slopes = W.diagonal() + 2.0 * (W @ x.double() - W.diagonal() * x)
        scale = float(slopes.abs().max())
        try:
            seconds = min(SECONDS, max(run.left(), LEAST_SECONDS))
            found = find_choice(rows, k, candidates, (slopes / scale if scale > 0 else slopes).numpy(), seconds)
        except UndecidedError:
            found = None
        if found is None:
            break
        value = float(problem.weights.objective(found[None].to(device))[0])
        if not value < least:
            break
        best, least, x = found, value, found
        if run.expired():
            break
    if best is None:
        raise SolverError(
            "no choice that keeps the constraints was found, though there may be one: give one with start=, or use "
            "method='exhaustive'."
        )
    return best[None].to(device)
