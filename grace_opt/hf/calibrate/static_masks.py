r"""Static masks: choose the channels of every head once, from a few texts, and use them for any prompt.

When: all prompts are of one kind, and choosing channels per prompt takes too long. Static masks do not adapt to the
prompt; compare both on your own texts.

Every text contributes its W, the squared change of the logits per pair of channels, divided by its number of tokens: a
long text counts no more than a short one. The method minimises the mean of these. The squared key norms that decide
which channels are protected are averaged in the same way.

Source: LeanK (arXiv 2508.02215) for static masks per head; GRACE (arXiv 2604.16983) for the way they are chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..._util.parameters import integer
from ...attention.masks import ChannelMask
from ...attention.weights import salient_channels
from ...errors import OptionError
from ...problem import Problem
from ...registry import MethodOptions
from ..bases.texts import all_token_ids
from ..engine.cache import CompressedCache
from ..models.arguments import DEFAULT_METHOD, require_model
from ..models.fingerprint import fingerprint
from ..models.placement import input_device
from ..models.recording import capture_attention
from ..settings.bits import BUDGETS
from ..settings.channels import Channels
from ..settings.config import CacheConfig, by_name
from ..stores.channels.choice import check_usable, mask_that_prunes_nothing, prunes_nothing

#: Settings of a cache that do not affect which channels are chosen from whole texts.
_NOT_ASKED = frozenset(
    ("recent_window", "sink_tokens", "tail_block", "fused", "evict", "quantize", "prompt_length", "offloading")
)


def masks(
    model: PreTrainedModel,
    tokenizer: Any = None,
    texts: Sequence[str | Tensor] | None = None,
    setting: Channels | str | MethodOptions | None = None,
    ratio: float | Sequence[float] | None = None,
    *,
    config: CacheConfig | None = None,
    observation_window: int | None = None,
    advance: Callable[[int], None] = lambda done: None,
    **settings: Any,
) -> ChannelMask:
    """Choose the channels of every KV head once, from several texts.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder that computes attention through transformers' attention interface.
    tokenizer : callable, optional
        Needed if ``texts`` contains strings, or is None.
    texts : sequence of str or Tensor, optional
        Texts like the later prompts, or their token ids of shape ``(L,)`` or ``(1, L)``. By default those that ship
        with grace_opt.
    setting, ratio, config, **settings
        As in `CompressedCache`, but only those on which the channels depend; without them, ``"grace"`` and a ratio of
        0.3. ``recent_window``, ``sink_tokens``, ``tail_block``, ``fused``, ``evict`` and ``quantize`` belong to the
        cache; in ``config`` they are ignored, and so is its ``observation_window``. ``bits`` and its like drop no
        channels: see `calibrate.basis`.
    observation_window : int, optional
        Number of last queries of each text that count. None means all, since a static mask serves them all.
    advance : callable
        Called with the number of texts done so far, for a progress bar.

    Returns
    -------
    ChannelMask
        ``(prunable layers, H, d)``, with the model's fingerprint, for ``CompressedCache(model, masks=...)``.

    Raises
    ------
    OptionError
        If there are no texts, a text has no tokens, strings come without a tokenizer, or a setting would have no
        effect.
    CacheError
        If a layer's keys or queries are not finite, or are too large or too small to choose channels by.

    Notes
    -----
    Runs one forward pass per text, without a cache: O(L²) time for attention, and memory for the queries, keys and
    values of every layer.

    Examples
    --------
    >>> from grace_opt.hf import calibrate
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> masks = calibrate.masks(model, tokenizer, ["the quiet river runs", "a late singer"], ratio=0.5)
    >>> masks.kept_indices.shape
    torch.Size([3, 2, 32])
    """
    model = require_model(model, "calibrate.masks")
    every = all_token_ids(texts, tokenizer, "calibrate.masks", model)
    given = by_name(setting, ratio, settings)
    if ignored := sorted({"provider", "masks"} & set(given)):
        raise OptionError(f"calibrate.masks() chooses the channels by a method; leave out {', '.join(ignored)}")
    if ignored := sorted(_NOT_ASKED & set(given)):
        raise OptionError(
            f"the channels do not depend on {', '.join(ignored)}; give them to the cache that uses the masks: "
            f"CompressedCache(model, masks=masks, {', '.join(f'{name}=...' for name in ignored)})"
        )
    if isinstance(config, str | os.PathLike):
        config = CacheConfig.from_json(config, model)
    _refuse_bits(given, config)
    observed = integer("observation_window", observation_window, at_least=1, optional=True)
    # The same checks, layers and settings as the cache that will use the masks.
    usual = {} if config is not None or "channels" in given else {"method": DEFAULT_METHOD}
    cache = CompressedCache(model, config=config, **usual | given)
    device = input_device(model)
    means: dict[int, Tensor] = {}
    squares: dict[int, Tensor] = {}
    kept: dict[int, ChannelMask] = {}
    for done, text in enumerate(every, 1):
        ids = text.to(device)
        captured = capture_attention(model, ids, layers=cache.prunable_layers)
        for layer, seen in captured.items():
            if prunes_nothing(cache.config.channels.provider(layer), seen.keys):
                kept[layer] = mask_that_prunes_nothing(seen.keys[:1]).layer(0)
                continue
            queries = seen.queries if observed is None else seen.queries[:, :, -observed:]
            check_usable(layer, queries, seen.keys)
            share = 1 / (len(every) * ids.shape[1])
            provider = cache.config.channels.provider(layer)
            W = provider.interactions(queries[0], seen.keys[0], None, seen.values[0], seen.scaling) * share
            squared = seen.keys[0].float().square().sum(-2) * share
            means[layer] = means[layer] + W if layer in means else W
            squares[layer] = squares[layer] + squared if layer in squares else squared
        advance(done)
    masks = []
    for layer in cache.prunable_layers:
        if layer in kept:
            masks.append(ChannelMask(kept[layer].pruned.cpu()))
            continue
        provider = cache.config.channels.provider(layer)
        protected = None
        if provider.protect is not None:
            # A single token with the norms as its entries has exactly these norms.
            protected = salient_channels(squares[layer].sqrt()[:, None, :], *provider.protect)
        count = provider.count(means[layer].shape[-1])
        masks.append(ChannelMask(provider.choose(Problem.of(means[layer], count, protected=protected)).pruned.cpu()))
    return ChannelMask.stack(masks, fingerprint(model))


def _refuse_bits(given: Mapping[str, Any], config: CacheConfig | None) -> None:
    """Refuse settings that drop no channels, before a cache calibrates a basis for them."""
    named = [name for name in (*BUDGETS, "basis") if given.get(name) is not None]
    held = config.bits.budget if isinstance(config, CacheConfig) and config.bits is not None else ()
    if named or held:
        raise OptionError(
            f"calibrate.masks() chooses channels to drop, and {', '.join(named or held)}= drops none: write "
            "calibrate.basis(model, tokenizer, texts).save(FILE), and give the cache bits= and basis=FILE; to drop "
            f"channels, leave out {', '.join(named) or 'config='}"
        )
    if isinstance(config, CacheConfig) and config.channels.drops_none:
        raise OptionError("calibrate.masks() chooses channels to drop, and config= drops none: give it ratio=")
