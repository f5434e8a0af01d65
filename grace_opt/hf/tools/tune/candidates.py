"""`Candidate`: one setting of a cache that `tune` measures, and the list of those it measures by default.

The paper's method at a few ratios, the budgeted cache at several bits, uniform quantisation, transformers' own
quantised caches, eviction, and combinations. What needs a library that is not installed is left out by name.

Source: GRACE (arXiv 2604.16983), KIVI (arXiv 2402.02750), SnapKV (arXiv 2404.14469).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import QuantizedCache

from ...._util.optional import pip_install
from ....errors import OptionError
from ...engine.cache import CompressedCache
from ...evict.eviction import SnapKV
from ...settings.bits import CALIBRATED
from ...settings.config import CacheConfig
from ...settings.quantization import Quantize

RATIOS, COMBINED_BITS = (0.3, 0.6), 3.0
#: In steps of 5 to 10 % of the bytes where most recommendations lie: who needs 1.75 bits should not pay for 2.
BITS = (1.0, 1.25, 1.5, 1.75, 1.875, 2.0, 2.25, 2.5, 3.0, 4.0)
#: Bits of uniform quantisation, and the back end that offers them; transformers' own: back end and bits.
UNIFORM, FOREIGN = {8: "hqq", 4: "quanto"}, (("quanto", 4), ("quanto", 2))
#: Families, in the order in which pictures and tables show them.
GRACE, BUDGET, UNIFORM_FAMILY, EVICTION, TRANSFORMERS = (
    "GRACE, channels pruned",
    "bits=",
    "quantize=",
    "evict=",
    "transformers' QuantizedCache",
)
FAMILIES = (GRACE, BUDGET, UNIFORM_FAMILY, EVICTION, TRANSFORMERS)
_MODULES = {"quanto": "optimum.quanto", "hqq": "hqq"}


@dataclass(frozen=True)
class Candidate:
    """One setting.

    Attributes
    ----------
    name : str
        In tables; unique.
    family : str
        One of `FAMILIES`.
    config : CacheConfig or None
        The setting; None for a cache of transformers.
    backend, nbits : str, int
        Arguments of transformers' ``QuantizedCache``, if it is one.
    words : str
        The arguments of `attach` that make it, as one writes them.
    """

    name: str
    family: str
    config: CacheConfig | None
    backend: str = ""
    nbits: int = 0
    words: str = ""

    def settings(self) -> dict[str, Any]:
        """All that its measurements depend on beside model and text, for JSON."""
        if self.config is None:
            return {"backend": self.backend, "nbits": self.nbits}
        return self.config.to_dict()

    def make(self, model: PreTrainedModel) -> Any:
        """Return a new cache."""
        if self.config is None:
            return QuantizedCache(self.backend, model.config, nbits=self.nbits)
        return CompressedCache(model, config=self.config)

    @property
    def basis(self) -> str:
        """Basis that its bits are coded in; empty without bits."""
        coded = None if self.config is None else self.config.bits
        return "" if coded is None else os.fspath(coded.basis)

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured here; None if it can."""
        backend = self.backend if self.config is None else self.config.backend
        if backend and not _importable(_MODULES[backend]):
            return f"{backend} is not installed: {pip_install('quant')}"
        return None


def default_candidates(context: int, *, bits: Sequence[float] = BITS, basis: str = CALIBRATED) -> list[Candidate]:
    """Return what `tune` measures, in this order: the budgeted cache first, in case time runs out.

    Parameters
    ----------
    context : int
        Number of tokens of the shortest context; evictions keep half of it.
    bits : sequence of float
        Mean bits per element of the budgeted cache.
    basis : str
        Of the budgeted cache.

    Raises
    ------
    OptionError
        If there are no bits, or the same twice.

    Examples
    --------
    >>> [one.name for one in default_candidates(900, bits=[2.25])][:4]
    ['bits 2.25', 'GRACE, ratio 0.3', 'GRACE, ratio 0.6', 'int8']
    """
    if not bits or len(set(bits)) < len(bits):
        raise OptionError(f"bits={list(bits)}: give at least one number, and each only once, such as 2,2.25,3")
    half = SnapKV(budget=context // 2)
    found = [_ours(f"bits {mean:g}", BUDGET, bits=mean, basis=basis) for mean in bits]
    found += [_ours(f"GRACE, ratio {ratio:g}", GRACE, ratio=ratio) for ratio in RATIOS]
    found += [_ours(f"int{number}", UNIFORM_FAMILY, quantize=_in_bits(number)) for number in UNIFORM]
    name = f"SnapKV {half.budget}"
    found += [
        _ours("GRACE, ratio 0.3, int4", UNIFORM_FAMILY, ratio=0.3, quantize=_in_bits(4)),
        _ours(name, EVICTION, evict=half),
        _ours(f"{name}, int4", EVICTION, evict=half, quantize=_in_bits(4)),
        _ours(f"{name}, bits {COMBINED_BITS:g}", EVICTION, evict=half, bits=COMBINED_BITS, basis=basis),
    ]
    return found + [Candidate(f"{back}, {n} bits", TRANSFORMERS, None, back, n) for back, n in FOREIGN]


def _ours(name: str, family: str, **settings: Any) -> Candidate:
    given = {key: value for key, value in settings.items() if (key, value) != ("basis", CALIBRATED)}
    words = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return Candidate(name, family, CacheConfig(**settings), words=words)


def _in_bits(number: int) -> Quantize:
    """Return the quantisation of keys and values in so many bits each."""
    return Quantize(number, backend=UNIFORM[number])


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
