"""Several methods on one problem: their answers side by side, as a table, a DataFrame and JSON."""

from .comparison import Comparison
from .several import several_solutions
from .sizes import best_of_sizes

__all__ = ["Comparison", "best_of_sizes", "several_solutions"]
