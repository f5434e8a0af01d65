"""Compile the library's loops for a kind of processor: ``python -P bench/machine_code.py FILE FEATURES``.

They are every `c_function`, and a C function of every loop of `jit`, for each signature that it gives.

`bench.wheel` runs it as a process of its own, on the sources that the wheel is built from: numba and the library look
at NUMBA_CPU_NAME and NUMBA_CPU_FEATURES when they are imported. It writes what `grace_opt.kernels._shared.ahead` reads.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from grace_opt import kernels
from grace_opt.kernels._shared import ahead
from grace_opt.kernels._shared.jit import CFunction, Loop
from grace_opt.kernels._shared.table_function import table_function


def c_functions() -> Iterator[tuple[str, CFunction]]:
    """All of the library's and their names, each once; those for GPUs would need Triton, and are none."""
    seen: set[int] = set()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if ".gpu" not in module.name:
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, CFunction | Loop) and id(value) not in seen:
                    seen.add(id(value))
                    yield from _functions_of(value)


def _functions_of(value: CFunction | Loop) -> Iterator[tuple[str, CFunction]]:
    if isinstance(value, Loop):
        yield from ((one.name, table_function(value, one.signature)) for one in value.precompiled)
    else:
        yield ahead.name_of(value.function), value


def write(file: Path, features: str, names: frozenset[str] = frozenset()) -> None:
    """Compile all functions, or those of some names, for the features that numba was told of."""
    if file.parent.resolve() != ahead.FOLDER.resolve():
        raise SystemExit(f"the library that is compiled is in {ahead.FOLDER.parents[1]}, and {file} is elsewhere")
    codes, said = {}, {ahead.NEEDED: features, **ahead.made_here()}
    for name, one in c_functions():
        if not names or name in names:
            made = one.compile()  # what numba has cached on disk has no code to be read
            code = made._library._get_compiled_object()
            codes[name] = np.frombuffer(code, np.uint8)
            said[name] = ahead.said_of(made.native_name, code)
    save_file(codes, file, said)
    file.chmod(0o644)  # safetensors writes files for their owner alone


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], frozenset(sys.argv[3:]))
