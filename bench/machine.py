"""Shapes of models, and how fast this machine copies: what the benchmarks of time have in common.

Source: shapes are from the models' ``config.json``.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

#: By device: elements of the float32 tensor that is copied.
COPIED = {"cpu": 2**26, "cuda": 2**28}


@dataclass(frozen=True)
class Model:
    """A decoder's sizes."""

    models: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices: queries and output, keys and values, and the gated MLP's three."""
        attention = 2 * self.hidden * self.head_dim * (self.query_heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Numbers in the matrix that makes logits; the embedding is looked up and costs a row per token."""
        return self.hidden * self.vocabulary


MODELS = {
    "llama3-8b": Model("Llama-3-8B", 32, 8, 32, 128, 4096, 14336, 128256),
    "mistral-7b": Model("Mistral-7B-Instruct-v0.2", 32, 8, 32, 128, 4096, 14336, 32000),
    "smollm2-135m": Model("SmolLM2-135M", 30, 3, 9, 64, 576, 1536, 49152),
}


def copy_bandwidth(device: str, rounds: int = 9) -> float:
    """Return bytes per second of a large copy, read and written: the median of some, after one that is not counted."""
    source = torch.ones(COPIED[device], device=device)
    target = torch.zeros_like(source)
    times = []
    for _ in range(rounds + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * source.nbytes / statistics.median(times[1:])
