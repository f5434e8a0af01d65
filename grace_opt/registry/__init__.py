"""The solver registry: methods by name, ours and those of other packages, and the checks of what they hand back."""

from .methods import ENTRY_POINT_GROUP, NoOptions, Solver, SolverSpec, get, register, specs, unregister

__all__ = [
    "ENTRY_POINT_GROUP",
    "NoOptions",
    "Solver",
    "SolverSpec",
    "get",
    "register",
    "specs",
    "unregister",
]
