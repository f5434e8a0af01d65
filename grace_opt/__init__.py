"""grace_opt: minimum-weight k-vertex induced subgraphs, certified, and smaller key caches made of them.

``grace_opt.solve(W, k, method="mies")`` is the whole interface for researchers; `MaskProvider` turns queries and keys
into channel masks, and ``grace_opt.hf`` applies them to Hugging Face models. The rooms of the code are listed in
``docs/map.md``. Source: GRACE (arXiv 2604.16983).
"""

from ._util import loading as _loading  # noqa: F401 - before anything that takes long to import
from ._util.moved import refuse_moved as _refuse_moved
from .allocation import Allocation, Frontier, allocate
from .api import compare, methods, solve
from .attention.masks import ChannelMask
from .attention.provider import MaskProvider
from .comparison import Comparison
from .errors import GraceError
from .problem import FactoredWeights, Problem, symmetrize
from .registry import register_solver
from .solution import Solution, SolverResult, Status

__version__ = "0.1.0"

__all__ = [
    "Allocation",
    "ChannelMask",
    "Comparison",
    "FactoredWeights",
    "Frontier",
    "GraceError",
    "MaskProvider",
    "Problem",
    "Solution",
    "SolverResult",
    "Status",
    "allocate",
    "compare",
    "methods",
    "register_solver",
    "solve",
    "symmetrize",
]

#: Names that this face had before: errors are in `grace_opt.errors`, parts of attention in `grace_opt.attention`.
_ERRORS = (
    "CacheError",
    "CalibrationError",
    "ComparisonError",
    "FileError",
    "InfeasibleBudgetError",
    "MaskError",
    "MissingLibraryError",
    "OptionError",
    "ProblemError",
    "SolverError",
    "UnknownSolverError",
)
__getattr__ = _refuse_moved(
    __name__,
    {
        "Factored": "grace_opt.FactoredWeights",
        "Result": "grace_opt.SolverResult",
        "register": "grace_opt.register_solver",
        **{name: f"grace_opt.errors.{name}" for name in _ERRORS},
        **{name: f"grace_opt.attention.{name}" for name in ("interaction_matrix", "prune_count", "salient_channels")},
    },
)
