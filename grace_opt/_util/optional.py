"""Import an optional library where it is used; if it is missing, the error says which command installs it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..errors import MissingLibraryError

#: In a checkout, where grace_opt is installed from; missing beside an installed wheel.
PROJECT_FILE = Path(__file__).parent.parent.parent / "pyproject.toml"


def require(module: str, extra: str, purpose: str) -> Any:
    """Import `module`, or raise with the extra that installs it.

    Parameters
    ----------
    module : str
        The module to import.
    extra : str
        The extra of grace-opt that installs it.
    purpose : str
        What needs it: the subject of the message.

    Raises
    ------
    MissingLibraryError
        If it is not installed; it is an `OptionError` and an ``ImportError``.

    Examples
    --------
    >>> require("json", "bench", "to_json()").dumps(1)
    '1'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module is installed but one of its dependencies is not: its own message names it
        raise missing(module, extra, purpose) from None


def missing(module: str, extra: str, purpose: str) -> MissingLibraryError:
    """Return the error for a module that is not installed.

    Examples
    --------
    >>> missing("pandas", "bench", "to_frame()")
    MissingLibraryError('to_frame() needs pandas, which is not installed: pip install ".[bench]" in the ... grace_opt.')
    """
    return MissingLibraryError(f"{purpose} needs {module}, which is not installed: {pip_install(extra)}.")


def pip_install(extra: str = "") -> str:
    """Return the command that installs an extra, and where to run it: grace_opt is on no package index.

    Examples
    --------
    >>> print(pip_install("quant"))
    pip install ".[quant]" in the checkout of grace_opt
    """
    wanted = f"[{extra}]" if extra else ""
    what = f'".{wanted}"' if extra else "."
    command = f"pip install {what} in the checkout of grace_opt"
    return command if PROJECT_FILE.is_file() else f'{command}, or pip install "FILE.whl{wanted}" if it came as a wheel'
