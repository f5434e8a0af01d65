"""Arguments that nothing here has, and objects that only hold a model: what their writer most likely meant.

When: somebody knows another library's names, mistypes ours, or gives a pipeline where a model is wanted. An error then
says what to write instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedModel

from .._util.names import nearest_name
from ..errors import OptionError

T = TypeVar("T")

_RATIO, _KEPT, _DEVICE = "write ratio=", "write kept_channels=", "leave it out: a cache lies where the model computes"
_BITS, _TOKENS = "write quantize=Quantization(keys=4)", "write evict=SnapKV(budget=512)"
_GENERATE, _TYPE = "pass it to generate()", "leave it out: a cache has the type of the keys that come in"

#: What settings of a cache are called elsewhere, or what is often looked for among them.
OTHER_NAMES_OF_SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(("compression_ratio", "key_channel_compression_ratio", "lam", "lambda", "sparsity"), _RATIO),
    **dict.fromkeys(("pruning_ratio", "prune_ratio"), _RATIO),
    "keep_ratio": "write ratio=, the share that goes: 1 - keep_ratio",
    **dict.fromkeys(("k", "channels", "keep_channels", "num_channels"), _KEPT),
    **dict.fromkeys(("bits", "nbits", "n_bits", "num_bits"), _BITS),
    **dict.fromkeys(("budget", "token_budget", "max_capacity_prompt", "max_capacity_prompts", "press"), _TOKENS),
    **dict.fromkeys(("n_sink", "n_sinks", "sinks", "num_sink_tokens"), "write sink_tokens="),
    **dict.fromkeys(("window", "window_size"), "write observation_window= (queries) or recent_window= (tokens)"),
    **dict.fromkeys(("device", "device_map"), _DEVICE),
    **dict.fromkeys(("dtype", "torch_dtype"), _TYPE),
    "layers": "write one ratio per layer of the model, 0 for those to leave alone: ratio=[0, 0.5, ...]",
    **dict.fromkeys(("mask", "channel_mask", "channels_mask"), "write masks=, a ChannelMask that calibrate() makes"),
    "skip_layers": "write dense_layers=, how many of the first layers stay dense",
    **dict.fromkeys(("max_new_tokens", "do_sample", "temperature", "num_beams", "input_ids"), _GENERATE),
    **dict.fromkeys(("attention_mask", "streamer"), _GENERATE),
}


def advice(unknown: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """Sentences on what to write for names that do not exist; empty where nothing comes to mind.

    Parameters
    ----------
    unknown, known : iterable of str
        The names that were given, and those that there are.
    elsewhere : mapping
        From a name of other libraries to what to do here.

    Examples
    --------
    >>> advice(["lambda_", "Recent_Windw"], ["recent_window"], OTHER_NAMES_OF_SETTINGS)
    ' For lambda_, write ratio=. For Recent_Windw, write recent_window=.'
    """
    names, sentences = list(known), []
    for name in unknown:
        near = nearest_name(name, names, similarity=0.75)
        meant = elsewhere.get(name.strip("_").lower()) or (f"write {near}=" if near is not None else None)
        if meant is not None:
            sentences.append(f" For {name}, {meant}.")
    return "".join(sentences)


def explains_arguments(elsewhere: Mapping[str, str], hint: str = "") -> Callable[[type[T]], type[T]]:
    """Class decorator: arguments that the constructor does not have raise an `OptionError` with `advice`.

    Parameters
    ----------
    elsewhere : mapping
        As in `advice`.
    hint : str
        A sentence to end with.
    """

    def decorate(cls: type[T]) -> type[T]:
        plain: Callable[..., None] = cls.__init__
        names = list(inspect.signature(cls).parameters)

        @functools.wraps(plain)
        def checked(self: T, *args: Any, **kwargs: Any) -> None:
            unknown = [name for name in kwargs if name not in names]
            known = f"its arguments are {', '.join(names)}"
            if unknown:
                raise OptionError(
                    f"{cls.__name__} has no {', '.join(unknown)}; {known}.{advice(unknown, names, elsewhere)}{hint}"
                )
            if len(args) > len(names):
                raise OptionError(f"{cls.__name__} got {len(args)} arguments by position; {known}")
            plain(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[method-assign,assignment]
        return cls

    return decorate


def unwrap_model(given: Any, call: str) -> Any:
    """The model that ``torch.compile`` wrapped, or what was given.

    Parameters
    ----------
    given : object
        What stands where a model is wanted.
    call : str
        Of which function, for the message.

    Raises
    ------
    OptionError
        If it is something else that holds a model (a pipeline, an adapter), or the name of one.
    """
    model = getattr(given, "_orig_mod", given)
    if isinstance(model, str):
        raise OptionError(
            f"model must be a transformers model, not str; write {call}(model, ...) with model = "
            f"AutoModelForCausalLM.from_pretrained({model!r})"
        )
    if not isinstance(model, PreTrainedModel):
        for name in ("model", "module", "base_model"):
            if isinstance(getattr(model, name, None), PreTrainedModel):
                kind = type(model).__name__
                raise OptionError(f"model must be a transformers model, and a {kind} holds one; write {call}(x.{name})")
    return model
