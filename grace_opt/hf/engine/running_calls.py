"""`RunningCalls`: counts the calls of ``generate`` that run in a block; the last one cleans up after the block.

When: a block of `attach` ends while another thread still generates, for example while a streamer is read after the
block. Restoring the attention at once would break that call in the middle of its answer, and the block does not wait
for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()


class RunningCalls:
    """Calls that are running in a block, or still running after it."""

    def __init__(self) -> None:
        self._running: list[tuple[threading.Thread, object]] = []
        self._clean_up: Callable[[], None] | None = None

    def begin(self) -> None:
        """Open the block."""
        self._clean_up = None

    def end(self, clean_up: Callable[[], None]) -> None:
        """End the block: clean up now, or after the last call of another thread.

        Parameters
        ----------
        clean_up : callable
            Called at the end; must allow several calls.
        """
        with _LOCK:
            self._clean_up = clean_up
            self._clean_up_if_last()

    @contextmanager
    def counted(self) -> Iterator[bool]:
        """Count a call while it runs; yields False, and does not count it, if the block is over."""
        entry = threading.current_thread(), object()
        try:
            with _LOCK:
                belongs = self._clean_up is None
                if belongs:
                    self._running.append(entry)
            yield belongs
        finally:
            with _LOCK:
                self._running[:] = [each for each in self._running if each is not entry]
                self._clean_up_if_last()

    def _clean_up_if_last(self) -> None:
        # Calls of this thread do not count: one that closes its own block would never be followed by clean-up. Nor do
        # calls of threads that have ended, which an interrupt may have left here.
        here = threading.current_thread()
        others = any(thread is not here and thread.is_alive() for thread, _ in self._running)
        if self._clean_up is not None and not others:
            self._clean_up()
