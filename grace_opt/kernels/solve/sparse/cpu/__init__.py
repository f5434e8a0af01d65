"""Compiled loops over the edges of a sparse graph."""
