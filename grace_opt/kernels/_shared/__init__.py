"""What several kernels use: the compilers and their cache, vectors, threads, and who runs where."""
