"""The inner loops in which selection and decoding spend their time: one folder per operation.

Callers use a folder's ``__init__``, which chooses among up to three implementations: ``reference``, torch operations
that define the result and run anywhere; ``cpu``, loops compiled by numba; and ``gpu``, Triton kernels. An operation has
only those that pay off. Importing ``__init__`` is cheap: ``cpu`` imports numba (half a second, once) and ``gpu``
imports triton, so both are imported only where they are used. No compiled loop is itself parallel; all release the
interpreter, and the caller runs batches in threads. Set ``TRITON_INTERPRET=1`` before triton is imported to run its
kernels on the CPU, slowly; the tests do this without a GPU. Code shared by several operations is in ``_shared``.

`explain` says which code runs on this machine and why; ``grace-opt doctor`` prints it.
"""

from .explanation import Explanation as Explanation
from .explanation import explain as explain
