"""What competes: every method with its settings, and the cache that it makes of a prompt that was read.

When: another one is to be measured, add it to `ours_and_others`; methods that only reconstruct tensors belong into
`bench.arena.peers`. Source: each contender's own; GRACE (arXiv 2604.16983), ThinK (2407.21018), SnapKV (2404.14469),
PyramidKV (2406.02069), H2O (2306.14048).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.answers import stored_bytes
from bench.arena.prompt import Prompt, full_layers
from bench.arena.stored import Layer, Method, Stored
from bench.bits_variants import varied
from bench.caches import SINKS, WINDOW
from bench.efficiency.methods import int4
from grace_opt.errors import EvaluationError
from grace_opt.hf import H2O, CalibratedBasis, CompressedCache, PyramidKV, Quantize, SnapKV
from grace_opt.hf.engine.filling import filled
from grace_opt.hf.evict.names import eviction_to_dict
from grace_opt.hf.tools.evaluation import StoredBits, stated_bits, stored_bits

#: So large that no later token is compressed.
NEVER = 2**20
#: Numbers of bits at which ours is measured, and at which its ablation and evictions of equal bytes are.
BUDGETS, ABLATED, EVICTED = (1.0, 1.5, 2.0, 2.25, 3.0, 4.0), (1.0, 2.0, 3.0), (2.25, 3.0)
#: Families of our own, first the one that is compared with the others.
OURS, ONE_CLASS, UNCALIBRATED, PLAIN = (
    "`bits=`",
    "`bits=`, one class of tokens",
    "`bits=`, no calibration",
    "`bits=`, one class, no calibration",
)
OUR_FAMILIES = (OURS, ONE_CLASS, UNCALIBRATED, PLAIN)
#: Bytes of a 16-bit number, of a kept token's position and of a kept channel's index.
ITEM, PLACE, INDEX = 2, 4, 8


@dataclass(frozen=True)
class Subject:
    """A model, its calibrated basis and the basis' file."""

    model: PreTrainedModel
    basis: CalibratedBasis
    file: Path


@dataclass(frozen=True)
class Contender:
    """A method with its settings.

    Attributes
    ----------
    name, title, family, source : str
        As in `bench.arena.stored.Method`.
    make : callable
        ``(subject, prompt)`` to a cache that holds the prompt, and its bits.
    settings : str
        All that its records depend on beside the commit.
    """

    name: str
    title: str
    family: str
    source: str
    make: Callable[[Subject, Prompt], tuple[Any, StoredBits]]
    settings: str = ""


def contenders(methods: Iterable[Method]) -> dict[str, Contender]:
    """Return everything that can be measured, by name: caches of ours and of transformers, then the given methods.

    Raises
    ------
    SystemExit
        If two have the same name.
    """
    found = [*ours_and_others(), *map(of_method, methods)]
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SystemExit(f"two methods are called {twice[0]!r}: a record would not say whose it is")
    return {one.name: one for one in found}


def ours_and_others() -> list[Contender]:
    """Return all that fill a cache of grace_opt or of transformers."""
    found = [_coded(f"bits-{bits:g}", f"`bits={bits:g}`", OURS, bits) for bits in BUDGETS]
    for bits in ABLATED:
        at = f"`bits={bits:g}`"
        found += [
            _coded(f"bits-{bits:g}-class-1", f"{at}, one class of tokens", ONE_CLASS, bits, variant="class-1"),
            _coded(f"bits-{bits:g}-none", f'{at}, `basis="none"`', UNCALIBRATED, bits, basis="none"),
        ]
    found += [
        _coded(f"bits-{bits:g}-plain", f'`bits={bits:g}`, one class, `basis="none"`', PLAIN, bits, "none", "class-1")
        for bits in ABLATED
    ]
    four = Quantize(4)
    found.append(_cache("int4", "`Quantize(4)`", "int4, grace_opt", "", ratio=0.0, quantize=four))
    for method, source in (("think", "ThinK, arXiv 2407.21018"), ("grace", "GRACE, arXiv 2604.16983")):
        for ratio in (0.3, 0.5):
            for quantize, below in ((None, ""), (four, " + int4")):
                name, title = f"{method}-{ratio:g}{'-int4' if below else ''}", f"{method.upper()}, λ = {ratio:g}{below}"
                family = method.upper() + below
                found.append(_cache(name, title, family, source, method=method, ratio=ratio, quantize=quantize))
    found += [_evicted(name, source, bits) for name, source in _EVICTIONS for bits in EVICTED]
    found.append(Contender("transformers-4", "`QuantizedCache`, 4 bits", "transformers", "transformers", _transformers))
    return found


