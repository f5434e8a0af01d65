"""`Quantize`: keys and values in a few bits per number; ``quantize=`` of a cache, also by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..._util.names import nearest_name
from ..._util.parameters import check_fields, integer, shown
from ...errors import OptionError
from ..models.arguments import explains_arguments
from .backends import SUPPORTED_BITS, backend_for, check_backend, check_bits, library, offers

_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("nbits", "n_bits", "num_bits", "w_bits"), "write bits=4, or keys=4 and values=4"),
    **dict.fromkeys(("k_bits", "key_bits", "k"), "write keys="),
    **dict.fromkeys(("v_bits", "value_bits", "v"), "write values="),
    **dict.fromkeys(("q_group_size", "group"), "write group_size="),
    "residual_length": "write recent_window= beside quantize=, among the settings of the cache",
    **dict.fromkeys(("axis_key", "axis_value"), "leave it out: keys are grouped along tokens, values along channels"),
}


@explains_arguments(_OTHER_NAMES, others=("keys", "values"))
@dataclass(frozen=True, init=False)
class Quantize:
    """Store old tokens in few bits per number, the same number everywhere.

    Parameters
    ----------
    bits : int, optional
        Bits of keys and values alike: ``Quantize(4)`` is what ``quantize="int4"`` stands for. Without `keys` and
        `values`, 4.
    group_size, backend, keys, values
        As the attributes; of `keys` and `values`, one that is left out is not quantised.

    Attributes
    ----------
    keys, values : int or None
        Bits per number of the pruned keys and of their values, 1, 2, 3, 4 or 8; None does not quantise them.
    group_size : int
        Number of tokens (for keys) or channels (for values) that share a scale and a zero point. Smaller groups are
        more accurate and take more memory.
    backend : str
        ``"quanto"`` (2 and 4 bits) or ``"hqq"`` (1, 2, 3, 4 and 8). By default the first that is installed and offers
        these bits.

    Raises
    ------
    OptionError
        If the back end is unknown or does not offer these bits, the group size is not a positive integer, or `bits`
        comes with `keys` or `values`.

    Examples
    --------
    >>> Quantize(keys=3).backend
    'hqq'
    >>> Quantize(4)
    Quantize(keys=4, values=4, group_size=32, backend='quanto')
    >>> Quantize(keys=4, values=2).to_dict()
    {'keys': 4, 'values': 2, 'group_size': 32, 'backend': 'quanto'}
    """

    keys: int | None
    values: int | None
    group_size: int
    backend: str

    def __init__(
        self, bits: int | None = None, *, group_size: int = 32, backend: str | None = None, **of_one: int | None
    ) -> None:
        integer("bits", bits, at_least=1, optional=True, hint=offers())
        if bits is not None and of_one:
            raise OptionError(
                f"bits={shown(bits)} is for keys and values alike; leave out {', '.join(of_one)}, or bits"
            )
        usual = bits if bits is not None or of_one else 4
        found = {"keys": usual, "values": usual, "group_size": group_size, "backend": backend, **of_one}
        for name, value in found.items():
            object.__setattr__(self, name, value)
        if backend is None:
            check_fields(self, integer, "keys", "values", at_least=1, optional=True, hint=offers())
            given = [each for each in (self.keys, self.values) if each is not None]
            object.__setattr__(self, "backend", backend_for(given))
        check_backend(self.backend)
        for name in ("keys", "values"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_bits(name, getattr(self, name), self.backend))
        check_fields(self, integer, "group_size", at_least=1)

    def check_installed(self) -> None:
        """Raise `OptionError` now, not after a long prompt, if the back end is not installed."""
        library(self.backend)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def named(cls, name: str) -> Quantize:
        """Return the quantisation that a name such as "int4" stands for: keys and values in so many bits.

        Grouped as in KIVI: keys by channel, over 32 tokens, and values by token, over 32 channels.

        Raises
        ------
        OptionError
            If the name is unknown; suggests the nearest one.

        Examples
        --------
        >>> Quantize.named("int4") == Quantize(4)
        True
        """
        known = {f"int{bits}": bits for bits in sorted(set().union(*SUPPORTED_BITS.values()), reverse=True)}
        bits = known.get(name.lower())
        if bits is None:
            raise OptionError(
                f"quantize={name!r}: write one of {', '.join(map(repr, known))}, or a Quantize(keys=4, values=2)"
                f"{_nearest(name, known)}"
            )
        return cls(bits)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Quantize:
        """Read what `to_dict` wrote, keys in 4 bits unless it says more; raises `OptionError` for unknown names."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise OptionError(f"a quantisation has no {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**{"keys": 4, **values})


def _nearest(name: str, known: Mapping[str, int]) -> str:
    """Return a suggestion: the name with the same number, or else the most similar one."""
    number = re.search(r"\d+", name)
    near = nearest_name(name, known) if number is None else f"int{number[0]}"
    return f". Did you mean {near!r}?" if near in known else ""
