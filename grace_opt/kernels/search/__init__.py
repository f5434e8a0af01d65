"""Depth-first branch and bound, a slice of nodes at a time. Compiled for the CPU only."""
