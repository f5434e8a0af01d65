"""Inner loops that selection and decoding spend their time in: one folder per operation.

In each folder ``__init__`` is the door: callers call it, and it chooses. Beside it stand ``reference``, made of torch
operations, which defines what is computed and runs anywhere; ``cpu``, loops compiled by numba; and ``gpu``, kernels
for Triton. An operation has those that are worth it. Importing a door is light; ``cpu`` imports numba (half a second,
once) and ``gpu`` imports triton, so doors import them where they are used. No compiled loop is parallel itself: all
release the interpreter, and batches run in threads of the caller. With ``TRITON_INTERPRET=1`` set before triton is
imported, its kernels run on the CPU, slowly, which is how they are tested without a GPU. What several operations use is
in ``_shared``.

`explain` says which code runs on this machine, and why; ``grace-opt doctor`` prints it.
"""

from .explanation import Explanation as Explanation
from .explanation import explain as explain
