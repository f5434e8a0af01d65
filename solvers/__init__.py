"""The solvers, one algorithm a file. The folder ``solvers/`` of a checkout is installed as ``grace_opt.solvers``.

Options as a whole, ``solve(W, k, TabuOptions(iterations=500))``, are objects of the classes named here, so that editors
complete them; a method that is not listed works as well, with the class of its own file.
Why it stands at the top level, and what makes both names work: ``docs/adr/0001-layout.md``.
"""

if __name__ != "grace_opt.solvers":
    # Run from a checkout's root, `import solvers` finds this folder under a second name; every solver would then be
    # registered twice, by classes that are not equal to each other.
    raise ImportError(
        f"this folder is the package grace_opt.solvers, not {__name__!r}: "
        "write `import grace_opt.solvers`, or just call grace_opt.solve(W, k, method=...)"
    )

from . import beam, branch_and_bound, drop_greedy, exhaustive, local_search, mies, portfolio, random, sdp, tabu, think
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
    "BeamOptions",
    "BranchAndBoundOptions",
    "DropGreedyOptions",
    "ExhaustiveOptions",
    "LocalSearchOptions",
    "MiesOptions",
    "PortfolioOptions",
    "SdpOptions",
    "TabuOptions",
    "beam",
    "branch_and_bound",
    "drop_greedy",
    "exhaustive",
    "local_search",
    "mies",
    "portfolio",
    "random",
    "sdp",
    "tabu",
    "think",
]
