"""`StoreMaker`: what makes a layer's store, of a prompt or of a file; `TensorStore`: a store that makes itself.

Source: Python's dataclasses, whose fields say what a `TensorStore` consists of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from ..._util.parameters import shown
from ...errors import CacheError, OptionError
from ..models.observation import Observation
from .old_tokens import OldTokens, tokens_kept
from .packed.tokens import StoredTensor
from .plan import LayerPlan
from .saved import LayerCheck
from .store import Store
from .tail import Tail
from .tally import LayerReading


class StoreMaker(Protocol):
    """Makes the stores of a layer; a `Store` class is one for itself."""

    def of_prompt(self, plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Store | None:
        """Return a store of a prompt but its recent window; None if it is too short."""

    def of_file(
        self, check: LayerCheck, plan: LayerPlan, about: dict[str, Any], tensors: dict[str, Tensor], tail: Tail
    ) -> Callable[[torch.device], Store]:
        """Check what `Store.to_file` gave; return what puts a store on a device."""

    def check_numbers(self, plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Tensor | None:
        """Raise if a store cannot be made from these numbers; return a verdict that the device has not finished."""

    def why_dense(self, plan: LayerPlan, length: int) -> str:
        """Say why a prompt stays dense, and what to write instead."""

    def instead_of_terms(self, plan: LayerPlan) -> str | None:
        """Say what to write if a model adds terms to its logits; None if that is no matter."""

    def stored_as(self, plan: LayerPlan) -> str:
        """Return what becomes of old tokens, in one word for `MemoryReport`: pruned, quantised, coded, ..."""

    def idle(self, plan: LayerPlan, stores: Sequence[Store], readings: Sequence[LayerReading]) -> tuple[str, ...]:
        """Say which settings have changed nothing in the stores; without stores, why all tokens are dense."""


def check_maker(maker: Any) -> None:
    """Raise `OptionError` unless this makes stores."""
    lacks = [name for name in vars(StoreMaker) if not name.startswith("_") and not callable(getattr(maker, name, None))]
    if isinstance(maker, Store) or lacks:
        raise OptionError(
            f"store={shown(maker)} makes no stores{'' if lacks else ', as it is one'}; write a class, a subclass of "
            "grace_opt.hf.stores.maker.TensorStore"
        )
    if missing := sorted(getattr(maker, "__abstractmethods__", ())):
        raise OptionError(f"store={shown(maker)} lacks {', '.join(missing)}, which every store has")


def name_of(maker: StoreMaker) -> str:
    """Return the name of a maker, for files: that of its class."""
    kind = maker if isinstance(maker, type) else type(maker)
    return f"{kind.__module__}.{kind.__qualname__}"


class TensorStore(Store):
    """A frozen dataclass whose fields are tensors with a row for each sequence, beside ``length`` and ``positions``.

    It is its own maker. A subclass writes `of_tokens`, `extended`, `stored` and `dense`; `attend` and `cropped`
    if it can.
    """

    @classmethod
    def of_prompt(cls, plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Store | None:
        """Return a store of all of a prompt but its recent window; None if it is too short.

        Parameters
        ----------
        plan : LayerPlan
            How.
        over : Observation
            The prompt's last queries, and its padding.
        keys, values : Tensor
            ``(B, H, S, d)`` and ``(B, H, S, d_v)``, of exactly the prompt.
        """
        recent, sinks = plan.config.recent_window, plan.config.sink_tokens
        if over.length <= recent + sinks:
            return None
        count = tokens_kept(plan, plan.index, over.length)
        made = cls.of_tokens(plan, OldTokens.of(plan, over, keys, values, recent, count))
        if not isinstance(made, Store):
            raise CacheError(f"{cls.__name__}.of_tokens() returned {type(made).__name__}, and no store")
        return made

    @classmethod
    @abstractmethod
    def of_tokens(cls, plan: LayerPlan, old: OldTokens) -> Store:
        """Return a store of these tokens."""

    @classmethod
    def of_file(
        cls, check: LayerCheck, plan: LayerPlan, about: dict[str, Any], tensors: dict[str, Tensor], tail: Tail
    ) -> Callable[[torch.device], Store]:
        """Check what `to_file` gave, and return a function that puts the store on a device."""
        made: list[str] = [field.name for field in fields(cast(Any, cls)) if field.name != "length"]
        required = tuple(name for name in made if name != "positions" or name in tensors)
        check.names(about, {"length"}, tensors, required)
        batch, heads = tail.keys.shape[:2]
        for name in required:
            check.require(tensors[name].shape[0] == batch, f"{name} is {tuple(tensors[name].shape)} for {batch} rows")
        length = about["length"]
        check.require(type(length) is int and length > 0, f"length={length!r} is not a number of tokens")
        store = cls(**{"length": length, "positions": None, **tensors})
        check.placed(length, store.stored, store.positions, batch, heads)
        return store.to

    @classmethod
    def check_numbers(cls, plan: LayerPlan, over: Observation, keys: Tensor, values: Tensor) -> Tensor | None:
        """Take any numbers."""
        return None

    @classmethod
    def why_dense(cls, plan: LayerPlan, length: int) -> str:
        """Say why a prompt stays dense, and what to write instead."""
        return dense_windows(plan, length, "nothing is compressed; to compress")

    @classmethod
    def instead_of_terms(cls, plan: LayerPlan) -> str | None:
        """Say what to write if a model adds terms to its logits; None: what attends knows them."""
        return None

    @classmethod
    def stored_as(cls, plan: LayerPlan) -> str:
        """Return what becomes of old tokens, in one word for `MemoryReport`."""
        return "compressed"

    @classmethod
    def idle(cls, plan: LayerPlan, stores: Sequence[Store], readings: Sequence[LayerReading]) -> tuple[str, ...]:
        """Say why all tokens are dense, if there are no stores."""
        return () if stores else (all_dense(plan),)

    def owned(self) -> Self:
        """Return it with copies of what are views of other tensors."""

        def own(part: Tensor) -> Tensor:
            return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()

        return self.changed(own)

    def parts(self) -> dict[str, StoredTensor]:
        """Return the tensors that it consists of, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def changed(self, change: Callable[[Any], Any]) -> Self:
        """Return it with a function applied to all tensors."""
        changed = {name: change(part) for name, part in self.parts().items()}
        return cast(Self, replace(cast(Any, self), **changed))

    def to_file(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors by name, and plain values for JSON, from which `of_file` makes the same again."""
        tensors = {name: part for name, part in self.parts().items() if isinstance(part, Tensor)}
        return tensors, {"length": self.length}


def all_dense(plan: LayerPlan) -> str:
    """Say that a cache has no tokens beside those that stay dense."""
    first = f" and the first sink_tokens={plan.config.sink_tokens}" if plan.config.sink_tokens else ""
    return (
        f"all tokens are dense: the prompt is too short, as its last recent_window={plan.config.recent_window} "
        f"tokens{first} stay so"
    )


def dense_windows(
    plan: LayerPlan, length: int, missed: str, groups: str = "", causes: Mapping[str, object] | None = None
) -> str:
    """Say that a prompt has no tokens beside those that stay dense, and which setting to make smaller."""
    config, tokens = plan.config, "1 token" if length == 1 else f"{length} tokens"
    recent, first = config.recent_window, config.sink_tokens
    sinks = f" and the first sink_tokens={first}" if first else ""
    # Settings that, if they alone were smaller, would leave something to store.
    causes = {**(causes or {}), "recent_window": recent and length > first, "sink_tokens": first and length > recent}
    advice = " or ".join(name for name, alone in causes.items() if alone) or "recent_window and sink_tokens"
    return (
        f"the prompt has {tokens} and the last recent_window={recent}{sinks} stay dense{groups}, so {missed} prompts "
        f"this short, write a smaller {advice}"
    )
