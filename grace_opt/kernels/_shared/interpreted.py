"""Compiled loops as plain Python functions, which give the same results, bit for bit.

Numbers of numpy round, overflow and divide as compiled ones do. What is written in LLVM instructions is replaced by
the loops of `stand_ins`. When: a loop that is not compiled yet has so little to do that compiling would take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numba  # noqa: F401 - before its modules: threads that begin with different ones block each other
import numpy as np
from numba.core import types
from numba.core.extending import _Intrinsic
from numba.core.registry import CPUDispatcher
from numba.np.numpy_support import as_dtype

from . import stand_ins


@cache
def interpreted_version(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose calls of compiled functions are calls of their interpreted versions."""
    own = function.__globals__
    names = {name: _interpreted(name, own[name]) for name in function.__code__.co_names if name in own}
    return FunctionType(function.__code__, own | names, function.__name__, function.__defaults__, function.__closure__)


def interpreted_values(result: Any) -> Any:
    """Return a result with Python's numbers for numpy's, as compiled loops do."""
    if isinstance(result, tuple):
        return tuple(interpreted_values(each) for each in result)
    return result.item() if isinstance(result, np.generic) else result


def _interpreted(name: str, value: Any) -> Any:
    if isinstance(value, CPUDispatcher):
        return interpreted_version(value.py_func)
    if isinstance(value, _Intrinsic):
        return getattr(stand_ins, name)
    return as_dtype(value).type if isinstance(value, types.Number) else value
