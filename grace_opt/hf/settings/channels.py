"""`Channels`: how many channels of the keys are dropped, and how they are chosen.

When: a cache is to hold fewer channels: ``attach(model, Channels(ratio=0.3))``, or its settings as keywords,
``attach(model, ratio=0.3)``.

Source: GRACE (arXiv 2604.16983) for protection, ThinK (arXiv 2407.21018) for the window of queries.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from ... import registry
from ..._util.parameters import check_fields, integer, plain, shown
from ...attention.provider import DEFAULT_RATIO, MaskProvider
from ...attention.weights import check_protection, prune_count
from ...errors import OptionError
from ...registry import MethodOptions
from ..models.arguments import DEFAULT_METHOD, OTHER_NAMES_OF_SETTINGS, explains_arguments

_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("options", Mapping, "a dict from names to values"),
    ("method", str, 'a name, for instance "grace"; the share to prune is another argument, ratio=, and so are bits='),
    ("weight", str, 'a name, for instance "frobenius"'),
)


@explains_arguments(OTHER_NAMES_OF_SETTINGS, ' Give the options of a method as options={"name": value}.')
@dataclass(frozen=True)
class Channels:
    """Drop channels of the keys, the same number in every KV head.

    Attributes
    ----------
    ratio : float or sequence of float, optional
        Share of the channels to drop, in [0, 1): ⌈ratio · d⌉ of d channels are removed. One number, or one per layer
        of the model; entries for layers that are not pruned are ignored. If it is not given, 0.3; None with
        `kept_channels`.
    method : str or options object
        How they are chosen: ``"grace"`` (salient-channel protection and MIES), the name of any registered solver, or a
        solver's options object such as ``grace_opt.solvers.TabuOptions(iterations=500)``, which is stored as the
        solver's name and ``options``.
    kept_channels : int, optional
        Number of channels to keep in every KV head, instead of ``ratio``.
    protect : (float, float), optional
        Lower and upper bound on the share of channels that count as salient and are never pruned. None means the
        method's default.
    weight : str
        Which W the method minimises; see `grace_opt.MaskProvider`.
    seed : int
        Seed for methods that draw random numbers.
    options : mapping
        The method's own options.
    observation_window : int
        Number of last prompt queries from which W is built; at most the whole prompt.

    Raises
    ------
    OptionError
        If a value has the wrong type or range, or two contradict each other.

    Examples
    --------
    >>> Channels().ratio, Channels(kept_channels=24).ratio
    (0.3, None)
    >>> from grace_opt.solvers import TabuOptions
    >>> Channels(0.5, TabuOptions(iterations=500)).options
    {'iterations': 500}
    """

    ratio: float | Sequence[float] | None = None  # known once it is known whether a number is given
    method: str | MethodOptions = DEFAULT_METHOD
    kept_channels: int | None = None
    protect: tuple[float, float] | None = None
    weight: str = "frobenius"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    observation_window: int = 32

    def __post_init__(self) -> None:
        check_fields(self, integer, "seed", at_least=0)
        check_fields(self, integer, "observation_window", at_least=1)
        check_fields(self, integer, "kept_channels", at_least=1, optional=True)
        if is_dataclass(self.method):  # by name in here, so that it goes into JSON
            spec, made = registry.chosen(self.method, self.options)
            object.__setattr__(self, "method", spec.name)
            object.__setattr__(self, "options", registry.changed(made))
        for name, kind, write in _KINDS:
            check_kind(name, getattr(self, name), kind, write)
        object.__setattr__(self, "options", dict(self.options))
        if twice := [name for name in self.options if name in self.__dataclass_fields__]:
            raise OptionError(f"options has {', '.join(twice)}, which is no option of a method: write {twice[0]}=")
        if self.kept_channels is None:
            object.__setattr__(self, "ratio", _checked_ratio(DEFAULT_RATIO if self.ratio is None else self.ratio))
        elif self.ratio is not None:
            raise OptionError(f"ratio={shown(self.ratio)} and kept_channels={self.kept_channels}: write one of the two")
        if self.protect is not None:
            object.__setattr__(self, "protect", check_protection(self.protect))
        if self.options.get("path") is True:
            raise OptionError("path=True is for solve(): a cache has one number of channels to keep; leave path out")
        self.provider(0)  # report unknown methods and options now, not after a long prompt

    @property
    def drops_none(self) -> bool:
        """Whether no channel is dropped in any layer."""
        return self.kept_channels is None and not any(self.ratios())

    def ratios(self, layers: int | None = None) -> tuple[float, ...]:
        """The ratio of every layer; with `kept_channels`, none.

        Parameters
        ----------
        layers : int, optional
            Number of layers of the model. None uses the length of the given list.
        """
        if self.ratio is None:
            return ()
        if isinstance(self.ratio, Sequence):
            if layers is not None and len(self.ratio) != layers:
                raise OptionError(
                    f"ratio has {len(self.ratio)} entries and the model {layers} layers; write one number, or one per "
                    "layer of the model"
                )
            return tuple(self.ratio)
        return (self.ratio,) * (layers or 1)

    def provider(self, layer: int) -> MaskProvider:
        """What chooses the channels of a layer."""
        ratio = self.ratio[layer] if isinstance(self.ratio, Sequence) else self.ratio
        return MaskProvider(
            self.method,
            DEFAULT_RATIO if ratio is None else ratio,
            kept_channels=self.kept_channels,
            protect=self.protect,
            weight=self.weight,
            seed=self.seed,
            **self.options,
        )


def check_kind(name: str, value: Any, kind: Any, write: str) -> None:
    """Raise `OptionError` unless the value is of this kind, with what to write."""
    if not isinstance(value, kind):
        raise OptionError(f"{name}={shown(value)}: write {write}")


def _checked_ratio(given: Any) -> float | tuple[float, ...]:
    """Return one ratio, or one per layer, as plain floats: numpy's would not go into JSON."""
    ratio = plain(given)
    one = isinstance(ratio, numbers.Real)
    if not one and (isinstance(ratio, str) or not isinstance(ratio, Sequence) or not len(ratio)):
        raise OptionError(
            f"ratio={shown(ratio)}: give one number in [0, 1), or a list with one per layer{_meant_ratio(ratio)}"
        )
    for layer, each in enumerate([ratio] if one else ratio):
        try:
            prune_count(each, 1)
        except OptionError as error:
            where = "" if one else f"layer {layer}: "
            raise OptionError(f"{where}{str(error).rstrip('.')}{_meant_ratio(each)}") from None
    return float(ratio) if one else tuple(map(float, ratio))


def _meant_ratio(ratio: Any) -> str:
    """Guess the ratio meant by a text or a percentage."""
    try:
        value = float(ratio.rstrip(" %")) if isinstance(ratio, str) else float(ratio)
    except (TypeError, ValueError, OverflowError):
        return ""
    share = value / 100 if 1 < value < 100 else value
    return f"; write ratio={share:g}" if 0 <= share < 1 and not isinstance(ratio, bool) else ""
