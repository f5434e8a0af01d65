"""The continuous relaxation of a subproblem. Compiled for the CPU only; callers import `cpu` where they use it."""

from __future__ import annotations

from ..._shared.operation import Compiled, Operation, trial_of

OPERATION = Operation(
    "relaxation",
    "bounding a subproblem by relaxation",
    reference=False,
    cpu=Compiled("always", trial_of(__name__, "cpu")),
)
