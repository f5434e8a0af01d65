"""One hypothesis profile for everyone: no deadlines (machines are shared), and the same draws on every run in CI.

Without a GPU, Triton's kernels run in its interpreter, which has to be said before anything imports triton. Where a
shell has started everything in the background, Ctrl-C is ignored, and so are the interrupts that tests send.

No test outlives a power cut, so nothing here waits for the disk; tests/test_files.py sees that the library does.
"""

import os
import signal

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.fsync = lambda file: None

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
