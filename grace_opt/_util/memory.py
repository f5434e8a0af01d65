"""How much memory is free."""

from __future__ import annotations

import psutil


def free_memory() -> float:
    """Return the bytes that may be allocated without swapping."""
    return float(psutil.virtual_memory().available)
