"""Kernels for the GPU: the greedy order and its repair by exchanges, W from queries and keys, and decoding steps.

Each computes what its torch reference computes, without ever waiting for the device. Importing any of these modules
imports triton, so callers import them where they are used. With ``TRITON_INTERPRET=1`` set before that import they run
on the CPU, slowly, which is how they are tested without a GPU. Source: ours.
"""
