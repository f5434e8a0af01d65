"""`branch_and_bound`: `search` is the method, `depth_first` the tree search of one subproblem."""

from . import search

__all__ = ["search"]
