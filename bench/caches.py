"""What the caches of benchmarks have in common: dense windows, sizes, a calibrated basis, comparisons.

The basis is made once, kept beside the records, and read again when a run is resumed. The same calibration twice
differs in last digits, as sums depend on where numbers lie in memory; then no record of the first run would fit the
second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.provenance import digest, recorded
from grace_opt.hf import CalibratedBasis, CompressedCache, calibrate, capture_attention
from grace_opt.hf.engine.filling import dense_cache, filled
from grace_opt.hf.tools.evaluation import PredictionDifference, StoredBits, compare_predictions, next_token_log_probs

#: First and last tokens of a prompt that stay dense, in every row.
SINKS, WINDOW = 4, 32


class Continuation:
    """A prompt that is read once, and the tokens after it, which every cache predicts after it was filled with it.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    ids : Tensor
        ``(1, n)``.
    prompt : int
        Number of tokens that are read before.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, ids: Tensor, prompt: int) -> None:
        self.model, self.fed = model, ids[:, prompt:]
        self.captured = capture_attention(model, ids[:, :prompt])
        self.dense = next_token_log_probs(model, dense_cache(model, self.captured), self.fed)

    def cache(self, **settings: Any) -> CompressedCache:
        """Return a cache of ours that holds the prompt."""
        return filled(CompressedCache(self.model, **settings), self.captured)

    @torch.no_grad()
    def beside_dense(self, cache: Any) -> PredictionDifference:
        """Compare what a cache predicts with what the dense one does."""
        return compare_predictions(next_token_log_probs(self.model, cache, self.fed), self.dense, self.fed[0, 1:])

    def kl(self, **settings: Any) -> float:
        """Return the KL divergence of a cache of ours from the dense one, in nats per token."""
        return self.beside_dense(self.cache(**settings)).kl


def sizes_of(found: StoredBits) -> dict[str, float]:
    """Return bits per element, and bytes as a share of a dense cache in 16 bits, for a record."""
    return asdict(found) | {"share": found.share}


def calibrated(
    model: PreTrainedModel, tokenizer: Any, path: Path, source: Mapping[str, Any], **options: Any
) -> tuple[CalibratedBasis, float]:
    """Calibrate on the texts that ship with grace_opt, or read what the same commit has calibrated before.

    Parameters
    ----------
    model, tokenizer : object
    path : Path
        Of the basis, ``.safetensors``.
    source : mapping
        The provenance of now. If files differ from the commit, nothing is read again.
    **options
        Of `calibrate.basis`.

    Returns
    -------
    basis : CalibratedBasis
    seconds : float
        What calibrating took.
    """
    versions = {name: source[name] for name in ("torch", "transformers")}

    def made() -> dict[str, float]:
        start = time.perf_counter()
        basis = calibrate.basis(model, tokenizer, **options)
        seconds = time.perf_counter() - start
        basis.save(path)
        return {"seconds": seconds}

    settings = {**versions, "weights": digest(*model.parameters()), **options}
    found = recorded(path.with_suffix(".json"), settings, source, made, beside=path)
    return CalibratedBasis.load(path), found["seconds"]
