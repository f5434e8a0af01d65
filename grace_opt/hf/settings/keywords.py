"""The settings of a cache as keywords, all on one level: of which object each is, and what one rules out.

When: `CacheConfig` is made from keywords, or from a file, whose names are the same. Objects such as ``Bits(2.25)``
cannot contradict themselves; keywords can, and what would be ignored is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from ..._util.parameters import flag, shown
from ...attention.provider import DEFAULT_RATIO
from ...errors import OptionError
from ..models.arguments import OTHER_NAMES_OF_SETTINGS, advice
from .bits import BUDGETS, CALIBRATED, DEFAULT_BITS, Bits, check_basis, contradiction
from .channels import Channels, check_kind
from .reading import CHANNELS

OF_CHANNELS = tuple(each.name for each in fields(Channels))
OF_BITS = tuple(each.name for each in fields(Bits))
#: Every setting, in the order of files, and what it is if nobody gives it; None is known once the others are.
USUAL: Mapping[str, Any] = {
    "method": None,
    "ratio": None,
    "kept_channels": None,
    "protect": None,
    "weight": Channels.weight,
    "seed": Channels.seed,
    "options": {},
    "recent_window": 32,
    "observation_window": Channels.observation_window,
    "sink_tokens": None,
    "dense_layers": 0,
    "tail_block": None,
    "fused": True,
    "evict": None,
    "quantize": None,
    "bits": None,
    "key_bits": None,
    "value_bits": None,
    "total_bytes": None,
    "max_bytes": None,
    "max_kl": None,
    "basis": CALIBRATED,
    "trellis": None,
    "guard": None,
    "read": None,
}
SETTINGS = tuple(USUAL)
#: Settings that ask for channels to be dropped (as options of a method do), and those that only say how.
_DROPS, _CHOOSES = ("ratio", "kept_channels", "method"), ("protect", "weight", "seed", "observation_window")
#: What bits rule out, and what they would ignore.
_BESIDE_BITS = ("method", "ratio", "kept_channels", "protect", "weight", "options")
_IGNORED_BY_BITS = (*_BESIDE_BITS[:-1], "quantize", "fused", "seed", "observation_window")


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse keywords that would be ignored, also at their default values; None is none."""
    requested = [name for name in BUDGETS if given.get(name) is not None]
    ignored = [name for name in _IGNORED_BY_BITS if given.get(name) is not None]
    if requested and ignored:
        raise contradiction(requested[0], ignored)
    scores = getattr(given.get("read"), "by", given.get("read")) == CHANNELS
    chooses = [name for name in _CHOOSES if given.get(name) is not None]
    if chooses and not (scores or _drops(given) or given.get("channels") is not None):
        raise OptionError(
            f"{', '.join(f'{name}={shown(given[name])}' for name in chooses)}: that is how channels are chosen to be "
            f"dropped, and without ratio= none is; write ratio={DEFAULT_RATIO} as well, or leave {', '.join(chooses)} "
            "out"
        )


def bits_of(given: Mapping[str, Any], smaller: bool) -> Bits | None:
    """Return the bits that keywords ask for: the usual ones if nothing else makes the cache smaller.

    Parameters
    ----------
    given : mapping
        All settings by name.
    smaller : bool
        Whether an object among them makes the cache smaller.
    """
    parts = {name: given[name] for name in OF_BITS if name in given and (given[name] is not None or name == "basis")}
    if isinstance(made := parts.pop("bits", None), Bits):
        _check_alone("Bits", parts)
        return made
    parts |= {} if made is None else {"bits": made}
    requested = any(name in parts for name in BUDGETS)
    if not requested and (smaller or _drops(given)):
        if check_basis(parts.pop("basis", CALIBRATED)) != CALIBRATED:
            parts["basis"] = given["basis"]
        if "trellis" in parts:
            flag("trellis", parts["trellis"])
        for name, value in parts.items():
            raise OptionError(f"{name}={value!r} is for bits=: write bits={DEFAULT_BITS} as well, or leave {name} out")
        return None
    if not requested and given.get("fused") is False:
        raise OptionError(
            f"fused=False: write ratio={DEFAULT_RATIO} as well, or evict= or quantize=. Alone it would be with "
            f"bits={DEFAULT_BITS}, the default, whose codes no attention but ours can read"
        )
    try:
        return Bits(**parts)
    except OptionError as error:
        meant = _meant(given.get("options"))
        if not meant:
            raise
        raise OptionError(f"{str(error).rstrip('.')}.{meant}") from None


def channels_of(given: Mapping[str, Any], bits: Bits | None, scores: bool) -> Channels:
    """Return the channels that keywords ask to be dropped.

    Parameters
    ----------
    given : mapping
        All settings by name.
    bits : Bits or None
        What `bits_of` says.
    scores : bool
        Whether channels are chosen to give scores (``read="channels"``): then 0.3 of them do not, if nobody says more.
    """
    parts = {name: given[name] for name in OF_CHANNELS if name in given}
    parts = {name: value for name, value in parts.items() if value is not None or name not in (*_DROPS, "protect")}
    if (made := given.get("channels")) is not None:
        check_kind("channels", made, Channels, "Channels(ratio=0.3)")
        _check_alone("Channels", parts)
        return made  # type: ignore[no-any-return]
    options = parts.get("options", {})
    if bits is not None and options:
        if not isinstance(options, Mapping):
            raise contradiction(bits.budget[0], ["options"])
        raise OptionError(f"a cache with {bits.budget[0]}= has no setting {', '.join(options)}.{_meant(options)}")
    if not (scores or _drops(given)):
        parts["ratio"] = 0.0
    try:
        return Channels(**parts)
    except OptionError as error:
        unknown = (
            [name for name in options if f"no option {name!r}" in str(error)] if isinstance(options, Mapping) else []
        )
        if "Did you mean" in str(error) or not unknown:
            raise
        if meant := _meant(options):
            raise OptionError(f"a cache has no setting {', '.join(unknown)}.{meant}") from None
        raise OptionError(f"{error} The settings of a cache are {', '.join(SETTINGS)}.") from None


def refuse_beside_bits(bits: Bits, channels: Channels, *, quantize: bool, fused: bool) -> None:
    """Refuse what bits rule out: channels that are dropped, and others that are True here."""
    kept = Channels(ratio=0.0)
    others = [name for name in _BESIDE_BITS if differs(getattr(channels, name), getattr(kept, name))]
    others += ["quantize"] * quantize + ["fused"] * fused
    if others:
        raise contradiction(bits.budget[0], others)


def differs(value: Any, default: Any) -> bool:
    """Whether a setting was given; arrays and tensors never equal a default."""
    return bool(getattr(value, "shape", ())) or value != default


def _drops(given: Mapping[str, Any]) -> bool:
    """Whether keywords ask for channels to be dropped, or say how many."""
    return any(given.get(name) is not None for name in _DROPS) or bool(given.get("options"))


def _check_alone(kind: str, parts: Iterable[str]) -> None:
    """Refuse keywords of an object that was given itself."""
    if names := list(parts):
        raise OptionError(f"{', '.join(names)} beside {kind}(...): write {kind}(..., {names[0]}=...)")


def _meant(options: Any) -> str:
    """Return what was meant by names that no cache has, and that were taken for a method's options."""
    return advice(options, SETTINGS, OTHER_NAMES_OF_SETTINGS) if isinstance(options, Mapping) else ""
