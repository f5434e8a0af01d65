"""Tabu search over exchanges, with memetic restarts. Compiled for the CPU only."""