def _coded(name: str, title: str, family: str, bits: float, basis: str = "", variant: str = "") -> Contender:
    """Return ours; without `basis`, with the calibrated one."""

    def make(subject: Subject, prompt: Prompt) -> tuple[Any, StoredBits]:
        settings = {"bits": bits, "basis": basis or str(subject.file), "tail_block": NEVER}
        with varied(variant):
            return _filled(subject, prompt, **settings)

    return Contender(name, title, family, "grace_opt", make, _text(bits=bits, basis=basis, variant=variant))


def _cache(name: str, title: str, family: str, source: str, method: str = "think", **settings: Any) -> Contender:
    """Return a cache of pruned or quantised keys."""

    def make(subject: Subject, prompt: Prompt) -> tuple[Any, StoredBits]:
        return _filled(subject, prompt, method=method, **settings)

    return Contender(name, title, family, source or "grace_opt", make, _text(method=method, **settings))


def _filled(subject: Subject, prompt: Prompt, **settings: Any) -> tuple[Any, StoredBits]:
    settings = {"recent_window": WINDOW, "sink_tokens": SINKS, **settings}
    cache = filled(CompressedCache(subject.model, **settings), prompt.captured)
    return cache, stored_bits(cache)


_EVICTIONS: tuple[tuple[str, str], ...] = (
    ("SnapKV", "SnapKV, arXiv 2404.14469"),
    ("PyramidKV", "PyramidKV, arXiv 2406.02069"),
    ("H2O", "H2O, arXiv 2306.14048"),
)


def _eviction(name: str, budget: int) -> SnapKV | H2O:
    """Return an eviction as its paper has it; H2O keeps half of its tokens as recent ones and hears all queries."""
    if name == "H2O":
        return H2O(budget=budget, window=None, observed=None)
    return (PyramidKV if name == "PyramidKV" else SnapKV)(budget=budget, window=WINDOW)


def _evicted(name: str, source: str, bits: float) -> Contender:
    """Return an eviction that keeps the bytes of `bits=`."""

    def make(subject: Subject, prompt: Prompt) -> tuple[Any, StoredBits]:
        first = next(iter(prompt.captured.values()))
        length, key_width = first.keys.shape[2:]
        width = key_width + first.values.shape[-1]
        evict = _eviction(name, tokens_at(bits, length, width, key_width))
        return _filled(subject, prompt, method="think", ratio=0.0, evict=evict, sink_tokens=0)

    settings = _text(bits=bits, evict=eviction_to_dict(_eviction(name, 512)))
    return Contender(f"{name.lower()}-at-{bits:g}", f"{name}, bytes of `bits={bits:g}`", name, source, make, settings)


def tokens_at(bits: float, length: int, width: int, key_width: int) -> int:
    """Return how many tokens an eviction can keep in the bytes that `bits` takes, per KV head.

    Parameters
    ----------
    bits : float
        Per element of all but sinks and recent window.
    length : int
        Number of tokens of the prompt.
    width, key_width : int
        Number of elements of a token's key and value together, and of its key.

    Examples
    --------
    >>> tokens_at(2.25, 1792, 128, 64)  # 36 dense tokens and 1756 of 2.25 bits; kept ones have positions
    277
    """
    dense = ITEM * width
    ours = ((length - SINKS - WINDOW) * bits / 16 + SINKS + WINDOW) * dense
    return int((ours - INDEX * key_width + PLACE * WINDOW) / (dense + PLACE))


