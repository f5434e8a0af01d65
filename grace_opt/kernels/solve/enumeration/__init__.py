"""Visit every k-subset in revolving-door order. Compiled for the CPU only; callers import `cpu` where they use it."""

from __future__ import annotations

from ..._shared.operation import Compiled, Operation, trial_of

OPERATION = Operation(
    "enumeration",
    "the enumeration of exhaustive",
    reference=False,
    cpu=Compiled("always", trial_of(__name__, "cpu")),
)
