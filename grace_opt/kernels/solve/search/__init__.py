"""Depth-first branch and bound in slices. Compiled for the CPU only; callers import `cpu` where they use it."""

from __future__ import annotations

from ..._shared.operation import Compiled, Operation, trial_of

OPERATION = Operation(
    "search", "the tree search of branch_and_bound", reference=False, cpu=Compiled("always", trial_of(__name__, "cpu"))
)
