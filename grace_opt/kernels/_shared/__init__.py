"""Shared by several kernels: the compilers and their cache, vectors, threads, and the choice of implementation."""
