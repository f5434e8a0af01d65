"""`branch_and_bound`: `search` has the method, `depth_first` the tree search of one subproblem."""

from . import search

__all__ = ["search"]
