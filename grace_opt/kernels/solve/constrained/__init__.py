"""Search under linear rows: every subset, exchanges, and the tree, of choices that keep groups, pairs and budgets.

Compiled for the CPU only; callers import `cpu` and `exchange` where they use them.
"""

from __future__ import annotations

from ..._shared.operation import Compiled, Operation, trial_of

OPERATION = Operation(
    "constrained",
    "the searches of exact methods and local_search under constraints",
    reference=False,
    cpu=Compiled("always", trial_of(__name__, "cpu")),
)
