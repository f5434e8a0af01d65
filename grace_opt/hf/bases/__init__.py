"""Calibrated bases: in which coordinates a model's keys and values are coded, and how bits are divided."""
