"""`attach`: for the length of a ``with`` block, or from `start` to `stop`, ``generate`` decodes from a pruned cache.

When: this is the shortest way to use the adapter, and the only one for code that calls ``generate`` for you, such as a
``pipeline``. Every call gets a new cache that knows where the prompt ends. Chunked prefill and assisted decoding
therefore need no declaration, and calls from several threads share nothing. If the caller passes a cache, that one is
used; if it is a `CompressedCache` that has not pruned yet, `attach` declares the end of the prompt.

Two things change on the model: its attention implementation (:mod:`grace_opt.hf.models.implementation`), and an
attribute ``generate`` of this one instance (:mod:`grace_opt.hf.models.generate_hook`); while a call runs, so does what
it prepares its steps with (:mod:`grace_opt.hf.engine.given_cache`). All are restored when the block ends, also after an
exception. If a call is still running in another thread then, they are restored when the last such call ends
(:mod:`grace_opt.hf.engine.running_calls`). Nothing in transformers is patched.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from ..._util.warning import users_line, warn
from ...errors import CacheError, OptionError
from ...registry import MethodOptions
from ..models.arguments import require_model
from ..models.generate_hook import GenerateHook, close_block, open_block
from ..models.implementation import ImplementationOverride, base_for
from ..settings.config import CacheConfig, CacheSetting
from .cache import CompressedCache
from .given_cache import GivenCache, record_past
from .given_prompts import GivenPrompts
from .kept_prompts import KeptPrompts
from .prompt import NO_TOKENS
from .prompt_store import PromptStore
from .running_calls import RunningCalls


class Attached(ContextDecorator):
    """What `attach` returns: a ``with`` block, or `start` and `stop` where no block fits, as in a server.

    Parameters
    ----------
    model : PreTrainedModel
        The model whose ``generate`` gets caches.
    arguments : mapping
        Those of `CompressedCache`, for each of these caches.
    prompts : PromptStore or path, optional
        Where what prompts begin with is looked for, and kept.
    """

    _used = True  # until the constructor has finished
    hook: GenerateHook | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: Mapping[str, Any],
        prompts: PromptStore | str | os.PathLike[str] | None = None,
    ) -> None:
        self._model, self._line = model, users_line()
        first = CompressedCache(model, **arguments)  # report wrong arguments now, and say what there is to say once
        others = {name: arguments[name] for name in ("provider", "masks", "store", "offloading") if name in arguments}
        self._arguments = {**others, "config": first.config}
        if prompts is not None and others:
            raise OptionError(
                f"{next(iter(others))}= and prompts=: what a stored prompt was made with must be known by name; leave "
                "out one of them"
            )
        self._prompts = None if prompts is None else KeptPrompts(prompts, model, first.config)
        self._override: ImplementationOverride | None = None
        self._calls = RunningCalls()
        self._opening = threading.RLock()
        self._latest: CompressedCache | None = None
        self._said_foreign = False
        self._of_thread = threading.local()
        self._used = False

    @property
    def cache(self) -> CompressedCache:
        """The cache of the latest ``generate``: read its `memory_report` or `channel_mask`, or pass it on as
        ``past_key_values``.

        In a thread that has called ``generate`` in this block, the latest call is that thread's own; in any other
        thread, it is the call started last.

        Raises
        ------
        CacheError
            If no call has been given a cache yet.
        """
        own: CompressedCache | None = getattr(self._of_thread, "cache", None)
        found = self._latest if own is None else own
        if found is None:
            raise CacheError(
                "there is no cache yet: attached.cache is the cache of the latest model.generate(...) inside the "
                "block; calls with your own cache or with use_cache=False have none"
            )
        return found

    def new_cache(self, prompt_length: int | None = None) -> CompressedCache:
        """Return a cache for one prompt, with the settings given to `attach`."""
        return CompressedCache(self._model, **self._arguments, prompt_length=prompt_length)

    def generate(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's own ``generate``, with a new cache unless the call has one or uses none."""
        with self._calls.counted() as belongs:  # False: the block has just ended
            return self._pruned(plain, args, kwargs) if belongs else plain(*args, **kwargs)

    def _pruned(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._configured("is_assistant", args, kwargs):
            return plain(*args, **kwargs)  # the model drafts for itself: what it drafts is checked on pruned keys
        given, length = kwargs.get("past_key_values"), _prompt_length(args, kwargs)
        if isinstance(given, Attached):
            raise OptionError(
                "past_key_values is the object that attach() yields, which is not a cache; write "
                "past_key_values=attached.cache to continue a conversation, or leave it out"
            )
        if length == 0:
            raise OptionError(NO_TOKENS)
        if isinstance(given, CompressedCache):
            given.check_model(self._model)
            _check_whole(given, args, kwargs)
            if not self._uses_cache(args, kwargs):
                raise OptionError(
                    "use_cache=False beside past_key_values: the model would read the whole text again in every step, "
                    "and the cache would hold it as often; leave out one of them"
                )
        if kwargs.get("cache_implementation") is not None:
            raise OptionError("attach() already gives generate() a cache; leave out cache_implementation")
        kept: GivenPrompts | None = None
        if given is None and self._uses_cache(args, kwargs):
            given = self.new_cache()
            if self._prompts is not None:
                kept = self._given_prompts(args, kwargs)
                given = given if kept is None else self._prompts.fill(given, kept)
            kwargs["past_key_values"] = self._of_thread.cache = self._latest = given
            if length and not given.get_seq_length():
                given.declare_prompt(length, self._new_tokens(length, args, kwargs))
        elif isinstance(given, CompressedCache) and given.is_dense and length and length > given.get_seq_length():
            # The turns before this one were too short to prune.
            given.declare_prompt(length, self._new_tokens(length, args, kwargs))
        elif given is not None and not isinstance(given, CompressedCache):
            self._say_foreign(given)
        if not isinstance(given, CompressedCache):
            return plain(*args, **kwargs)
        args, kwargs = self._without_implementation(args, kwargs)
        if self._is_assisted(args, kwargs):
            record_past(given)
        unsaid, held = (length or 0) - (_count(*_ids(args, kwargs)) or 0), given.get_seq_length()
        following = GivenCache(self._model, given, length, unsaid, keeps_prompt=kept is not None)
        with following.followed():
            output = plain(*args, **kwargs)
        if self._prompts is not None and kept is not None:
            self._prompts.keep_past(following, kept, held)
        own = getattr(plain, "__func__", None) is GenerationMixin.generate and not kwargs.get("custom_generate")
        if left_out := following.check(output, whole=own):
            warn(left_out)
        return output

    def _given_prompts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GivenPrompts | None:
        """Return this generate()'s prompts, if a store can know them by their tokens."""

        def setting(name: str) -> Any:
            return self._configured(name, args, kwargs) if kwargs.get(name) is None else kwargs[name]

        ids = next((each for each in _ids(args, kwargs) if isinstance(each, Tensor)), None)
        rows = max(int(setting(name) or 1) for name in ("num_beams", "num_return_sequences"))
        pad, ends = setting("pad_token_id"), setting("eos_token_id")
        pad = None if pad in (ends if isinstance(ends, list | tuple) else [ends]) else pad
        return GivenPrompts.of_call(kwargs, ids, rows, pad)

    def _say_foreign(self, given: object) -> None:
        """Warn, once in this block, that a call has a cache which is not ours."""
        if not self._said_foreign:
            self._said_foreign = True
            warn(
                f"past_key_values is a {type(given).__name__}, which generate() uses as it is, without grace_opt: "
                "leave past_key_values out, or pass attached.new_cache()"
            )

    def _without_implementation(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments without ``cache_implementation``, which generate() refuses beside a cache."""
        name = "cache_implementation"
        if self._configured(name, args, kwargs) is None:
            return args, kwargs
        given = _configuration(args, kwargs)
        if given is None or getattr(self._model.generation_config, name, None) is not None:
            return args, {**kwargs, name: None}
        given = copy.copy(given)  # generate() warns of what is given beside a configuration
        given.cache_implementation = None
        if len(args) > 1:
            return (args[0], given, *args[2:]), kwargs
        return args, {**kwargs, "generation_config": given}

    def _is_assisted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this generate() feeds candidate tokens that it may remove again."""
        if kwargs.get("assistant_model") is not None:
            return True
        names = "prompt_lookup_num_tokens", "assistant_early_exit"
        return any(kwargs.get(name) or self._configured(name, args, kwargs) for name in names)

    def _uses_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this generate() uses a cache at all, according to its arguments or else to the configuration."""
        if "use_cache" in kwargs:
            return bool(kwargs["use_cache"])  # transformers also reads None as off
        configured = self._configured("use_cache", args, kwargs)
        return True if configured is None else bool(configured)

    def _new_tokens(self, length: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Return how many tokens this generate() adds at most, if it is told."""
        for name, before in (("max_new_tokens", 0), ("max_length", length)):
            most = kwargs.get(name) or self._configured(name, args, kwargs)
            if isinstance(most, int) and (name != "max_length" or most > before):
                return most - before
        return None

    def _configured(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Look up a setting in this generate()'s configuration, then in the model's; None if neither has it."""
        configs = _configuration(args, kwargs), self._model.generation_config
        found = (getattr(config, name, None) for config in configs)
        return next((value for value in found if value is not None), None)

    # ------------------------------------------------------------ the block

    def start(self) -> Attached:
        """Begin without a ``with`` block: from now on, every thread's ``generate`` gets a pruned cache.

        For servers, which begin in one function and end in another. Threads with a ``with`` block of their own use
        that one; all others use what was begun last.

        Returns
        -------
        Attached
            This object. Keep it: only its `stop` ends what it began.

        Raises
        ------
        OptionError
            If it is open already, or calls of generate() from before its `stop` are still running.

        Examples
        --------
        >>> from grace_opt.hf.models import load_pocket
        >>> model, tokenizer = load_pocket()
        >>> attached = attach(model, ratio=0.6).start()
        >>> inputs = tokenizer("the quiet river " * 40, return_tensors="pt")
        >>> output = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
        >>> attached.stop()
        >>> model.config._attn_implementation, attached.cache.memory_report().pruned_tokens > 0
        ('sdpa', True)
        """
        return self._open(None)

    def stop(self) -> None:
        """End what `start` began, from any thread; does nothing if it is not open.

        Returns at once: a call that is still running in another thread goes on as it began, and the model is restored
        when the last such call ends. Afterwards it may be started again.
        """
        self.__exit__()

    def __enter__(self) -> Attached:
        return self._open(threading.current_thread())

    def __exit__(self, *_: object) -> None:
        try:
            self._close()
        except BaseException:  # an interrupt while closing
            self._close()
            raise

    def _open(self, thread: threading.Thread | None) -> Attached:
        # Of two threads that start the same object, one succeeds.
        with self._opening:
            if self._override is not None and self._override.is_open:
                raise OptionError(
                    "this is open already, or calls in it are still running; call attach(model, ...) again for another "
                    "block, or stop() this one first"
                )
            self._used = True
            try:
                self._override = ImplementationOverride(self._model, f"grace_{base_for(self._model)}")
                self._override.apply()
                self._calls.begin()
                open_block(self._model, self, thread)
                return self
            except BaseException:
                self._close()
                raise

    def _close(self) -> None:
        with self._opening:
            close_block(self)
            if self._override is not None:
                self._calls.end(self._override.restore)

    def _recreate_cm(self) -> Attached:
        """Return a new block for every call of a function decorated with this one."""
        return Attached(self._model, self._arguments, None if self._prompts is None else self._prompts.store)

    def __call__(self, func: Any) -> Any:
        self._used = True
        return super().__call__(func)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(CompressedCache, name):
            raise AttributeError(
                f"the object that attach() yields is not a cache and has no {name}; write attached.cache.{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __del__(self) -> None:
        if not self._used:
            warn(
                "attach(model, ...) alone changes nothing; write `with attach(model, ...):` and generate inside it, or "
                "attach(model, ...).start()",
                at=self._line,
            )


def attach(
    model: PreTrainedModel,
    setting: CacheSetting | str | MethodOptions | None = None,
    ratio: float | Sequence[float] | None = None,
    *,
    prompts: PromptStore | str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Attached:
    """Give every ``model.generate`` inside a ``with`` block a smaller cache: by default one with ``bits=2.25``.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model, or what ``torch.compile(model)`` returns for one.
    setting, ratio, **settings
        As in `CompressedCache`: one object such as ``Bits(2.25)`` or ``Channels(0.3)``, and others by name, as in
        ``attach(model, Bits(2.25), evict=SnapKV(0.5))``; but without ``prompt_length``, which each call sets.
        ``config="cache.json"`` takes all settings from a file of ``grace-opt tune``.
    prompts : PromptStore or path, optional
        A folder of compressed prompts: what a prompt begins with is taken from there, and not read again; what was new
        goes there.

    Returns
    -------
    Attached
        The block, to be entered with ``with``; or begun and ended by `Attached.start` and `Attached.stop`. Its
        ``cache`` is that of the latest call.

    Raises
    ------
    OptionError, CacheError, MaskError
        As `CompressedCache`; also `CacheError` on entering the block if the model does not allow its attention to be
        chosen.

    Notes
    -----
    Blocks may be nested, may end in any order, and may be open in several threads. A call belongs to the innermost open
    block of its own thread; in a thread without one, to the block entered last. A call that is still running in another
    thread when its block ends goes on unchanged, and the model is restored when it is done.

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
    found = require_model(model, "attach")
    if not callable(getattr(found, "generate", None)):
        raise OptionError(
            f"{type(found).__name__} has no generate(): it is a model without its language-model head; write "
            f"attach(model) with the full model, from AutoModelForCausalLM.from_pretrained(...). To call this model "
            f"yourself, pass it a CompressedCache"
        )
    if isinstance(settings.get("config"), str | os.PathLike):  # once, not for every prompt
        settings["config"] = CacheConfig.from_json(settings["config"], found)
    return Attached(found, {"setting": setting, "ratio": ratio, **settings}, prompts)


def _configuration(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the configuration that a generate() is given, or None."""
    return kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)


def _check_whole(cache: CompressedCache, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise if tokens of the input would be lost: it is taken for the whole text, those of the cache included."""
    if kwargs.get("inputs_embeds") is not None:
        return  # all of them are new
    length, held = _prompt_length(args, kwargs), cache.get_seq_length()
    if length is not None and length < held:
        raise CacheError(
            f"the input has {length} tokens and the cache holds {held}: generate() takes its input for the whole text, "
            "of which the cache has the first tokens, and would drop some; give the whole text, or, for another "
            "prompt, leave out past_key_values or call reset()"
        )


def _prompt_length(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of a generate()'s prompt, padding included; None if only generate() can know it."""
    return _count(kwargs.get("inputs_embeds"), *_ids(args, kwargs))


def _ids(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what may be a generate()'s input of tokens, not of embeddings: the first tensor is."""
    return kwargs.get("input_ids"), kwargs.get("inputs"), *args[:1]


def _count(*inputs: Any) -> int | None:
    """Return the number of tokens of the first tensor."""
    return next((int(given.shape[1]) for given in inputs if isinstance(given, Tensor) and given.dim() >= 2), None)
