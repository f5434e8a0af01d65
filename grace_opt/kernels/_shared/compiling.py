"""Say on stderr, once per process, that compiling takes long: `compiling` for loops, `KERNELS` for those of a GPU.

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
GPU_LINE = "grace_opt: compiling kernels for this GPU, which takes some seconds, once (Triton keeps them)"


class Announced:
    """Blocks that compile, one at a time, and the line that says so if they take long together.

    Parameters
    ----------
    line : str
    """

    def __init__(self, line: str) -> None:
        self._line = line
        #: Seconds, without those whose caller wants to hear nothing; and whether a block is open, and the line written.
        self._spent, self.inside, self._said = 0.0, False, False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Compile within this block, which is entered with a lock; blocks within it are part of it."""
        if self.inside:
            yield
            return
        began = time.monotonic()
        line = threading.Timer(max(SECONDS_BEFORE_LINE - self._spent, 0.0), self._say)
        line.daemon = True
        if not self._said:
            line.start()
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            line.cancel()
            if not is_quiet():
                self._spent += time.monotonic() - began

    def _say(self) -> None:
        """Write the line, unless the caller of what compiles wants to hear nothing."""
        if not is_quiet() and sys.stderr is not None:
            self._said = True
            sys.stderr.write(f"{self._line}\n")
            sys.stderr.flush()


LOOPS, KERNELS = Announced(LINE), Announced(GPU_LINE)


@contextmanager
def compiling() -> Iterator[None]:
    """Compile loops within this block, which is entered with numba's lock; blocks within it are part of it."""
    collects = gc.isenabled() and not LOOPS.inside
    with LOOPS.block():
        if collects:
            gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
