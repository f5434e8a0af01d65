"""grace_opt: minimum-weight k-vertex induced subgraphs, certified, and smaller key caches made of them.

``grace_opt.solve(W, k, method="mies")`` is the whole interface for researchers; `MaskProvider` turns queries and keys
into channel masks, and ``grace_opt.hf`` applies them to Hugging Face models. The rooms of the code are listed in
``docs/map.md``. Source: GRACE (arXiv 2604.16983).
"""

from ._util import loading as _loading  # noqa: F401 - before anything that takes long to import
from .allocation import Allocation, Frontier, allocate
from .api import compare, methods, solve
from .attention.masks import ChannelMask
from .attention.provider import MaskProvider
from .attention.weights import interaction_matrix, prune_count, salient_channels
from .comparison import Comparison, ComparisonError
from .errors import (
    CacheError,
    CalibrationError,
    FileError,
    GraceError,
    InfeasibleBudgetError,
    MaskError,
    MissingLibraryError,
    OptionError,
    ProblemError,
    SolverError,
    UnknownSolverError,
)
from .problem import Factored, Problem, symmetrize
from .registry import register
from .solution import Result, Solution, Status

__version__ = "0.1.0"

__all__ = [
    "Allocation",
    "CacheError",
    "CalibrationError",
    "ChannelMask",
    "Comparison",
    "ComparisonError",
    "Factored",
    "FileError",
    "Frontier",
    "GraceError",
    "InfeasibleBudgetError",
    "MaskError",
    "MaskProvider",
    "MissingLibraryError",
    "OptionError",
    "Problem",
    "ProblemError",
    "Result",
    "Solution",
    "SolverError",
    "Status",
    "UnknownSolverError",
    "allocate",
    "compare",
    "interaction_matrix",
    "methods",
    "prune_count",
    "register",
    "salient_channels",
    "solve",
    "symmetrize",
]
