"""Which of a cache's arguments chooses the channels, checked when the cache is made, not after a long prompt.

When: `CompressedCache` is made. The settings' method, ``provider=``, ``masks=`` and ``bits=`` exclude each other: what
would be ignored is refused.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.masks import ChannelMask
from ...attention.provider import DEFAULT_RATIO
from ...errors import CacheError, OptionError
from ..settings.bits import BUDGETS
from ..settings.channels import Channels
from ..settings.config import CacheConfig
from ..settings.keywords import SETTINGS
from ..stores.maker import check_maker
from ..stores.plan import MaskSource

#: What ``provider`` and ``masks`` replace, beside the method's options.
_DECIDING = ("method", "ratio", "kept_channels", "protect", "weight", "seed")


def no_source(queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> ChannelMask:
    """Choose nothing: the source of layers that are coded."""
    raise CacheError("this cache gives bits to all channels and chooses none")


def forgotten_source(queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> ChannelMask:
    """Choose nothing: the source of layers from a file, whose own source is not in it."""
    raise CacheError(
        "the channels of this saved cache were chosen by a provider or by masks, which are not part of the file; to "
        "prune another prompt, write CompressedCache.load(path, model, provider=...) or masks=..."
    )


def check_no_settings(ignored: Iterable[str], source: str) -> None:
    """Refuse settings that would be ignored."""
    if names := ", ".join(ignored):
        decided = "all settings" if source == "config=" else "which channels go"
        raise OptionError(f"{source} already decides {decided}; leave out {names}")


def settings_of(
    config: CacheConfig | str | os.PathLike[str] | None,
    given: Mapping[str, Any],
    deciding: Mapping[str, Any],
    model: PreTrainedModel | PreTrainedConfig,
) -> CacheConfig:
    """Return the settings of a cache for `model`: those that were given, or else `config`, which may be a file.

    Raises
    ------
    OptionError
        If some would be ignored, because ``config`` or one of `deciding`, ``provider``, ``masks`` and ``store``,
        already decides.
    """
    if config is not None:
        if isinstance(config, str | os.PathLike):
            config = CacheConfig.from_json(config, model)
        if not isinstance(config, CacheConfig):
            raise OptionError(
                f"config must be a CacheConfig, or the name of a file that grace-opt tune wrote, not {config!r}; write "
                "CacheConfig(...), or CacheConfig.from_dict(...)"
            )
        check_no_settings(given, "config=")
    chosen = [name for name, value in deciding.items() if value is not None]
    if len(chosen) > 1:
        raise OptionError(f"{chosen[0]}= already decides which channels go; leave out {' and '.join(chosen[1:])}")
    if not chosen:
        return CacheConfig.of(given) if config is None else config
    coded = any(given.get(name) is not None for name in BUDGETS) or (config is not None and config.bits is not None)
    if coded and chosen == ["store"]:
        raise OptionError(
            "store= holds the tokens in its own way, and bits= in another; leave out one (bits=2.25 is the default of "
            "a CacheConfig: ratio=0.0 leaves the tokens to the store)"
        )
    if coded:
        raise OptionError(
            f"{chosen[0]}= chooses which channels go, and bits= gives all of them their number of bits; leave out one "
            "(bits=2.25 is the default of a CacheConfig: ratio=0.0 leaves the channels to others)"
        )
    own = {*SETTINGS} - {*_DECIDING, "options"}
    check_no_settings([name for name in given if name not in own], f"{chosen[0]}=")
    found = CacheConfig.of({**given, "ratio": 0.0}) if config is None else config  # drops none by itself
    # The usual share may be that of read="channels", or of an older file.
    plain = Channels(ratio=DEFAULT_RATIO if found.channels.ratio in (None, DEFAULT_RATIO) else 0.0)
    ignored = [name for name in _DECIDING if getattr(found.channels, name) not in (None, getattr(plain, name))]
    check_no_settings([*ignored, *found.channels.options], f"{chosen[0]}=")
    if deciding["store"] is not None:
        held = [name for name in ("quantize", "read") if getattr(found, name) is not None]
        if held:
            raise OptionError(f"store= already decides how tokens are held; leave out {' and '.join(held)}")
        check_maker(deciding["store"])
    _check_source(deciding["provider"], deciding["masks"])
    return found


def _check_source(provider: MaskSource | None, masks: ChannelMask | None) -> None:
    if provider is not None and (isinstance(provider, type) or not callable(provider)):
        raise OptionError(
            f"provider={provider!r}: write a function (queries, keys, attention_mask) -> ChannelMask, for instance "
            'MaskProvider("mies", 0.5); a name alone is method='
        )
    if provider is not None:
        try:
            inspect.signature(provider).bind(None, None, None)
        except ValueError:  # it has no signature that Python knows
            pass
        except TypeError as error:
            raise OptionError(
                f"provider={provider!r} cannot be called as provider(queries, keys, attention_mask): {error}; write a "
                "function of three parameters"
            ) from None
    if masks is not None and not isinstance(masks, ChannelMask):
        raise OptionError(f"masks must be a ChannelMask, not {type(masks).__name__}; write ChannelMask.load(path)")
