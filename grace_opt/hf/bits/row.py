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
from .block_budget import Spent, affordable_sizes
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
    prompt : tuple of int
        Number of the prompt's tokens in each class; empty before there are newer ones.
    block : int
        Number of tokens of a block of newer ones.
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
    prompt: tuple[int, ...] = ()
    block: int = 0

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
        order = self.order()
        places, blocks = order.argsort(-1)[..., None], self.blocks(order)
        own = (self.key_decode, self.value_decode)
        found = []
        for number, (codes, sinks) in enumerate(((self.keys, self.sink_keys), (self.values, self.sink_values))):
            coordinates, decode = codes.decode(blocks), own[number]
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

    def order(self) -> Tensor:
        """Return the token at each coded place, ``(H, T)``: by class, then as in the sequence."""
        planes = unpack_bits(self.classes, self.tokens)
        return (planes[0] | planes[1] << 1).argsort(dim=-1, stable=True)

    def blocks(self, order: Tensor) -> list[Tensor]:
        """Return the block of each newer token, class by class, counted from 1; it is the same in every head.

        Parameters
        ----------
        order : Tensor
            What `order` returned.
        """
        if not self.prompt:
            return []
        parts = torch.split(order[0], list(self.keys.counts))
        newer = (part[count:] for part, count in zip(parts, self.prompt, strict=True))
        return [(part - sum(self.prompt)).div(self.block, rounding_mode="floor") + 1 for part in newer]

    def appended(self, keys: Tensor, values: Tensor, scores: Tensor, bases: tuple[Basis, Basis] | None) -> CodedRow:
        """Append a block of newer tokens; within it, the attention that each received decides the class.

        A row without codes keeps them dense.

        Parameters
        ----------
        keys, values : Tensor
            ``(H, n, d)`` and ``(H, n, d_v)``, n the same for every block.
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
        grown = replace(grown, prompt=self.prompt or self.keys.counts, block=more)
        spent = [Spent.of(codes, grown.prompt, decode) for codes, decode in self._parts()]
        corrected = spent[0].corrections("keys", more), spent[1].corrections("values", more)
        sizes = affordable_sizes(self.keys.counts, more, tuple(zip(spent, corrected, strict=True)))
        classes = class_of_tokens(scores, sizes)
        order = classes.argsort(dim=-1, stable=True)[..., None]
        coded = []
        for number, tensor in enumerate((keys, values)):
            codes, decode = self._parts()[number]
            basis = None if bases is None else bases[number]
            encode = None if basis is None else basis.encode
            if decode is not None:
                encode = inverse(decode)
            moved = tensor.float() if encode is None else tensor.float() @ encode
            energy = _energy(codes, basis, decode)
            moved = moved.gather(1, order.expand(-1, -1, moved.shape[-1]))
            coded.append(codes.appended(moved, sizes, energy, corrected[number]))
        bits = torch.stack([classes & 1, classes >> 1])
        return replace(grown, keys=coded[0], values=coded[1], classes=append_bits(self.classes, self.tokens, bits))

    def _parts(self) -> tuple[tuple[Codes, Tensor | None], tuple[Codes, Tensor | None]]:
        return (self.keys, self.key_decode), (self.values, self.value_decode)

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
        return CodedRow.of(changed, self.keys.counts, self.length, self.prompt, self.block)

    @classmethod
    def of(
        cls,
        tensors: dict[str, Tensor],
        counts: Sequence[int],
        length: int,
        prompt: Sequence[int] = (),
        block: int = 0,
    ) -> CodedRow:
        """Put together what `tensors` took apart."""
        plain = {name: tensor for name, tensor in tensors.items() if "." not in name}
        codes = {
            name: Codes.of(
                {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}, counts
            )
            for name in ("keys", "values")
        }
        return cls(**codes, **plain, length=length, prompt=tuple(prompt), block=block)  # type: ignore[arg-type]


def _energy(codes: Codes, basis: Basis | None, decode: Tensor | None) -> Tensor:
    """Return what errors in each coordinate cost, ``(H, d)``: without a calibrated basis, all directions alike."""
    if decode is not None:
        return decode.float().square().sum(-1)
    return torch.ones_like(codes.means, dtype=torch.float32) if basis is None else basis.energy.float()


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


def inverse(decode: Tensor) -> Tensor:
    """Return the matrices that encode for stored ones that decode, ``(H, d, d)`` float32."""
    encode: Tensor = torch.linalg.inv(decode.double())
    return encode.float()


def packed_classes(classes: Tensor) -> Tensor:
    """Return the bits of classes ``(H, n)``, packed."""
    return pack_bits(torch.stack([classes & 1, classes >> 1]))
