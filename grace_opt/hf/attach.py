"""`attach`: for the length of a ``with`` block, ``model.generate`` decodes from a pruned key cache.

When: this is the shortest way to use the adapter, and the only one for code that calls ``generate`` for you, such as a
``pipeline``. Every call gets a cache of its own, which knows where the prompt ends; so chunked prefill and assisted
decoding need nothing declared. A cache that the caller passes is used; one of ours in which nothing is pruned yet is
told where the prompt ends.

What is changed on the model, and put back when the block ends, also by an exception: its attention implementation, and
an attribute ``generate`` of this one instance. Nothing of transformers is patched.

Source: ours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import OptionError
from .cache import PrunedKeyCache
from .capture import attention_implementation, needs_eager


class Attached:
    """What `attach` yields.

    Attributes
    ----------
    cache : PrunedKeyCache or None
        Of the latest ``generate``: for its `memory_report` or `channel_mask`, or to pass on as ``past_key_values`` to
        continue the conversation.
    """

    def __init__(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
        self._model, self._arguments = model, dict(arguments)
        self.cache: PrunedKeyCache | None = PrunedKeyCache(model, **self._arguments)  # wrong arguments are told now
        self.cache = None

    def new_cache(self, prompt_length: int | None = None) -> PrunedKeyCache:
        """A cache for one prompt, with the settings given to `attach`."""
        return PrunedKeyCache(self._model, **self._arguments, prompt_length=prompt_length)


@contextmanager
def attach(model: PreTrainedModel, method: str = "grace", ratio: Any = 0.5, **settings: Any) -> Iterator[Attached]:
    """Prune the key cache of every ``model.generate`` inside the block.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model.
    method, ratio, **settings
        As in `PrunedKeyCache`, except ``prompt_length``, which each call knows.

    Yields
    ------
    Attached
        Whose ``cache`` is the one of the latest call.

    Raises
    ------
    OptionError, CacheError, MaskError
        As `PrunedKeyCache`, when the block is entered.

    Examples
    --------
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> inputs = tokenizer("the quiet river " * 40, return_tensors="pt")
    >>> with attach(model, ratio=0.6) as attached:
    ...     output = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    >>> attached.cache.get_seq_length() == inputs.input_ids.shape[1] + 3
    True
    """
    if "prompt_length" in settings:
        raise OptionError("leave out prompt_length: each generate() inside the block knows its own prompt")
    if not isinstance(model, PreTrainedModel):
        raise OptionError(f"model must be a transformers model, not {type(model).__name__}; write attach(model, ...)")
    attached = Attached(model, {"method": method, "ratio": ratio, **settings})
    plain = model.generate

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache_implementation") is not None:
            raise OptionError("attach() gives generate() its cache; leave out cache_implementation")
        given, length = kwargs.get("past_key_values"), _prompt_length(args, kwargs)
        if given is None and _uses_cache(model, args, kwargs):
            attached.cache = attached.new_cache(length)
            kwargs["past_key_values"] = attached.cache
        elif isinstance(given, PrunedKeyCache) and given.is_dense and length and length > given.get_seq_length():
            given.declare_prompt(length)  # a turn after others that were too short to be pruned
        return plain(*args, **kwargs)

    name = "grace_eager" if needs_eager(model) else "grace_sdpa"
    with attention_implementation(model, name):
        found = vars(model).get("generate")
        model.generate = generate
        try:
            yield attached
        finally:
            if found is None:
                del model.generate
            else:
                model.generate = found


def _uses_cache(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this generate() works with a cache at all: as an argument says, or else a generation configuration."""
    if "use_cache" in kwargs:
        return bool(kwargs["use_cache"])  # None is off for transformers too
    given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    found = (getattr(config, "use_cache", None) for config in (given, model.generation_config))
    return next((bool(value) for value in found if value is not None), True)


def _prompt_length(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Tokens of a generate()'s prompt, padding included; None if only generate() itself can know."""
    for given in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), kwargs.get("inputs"), *args[:1]):
        if isinstance(given, Tensor) and given.dim() >= 2:
            return int(given.shape[1])
    return None
