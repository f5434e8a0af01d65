"""`KeptPrompts`: a cache begins with what a `PromptStore` has of its prompt, and what is new goes into the store.

The beginning is what a cache holds that has read that prompt and was cropped, bit for bit: the rest of the prompt is
read as a further turn of a conversation is.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._util.warning import warn
from ...errors import CacheError, OptionError
from ...registry import MethodOptions
from ..models.arguments import require_model
from ..models.implementation import attention_implementation, base_for
from ..settings.config import CacheConfig, CacheSetting
from ..stores.coded.coded import CodedTokens
from .cache import CompressedCache
from .given_cache import GivenCache
from .in_step import undo_of
from .prompt_store import FEWEST, KeptPrompt, PromptStore
from .saving import FILE_FORMAT, Tokens

#: A prompt is stored if at least this share of it was not in the store.
NEW_SHARE = 0.25


@dataclass(frozen=True)
class GivenPrompts:
    """The prompts of a call.

    Attributes
    ----------
    tokens : list of array
        Those of each, without padding.
    padding : list of int
        How many places come before them.
    rows : int
        How many sequences of the cache each of them becomes.
    """

    tokens: list[Tokens]
    padding: list[int]
    rows: int = 1

    @property
    def length(self) -> int:
        """Number of places."""
        return len(self.tokens[0]) + self.padding[0]

    @property
    def is_batch(self) -> bool:
        """Whether there is more than one prompt, or padding."""
        return len(self.tokens) > 1 or self.padding[0] > 0


class KeptPrompts:
    """A store of prompts, for one model with its settings.

    Parameters
    ----------
    prompts : PromptStore or path
    model : PreTrainedModel
    config : CacheConfig

    Raises
    ------
    OptionError, CacheError
        If this is no store, or these settings depend on more than the prompt.
    """

    def __init__(self, prompts: PromptStore | str | os.PathLike[str], model: PreTrainedModel, config: CacheConfig):
        if config.bits is not None and config.bits.max_bytes is not None:
            raise OptionError(
                "prompts= and max_bytes=: a stored prompt has the bits for which there was room when it was read; "
                "write bits=, or leave out one of them"
            )
        self.store = prompts if isinstance(prompts, PromptStore) else PromptStore(prompts)
        self._model, self._config = model, config
        self._said: set[str] = set()

    def key(self, cache: CompressedCache) -> str:
        """Return the name of what belongs together: model, weights, adapters, type, settings, basis, format."""
        model = cache.fingerprint()
        about = {
            "model": model,
            "dtype": str(self._model.dtype),
            "settings": self._config.to_dict(),
            "basis": cache._basis_digest(needed=True),
            "format": FILE_FORMAT.version,
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
        return f"{model['model_type']}-{digest[:32]}"

    def fill(self, cache: CompressedCache, given: GivenPrompts) -> CompressedCache:
        """Return a cache that holds what is stored of the beginning of all prompts; `cache`, a new one, if nothing is.

        Where there are several prompts, the tokens of a recent window are read again.
        """
        key = self.key(cache)
        found = [self.store.longest(key, own) for own in given.tokens]
        loaded = {kept.path: self._loaded(kept) for kept, _ in filter(None, found)}
        known = [(loaded[kept.path], count) for kept, count in filter(None, found)]
        parts = [(part, count) for part, count in known if part is not None]
        if len(parts) < len(found):
            return cache
        try:
            filled = _together(cache, parts, given.padding) if given.is_batch else _begun(*parts[0])
        except (CacheError, ValueError):  # sliding windows, evictions: they serve as a whole, or not
            return cache
        if filled.get_seq_length() and len(parts) * given.rows > 1:
            filled.reorder_cache(torch.arange(len(parts)).repeat_interleave(given.rows))
        return filled

    def _loaded(self, kept: KeptPrompt) -> CompressedCache | None:
        """Return what a file holds; None if it is gone, or damaged, which a warning says."""
        try:
            return CompressedCache.load(kept.path, self._model, mapped=True)
        except CacheError as error:
            if kept.path.exists():
                warn(f"a stored prompt was removed, and is read again: {error}")
                self.store.drop(kept.path)
            return None

    def keep(self, cache: CompressedCache, given: GivenPrompts, held: int) -> None:
        """Store prompts that a cache holds, and no more; `held` tokens of each were in the store.

        Not those with padding, nor if most was stored before.
        """
        length = given.length
        if cache.get_seq_length() != length or cache.is_dense or length - held < max(FEWEST / 2, NEW_SHARE * length):
            return
        key = self.key(cache)
        for number, (tokens, first) in enumerate(zip(given.tokens, given.padding, strict=True)):
            if not first:
                back = undo_of(cache.layers)
                try:
                    cache.reorder_cache(torch.tensor([number * given.rows]))
                    self.store.add(key, tokens, functools.partial(cache.save, tokens=tokens))
                finally:
                    back()

    def keep_past(self, following: GivenCache, given: GivenPrompts, held: int) -> None:
        """Store prompts as `keep` does, of a cache that has grown since."""
        following.note_prompt()
        if following.at_prompt is None:
            return
        now = undo_of(following.cache.layers)
        following.at_prompt()
        try:
            self.keep(following.cache, given, held)
        finally:
            now()

    def of_call(self, named: dict[str, Any], ids: Tensor | None, rows: int, pad: int | None) -> GivenPrompts | None:
        """Return the prompts of a call of ``generate``; None if they are too short, or more than tokens.

        Parameters
        ----------
        named : dict
            The call's arguments by name.
        ids : Tensor or None
            Its tokens.
        rows : int
            How many sequences become of each prompt.
        pad : int or None
            What ``generate`` takes for padding if there is no attention mask.
        """
        if named.get("inputs_embeds") is not None:
            raise OptionError(
                "inputs_embeds beside prompts=: embeddings have no tokens by which a prompt could be found; give "
                "input_ids, or leave out prompts="
            )
        others = [name for name, value in named.items() if isinstance(value, Tensor) and name not in _PLAIN]
        if others:
            self._say(f"{others[0]}= is given, on which the cache may depend, so prompts= is not used for this call")
            return None
        if ids is None or ids.dim() != 2 or ids.shape[1] <= FEWEST:
            return None
        mask = named.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        if real.shape != ids.shape or (mask is None and pad is not None and bool((ids == pad).any())):
            return None
        padding = (real.cumsum(1) == 0).sum(1)
        if bool((real.sum(1) + padding != ids.shape[1]).any()):  # more is hidden
            return None
        every = zip(ids.detach().cpu().numpy().astype(np.int64), padding.tolist(), strict=True)
        tokens = [own[first:] for own, first in every]
        return GivenPrompts(tokens, padding.tolist(), rows)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(what)


#: Arguments of ``generate`` that are the prompt, or its padding.
_PLAIN = ("input_ids", "inputs", "attention_mask")


def _begun(part: CompressedCache, count: int) -> CompressedCache:
    """Return a cache with its first tokens alone."""
    if count < part.get_seq_length():
        part.crop(count - part.get_seq_length())
    return part


def _together(
    cache: CompressedCache, parts: Sequence[tuple[CompressedCache, int]], padding: Sequence[int]
) -> CompressedCache:
    """Fill a new cache with the first coded tokens of several, up to the same place; as it is if that can't be done."""
    stores: list[list[Any]] = [[getattr(layer, "compressed", None) for layer in part.layers] for part, _ in parts]
    if not all(isinstance(store, CodedTokens) for own in stores for store in own):
        return cache
    places = min(
        first + min(count, own[0].length) for first, (_, count), own in zip(padding, parts, stores, strict=True)
    )
    lengths = [places - first for first in padding]
    if min(lengths) < FEWEST:
        return cache
    made = [CodedTokens.stacked(of_layer, lengths) for of_layer in zip(*stores, strict=True)]
    for number, (layer, store) in enumerate(zip(cache.layers, made, strict=True)):
        tails = [part.layers[number].tail for part, _ in parts]
        none = [torch.cat([getattr(tail, kind)[:, :, :0] for tail in tails]) for kind in ("keys", "values")]
        layer.lazy_initialization(*none)
        layer.compressed = store
    return cache


