"""`measure`: make one cell, in any process, and return plain data, errors included.

When: `run_sweep`. Some libraries' exceptions cannot be sent to another process; text can.
"""

from __future__ import annotations

import copy
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import GraceError
from .cells import check_rows

Function = Callable[[dict[str, Any]], list[dict[str, Any]]]


def measure(function: Function, config: dict[str, Any], facts: Sequence[str] | None) -> dict[str, Any]:
    """Call ``function(config)``.

    Parameters
    ----------
    function : callable
    config : dict
    facts : sequence of str, optional
        Names of a provenance; those that depend on the machine are looked up in this process. None looks up nothing.

    Returns
    -------
    dict
        ``rows``, ``seconds`` and ``facts``; or ``error``, a text.

    Examples
    --------
    >>> measure(lambda config: [{"double": 2 * config["n"]}], {"n": 3}, None)["rows"]
    [{'double': 6}]
    >>> measure(lambda config: [{"double": 2 * config["m"]}], {"n": 3}, None)["error"]
    "KeyError: 'm' (..., line 1)"
    """
    began = time.perf_counter()
    try:
        rows = check_rows(function(copy.deepcopy(config)), config)
    except GraceError as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"}
    seconds = time.perf_counter() - began
    return {"rows": rows, "seconds": seconds, "facts": {} if facts is None else _facts(facts)}


def _facts(names: Sequence[str]) -> dict[str, str]:
    """Return the machine's part of a provenance: its CPU, and its versions of the named packages."""
    found = {}
    for name in names:
        if name == "cpu":
            found[name] = cpu_name()
        elif name == "python":
            found[name] = platform.python_version()
        else:
            try:
                found[name] = version(name)
            except (PackageNotFoundError, ValueError):
                continue  # date, command and so on: no packages, and the same everywhere
    return found


def cpu_name() -> str:
    """Return the system's name of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
