"""`CompressedCache`: a cache for ``generate`` that keeps only the key channels chosen by a solver.

When: long prompts need a smaller key cache than dense 16-bit keys, on any model that computes attention through
transformers' attention interface. At equal size, int8 or int4 keys lose less than pruning alone. Below about 3.5 bits
per key element, as a rule of thumb, pruning combined with quantisation is better.

The class starts from ``DynamicCache(config=...)``, in which transformers decides what each layer needs, and replaces
only the full-attention layers. Layers with sliding windows or linear attention stay as they are.

Source: GRACE (arXiv 2604.16983), Algorithm 1; the layout of ThinK (arXiv 2407.21018), but stored per KV head.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..._util.parameters import integer, shown
from ...attention.masks import ChannelMask
from ...attention.provider import DEFAULT_RATIO, MaskProvider
from ...errors import CacheError, CalibrationError, GraceError, OptionError
from ...registry import MethodOptions
from ..bases.budget import BasisSource, BitBudget
from ..bases.byte_limit import ByteLimit
from ..bases.make_budget import budget_of
from ..models.arguments import unwrap_model
from ..models.fingerprint import OPTIONAL, adapters_of, fingerprint, fingerprint_differences
from ..models.foreign_layers import crop_layer, keeps_slice_of, own_window
from ..models.placement import layer_devices
from ..models.prunable import prunable_layers, text_config
from ..settings.bits import BUDGETS, DEFAULT_BITS, NO_BASIS, Bits
from ..settings.config import CacheConfig, CacheSetting, by_name
from ..stores.channels.compress import CHANNELS
from ..stores.channels.kept import mask_from_kept
from ..stores.channels.static_masks import static_sources
from ..stores.coded.maker import CODED
from ..stores.maker import StoreMaker, name_of
from ..stores.plan import LayerPlan, MaskSource
from ..stores.tally import LayerReading, ReadReport
from .byte_keeper import ByteKeeper, bytes_elsewhere, check_limit
from .in_step import InStep, all_or_none
from .kl_by_bits import within_kl
from .layer import PrunedKeyLayer
from .mask_source import forgotten_source, no_source, settings_of
from .report import MemoryReport, measure
from .saving import Tokens, load_about, restore_layers, save_layers


class CompressedCache(Cache):
    """A key-value cache that stores only the kept channels of the prompt's older keys, per KV head.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
        The model, or ``model.config``. From the model, the cache also learns the size of prefill chunks and which
        weights its masks and saved states belong to.
    setting, ratio
        As in `CacheConfig`: one object that makes the cache smaller, such as ``Bits(2.25)``, or a method. Without them,
        and without other settings that make the cache smaller, keys and values are stored in 2.25 bits (``bits=2.25``).
    config : CacheConfig or path, optional
        All settings at once, instead of ``setting``, ``ratio`` and ``settings``. A path is that of a file that
        ``grace-opt tune`` or `CacheConfig.to_json` wrote; it is refused if it is for another model.
    provider : MaskSource, optional
        Chooses the channels; replaces the settings of `Channels`, except ``observation_window``. A
        `grace_opt.MaskProvider`, or any function ``(queries, keys, attention_mask) -> ChannelMask``.
    masks : ChannelMask, optional
        Static masks, one leading entry per layer: the same channels for every prompt. Replaces the same settings.
    store : StoreMaker, optional
        Your own way to hold the older tokens, usually a subclass of `grace_opt.hf.stores.maker.TensorStore`: replaces
        whatever makes a cache smaller, but ``evict``.
    prompt_length : int, optional
        Number of prompt tokens, padding included. Needed for prompts fed in chunks, and for assisted decoding, which
        feeds candidates along with the prompt. By default the first forward pass of several tokens is the prompt.
    offloading : bool
        Keep the layers on the CPU and fetch each when needed, as ``DynamicCache(offloading=True)`` does. Needs CUDA.
    **settings
        The settings of `CacheConfig` by name; any other name is an option of the method.

    Attributes
    ----------
    config : CacheConfig
        The settings.
    prunable_layers : tuple of int
        Positions, in the model, of the layers that are pruned.
    left_out : str or None
        After a ``generate`` of `attach`: why the cache holds less than the text, if it does.

    Raises
    ------
    CacheError
        If the model has no full-attention layer that could be pruned, or ``offloading`` is asked for without CUDA.
    MaskError
        If ``masks`` was made for another model.
    OptionError
        If an argument has the wrong type or range, or contradicts another.
    ProblemError
        If ``ratio`` or ``kept_channels`` leaves too few channels beside the protected ones.
    UnknownSolverError
        If no method has this name.
    CalibrationError
        If there is no calibrated basis for this model where ``basis`` says.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> cache = CompressedCache(LlamaConfig(num_hidden_layers=2), method="mies", ratio=0.5)
    >>> cache.prunable_layers
    (0, 1)
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        setting: CacheSetting | str | MethodOptions | None = None,
        ratio: float | Sequence[float] | None = None,
        *,
        config: CacheConfig | str | os.PathLike[str] | None = None,
        provider: MaskSource | None = None,
        masks: ChannelMask | None = None,
        store: StoreMaker | None = None,
        prompt_length: int | None = None,
        offloading: bool = False,
        **settings: Any,
    ) -> None:
        if not isinstance(model, PreTrainedConfig):
            model = unwrap_model(model, "CompressedCache")
        text = text_config(model, "CompressedCache")
        _check_offloading(offloading)
        prompt_length = integer("prompt_length", prompt_length, at_least=1, optional=True)  # before a basis is made
        given = by_name(setting, ratio, settings)
        requested = config is not None or any(given.get(name) is not None for name in BUDGETS)
        self.config = settings_of(config, given, {"provider": provider, "masks": masks, "store": store}, model)
        self.config.check_installed()
        layers: list[Any] = list(DynamicCache(config=text).layers)
        self._choose_layers(model, text, layers)
        self._remember(model, text)
        self.config.check_eviction(self.prunable_layers, self._known_model)
        self._stored_by = None if store is None else name_of(store)
        self.maker = store or (CHANNELS if self.config.bits is None else CODED)
        self.budget = None if self.config.bits is None else self._budget(self.config.bits, model, layers, requested)
        if offloading and self.limit is not None:
            raise OptionError(
                "max_bytes= and offloading=True: layers that are moved away cannot be coded again; leave out one of "
                "them"
            )
        chunk_size = getattr(getattr(model, "generation_config", None), "prefill_chunk_size", None)
        for index, source in self._sources(len(layers), provider, masks).items():
            # The last one: where an eviction leaves layers different numbers of tokens, that has the fewest.
            announces = index == self.prunable_layers[-1]
            layers[index] = PrunedKeyLayer(
                LayerPlan(index, self.prunable_layers, source, self.config, chunk_size, announces, self.budget),
                self.maker,
            )
        self._last_updated: PrunedKeyLayer | None = None
        self.left_out: str | None = None
        self._attending = ""  # the model's attention implementation in this step
        self._in_step = InStep(layers, text)
        super().__init__(layers=layers, offloading=offloading)
        self._keeper = ByteKeeper.of(self.budget, self.config, self._shape, self.layers)
        if prompt_length is not None:
            self.declare_prompt(prompt_length)

    @property
    def limit(self) -> ByteLimit | None:
        """The bytes that it never exceeds; None without ``max_bytes``."""
        return None if self.budget is None else self.budget.limit

    def _choose_layers(
        self, model: PreTrainedModel | PreTrainedConfig, text: PreTrainedConfig, layers: list[Any]
    ) -> None:
        """Set which layers are compressed; raise if there are none, or the model takes no cache but its own."""
        prunable = prunable_layers(text, layers)
        if isinstance(model, PreTrainedModel) and not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
            raise CacheError(f"{text.model_type} has a kind of cache of its own, and takes no other")
        self.prunable_layers = tuple(i for i in prunable if i >= self.config.dense_layers)
        self._left_dense = tuple(i for i in prunable if i < self.config.dense_layers)
        if not self.prunable_layers:
            raise CacheError(
                f"dense_layers={self.config.dense_layers} leaves no layer to prune; write fewer: the last layer "
                f"that can be pruned is {prunable[-1]}"
            )

    def _remember(self, model: PreTrainedModel | PreTrainedConfig, text: PreTrainedConfig) -> None:
        """Note which model this cache is for, but not the model itself: copying a cache must not copy the model."""
        self._shape = fingerprint(text)
        self._config = weakref.ref(text)
        self._model = weakref.ref(model) if isinstance(model, PreTrainedModel) else None
        self._adapters = adapters_of(model) if isinstance(model, PreTrainedModel) else None

    def _budget(
        self, bits: Bits, model: PreTrainedModel | PreTrainedConfig, layers: Sequence[Any], requested: bool
    ) -> BitBudget:
        """Return the budget of bits; if nobody asked for bits, an error says what does without them."""
        try:
            if bits.max_kl is not None:
                bits = within_kl(bits, model, CompressedCache)
            elsewhere = 0
            if bits.max_bytes is not None:
                elsewhere = bytes_elsewhere(model, self._shape, layers, self.prunable_layers)
            budget = budget_of(bits, model, self._shape, self.prunable_layers, len(layers), elsewhere)
            check_limit(budget, self.config, model, self._shape)
            return budget
        except GraceError as error:
            if requested:
                raise
            raise type(error)(
                f"{str(error).rstrip('.')}. (That is for bits={DEFAULT_BITS:g}, the default; a cache that drops "
                f"channels of the keys instead needs no basis: write ratio={DEFAULT_RATIO:g})"
            ) from error

    def _sources(self, count: int, provider: MaskSource | None, masks: ChannelMask | None) -> Mapping[int, MaskSource]:
        self._own_source = provider is None and masks is None
        if masks is not None:
            return static_sources(masks, self._known_model(bool(masks.fingerprint)), self.prunable_layers)
        self.config.channels.ratios(count)
        if self.budget is not None:
            return dict.fromkeys(self.prunable_layers, no_source)
        sources = {i: provider or self.config.channels.provider(i) for i in self.prunable_layers}
        for source in sources.values():
            if isinstance(source, MaskProvider):
                # Check now, not after a long prompt: does protection leave enough channels to prune?
                source.count(int(self._shape["head_dim"]))
        return sources

    def declare_prompt(self, length: int, new_tokens: int | None = None) -> None:
        """Declare where the prompt ends; call it before the model runs on the prompt.

        Parameters
        ----------
        length : int
            Number of tokens up to there, including padding and tokens already cached: ``inputs.input_ids.shape[1]``.
        new_tokens : int, optional
            How many come after it, at most, if that is known: with ``max_bytes=``, bits are then chosen once, for all.
        """
        length = integer("prompt_length", length, at_least=1)
        new_tokens = integer("new_tokens", new_tokens, at_least=0, optional=True)
        for layer in self._pruned_layers():
            if layer.compressed is not None or layer.get_seq_length() >= length:
                raise CacheError(
                    f"the cache holds {layer.get_seq_length()} tokens already; declare the prompt before the model "
                    "runs on it, or call reset()"
                )
        for layer in self._pruned_layers():
            layer.prompt.declared = length
        if self.limit is not None:
            self.limit.until = None if new_tokens is None else length + new_tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to one layer; the model calls it (see :meth:`grace_opt.hf.engine.layer.PrunedKeyLayer.update`)."""
        if layer_idx >= len(self.layers):
            raise CacheError(
                f"the model writes to layer {layer_idx} but this cache was made for {len(self.layers)} layers; write "
                "CompressedCache(model.config, ...) with the configuration of the same model"
            )
        if layer_idx == 0 and self._keeper is not None:
            self._keeper.before_step(key_states, getattr(self._config(), "num_attention_heads", None))
        first, layer = layer_idx == self.prunable_layers[0], self.layers[layer_idx]
        if first or not self._attending:
            self._attending = self._implementation()  # once a step: asking takes as long as ten other lines
        _check_readable(layer, self._attending)
        # A layer's attention runs before the next layer's update, so a forgotten attention function is noticed within
        # the first forward pass, not only at the first decode step.
        if self._last_updated is not None:
            self._last_updated.check_attended()
        if first:
            # Checked one step after the prompt, when the device already has the result: the prompt does not wait for
            # it.
            for each in self.layers:
                if isinstance(each, PrunedKeyLayer):
                    each.check_numbers()
        if not torch.compiler.is_compiling():
            self._in_step.check_update(self.layers, layer_idx)
        self._last_updated = layer if isinstance(layer, PrunedKeyLayer) else None
        if self._last_updated is None and getattr(layer, "is_initialized", False) and isinstance(layer, DynamicLayer):
            pairs = ((layer.keys, layer.values), (key_states, value_states))
            expected, found = ((*keys.shape[:2], keys.shape[-1], values.shape[-1]) for keys, values in pairs)
            if expected != found and layer.keys.numel():
                raise CacheError(
                    f"layer {layer_idx} of the cache holds (batch, KV heads, head_dim, width of values) = {expected} "
                    f"but the new keys have {found}; use a new cache, or the one for this model and batch"
                )
        if isinstance(layer, PrunedKeyLayer):
            layer.implementation = self._attending
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[-2] > 1 and keeps_slice_of(layer, updated[0]):
            own_window(layer)
        return updated

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences in this order, repeated if listed repeatedly, as beam search does.

        Raises
        ------
        CacheError
            If there are more of them than fit into ``max_bytes``; nothing has changed.
        """
        if self._keeper is not None:
            self._pruned_layers()
            self._keeper.fit_rows(len(beam_idx))
        super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens of all layers, or of none: see `grace_opt.hf.engine.layer.PrunedKeyLayer.crop`.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: ``crop(-3)`` removes three tokens.

        Raises
        ------
        CacheError, OptionError
            If a layer cannot be cropped so far.
        """
        with all_or_none(self.layers):
            for layer in self.layers:  # ours first, which say what is wrong with the number
                if isinstance(layer, PrunedKeyLayer):
                    layer.crop(tokens_to_remove)
            try:
                for number, layer in enumerate(self.layers):
                    if not isinstance(layer, PrunedKeyLayer):
                        crop_layer(number, layer, tokens_to_remove)
            except ValueError as error:
                raise CacheError(
                    f"{error}. Write copy.deepcopy(cache) before the tokens that you may want to take back, and go on "
                    "with the copy; or call reset() and read the text again"
                ) from error

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self._select(lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences only."""
        self._select(lambda rows: rows[torch.as_tensor(indices, device="cpu")])

    def _select(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Select sequences in all layers: every one of them can follow beams, and not every one all else."""
        tail = self.layers[self.prunable_layers[0]].tail
        if tail is not None:
            self.reorder_cache(choose(torch.arange(tail.keys.shape[0], device="cpu")))

    def reset(self) -> None:
        """Forget everything, ready for another prompt."""
        for layer in self.layers:
            if isinstance(layer, DynamicLayer) and not isinstance(layer, PrunedKeyLayer):
                # Old versions of transformers fill them with zeros, and go on behind these.
                layer.keys = layer.values = None
                layer.is_initialized = False
        super().reset()
        self._in_step.forget()
        self.left_out = None
        if self.limit is not None:
            self.limit.chosen, self.limit.until = [], None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens: all that were added and not cropped."""
        if any(isinstance(layer, PrunedKeyLayer) and layer.is_postponed for layer in self.layers):
            self._settle()  # all layers at once: breaks torch.compile's graph once, not in every layer
        return int(super().get_seq_length(layer_idx))

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile the steps with static shapes: never.

        ``generate`` asks before every step, outside what ``torch.compile`` traces. This is where a prompt that could
        not be compressed while it was traced is compressed.
        """
        if not torch.compiler.is_compiling():
            self._settle()
        return False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _settle(self) -> None:
        for layer in self.layers:
            if isinstance(layer, PrunedKeyLayer):
                layer.settle()

    def _implementation(self) -> str:
        """The model's attention implementation; empty if the model is gone."""
        config = self._config()
        return "" if config is None else str(getattr(config, "_attn_implementation", ""))

    def channel_mask(self) -> ChannelMask:
        """Which channels were pruned.

        Returns
        -------
        ChannelMask
            With leading dimensions (prunable layers, batch), on the CPU, carrying the model's fingerprint.

        Raises
        ------
        CacheError
            If nothing has been pruned yet.
        """
        if self.budget is not None:
            raise CacheError("channels are coded here (bits=), none is pruned; memory_report() says how many bits")
        masks = []
        for layer in self._pruned_layers():
            if layer.compressed is None:
                raise CacheError(
                    f"nothing is pruned yet: the cache holds {layer.get_seq_length()} tokens and prunes after a "
                    f"prompt longer than recent_window={self.config.recent_window}; run the model on a longer "
                    "prompt, or write a smaller recent_window"
                )
            kept = layer.compressed.kept_channels()
            if kept is None:
                raise CacheError(f"no channel is pruned: {type(layer.compressed).__name__} stores them all")
            masks.append(mask_from_kept(kept, layer.head_dim))
        return ChannelMask.stack(masks, fingerprint=self.fingerprint())

    def fingerprint(self) -> dict[str, int | str]:
        """Return which model this cache is for, weights included if it was made from a model that still exists."""
        model = None if self._model is None else self._model()
        if model is None:
            return self._shape
        own = {} if self._adapters is None else {"adapters": self._adapters}
        return {**fingerprint(model), **own}

    def _known_model(self, weights: bool) -> dict[str, int | str]:
        """Return the model's fingerprint, or only its shape: weights take a while to read."""
        return self.fingerprint() if weights else self._shape

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise if the cache was made for, or loaded with, a model that differs from this one in shape or weights.

        A cache made from a configuration, or whose model is gone, knows only the shape. One that holds tokens is
        refused, too, if the model's adapters were switched since it was empty.

        Raises
        ------
        CacheError
        """
        own = None if self._model is None else self._model()
        adapters = adapters_of(model)
        if own is model:
            self._check_adapters(adapters)
            return
        here = fingerprint(model.config if own is None else model)
        if differences := fingerprint_differences("cache", self.fingerprint(), here):
            raise CacheError(
                f"past_key_values is a cache of another model ({'; '.join(differences)}); use a new cache for this one"
            )

    def _check_adapters(self, now: str | None) -> None:
        if not self.get_seq_length():
            self._adapters = now
        if now != self._adapters:
            raise CacheError(
                f"the model's adapters were switched since past_key_values was filled (active then: "
                f"{self._adapters or 'none'}, now: {now or 'none'}); use a new cache, or switch back"
            )

    @property
    def is_dense(self) -> bool:
        """Whether nothing has been pruned yet."""
        return all(layer.compressed is None for layer in self._pruned_layers())

    def save(self, path: str | os.PathLike[str], *, tokens: Tokens | None = None) -> None:
        """Write all that is cached to a safetensors file, for `load` in another process.

        The file is written atomically: a crash never leaves half of it. A cache made from the model, not from its
        configuration, also records which weights the keys came from.

        Parameters
        ----------
        path : path
            The file.
        tokens : array (n,) of int64, optional
            What the cache has read, by which a `PromptStore` finds it.

        Raises
        ------
        CacheError
            If layers hold different numbers of tokens, because the last step was interrupted.
        """
        self._pruned_layers()
        self._in_step.check_all(self.layers)
        about = {
            "fingerprint": self.fingerprint(),
            "pruning": self.config.to_dict(),
            "chosen_by": "method" if self._own_source else "provider or masks",
            "basis": self._basis_digest(),
        }
        if self._stored_by is not None:
            about["store"] = self._stored_by
        save_layers(path, self.layers, about, tokens)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel | PreTrainedConfig,
        *,
        provider: MaskSource | None = None,
        masks: ChannelMask | None = None,
        store: StoreMaker | None = None,
        basis: str | os.PathLike[str] | None = None,
        max_bytes: int | str | None = None,
        mapped: bool = False,
    ) -> CompressedCache:
        """Read a cache that `save` wrote, bit for bit.

        Parameters
        ----------
        path : path
            The file.
        model : PreTrainedModel or PreTrainedConfig
            The model the cache was made for, or its configuration. Given the model, the tensors go to the devices of
            its layers and the weights are compared too; given the configuration, the tensors go to the CPU.
        provider, masks
            What chose the channels, if not a method; needed only after a `reset`.
        store : StoreMaker, optional
            What held the older tokens, if that was your own.
        basis : path, optional
            With ``bits=``: the file of the calibrated basis, if it is not where it was, or not on this machine. A basis
            belongs to the model and is not part of a saved cache.
        max_bytes : int or str, optional
            For a coded cache: from now on, what it never exceeds, in place of the budget that it was made with. It is
            coded again where that takes fewer bits.
        mapped : bool
            Use what is stored where it lies in the file, without a copy, as long as the cache lives. The file may be
            removed meanwhile, but not be written to.

        Raises
        ------
        CacheError
            If the file cannot be read, was saved for another model, is coded in another basis, or has more tokens than
            fit into ``max_bytes``.
        """
        if not isinstance(model, PreTrainedConfig):
            model = unwrap_model(model, "CompressedCache")
        about, tensors = load_about(path, mapped)
        _check_saved_for(path, about["fingerprint"], model)
        config = _saved_config(path, about["pruning"], basis, max_bytes)
        stored_by, here = about.get("store"), None if store is None else name_of(store)
        if stored_by != here:
            raise CacheError(
                f"{path} holds tokens of {stored_by or 'no store of your own'}, not of {here or 'the usual stores'}; "
                "write CompressedCache.load(path, model, store=...) with the store that it was saved with"
            )
        if about["chosen_by"] != "method" and provider is None and masks is None:
            provider = forgotten_source
        try:
            cache = cls(model, config=config, provider=provider, masks=masks, store=store)
        except GraceError as error:
            ours = provider in (None, forgotten_source) and masks is None and basis is None and max_bytes is None
            if not ours:
                raise
            if isinstance(error, CalibrationError):
                raise CacheError(
                    f"{path} is coded in a calibrated basis, which is not part of the file: {error} If you have the "
                    "basis in another file, write CompressedCache.load(path, model, basis=FILE)"
                ) from error
            raise CacheError(f"{path} has settings that do not suit this model: {error}") from error
        if about["basis"] is not None and about["basis"] != cache._basis_digest(needed=True):
            raise CacheError(
                f"{path} is coded in another basis of this model than the one at hand (basis="
                f"{config.bits and config.bits.basis!r}); write CompressedCache.load(path, model, basis=FILE) with the "
                "file of the basis that it was coded in, or run the prompt again"
            )
        try:
            restore_layers(cache.layers, about, tensors, layer_devices(model, len(cache.layers)))
        except CacheError as error:
            raise CacheError(f"{path}: {error}") from error
        known = about["basis"] is not None or cache.basis_source is None
        if not known and any(layer.pruned_length for layer in cache._pruned_layers()):
            raise CacheError(f"{path} does not say in which basis it is coded; run the prompt again")
        if cache._keeper is not None and cache.get_seq_length():
            cache._keeper.fit_rows(cache._pruned_layers()[0].rows)
        return cache

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, by `torch.save` too: what is pickled belongs to one version of everything."""
        raise CacheError(
            "a cache is not pickled; write cache.save(FILE), and CompressedCache.load(FILE, model) where it is needed"
        )

    def __copy__(self) -> CompressedCache:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, copies: dict[int, Any]) -> CompressedCache:
        made = copies[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, copies))
        return made

    @property
    def basis_source(self) -> BasisSource | None:
        """The calibrated basis that tokens are coded in, found or made when it is called; None without one."""
        return None if self.budget is None else self.budget.source

    def _basis_digest(self, needed: bool = False) -> str | None:
        """Return the digest of the calibrated basis; None if there is none, or none was needed so far."""
        source = self.basis_source
        if source is None or not (needed or source.known):
            return None
        return source().digest()

    def memory_report(self) -> MemoryReport:
        """Return the bytes that the cache holds now, by part, and those of the dense equivalent."""
        self._pruned_layers()
        found = replace(measure(self.layers), left_out=self.left_out)
        if self._keeper is None:
            return found
        limit = self._keeper.limit
        self._keeper.note()
        return replace(found, max_bytes=limit.nbytes, history=tuple(limit.chosen))

    def read_report(self) -> ReadReport:
        """Return how many tokens the steps have read, and the bounds on the attention of all others, for each layer.

        Raises
        ------
        CacheError
            If the cache was not made with ``read=``.
        """
        if self.config.read is None:
            raise CacheError('this cache reads every token; write read="pages", or read=TopTokens(...)')
        found = [layer.tally.reading(layer.plan.index) for layer in self._pruned_layers()]
        dense = [LayerReading.of_all(index) for index in self._left_dense]
        return ReadReport((*dense, *found), self.config.read.confidence)

    def _pruned_layers(self) -> list[PrunedKeyLayer]:
        found = [layer for layer in self.layers if isinstance(layer, PrunedKeyLayer)]
        for layer in found:
            layer.check_attended()
            layer.settle()
            layer.check_numbers()
        return found


