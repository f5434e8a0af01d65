"""`CacheConfig`: all settings of a compressed cache, as one frozen value that can be written to JSON.

Use it to store the settings next to a result, to share them between caches, or to read them from a file. You can also
pass the same names directly: ``CompressedCache(model, ratio=0.6, sink_tokens=4)`` builds the configuration for you.
Files name every setting on one level, as the keywords do; here they are sorted into the objects that check them.

Source: ThinK (arXiv 2407.21018) for the windows, StreamingLLM (arXiv 2309.17453) for sink tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from transformers import PreTrainedConfig, PreTrainedModel

from ..._util.parameters import check_fields, flag, integer, shown
from ...attention.provider import DEFAULT_RATIO
from ...errors import MovedNameError, OptionError
from ...registry import MethodOptions
from ..evict.eviction import TokenEviction
from ..evict.layer_budgets import LayerBudgets
from ..evict.names import eviction_from_dict, eviction_named, eviction_to_dict
from ..models.arguments import DEFAULT_METHOD, OTHER_NAMES_OF_SETTINGS, explains_arguments
from ..models.fingerprint import fingerprint
from .bits import BUDGETS, SINKS, TAIL_BLOCK_WITH_BITS, Bits
from .channels import Channels, check_kind
from .config_file import format_settings, read_settings, write_settings
from .keywords import (
    OF_BITS,
    OF_CHANNELS,
    SETTINGS,
    USUAL,
    bits_of,
    channels_of,
    check_given,
    differs,
    refuse_beside_bits,
)
from .quantization import Quantize
from .reading import CHANNELS, TopTokens, reading_from_dict, reading_named

#: One object that says how a cache is made smaller.
CacheSetting: TypeAlias = Channels | Bits | Quantize | TopTokens | TokenEviction


@explains_arguments(
    OTHER_NAMES_OF_SETTINGS,
    ' Give the options of a method as options={"name": value}.',
    others=(*(name for name in SETTINGS if name != "ratio"), "channels"),
)
@dataclass(frozen=True, init=False)
class CacheConfig:
    """How a cache is made smaller: with ``bits=2.25``, unless a setting is given that makes it smaller otherwise.

    Parameters
    ----------
    setting : Channels, Bits, Quantize, TopTokens, an eviction, or a method, optional
        One object that makes the cache smaller, such as ``Bits(2.25)``; it goes to the attribute of its kind. The name
        of a method, or its options object, is ``Channels(method=...)``.
    ratio : float or sequence of float, optional
        ``Channels(ratio=...)``.
    **settings
        The attributes below by name; and the settings of `Channels` and `Bits` themselves (``method``, ``ratio``,
        ``kept_channels``, ``protect``, ``weight``, ``seed``, ``options``, ``observation_window``; ``bits`` as a number,
        ``key_bits``, ``value_bits``, ``total_bytes``, ``max_bytes``, ``max_kl``, ``basis``, ``trellis``,
        ``guard``), of which these objects are then made.

    Attributes
    ----------
    channels : Channels
        Which channels are dropped. If ``method``, ``options`` or ``read="channels"`` ask for channels to be chosen, and
        no ratio is given, 0.3 of them; otherwise none.
    bits : Bits or None
        Instead of dropping channels, every channel of every token gets its own number of bits. If nothing else makes
        the cache smaller (``channels``, ``evict``, ``quantize`` or ``read``), ``Bits(2.25)``.
    quantize : Quantize or None
        Number of bits in which the stored keys and values are quantised; "int4" stands for 4 bits of both, likewise
        "int8", "int3", "int2" and "int1".
    evict : TokenEviction or None
        Which tokens to drop before channels are chosen, for example ``SnapKV(budget=512)`` or ``SnapKV(budget=0.25)``,
        a quarter of the prompt; "snapkv", "pyramidkv", "h2o", "streaming_llm" and "graph" stand for these with their
        defaults.
    read : TopTokens or None
        Read few of the old tokens in each step, with a bound on the attention of the others; "pages", "channels" and
        "sampling" stand for the ways with their defaults. With channels, ``channels`` says how many do not give scores,
        and all are stored.
    recent_window : int
        Number of last prompt tokens that stay dense. All tokens after the prompt stay dense too, unless ``tail_block``
        is set.
    sink_tokens : int
        Number of first prompt tokens, padding not counted, that stay dense. The paper keeps none, the default (4 with
        ``bits`` or ``read``). A ``provider`` that takes means or fits regressions needs about four.
    dense_layers : int
        Number of first layers of the model that are not compressed at all.
    tail_block : int or None
        None keeps all tokens after the prompt dense, as in the paper. With a number, each block of this many tokens
        that has left the recent window is compressed too, with the channels chosen for the prompt; 64 with ``bits``.
    fused : bool
        True decodes directly on the pruned keys. False first widens them with zeros, one layer at a time: storage is
        the same, and models that add terms to their logits work too.

    Raises
    ------
    OptionError
        If a value has the wrong type or range, or settings contradict each other.

    Examples
    --------
    >>> config = CacheConfig(ratio=0.6, sink_tokens=4)
    >>> CacheConfig.from_dict(config.to_dict()) == config == CacheConfig(Channels(0.6), sink_tokens=4)
    True
    >>> CacheConfig().bits.bits, CacheConfig(ratio=0.6).bits, CacheConfig(quantize="int4").channels.ratio
    (2.25, None, 0.0)
    >>> CacheConfig("think").channels == Channels(ratio=0.3, method="think")
    True
    """

    channels: Channels
    bits: Bits | None
    quantize: Quantize | None
    evict: TokenEviction | None
    read: TopTokens | None
    recent_window: int = USUAL["recent_window"]
    sink_tokens: int = USUAL["sink_tokens"]  # known once it is known whether there are bits, as is the next but one
    dense_layers: int = USUAL["dense_layers"]
    tail_block: int | None = USUAL["tail_block"]
    fused: bool = USUAL["fused"]

    def __init__(
        self,
        setting: CacheSetting | str | MethodOptions | None = None,
        ratio: float | Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        given = by_name(setting, ratio, settings)
        if not all(each.name in given for each in fields(self)):  # else a copy, whose defaults nobody gave
            check_given(given)
        for name, named in (("quantize", Quantize.named), ("evict", eviction_named), ("read", reading_named)):
            value = given.get(name)
            object.__setattr__(self, name, named(value) if isinstance(value, str) else value)
        check_kind("read", self.read, TopTokens | None, 'TopTokens(share=0.25), "pages", "channels" or "sampling"')
        check_kind(
            "quantize", self.quantize, Quantize | None, 'a Quantize, for instance Quantize(4), or a name such as "int4"'
        )
        if self.evict is not None and (isinstance(self.evict, type) or not isinstance(self.evict, TokenEviction)):
            raise OptionError(
                f'evict={shown(self.evict)}: write an eviction, for instance SnapKV(budget=512) or "snapkv"; one of '
                "your own has queries_needed, tokens() and scores()"
            )
        smaller = any(given.get(name) is not None for name in ("channels", "quantize", "evict", "read"))
        scores = self.read is not None and self.read.by == CHANNELS
        object.__setattr__(self, "bits", bits_of(given, smaller))
        object.__setattr__(self, "channels", channels_of(given, self.bits, scores))
        self._set_windows({name: given.get(name, USUAL[name]) for name in _WINDOWS})
        self._check_together()

    def _set_windows(self, windows: dict[str, Any]) -> None:
        """Set which tokens and layers stay dense, and how they are read."""
        if windows["sink_tokens"] is None:
            windows["sink_tokens"] = 0 if self.bits is None and self.read is None else SINKS
        if windows["tail_block"] is None and self.bits is not None:
            windows["tail_block"] = TAIL_BLOCK_WITH_BITS
        for name, value in windows.items():
            object.__setattr__(self, name, value)
        check_fields(self, flag, "fused")
        check_fields(self, integer, "recent_window", "sink_tokens", "dense_layers", at_least=0)
        check_fields(self, integer, "tail_block", at_least=1, optional=True)

    def _check_together(self) -> None:
        """Refuse settings that contradict each other, each of them being right."""
        if self.read is not None:
            self._check_read(self.read)
        if self.bits is not None:
            refuse_beside_bits(self.bits, self.channels, quantize=self.quantize is not None, fused=not self.fused)
            if self.evict is not None:
                self.bits.check_eviction(self.evict.evict if isinstance(self.evict, LayerBudgets) else self.evict)
            if self.tail_block is not None:
                self.bits.check_tail_block(self.tail_block)
        group = self.key_group
        if self.tail_block is not None and self.tail_block % group:
            raise OptionError(
                f"tail_block={self.tail_block} is not a multiple of group_size={group}, in which keys are stored; "
                f"write tail_block={-(-self.tail_block // group) * group}"
            )

    def _check_read(self, read: TopTokens) -> None:
        if self.bits is not None:
            raise OptionError(
                "read= goes without bits=: to choose the few, codes of all tokens would have to be read, which saves "
                "no time; leave out read=, or write quantize= or ratio= instead of bits="
            )
        if not self.fused:
            raise OptionError(
                "read= needs fused=True: other attention functions read every token; leave out fused=False"
            )
        if self.quantize is not None and self.quantize.keys is not None and read.by == CHANNELS:
            raise OptionError(
                'read=TopTokens(by="channels") stores all channels of the keys as they are, and quantize= has bits for '
                'keys; write by="pages" or "sampling", or leave keys out: quantize=Quantize(values=4)'
            )

    def __getattr__(self, name: str) -> Any:
        """Say where a setting is that is no attribute of its own."""
        of = "channels" if name in OF_CHANNELS else "bits" if name in OF_BITS else ""
        if of:
            raise MovedNameError(f"CacheConfig.{name} has another name now: write config.{of}.{name}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def key_group(self) -> int:
        """Number of tokens whose keys are quantised together; 1 if they are not."""
        return 1 if self.quantize is None or self.quantize.keys is None else self.quantize.group_size

    @property
    def backend(self) -> str:
        """Back end that quantises; empty if none does."""
        return "" if self.quantize is None else self.quantize.backend

    def check_installed(self) -> None:
        """Raise `OptionError` now, not after a long prompt, if a library is missing."""
        if self.quantize is not None:
            self.quantize.check_installed()

    def check_eviction(self, layers: Sequence[int], model: Callable[[bool], Mapping[str, Any]]) -> None:
        """Raise, before a long prompt, if the budgets of an eviction leave nothing to compress.

        Parameters
        ----------
        layers : sequence of int
            The layers that evict.
        model : callable
            Returns the model's fingerprint, with its weights if asked for.

        Raises
        ------
        OptionError, CalibrationError
            If a layer keeps too few tokens, or the losses that divide the budgets are another model's.
        """
        evict, dense = self.evict, self.recent_window + self.sink_tokens
        if evict is None:
            return
        if isinstance(evict, LayerBudgets):
            evict.losses.check_fingerprint(model(bool(evict.losses.fingerprint)))
            evict = evict.evict  # of which no layer's share is smaller than what stays dense
        group = self.key_group
        for place, index in enumerate(layers):
            kept = evict.tokens(place, len(layers), sys.maxsize)
            if kept < dense + group:
                groups = f", and the others are quantised in groups of {group}" if group > 1 else ""
                raise OptionError(
                    f"{evict} keeps {kept} tokens in layer {index}, and {dense} stay dense (recent_window="
                    f"{self.recent_window}, sink_tokens={self.sink_tokens}){groups}: nothing would be left to prune; "
                    "write a larger budget"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, all on one level; the inverse of `from_dict`."""
        values = {name: getattr(self.channels, name) for name in OF_CHANNELS}
        values["options"] = dict(self.channels.options)
        if self.channels.ratio is None:
            values["ratio"] = DEFAULT_RATIO  # which the number of channels overrules
        values |= {name: USUAL[name] if self.bits is None else getattr(self.bits, name) for name in OF_BITS}
        values |= {each.name: getattr(self, each.name) for each in fields(self) if each.name not in values}
        values["evict"] = None if self.evict is None else eviction_to_dict(self.evict)
        values["quantize"] = None if self.quantize is None else self.quantize.to_dict()
        values["read"] = None if self.read is None else asdict(self.read)
        return {name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in SETTINGS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheConfig:
        """The configuration that `to_dict` wrote; what is missing, or at its default, nobody gave.

        Raises
        ------
        OptionError
            If the dict has names that no configuration has.
        """
        check_kind("pruning", values, Mapping, "the dict that to_dict gives")
        unknown = sorted(str(name) for name in set(values) - set(SETTINGS))
        if unknown:
            raise OptionError(f"a configuration has no {', '.join(unknown)}; it has {', '.join(SETTINGS)}")
        given = {name: value for name, value in values.items() if differs(value, USUAL[name])}
        # A ratio that is there beside what overrules it was noted as the default, now or before bits were that.
        noted = isinstance(given.get("ratio"), float) and given["ratio"] in (0.0, DEFAULT_RATIO)
        if any(given.get(name) is not None for name in BUDGETS):
            quiet = {name: given.pop(name) for name in ("seed", "observation_window") if name in given}
            ignored = ("ratio",) * noted + ("method",) * (given.get("method") == DEFAULT_METHOD)
            given = {name: value for name, value in given.items() if name not in ignored}
            given |= {"channels": Channels(ratio=0.0, **quiet)} if quiet else {}
        elif given.get("kept_channels") is not None and noted:
            del given["ratio"]
        if "evict" in given:
            given["evict"] = eviction_from_dict(given["evict"])
        if "quantize" in given:
            check_kind("quantize", given["quantize"], Mapping, "the dict that Quantize.to_dict gives")
            given["quantize"] = Quantize.from_dict(given["quantize"])
        if "read" in given and not isinstance(given["read"], str):
            given["read"] = reading_from_dict(given["read"])
        return cls(**given)

    def to_json(
        self, path: str | os.PathLike[str] | None = None, model: PreTrainedModel | PreTrainedConfig | None = None
    ) -> str:
        """Return the settings as the text of a file that `from_json` and ``attach(model, config=FILE)`` read.

        Parameters
        ----------
        path : path, optional
            Write the file as well, atomically.
        model : PreTrainedModel or PreTrainedConfig, optional
            The model that they are for; the file is then refused for others.

        Raises
        ------
        OptionError
            If the file cannot be written.

        Examples
        --------
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/cache.json"
        >>> text = CacheConfig(bits=2.25).to_json(path)
        >>> CacheConfig.from_json(path) == CacheConfig(bits=2.25)
        True
        """
        text = format_settings(self.to_dict(), {} if model is None else fingerprint(model))
        if path is not None:
            write_settings(path, text)
        return text

    @classmethod
    def from_json(
        cls, path: str | os.PathLike[str], model: PreTrainedModel | PreTrainedConfig | None = None
    ) -> CacheConfig:
        """Read a file that `to_json` or ``grace-opt tune`` wrote.

        Parameters
        ----------
        path : path
        model : PreTrainedModel or PreTrainedConfig, optional
            Refuse a file for another model. None takes the settings whatever model they are for.

        Raises
        ------
        OptionError
            If there is no such file, it is of another kind or version, for another model, or holds settings that no
            configuration has.
        """
        try:
            return cls.from_dict(read_settings(path, model))
        except TypeError as error:  # OptionError is one; a value of a type that nothing expects may raise others
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"{os.fspath(path)} holds settings that cannot be: {error}") from error

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CacheConfig:
        """Build a configuration from keyword arguments; unknown names become options of the method."""
        known = {*SETTINGS, "channels"}
        check_kind("options", settings.get("options", {}), Mapping, "a dict from names to values")
        options = {**settings.get("options", {}), **{n: v for n, v in settings.items() if n not in known}}
        given = {n: v for n, v in settings.items() if n in known and n != "options"}
        if options:
            given["options"] = options
        return cls(**given)


