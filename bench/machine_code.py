"""Compile every `c_function` of the library for a kind of processor: ``python -P bench/machine_code.py FILE FEATURES``.

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
from grace_opt.kernels._shared.jit import CFunction


def c_functions() -> Iterator[CFunction]:
    """All of the library's, each once; those for GPUs would need Triton, and are none."""
    seen: set[int] = set()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if ".gpu" not in module.name:
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, CFunction) and id(value) not in seen:
                    seen.add(id(value))
                    yield value


def write(file: Path, features: str, names: frozenset[str] = frozenset()) -> None:
    """Compile all functions, or those of some names, for the features that numba was told of."""
    if file.parent.resolve() != ahead.FOLDER.resolve():
        raise SystemExit(f"the library that is compiled is in {ahead.FOLDER.parents[1]}, and {file} is elsewhere")
    codes, said = {}, {ahead.NEEDED: features, **ahead.made_here()}
    for one in c_functions():
        name = ahead.name_of(one.function)
        if not names or name in names:
            made = one.compile()  # what numba has kept on disk has no code to be read
            code = made._library._get_compiled_object()
            codes[name] = np.frombuffer(code, np.uint8)
            said[name] = ahead.said_of(made.native_name, code)
    save_file(codes, file, said)
    file.chmod(0o644)  # safetensors writes files for their owner alone


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], frozenset(sys.argv[3:]))
