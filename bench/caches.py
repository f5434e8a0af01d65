"""What the caches of `bench.bits` and `bench.arena` have in common: dense windows, and how their sizes are recorded."""

from __future__ import annotations

from dataclasses import asdict

from grace_opt.hf.evaluation import StoredBits

#: First and last tokens of a prompt that stay dense, in every row.
SINKS, WINDOW = 4, 32


def sizes_of(found: StoredBits) -> dict[str, float]:
    """Return bits per element, and bytes as a share of a dense cache in 16 bits, for a record."""
    return asdict(found) | {"share": found.share}
