"""`Tally`: how many requests of a task met a compressed cache, and the bytes and bits that it had.

When: a result without its size, or with that of a dense cache, says nothing. Everything is read from the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...engine.cache import CompressedCache
from ...engine.layer import PrunedKeyLayer
from ...settings.config import CacheConfig
from ...stores.coded.short import MIN_TOKENS


def least_tokens(config: CacheConfig) -> int:
    """Return how many tokens a prompt must have, at least, for any of them to be compressed.

    Examples
    --------
    >>> least_tokens(CacheConfig(ratio=0.5)), least_tokens(CacheConfig(bits=2.25))
    (33, 100)
    """
    dense = config.recent_window + config.sink_tokens
    if config.bits is not None:
        return dense + MIN_TOKENS
    return dense + config.key_group


def compressed_rows(cache: CompressedCache, lengths: Sequence[int]) -> list[bool]:
    """Say of each sequence of a batch whether any of its tokens is compressed, in all layers that can be.

    Parameters
    ----------
    cache : CompressedCache
        After the prompt, and before anything else is fed.
    lengths : sequence of int
        Number of real tokens of each sequence.
    """
    if cache.memory_report().pruned_tokens == 0:
        return [False] * len(lengths)
    layers = [layer for layer in cache.layers if isinstance(layer, PrunedKeyLayer)]
    return [all(_is_compressed(layer, row, length) for layer in layers) for row, length in enumerate(lengths)]


def _is_compressed(layer: PrunedKeyLayer, row: int, length: int) -> bool:
    old = layer.compressed
    if old is None:
        return False
    before = length - (layer.get_seq_length() - old.length)
    return old.compresses(row, before, layer.plan.config.sink_tokens)


def _added(sums: tuple[float, int], mean: float | None, count: int) -> tuple[float, int]:
    return sums if mean is None else (sums[0] + count * mean, sums[1] + count)


@dataclass
class Tally:
    """Counts over the requests of one task.

    Attributes
    ----------
    requests, compressed : int
        Number of requests, and of those whose prompt was compressed. Of the others, the prompt stayed dense.
    tokens, behind : int
        Number of scored tokens, and of those that were predicted from a compressed cache. Generated tokens do not
        count.
    prompts : int
        Number of prompts that were read into caches in which something was compressed; choices of one question share
        theirs.
    prompt_tokens, bytes, dense_bytes : float
        Sums over these prompts: tokens; bytes of their caches without room to grow, but with the padding of a batch
        where it is stored; and those of dense caches. Neither counts tokens that are fed behind the prompt.
    bits : (float, int)
        Sum of mean bits per element of the compressed tokens, with ``bits=``, and of how many prompts.
    """

    requests: int = 0
    compressed: int = 0
    tokens: int = 0
    behind: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    bytes: float = 0.0
    dense_bytes: float = 0.0
    bits: tuple[float, int] = (0.0, 0)

    def measure(self, cache: CompressedCache, mask: Tensor) -> list[bool]:
        """Count a batch of prompts that have just been read; ``mask`` ``(B, S)`` is 1 at real tokens.

        Returns
        -------
        list of bool
            Which of them are compressed.
        """
        lengths = mask.sum(-1).tolist()
        rows = compressed_rows(cache, lengths)
        if any(rows):
            report, count, real = cache.memory_report(), len(rows), sum(lengths) / mask.numel()
            self.prompts += count
            self.prompt_tokens += sum(lengths)
            self.bytes += report.total_bytes
            # A dense cache of the prompts alone, without the padding of their batch.
            self.dense_bytes += real * report.dense_equivalent_total_bytes
            self.bits = _added(self.bits, report.bits, count)
        return rows

    def count(self, compressed: bool, tokens: int = 0, behind: int = 0) -> None:
        """Count one request, its scored tokens, and those of them that a compressed cache predicted."""
        self.requests += 1
        self.compressed += compressed
        self.tokens += tokens
        self.behind += behind

    def summary(self) -> dict[str, Any]:
        """Return counts, and means over prompts, for JSON; None where there is nothing to take a mean of.

        Examples
        --------
        >>> tally = Tally()
        >>> tally.count(False, tokens=1)
        >>> tally.summary()["requests"], tally.summary()["stayed_dense"], tally.summary()["bytes"]
        (1, 1, None)
        """
        prompts = self.prompts
        return {
            "requests": self.requests,
            "compressed": self.compressed,
            "stayed_dense": self.requests - self.compressed,
            "scored_tokens": self.tokens,
            "scored_behind_compressed": self.behind,
            "prompts": prompts,
            "prompt_tokens": self.prompt_tokens / prompts if prompts else None,
            "bytes": self.bytes / prompts if prompts else None,
            "dense_bytes": self.dense_bytes / prompts if prompts else None,
            "share": self.bytes / self.dense_bytes if prompts else None,
            "bits": self.bits[0] / self.bits[1] if self.bits[1] else None,
        }

    def __str__(self) -> str:
        found = self.summary()
        words = f"{self.compressed} of {self.requests} requests met a compressed cache"
        if self.prompts:
            bits = f", {found['bits']:.3f} bits per compressed element" if found["bits"] is not None else ""
            words += f" ({found['bytes']:,.0f} bytes, {found['share']:.1%} of a dense one's{bits})"
        if self.compressed and self.behind < self.tokens:
            words += f"; it predicted {self.behind:,} of the {self.tokens:,} scored tokens"
        return words
