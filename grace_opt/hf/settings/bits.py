"""Which settings of a cache give bits to channels, and what they may be combined with.

When: `grace_opt.hf.CacheConfig` checks itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..._util.parameters import integer, number, shown
from ..._util.warning import warn
from ...errors import OptionError
from ..evict.layer_budgets import LayerBudgets
from ..models.arguments import DEFAULT_METHOD, OTHER_NAMES_OF_SETTINGS, advice

#: The settings of which one (or the pair in the middle) asks for bits.
BUDGETS = ("bits", "key_bits", "value_bits", "total_bytes")
CALIBRATED, OF_PROMPT, NO_BASIS = "calibrated", "prompt", "none"
TAIL_BLOCK_WITH_BITS = 64
#: Every block of newer tokens has means and scales of its own, which weigh more the smaller it is.
SMALLEST_TAIL_BLOCK = 16
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
_DECIDES_OTHERWISE = ("method", "ratio", "kept_channels", "protect", "weight", "options", "quantize", "fused")
#: What only the choice of channels reads.
_WITHOUT_EFFECT = ("seed", "observation_window")


def check_given_bits(given: Mapping[str, Any]) -> None:
    """Refuse arguments that ``bits=`` would ignore, whatever their values; None is no argument.

    Raises
    ------
    OptionError
        Naming all of them.
    """
    asked = [name for name in BUDGETS if given.get(name) is not None]
    names = [name for name in (*_DECIDES_OTHERWISE, *_WITHOUT_EFFECT) if name != "options"]
    others = [name for name in names if given.get(name) is not None]
    if asked and others:
        raise _contradiction(asked[0], others, "")


def check_bits(config: Any) -> None:
    """Check the settings of a `CacheConfig` that concern bits, and make numbers plain.

    Raises
    ------
    OptionError
        If a number is out of range, or another setting contradicts.
    """
    given = [name for name in BUDGETS if getattr(config, name) is not None]
    if hasattr(config.basis, "save"):
        raise OptionError("basis= is the name of a file: write made.save(FILE), and basis=FILE")
    if not isinstance(config.basis, str | os.PathLike) or not os.fspath(config.basis):
        raise OptionError(
            f'basis={shown(config.basis)}: write "{CALIBRATED}", "{OF_PROMPT}", "{NO_BASIS}", or the path of a file '
            "that `grace-opt calibrate basis` or CalibratedBasis.save wrote"
        )
    object.__setattr__(config, "basis", os.fspath(config.basis))
    if not given:
        if config.basis != CALIBRATED:
            raise OptionError(f"basis={config.basis!r} is for bits=: write bits=2.25 as well, or leave basis out")
        if config.trellis is not None:
            raise OptionError(f"trellis={config.trellis} is for bits=: write bits=2.25 as well, or leave trellis out")
        return
    for name in ("bits", "key_bits", "value_bits"):
        value = number(name, getattr(config, name), above=0, at_most=MAX_BITS, optional=True)
        object.__setattr__(config, name, None if value is None else float(value))
        if value is not None and value > MAX_CODE_BITS:
            warn(
                f"{name}={value:g}: no code has more than {MAX_CODE_BITS} bits, and only means and scales, which few "
                f"tokens share in a short prompt, can use more; write {name}={MAX_CODE_BITS}, or leave attach() out "
                "for a cache as it is"
            )
    total = integer("total_bytes", config.total_bytes, at_least=1, optional=True)
    object.__setattr__(config, "total_bytes", total)
    unknown = list(config.options) if isinstance(config.options, Mapping) else []
    meant = advice(unknown, type(config).__dataclass_fields__, OTHER_NAMES_OF_SETTINGS)
    if given not in (["bits"], ["total_bytes"], ["key_bits", "value_bits"]):
        raise OptionError(
            f"{' and '.join(given)} given: write bits= alone, key_bits= and value_bits= together, or total_bytes= alone"
            f"{'.' * bool(meant)}{meant}"
        )
    defaults = {name: field.default for name, field in type(config).__dataclass_fields__.items()}
    defaults |= {"options": {}, "method": DEFAULT_METHOD, "ratio": 0.0}
    others = [name for name in _DECIDES_OTHERWISE if differs(getattr(config, name), defaults[name])]
    if "options" in others and unknown:  # by the names that were given
        others = [name for name in others if name != "options"] + unknown
    if others == unknown != []:
        raise OptionError(f"a cache with {given[0]}= has no setting {', '.join(unknown)}.{meant}")
    if others:
        raise _contradiction(given[0], others, meant)
    evict = config.evict.evict if isinstance(config.evict, LayerBudgets) else config.evict
    needed = 0 if evict is None else getattr(evict, "queries_needed", 0)
    if needed is None or needed > MAX_EVICTION_QUERIES:
        instead = "evict by SnapKV, PyramidKV or StreamingLLM"
        if hasattr(evict, "stride"):
            instead = f"write {type(evict).__name__}(stride=0, observed={MAX_EVICTION_QUERIES})"
        raise OptionError(
            f"{type(evict).__name__} needs {'all' if needed is None else needed} queries of the prompt, and "
            f"{given[0]}= keeps the last {MAX_EVICTION_QUERIES}: "
            f"{instead if needed is None else f'let it observe {MAX_EVICTION_QUERIES} or fewer'}"
        )


def check_tail_block(block: int) -> None:
    """Refuse blocks of newer tokens that are too small to code."""
    if block < SMALLEST_TAIL_BLOCK:
        raise OptionError(
            f"tail_block={block}: with bits=, every block of newer tokens has means and scales of its own, which would "
            f"outweigh its codes; write {SMALLEST_TAIL_BLOCK} or more, or leave it out"
        )


def _contradiction(budget: str, others: list[str], meant: str) -> OptionError:
    return OptionError(
        f"{budget}= gives every channel its own number of bits, and does not go together with "
        f"{', '.join(others)}; leave {'it' if len(others) == 1 else 'them'} out, or leave out {budget}"
        f"{'.' * bool(meant)}{meant}"
    )


def differs(value: Any, default: Any) -> bool:
    """Whether a setting was given; arrays and tensors never equal a default."""
    return bool(getattr(value, "shape", ())) or value != default
