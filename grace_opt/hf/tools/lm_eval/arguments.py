"""Arguments of the harness's ``--model_args``: those of our cache, and all others, which are the harness's.

When: a model is made from the command line, where dicts stand for what Python writes as objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ....errors import OptionError
from ...models.arguments import OTHER_NAMES_OF_SETTINGS, advice
from ...models.loading import POCKET_FOLDER
from ...settings.config import CacheConfig
from ...settings.keywords import SETTINGS as KEYWORDS

#: Settings of a cache, as in `CacheConfig`; ``config`` has all of them.
SETTINGS = (*KEYWORDS, "channels", "config")
#: Settings that are dicts in JSON and objects in Python.
_OBJECTS = ("evict", "quantize")
#: Arguments of ``from_pretrained`` that are other names of settings elsewhere.
_OF_MODELS = ("device_map", "torch_dtype")


def split_arguments(given: Mapping[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell the settings of our cache from the harness's own arguments.

    Parameters
    ----------
    given : mapping
        All arguments by name. ``evict`` and ``quantize`` may be the dicts that ``CacheConfig.to_dict`` has.
    known : iterable of str
        The harness's own names. Others go to ``from_pretrained``, as the harness has it, unless they are nearly ours.

    Returns
    -------
    settings, others : dict
        For `CompressedCache`, and for the harness's model.

    Raises
    ------
    OptionError
        If a name is nearly one of ours, or its name in another library.

    Examples
    --------
    >>> split_arguments({"bits": 2.25, "quantize": None, "dtype": "float32"}, ["dtype"])
    ({'bits': 2.25, 'quantize': None}, {'dtype': 'float32'})
    """
    theirs = {*known, *_OF_MODELS}
    settings = {name: _object(name, value) for name, value in given.items() if name in SETTINGS}
    others = {name: value for name, value in given.items() if name not in SETTINGS}
    meant = advice([name for name in others if name not in theirs], SETTINGS, OTHER_NAMES_OF_SETTINGS)
    if meant:
        raise OptionError(f"--model_args has names that neither a cache nor the harness's model has.{meant}")
    return settings, others


def _object(name: str, value: Any) -> Any:
    if name in _OBJECTS and isinstance(value, Mapping):
        return getattr(CacheConfig.from_dict({name: value}), name)
    return value


def model_arguments(pretrained: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Say which model it is in the harness's words.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
        ``pocket`` is the model that ships with grace_opt; a path of a ``.gguf`` file is its folder and its name.
    others : mapping
        The harness's other arguments.

    Examples
    --------
    >>> model_arguments("models/small.gguf", {"dtype": "float32"})
    {'dtype': 'float32', 'pretrained': 'models', 'gguf_file': 'small.gguf'}
    """
    if pretrained == "pocket":
        # The harness asks every tokenizer for a token that ends texts, and the pocket model's has none.
        tokenizer = AutoTokenizer.from_pretrained(POCKET_FOLDER)
        tokenizer.eos_token = tokenizer.pad_token
        return {"tokenizer": tokenizer, **others, "pretrained": str(POCKET_FOLDER)}
    if isinstance(pretrained, str) and pretrained.endswith(".gguf") and "gguf_file" not in others:
        return {**others, "pretrained": str(Path(pretrained).parent), "gguf_file": Path(pretrained).name}
    return {**others, "pretrained": pretrained}
