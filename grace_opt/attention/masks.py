"""`ChannelMask`: which key channels are pruned in every KV head of a layer or model; saved as safetensors.

Use it to save a choice of channels and apply it elsewhere. `ChannelMask.save` documents the file format.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .._util.parameters import check_fields, integer
from .._util.tensor_files import TensorFormat
from ..errors import MaskError
from ..objective import indices_from_mask

FILE_FORMAT = TensorFormat("grace_opt.channel_mask", "1", "a channel mask", MaskError)


@dataclass(frozen=True, eq=False)
class ChannelMask:
    """Pruned and kept key channels of every KV head.

    Attributes
    ----------
    pruned : Tensor (..., H_kv, d), bool
        True where this channel of this head is pruned. Leading dimensions are layers, batch, or both.
    fingerprint : mapping
        The model the mask was made for (model type, layers, KV heads, head_dim, …); empty if unknown.
    pruned_per_head : int or None
        Number of pruned channels in every head, if known: indices are then computed without waiting for the device.

    Raises
    ------
    MaskError
        If `pruned` is not a bool tensor of at least two dimensions, or `fingerprint` is not a mapping of names to texts
        or integers.

    Examples
    --------
    >>> mask = ChannelMask(torch.tensor([[True, False, False], [False, False, True]]))
    >>> mask.kept_indices.tolist()
    [[1, 2], [0, 1]]
    """

    pruned: Tensor
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)
    pruned_per_head: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pruned, Tensor) or self.pruned.dtype != torch.bool or self.pruned.ndim < 2:
            got = (
                f"{self.pruned.dtype} {tuple(self.pruned.shape)}"
                if isinstance(self.pruned, Tensor)
                else type(self.pruned)
            )
            raise MaskError(f"a ChannelMask is a bool tensor (..., KV heads, head_dim), True = pruned; got {got}.")
        if not self.pruned.numel():
            raise MaskError(f"a ChannelMask of shape {tuple(self.pruned.shape)} is empty: give at least one channel.")
        if not is_fingerprint(self.fingerprint):
            raise MaskError(
                f"fingerprint={self.fingerprint!r}: give a mapping of names to texts or integers, as in "
                'ChannelMask(pruned, {"model_type": "llama"}).'
            )
        most = self.pruned.shape[-1]
        check_fields(self, integer, "pruned_per_head", at_least=0, at_most=most, optional=True, error=MaskError)

    @property
    def head_dim(self) -> int:
        """Number of channels per head, d."""
        return self.pruned.shape[-1]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads per layer."""
        return self.pruned.shape[-2]

    @property
    def pruned_indices(self) -> Tensor:
        """Sorted pruned channels, int64; shorter rows are padded with -1."""
        return indices_from_mask(self.pruned, _most(self.pruned) if (k := self.pruned_per_head) is None else k)

    @property
    def kept_indices(self) -> Tensor:
        """Sorted kept channels, int64; shorter rows are padded with -1."""
        kept, k = ~self.pruned, self.pruned_per_head
        return indices_from_mask(kept, _most(kept) if k is None else self.head_dim - k)

    def counted(self) -> ChannelMask:
        """Return the mask with ``pruned_per_head`` counted, if all heads agree; waits for the device."""
        counts = set(self.pruned.sum(-1).flatten().tolist())
        return replace(self, pruned_per_head=counts.pop() if len(counts) == 1 else None)

    def layer(self, i: int) -> ChannelMask:
        """Return entry `i` of the first leading dimension; negative numbers count from the end."""
        if self.pruned.ndim < 3:
            raise MaskError(f"this mask of shape {tuple(self.pruned.shape)} has no layer dimension.")
        count = len(self.pruned)
        return replace(self, pruned=self.pruned[integer("i", i, at_least=-count, at_most=count - 1, error=MaskError)])

    def to(self, device: torch.device | str) -> ChannelMask:
        """Return the mask on another device."""
        return replace(self, pruned=self.pruned.to(device))

    @staticmethod
    def stack(masks: Sequence[ChannelMask], fingerprint: Mapping[str, str | int] | None = None) -> ChannelMask:
        """Stack the masks of layers, equal in shape, along a new first dimension."""
        shapes = {tuple(m.pruned.shape) for m in masks}
        if len(shapes) != 1:
            raise MaskError(f"cannot stack masks of shapes {sorted(shapes)}: give at least one, all of one shape.")
        counts = {m.pruned_per_head for m in masks}
        per_head = counts.pop() if len(counts) == 1 else None
        return ChannelMask(torch.stack([m.pruned for m in masks]), fingerprint or masks[0].fingerprint, per_head)

    def require_fit(self, fingerprint: Mapping[str, str | int]) -> None:
        """Raise a MaskError that names the difference if the mask was made for a model other than `fingerprint`."""
        other = {key: (self.fingerprint[key], fingerprint[key]) for key in self.fingerprint.keys() & fingerprint.keys()}
        differ = [f"{key}: mask {a!r}, model {b!r}" for key, (a, b) in sorted(other.items()) if a != b]
        if differ:
            raise MaskError(f"the mask was made for another model ({'; '.join(differ)}): make one for this model.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: the bool tensor ``pruned``, and metadata.

        The metadata are ``format``, ``version``, ``about`` (JSON with the ``fingerprint``) and a ``digest`` of the
        whole content. The file is written atomically: a crash never leaves half of it.

        Raises
        ------
        MaskError
            If the file cannot be written there.
        """
        FILE_FORMAT.write(path, {"pruned": self.pruned}, {"fingerprint": dict(self.fingerprint)})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ChannelMask:
        """Read a file that `save` wrote.

        Raises
        ------
        MaskError
            If the file is missing, truncated, corrupt, changed, not a channel mask, or of a later format version.
        """
        about, tensors = FILE_FORMAT.read(path)
        fingerprint = about.get("fingerprint")
        if set(tensors) != {"pruned"} or set(about) != {"fingerprint"} or not is_fingerprint(fingerprint):
            raise MaskError(
                f"{path} holds {sorted(tensors)} and {sorted(about)}: a channel mask has a tensor 'pruned' and a "
                "fingerprint of names with texts or integers, and nothing else. Save the mask again."
            )
        pruned = tensors["pruned"]
        if pruned.dtype != torch.bool or pruned.ndim < 2 or not pruned.numel():
            raise MaskError(
                f"{path} holds {pruned.dtype} {tuple(pruned.shape)}: a mask is a bool tensor (..., KV heads, head_dim) "
                "and not empty. Save it again."
            )
        return ChannelMask(pruned, fingerprint)


def is_fingerprint(value: Any) -> TypeGuard[Mapping[str, str | int]]:
    """Return whether a value from a file or a user is a valid `ChannelMask.fingerprint`."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and type(entry) in (str, int) for name, entry in value.items()
    )


def _most(mask: Tensor) -> int:
    return int(mask.sum(-1).max())
