"""PrunedKeyCache: pass it to ``generate``, and the prompt's keys keep only the channels that a solver chose.

When: the key cache of long prompts should be smaller than 16-bit dense keys, on any model whose attention goes through
transformers' attention interface. Pruning alone is the worse trade beside int8 or int4 keys; below about 3.5 bits per
key element, pruning together with quantisation is the better one.

The class starts from ``DynamicCache(config=...)``, so that transformers decides what every layer needs, and replaces
only the full-attention layers; sliding windows and linear attention are left as they are.

Source: GRACE (arXiv 2604.16983), Algorithm 1; the layout of ThinK (arXiv 2407.21018), but stored per KV head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..errors import CacheError, OptionError
from ..masks import ChannelMask
from ..provider import MaskProvider
from .layer import PrunedKeyLayer
from .masking import fingerprint, mask_from_kept, static_sources
from .plan import LayerPlan, MaskSource
from .report import MemoryReport, measure


class PrunedKeyCache(Cache):
    """A key-value cache that stores only the kept channels of the prompt's older keys, per KV head.

    Parameters
    ----------
    config : PreTrainedConfig
        ``model.config``.
    method : str
        ``"grace"`` (salient-channel protection and MIES) or any registered solver.
    ratio : float
        Share of the channels to prune, in [0, 1); 0 keeps every channel but still takes the two-segment path.
    provider : MaskSource, optional
        Decides the channels instead of ``method``, ``ratio``, ``protect``, ``seed`` and ``options``: a
        `grace_opt.provider.MaskProvider`, or any function ``(queries, keys, attention_mask) -> ChannelMask``.
    masks : ChannelMask, optional
        Static masks with one leading entry per layer: the same channels for every prompt. Replaces the same arguments.
    recent_window : int
        So many of the prompt's last tokens stay dense, as do all tokens after the prompt.
    observation_window : int
        So many of the prompt's last queries the weights are built from; clipped to the prompt.
    fused : bool
        True decodes on the pruned keys. False hands zero-filled keys of full width to the attention, one layer at a
        time: the storage is the same, and what the model adds to its logits (attention sinks, say) works.
    protect : (float, float), optional
        Bounds of the share of salient channels that can not be pruned; None is the method's own default.
    seed : int
        For methods that draw random numbers.
    **options
        The method's own options, and ``weight=`` of the mask provider.

    Attributes
    ----------
    prunable_layers : tuple of int
        The layers that are pruned, by their position in the model.

    Raises
    ------
    CacheError
        If the model has no full-attention layer that could be pruned.
    MaskError
        If ``masks`` was made for another model.
    OptionError
        If an argument has the wrong type or range, or contradicts another.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> cache = PrunedKeyCache(LlamaConfig(num_hidden_layers=2), method="mies", ratio=0.5)
    >>> cache.prunable_layers
    (0, 1)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: str = "grace",
        ratio: float = 0.5,
        *,
        provider: MaskSource | None = None,
        masks: ChannelMask | None = None,
        recent_window: int = 32,
        observation_window: int = 32,
        fused: bool = True,
        protect: tuple[float, float] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        text = _text_config(config)
        solving = {"method": method, "ratio": ratio, "protect": protect, "seed": seed, **options}
        _check_one_source(solving, provider, masks)
        layers: list[Any] = list(DynamicCache(config=text).layers)
        self.prunable_layers = _prunable(text, layers)
        self._fingerprint = fingerprint(text)
        sources: Mapping[int, MaskSource]
        if masks is not None:
            sources = static_sources(masks, text, self.prunable_layers)
        else:
            chooser = provider if provider is not None else MaskProvider(**solving)
            if isinstance(chooser, MaskProvider):
                # Now rather than after a long prompt: does protection leave enough channels to prune?
                chooser.count(int(self._fingerprint["head_dim"]))
            sources = dict.fromkeys(self.prunable_layers, chooser)
        windows = {
            "recent_window": _count("recent_window", recent_window, 0),
            "observation_window": _count("observation_window", observation_window, 1),
        }
        for index, source in sources.items():
            announces = index == self.prunable_layers[0]
            layers[index] = PrunedKeyLayer(LayerPlan(index, source, **windows, fused=bool(fused), announces=announces))
        self._last_updated: PrunedKeyLayer | None = None
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to one layer; called by the model (see :meth:`grace_opt.hf.layer.PrunedKeyLayer.update`)."""
        if layer_idx >= len(self.layers):
            raise CacheError(
                f"the model writes to layer {layer_idx} and this cache was made for {len(self.layers)} layers; write "
                "PrunedKeyCache(model.config, ...) with the configuration of the same model"
            )
        # A layer's attention runs before the next layer's update, so a forgotten attention function shows up here,
        # within the first forward pass, rather than at the first decode step.
        if self._last_updated is not None:
            self._last_updated.check_attended()
        layer = self.layers[layer_idx]
        self._last_updated = layer if isinstance(layer, PrunedKeyLayer) else None
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated

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
        masks = []
        for layer in self._pruned_layers():
            if layer.kept_indices is None:
                raise CacheError(
                    f"nothing is pruned yet: the cache holds {layer.get_seq_length()} tokens and prunes after a prompt "
                    f"of more than recent_window={layer.plan.recent_window}; run the model on a longer prompt, or "
                    "write a smaller recent_window"
                )
            masks.append(mask_from_kept(layer.kept_indices, layer.head_dim))
        return ChannelMask.stack(masks, fingerprint=self._fingerprint)

    def memory_report(self) -> MemoryReport:
        """Bytes that the cache holds now, by part, beside the dense equivalent."""
        return measure(self._pruned_layers(), [x for x in self.layers if not isinstance(x, PrunedKeyLayer)])

    def _pruned_layers(self) -> list[PrunedKeyLayer]:
        found = [layer for layer in self.layers if isinstance(layer, PrunedKeyLayer)]
        for layer in found:
            layer.check_attended()
        return found


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    if not isinstance(config, PreTrainedConfig):
        raise OptionError(
            f"config must be a transformers configuration, not {type(config).__name__}; write "
            "PrunedKeyCache(model.config, ...)"
        )
    if config.is_encoder_decoder:
        raise CacheError(
            f"{config.model_type} is an encoder-decoder model; use PrunedKeyCache with decoder-only models"
        )
    return config.get_text_config(decoder=True)


def _check_one_source(solving: dict[str, Any], provider: MaskSource | None, masks: ChannelMask | None) -> None:
    """Refuse arguments that would be ignored, because ``provider`` or ``masks`` already decides the channels."""
    defaults = {"method": "grace", "ratio": 0.5, "protect": None, "seed": 0}
    chosen = [name for name, value in (("provider", provider), ("masks", masks)) if value is not None]
    ignored = [name for name in solving if name not in defaults or solving[name] != defaults[name]]
    if len(chosen) > 1 or (chosen and ignored):
        first, *others = chosen + ignored
        raise OptionError(f"{first}= already decides which channels go; leave out {', '.join(others)}")
    if masks is not None and not isinstance(masks, ChannelMask):
        raise OptionError(f"masks must be a ChannelMask, not {type(masks).__name__}; write ChannelMask.load(path)")


def _prunable(config: PreTrainedConfig, layers: list[Any]) -> tuple[int, ...]:
    """Full-attention layers: a plain DynamicLayer that the configuration does not call otherwise."""
    # Old transformers give a plain DynamicLayer also to models without any attention.
    attends = hasattr(config, "num_attention_heads")
    types = getattr(config, "layer_types", None) or ["full_attention" if attends else "none"] * len(layers)
    plain = [type(layer) is DynamicLayer for layer in layers]
    found = tuple(index for index in range(len(layers)) if plain[index] and types[index] == "full_attention")
    if not found:
        kinds = sorted({type(layer).__name__ for layer in layers}) if attends else ["layers without attention heads"]
        raise CacheError(
            f"{config.model_type} has no full-attention layer whose keys could be pruned, only {', '.join(kinds)}; use "
            "transformers' own DynamicCache for it"
        )
    return found


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} must be an integer >= {least}, not {value!r}")
    return value
