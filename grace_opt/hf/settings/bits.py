"""`Bits`: how many bits the channels of keys and values get, and in which coordinates they are coded.

When: a cache is to take few bits per element, everything counted: ``attach(model, Bits(2.25))``, or its settings as
keywords, ``attach(model, bits=2.25)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..._util.parameters import check_fields, flag, integer, number, shown
from ..._util.sizes import byte_count
from ..._util.warning import warn
from ...errors import OptionError
from ..models.arguments import explains_arguments

#: The settings of which one (or the pair in the middle) asks for bits.
BUDGETS = ("bits", "key_bits", "value_bits", "total_bytes", "max_bytes", "max_kl")
CALIBRATED, NO_BASIS = "calibrated", "none"
TAIL_BLOCK_WITH_BITS = 64
#: Every block of newer tokens has means and scales of its own, which weigh more the smaller it is.
SMALLEST_TAIL_BLOCK = 16
#: What to do about a prompt that is unlike the texts of the calibration.
GUARDS = ("warn", "dense", "raise", "off")
#: What a cache has that nothing else makes smaller.
DEFAULT_BITS = 2.25
#: Largest mean number of bits, of which no code takes more than the second.
MAX_BITS, MAX_CODE_BITS = 16, 8
#: Numbers of last queries that are averaged, as sets of their own.
LAST = (32, 128)
#: Number of first tokens that stay dense, of a prompt and of a calibration text.
SINKS = 4
#: Number of last queries of which every one is observed: as far as an eviction may look back.
MAX_EVICTION_QUERIES = max(LAST)
_OTHER_NAMES = {
    **dict.fromkeys(("nbits", "n_bits", "num_bits", "kv_bits", "mean", "bits_per_element"), "write bits="),
    **dict.fromkeys(("keys", "k", "k_bits"), "write key_bits="),
    **dict.fromkeys(("values", "v", "v_bits"), "write value_bits="),
    **dict.fromkeys(("kl", "target_kl", "max_error"), "write max_kl="),
    **dict.fromkeys(("num_bytes", "nbytes", "bytes", "memory", "max_memory"), "write max_bytes="),
}


@explains_arguments(_OTHER_NAMES)
@dataclass(frozen=True)
class Bits:
    """Give every channel of every token its own number of bits, instead of dropping channels.

    Attributes
    ----------
    bits : float, optional
        Mean number of bits per element of K and V, with everything counted, over the tokens that are neither sink
        tokens nor recent; 2.25 if none of these six is given.
    key_bits, value_bits : float, optional
        The same for K and V apart; both, instead of ``bits``.
    total_bytes : int, optional
        Bytes of the whole cache at the end of the prompt, dense parts included, instead of ``bits``.
    max_bytes : int or str, optional
        Bytes that the whole cache never exceeds after any step, such as ``"512MiB"``, instead of ``bits``: room to grow
        and tables included. As many bits as fit; where ``generate`` does not say how many tokens will come, older ones
        are coded again with fewer bits as they do.
    max_kl : float, optional
        KL divergence from the dense cache's next-token distributions, nats per token, instead of ``bits``: the fewest
        bits that leave no more, as measured once for the model.
    basis : str or path
        "calibrated" (the model's own, made once and kept), "none" (the channels as they are), or a file that
        ``grace-opt calibrate basis`` wrote.
    trellis : bool
        Code the numbers of a channel together, by a trellis, which leaves less error in the same bytes. False codes
        them one by one, which takes less time while a prompt is read.
    guard : str
        What to do about a prompt whose keys, values or queries are very unlike those of the calibration, so that its
        codes may leave far more error than usual: "warn"; "dense", to warn and leave such layers dense; "raise"; or
        "off" for nothing.

    Raises
    ------
    OptionError
        If a number is out of range, or two contradict each other.

    Examples
    --------
    >>> Bits().bits, Bits(key_bits=3, value_bits=2).bits
    (2.25, None)
    """

    bits: float | None = None
    key_bits: float | None = None
    value_bits: float | None = None
    total_bytes: int | None = None
    max_bytes: int | str | None = None
    max_kl: float | None = None
    basis: str | os.PathLike[str] = CALIBRATED
    trellis: bool = True
    guard: str = GUARDS[0]

    def __post_init__(self) -> None:
        object.__setattr__(self, "basis", check_basis(self.basis))
        check_fields(self, flag, "trellis")
        if not isinstance(self.guard, str) or self.guard not in GUARDS:
            raise OptionError(f"guard={shown(self.guard)}: write {', '.join(map(repr, GUARDS[:-1]))} or {GUARDS[-1]!r}")
        if self.guard in ("dense", "raise") and self.basis == NO_BASIS:
            raise OptionError(
                f'guard="{self.guard}" and basis="{NO_BASIS}": without a calibration, nothing can be unlike it; leave '
                "out one of them"
            )
        if not self.budget:
            object.__setattr__(self, "bits", DEFAULT_BITS)
        for name in ("bits", "key_bits", "value_bits"):
            check_fields(self, number, name, above=0, at_most=MAX_BITS, optional=True)
            value = getattr(self, name)
            if value is not None and value > MAX_CODE_BITS:
                warn(
                    f"{name}={value:g}: no code has more than {MAX_CODE_BITS} bits, and only means and scales, which "
                    f"few tokens share in a short prompt, can use more; write {name}={MAX_CODE_BITS}, or leave "
                    "attach() out for a cache as it is"
                )
        check_fields(self, integer, "total_bytes", at_least=1, optional=True)
        check_fields(self, number, "max_kl", above=0, optional=True)
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", byte_count("max_bytes", self.max_bytes))
        pair = "key_bits", "value_bits"
        if self.budget != pair and (len(self.budget) > 1 or self.budget[0] in pair):
            raise OptionError(
                f"{' and '.join(self.budget)} given: write bits= alone, key_bits= and value_bits= together, "
                "total_bytes=, max_bytes= or max_kl= alone"
            )
        if self.guard == "dense" and (self.total_bytes or self.max_bytes):
            raise OptionError(
                f'guard="dense" and {self.budget[0]}=: a layer that stays dense takes more bytes than it was given; '
                "write bits= or max_kl=, or another guard="
            )
        if self.max_kl is not None and (self.basis == NO_BASIS or not self.trellis):
            other = f'basis="{NO_BASIS}"' if self.basis == NO_BASIS else "trellis=False"
            raise OptionError(
                f"max_kl={self.max_kl:g} and {other}: what bits leave is measured with a calibrated basis and a "
                f"trellis; leave out {other}, or write bits="
            )

    @property
    def budget(self) -> tuple[str, ...]:
        """Names of what is given of the six."""
        return tuple(name for name in BUDGETS if getattr(self, name) is not None)

    def check_tail_block(self, block: int) -> None:
        """Refuse blocks of newer tokens that are too small to code."""
        if block < SMALLEST_TAIL_BLOCK:
            raise OptionError(
                f"tail_block={block}: with bits=, every block of newer tokens has means and scales of its own, which "
                f"would outweigh its codes; write {SMALLEST_TAIL_BLOCK} or more, or leave it out"
            )

    def check_eviction(self, evict: Any) -> None:
        """Refuse an eviction that looks back at more queries than are observed, or whose error nobody has measured."""
        if self.max_bytes is not None:
            raise OptionError(
                f"max_bytes={self.max_bytes} and evict={type(evict).__name__}(...): what heads keep after an eviction "
                "is not coded again; leave out evict=, or write total_bytes= for a budget at the end of the prompt"
            )
        if self.max_kl is not None:
            raise OptionError(
                f"max_kl={self.max_kl:g} and evict={type(evict).__name__}(...): what dropped tokens leave is not "
                "measured; write bits= beside evict=, and see what both leave by `grace-opt tune`"
            )
        needed = getattr(evict, "queries_needed", 0)
        if needed is not None and needed <= MAX_EVICTION_QUERIES:
            return
        instead = "evict by SnapKV, PyramidKV or StreamingLLM"
        if hasattr(evict, "stride"):
            instead = f"write {type(evict).__name__}(stride=0, observed={MAX_EVICTION_QUERIES})"
        raise OptionError(
            f"{type(evict).__name__} needs {'all' if needed is None else needed} queries of the prompt, and "
            f"{self.budget[0]}= keeps the last {MAX_EVICTION_QUERIES}: "
            f"{instead if needed is None else f'let it observe {MAX_EVICTION_QUERIES} or fewer'}"
        )


def check_basis(basis: Any) -> str:
    """Return the name of a basis, or the path of its file; raise `OptionError` if it is neither."""
    if hasattr(basis, "save"):
        raise OptionError("basis= is the name of a file: write made.save(FILE), and basis=FILE")
    if not isinstance(basis, str | os.PathLike) or not os.fspath(basis):
        raise OptionError(
            f'basis={shown(basis)}: write "{CALIBRATED}", "{NO_BASIS}", or the path of a file that '
            "`grace-opt calibrate basis` or CalibratedBasis.save wrote"
        )
    return os.fspath(basis)


def contradiction(budget: str, others: Iterable[str], meant: str = "") -> OptionError:
    """Return the error for settings that a budget of bits does not go together with."""
    names = list(others)
    return OptionError(
        f"{budget}= gives every channel its own number of bits, and does not go together with {', '.join(names)}; "
        f"leave {'it' if len(names) == 1 else 'them'} out, or leave out {budget}{'.' * bool(meant)}{meant}"
    )
