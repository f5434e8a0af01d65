"""Kernels that read and write caches: one folder per operation."""
