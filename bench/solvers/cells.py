"""`Cell`, one measurement to make; its record on disk; and the recomputation of f that every answer goes through.

A record is written aside and renamed, and carries a digest of itself: a file that was cut short, edited, or belongs to
another cell is measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: A time limit counts as kept within 10 % and this many seconds.
LIMIT_SLACK = 0.2


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes
    ----------
    suite, instance, method : str
        `instance` names a file below the data folder (``folder/file.npz#3``: the matrix with that number, ``#all``: the
        whole batch) or a generator (``random:mdp:5000:500:0``).
    ks : tuple of int
        One k; for a batch, every k that each matrix is solved with.
    seed : int
    limit : float or None
        Seconds.
    repeats : int
        The median of so many calls is the time.
    """

    suite: str
    instance: str
    ks: tuple[int, ...]
    method: str
    seed: int = 0
    limit: float | None = None
    repeats: int = 1

    def path(self, runs: Path) -> Path:
        """Where the record stands; `read` tells cells apart that share a name by accident."""
        sizes = "+".join(map(str, self.ks))
        name = f"{self.instance} k{sizes} s{self.seed} t{'-' if self.limit is None else f'{self.limit:g}'}"
        return runs / self.suite / _plain(self.method) / f"{_plain(name)}.json"

    def as_dict(self) -> dict[str, Any]:
        """The cell as JSON has it."""
        return {**dataclasses.asdict(self), "ks": list(self.ks)}


def write(runs: Path, cell: Cell, answer: dict[str, Any]) -> None:
    """Write the record aside and rename it."""
    path = cell.path(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**finite(answer), "cell": cell.as_dict()}
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps({**record, "digest": _digest(record)}, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def read(runs: Path, cell: Cell) -> dict[str, Any] | None:
    """The record of `cell`, or None where there is none to be trusted."""
    record = read_file(cell.path(runs))
    return record if record is not None and record["cell"] == cell.as_dict() else None


def read_file(path: Path) -> dict[str, Any] | None:
    """A whole and untouched record, or None."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, cut short, or not text at all
        return None
    if not isinstance(record, dict) or not isinstance(record.get("cell"), dict):
        return None
    digest = record.pop("digest", None)
    return record if digest == _digest(record) else None


def read_all(runs: Path) -> Iterator[dict[str, Any]]:
    """Every trusted record below `runs`, in the order of the paths."""
    for path in sorted(runs.glob("*/*/*.json")):
        if (record := read_file(path)) is not None:
            yield record


def check(W: Array, k: int, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with f recomputed from its vertices, and its status taken back where it does not hold.

    Parameters
    ----------
    W : ndarray (n, n)
    k : int
    answer : dict
        What a worker returned: ``status``, ``indices``, ``claimed``, ``bound``, …

    Returns
    -------
    dict
        With ``objective`` (`math.fsum` over W in float64: one rounding, at the end) and ``tolerance``, within which two
        proved optima must agree.
    """
    trace = abs(float(np.trace(W)))
    indices = answer.get("indices")
    if indices is None:
        return {**answer, "objective": None, "tolerance": 1e-9 * trace}
    chosen = sorted({int(i) for i in indices})
    if len(chosen) != k or len(indices) != k or (chosen and not 0 <= chosen[0] <= chosen[-1] < len(W)):
        return {**answer, "status": "failed", "objective": None, "message": f"{len(chosen)} vertices where k = {k}"}
    inside = W[np.ix_(chosen, chosen)].astype(np.float64)
    f, size = math.fsum(inside.ravel().tolist()), float(np.abs(inside).sum())
    checked = {**answer, "indices": chosen, "objective": f, "tolerance": 1e-6 * abs(f) + 1e-9 * max(abs(f), trace)}
    claimed, bound = answer.get("claimed"), answer.get("bound")
    if claimed is not None and abs(claimed - f) > 1e-6 * abs(f) + 1e-9 * max(size, trace):
        checked["note"] = f"the solver said {claimed!r}, its vertices weigh {f!r}"
    if answer["status"] == "proved" and bound is not None and f - bound > _slack(W, f, trace):
        # Proved for the objective that the solver had in mind, not for the one that its vertices have.
        checked |= {"status": "limit", "message": f"called proved, but f - bound = {f - bound:.3g}"}
    return checked


def kept_limit(limit: float | None, seconds: float) -> bool:
    """Whether a call kept its time limit; NaN, of one that failed, is no time over it."""
    return limit is None or not seconds > 1.1 * limit + LIMIT_SLACK


def spread(things: Sequence[Any], count: int | None) -> list[Any]:
    """`count` of them, evenly spaced; all of them for None."""
    if count is None or count >= len(things):
        return list(things)
    return [things[round(i * (len(things) - 1) / max(count - 1, 1))] for i in range(count)]


def finite(value: Any) -> Any:
    """The value with infinities and NaN, which JSON lacks, as None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _slack(W: Array, f: float, trace: float) -> float:
    """What may lie between f and a bound that proves it; solvers stop at 1e-9 or one step, and round."""
    step = 1.0 if np.issubdtype(W.dtype, np.integer) else 0.0
    return max(1e-6 * abs(f), 1e-8 * trace, step)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", name)
