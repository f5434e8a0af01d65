"""W by its edges: greedy choices, exchanges, sums and bounds, in loops over edges; compiled for the CPU only.

Callers import `cpu` where they use it. `forms.Graph` is what they take; `grace_opt.problem.sparse` makes one.
"""

from __future__ import annotations

from ..._shared.operation import Compiled, Operation, trial_of

OPERATION = Operation(
    "sparse",
    "greedy, exchanges and bounds over the edges of a sparse W",
    reference=False,
    cpu=Compiled("always", trial_of(__name__, "cpu")),
)
