"""What forks of the tests' processes find imported; see `tests.children`."""

import gc
import importlib
from contextlib import suppress

from tests import quanto

MODULES = (
    "numba",
    "pytest",
    "transformers.models.llama.modeling_llama",
    "bench.solvers.run",
    "grace_opt.hf",
    "grace_opt.kernels.cache.decode.cpu",
)

gc.disable()
for name in MODULES:
    importlib.import_module(name)
with suppress(ImportError):
    importlib.import_module("optimum.quanto")
    quanto.use_no_compiler()
gc.freeze()
gc.enable()
