"""Coordinate ascent on the diagonal that makes a relaxation convex. Compiled for the CPU only."""
