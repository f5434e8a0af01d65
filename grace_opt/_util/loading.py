"""While ``grace-opt`` loads, Ctrl-C ends it at once.

Libraries that are interrupted while they are imported may lose the interrupt, or go on half imported and fail later
with other words. Nothing has been found by then, so the system's own handling is right: no traceback, and a shell sees
exit code 130.

When: `grace_opt` imports this first of all, which does so, and the command line ends it once everything is imported.
Where somebody else imports grace_opt, nothing happens.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing import parent_process


def _begin() -> None:
    """Leave Ctrl-C to the system, if this process is ``grace-opt`` or ``python -m grace_opt``."""
    if _is_ours() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_loading() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again."""
    if _is_ours() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_ours() -> bool:
    # A process that ours has started has the same arguments, but nobody ends its loading.
    if threading.current_thread() is not threading.main_thread() or parent_process() is not None:
        return False
    name = os.path.splitext(os.path.basename(sys.argv[0]))[0] if sys.argv else ""
    # With -m, the name of the file is not known yet, or is that of a package's.
    of_module = name in ("-m", "__main__") and sys.orig_argv[1:3] == ["-m", "grace_opt"]
    return name == "grace-opt" or of_module


_begin()
