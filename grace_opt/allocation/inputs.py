"""Convert and check what users give to `allocate`: losses, costs, least and highest levels, budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._util.array_like import as_tensor
from .._util.arrays import backend_of, to_float_tensor
from .._util.parameters import shown
from ..errors import InfeasibleBudgetError, OptionError, ProblemError
from .budgets import Budgets, nested
from .problem import AllocationProblem, common_unit

#: Sums of losses and of costs must stay below this.
LARGEST_SUM = 2.0**1020


def checked_problem(losses: Any, costs: Any, budget: Any, parts: Any, least: Any, most: Any) -> AllocationProblem:
    """Return a validated problem; families are nested, and every budget can be kept."""
    pairs = _pairs(parts)
    backend = backend_of(losses, costs, budget, least, most, *(each for pair in pairs for each in pair))
    given = as_tensor(losses, "losses")
    integer, f = not given.dtype.is_floating_point, _finite(losses, "losses")
    if f.ndim < 2:
        raise ProblemError(f"losses has shape {tuple(f.shape)}: give one row per group, (n, L) or a batch (..., n, L).")
    if f.numel() == 0:
        raise ProblemError(f"losses is empty, shape {tuple(f.shape)}: give at least one group with one level.")
    *batch, n, L = f.shape
    shape = (-1, n, L)
    c = _finite(costs, "costs")
    shapes = " or ".join(map(str, dict.fromkeys([(L,), (n, L), (*batch, n, L)])))
    c = _expanded(c, (*batch, n, L), "costs", f"the cost of each of the {L} levels, shape {shapes}").reshape(shape)
    f = f.reshape(shape)
    if bool((c < 0).any()):
        at = tuple((c < 0).nonzero()[0].tolist())
        raise ProblemError(
            f"costs holds {float(c[at])} for group {at[1]}, level {at[2]}: costs cannot be negative. Add a constant to "
            "all costs of the group, and to the budget."
        )
    for values, name in ((f, "losses"), (c, "costs")):
        if not bool((values.abs().amax(-1).sum(-1) < LARGEST_SUM).all()):
            raise ProblemError(
                f"{name} sum to {LARGEST_SUM:.3g} or more, too near the end of float64: divide all of them by a "
                f"power of two{', and the budgets too' if name == 'costs' else ''}."
            )
    levels = torch.arange(L, device=f.device)
    low = _level_per_group(least, "least", 0, batch, n, L, f.device).reshape(-1, n, 1)
    high = _level_per_group(most, "most", L - 1, batch, n, L, f.device).reshape(-1, n, 1)
    if bool((low > high).any()):
        b, i, _ = (low > high).nonzero()[0].tolist()
        raise ProblemError(
            f"group {i} may have no level: least={int(low[b, i])} is above most={int(high[b, i])}. Give least <= most."
        )
    admissible = (levels >= low) & (levels <= high)
    families = []
    for number, (labels, limits) in enumerate(pairs):
        families.append(_family(labels, limits, f"parts[{number}]", batch, n, f.device))
    if budget is not None:
        all_of_them = torch.zeros(n, dtype=torch.int64, device=f.device)
        families.append(Budgets.of("budget", all_of_them, _limits(budget, "budget", (*batch, 1), f.device)))
    if not families:
        raise OptionError("allocate needs a budget: give budget=, parts=, or both.")
    problem = AllocationProblem(f, c, admissible, nested(families), common_unit(c), integer, tuple(batch), backend)
    _check_feasible(problem)
    return problem


def _pairs(parts: Any) -> list[tuple[Any, Any]]:
    if parts is None:
        return []
    pairs = list(parts) if isinstance(parts, Sequence) else []
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise OptionError(
            f"parts={shown(parts)}: give a list of pairs (labels, limits), for example parts=[([0, 0, 1], [10, 20])] "
            "for a budget of 10 for groups 0 and 1, and one of 20 for group 2."
        )
    return pairs


def _finite(value: Any, name: str) -> Tensor:
    tensor = to_float_tensor(value, name).to(torch.float64)
    wrong = ~tensor.isfinite()
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise ProblemError(
            f"{name}{at} is {float(tensor[tuple(at)])}: give finite numbers. To forbid a level, use least= and most=, "
            "or a cost above the budget."
        )
    return tensor


def _expanded(tensor: Tensor, shape: tuple[int, ...], name: str, wanted: str) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise ProblemError(f"{name} has shape {tuple(tensor.shape)}: give {wanted}.") from None


def _level_per_group(
    value: Any, name: str, default: int, batch: list[int], n: int, count: int, device: torch.device
) -> Tensor:
    """Least or highest level of each group, (..., n) int64."""
    wanted = f"a level from 0 to {count - 1}, or one per group, shape ({n},)" + (f" or {(*batch, n)}" if batch else "")
    tensor = as_tensor(default if value is None else value, name, wanted)
    if tensor.dtype != torch.int64:
        raise ProblemError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}: give {wanted}.")
    wrong = (tensor < 0) | (tensor >= count)
    if bool(wrong.any()):
        raise ProblemError(f"{name} holds {int(tensor[wrong][0])}: give {wanted}.")
    return _expanded(tensor.to(device), (*batch, n), name, wanted)


def _family(labels: Any, limits: Any, name: str, batch: list[int], n: int, device: torch.device) -> Budgets:
    wanted = f"the number of each group's part, {n} integers from 0 on"
    part = as_tensor(labels, f"the labels of {name}", wanted).to(device)
    if part.dtype != torch.int64 or part.shape != (n,) or bool((part < 0).any()):
        kind = str(part.dtype).removeprefix("torch.")
        raise ProblemError(f"the labels of {name} have shape {tuple(part.shape)} and dtype {kind}: give {wanted}.")
    tensor = as_tensor(limits, f"the limits of {name}")
    if not tensor.ndim and int(part.max()) >= n:
        raise ProblemError(
            f"the labels of {name} reach {int(part.max())}, and there are {n} groups: number the parts 0, 1, 2, ..., "
            "as np.unique(labels, return_inverse=True)[1] does."
        )
    count = tensor.shape[-1] if tensor.ndim else int(part.max()) + 1
    if int(part.max()) >= count:
        raise ProblemError(
            f"{name} has a group in part {int(part.max())} and {count} limits: give one limit for each part, 0 to "
            f"{int(part.max())}."
        )
    return Budgets.of(name, part, _limits(limits, f"the limits of {name}", (*batch, count), device))


def _limits(value: Any, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Limits (B, P); one number, or one per instance or part."""
    tensor = to_float_tensor(value, name).to(device=device, dtype=torch.float64)
    if bool(tensor.isnan().any()):
        raise ProblemError(f"{name} is or holds nan: give numbers; inf means no limit.")
    if name != "budget":
        return _expanded(tensor, shape, name, f"numbers of shape {shape}").reshape(-1, shape[-1]).contiguous()
    batch = shape[:-1]
    wanted = f"one number, or one per instance, shape {batch}" if batch else "one number, as there is one instance"
    return _expanded(tensor, batch, name, wanted).reshape(-1, 1).contiguous()


def _check_feasible(problem: AllocationProblem) -> None:
    """Raise InfeasibleBudgetError unless the cheapest admissible levels keep every budget."""
    least = problem.costs.masked_fill(~problem.admissible, torch.inf).amin(-1)
    for family in problem.families:
        smallest = problem.totals(family, least)
        short = smallest > family.limits
        if bool(short.any()):
            b, part = short.nonzero()[0].tolist()
            at = torch.arange(len(least), device="cpu").reshape(problem.batch_shape) if problem.batch_shape else None
            instance = "" if at is None else f" of instance {tuple((at == b).nonzero()[0].tolist())}"
            whole = family.name == "budget"
            what = "budget" if whole else f"limit {part} of {family.name}"
            raise InfeasibleBudgetError(
                f"{what}={float(family.limits[b, part])!r}{instance} cannot be kept: the cheapest admissible levels "
                f"cost {float(smallest[b, part])!r}. Give at least that, or lower least=.",
                _plain(problem.export(smallest[:, 0] if whole else smallest)),
            )


def _plain(values: Any) -> Any:
    return float(values) if values.ndim == 0 else values
