"""Machine code of C functions that was compiled ahead of time: a wheel has it, and nothing has to be compiled.

``python -m bench.wheel`` compiles every `c_function`, and one for each loop of `jit`, for a few kinds of processors,
and packs a file of machine code for each into `FOLDER`. `address_of` loads a function from the file for the richest
kind that this processor is no less than. A checkout has no such files. When: `grace_opt.kernels._shared.jit` looks
here before it compiles. Why, and what else was thought of: docs/adr/0020-compiled-ahead-of-time.md.

Nothing of a file is used unless numba's version, the switch for hand-made LLVM and all sources of the kernels are those
it was made from, and the bytes are those that were made. What is compiled here instead gives the same results, up to
rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
from llvmlite import binding
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys  # type: ignore[attr-defined]

from .disk_cache import stamp_of_sources
from .lanes import FEATURES, decided
from .switches import AHEAD, is_off

FOLDER = Path(__file__).parents[2] / "data" / "machine_code"
#: Entries of a file's metadata; others are a function's name, and its symbol and the hash of its code.
TRIPLE, NEEDED, SOURCES = "triple", "features", "sources"


def address_of(name: str) -> int:
    """Return where the compiled function is, or 0 if it has to be compiled; the caller has numba's lock."""
    file = file_for_this_processor()
    return 0 if file is None else _load(file, name)


@cache
def file_for_this_processor() -> Path | None:
    """Return the file whose functions can run here, or None."""
    fitting = []
    for file in () if is_off(AHEAD) else sorted(FOLDER.glob("*.safetensors")):
        said = _metadata(file)
        needed = frozenset(said.get(NEEDED, "nothing known").split(","))
        if made_here().items() <= said.items() and needed <= FEATURES and decided(needed) == decided(FEATURES):
            fitting.append((len(needed), file))
    return max(fitting)[1] if fitting else None


def made_here() -> dict[str, str]:
    """Return what a file that is made here says, and one that is used has to say: the system, and its sources."""
    return {TRIPLE: cpu_target.target_context.codegen().magic_tuple()[0], SOURCES: stamp_of_sources()}


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name in a file."""
    return f"{function.__module__}.{function.__qualname__}"


def said_of(symbol: str, code: bytes) -> str:
    """Return what a file says of a function: its symbol, and what its bytes are."""
    return f"{symbol} {hashlib.sha256(code).hexdigest()}"


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError):  # damaged, or not ours to read
        return {}


def is_whole(file: Path) -> bool:
    """Return whether the bytes of all functions are those that were made."""
    names = set(_metadata(file)) - {TRIPLE, NEEDED, SOURCES}
    return bool(names) and all(_read(file, name) is not None for name in names)


def _read(file: Path, name: str) -> tuple[str, bytes] | None:
    """Return a function's symbol and its code, or None if that is not what was made."""
    from safetensors import SafetensorError, safe_open

    said = _metadata(file).get(name, "")
    symbol = said.partition(" ")[0]
    try:
        with safe_open(file, "numpy") as opened:
            code = opened.get_tensor(name).tobytes()
    except (SafetensorError, OSError):
        return None
    return (symbol, code) if said == said_of(symbol, code) else None


def _load(file: Path, name: str) -> int:
    stored = _read(file, name)
    if stored is None:
        return 0
    (symbol, code), engine = stored, _engine()
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))


@cache
def _engine() -> Any:
    """Return what gives machine code an address, with numba's runtime for it to call."""
    rtsys.initialize(cpu_target.target_context)
    machine = binding.Target.from_default_triple().create_target_machine()
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
