"""Coordinate ascent on a relaxation's diagonal. Compiled for the CPU only; callers import `cpu` where they use it."""

from __future__ import annotations

from ..._shared.operation import Compiled, Operation, trial_of

OPERATION = Operation(
    "shift", "the diagonal of a relaxation", reference=False, cpu=Compiled("always", trial_of(__name__, "cpu"))
)
