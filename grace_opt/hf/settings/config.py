"""`CacheConfig`: all settings of a pruned key cache, as one frozen value that can be written to JSON.

Use it to store the settings next to a result, to share them between caches, or to read them from a file. You can also
pass the same names directly: ``CompressedCache(model, ratio=0.6, sink_tokens=4)`` builds the configuration for you.

Source: GRACE (arXiv 2604.16983) for protection, ThinK (arXiv 2407.21018) for the windows, StreamingLLM (arXiv
2309.17453) for sink tokens.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ... import registry
from ..._util.parameters import check_fields, flag, integer, plain, shown
from ...attention.provider import DEFAULT_RATIO, MaskProvider
from ...attention.weights import check_protection, prune_count
from ...errors import OptionError
from ...registry import MethodOptions
from ..evict.eviction import TokenEviction
from ..evict.names import eviction_from_dict, eviction_named, eviction_to_dict
from ..models.arguments import DEFAULT_METHOD, OTHER_NAMES_OF_SETTINGS, advice, explains_arguments
from ..models.fingerprint import fingerprint
from .bits import (
    BUDGETS,
    CALIBRATED,
    DEFAULT_BITS,
    SINKS,
    TAIL_BLOCK_WITH_BITS,
    check_bits,
    check_given_bits,
    check_tail_block,
    differs,
)
from .config_file import format_settings, read_settings, write_settings
from .quantization import Quantization
from .reading import CHANNELS, TopTokens, reading_from_dict, reading_named

#: Settings that ask for channels to be dropped (as options of a method do), and those that only say how.
_DROPS, _CHOOSES = ("ratio", "kept_channels", "method"), ("protect", "weight", "seed", "observation_window")


def _check_given(given: Mapping[str, Any]) -> None:
    """Refuse arguments that would be ignored, also at their default values."""
    check_given_bits(given)
    scores = getattr(given.get("read"), "by", given.get("read")) == CHANNELS
    if not scores and all(given.get(name) is None for name in _DROPS) and not given.get("options"):
        _refuse_choice({name: given[name] for name in _CHOOSES if given.get(name) is not None})
    if given.get("kept_channels") is not None and "ratio" in given:
        raise _one_of_two(given["ratio"], given["kept_channels"])


@explains_arguments(
    OTHER_NAMES_OF_SETTINGS, ' Give the options of a method as options={"name": value}.', check=_check_given
)
@dataclass(frozen=True)
class CacheConfig:
    """How a key cache is made smaller: with ``bits=2.25``, unless a setting is given that makes it smaller otherwise.

    Attributes
    ----------
    method : str or options object, optional
        How channels to drop are chosen: ``"grace"`` (salient-channel protection and MIES), which is the default, the
        name of any registered solver, or a solver's options object such as
        ``grace_opt.solvers.TabuOptions(iterations=500)``, which is stored as the solver's name and ``options``.
    ratio : float or sequence of float, optional
        Share of the channels to drop, in [0, 1): ⌈ratio · d⌉ of d channels are removed. One number, or one per layer
        of the model; entries for layers that are not pruned are ignored. If it is not given: 0.3 where ``method``,
        ``options`` or ``read="channels"`` ask for channels to be chosen; otherwise 0, none is dropped.
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
    recent_window : int
        Number of last prompt tokens that stay dense. All tokens after the prompt stay dense too, unless ``tail_block``
        is set.
    observation_window : int
        Number of last prompt queries from which W is built; at most the whole prompt.
    sink_tokens : int
        Number of first prompt tokens, padding not counted, that stay dense. The paper keeps none, the default (4 with
        ``bits`` or ``read``). A ``provider`` that takes means or fits regressions needs about four.
    dense_layers : int
        Number of first layers of the model that are not pruned at all.
    tail_block : int, optional
        None keeps all tokens after the prompt dense, as in the paper. With a number, each block of this many tokens
        that has left the recent window is pruned too, with the channels chosen for the prompt.
    fused : bool
        True decodes directly on the pruned keys. False first widens them with zeros, one layer at a time: storage is
        the same, and models that add terms to their logits work too.
    evict : TokenEviction or str, optional
        Which tokens to drop before channels are chosen, for example ``SnapKV(budget=512)`` or ``SnapKV(budget=0.25)``,
        a quarter of the prompt; "snapkv", "pyramidkv", "h2o", "streaming_llm" and "graph" stand for these with their
        defaults.
    quantize : Quantization or str, optional
        Number of bits in which the pruned keys and their values are stored; "int4" stands for 4 bits of both, likewise
        "int8", "int3", "int2" and "int1".
    bits : float, optional
        Mean number of bits per element of K and V, with everything counted, over the tokens that are neither sink
        tokens nor recent: instead of pruning, every channel of every token gets its own number of bits. Sets
        ``sink_tokens`` to 4 and ``tail_block`` to 64 unless they are given. If it is not given: 2.25, unless ``ratio``,
        ``kept_channels``, ``method``, ``options``, ``evict``, ``quantize``, ``read``, ``key_bits`` with ``value_bits``,
        or ``total_bytes`` make the cache smaller.
    key_bits, value_bits : float, optional
        The same for K and V apart; both, instead of ``bits``.
    total_bytes : int, optional
        Bytes of the whole cache at the end of the prompt, dense parts included, instead of ``bits``.
    basis : str or path
        With ``bits``: "calibrated" (the model's own, made once and kept), "prompt" (from each prompt, stored and
        counted), "none", or a file that ``grace-opt calibrate basis`` wrote.
    trellis : bool, optional
        With ``bits``: code the numbers of a channel together, by a trellis, which leaves less error in the same bytes;
        the default. False codes them one by one, which takes less time while a prompt is read.
    read : TopTokens or str, optional
        Read few of the old tokens in each step, with a bound on the attention of the others; "pages", "channels" and
        "sampling" stand for the ways with their defaults. Sets ``sink_tokens`` to 4 unless it is given. With channels,
        ``ratio`` says how many do not give scores, and all are stored.

    Raises
    ------
    OptionError
        If a value has the wrong type or range.

    Examples
    --------
    >>> config = CacheConfig(ratio=0.6, sink_tokens=4)
    >>> CacheConfig.from_dict(config.to_dict()) == config
    True
    >>> CacheConfig().bits, CacheConfig(ratio=0.6).bits, CacheConfig(quantize="int4").ratio
    (2.25, None, 0.0)
    >>> from grace_opt.solvers import TabuOptions
    >>> CacheConfig(TabuOptions(iterations=500)).options
    {'iterations': 500}
    """

    # Known once it is known what is asked for.
    method: str | MethodOptions = None  # type: ignore[assignment]
    ratio: float | Sequence[float] = None  # type: ignore[assignment]
    kept_channels: int | None = None
    protect: tuple[float, float] | None = None
    weight: str = "frobenius"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    recent_window: int = 32
    observation_window: int = 32
    sink_tokens: int = None  # type: ignore[assignment]  # known once it is known whether there are bits
    dense_layers: int = 0
    tail_block: int | None = None
    fused: bool = True
    evict: TokenEviction | None = None  # a name is replaced by what it stands for
    quantize: Quantization | None = None
    bits: float | None = None
    key_bits: float | None = None
    value_bits: float | None = None
    total_bytes: int | None = None
    basis: str | os.PathLike[str] = CALIBRATED
    trellis: bool | None = None  # known once it is known what is read; with bits alone
    read: TopTokens | None = None  # a name is replaced by what it stands for

    def __post_init__(self) -> None:
        if isinstance(self.quantize, str):
            object.__setattr__(self, "quantize", Quantization.named(self.quantize))
        if isinstance(self.evict, str):
            object.__setattr__(self, "evict", eviction_named(self.evict))
        if isinstance(self.read, str):
            object.__setattr__(self, "read", reading_named(self.read))
        self._complete()
        check_fields(self, flag, "fused")
        if self.trellis is not None:
            check_fields(self, flag, "trellis")
        elif self.is_coded:
            object.__setattr__(self, "trellis", True)
        if self.read is not None:
            _check_read(self)
        check_bits(self)
        if self.sink_tokens is None:
            object.__setattr__(self, "sink_tokens", SINKS if self.is_coded or self.read is not None else 0)
        if self.is_coded and self.tail_block is None:
            object.__setattr__(self, "tail_block", TAIL_BLOCK_WITH_BITS)
        check_fields(self, integer, "recent_window", "sink_tokens", "dense_layers", "seed", at_least=0)
        check_fields(self, integer, "observation_window", at_least=1)
        check_fields(self, integer, "tail_block", "kept_channels", at_least=1, optional=True)
        if self.is_coded and self.tail_block is not None:
            check_tail_block(self.tail_block)
        if is_dataclass(self.method):  # by name in here, so that it goes into JSON
            spec, made = registry.chosen(self.method, self.options)
            object.__setattr__(self, "method", spec.name)
            object.__setattr__(self, "options", registry.changed(made))
        for name, kind, write in _WRITE:
            _check_kind(name, getattr(self, name), kind, write)
        object.__setattr__(self, "ratio", plain(self.ratio))
        if not isinstance(self.ratio, numbers.Real):
            if isinstance(self.ratio, str) or not isinstance(self.ratio, Sequence) or not len(self.ratio):
                raise OptionError(
                    f"ratio={shown(self.ratio)}: give one number in [0, 1), or a list with one per layer"
                    f"{_meant_ratio(self.ratio)}"
                )
            object.__setattr__(self, "ratio", tuple(self.ratio))
        for layer, ratio in enumerate(self.ratios(1 if isinstance(self.ratio, numbers.Real) else None)):
            try:
                prune_count(ratio, 1)
            except OptionError as error:
                where = "" if isinstance(self.ratio, numbers.Real) else f"layer {layer}: "
                raise OptionError(f"{where}{str(error).rstrip('.')}{_meant_ratio(ratio)}") from None
        # Plain floats: numpy's would not go into JSON.
        floats = tuple(map(float, self.ratio)) if isinstance(self.ratio, Sequence) else float(self.ratio)
        object.__setattr__(self, "ratio", floats)
        if self.kept_channels is not None and self.ratios(None) not in ((0.0,), (DEFAULT_RATIO,)):
            raise _one_of_two(self.ratio, self.kept_channels)
        if self.protect is not None:
            object.__setattr__(self, "protect", check_protection(self.protect))
        if self.evict is not None and (isinstance(self.evict, type) or not isinstance(self.evict, TokenEviction)):
            raise OptionError(
                f'evict={shown(self.evict)}: write an eviction, for instance SnapKV(budget=512) or "snapkv"; one of '
                "your own has queries_needed, tokens() and scores()"
            )
        object.__setattr__(self, "options", dict(self.options))
        group = self.quantize.group_size if self.quantize is not None and self.quantize.keys is not None else 1
        if self.tail_block is not None and self.tail_block % group:
            raise OptionError(
                f"tail_block={self.tail_block} is not a multiple of group_size={group}, in which keys are stored; "
                f"write tail_block={-(-self.tail_block // group) * group}"
            )
        if self.options.get("path") is True:
            raise OptionError("path=True is for solve(): a cache has one number of channels to keep; leave path out")
        try:
            self.provider(0)  # report unknown methods and options now, not after a long prompt
        except OptionError as error:
            if "Did you mean" in str(error):
                raise
            names = [f.name for f in fields(self)]
            unknown = [name for name in self.options if f"no option {name!r}" in str(error)]
            if not unknown:
                raise
            meant = advice(self.options, names, OTHER_NAMES_OF_SETTINGS)
            if meant:
                raise OptionError(f"a cache has no setting {', '.join(unknown)}.{meant}") from None
            raise OptionError(f"{error} The settings of a cache are {', '.join(names)}.") from None

    def _complete(self) -> None:
        """Set method and ratio if they are not given, and the bits of a cache that nothing else makes smaller."""
        scores = isinstance(self.read, TopTokens) and self.read.by == CHANNELS
        drops = self.method is not None or self.kept_channels is not None or bool(self.options) or scores
        if self.ratio is None and not (drops or self.is_coded):
            given = {name: value for name in _CHOOSES if (value := getattr(self, name)) is not None}
            _refuse_choice({name: value for name, value in given.items() if differs(value, getattr(type(self), name))})
        others = any(each is not None for each in (self.ratio, self.evict, self.quantize, self.read))
        if not (self.is_coded or drops or others):
            if self.fused is False:
                raise OptionError(
                    f"fused=False: write ratio={DEFAULT_RATIO} as well, or evict= or quantize=. Alone it would be with "
                    f"bits={DEFAULT_BITS}, the default, whose codes no attention but ours can read"
                )
            object.__setattr__(self, "bits", DEFAULT_BITS)
        if self.ratio is None:
            object.__setattr__(self, "ratio", DEFAULT_RATIO if drops and not self.is_coded else 0.0)
        if self.method is None:
            object.__setattr__(self, "method", DEFAULT_METHOD)

    @property
    def is_coded(self) -> bool:
        """Whether channels get bits, rather than being pruned."""
        return any(getattr(self, name) is not None for name in BUDGETS)

    @property
    def drops_nothing(self) -> bool:
        """Whether no channel is dropped in any layer."""
        return self.is_coded or (self.kept_channels is None and not any(self.ratios(None)))

    def ratios(self, layers: int | None = None) -> tuple[float, ...]:
        """The ratio of every layer.

        Parameters
        ----------
        layers : int, optional
            Number of layers of the model. None uses the length of the given list.
        """
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
            ratio,
            kept_channels=self.kept_channels,
            protect=self.protect,
            weight=self.weight,
            seed=self.seed,
            **self.options,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; the inverse of `from_dict`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["options"] = dict(self.options)
        values["evict"] = None if self.evict is None else eviction_to_dict(self.evict)
        values["quantize"] = None if self.quantize is None else self.quantize.to_dict()
        values["read"] = None if self.read is None else asdict(self.read)
        values["basis"] = os.fspath(self.basis)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheConfig:
        """The configuration that `to_dict` wrote.

        Raises
        ------
        OptionError
            If the dict has names that no configuration has.
        """
        _check_kind("pruning", values, Mapping, "the dict that to_dict gives")
        known = [f.name for f in fields(cls)]
        unknown = sorted(str(name) for name in set(values) - set(known))
        if unknown:
            raise OptionError(f"a configuration has no {', '.join(unknown)}; it has {', '.join(known)}")
        # All fields, so that values at their defaults are none that were given.
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}
        found = {**defaults, **values}
        if (
            isinstance(found["ratio"], float)
            and found["ratio"] == DEFAULT_RATIO
            and any(found[name] is not None for name in BUDGETS)
        ):
            found["ratio"] = None  # noted beside bits before they were the default, and without effect
        if found.get("evict") is not None:
            found["evict"] = eviction_from_dict(found["evict"])
        if found.get("quantize") is not None:
            _check_kind("quantize", found["quantize"], Mapping, "the dict that Quantization.to_dict gives")
            found["quantize"] = Quantization.from_dict(found["quantize"])
        if found.get("read") is not None and not isinstance(found["read"], str):
            found["read"] = reading_from_dict(found["read"])
        return cls(**found)

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
        known = {f.name for f in fields(cls)}
        _check_kind("options", settings.get("options", {}), Mapping, "a dict from names to values")
        options = {**settings.get("options", {}), **{n: v for n, v in settings.items() if n not in known}}
        return cls(**{**{n: v for n, v in settings.items() if n in known}, "options": options})


def _check_read(config: CacheConfig) -> None:
    """Refuse what does not go with ``read=``."""
    read = config.read
    if not isinstance(read, TopTokens):
        raise OptionError(f'read={shown(read)}: write TopTokens(share=0.25), "pages", "channels" or "sampling"')
    if config.is_coded:
        raise OptionError(
            "read= goes without bits=: to choose the few, codes of all tokens would have to be read, which saves no "
            "time; leave out read=, or write quantize= or ratio= instead of bits="
        )
    if config.fused is False:
        raise OptionError("read= needs fused=True: other attention functions read every token; leave out fused=False")
    if config.quantize is not None and config.quantize.keys is not None and read.by == CHANNELS:
        raise OptionError(
            'read=TopTokens(by="channels") stores all channels of the keys as they are, and quantize= has bits for '
            'keys; write by="pages" or "sampling", or leave keys out: quantize=Quantization(keys=None, values=4)'
        )


_WRITE: tuple[tuple[str, Any, str], ...] = (
    ("options", Mapping, "a dict from names to values"),
    ("method", str, 'a name, for instance "grace"; the share to prune is another argument, ratio=, and so are bits='),
    ("weight", str, 'a name, for instance "frobenius"'),
    ("quantize", Quantization | None, 'a Quantization, for instance Quantization(keys=4), or a name such as "int4"'),
)


def _refuse_choice(given: Mapping[str, Any]) -> None:
    """Refuse settings that say how to choose channels where none is dropped."""
    if given:
        raise OptionError(
            f"{', '.join(f'{name}={shown(value)}' for name, value in given.items())}: that is how channels are chosen "
            f"to be dropped, and without ratio= none is; write ratio={DEFAULT_RATIO} as well, or leave "
            f"{', '.join(given)} out"
        )


def _one_of_two(ratio: Any, kept_channels: Any) -> OptionError:
    return OptionError(f"ratio={shown(ratio)} and kept_channels={kept_channels}: write one of the two")


def _meant_ratio(ratio: Any) -> str:
    """Guess the ratio meant by a text or a percentage."""
    try:
        value = float(ratio.rstrip(" %")) if isinstance(ratio, str) else float(ratio)
    except (TypeError, ValueError, OverflowError):
        return ""
    share = value / 100 if 1 < value < 100 else value
    return f"; write ratio={share:g}" if 0 <= share < 1 and not isinstance(ratio, bool) else ""


def _check_kind(name: str, value: Any, kind: Any, write: str) -> None:
    if not isinstance(value, kind):
        raise OptionError(f"{name}={shown(value)}: write {write}")
