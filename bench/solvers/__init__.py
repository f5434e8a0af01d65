"""The solvers side by side with their peers: ``python -m bench.solvers run`` measures, ``… report`` writes the tables.

A cell is one suite × instance × k × method × seed × time limit, and one JSON file; cells that exist are not measured
again. Each method runs in a process of its own, in one thread, compiled and warm before the clock starts.
"""
