"""Kernels of the solvers and bounds: one folder per operation."""
