"""What a long generation costs: later tokens of a text are fed to a coded cache, and are coded as they come.

When: `bench.bits` measures it on the first book. Each step's next-token distributions are compared with those of the
dense cache; the last are also compared with those after a prompt that had all tokens before them.

Later tokens read a coded cache, so their own keys and values are not those of the dense one: the error is passed on. To
tell that from the error of coding, a second run codes the dense cache's keys and values in place of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from grace_opt.hf import PrunedKeyCache

#: Number of tokens of a prompt that is continued, and of those fed in one step.
PROMPT, STEP = 1024, 32
#: Number of later tokens of which a mean is reported.
WINDOW = 256


class _ExactCache(PrunedKeyCache):
    """Stores the keys and values that a dense cache has at the same places, whatever it is given."""

    exact: DynamicCache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any) -> tuple[Tensor, Tensor]:
        old, new = self.get_seq_length(layer_idx), key_states.shape[2]
        layer = self.exact.layers[layer_idx]
        keys, values = (each[:, :, old : old + new].clone() for each in (layer.keys, layer.values))
        return super().update(keys, values, layer_idx, *args)


@torch.no_grad()
def measure_growth(
    model: PreTrainedModel, ids: Tensor, settings: dict[str, Any], prompt: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Feed the tokens after a prompt in steps, to a dense and to a coded cache.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    ids : Tensor
        ``(1, n)``: the prompt and a whole number of `WINDOW` more.
    settings : dict
        Of the coded cache.
    prompt : int
        Number of tokens of the prompt.
    advance : callable
        Called after each of four runs.

    Returns
    -------
    dict
        ``kl``, the mean of each window; ``bits``, the report's after each window; ``exact``, each window's KL if the
        dense cache's keys and values are coded; ``at_once``, the last window's KL if all tokens before it are the
        prompt; ``seconds`` of a step on both caches, medians.
    """
    seconds: dict[str, float] = {}

    def fed(cache: Any, start: int, name: str = "") -> tuple[Tensor, list[float]]:
        model(ids[:, :start], past_key_values=cache, logits_to_keep=1)
        found, bits, times = [], [], []
        for first in range(start, ids.shape[1], STEP):
            begin = time.perf_counter()
            logits = model(ids[:, first : first + STEP], past_key_values=cache).logits[0]
            times.append(time.perf_counter() - begin)
            found.append(logits.float().log_softmax(-1).half())  # all in float32 would take gigabytes
            if isinstance(cache, PrunedKeyCache) and (first + STEP - start) % WINDOW == 0:
                bits.append(cache.memory_report().bits or 0.0)
        advance()
        seconds[name] = float(torch.tensor(times).median())
        return torch.cat(found), bits

    def divergence(dense: Tensor, other: Tensor) -> list[float]:
        pairs = zip(dense.split(WINDOW), other.split(WINDOW), strict=True)
        return [float((one.float().exp() * (one.float() - two.float())).sum(-1).mean()) for one, two in pairs]

    whole = DynamicCache(config=model.config)
    dense, _ = fed(whole, prompt, "dense")
    grown, bits = fed(PrunedKeyCache(model, **settings), prompt, "coded")
    kl = divergence(dense, grown)
    cache = _ExactCache(model, **settings)
    cache.exact = whole
    grown, _ = fed(cache, prompt)
    exact = divergence(dense, grown)
    del grown, cache, whole
    late, _ = fed(PrunedKeyCache(model, **settings), ids.shape[1] - WINDOW)
    once = divergence(dense[-WINDOW:], late)[0]
    seconds.pop("")
    return {"kl": kl, "bits": bits, "exact": exact, "at_once": once, "seconds": seconds, "prompt": prompt, "step": STEP}
