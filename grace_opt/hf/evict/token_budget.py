"""`Budget`: how many tokens an eviction keeps, as a number or as a share of the prompt; and its other names elsewhere.

When: every eviction of ours is one. Source: SnapKV, H2O and kvpress for the names that people know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..._util.parameters import check_fields, integer, plain
from ...errors import OptionError

_BUDGET = "write budget=, a number of tokens, or the share of the prompt to keep, such as 0.25"
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("max_capacity_prompt", "max_capacity_prompts", "capacity", "max_tokens", "keep"), _BUDGET),
    **dict.fromkeys(("compression_ratio", "ratio", "heavy_ratio", "heavy_budget", "share"), _BUDGET),
    **dict.fromkeys(("window_size", "recent_size", "recent_budget", "local_window"), "write window="),
    "kernel_size": "write kernel=",
    **dict.fromkeys(("n_sink", "n_sinks", "sink_tokens", "num_sink_tokens", "start_size"), "write sinks="),
}
#: What a product of a share and a length may be off, in tokens.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Budget:
    """The same number of tokens in every layer.

    Attributes
    ----------
    budget : int or float
        Number of tokens that each KV head keeps; or a share of the prompt's, a float between 0 and 1.
    """

    budget: int | float = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _checked_budget(self.budget))

    @property
    def always(self) -> int:
        """Return how many tokens are kept whatever their scores are, and however small a share is."""
        return 0

    def count(self, length: int) -> int:
        """Return the budget for a prompt of `length` tokens, at most all of them; a share is rounded up."""
        if isinstance(self.budget, int):
            return min(length, self.budget)
        return min(length, max(math.ceil(self.budget * length - _ROUNDING), self.always, 1))

    def tokens(self, layer: int, layers: int, length: int) -> int:
        """Return the budget, or all tokens if there are fewer."""
        return self.count(length)


@dataclass(frozen=True)
class WindowedBudget(Budget):
    """A budget of which the last tokens are a part.

    Attributes
    ----------
    window : int or None
        Number of last tokens that are always kept; None for half of the budget, as in H2O (arXiv 2306.14048).
    """

    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, integer, "window", at_least=0, optional=True)
        if self.window is not None:
            check_fits(self, "window")

    @property
    def always(self) -> int:
        """The window, if it is a number of tokens."""
        return self.window or 0

    def recent(self, length: int) -> int:
        """Return how many of the last of `length` tokens are always kept."""
        budget = self.budget if isinstance(self.budget, int) else self.count(length)
        return budget // 2 if self.window is None else self.window


def _checked_budget(budget: Any) -> int | float:
    """Return a number of tokens as an int, a share of the prompt as a float; 1 is the one, and 1.0 neither."""
    given = plain(budget)
    if isinstance(given, float) and 0 < given < 1:
        return given
    if isinstance(given, float) and given == 1:
        raise OptionError(
            "budget=1.0: a share of the prompt is less than 1, and a number of tokens an integer; write budget=1 for "
            "one token, or leave the eviction out to keep all"
        )
    return integer("budget", budget, at_least=1, hint="or a share of the prompt, more than 0 and less than 1")


def check_fits(eviction: Any, name: str) -> None:
    """Refuse a budget of fewer tokens than a field of the eviction says are always kept."""
    value = getattr(eviction, name)
    if isinstance(eviction.budget, int) and value > eviction.budget:
        raise OptionError(
            f"{type(eviction).__name__}({name}={value}, budget={eviction.budget}): these tokens are always kept, so "
            f"give a budget of at least {value}, or a smaller {name}."
        )
