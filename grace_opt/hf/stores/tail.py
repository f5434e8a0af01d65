"""`Tail`: a layer's newest tokens, dense, which grow in chunks, whatever holds the older ones.

Its tensors own exactly their bytes and some spare room. Slices are copied, because a view keeps the whole original
alive and would make the memory report wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Number of tokens for which space is allocated at once.
TAIL_GROWTH = 64


class Tail:
    """Dense keys and values of the newest tokens, in buffers with spare room.

    Parameters
    ----------
    keys, values : Tensor
        ``(B, H, S, d)`` and ``(B, H, S, d_v)``; the tail owns them from then on.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values, self.length = keys, values, keys.shape[-2]

    @property
    def keys(self) -> Tensor:
        """``(B, H, length, d)``, a view."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """``(B, H, length, d_v)``, a view."""
        return self._values[:, :, : self.length]

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """The tensors kept alive, spare room included."""
        return self._keys, self._values

    def append(self, keys: Tensor, values: Tensor, growth: int = TAIL_GROWTH) -> None:
        """Add tokens to the spare room, or allocate room for `growth` more."""
        new = self.length + keys.shape[-2]
        # Under autograd, writing in place would break the graph of the previous step.
        follows = torch.is_grad_enabled() and (keys.requires_grad or self._keys.requires_grad)
        if follows or self.length == 0:
            self._keys = torch.cat([self.keys, keys], dim=-2)
            self._values = torch.cat([self.values, values], dim=-2)
        else:
            if new > self._keys.shape[-2] or self._frozen():
                self._keys, self._values = (_with_room(t, self.length, new + growth) for t in self.buffers)
            self._keys[:, :, self.length : new] = keys
            self._values[:, :, self.length : new] = values
        self.length = new

    def _frozen(self) -> bool:
        """Whether the buffers were made in inference mode, outside which they cannot be written to."""
        return not torch.compiler.is_compiling() and self._keys.is_inference() and not torch.is_inference_mode_enabled()

    def remembered(self) -> Callable[[], None]:
        """Return what takes back all tokens that are added from now on, and the room that was allocated for them."""
        keys, values, length = self._keys, self._values, self.length

        def forget() -> None:
            self._keys, self._values, self.length = keys, values, length

        return forget

    def cut(self, start: int, stop: int) -> Tail:
        """Return a copy of the tokens from ``start`` to ``stop``, without spare room."""
        return Tail(own(self.keys[:, :, start:stop]), own(self.values[:, :, start:stop]))

    def beyond(self, start: int) -> Tail:
        """Return the tokens from ``start`` on: their keys copied, their values as a view (see `Compressed.owned`)."""
        values = self.values[:, :, start:]
        return Tail(own(self.keys[:, :, start:]), values if values.numel() else own(values))

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to both buffers; it must not change the second-last dimension."""
        self._keys, self._values = change(self._keys), change(self._values)


def own(view: Tensor) -> Tensor:
    """Copy a view, so that the original can be freed."""
    return view.clone(memory_format=torch.contiguous_format)


def _with_room(tensor: Tensor, used: int, room: int) -> Tensor:
    larger = tensor.new_empty(*tensor.shape[:2], room, tensor.shape[-1])
    larger[:, :, :used] = tensor[:, :, :used]
    return larger