_WINDOWS = ("recent_window", "sink_tokens", "dense_layers", "tail_block", "fused")


def by_name(
    setting: CacheSetting | str | MethodOptions | None,
    ratio: float | Sequence[float] | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return settings by name: the first two, if they are given, and others.

    Raises
    ------
    OptionError
        If one is given twice.

    Examples
    --------
    >>> by_name(Bits(2.25), None, {"sink_tokens": 0})["bits"].bits
    2.25
    """
    if isinstance(setting, CacheConfig):
        raise OptionError("a CacheConfig has all settings: write config=, and no others")
    given: Any = setting  # it may be the class itself, of which the check says more
    kinds = {"channels": Channels, "bits": Bits, "quantize": Quantize, "read": TopTokens, "evict": TokenEviction}
    for name, kind in kinds.items():
        if isinstance(ratio, kind):
            raise OptionError(
                f"{type(setting).__name__}(...) and {type(ratio).__name__}(...) both come first, and only one can: "
                f"write {name}={type(ratio).__name__}(...)"
            )
    found = (name for name, kind in kinds.items() if isinstance(setting, kind) or given is kind)
    first = {next(found, "method"): setting, "ratio": ratio}
    first = {name: value for name, value in first.items() if value is not None}
    settings = {name: value for name, value in settings.items() if name not in first or value is not None}
    if twice := [name for name in first if name in settings]:
        raise OptionError(f"{twice[0]} is given twice: {shown(first[twice[0]])} and {shown(settings[twice[0]])}")
    return {**first, **settings}
