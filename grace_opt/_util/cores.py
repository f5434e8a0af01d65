"""How many threads are worth starting: the cores that this process may use, and whether others are taking them.

A thread that waits for others in a barrier does nothing for as long as one of them has no core: some milliseconds,
many times what a step takes. Who knows that cores are scarce can share the work in a way that waits for nobody.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

#: Cores are scarce if a thread has waited for one during this share of the time in which it wanted one.
SCARCE_FROM = 0.1
#: That share is found from so many seconds in which a core was wanted, or more: some slices of a scheduler's time.
SECONDS_WANTED = 0.01
#: Seconds until the next look: soon while there are enough cores, later while there are not, as looking for them costs.
LOOK_AFTER, LOOK_AGAIN_AFTER = 0.02, 1.0
#: Where Linux tells nanoseconds that the calling thread has run, and those that it has waited for a core.
OF_THIS_THREAD = Path("/proc/thread-self/schedstat")


def cores() -> int:
    """Return how many cores this process may use: those of its affinity, or fewer if its control group has a quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota())))


def thread_count(most: int) -> int:
    """Return in how many threads to do work of so many parts: at most as many as torch has, and one for each core."""
    return max(1, min(most, torch.get_num_threads(), cores()))


def scarce() -> bool:
    """Return whether threads cannot count on a core each: others take them, or torch has more threads than cores."""
    return torch.get_num_threads() > cores() or _of_thread.look()


class _Looks(threading.local):
    """What a thread has seen of its own waits."""

    def __init__(self) -> None:
        self.next, self.ran, self.waited, self.scarce = -math.inf, 0.0, 0.0, False

    def look(self) -> bool:
        """Return whether this thread has waited too long, as found lately."""
        now = time.monotonic()
        if now < self.next:
            return self.scarce
        self.next = now + LOOK_AFTER
        try:
            ran, waited = (int(number) / 1e9 for number in OF_THIS_THREAD.read_bytes().split()[:2])
        except (OSError, ValueError):  # not Linux, or a kernel that does not count: nothing is known
            self.next = math.inf
            return self.scarce
        if ran < self.ran:  # a forked process counts from the start
            self.ran = self.waited = 0.0
        wanted = ran - self.ran + waited - self.waited
        if wanted >= SECONDS_WANTED:
            self.scarce = waited - self.waited > SCARCE_FROM * wanted
            self.ran, self.waited = ran, waited
        if self.scarce:
            self.next = now + LOOK_AGAIN_AFTER
        return self.scarce


_of_thread = _Looks()


@cache
def _quota() -> float:
    """Return how many cores' time the control groups of this process get; infinite without a quota."""
    return min(_quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")), default=math.inf)


def _quotas(groups: Path, root: Path) -> Iterator[float]:
    """Yield the quotas of the groups in this file and of all above them, in version 2 and in version 1 of the files."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return
    for _, kinds, place in (line.split(":", 2) for line in lines):
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = root / kinds if kinds else root
        group = top / place.strip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
            try:
                if kinds:
                    quota, period = ((folder / f"cpu.cfs_{each}_us").read_text() for each in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if quota.strip() not in ("max", "-1"):
                    yield int(quota) / int(period)
            except (OSError, ValueError):  # outside of what a container sees, or without such a limit
                continue
