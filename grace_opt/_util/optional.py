"""Import an optional library where it is used; if it is missing, the error names the pip extra."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import OptionError


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
            raise  # the module is installed but one of its dependencies is not: its own message names it
        raise OptionError(
            f'{purpose} needs {module}, which is not installed: pip install "grace-opt[{extra}]".'
        ) from None
