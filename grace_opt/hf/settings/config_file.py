"""The file of a `CacheConfig`: its settings as JSON, and the model that they were measured on.

When: ``grace-opt tune`` writes one, ``cache.json``; ``attach(model, config="cache.json")`` and ``grace-opt demo
--config cache.json`` read it. People may edit it: it has no digest, and `CacheConfig` checks every value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..._util.files import TEXT, path_text, write_file
from ..._util.parameters import shown
from ...attention.masks import is_fingerprint
from ...attention.provider import DEFAULT_RATIO
from ...errors import OptionError
from ..models.arguments import unwrap_model
from ..models.fingerprint import fingerprint, fingerprint_differences
from .bits import BUDGETS
from .reading import CHANNELS, PAGES

FORMAT, VERSION, OLDER = "grace_opt.pruning", "2", "1"


def format_settings(settings: Mapping[str, Any], made_for: Mapping[str, int | str]) -> str:
    """Return the content of a file.

    Parameters
    ----------
    settings : mapping
        What `CacheConfig.to_dict` gives.
    made_for : mapping
        The `fingerprint` of the model that they are for; empty for any.
    """
    content = {"format": FORMAT, "version": VERSION, "fingerprint": dict(made_for), "pruning": dict(settings)}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def write_settings(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, atomically."""
    write_file(path, text, OptionError)


def read_settings(path: str | os.PathLike[str], model: PreTrainedModel | PreTrainedConfig | None) -> Mapping[str, Any]:
    """Return the settings in a file.

    Parameters
    ----------
    path : path
    model : PreTrainedModel or PreTrainedConfig, optional
        Refuse the file if it is for another one. Weights are compared if both are known.

    Raises
    ------
    OptionError
        If there is no such file, it is cut short, of another kind or version, or for another model.
    """
    name = path_text(path)
    try:
        content = json.loads(Path(name).read_text(encoding=TEXT))
    except (OSError, ValueError, RecursionError) as error:
        missing = "there is no such file" if isinstance(error, FileNotFoundError) else "it cannot be opened"
        why = f"{missing} ({error.strerror})" if isinstance(error, OSError) else f"it is not JSON: {error}"
        if isinstance(error, OSError) and name.lstrip().startswith("{"):
            why = "that is the text of such a file, and its path is wanted"
        raise OptionError(
            f"the settings in {shown(name)} cannot be read: {why}; CacheConfig.to_json and grace-opt tune "
            "write such files"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise OptionError(
            f"{name} is JSON, but no file of cache settings, which has format {FORMAT!r}; CacheConfig.to_json and "
            "grace-opt tune write one"
        )
    if content.get("version") not in (VERSION, OLDER):
        raise OptionError(
            f"{name} has format version {content.get('version')!r}, and this grace_opt reads {VERSION!r}: update "
            "grace_opt, or run grace-opt tune again"
        )
    settings, made_for = content.get("pruning"), content.get("fingerprint")
    if not isinstance(settings, Mapping) or not is_fingerprint(made_for):
        raise OptionError(f"{name} lacks its settings or the model that they are for; run grace-opt tune again")
    if model is not None:
        here = fingerprint(model if isinstance(model, PreTrainedConfig) else unwrap_model(model, "from_json"))
        if differences := fingerprint_differences("file", made_for, here):
            raise OptionError(
                f"the settings in {name} were measured on another model ({'; '.join(differences)}); run grace-opt "
                "tune on this one, or, to use them anyway, write config=CacheConfig.from_json(FILE)"
            )
    return settings if content["version"] == VERSION else _of_older(settings)


def _of_older(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a file of version 1, where a ratio left out was 0.3, or 0 with pages and samples."""
    if settings.get("ratio") is not None or any(settings.get(name) is not None for name in BUDGETS):
        return settings
    read = settings.get("read")
    by = read.get("by", PAGES) if isinstance(read, Mapping) else read
    return {**settings, "ratio": DEFAULT_RATIO if by in (None, CHANNELS) else 0.0}
