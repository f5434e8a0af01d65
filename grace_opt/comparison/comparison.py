"""`Comparison`: what `compare` returns, several methods' answers to one problem, as a table, a DataFrame or JSON.

All methods solve the same instance, so a bound proved by one of them holds for all. Gaps in a comparison are relative
to the best bound of all methods; `Solution.gap` is relative to the method's own. Inside, objectives and bounds have the
sign in which they are minimised; users get theirs. Tables are built on rich.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from .._util.json_values import to_json_text, to_jsonable, to_numpy
from .._util.optional import require
from ..errors import OptionError, SolverError, UnknownSolverError
from ..problem import Problem
from ..solution import Solution, Status, contradicted, labels_of, relative_gap, tolerance

if TYPE_CHECKING:
    from rich.table import Table


#: What the best answer to a batch takes from the best answer to each instance.
PICKED = ("mask", "indices", "objective", "lower_bound", "upper_bound")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Sequence[Solution]):
    """The solutions of several methods, as an immutable sequence in the order given.

    Index it by number, by name (``comparison["mies"]``) or by slice; ``len``, ``in`` and iteration work too.
    ``print(comparison)`` shows the table.

    Attributes
    ----------
    solutions : tuple of Solution
    left_out : mapping
        Methods that were not run, or did not finish, each with the reason.
    interrupted : bool
        Whether Ctrl-C stopped the comparison before it was complete.

    Examples
    --------
    >>> import grace_opt
    >>> both = grace_opt.compare([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]], 2, ["mies", "exhaustive"])
    >>> both
    <Comparison of mies, exhaustive: f = 5 by exhaustive, OPTIMAL>
    >>> float(both["mies"].objective), float(both.best_bound), float(both.gaps("mies"))
    (8.0, 5.0, 0.375)
    """

    solutions: tuple[Solution, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "solutions", tuple(self.solutions))
        object.__setattr__(self, "left_out", MappingProxyType(dict(self.left_out)))

    def __reduce__(self) -> Any:  # a mappingproxy cannot be pickled or copied
        return Comparison, (self.solutions, dict(self.left_out), self.interrupted)

    def __len__(self) -> int:
        return len(self.solutions)

    def __iter__(self) -> Iterator[Solution]:
        return iter(self.solutions)

    def __contains__(self, item: object) -> bool:
        return item in self.methods if isinstance(item, str) else any(item is s for s in self.solutions)

    @overload
    def __getitem__(self, at: int | str) -> Solution: ...
    @overload
    def __getitem__(self, at: slice) -> Comparison: ...
    def __getitem__(self, at: int | str | slice) -> Solution | Comparison:
        if isinstance(at, slice):
            return Comparison(self.solutions[at], self.left_out, self.interrupted)
        if not isinstance(at, str):
            return self.solutions[at]
        for solution in self.solutions:
            if solution.method == at:
                return solution
        why = f" It was left out: {self.left_out[at]}" if at in self.left_out else ""
        raise UnknownSolverError(f"no solution by {at!r} here, but by {', '.join(self.methods) or 'none'}.{why}")

    def __repr__(self) -> str:
        if not self.solutions:
            return "<Comparison of no methods>"
        left = "".join(f"; {note}" for note in self._notes())
        if self._shape:
            optimal = int(self._gaps.min(0).values.eq(0).sum())
            what = f"{self._flat[0].shape[0]} instances, {optimal} solved to proved optimality"
        else:
            best = self.best
            what = f"f = {float(best.objective):.9g} by {best.method}, {best.status.name}"
        return f"<Comparison of {', '.join(self.methods)}: {what}{left}>"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None, force_terminal=False, force_jupyter=False)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip()

    def __rich__(self) -> Table:
        return self.table()

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> Any:
        return self.table()._repr_mimebundle_(*args, **kwargs)  # what notebooks ask for

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods, in order."""
        return tuple(s.method for s in self.solutions)

    @property
    def best_bound(self) -> Any:
        """The best certified bound of all methods, shape (...), as numpy or torch like W; infinite if none has one.

        No choice is better: a lower bound, or with ``maximize=True`` an upper one.
        """
        return self._export(self._signed(self._bound))

    def gaps(self, method: int | str) -> Any:
        """Return the gap from one method's answers to `best_bound`, shape (...): 0 if optimal, inf without a bound."""
        solution = self[method]
        return self._export(self._gaps[next(i for i, s in enumerate(self.solutions) if s is solution)])

    @property
    def best(self) -> Solution:
        """The answer with the best objective; of equal ones, one that is proved, else the first.

        For a batch, the best answer to each instance, combined into one Solution with ``best_bound`` as its bound.
        ``stats["methods"]`` names the method for each instance.
        """
        bound = self._bound  # an empty comparison has none, and says so
        f = torch.stack(self._flat)
        optimal = torch.from_numpy(
            np.array([[s is Status.OPTIMAL for s in np.ravel(x.status)] for x in self.solutions])
        )
        candidates = f == f.min(0).values
        order = torch.arange(len(f), device=f.device).unsqueeze(-1) - len(f) * optimal.int()
        pick = order.masked_fill(~candidates, len(f)).argmin(0)
        if not self._shape:
            return self.solutions[int(pick[0])]
        names = np.array(self.methods, dtype=object)[pick.numpy()]
        certified = "upper_bound" if self._maximize else "lower_bound"
        picked = {name: self._picked(name, pick) for name in PICKED}
        labels = self._problem.labels
        return dataclasses.replace(
            self.solutions[0],
            **picked | {certified: self._export(self._signed(bound))},
            gap=self._export(self._gaps[pick, torch.arange(len(pick), device=pick.device)]),
            status=np.stack([np.ravel(s.status) for s in self.solutions])[pick.numpy(), np.arange(len(pick))].reshape(
                self._shape
            ),
            labels=None if labels is None else labels_of(picked["indices"].tolist(), labels),
            method="best",
            options={},
            stats={"time": sum(s.stats["time"] for s in self.solutions), "methods": names.reshape(self._shape)},
        )

    def verify(self) -> Comparison:
        """Verify every solution, and that no method's bound contradicts another's answer; return the comparison.

        Raises
        ------
        SolverError
            The message names the methods that disagree.
        """
        for solution in self.solutions:
            solution.verify()
        for solution in self.solutions:
            # Summed here: without the checks, f was summed in W's own precision.
            f = self._signed(self._problem.flatten().weights.objective(self._mask(solution)).cpu())
            if wrong := contradicted(self._bound, f).nonzero().flatten().tolist():
                b = wrong[0]
                by = max(self.solutions, key=lambda s: float(_bound_of(s)[b]))
                raise SolverError(
                    f"{by.method} claims that no answer to instance {b} is {'above' if self._maximize else 'below'} "
                    f"{float(self._signed(self._bound)[b]):.17g}, but {solution.method} has f = "
                    f"{float(self._signed(f)[b]):.17g}: one of these methods is wrong."
                )
        return self

    def table(self, *, per_instance: bool = False) -> Table:
        """Return a rich table: objective, gap to the best bound of all methods, certificate, status, time and nodes.

        Parameters
        ----------
        per_instance : bool
            For a batch: show the first 20 instances one by one, instead of one row per method.
        """
        from .table import comparison_table

        nodes = [None if (c := s.stats.get("nodes")) is None else int(to_numpy(c).sum()) for s in self.solutions]
        return comparison_table(
            self.rows(), self._labels(), nodes, self._notes(), per_instance=per_instance, maximize=self._maximize
        )

    def _labels(self) -> list[str]:
        """The methods' names; a method that appears several times also gets the options that differ."""
        labels = []
        for solution in self.solutions:
            others = [other.options for other in self.solutions if other.method == solution.method]
            differ = [name for name in solution.options if len({repr(options[name]) for options in others}) > 1]
            labels.append(" ".join([solution.method, *(f"{name}={solution.options[name]!r}" for name in differ)]))
        return labels

    def _notes(self) -> list[str]:
        wrong = [s.method for s, rows in zip(self.solutions, self._contradicted, strict=True) if bool(rows.any())]
        notes = [f"contradicted by another's answer: {', '.join(dict.fromkeys(wrong))}"] if wrong else []
        notes += [f"left out: {', '.join(self.left_out)}"] if self.left_out else []
        return notes + ["interrupted"] * self.interrupted

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per method and instance, as in `to_frame`."""
        rows: list[dict[str, Any]] = []
        if not self.solutions:
            return rows
        best = self._signed(self._bound)
        each = zip(self.solutions, self._flat, self._gaps, self._contradicted, strict=True)
        for solution, f_flat, gaps, wrong in each:
            objectives = self._signed(f_flat)
            nodes = solution.stats.get("nodes")
            counts = np.ravel(to_numpy(nodes)) if nodes is not None else np.array([])
            for b, (f, gap) in enumerate(zip(objectives.tolist(), gaps.tolist(), strict=True)):
                rows.append(
                    {
                        "method": solution.method,
                        "instance": b,
                        "n": self._problem.n,
                        "k": int(self._problem.k[b]),
                        "objective": f,
                        "lower_bound": float(np.ravel(to_numpy(solution.lower_bound))[b]),
                        "upper_bound": float(np.ravel(to_numpy(solution.upper_bound))[b]),
                        "best_bound": float(best[b]),
                        "gap": gap,
                        "optimal": gap == 0,
                        "certified": bool(np.isfinite(gap)),
                        "contradicted": bool(wrong[b]),
                        "status": np.ravel(np.asarray(solution.status, dtype=object))[b].name,
                        "time": float(solution.stats["time"]),
                        "nodes": (counts[b if counts.size == len(objectives) else 0].item() if counts.size else None),
                        "seed": solution.seed,
                    }
                )
        return rows

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per method and instance.

        Columns: method, instance, n, k, objective, lower_bound and upper_bound (the method's own; one of them is the
        objective), best_bound and gap (of all methods), optimal, certified, contradicted (whether a method has a better
        answer than this one's bound allows), status, time, nodes (for the whole batch, unless the method counts per
        instance), seed.

        Raises
        ------
        OptionError
            If pandas is not installed: it comes with ``pip install ".[bench]"``.
        """
        return require("pandas", "bench", "to_frame()").DataFrame(self.rows())

    def values(self) -> dict[str, Any]:
        """Plain values: the solutions with their gaps to the best bound, that bound, and the methods left out."""
        bound = self.best_bound if self.solutions else None
        return {
            "solutions": [
                s.to_dict() | {"gap_to_best_bound": to_jsonable(self._export(gaps))}
                for s, gaps in zip(self.solutions, self._gaps if self.solutions else (), strict=True)
            ],
            "best_bound": to_jsonable(bound),
            "left_out": dict(self.left_out),
            "interrupted": self.interrupted,
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """`values` as JSON text, with null for infinities; also written to `path`, atomically, if given.

        Raises
        ------
        FileError
            If the file cannot be written there.
        """
        return to_json_text(self.values(), path)

    @cached_property
    def _problem(self) -> Problem:
        if not self.solutions or self.solutions[0].problem is None:
            raise OptionError("this comparison has no solution from `compare`: there is nothing to choose from.")
        return self.solutions[0].problem.flatten()

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.solutions[0].status))

    @property
    def _maximize(self) -> bool:
        return any(s.maximize for s in self.solutions)

    def _signed(self, values: Tensor) -> Tensor:
        """Objectives or bounds in the user's sign; or, of the user's, to be minimised."""
        return 0.0 - values if self._maximize else values

    @cached_property
    def _flat(self) -> list[Tensor]:
        """The objective of each solution, to be minimised."""
        return [self._signed(torch.from_numpy(_flattened(s.objective))) for s in self.solutions]

    @cached_property
    def _bound(self) -> Tensor:
        _ = self._problem  # an empty comparison has no bound
        return torch.stack([_bound_of(s) for s in self.solutions]).max(0).values

    @cached_property
    def _contradicted(self) -> list[Tensor]:
        """For each solution, the instances to which a method has a better answer than its bound allows."""
        if not self.solutions:
            return []
        best = torch.stack(self._flat).min(0).values
        return [contradicted(_bound_of(s), best) for s in self.solutions]

    @cached_property
    def _gaps(self) -> Tensor:
        problem, bound = self._problem, self._bound.to(self._problem.weights.device)
        gaps = []
        for solution, f in zip(self.solutions, (f.to(bound) for f in self._flat), strict=True):
            mask = self._mask(solution)
            above = (f - bound) / torch.maximum(f.abs(), bound.abs())  # another method's bound: one of the two is wrong
            gap = torch.where(f < bound, above, relative_gap(problem, mask, f, bound))
            same = (f - bound).abs() <= tolerance(problem, mask, f)
            gaps.append(torch.where(same, 0.0, gap).cpu())
        return torch.stack(gaps)

    def _mask(self, solution: Solution) -> Tensor:
        return torch.as_tensor(solution.mask, device=self._problem.weights.device).reshape(-1, self._problem.n)

    def _picked(self, name: str, pick: Tensor) -> Any:
        stacked = np.stack([to_numpy(getattr(s, name)).reshape(len(pick), -1) for s in self.solutions])
        chosen = stacked[pick.numpy(), np.arange(len(pick))]
        return self._export(torch.from_numpy(chosen), *np.shape(getattr(self.solutions[0], name))[len(self._shape) :])

    def _export(self, flat: Tensor, *last: int) -> Any:
        return self._problem.backend.export(flat.reshape((*self._shape, *last)))


def _flattened(values: Any) -> np.ndarray[Any, Any]:
    return np.array(to_numpy(values), dtype=np.float64).reshape(-1)


def _bound_of(solution: Solution) -> Tensor:
    """The lower bound of a solution, as if minimised: not f, even if proved, which it is only up to rounding."""
    return torch.from_numpy(0.0 + (-1.0 if solution.maximize else 1.0) * _flattened(solution.bound))
