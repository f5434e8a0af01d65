"""The paper's experiments, a file for each table or figure: ``python -m bench.experiments NAME``, ``grace-opt report``.

An experiment is a module here that defines ``EXPERIMENT``, a `registry.Experiment`, and is named in `registry.MODULES`;
docs/howto/experiments.md shows how to write one, and `solver_quality` is the smallest.
"""
