"""Libraries that are not always installed, imported where they are used; if one is missing, the pip extra is named."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import OptionError


def require(module: str, extra: str, purpose: str) -> Any:
    """Import `module`, or say which extra brings it.

    Parameters
    ----------
    module : str
        What to import.
    extra : str
        The extra of grace-opt that brings it.
    purpose : str
        What needs it, as the subject of the message.

    Raises
    ------
    OptionError
        If it is not installed.

    Examples
    --------
    >>> require("json", "bench", "to_json()").dumps(1)
    '1'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is installed, and something that it needs is not: its own message says what
        raise OptionError(
            f'{purpose} needs {module}, which is not installed: pip install "grace-opt[{extra}]".'
        ) from None
