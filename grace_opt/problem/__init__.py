"""`Problem`, an instance that solvers may trust, and `Reduction`, by which they maximise and keep required ones."""

from ..kernels.solve.weights import Weights
from .factored import FactoredWeights
from .problem import Problem, symmetrize
from .reduction import Reduction
from .sparse import SparseWeights

__all__ = ["FactoredWeights", "Problem", "Reduction", "SparseWeights", "Weights", "symmetrize"]
