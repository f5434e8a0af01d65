"""`in_pieces`: solve problems whose W is in another form as dense ones, a few instances at a time.

When: `SolverSpec.solve`, where W of an instance takes little memory, or where a method needs a tensor. The time that is
left is divided among the pieces.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._util.array_like import as_tensor
from .._util.parameters import plain
from ..problem import Problem
from ..run import Run
from ..solution import SolverResult


def in_pieces(
    problem: Problem, options: Any, run: Run, wanted_by: str, solve: Callable[[Problem, Any, Run], SolverResult]
) -> SolverResult:
    """Solve some instances of a flattened batch at a time, with their W as a tensor, and put the results together.

    Bounds are lowered by what rounding of W's entries may change of f.

    Raises
    ------
    ProblemError
        If W of one instance takes more memory than is free; the message names `wanted_by`.
    """
    count, size = len(problem.k), max(1, problem.weights.whole_at_once())
    run = run.instances(range(count)) if run.numbers is None else run
    results, sizes = [], []
    for first in range(0, count, size):
        rows = torch.arange(first, min(first + size, count), device=problem.k.device)
        part = problem if size >= count else problem.instances(rows)
        its = run if size >= count else _share(run.instances(rows.tolist()), 1 / math.ceil((count - first) / size))
        result = solve(part.dense(wanted_by), _of_rows(options, rows, problem), its)
        if result.lower_bound is not None and not problem.integer:
            below = part.weights.rounding(part.k, part.candidates)
            result = replace(result, lower_bound=result.lower_bound - below)
        results.append(result)
        sizes.append(len(rows))
    return results[0] if len(results) == 1 else merged(results, sizes)


def merged(results: Sequence[SolverResult], sizes: Sequence[int]) -> SolverResult:
    """Put results of parts of a batch together; counters are added up, tensors and lists are joined."""
    device = results[0].mask.device

    def joined(name: str, missing: Any) -> Tensor | None:
        parts = [getattr(result, name) for result in results]
        if all(part is None for part in parts):
            return None
        dtype = next(part.dtype for part in parts if part is not None)
        filled = [
            torch.full((n,), missing, dtype=dtype, device=device) if part is None else part
            for part, n in zip(parts, sizes, strict=True)
        ]
        return torch.cat(filled)

    stats: dict[str, Any] = {}
    for result in results:
        for key, value in result.stats.items():
            if isinstance(value, Tensor):
                stats[key] = torch.cat([stats[key], value]) if key in stats else value
            elif isinstance(value, list):
                stats[key] = [*stats.get(key, []), *value]
            elif isinstance(number := plain(value), int | float):
                stats[key] = stats.get(key, 0) + number
    first = results[0]
    return replace(
        first,
        mask=torch.cat([result.mask for result in results]),
        lower_bound=joined("lower_bound", -math.inf),
        limit=joined("limit", False),
        objective=joined("objective", math.nan),
        stats=stats,
    )


def _share(run: Run, share: float) -> Run:
    """The same run with this share of the time that is left; its patience stays."""
    now = time.monotonic()
    return run if run.deadline == math.inf else replace(run, deadline=now + share * (run.deadline - now))


def _of_rows(options: Any, rows: Tensor, problem: Problem) -> Any:
    """The options for some instances: ``start=`` may have a choice for each."""
    named = is_dataclass(options) and "start" in {field.name for field in fields(options)}
    if not named or isinstance(options.start, str) or len(rows) == len(problem.k):
        return options
    start = as_tensor(options.start, "start", "a choice for each instance")
    each = start.shape[-1] if start.ndim else 0
    if start.ndim < 2 or start.numel() != each * len(problem.k):
        return options  # one choice for all, or a mistake that the method names
    return replace(options, start=start.reshape(-1, each)[rows.to(start.device)])
