"""Marks in time: of the processor, or of the CUDA stream, which is waited for once, at the end.

When: several durations of one run are wanted and asking for each of them must not stop the GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

Mark = Any  #: Seconds, or a ``torch.cuda.Event``.


@dataclass(frozen=True)
class Clock:
    """Makes marks on one device, and reads them."""

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
