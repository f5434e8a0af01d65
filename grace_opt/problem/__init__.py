"""`Problem`, an instance that solvers may trust, and `Reduction`, by which they maximise and heed required vertices."""

from .problem import Problem, symmetrize
from .reduction import Reduction

__all__ = ["Problem", "Reduction", "symmetrize"]
