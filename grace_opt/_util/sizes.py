"""Numbers of bytes, as people write them."""

from __future__ import annotations

import math
import re
from typing import Any

from ..errors import OptionError
from .parameters import integer, shown

#: What a number of bytes may end with, in small letters.
UNITS = {"b": 1} | {
    f"{letter}{unit}": base**power
    for unit, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmgt", start=1)
}


def byte_count(name: str, value: Any) -> int:
    """Return a number of bytes, given as an int or as text with a unit.

    Parameters
    ----------
    name : str
        Name of the parameter, for the message.
    value : int or str
        Such as ``536_870_912``, ``"512MiB"`` or ``"1.5 GB"``; rounded down.

    Raises
    ------
    OptionError
        If it is neither, or less than one byte.

    Examples
    --------
    >>> byte_count("max_bytes", "512MiB"), byte_count("max_bytes", "1.5 GB"), byte_count("max_bytes", 7)
    (536870912, 1500000000, 7)
    """
    if not isinstance(value, str):
        return integer(name, value, at_least=1, hint='write a number of bytes, or text such as "512MiB"')
    found = re.fullmatch(r"\s*([0-9]+(?:[._][0-9]+)*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    unit = found and UNITS.get(found[2].lower() or "b")
    if not found or not unit or found[1].count(".") > 1:
        raise OptionError(
            f'{name}={shown(value)}: write a number of bytes with a unit, such as "512MiB", "1.5 GB" or "300 kB"; '
            "the units are B, kB, MB, GB and TB (powers of 1000), and KiB, MiB, GiB and TiB (powers of 1024)"
        )
    count = math.floor(float(found[1].replace("_", "")) * unit)
    return integer(name, count, at_least=1)
