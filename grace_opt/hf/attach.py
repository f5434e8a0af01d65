"""`attach`: for the length of a ``with`` block, ``model.generate`` decodes from a pruned key cache.

When: this is the shortest way to use the adapter, and the only one for code that calls ``generate`` for you, such as a
``pipeline``. Every call gets a cache of its own, which knows where the prompt ends; so chunked prefill and assisted
decoding need nothing declared, and calls from several threads share nothing. A cache that the caller passes is used;
one of ours in which nothing is pruned yet is told where the prompt ends.

What is changed on the model, and put back when the block ends, also by an exception, or with the last call that is then
still running in another thread (:mod:`grace_opt.hf.running_calls`): its attention implementation
(:mod:`grace_opt.hf.implementation`), and an attribute ``generate`` of this one instance
(:mod:`grace_opt.hf.generate_hook`). Nothing of transformers is patched.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..attention.provider import DEFAULT_RATIO
from ..errors import CacheError, OptionError
from ..registry import MethodOptions
from .arguments import unwrap_model
from .cache import PrunedKeyCache
from .generate_hook import GenerateHook, close_block, open_block
from .implementation import ImplementationOverride, base_for
from .layer import PrunedKeyLayer
from .running_calls import RunningCalls


class Attached(ContextDecorator):
    """The ``with`` block that `attach` makes, and what it yields."""

    _used = True  # until the constructor is through
    hook: GenerateHook | None = None

    def __init__(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
        self._model, self._arguments = model, dict(arguments)
        self.new_cache()  # wrong arguments are told now
        self._override: ImplementationOverride | None = None
        self._calls = RunningCalls()
        self._latest: PrunedKeyCache | None = None
        self._of_thread = threading.local()
        self._used = False

    @property
    def cache(self) -> PrunedKeyCache:
        """Of the latest ``generate``: for its `memory_report` or `channel_mask`, or to pass on as ``past_key_values``.

        In a thread that has called ``generate`` in this block it is the cache of its own latest call; in any other, of
        the call that was started last.

        Raises
        ------
        CacheError
            If no call has been given a cache yet.
        """
        own: PrunedKeyCache | None = getattr(self._of_thread, "cache", None)
        found = self._latest if own is None else own
        if found is None:
            raise CacheError(
                "there is no cache yet: attached.cache is that of the latest model.generate(...) inside the block; "
                "calls with a cache of your own or with use_cache=False have none"
            )
        return found

    def new_cache(self, prompt_length: int | None = None) -> PrunedKeyCache:
        """A cache for one prompt, with the settings given to `attach`."""
        return PrunedKeyCache(self._model, **self._arguments, prompt_length=prompt_length)

    def generate(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's own ``generate``, with a cache unless the call has one or works without."""
        with self._calls.counted() as belongs:  # False: the block ended just now
            return self._pruned(plain, args, kwargs) if belongs else plain(*args, **kwargs)

    def _pruned(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, length = kwargs.get("past_key_values"), _prompt_length(args, kwargs)
        if isinstance(given, Attached):
            raise OptionError(
                "past_key_values is what attach() yields, which is no cache; write past_key_values=attached.cache to "
                "go on with a conversation, or leave it out"
            )
        if kwargs.get("cache_implementation") is not None:
            raise OptionError("attach() gives generate() its cache; leave out cache_implementation")
        if given is None and self._uses_cache(args, kwargs):
            given = kwargs["past_key_values"] = self._of_thread.cache = self._latest = self.new_cache(length)
        elif isinstance(given, PrunedKeyCache) and given.is_dense and length and length > given.get_seq_length():
            given.declare_prompt(length)  # a turn after others that were too short to be pruned
        if isinstance(given, PrunedKeyCache) and self._configured("cache_implementation", args, kwargs) is not None:
            kwargs["cache_implementation"] = None  # generate() would refuse the two together
        if isinstance(given, PrunedKeyCache) and self._is_assisted(args, kwargs):
            for layer in given.layers:  # later transformers say so themselves
                if isinstance(layer, PrunedKeyLayer):
                    layer.activate_past_recording()
        return plain(*args, **kwargs)

    def _is_assisted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this generate() feeds candidates that it may take back."""
        lookup = kwargs.get("prompt_lookup_num_tokens") or self._configured("prompt_lookup_num_tokens", args, kwargs)
        return kwargs.get("assistant_model") is not None or bool(lookup)

    def _uses_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this generate() works with a cache at all: as an argument says, or else a configuration."""
        if "use_cache" in kwargs:
            return bool(kwargs["use_cache"])  # None is off for transformers too
        configured = self._configured("use_cache", args, kwargs)
        return True if configured is None else bool(configured)

    def _configured(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What this generate()'s configuration says, or else the model's; None if neither does."""
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        found = (getattr(config, name, None) for config in (given, self._model.generation_config))
        return next((value for value in found if value is not None), None)

    # ------------------------------------------------------------ the block

    def __enter__(self) -> Attached:
        if self._override is not None and self._override.is_open:
            raise OptionError(
                "this block is open already, or calls in it are still running; write attach(model, ...) again for "
                "another one"
            )
        self._used = True
        try:
            self._override = ImplementationOverride(self._model, f"grace_{base_for(self._model)}")
            self._override.apply()
            self._calls.begin()
            open_block(self._model, self)
            return self
        except BaseException:
            self._close()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._close()
        except BaseException:  # an interrupt while closing
            self._close()
            raise

    def _close(self) -> None:
        close_block(self)
        if self._override is not None:
            self._calls.end(self._override.restore)

    def _recreate_cm(self) -> Attached:
        """A block for every call of a function that is decorated with it."""
        return Attached(self._model, self._arguments)

    def __call__(self, func: Any) -> Any:
        self._used = True
        return super().__call__(func)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(PrunedKeyCache, name):
            raise AttributeError(f"what attach() yields is no cache and has no {name}; write attached.cache.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __del__(self) -> None:
        if not self._used:
            warnings.warn(
                "attach(model, ...) alone changes nothing; write `with attach(model, ...):` and generate inside it",
                UserWarning,
                stacklevel=2,
            )


def attach(
    model: PreTrainedModel, method: str | MethodOptions = "grace", ratio: Any = DEFAULT_RATIO, **settings: Any
) -> Attached:
    """Prune the key cache of every ``model.generate`` inside a ``with`` block.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model; what ``torch.compile(model)`` returns is taken for the model in it.
    method, ratio, **settings
        As in `PrunedKeyCache`, except ``prompt_length``, which each call knows.

    Returns
    -------
    Attached
        The block, to be entered by ``with``. Its ``cache`` is the one of the latest call.

    Raises
    ------
    OptionError, CacheError, MaskError
        As `PrunedKeyCache`; `CacheError` also when the block is entered, if the model does not let its attention be
        chosen.

    Notes
    -----
    Blocks may be nested, may end in any order, and may be open in several threads: a call belongs to the innermost open
    block of its own thread, in a thread without one to the block that was entered last. A call that still runs in
    another thread when its block ends goes on as it began, and the model is put back when it is done.

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
    found = unwrap_model(model, "attach")
    if not isinstance(found, PreTrainedModel):
        raise OptionError(f"model must be a transformers model, not {type(found).__name__}; write attach(model, ...)")
    if not callable(getattr(found, "generate", None)):
        raise OptionError(
            f"{type(found).__name__} has no generate(): it is a model without its language-model head; write "
            "attach(model) with the whole one, which AutoModelForCausalLM.from_pretrained(...) gives. To call this one "
            "yourself, pass it a PrunedKeyCache"
        )
    return Attached(found, {"method": method, "ratio": ratio, **settings})


def _prompt_length(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Tokens of a generate()'s prompt, padding included; None if only generate() itself can know."""
    for given in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), kwargs.get("inputs"), *args[:1]):
        if isinstance(given, Tensor) and given.dim() >= 2:
            return int(given.shape[1])
    return None
