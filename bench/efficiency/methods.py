"""The caches that are compared, by the name that the command line knows them by.

When: another one is to be measured, add it to `METHODS`. Each is made as a user of it would, with its own defaults.

Source: GRACE (arXiv 2604.16983), ThinK (arXiv 2407.21018), kvpress' ``ThinKPress``, transformers' ``QuantizedCache``.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, QuantizedCache

from grace_opt import ChannelMask, MaskProvider
from grace_opt.attention.provider import PRESETS
from grace_opt.hf import CompressedCache, Quantize
from grace_opt.hf.stores.counting import storages

Mark = Any  #: Seconds, or a ``torch.cuda.Event``.


@dataclass(frozen=True)
class Clock:
    """Makes marks in time on one device, and reads them: of the processor, or of the CUDA stream, which goes on."""

    device: str

    def mark(self) -> Mark:
        """Now; on CUDA, when the stream gets there."""
        if self.device != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Mark, last: Mark) -> float:
        """From one mark to a later one; call `wait` before."""
        return float(last - first if self.device != "cuda" else first.elapsed_time(last) / 1000)

    def wait(self) -> None:
        """Until everything that was asked for is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass
class Timed:
    """Chooses channels as `provider` does, and notes how long that takes."""

    provider: MaskProvider
    clock: Clock
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)

    def __call__(self, queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> ChannelMask:
        began = self.clock.mark()
        mask = self.provider(queries, keys, attention_mask)
        self.spans.append((began, self.clock.mark()))
        return mask


@dataclass
class Made:
    """A new cache, what must be open while the prompt is read, and who chooses its channels."""

    cache: Any
    reading: AbstractContextManager[Any] = field(default_factory=nullcontext)
    selection: Timed | None = None


@dataclass(frozen=True)
class Method:
    """One kind of cache.

    Attributes
    ----------
    title : str
        In tables and plots.
    make : callable
        ``(model, ratio, clock)`` to what was made.
    look : tuple
        Colour, from the Okabe-Ito palette, which colour-blind readers can tell apart, and marker.
    prunes : bool
        Whether λ makes a difference.
    ours : bool
        Whether grace_opt's attention functions read it.
    """

    title: str
    make: Callable[[PreTrainedModel, float, Clock], Made]
    look: tuple[str, str]
    prunes: bool = True
    ours: bool = True


def pruned(solver: str, quantize: Quantize | None = None) -> Callable[[PreTrainedModel, float, Clock], Made]:
    """Makes our cache; local search protects the channels that GRACE protects."""
    protect = PRESETS["grace"][1] if solver == "local_search" else None

    def make(model: PreTrainedModel, ratio: float, clock: Clock) -> Made:
        selection = Timed(MaskProvider(solver, ratio, protect=protect), clock)
        return Made(CompressedCache(model, provider=selection, quantize=quantize), selection=selection)

    return make


def dense(model: PreTrainedModel, ratio: float, clock: Clock) -> Made:
    """What transformers does by itself."""
    return Made(DynamicCache(config=model.config))


def think_press(model: PreTrainedModel, ratio: float, clock: Clock) -> Made:
    """Channels are zeroed in a dense cache, by hooks that run while the prompt is read."""
    from kvpress import ThinKPress

    return Made(DynamicCache(config=model.config), ThinKPress(key_channel_compression_ratio=ratio)(model))


def int4(model: PreTrainedModel, ratio: float, clock: Clock | None) -> Made:
    """All channels in 4 bits, as transformers stores them."""
    return Made(QuantizedCache(_quantizer() or "", model.config, nbits=4))


METHODS = {
    "dense": Method("dense", dense, ("#000000", "o"), prunes=False, ours=False),
    "think": Method("THINK", pruned("think"), ("#E69F00", "s")),
    "grace": Method("GRACE", pruned("grace"), ("#0072B2", "D")),
    "grace+local_search": Method("GRACE + local search", pruned("local_search"), ("#D55E00", "^")),
    "grace+int4": Method("GRACE, K in 4 bits", pruned("grace", Quantize(keys=4)), ("#56B4E9", "v")),
    "grace+int4-kv": Method("GRACE, K and V in 4 bits", pruned("grace", Quantize(4)), ("#999999", "<")),
    "int4": Method("QuantizedCache, K and V in 4 bits", int4, ("#009E73", "P"), prunes=False, ours=False),
    "kvpress": Method("kvpress ThinKPress", think_press, ("#CC79A7", "X"), ours=False),
}


def missing(name: str) -> str | None:
    """Why a method cannot run here; None if it can."""
    if name == "kvpress" and importlib.util.find_spec("kvpress") is None:
        return "not run here: kvpress needs transformers < 5.3"
    if name == "int4" and _quantizer() is None:
        return 'not run here: write pip install ".[quant]"'
    if name.startswith("grace+int4") and not _importable("optimum.quanto"):
        return 'not run here: write pip install ".[quant]"'
    return None


def _quantizer() -> str | None:
    """What transformers quantises with, here: its own default, or else the other one."""
    return next((name for name, module in (("quanto", "optimum.quanto"), ("hqq", "hqq")) if _importable(module)), None)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def held_bytes(cache: Any) -> int:
    """Bytes of all memory that a cache keeps, room to grow included; by `memory_report` if it is ours."""
    if isinstance(cache, CompressedCache):
        return cache.memory_report().allocated_bytes
    return sum(storages([vars(layer) for layer in cache.layers]).values())
