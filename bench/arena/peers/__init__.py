"""The peers of the arena: other ways to a smaller cache, written from their papers with their published settings.

Each module is one family, and says where its formula is from. Left out: what nothing could be found of, and what does
not fit a cache that keeps every token (evictions have rows of their own).
"""

from __future__ import annotations

from bench.arena.peers import aatc, block_gtq, hadamard, kivi, oscar, rdkv, turboquant
from bench.arena.stored import Method

_FAMILIES = (kivi, hadamard, turboquant, oscar, block_gtq, rdkv, aatc)


def methods() -> list[Method]:
    """Return all peers."""
    return [method for family in _FAMILIES for method in family.methods()]
