"""`read_prompt`: a cache that holds a prompt, which a model reads as far as a store of prompts does not have it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import OptionError
from ...registry import MethodOptions
from ..models.arguments import require_model
from ..models.implementation import attention_implementation, base_for
from ..settings.config import CacheSetting
from .cache import CompressedCache
from .given_prompts import GivenPrompts
from .kept_prompts import KeptPrompts
from .prompt_store import PromptStore


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
    >>> ids = tokenizer("the quiet river " * 60, return_tensors="pt").input_ids
    >>> store = PromptStore(tempfile.mkdtemp())
    >>> cache = read_prompt(model, ids, store, bits=3)
    >>> cache.get_seq_length() == ids.shape[1], len(store.prompts())
    (True, 1)
    """
    model = require_model(model, "read_prompt")
    fits = isinstance(input_ids, Tensor) and input_ids.dtype in (torch.int64, torch.int32)
    if not fits or input_ids.dim() != 2 or len(input_ids) != 1 or input_ids.shape[1] < 2:
        raise OptionError("input_ids: give one prompt's tokens, a tensor (1, n) of int64 with n of at least 2")
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
