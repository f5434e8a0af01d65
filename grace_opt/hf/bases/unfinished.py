"""What is done of a calibration, in a file from which the next call goes on.

When: a calibration takes minutes, and is stopped by Ctrl-C, by a time limit or with its process. After each text, the
sums over all texts so far are written, so rarely that it takes at most a tenth of the time. What is made from there is
bit for bit what would have been made at once. The file is removed when the calibration is finished; one that is
damaged, or of another model, other texts or other settings, is not read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from typing import Any

from torch import Tensor

from ..._util.tensor_files import TensorFormat
from ...errors import CalibrationError
from .moments import ClassSums, LayerMoments
from .rotary import RotaryMean

FORMAT = TensorFormat("grace_opt.unfinished_basis", "1", "an unfinished calibration", CalibrationError)
#: Time between two writings, at least, by that which the last one took.
REST = 10
#: The clock; tests hold it.
seconds = time.monotonic
_KINDS = {kind.__name__: kind for kind in (LayerMoments, ClassSums, RotaryMean)}


class Unfinished:
    """The sums over the texts that are done, and the file of them.

    Parameters
    ----------
    path : path or None
        None keeps nothing.
    settings : mapping
        All that the sums depend on, JSON-able; versions of libraries are added.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self._path, self._kept, self._took = path, seconds(), 0.0
        versions = {name: version(name) for name in ("grace-opt", "torch", "transformers")}
        self._settings = {**settings, **versions}
        #: Number of texts in the file.
        self.texts = 0

    def load(self) -> dict[int, LayerMoments] | None:
        """Return the sums in the file, and set `texts`; None if there is none that fits."""
        if self._path is None or not os.path.exists(self._path):
            return None
        try:
            about, tensors = FORMAT.read(self._path)
            if about.get("settings") != self._settings:
                return None
            found = _put_together(about["layers"], tensors)
            texts = int(about["texts"])
        except (CalibrationError, KeyError, TypeError, ValueError):
            return None  # damaged: made anew, and written over
        self.texts = texts
        return dict(found)

    def keep(self, texts: int, layers: Mapping[int, LayerMoments]) -> None:
        """Write the sums over so many texts, if it is time and there is room for them."""
        began = seconds()
        if self._path is None or began - self._kept < REST * self._took:
            return
        tensors: dict[str, Tensor] = {}
        about = {"settings": self._settings, "texts": texts, "layers": _taken_apart(dict(layers), "", tensors)}
        with suppress(CalibrationError):  # no room: then it is not kept
            FORMAT.write(self._path, tensors, about)
            self.texts = texts
        self._kept = seconds()
        self._took = self._kept - began

    @contextmanager
    def told_if_stopped(self, total: int) -> Iterator[None]:
        """Say after Ctrl-C in this block how many of all texts are kept."""
        try:
            yield
        except KeyboardInterrupt as stop:
            kept = f"{self.texts} of its {total} texts are kept, and the same call goes on from there"
            if not self.texts:
                kept = "nothing of it is kept, and the same call starts it anew"
            stop.add_note(f"The calibration was stopped: {kept}.")
            raise

    def remove(self) -> None:
        """Remove the file: the calibration is finished."""
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)


def _taken_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, with its tensors apart, by name; the inverse of `_put_together`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return {
            "kind": type(value).__name__,
            "fields": {each: _taken_apart(part, f"{name}.{each}", tensors) for each, part in parts.items()},
        }
    if isinstance(value, dict):
        return {"items": [[key, _taken_apart(part, f"{name}.{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_taken_apart(part, f"{name}.{place}", tensors) for place, part in enumerate(value)]}
    return value


def _put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    what, inner = next(iter(value.items()))
    if what == "tensor":
        return tensors[inner]
    if what == "items":
        return {key: _put_together(part, tensors) for key, part in inner}
    if what == "tuple":
        return tuple(_put_together(part, tensors) for part in inner)
    return _KINDS[value["kind"]](**{name: _put_together(part, tensors) for name, part in value["fields"].items()})
