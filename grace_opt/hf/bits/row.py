"""`CodedRow`: the coded keys and values of one sequence in one layer.

Rows of a batch are coded one by one, each as it would be alone: they share no means, no scales and no class sizes, and
padding is not stored. Sink tokens are dense.

Source: classes of tokens as contiguous segments; StreamingLLM (arXiv 2309.17453) for sink tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .basis import Basis
from .bitplanes import append_bits, pack_bits, unpack_bits
from .classes import class_sizes
from .codes import Codes

_LARGEST = float(torch.finfo(torch.float16).max)
#: Bits of a token's class.
CLASS_BITS = 2


@dataclass(frozen=True)
class CodedRow:
    """One sequence's older tokens, coded.

    Attributes
    ----------
    keys, values : Codes
        Of the tokens that are neither padding nor sinks, in the order of their classes.
    classes : Tensor
        ``(2, H, ⌈T/8⌉)`` uint8: the bits of each token's class, in the order of the sequence.
    sink_keys, sink_values : Tensor
        ``(H, s, d)`` and ``(H, s, d_v)``: the first tokens, dense.
    length : int
        Number of places, padding included.
    present : Tensor or None
        ``(⌈length/8⌉,)`` uint8: one bit per place, 0 at padding. None if there is no padding.
    key_decode, value_decode : Tensor or None
        ``(H, d, d)`` float16: the prompt's own basis, if it has one.
    """

    keys: Codes
    values: Codes
    classes: Tensor
    sink_keys: Tensor
    sink_values: Tensor
    length: int
    present: Tensor | None = None
    key_decode: Tensor | None = None
    value_decode: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Number of coded tokens."""
        return sum(self.keys.counts)

    def dense(self, bases: tuple[Basis, Basis] | None) -> tuple[Tensor, Tensor]:
        """Return keys ``(H, length, d)`` and values ``(H, length, d_v)`` in the order of the sequence; 0 at padding.

        Parameters
        ----------
        bases : (Basis, Basis) or None
            Those of keys and values; not read if the row has its own.
        """
        places = self._order().argsort(-1)[..., None]
        own = (self.key_decode, self.value_decode)
        found = []
        for number, (codes, sinks) in enumerate(((self.keys, self.sink_keys), (self.values, self.sink_values))):
            coordinates, decode = codes.decode(), own[number]
            coordinates = coordinates.gather(1, places.expand(-1, -1, coordinates.shape[-1]))
            if decode is None and bases is not None:
                decode = bases[number].decode
            tokens = coordinates if decode is None else coordinates @ decode.float()
            if sinks.dtype == torch.float16:  # an error must not take the largest numbers beyond it
                tokens = tokens.clamp(-_LARGEST, _LARGEST)
            together = torch.cat([sinks, tokens.to(sinks.dtype)], dim=1)
            if not together.shape[1]:  # nothing but padding
                together = sinks.new_zeros(len(sinks), self.length, sinks.shape[-1])
            elif self.present is not None:
                present = unpack_bits(self.present, self.length).bool()
                place = (present.cumsum(0) - 1).clamp(min=0)
                together = torch.where(present[:, None], together[:, place], 0)
            found.append(together)
        return found[0], found[1]

    def _order(self) -> Tensor:
        """Return the token at each coded place, ``(H, T)``: by class, then as in the sequence."""
        planes = unpack_bits(self.classes, self.tokens)
        return (planes[0] | planes[1] << 1).argsort(dim=-1, stable=True)

    def appended(self, keys: Tensor, values: Tensor, scores: Tensor, bases: tuple[Basis, Basis] | None) -> CodedRow:
        """Append newer tokens; within them, the attention that each received decides the class.

        A row without codes keeps them dense.

        Parameters
        ----------
        keys, values : Tensor
            ``(H, n, d)`` and ``(H, n, d_v)``.
        scores : Tensor
            ``(H, n)``.
        bases : (Basis, Basis) or None
            As in `dense`.
        """
        more, present = keys.shape[1], self.present
        if present is not None:
            present = append_bits(present, self.length, torch.ones(more, dtype=torch.uint8, device=present.device))
        grown = replace(self, length=self.length + more, present=present)
        if not self.keys.counts:  # too short a prompt: no widths were chosen, and all tokens are kept as sinks are
            sink_keys, sink_values = torch.cat([self.sink_keys, keys], 1), torch.cat([self.sink_values, values], 1)
            return replace(grown, sink_keys=sink_keys, sink_values=sink_values)
        sizes = grown_sizes(self.keys.counts, more)
        classes = class_of_tokens(scores, sizes)
        order = classes.argsort(dim=-1, stable=True)[..., None]
        coded = []
        for number, (codes, tensor) in enumerate(((self.keys, keys), (self.values, values))):
            decode = (self.key_decode, self.value_decode)[number]
            encode = None if bases is None else bases[number].encode
            if decode is not None:
                encode = inverse(decode)
            moved = tensor.float() if encode is None else tensor.float() @ encode
            coded.append(codes.appended(moved.gather(1, order.expand(-1, -1, moved.shape[-1])), sizes))
        bits = torch.stack([classes & 1, classes >> 1])
        return replace(grown, keys=coded[0], values=coded[1], classes=append_bits(self.classes, self.tokens, bits))

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that is stored, by name."""
        own = ("classes", "sink_keys", "sink_values", "present", "key_decode", "value_decode")
        named = {name: getattr(self, name) for name in own if getattr(self, name) is not None}
        for name, codes in (("keys", self.keys), ("values", self.values)):
            named |= {f"{name}.{part}": tensor for part, tensor in codes.tensors().items()}
        return named

    def map(self, change: Callable[[Tensor], Tensor]) -> CodedRow:
        """Apply a function to every tensor."""
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return CodedRow.of(changed, self.keys.counts, self.length)

    @classmethod
    def of(cls, tensors: dict[str, Tensor], counts: Sequence[int], length: int) -> CodedRow:
        """Put together what `tensors` took apart."""
        plain = {name: tensor for name, tensor in tensors.items() if "." not in name}
        codes = {
            name: Codes.of(
                {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}, counts
            )
            for name in ("keys", "values")
        }
        return cls(**codes, **plain, length=length)  # type: ignore[arg-type]


def class_of_tokens(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the class of each token ``(H, n)`` uint8: the first `sizes` places go to the highest scores.

    Among equal scores, the earlier token comes first.
    """
    ranked = torch.repeat_interleave(
        torch.arange(len(sizes), dtype=torch.uint8, device=scores.device),
        torch.tensor(sizes, device=scores.device),
        output_size=scores.shape[-1],
    )
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order, dtype=torch.uint8).scatter_(-1, order, ranked.expand(order.shape))


def grown_sizes(have: Sequence[int], more: int) -> tuple[int, ...]:
    """Return how many of `more` tokens each class takes, so that the classes keep their shares.

    Examples
    --------
    >>> grown_sizes((200,), 64)
    (64,)
    """
    sizes, left = [], more
    for old, new in zip(have[:-1], class_sizes(sum(have) + more, len(have)), strict=False):
        sizes.append(min(max(new - old, 0), left))
        left -= sizes[-1]
    return (*sizes, left)


def inverse(decode: Tensor) -> Tensor:
    """Return the matrices that encode for stored ones that decode, ``(H, d, d)`` float32."""
    encode: Tensor = torch.linalg.inv(decode.double())
    return encode.float()


def packed_classes(classes: Tensor) -> Tensor:
    """Return the bits of classes ``(H, n)``, packed."""
    return pack_bits(torch.stack([classes & 1, classes >> 1]))
