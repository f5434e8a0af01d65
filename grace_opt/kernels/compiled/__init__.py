"""Loops compiled by numba: greedy, exchanges, tabu search, relaxation, tree search, passes over W, and decoding.

Importing any of these modules imports numba (about half a second, once), so callers import them where they are used.
None is parallel itself: all release the interpreter, and batches run in threads of the caller. Source: ours.
"""
