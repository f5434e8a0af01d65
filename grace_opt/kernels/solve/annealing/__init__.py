"""Simulated annealing over exchanges. Compiled for the CPU only; `moves` has what callers use."""

from __future__ import annotations

from ..._shared.operation import Compiled, Operation, trial_of

OPERATION = Operation(
    "annealing",
    "the search of annealing",
    reference=False,
    cpu=Compiled("always", trial_of(__name__, "cpu")),
)
