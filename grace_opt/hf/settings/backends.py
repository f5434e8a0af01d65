"""Back ends of quantised storage: which numbers of bits optimum-quanto and hqq offer, and which is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from ..._util.optional import require
from ..._util.parameters import integer, shown
from ...errors import OptionError

SUPPORTED_BITS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
_MODULES = {"quanto": "optimum.quanto", "hqq": "hqq.core.quantize"}


def library(backend: str) -> Any:
    """Import the library; if it is missing, the error says what to install."""
    return require(_MODULES[backend], "quant", f'storage quantised by backend="{backend}"')


def backend_for(bits: Iterable[int]) -> str:
    """Return the back end that holds all of these numbers of bits: an installed one, else the first.

    Raises
    ------
    OptionError
        If none does.
    """
    wanted = sorted(set(bits))
    able = [name for name, offered in SUPPORTED_BITS.items() if set(wanted) <= set(offered)]
    if not able:
        raise OptionError(f"no back end stores numbers in {' and '.join(map(str, wanted))} bits: {offers()}")
    return next((name for name in able if _is_installed(name)), able[0])


def offers() -> str:
    """Say which back end has which numbers of bits."""
    return "; ".join(f'backend="{name}" offers {", ".join(map(str, have))}' for name, have in SUPPORTED_BITS.items())


def _is_installed(backend: str) -> bool:
    try:
        return importlib.util.find_spec(_MODULES[backend]) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def check_backend(backend: Any) -> None:
    """Raise `OptionError` unless this is the name of a back end."""
    if not isinstance(backend, str) or backend not in SUPPORTED_BITS:
        raise OptionError(f"backend={backend!r} is unknown; write one of {', '.join(map(repr, SUPPORTED_BITS))}")


def check_bits(name: str, bits: Any, backend: str) -> int:
    """Return `bits` as a plain integer; raise `OptionError` if the back end does not offer it."""
    offered = f'backend="{backend}" offers {", ".join(map(str, SUPPORTED_BITS[backend]))}'
    found = integer(name, bits, hint=offered)
    if found not in SUPPORTED_BITS[backend]:
        others = [other for other, numbers in SUPPORTED_BITS.items() if found in numbers]
        hint = "".join(f'; backend="{other}" has {found}' for other in others)
        raise OptionError(f"{name}={shown(found)}: {offered}{hint}")
    return found
