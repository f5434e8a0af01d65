"""Layers that have been learned, in a file from which an interrupted run goes on.

When: ``learn_masks(..., checkpoint=FILE)``. The file says which model, texts and settings it is for, and is refused for
others by name: a mask of two halves learned differently would look like any other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...._util.tensor_files import TensorFormat
from ....attention.masks import is_fingerprint
from ....errors import MaskError
from ...models.fingerprint import fingerprint_differences

FILE_FORMAT = TensorFormat("grace_opt.learned_layers", "1", "a checkpoint of learned masks", MaskError)


@dataclass
class Checkpoint:
    """Masks of the layers that are done.

    Attributes
    ----------
    path : path or None
        None keeps nothing.
    fingerprint : mapping
        The model's.
    settings : mapping
        Everything else that the masks depend on, JSON-able.
    masks : dict
        ``(H, d)`` bool of each layer, True = pruned.
    """

    path: str | os.PathLike[str] | None
    fingerprint: Mapping[str, int | str]
    settings: Mapping[str, Any]
    masks: dict[int, Tensor] = field(default_factory=dict)

    def load(self, shape: tuple[int, int], kept: Mapping[int, int]) -> None:
        """Take what the file holds, if there is one.

        Parameters
        ----------
        shape : (int, int)
            KV heads and channels of a layer's mask.
        kept : mapping
            Number of channels that each layer keeps per head.

        Raises
        ------
        MaskError
            If it is no checkpoint, or for another model, other texts or other settings.
        """
        if self.path is None or not os.path.exists(self.path):
            return
        about, tensors = FILE_FORMAT.read(self.path)
        made_for, settings = about.get("fingerprint"), about.get("settings")
        if not is_fingerprint(made_for) or not isinstance(settings, dict):
            raise MaskError(f"{os.fspath(self.path)} does not say what it is for: remove it, and learn again")
        differences = fingerprint_differences("checkpoint", made_for, self.fingerprint)
        if differences:
            raise self._other("another model", differences)
        if settings.get("texts") != self.settings["texts"]:
            raise self._other("other texts", ["their tokens differ"])
        differ = [
            f"{name}: checkpoint {settings.get(name)!r}, here {value!r}"
            for name, value in self.settings.items()
            if settings.get(name) != value
        ]
        if differ:
            raise self._other("other settings", differ)
        layers = {f"layer {index}": index for index in kept}
        for name, mask in tensors.items():
            right = name in layers and mask.dtype == torch.bool and tuple(mask.shape) == shape
            if not right or not bool((~mask).sum(-1).eq(kept[layers[name]]).all()):
                raise MaskError(
                    f"{os.fspath(self.path)} holds, as {name}, no mask of {shape[1]} channels for {shape[0]} KV heads "
                    "that fits the ratio: remove it, and learn again"
                )
        self.masks = {layers[name]: mask for name, mask in tensors.items()}

    def add(self, layer: int, pruned: Tensor) -> None:
        """Keep a layer that is done, and write the file."""
        self.masks[layer] = pruned.cpu()
        if self.path is not None:
            tensors = {f"layer {index}": mask for index, mask in self.masks.items()}
            about = {"fingerprint": dict(self.fingerprint), "settings": dict(self.settings)}
            FILE_FORMAT.write(self.path, tensors, about)

    def _other(self, what: str, differences: Sequence[str]) -> MaskError:
        assert self.path is not None
        return MaskError(
            f"the checkpoint {os.fspath(self.path)} is for {what} ({'; '.join(differences)}): give what it was made "
            "with to go on, or another name to begin anew"
        )
