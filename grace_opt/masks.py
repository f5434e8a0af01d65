"""`ChannelMask`: which key channels are pruned, per KV head, for one layer or a whole model; saved as safetensors.

Use it to carry a selection from where it was made to where it is applied. Source: ours; format documented at
`ChannelMask.save`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import MaskError
from .files import aside
from .objective import indices_from_mask

FORMAT, VERSION = "grace_opt.channel_mask", "1"


@dataclass(frozen=True, eq=False)
class ChannelMask:
    """Pruned and kept key channels of every KV head.

    Attributes
    ----------
    pruned : Tensor (..., H_kv, d), bool
        True = this channel of this head is pruned. Leading dimensions are layers and/or batch.
    fingerprint : mapping
        What the mask was made for (model type, layers, KV heads, head_dim, …); empty if unknown.
    pruned_per_head : int or None
        So many in every head, if whoever made the mask knows: indices are then made without waiting for the device.

    Raises
    ------
    MaskError
        If `pruned` is not a bool tensor of at least two dimensions.

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
        k = self.pruned_per_head
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= self.pruned.shape[-1]):
            raise MaskError(f"pruned_per_head={k!r}: give how many channels are pruned in every head, or None.")

    @property
    def head_dim(self) -> int:
        """Channels per head, d."""
        return self.pruned.shape[-1]

    @property
    def kv_heads(self) -> int:
        """KV heads per layer."""
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
        """The same mask with ``pruned_per_head`` found out, if that is one number; waits for the device."""
        counts = set(self.pruned.sum(-1).flatten().tolist())
        return replace(self, pruned_per_head=counts.pop() if len(counts) == 1 else None)

    def layer(self, i: int) -> ChannelMask:
        """Entry `i` of the first leading dimension."""
        if self.pruned.ndim < 3:
            raise MaskError(f"this mask of shape {tuple(self.pruned.shape)} has no layer dimension.")
        return replace(self, pruned=self.pruned[i])

    def to(self, device: torch.device | str) -> ChannelMask:
        """The same mask on another device."""
        return replace(self, pruned=self.pruned.to(device))

    @staticmethod
    def stack(masks: Sequence[ChannelMask], fingerprint: Mapping[str, str | int] | None = None) -> ChannelMask:
        """Stack layers' masks along a new first dimension; they must agree in shape."""
        shapes = {tuple(m.pruned.shape) for m in masks}
        if len(shapes) != 1:
            raise MaskError(f"cannot stack masks of shapes {sorted(shapes)}: give at least one, all of one shape.")
        counts = {m.pruned_per_head for m in masks}
        per_head = counts.pop() if len(counts) == 1 else None
        return ChannelMask(torch.stack([m.pruned for m in masks]), fingerprint or masks[0].fingerprint, per_head)

    def require_fit(self, fingerprint: Mapping[str, str | int]) -> None:
        """Raise MaskError, naming the difference, if this mask was made for another model than `fingerprint`
        describes."""
        other = {key: (self.fingerprint[key], fingerprint[key]) for key in self.fingerprint.keys() & fingerprint.keys()}
        differ = [f"{key}: mask {a!r}, model {b!r}" for key, (a, b) in sorted(other.items()) if a != b]
        if differ:
            raise MaskError(f"the mask was made for another model ({'; '.join(differ)}): make one for this model.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: tensor ``pruned`` (bool) and metadata ``format``, ``version``, ``fingerprint``
        (JSON).

        The file is written aside and renamed, so a crash leaves no half of it.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise MaskError(f"cannot save to {path}: there is no folder {path.parent}.")
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": json.dumps(dict(self.fingerprint), sort_keys=True),
        }
        with aside(path) as name:
            save_file({"pruned": self.pruned.detach().cpu().contiguous()}, name, metadata)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ChannelMask:
        """Read a file that `save` wrote.

        Raises
        ------
        MaskError
            If the file is missing, truncated, corrupt, not a channel mask, or of a later format version.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata, names = file.metadata() or {}, set(file.keys())
                if metadata.get("format") != FORMAT or "pruned" not in names:
                    raise MaskError(f"{path} is a safetensors file, but not a channel mask of grace_opt.")
                if metadata.get("version") != VERSION:
                    raise MaskError(
                        f"{path} has format version {metadata.get('version')!r}; this grace_opt reads {VERSION!r}: "
                        "update grace_opt, or save the mask again."
                    )
                pruned = file.get_tensor("pruned")
            fingerprint = json.loads(metadata["fingerprint"])
        except FileNotFoundError:
            raise MaskError(f"no mask file at {path}.") from None
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            if isinstance(error, MaskError):
                raise
            raise MaskError(
                f"{path} cannot be read as a channel mask (truncated or not safetensors): {error}"
            ) from error
        if not isinstance(fingerprint, dict):
            raise MaskError(f"{path}: the fingerprint is not a JSON object.")
        return ChannelMask(pruned, fingerprint)


def _most(mask: Tensor) -> int:
    return int(mask.sum(-1).max())
