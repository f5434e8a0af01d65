"""What a user may do to a key-value cache, in families with one knob each, and what it does to attention.

When: `pareto` compares pruning, eviction, quantisation and their combinations at equal bytes. Everything is done by the
library's own cache (`grace_opt.hf`), in 16 bits, so that bytes are those of tensors. The methods' papers are named
in `grace_opt.hf.eviction` and `grace_opt.hf.quantization`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.experiments.tensors import LayerTensors, TensorError
from grace_opt.hf import H2O, CacheConfig, Quantization, SnapKV, StreamingLLM
from grace_opt.hf.compression import compress
from grace_opt.hf.observation import Observation
from grace_opt.hf.plan import LayerPlan
from grace_opt.hf.pruned_attention import scatter_channels

DENSE = "dense"
EVICTIONS = {"SnapKV": SnapKV, "H2O": H2O, "StreamingLLM": StreamingLLM}
#: Those that the combinations are made of; in all plots they come first, so that each has one colour.
PARTS = ("int", "GRACE", "SnapKV")
SINGLE = (*PARTS, "THINK", "H2O", "StreamingLLM")
COMBINED = ("GRACE + int4", "SnapKV + int4", "SnapKV + GRACE", "SnapKV + GRACE + int4")
FAMILIES = (*SINGLE, *COMBINED)
#: What the knob of a combination leaves as it is.
FIXED_RATIO, FIXED_BITS = 0.5, 4


@dataclass(frozen=True)
class Compression:
    """One setting of one family.

    Attributes
    ----------
    family : str
        Of `FAMILIES`.
    knob : float
        Ratio of channels pruned, share of tokens kept, or bits.
    config : CacheConfig
    """

    family: str
    knob: float
    config: CacheConfig

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.family}{self.knob:g}" if self.family == "int" else f"{self.family} {self.knob:g}"


def compressions(
    tokens: int, ratios: Sequence[float], shares: Sequence[float], bits: Sequence[int]
) -> list[Compression]:
    """All settings of all families, for prompts of this many tokens.

    Parameters
    ----------
    tokens : int
    ratios : sequence of float
        Of channels pruned, for the families whose knob that is.
    shares : sequence of float
        Of tokens kept by eviction.
    bits : sequence of int
        For keys and values alike.
    """
    few = {b: Quantization(keys=b, values=b, backend="hqq") for b in {*bits, FIXED_BITS}}
    budgets = {share: round(share * tokens) for share in shares}
    found = [Compression("int", b, _config(quantize=few[b])) for b in bits]
    for ratio in ratios:
        found += [
            Compression("THINK", ratio, _config("think", ratio)),
            Compression("GRACE", ratio, _config("grace", ratio)),
            Compression("GRACE + int4", ratio, _config("grace", ratio, quantize=few[FIXED_BITS])),
        ]
    for share, budget in budgets.items():
        found += [Compression(name, share, _config(evict=kind(budget))) for name, kind in EVICTIONS.items()]
        snap, four = SnapKV(budget), few[FIXED_BITS]
        found += [
            Compression("SnapKV + int4", share, _config(evict=snap, quantize=four)),
            Compression("SnapKV + GRACE", share, _config("grace", FIXED_RATIO, evict=snap)),
            Compression("SnapKV + GRACE + int4", share, _config("grace", FIXED_RATIO, evict=snap, quantize=four)),
        ]
    return sorted(found, key=lambda compression: FAMILIES.index(compression.family))


def _config(method: str = "think", ratio: float = 0.0, **settings: Any) -> CacheConfig:
    return CacheConfig(method=method, ratio=ratio, **settings)


@dataclass(frozen=True)
class Attended:
    """What a compression does to one layer's attention.

    Attributes
    ----------
    stored, dense : int
        Bytes of the prompt's K and V, as stored and in 16 bits.
    kl : float
        KL(compressed ‖ dense) of attention, nats, mean over later queries and heads. In this direction it is finite
        also where tokens are gone.
    output : float
        Relative error of the output, ‖o - o'‖ / ‖o‖, mean over the same.
    """

    stored: int
    dense: int
    kl: float
    output: float


class DenseAttention:
    """Attention of a layer's later queries on 16-bit keys and values, to which compressions are compared.

    Parameters
    ----------
    tensors : LayerTensors
    prompt : int
        Number of tokens in the prompt; the others bring the later queries, and stay dense.
    position, layers : int
        Of the layer, among all that are measured: some evictions treat layers differently.
    """

    def __init__(self, tensors: LayerTensors, prompt: int, position: int = 0, layers: int = 1) -> None:
        if not 0 < prompt < tensors.keys.shape[1]:
            raise TensorError(f"{tensors.keys.shape[1]} tokens with a prompt of {prompt}: leave some tokens after it.")
        self.prompt, self.position, self.layers, self.scaling = prompt, position, layers, tensors.scaling
        self.keys, self.values = tensors.keys.half()[None], tensors.values.half()[None]
        self._observed = tensors.queries[:, :prompt].half()[None]
        heads = tensors.keys.shape[0]
        later = tensors.queries[:, prompt:].double()
        self._queries = later.reshape(heads, -1, *later.shape[1:])
        places = torch.arange(tensors.keys.shape[1], device=self.keys.device).expand(heads, -1)
        self._log_p, self._output = self._attend(self.keys[0], self.values[0], places)

    def measure(self, config: CacheConfig) -> Attended:
        """Compress the prompt, and let the later queries attend to what is stored of it."""
        plan = LayerPlan(self.position, self.layers, config.provider(self.position), config)
        over = Observation(self._observed, None, self.prompt, self.scaling, None)
        old = compress(plan, over, self.keys[:, :, : self.prompt], self.values[:, :, : self.prompt])
        if old is None:
            raise TensorError(f"a prompt of {self.prompt} tokens is too short to be compressed by {config}.")
        heads, length = self.keys.shape[1:3]
        after = torch.arange(old.length, length, device=self.keys.device).expand(heads, -1)
        before = torch.arange(old.length, device=self.keys.device)[None, None]
        before = (before if old.positions is None else old.positions.long())[0].expand(heads, -1)
        places = torch.cat([before, after], dim=-1)
        keys, values = scatter_channels(old, self.keys[:, :, old.length :], self.values[:, :, old.length :])
        log_p, output = self._attend(keys[0], values[0], places)
        index = places[:, None, None].expand(*log_p.shape)
        # Of what is not visible yet, both logarithms are about -1e30 and p is 0.
        kl = (log_p.exp() * (log_p - self._log_p.gather(-1, index))).sum(-1).mean()
        moved = ((output - self._output).norm(dim=-1) / self._output.norm(dim=-1)).mean()
        tail = [part[:, :, old.length : self.prompt].nbytes for part in (self.keys, self.values)]
        stored = sum(part.nbytes for part in old.parts().values()) + sum(tail)
        dense = sum(part[:, :, : self.prompt].nbytes for part in (self.keys, self.values))
        return Attended(stored, dense, float(kl), float(moved))

    def _attend(self, keys: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities (H, group, later, stored) and outputs, of keys that stood at these places (H, stored)."""
        now = self.prompt + torch.arange(self._queries.shape[2], device=places.device)
        hidden = places[:, None, None] > now[:, None]
        logits = self.scaling * (self._queries @ keys.double()[:, None].mT)
        log_p = logits.masked_fill(hidden, -1e30).log_softmax(-1)
        return log_p, log_p.exp() @ values.double()[:, None]
