"""`RunningCalls`: the calls of ``generate`` that run in a block; the last one cleans up if the block is over.

When: a block of `attach` ends while another thread still generates, as where a streamer is read after it. Taking the
attention away would break off that call in the middle of its answer. Nobody is made to wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()


class RunningCalls:
    """Calls that are running in a block that is open, or was."""

    def __init__(self) -> None:
        self._running: list[tuple[threading.Thread, object]] = []
        self._clean_up: Callable[[], None] | None = None

    def begin(self) -> None:
        """The block is open."""
        self._clean_up = None

    def end(self, clean_up: Callable[[], None]) -> None:
        """The block is over: clean up, now or after the last call of another thread.

        Parameters
        ----------
        clean_up : callable
            Does no harm if it is called several times.
        """
        with _LOCK:
            self._clean_up = clean_up
            self._clean_up_if_last()

    @contextmanager
    def counted(self) -> Iterator[bool]:
        """Count a call as long as it runs; False, and not counted, if the block is over already."""
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
        # Not for calls of this thread: where one closes its own block, nobody else would ever be told. Nor for those of
        # threads that are no more, which an interrupt may have left here.
        here = threading.current_thread()
        others = any(thread is not here and thread.is_alive() for thread, _ in self._running)
        if self._clean_up is not None and not others:
            self._clean_up()
