"""`KeptPrompts`: a cache begins with what a `PromptStore` has of its prompt, and what is new goes into the store.

The beginning is what a cache holds that has read that prompt and was cropped, bit for bit: the rest of the prompt is
read as a further turn of a conversation is.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Sequence
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
from .cache import CompressedCache
from .given_cache import GivenCache
from .in_step import undo_of
from .prompt_store import FEWEST, PromptStore
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

    def fill(self, cache: CompressedCache, ids: Tensor, rows: int = 1) -> CompressedCache:
        """Return a cache that holds what is stored of the beginning of all sequences; `cache` if that is nothing.

        Parameters
        ----------
        cache : CompressedCache
            A new one.
        ids : Tensor
            ``(B, n)``: the prompts, without padding.
        rows : int
            How many sequences of the cache each of them becomes.
        """
        tokens = _rows(ids)
        together = _together(tokens)
        found = self.store.longest(self.key(cache), tokens[0][: together + 1])
        if found is None:
            return cache
        kept, count = found
        try:
            filled = CompressedCache.load(kept.path, self._model, mapped=True)
        except CacheError as error:
            if kept.path.exists():
                warn(f"a stored prompt was removed, and is read again: {error}")
                self.store.drop(kept.path)
            return cache
        try:
            if count < kept.tokens:
                filled.crop(count - kept.tokens)
        except (CacheError, ValueError):  # sliding windows, evictions: it serves as a whole, or not
            return cache
        if len(tokens) * rows > 1:
            filled.reorder_cache(torch.zeros(len(tokens) * rows, dtype=torch.int64))
        return filled

    def keep(self, cache: CompressedCache, ids: Tensor, held: int, rows: int = 1) -> None:
        """Store prompts that a cache holds, and no more, unless most of them was stored before.

        Parameters
        ----------
        cache, ids, rows
            As in `fill`.
        held : int
            How many tokens of each were in the store.
        """
        length = ids.shape[1]
        if cache.get_seq_length() != length or cache.is_dense or length - held < max(FEWEST / 2, NEW_SHARE * length):
            return
        key = self.key(cache)
        tokens = _rows(ids)
        for number, own in enumerate(tokens):
            if len(tokens) * rows > 1:
                back = undo_of(cache.layers)
                try:
                    cache.reorder_cache(torch.tensor([number * rows]))
                    self._add(key, cache, own)
                finally:
                    back()
            else:
                self._add(key, cache, own)

    def keep_past(self, following: GivenCache, ids: Tensor, held: int, rows: int) -> None:
        """Store prompts that a cache has held, which has grown since: parameters as in `keep`."""
        following.note_prompt()
        if following.at_prompt is None:
            return
        now = undo_of(following.cache.layers)
        following.at_prompt()
        try:
            self.keep(following.cache, ids, held, rows)
        finally:
            now()

    def _add(self, key: str, cache: CompressedCache, tokens: Tokens) -> None:
        self.store.add(key, tokens, lambda path: cache.save(path, tokens=tokens))

    def usable(self, given: dict[str, Any], ids: Tensor | None) -> bool:
        """Return whether a prompt is its tokens, and nothing else, in all sequences from the first place on.

        Parameters
        ----------
        given : dict
            The arguments of ``generate`` by name.
        ids : Tensor or None
            Its tokens.
        """
        if given.get("inputs_embeds") is not None:
            raise OptionError(
                "inputs_embeds beside prompts=: embeddings have no tokens by which a prompt could be found; give "
                "input_ids, or leave out prompts="
            )
        others = [name for name, value in given.items() if isinstance(value, Tensor) and name not in _PLAIN]
        if others:
            self._say(f"{others[0]}= is given, on which the cache may depend, so prompts= is not used for this call")
            return False
        mask = given.get("attention_mask")
        whole = mask is None or (isinstance(mask, Tensor) and bool((mask != 0).all()))
        return ids is not None and ids.dim() == 2 and ids.shape[1] > FEWEST and whole

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(what)


#: Arguments of ``generate`` that are the prompt, or its padding.
_PLAIN = ("input_ids", "inputs", "attention_mask")


def _rows(ids: Tensor) -> list[Tokens]:
    return list(ids.detach().cpu().numpy().astype(np.int64))


def _together(rows: list[Tokens]) -> int:
    """Return how many first tokens all rows share, at most all but one."""
    every = np.stack(rows)
    same = (every == every[:1]).all(0)[:-1]
    return int(same.argmin()) if not same.all() else len(same)


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
    filled = kept.fill(cache, input_ids)
    held = filled.get_seq_length()
    if not held:
        filled.declare_prompt(input_ids.shape[1])
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad(), attention_implementation(model, f"grace_{base_for(model)}"):
        model(input_ids[:, held:].to(model.device), past_key_values=filled, use_cache=True, **last)
    kept.keep(filled, input_ids, held)
    return filled
