"""Which of the measured settings to use: the smallest that keeps a KL, or the one with the least KL within a size.

**The rule.** With ``max_kl``: of the settings whose KL, in the mean over the windows, is at most `max_kl`, the one that
takes the smallest share of the dense cache's bytes. With ``max_share`` or ``max_bits``: of the settings that take no
more, the one with the least KL. If none fits, none is recommended, and the answer names the one that comes closest.

Only settings of `CacheConfig` are recommended; caches of other libraries are there to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...._util.parameters import number
from ....errors import OptionError
from .rows import TuneRow

#: The KL that is kept if nothing is asked for, nats: about that of 4-bit quantisation on small models.
DEFAULT_MAX_KL = 0.005


@dataclass(frozen=True)
class Target:
    """What is asked for.

    Attributes
    ----------
    kind : {"max_kl", "max_share", "max_bits"}
    value : float
    """

    kind: str
    value: float

    def __str__(self) -> str:
        words = {
            "max_kl": f"a KL of at most {self.value:g}",
            "max_share": f"at most {self.value:.1%} of the dense cache's bytes",
            "max_bits": f"at most {self.value:g} bits per element",
        }
        return words[self.kind]


@dataclass(frozen=True)
class Recommendation:
    """The setting to use, or, where none keeps the target, the one that comes closest.

    Attributes
    ----------
    row : TuneRow
    target : Target
    reached : bool
        Whether it keeps the target; otherwise it is not recommended.
    """

    row: TuneRow
    target: Target
    reached: bool

    def __str__(self) -> str:
        one = self.row
        found = (
            f"{one.name}: {one.share.estimate:.1%} of the bytes, the likeliest token stays the same at "
            f"{one.top1.estimate:.1%} of positions, KL {one.kl.estimate:.2g}, {one.found} of {one.asked} hidden facts "
            f"found (dense: {one.dense_found})"
        )
        return found if self.reached else f"no measured setting keeps {self.target}; the closest is {found}"


def target_of(max_kl: float | None, max_share: float | None, bits: Sequence[float] | None) -> Target:
    """Return the target that some arguments ask for; `bits` alone asks for no more than the largest of them.

    Raises
    ------
    OptionError
        If both a KL and a share are given, or one is out of range.
    """
    if max_kl is not None and max_share is not None:
        raise OptionError(f"max_kl={max_kl} and max_share={max_share}: give one of the two")
    if max_kl is not None:
        return Target("max_kl", number("max_kl", max_kl, above=0, hint="nats per token, for instance 0.005"))
    if max_share is not None:
        return Target("max_share", number("max_share", max_share, above=0, at_most=1, hint="0.2 means a fifth"))
    if bits:
        return Target("max_bits", max(bits))
    return Target("max_kl", DEFAULT_MAX_KL)


def recommend(rows: Sequence[TuneRow], target: Target) -> Recommendation | None:
    """Pick a row by the rule of this module; None if no row can be recommended."""
    ours = [row for row in rows if row.candidate.config is not None]
    if not ours:
        return None
    sizes = [(row.bits if target.kind == "max_bits" else row.share).estimate for row in ours]
    place, reached = choose(sizes, [row.kl.estimate for row in ours], target)
    return Recommendation(ours[place], target, reached)


def choose(sizes: Sequence[float], kls: Sequence[float], target: Target) -> tuple[int, bool]:
    """Return which of some settings the rule picks, and whether it keeps the target.

    Parameters
    ----------
    sizes : sequence of float
        Shares of the dense cache's bytes; with ``max_bits``, bits per element.
    kls : sequence of float
        The KL of each, nats.
    target : Target

    Examples
    --------
    >>> choose([0.1, 0.2, 0.3], [0.02, 0.004, 0.001], Target("max_kl", 0.005))
    (1, True)
    >>> choose([0.1, 0.2, 0.3], [0.02, 0.004, 0.001], Target("max_share", 0.05))
    (0, False)
    """
    by_kl = target.kind == "max_kl"
    bounded, other = (kls, sizes) if by_kl else (sizes, kls)
    fits = [at for at, value in enumerate(bounded) if value <= target.value]
    if fits:
        return min(fits, key=lambda at: (other[at], bounded[at])), True
    return min(range(len(kls)), key=lambda at: (bounded[at], other[at])), False
