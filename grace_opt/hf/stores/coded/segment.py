"""`Segment`: consecutive tokens of a sequence that were coded together, in classes of their own.

A prompt is one segment; so are tokens after it that `grace_opt.hf.stores.coded.waiting` codes together. Each has means,
widths and scales of its own: rotary embeddings turn the means of keys with the position, and what a text attends to
changes.

Source: classes of tokens as contiguous parts of the codes, which attention does not mind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...._util.arrays import to_device
from ...bases.classes import CLASS_BITS
from .bitplanes import PER_BYTE, pack_bits, unpack_bits
from .codes import Codes, fixed_bits


@dataclass(frozen=True)
class Segment:
    """Coded tokens.

    Attributes
    ----------
    keys, values : Codes
        In the order of their classes.
    classes : Tensor
        ``(2, H, ⌈T/8⌉)`` uint8: the bits of each token's class, in the order of the sequence.
    weights : Tensor or None
        ``(2, H, C)`` float32: how much an error in a key, and in a value, of each class counts; kept where tokens may
        be coded again. None: all alike.
    hidden : int
        How many of the newest are no tokens of the sequence any more: it was cropped. Their codes go with the last of
        the others, as a class has its tokens side by side.
    """

    keys: Codes
    values: Codes
    classes: Tensor
    weights: Tensor | None = None
    hidden: int = 0

    @classmethod
    def of_block(cls, keys: Codes, values: Codes) -> Segment:
        """Return a segment of one class."""
        tokens = sum(keys.counts)
        classes = keys.levels.new_zeros(CLASS_BITS, len(keys.means), -(-tokens // PER_BYTE))
        return cls(keys, values, classes)

    @property
    def coded(self) -> int:
        """Number of tokens that have codes."""
        return sum(self.keys.counts)

    @property
    def tokens(self) -> int:
        """Number of tokens of the sequence."""
        return self.coded - self.hidden

    def cropped(self, tokens: int) -> Segment:
        """Return its first tokens, at least one."""
        return replace(self, hidden=self.coded - tokens)

    def order(self) -> Tensor:
        """Return the token at each coded place, ``(H, T)``: by class, then as in the sequence; hidden ones as well."""
        return self.token_classes().argsort(dim=-1, stable=True)

    def token_classes(self) -> Tensor:
        """Return the class of each token that has codes, ``(H, T)`` int64, in the order of the sequence."""
        planes = unpack_bits(self.classes, self.coded)
        return (planes[0] | planes[1] << 1).long()

    def coordinates(self) -> tuple[Tensor, Tensor]:
        """Return the coordinates of keys and values, ``(H, T, d)`` float32 each, in the order of the sequence."""
        keys, values = self._in_sequence(self.keys.decode(), self.values.decode())
        return keys, values

    def _in_sequence(self, *coded: Tensor) -> list[Tensor]:
        places = self.order().argsort(-1)[:, : self.tokens, None]
        return [each.gather(1, places.expand(-1, -1, each.shape[-1])) for each in coded]

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that is stored, by name."""
        named = {
            f"{kind}.{name}": t for kind in ("keys", "values") for name, t in getattr(self, kind).tensors().items()
        }
        found = {"classes": self.classes, **named}
        return found if self.weights is None else {**found, "weights": self.weights}

    def weight(self, kind: int) -> Tensor:
        """Return how much an error in keys (0) or values (1) of each class counts, ``(H, C)``."""
        if self.weights is not None:
            return self.weights[kind]
        codes = self.keys
        return codes.means.new_ones((len(codes.means), len(codes.counts)), dtype=torch.float32)

    def map(self, change: Callable[[Tensor], Tensor]) -> Segment:
        """Apply a function to every tensor."""
        weights = None if self.weights is None else change(self.weights)
        keys, values = self.keys.map(change), self.values.map(change)
        return replace(self, keys=keys, values=values, classes=change(self.classes), weights=weights)


def class_of_tokens(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the class of each token ``(H, n)`` uint8: the first `sizes` places go to the highest scores.

    Among equal scores, the earlier token comes first.
    """
    here = torch.device("cpu")
    numbers = torch.arange(len(sizes), dtype=torch.uint8, device=here)
    ranked = to_device(
        torch.repeat_interleave(numbers, torch.tensor(sizes, dtype=torch.int64, device=here)), scores.device
    )
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order, dtype=torch.uint8).scatter_(-1, order, ranked.expand(order.shape))


def class_weights(weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the mean weight of each class's keys and values, ``(2, H, C)``, of weights ``(H, n)`` in their order."""
    parts = [
        torch.stack([part.mean(-1) for part in torch.split(each.float(), list(sizes), -1)], -1) for each in weights
    ]
    return torch.stack(parts)


def packed_classes(classes: Tensor) -> Tensor:
    """Return the bits of classes ``(H, n)``, packed."""
    return pack_bits(torch.stack([classes & 1, classes >> 1]))


def segment_bits(tokens: int, classes: int, width: int) -> float:
    """Return the bits per head that a segment's keys, or values, take whatever their widths are.

    The same for every head, so that ranks, which see only their own heads, choose what one process does.
    """
    ids = CLASS_BITS * PER_BYTE * -(-tokens // PER_BYTE) / 2
    return fixed_bits(1, classes, width) + ids
