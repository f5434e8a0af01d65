"""Several methods on one problem: their answers side by side, as a table, a DataFrame and JSON."""

from .comparison import Comparison

__all__ = ["Comparison"]
