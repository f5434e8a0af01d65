"""`Problem`, an instance that solvers may trust, and `Reduction`, by which they maximise and keep required ones."""

from .constraints import Constraints
from .dense import DenseWeights
from .factored import FactoredWeights
from .problem import Problem, symmetrize
from .reduction import Reduction
from .sparse import SparseWeights
from .weights import Weights

__all__ = [
    "Constraints",
    "DenseWeights",
    "FactoredWeights",
    "Problem",
    "Reduction",
    "SparseWeights",
    "Weights",
    "symmetrize",
]
