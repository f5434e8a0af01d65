"""Answers as plain values for JSON, with null for infinite and unknown values."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch

from .files import write_file


def to_numpy(values: Any) -> np.ndarray[Any, Any]:
    """Numbers as a numpy array, from whatever device they are on."""
    return np.asarray(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)


def to_jsonable(value: Any) -> Any:
    """The value as numbers, strings, lists and dicts: non-finite numbers become None, other types become text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return to_jsonable(to_numpy(value).tolist())
    if isinstance(value, dict):
        return {str(name): to_jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(inner) for inner in value]
    return str(value)


def to_json_text(value: Any, path: str | os.PathLike[str] | None = None) -> str:
    """The value as JSON text, also written to `path` if given."""
    text = json.dumps(to_jsonable(value), indent=2, allow_nan=False) + "\n"
    if path is not None:
        write_file(path, text)
    return text
