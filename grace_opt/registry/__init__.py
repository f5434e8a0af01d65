"""The solver registry: methods by name, ours and those of other packages, and checks of what they return.

Also, for options classes of solvers: `check_fields` with `integer`, `number`, `flag` and `choice`.
"""

from .._util.parameters import check_fields, choice, flag, integer, number
from .methods import (
    ENTRY_POINT_GROUP,
    MethodOptions,
    NoOptions,
    Solver,
    SolverSpec,
    get,
    register_solver,
    specs,
    unregister,
)
from .options import changed, chosen

__all__ = [
    "ENTRY_POINT_GROUP",
    "MethodOptions",
    "NoOptions",
    "Solver",
    "SolverSpec",
    "changed",
    "check_fields",
    "choice",
    "chosen",
    "flag",
    "get",
    "integer",
    "number",
    "register_solver",
    "specs",
    "unregister",
]
