"""`KeptPrompts`: a cache begins with what a `PromptStore` has of its prompt, and what is new goes into the store.

The beginning is what a cache holds that has read that prompt and was cropped, bit for bit: the rest of the prompt is
read as a further turn of a conversation is.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..._util.warning import warn
from ...errors import CacheError, OptionError
from ..settings.config import CacheConfig
from .cache import CompressedCache
from .given_cache import GivenCache
from .given_prompts import GivenPrompts
from .in_step import undo_of
from .prompt_store import FEWEST, KeptPrompt, PromptStore
from .saving import FILE_FORMAT, Tokens

#: A prompt is stored if at least this share of it was not in the store.
NEW_SHARE = 0.25


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
        if prompts is None:
            raise OptionError("prompts=None: give a PromptStore, or the name of a folder")
        if config.bits is not None and config.bits.max_bytes is not None:
            raise OptionError(
                "prompts= and max_bytes=: a stored prompt has the bits for which there was room when it was read; "
                "write bits=, or leave out one of them"
            )
        self.store = prompts if isinstance(prompts, PromptStore) else PromptStore(prompts)
        self._model, self._config = model, config

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
            filled.reorder_cache(torch.arange(len(parts), device="cpu").repeat_interleave(given.rows))
        return filled

    def _loaded(self, kept: KeptPrompt) -> CompressedCache | None:
        """Return what a file holds; None if it is gone, or damaged, which a warning says."""
        try:
            return CompressedCache.load(kept.path, self._model, mapped=True)
        except CacheError as error:
            if kept.path.exists():
                why = str(error).removesuffix(" Save it again.")
                warn(f"a stored prompt cannot be used, so it was removed, and is read again: {why}")
                self.store.drop(kept.path)
            return None

    def keep(self, cache: CompressedCache, given: GivenPrompts, held: int) -> None:
        """Store prompts that a cache holds, and no more; `held` tokens of each were in the store.

        Not those with padding, nor if most was stored before.
        """
        length, new = given.length, given.length - held
        if cache.get_seq_length() != length or cache.is_dense:
            return
        if length <= FEWEST or new < max(FEWEST / 2, NEW_SHARE * length):
            return
        key = self.key(cache)
        for number, (tokens, first) in enumerate(zip(given.tokens, given.padding, strict=True)):
            if not first:
                back = undo_of(cache.layers)
                try:
                    cache.reorder_cache(torch.tensor([number * given.rows], dtype=torch.int64, device="cpu"))
                    self.store.add(key, tokens, functools.partial(cache.save, tokens=tokens))
                finally:
                    back()

    def held(self, cache: CompressedCache, tokens: Tokens) -> int:
        """Return how many of a prompt's first tokens are stored, in one prompt: all of them, if it is stored itself."""
        found = self.store.longest(self.key(cache), np.append(tokens, -1))
        return 0 if found is None else found[1]

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
    if any(store is None for own in stores for store in own):
        return cache
    places = min(
        first + min(count, own[0].length) for first, (_, count), own in zip(padding, parts, stores, strict=True)
    )
    lengths = [places - first for first in padding]
    if min(lengths) < FEWEST:
        return cache
    made = [first.beside(others, lengths) for first, *others in zip(*stores, strict=True)]
    for number, (layer, store) in enumerate(zip(cache.layers, made, strict=True)):
        tails = [part.layers[number].tail for part, _ in parts]
        none = [torch.cat([getattr(tail, kind)[:, :, :0] for tail in tails]) for kind in ("keys", "values")]
        layer.lazy_initialization(*none)
        layer.compressed = store
    return cache
