"""`compiling`: a block that compiles. It says so on stderr, once per process, if that takes long.

numba makes millions of short-lived objects, and Python's search for unreachable ones would go through all of torch's
again and again: it waits until the block is over, which saves a tenth of the time.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..._util.quiet import is_quiet

#: Seconds of compiling in this process after which a line says so.
SECONDS_BEFORE_LINE = 1.5
LINE = (
    "grace_opt: compiling loops for this processor, which takes some seconds, once "
    "(`grace-opt doctor` says where they are kept)"
)
_lock = threading.RLock()
_spent = 0.0
_said = False


@contextmanager
def compiling() -> Iterator[None]:
    """Compile within this block; blocks within it are part of it."""
    global _spent
    with _lock:  # numba compiles in one thread at a time, too
        began, collected = time.perf_counter(), gc.isenabled()
        waiting = None if _said else threading.Timer(max(SECONDS_BEFORE_LINE - _spent, 0.0), _say)
        if waiting is not None:
            waiting.daemon = True
            waiting.start()
        gc.disable()
        try:
            yield
        finally:
            if collected:
                gc.enable()
            if waiting is not None:
                waiting.cancel()
            _spent += time.perf_counter() - began


def _say() -> None:
    """Write the line, unless the caller of what compiles wants to hear nothing."""
    global _said
    if not _said and not is_quiet() and sys.stderr is not None:
        _said = True
        sys.stderr.write(f"{LINE}\n")
        sys.stderr.flush()
