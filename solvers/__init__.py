"""The solvers, one file per algorithm. The folder ``solvers/`` of a checkout is installed as ``grace_opt.solvers``.

Importing the package imports every file and folder in it: to register a new method, add its file. Names that begin
with an underscore are skipped. The options classes, as in ``solve(W, k, TabuOptions(iterations=500))``, are imported
here for editors to complete; a class that is not listed works too, imported from its own file. Why the folder is at the
top level, and how both names work: ``docs/adr/0001-layout.md``.
"""

import importlib
import pkgutil

if __name__ != "grace_opt.solvers":
    # In a checkout's root, `import solvers` finds this folder under a second name; every solver would then be
    # registered twice, with classes that are not equal to each other.
    raise ImportError(
        f"this folder is the package grace_opt.solvers, not {__name__!r}: "
        "write `import grace_opt.solvers`, or just call grace_opt.solve(W, k, method=...)"
    )

_modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
for _name in _modules:
    importlib.import_module(f"{__name__}.{_name}")

# ruff: noqa: E402 (below the loop, so that methods are registered and listed by name)
# Imported again for editors and type checkers, which do not run the loop.
from .annealing import AnnealingOptions
from .beam import BeamOptions
from .branch_and_bound.search import BranchAndBoundOptions
from .drop_greedy import DropGreedyOptions
from .exhaustive import ExhaustiveOptions
from .local_search import LocalSearchOptions
from .mies import MiesOptions
from .portfolio import PortfolioOptions
from .sdp import SdpOptions
from .tabu import TabuOptions

__all__ = [
    "AnnealingOptions",
    "BeamOptions",
    "BranchAndBoundOptions",
    "DropGreedyOptions",
    "ExhaustiveOptions",
    "LocalSearchOptions",
    "MiesOptions",
    "PortfolioOptions",
    "SdpOptions",
    "TabuOptions",
]
__all__ += _modules