def read_prompt(
    model: PreTrainedModel,
    input_ids: Tensor,
    prompts: PromptStore | str | os.PathLike[str],
    setting: CacheSetting | str | MethodOptions | None = None,
    ratio: float | Sequence[float] | None = None,
    **settings: Any,
) -> CompressedCache:
    """Return a cache that holds a prompt: from a store, as far as it has it; the model reads the rest, which is stored.

    Parameters
    ----------
    model : PreTrainedModel
    input_ids : Tensor
        ``(1, n)``: the prompt's tokens.
    prompts : PromptStore or path
        The store.
    setting, ratio, **settings
        As in `CompressedCache`.

    Returns
    -------
    CompressedCache
        For ``generate`` inside `attach`, with the prompt and what follows it as input; or for a loop of your own, with
        an attention implementation that reads it.

    Raises
    ------
    OptionError, CacheError
        As `CompressedCache`; also for a prompt that is no ``(1, n)``, and for settings that a store cannot know.

    Examples
    --------
    >>> import tempfile
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> ids = tokenizer("the quiet river " * 40, return_tensors="pt").input_ids
    >>> store = PromptStore(tempfile.mkdtemp())
    >>> cache = read_prompt(model, ids, store, bits=3)
    >>> cache.get_seq_length() == ids.shape[1], len(store.prompts())
    (True, 1)
    """
    model = require_model(model, "read_prompt")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or len(input_ids) != 1 or input_ids.shape[1] < 2:
        raise OptionError("input_ids: give one prompt's tokens, a tensor (1, n) with n of at least 2")
    cache = CompressedCache(model, setting, ratio, **settings)
    kept = KeptPrompts(prompts, model, cache.config)
    given = GivenPrompts([input_ids[0].detach().cpu().numpy().astype(np.int64)], [0])
    filled = kept.fill(cache, given)
    held = filled.get_seq_length()
    if not held:
        filled.declare_prompt(input_ids.shape[1])
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad(), attention_implementation(model, f"grace_{base_for(model)}"):
        model(input_ids[:, held:].to(model.device), past_key_values=filled, use_cache=True, **last)
    kept.keep(filled, given, held)
    return filled
