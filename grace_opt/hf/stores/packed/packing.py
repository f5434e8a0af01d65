"""Pack groups of numbers into a few bits, by optimum-quanto or hqq, as blocks of `QuantizedTokens`.

Only this module calls the two libraries. docs/adr/0005-quantised-storage.md says what is taken from which library, and
what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...._util.parameters import check_fields, integer
from ....errors import OptionError
from ....kernels.cache.decode.packed import element_of
from ...settings.backends import check_backend, check_bits, library

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

BLOCK_TENSORS = ("packed", "scale", "zero")


@dataclass(frozen=True, eq=False)
class TokenBlock:
    """Consecutive tokens of one sequence; each tensor owns exactly its own bytes."""

    tokens: int
    packed: Tensor
    scale: Tensor
    zero: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors in the order of `BLOCK_TENSORS`."""
        return self.packed, self.scale, self.zero


@dataclass(frozen=True)
class BlockFormat:
    """The format shared by all blocks: how ``(H, S, C)`` becomes rows of groups, and back."""

    heads: int
    channels: int
    dtype: torch.dtype
    bits: int
    grouping: str
    group_size: int
    backend: str

    def __post_init__(self) -> None:
        check_backend(self.backend)
        object.__setattr__(self, "bits", check_bits("bits", self.bits, self.backend))
        check_fields(self, integer, "group_size", at_least=1)
        if self.grouping not in ("tokens", "channels"):
            raise OptionError(f'grouping={self.grouping!r} is unknown; write "tokens" or "channels"')
        if self.dtype not in SUPPORTED_DTYPES:
            allowed = ", ".join(map(dtype_name, SUPPORTED_DTYPES))
            raise OptionError(f"{dtype_name(self.dtype)} numbers cannot be quantised; convert them to one of {allowed}")

    @property
    def width(self) -> int:
        """Numbers per group."""
        if self.grouping == "channels" and self.channels % self.group_size:
            return self.channels
        return self.group_size

    def encode(self, tensor: Tensor) -> TokenBlock:
        """Quantise ``(H, S, C)``."""
        tokens = tensor.shape[1]
        if self.grouping == "tokens":
            self._check_tokens(tokens)
            tensor = tensor.reshape(len(tensor), -1, self.group_size, self.channels).transpose(2, 3)
        groups = tensor.reshape(-1, self.width).float()
        # Both libraries pack several groups into a byte, so the last group is repeated to fill whole bytes. That costs
        # less than a byte per position of a group.
        extra = self._padded(len(groups)) - len(groups)
        groups = torch.cat([groups, groups[-1:].expand(extra, -1)])
        parameters = self.dtype if self.dtype.itemsize < 4 else torch.float32
        with torch.no_grad():
            return TokenBlock(tokens, *_CODECS[self.backend][0](groups, self.bits, parameters))

    def decode(self, block: TokenBlock) -> Tensor:
        """Restore ``(H, S, C)``."""
        with torch.no_grad():
            groups = _CODECS[self.backend][1](*block.tensors(), self.bits)
        groups = groups[: self._groups(block.tokens)]
        if self.grouping == "tokens":
            grouped = groups.view(self.heads, -1, self.channels, self.width)
            return grouped.transpose(2, 3).reshape(self.heads, block.tokens, self.channels)
        return groups.reshape(self.heads, block.tokens, self.channels)

    def table(self, blocks: Sequence[TokenBlock]) -> list[tuple[int, ...]]:
        """Return where the blocks of one sequence lie, as :mod:`grace_opt.kernels.cache.decode.packed` has it."""
        rows, start = [], 0
        for block in blocks:
            addresses = (tensor.data_ptr() for tensor in block.tensors())
            count = self._groups(block.tokens) // self.heads
            rows.append((*addresses, len(block.packed), count, -start))
            start += count
        return rows

    def stored_shapes(self, tokens: int) -> list[tuple[int, ...]]:
        """Return the shapes of a block's tensors, to check what is read from a file."""
        self._check_tokens(tokens)
        groups = self._padded(self._groups(tokens))
        return [(-(-groups // element_of(self.bits)[1]), self.width), (groups, 1), (groups, 1)]

    def can_store(self, types: tuple[torch.dtype, ...]) -> bool:
        """Return whether a block's tensors can have these types, to check what is read from a file."""
        packed, *parameters = types
        known = {torch.float32, self.dtype if self.dtype.itemsize < 4 else torch.float32}
        return packed == element_of(self.bits)[0] and set(parameters) <= known

    def _check_tokens(self, tokens: int) -> None:
        if self.grouping == "tokens" and tokens % self.group_size:
            raise OptionError(
                f"{tokens} tokens do not divide into groups of {self.group_size}; quantise a multiple of that, or "
                "write another group_size"
            )

    def _groups(self, tokens: int) -> int:
        return self.heads * tokens * self.channels // self.width

    def _padded(self, groups: int) -> int:
        step = 1 if self.bits == 3 else 8 // self.bits
        return -(-groups // step) * step


# ------------------------------------------------------ the libraries, on (groups, width) in float32


def _quanto_pack(groups: Tensor, bits: int, parameters: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    quanto = library("quanto")
    qtype = quanto.qtypes[f"qint{bits}"]
    scale, shift = (part.to(parameters) for part in quanto.MaxOptimizer()(groups, qtype, 0))
    scale = torch.where(scale == 0, 1, scale)  # all numbers of the group are the same
    # No group_size, as the rows are groups already: with 128, quanto would choose layouts for a matrix product.
    found = quanto.quantize_weight(groups, qtype, 0, scale.float(), shift.float(), optimized=False)
    return found._data._data, scale, shift


def _quanto_unpack(packed: Tensor, scale: Tensor, shift: Tensor, bits: int) -> Tensor:
    # The inverse of quanto's pack_weights. quanto's own operation compiles an extension on first use, which takes
    # minutes and fails without a compiler.
    levels = torch.cat([packed >> low & 2**bits - 1 for low in range(0, 8, bits)])
    return scale.float() * levels - shift.float()


def _hqq_pack(groups: Tensor, bits: int, parameters: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    packed, meta = library("hqq").Quantizer.quantize(
        groups, nbits=bits, group_size=groups.shape[1], axis=1, optimize=False, device=groups.device
    )
    scale, zero = meta["scale"], meta["zero"]
    # The zero point counts steps: a narrow group far from 0 can have one that float16 does not hold.
    if bool(zero.to(parameters).isfinite().all()):
        scale, zero = scale.to(parameters), zero.to(parameters)
    return packed, scale, zero


def _hqq_unpack(packed: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    quantizer = library("hqq").Quantizer
    width = packed.shape[1]
    meta = {
        "nbits": bits,
        "group_size": width,
        "shape": torch.Size((len(scale), width)),
        "scale": scale.float(),
        "zero": zero.float(),
        "axis": 1,
        "packing": quantizer.bit_to_packing[bits],
        "view_as_float": False,
        "compute_dtype": torch.float32,
    }
    result: Tensor = quantizer.dequantize(packed, meta)
    return result


_Pack = Callable[[Tensor, int, torch.dtype], tuple[Tensor, Tensor, Tensor]]
_Unpack = Callable[[Tensor, Tensor, Tensor, int], Tensor]
_CODECS: dict[str, tuple[_Pack, _Unpack]] = {
    "quanto": (_quanto_pack, _quanto_unpack),
    "hqq": (_hqq_pack, _hqq_unpack),
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the type's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