def _check_offloading(offloading: Any) -> None:
    """Raise unless this machine can keep layers elsewhere, if that is asked for."""
    if not isinstance(offloading, bool):
        raise OptionError(f"offloading={shown(offloading)}: write True or False")
    if offloading and not torch.cuda.is_available():
        raise CacheError(
            "offloading=True needs CUDA, because transformers moves the layers in CUDA streams, and this machine has "
            "none; leave it out: without a GPU the cache is in main memory anyway"
        )


def _check_saved_for(path: Any, there: Mapping[str, Any], model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise if the fingerprint in a file is not this model's."""
    here = fingerprint(model if isinstance(model, PreTrainedModel) else text_config(model, "CompressedCache"))
    names = sorted({*here, *there} - {name for name in OPTIONAL if name not in here or name not in there})
    pairs = {name: (there.get(name), here.get(name)) for name in names}
    differ = [f"{name}: {a!r} in the file, {b!r} in this model" for name, (a, b) in pairs.items() if a != b]
    if differ:
        raise CacheError(
            f"{path} was saved for another model ({'; '.join(differ)}); run the prompt through this model instead"
        )


def _saved_config(
    path: Any, settings: Mapping[str, Any], basis: str | os.PathLike[str] | None, max_bytes: int | str | None
) -> CacheConfig:
    """Return the settings in a file, with the basis in another file and other bytes if these are given."""
    try:
        config = CacheConfig.from_dict(settings)
    except GraceError as error:
        raise CacheError(f"{path} has settings that this grace_opt does not know: {error}") from error
    if max_bytes is not None:
        if config.bits is None:
            raise CacheError(f"{path} is not coded, so it cannot be coded again; leave max_bytes= out")
        anew: dict[str, Any] = {**dict.fromkeys(BUDGETS), "max_bytes": max_bytes}
        config = replace(config, bits=replace(config.bits, **anew))
    if basis is None:
        return config
    if config.bits is None or config.bits.basis == NO_BASIS:
        raise CacheError(f"{path} is coded in no calibrated basis; leave basis= out")
    return replace(config, bits=replace(config.bits, basis=basis))


def _check_readable(layer: Any, implementation: str) -> None:
    """Raise if the model's attention function cannot read pruned keys."""
    others = implementation in ("sdpa", "eager", "flex_attention") or "flash" in implementation
    if others and isinstance(layer, PrunedKeyLayer) and layer.needs_our_attention:
        raise CacheError(
            f'this cache is pruned, and the attention of the model that it was made for is "{implementation}", which '
            "cannot read it; for another copy of the model, save it and load it with that one; for this one, write "
            'model.set_attn_implementation("grace_sdpa") ("grace_eager" for models that need eager attention), or '
            "continue inside `with grace_opt.hf.attach(model):`"
        )
