"""Best-exchange local search: the loop of `local_search`, which chooses the implementation by its time limit."""

from __future__ import annotations

from ..._shared.limits import LARGEST_ON_CHIP
from ..._shared.operation import Compiled, Operation, Triton, trial_of

KERNEL = Triton("exchanges", f"n up to {LARGEST_ON_CHIP}, no limit of steps or time", trial_of(__name__, "gpu"))
OPERATION = Operation(
    "exchange",
    "the search of local_search",
    cpu=Compiled("always", trial_of(__name__, "cpu"), "plain loops"),
    gpu=(KERNEL,),
)
