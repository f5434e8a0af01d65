"""The continuous relaxation of a subproblem, by pairwise steps. Compiled for the CPU only."""
