"""Loops compiled by numba: tabu search, the continuous relaxation, the diagonal shift and the tree search.

Importing any of these modules imports numba (about half a second, once), so callers import them where they are used.
None is parallel itself: all release the interpreter, and batches run in threads of the caller. Source: ours.
"""
