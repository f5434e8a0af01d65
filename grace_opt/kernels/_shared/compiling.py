"""`compiling`: a block that compiles. It says so on stderr, once per process, if that takes long.

numba makes millions of short-lived objects, and Python's search for unreachable ones would go through all of torch's
again and again: it waits until the block is over.
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
#: Seconds, without those whose caller wants to hear nothing; and whether a block is open, and the line written.
_spent = 0.0
_inside = _said = False


@contextmanager
def compiling() -> Iterator[None]:
    """Compile within this block, which is entered with numba's lock; blocks within it are part of it."""
    global _spent, _inside
    if _inside:
        yield
        return
    began, collects = time.perf_counter(), gc.isenabled()
    line = threading.Timer(max(SECONDS_BEFORE_LINE - _spent, 0.0), _say)
    line.daemon = True
    if not _said:
        line.start()
    _inside = True
    gc.disable()
    try:
        yield
    finally:
        _inside = False
        if collects:
            gc.enable()
        line.cancel()
        if not is_quiet():
            _spent += time.perf_counter() - began


def _say() -> None:
    """Write the line, unless the caller of what compiles wants to hear nothing."""
    global _said
    if not is_quiet() and sys.stderr is not None:
        _said = True
        sys.stderr.write(f"{LINE}\n")
        sys.stderr.flush()
