"""`quietly`: a block in which the library says nothing on stderr of its own accord, because its caller asked for that.

When: ``progress=False``. Errors and warnings are not held back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_blocks = 0


@contextmanager
def quietly() -> Iterator[None]:
    """Say nothing within this block, in any thread: a method's threads belong to the call that started them.

    Examples
    --------
    >>> with quietly():
    ...     is_quiet()
    True
    >>> is_quiet()
    False
    """
    global _blocks
    with _lock:
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1


def is_quiet() -> bool:
    """Return whether such a block is open."""
    return _blocks > 0
