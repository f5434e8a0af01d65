"""Ctrl-C noted by Python while a library in C listens to it, and forgets that it heard any.

When: SCS sets itself up. Source: `PyOS_getsig` and `PyOS_setsig` of Python's C interface.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds after which the handler is put back.
EVERY = 1e-4


@contextmanager
def kept_ctrl_c() -> Iterator[None]:
    """Inside this block Ctrl-C waits; then what the process does about it is done.

    The signal is blocked in this thread. If another thread gets it, it is noted by Python's own handler, which is put
    back again and again: it is lost only if it comes just after the library has installed its own. The library has to
    release the interpreter's lock. Only in the main thread: with others, who knows whose handler is there.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype = put.restype = ctypes.c_void_p
    get.argtypes, put.argtypes = [ctypes.c_int], [ctypes.c_int, ctypes.c_void_p]
    own, over = get(signal.SIGINT), threading.Event()

    def put_back() -> None:
        while not over.wait(EVERY):
            put(signal.SIGINT, own)

    thread = threading.Thread(target=put_back, name="kept-ctrl-c", daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        thread.start()
        yield
    finally:
        over.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # raises KeyboardInterrupt, if that is what is to be done
