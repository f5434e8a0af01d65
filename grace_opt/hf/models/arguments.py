"""Arguments: what was meant by unknown ones, and by objects that only contain a model.

When: somebody uses another library's names, mistypes ours, passes a pipeline instead of a model, or gives an argument
that would be ignored.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..._util.names import nearest_name
from ...errors import OptionError

T = TypeVar("T")

#: How channels are chosen where nothing is said: salient ones are protected, then MIES.
DEFAULT_METHOD = "grace"

_RATIO, _KEPT, _DEVICE = "write ratio=", "write kept_channels=", "leave it out: the cache is on the model's device"
_BITS = "write bits=, the mean over all channels, or quantize=Quantize(4) for the same number everywhere"
_TOKENS, _BYTES = "write evict=SnapKV(budget=512)", "write max_bytes="
_LAYERS = "write evict=LayerBudgets(SnapKV(budget=0.25), losses)"
_GENERATE, _TYPE = "pass it to generate()", "leave it out: the cache has the type of the model's keys"

#: Names of cache settings in other libraries, and settings that people often look for.
OTHER_NAMES_OF_SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(("compression_ratio", "key_channel_compression_ratio", "lam", "lambda", "sparsity"), _RATIO),
    **dict.fromkeys(("pruning_ratio", "prune_ratio"), _RATIO),
    "pruning": "write config=",
    "keep_ratio": "write ratio=, the share to prune: 1 - keep_ratio",
    **dict.fromkeys(("k", "channels", "keep_channels", "num_channels"), _KEPT),
    **dict.fromkeys(("nbits", "n_bits", "num_bits"), _BITS),
    **dict.fromkeys(("kv_bits", "bits_per_element"), "write bits="),
    **dict.fromkeys(("num_bytes", "nbytes", "cache_bytes", "memory"), _BYTES),
    **dict.fromkeys(("kl", "target_kl", "max_error"), "write max_kl="),
    **dict.fromkeys(("budget", "token_budget", "max_capacity_prompt", "max_capacity_prompts", "press"), _TOKENS),
    **dict.fromkeys(("n_sink", "n_sinks", "sinks", "num_sink_tokens"), "write sink_tokens="),
    **dict.fromkeys(("window", "window_size"), "write observation_window= (queries) or recent_window= (tokens)"),
    **dict.fromkeys(("device", "device_map"), _DEVICE),
    **dict.fromkeys(("dtype", "torch_dtype"), _TYPE),
    "layers": "write one ratio per layer of the model, 0 for those to leave dense: ratio=[0, 0.5, ...]",
    **dict.fromkeys(
        ("mask", "channel_mask", "channels_mask"), "write masks=, a ChannelMask that calibrate.masks() makes"
    ),
    **{
        name: f"write read=TopTokens({name}=...)"
        for name in ("share", "by", "page_size", "epsilon", "top_p", "tables", "hash_bits", "confidence")
    },
    **dict.fromkeys(
        ("losses", "layer_losses", "layer_budgets"), "write evict=LayerBudgets(SnapKV(budget=0.25), losses)"
    ),
    "skip_layers": "write dense_layers=, how many of the first layers stay dense",
    **dict.fromkeys(("max_new_tokens", "do_sample", "temperature", "num_beams", "input_ids"), _GENERATE),
    **dict.fromkeys(("attention_mask", "streamer"), _GENERATE),
}


def advice(unknown: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """Return sentences on what to write instead of unknown names; empty if there is no suggestion.

    Parameters
    ----------
    unknown, known : iterable of str
        The names that were given, and those that exist.
    elsewhere : mapping
        Maps a name used by other libraries to the advice for it.

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


def explains_arguments(
    elsewhere: Mapping[str, str], hint: str = "", others: Iterable[str] = ()
) -> Callable[[type[T]], type[T]]:
    """Class decorator: unknown constructor arguments raise an `OptionError` with `advice`.

    Parameters
    ----------
    elsewhere : mapping
        As in `advice`.
    hint : str
        A sentence to end with.
    others : iterable of str
        Names of further arguments, which the constructor takes by ``**``.
    """

    def decorate(cls: type[T]) -> type[T]:
        plain: Callable[..., None] = cls.__init__
        parameters = inspect.signature(cls).parameters.values()
        places = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        names = [*(each.name for each in parameters if each.kind is not each.VAR_KEYWORD), *others]

        @functools.wraps(plain)
        def checked(self: T, *args: Any, **kwargs: Any) -> None:
            unknown = [name for name in kwargs if name not in names]
            known = f"its arguments are {', '.join(names)}"
            if unknown:
                raise OptionError(
                    f"{cls.__name__} has no {', '.join(unknown)}; {known}.{advice(unknown, names, elsewhere)}{hint}"
                )
            if len(args) > len(places):
                raise OptionError(f"{cls.__name__} got {len(args)} arguments by position; {known}")
            plain(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[method-assign,assignment]
        return cls

    return decorate


def require_model(given: Any, call: str) -> PreTrainedModel:
    """Return the model as `unwrap_model` does; raise `OptionError` if it is none, for example a configuration."""
    model = unwrap_model(given, call)
    if not isinstance(model, PreTrainedModel):
        raise OptionError(
            f"model must be a transformers model with its weights, not {type(model).__name__}; write {call}(model, ...)"
        )
    return model


def unwrap_model(given: Any, call: str) -> Any:
    """Return the model that ``torch.compile`` wrapped, or the given object itself.

    Parameters
    ----------
    given : object
        The object passed as the model.
    call : str
        Name of the called function, for the message.

    Raises
    ------
    OptionError
        If the object merely contains a model (a pipeline, an adapter), or is a model's name.
    """
    model = getattr(given, "_orig_mod", given)
    if isinstance(model, str):
        raise OptionError(
            f"model must be a transformers model, not str; write {call}(model, ...) with model = "
            f"AutoModelForCausalLM.from_pretrained({model!r})"
        )
    if not isinstance(model, PreTrainedModel):
        if isinstance(getattr(model, "peft_config", None), Mapping) and hasattr(model, "get_base_model"):
            raise OptionError(
                f"model must be a transformers model, and peft wraps one; write {call}(model.get_base_model(), ...), "
                "which has the adapters, too"
            )
        for name in ("model", "module", "base_model"):
            if isinstance(getattr(model, name, None), PreTrainedModel):
                kind = type(model).__name__
                what = f"pipe.{name}, ...), and call pipe as before" if "Pipeline" in kind else f"x.{name}, ...)"
                raise OptionError(f"model must be a transformers model, and a {kind} contains one; write {call}({what}")
    return model