def refused(model: PreTrainedModel) -> dict[str, str]:
    """Return the methods that cannot store a model's cache, and why."""
    slides = len(full_layers(model)) < model.config.get_text_config(decoder=True).num_hidden_layers
    return {"transformers-4": "transformers refuses layers that slide"} if slides else {}


def _transformers(subject: Subject, prompt: Prompt) -> tuple[Any, StoredBits]:
    """Fill transformers' own quantised cache, which keeps no token of the prompt dense."""
    cache = int4(subject.model, 0.0, None).cache
    elements = [0, 0]
    for index, layer in prompt.captured.items():
        cache.update(layer.keys, layer.values, index)
        elements = [elements[0] + layer.keys.numel(), elements[1] + layer.values.numel()]
    keys, values = stored_bytes(cache, ITEM)
    return cache, stated_bits(8 * keys, 8 * values, elements, sum(elements))


def of_method(method: Method) -> Contender:
    """Return a method that reconstructs tensors: they go into a dense cache, and its count is taken."""

    def make(subject: Subject, prompt: Prompt) -> tuple[Any, StoredBits]:
        rows, cache = method.store(prompt.layers, subject.basis), prompt.dense()
        everything = sum(held.keys.numel() + held.values.numel() for held in cache.layers)
        bits = checked_bits(method.name, prompt.layers, rows, everything)
        for layer, each in zip(prompt.layers, rows, strict=True):
            held = cache.layers[layer.index]
            held.keys, held.values = each.keys[None].to(held.keys.dtype), each.values[None].to(held.values.dtype)
        return cache, bits

    return Contender(method.name, method.title, method.family, method.source, make)


def checked_bits(name: str, layers: Sequence[Layer], stored: Sequence[Stored], everything: int) -> StoredBits:
    """Count what a method says that it stores; refuse what cannot be, and what is no compression.

    Parameters
    ----------
    name : str
        Of the method.
    layers, stored : sequence
        What it got and returned.
    everything : int
        Number of elements of the dense cache, layers that the method does not get included.

    Raises
    ------
    EvaluationError
        Names the method and the layer.
    """
    if len(stored) != len(layers):
        raise EvaluationError(f"{name} returned {len(stored)} of {len(layers)} layers: return one `Stored` for each")
    bits, elements, changed = [0.0, 0.0], [0, 0], [False, False]
    for layer, each in zip(layers, stored, strict=True):
        parts = ((layer.keys, each.keys, each.key_bits), (layer.values, each.values, each.value_bits))
        for place, ((original, found, count), tokens) in enumerate(zip(parts, each.compressed, strict=True)):
            what = f"{name}, layer {layer.index}, {('keys', 'values')[place]}"
            _check(what, original, found, tokens)
            bits[place] += count
            elements[place] += tokens * original[:, 0].numel()
            changed[place] |= not torch.equal(original, found)
    counted = stated_bits(*bits, elements, everything)
    for place, part in enumerate(("keys", "values")):
        if not changed[place] and bits[place] < 16 * elements[place]:
            raise EvaluationError(
                f"{name} says that it stores {part} in {bits[place] / elements[place]:g} bits per element, and returns "
                "them unchanged: return what can be read back from the codes"
            )
    return counted


def _check(what: str, original: Tensor, found: Tensor, tokens: int) -> None:
    if found.shape != original.shape:
        raise EvaluationError(f"{what}: {tuple(found.shape)} for {tuple(original.shape)}; return the same shape")
    if not found.isfinite().all():
        raise EvaluationError(f"{what}: some numbers are not finite")
    if not 0 <= tokens <= original.shape[1]:
        raise EvaluationError(f"{what}: {tokens} compressed tokens of {original.shape[1]}")


def _text(**settings: Any) -> str:
    """Return settings as text for a record."""
    plain = {n: s.to_dict() if isinstance(s, Quantize) else s for n, s in settings.items()}
    return json.dumps(plain, sort_keys=True)
