r"""`QuantizedTokens`: keys or values in a few bits per number.

A group of neighbouring numbers shares a scale and a zero point, and each number becomes the nearest of :math:`2^b`
levels between the group's smallest and largest: no number moves by more than half a step,
:math:`(\max - \min) / (2^b - 1) / 2`, apart from the rounding of the number type itself. Keys are grouped along tokens,
because some of their channels are large in every token; values along channels.

When: for tokens that have left the dense window. Quantisation is lossy. The decoding kernels read the bits in place;
any other read has the cost of :meth:`QuantizedTokens.dequantize`.

Rounding and packing come from optimum-quanto or hqq, which transformers' own quantised caches use too; see
docs/adr/0005-quantised-storage.md. Install both with ``pip install ".[quant]"``; they are imported on first
use.

Source: KIVI (arXiv 2402.02750) for the two groupings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....errors import CacheError, OptionError
from ....kernels.cache.decode.packed import PackedKeys, PackedValues
from ...settings.quantization import Quantize
from .packing import BLOCK_TENSORS, BlockFormat, TokenBlock, dtype_name

_FORMAT = 1
#: Approximate maximum number of tokens that are quantised at once.
MAX_BLOCK_TOKENS = 512


def quantize(
    settings: Quantize, keys: Tensor, values: Tensor
) -> tuple[Tensor | QuantizedTokens, Tensor | QuantizedTokens]:
    """Quantise keys ``(B, H, S, d')`` along tokens and values along channels; None leaves them unchanged."""
    size, backend = settings.group_size, settings.backend
    return (
        keys if settings.keys is None else QuantizedTokens.quantize(keys, settings.keys, "tokens", size, backend),
        values
        if settings.values is None
        else QuantizedTokens.quantize(values, settings.values, "channels", size, backend),
    )


class QuantizedTokens:
    """A tensor ``(B, H, S, C)`` of keys or values, stored with a few bits per number.

    Each sequence of the batch is stored separately, in one block per call that added tokens. Adding tokens never
    changes stored ones, and selecting or repeating sequences loses nothing; repeated sequences share their storage. No
    method changes the object: each returns a new one that shares the unchanged parts.

    Made by `quantize` or `from_tensors`.
    """

    def __init__(self, form: BlockFormat, rows: list[list[TokenBlock]]) -> None:
        self._form, self._rows = form, rows

    @classmethod
    def quantize(
        cls, tensor: Tensor, bits: int, grouping: str = "tokens", group_size: int = 32, backend: str = "quanto"
    ) -> QuantizedTokens:
        """Quantise a tensor.

        Parameters
        ----------
        tensor : Tensor
            ``(B, H, S, C)``, not empty: float16, bfloat16, float32 or float64 (quantised in float32). A number that is
            not finite makes its whole group unusable.
        bits : int
            Bits per number.
        grouping : str
            ``"tokens"``: a scale and a zero point for each channel and ``group_size`` consecutive tokens; ``S`` must be
            a multiple of it. ``"channels"``: for each token and ``group_size`` consecutive channels; if ``C`` is not a
            multiple of it, all channels of a token are one group.
        group_size : int
            Length of a group.
        backend : str
            ``"quanto"`` or ``"hqq"``.

        Raises
        ------
        OptionError
            If an option or the tensor does not suit, or the library is not installed.
        """
        if tensor.dim() != 4 or not tensor.numel():
            raise OptionError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be quantised; give (batch, heads, tokens, "
                f"channels), none of them zero"
            )
        form = BlockFormat(tensor.shape[1], tensor.shape[3], tensor.dtype, bits, grouping, group_size, backend)
        # In blocks, because the libraries compute in float32 and need several times the memory of their input.
        step = max(MAX_BLOCK_TOKENS // form.group_size, 1) * form.group_size
        return cls(form, [[form.encode(part) for part in row.split(step, dim=1)] for row in tensor.detach()])

    def append(self, tensor: Tensor) -> QuantizedTokens:
        """Return the stored tokens, unchanged, followed by these.

        Parameters
        ----------
        tensor : Tensor
            ``(B, H, S', C)``; see `quantize`.

        Raises
        ------
        CacheError
            If the tensor's shape, type or device differs from what is stored.
        """
        batch, heads, _, channels = self.shape
        expected = (batch, heads, channels, dtype_name(self.dtype), str(self.device))
        found = (*tensor.shape[:2], *tensor.shape[3:], dtype_name(tensor.dtype), str(tensor.device))
        if expected != found:
            raise CacheError(
                f"(batch, heads, channels, dtype, device) of the stored tokens are {expected}, those of the new "
                f"tokens {found}; they must be the same"
            )
        form = self._form
        more = QuantizedTokens.quantize(tensor, form.bits, form.grouping, form.group_size, form.backend)
        return QuantizedTokens(form, [row + new for row, new in zip(self._rows, more._rows, strict=True)])

    def dequantize(self) -> Tensor:
        """``(B, H, S, C)`` in the type that was quantised; a new tensor."""
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        done: dict[int, Tensor] = {}
        for target, row in zip(result, self._rows, strict=True):
            start = 0
            for block in row:
                part = target[:, start : start + block.tokens]
                part.copy_(done[id(block)] if id(block) in done else self._form.decode(block))
                done[id(block)] = part
                start += block.tokens
        return result

    @cached_property
    def packed(self) -> PackedKeys | PackedValues | None:
        """Return where everything lies, for a kernel; None if no kernel reads this packing."""
        form, parameters = self._form, {block.scale.dtype for block in self._blocks().values()}
        lengths = {tuple(block.tokens for block in row) for row in self._rows}
        if len(parameters) > 1 or len(lengths) > 1:
            return None
        unit = form.group_size if form.grouping == "tokens" else 1
        units = torch.tensor(lengths.pop(), dtype=torch.int64, device="cpu") // unit
        table = torch.tensor([form.table(row) for row in self._rows], dtype=torch.int64, device="cpu")
        owners = torch.arange(len(units), dtype=torch.int32, device="cpu").repeat_interleave(units)
        return (PackedKeys if form.grouping == "tokens" else PackedValues)(
            self.shape,
            self.dtype,
            parameters.pop(),
            form.width,
            form.bits,
            high_first=form.backend == "hqq",
            zero_in_levels=form.backend == "hqq",
            table=table.to(self.device, non_blocking=True),
            owners=owners.to(self.device, non_blocking=True),
            tensors=tuple(self.tensors().values()),
        )

    def places(self) -> tuple[Tensor, ...]:
        """Return what `packed` holds beyond the stored tensors, once it has been called: a few bytes per token."""
        packed = vars(self).get("packed")
        return () if packed is None else (packed.table, packed.owners)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `packed`: in a copy, its addresses would still be those of the original."""
        return {name: value for name, value in vars(self).items() if name != "packed"}

    # -------------------------------------------------------------- sizes

    @property
    def shape(self) -> torch.Size:
        """``(B, H, S, C)``."""
        tokens = sum(block.tokens for block in self._rows[0])
        return torch.Size((len(self._rows), self._form.heads, tokens, self._form.channels))

    @property
    def dtype(self) -> torch.dtype:
        """What `dequantize` returns."""
        return self._form.dtype

    @property
    def device(self) -> torch.device:
        """The device of the stored tensors."""
        return self._rows[0][0].packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors, scales and zero points included; shared storage counts once."""
        kept = (*self.tensors().values(), *self.places())
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)

    # -------------------------------------- selecting, moving, saving

    def select(self, indices: Tensor | Sequence[int]) -> QuantizedTokens:
        """Select sequences in this order, repeated if listed repeatedly; shares the stored tensors.

        Parameters
        ----------
        indices : Tensor or sequence of int
            Positions in the batch, or a bool tensor that marks them.
        """
        if isinstance(indices, Tensor):
            chosen = (indices.nonzero().flatten() if indices.dtype == torch.bool else indices).tolist()
        else:
            chosen = list(indices)
        size = len(self._rows)
        if not chosen or not all(-size <= index < size for index in chosen):
            raise OptionError(f"cannot select sequences {chosen} of a batch of {size}; write at least one that exists")
        return QuantizedTokens(self._form, [list(self._rows[index]) for index in chosen])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> QuantizedTokens:
        """Move to another device; shared storage stays shared."""
        moved = {
            key: TokenBlock(block.tokens, *(t.to(device, non_blocking=non_blocking) for t in block.tensors()))
            for key, block in self._blocks().items()
        }
        return QuantizedTokens(self._form, [[moved[id(block)] for block in row] for row in self._rows])

    def tensors(self) -> dict[str, Tensor]:
        """Return all stored tensors by name, each once; together with `meta`, all that `from_tensors` needs."""
        return {
            f"{number}.{name}": tensor
            for number, block in enumerate(self._blocks().values())
            for name, tensor in zip(BLOCK_TENSORS, block.tensors(), strict=True)
        }

    def meta(self) -> dict[str, Any]:
        """Describe the tensors as plain values for JSON."""
        numbers = {key: number for number, key in enumerate(self._blocks())}
        return {
            "format": _FORMAT,
            **asdict(self._form),
            "dtype": dtype_name(self.dtype),
            "tokens": [block.tokens for block in self._blocks().values()],
            "rows": [[numbers[id(block)] for block in row] for row in self._rows],
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantizedTokens:
        """Rebuild from `tensors` and `meta`, bit for bit; the tensors are copied.

        Raises
        ------
        CacheError
            If they do not fit together or were written by another version.
        """
        try:
            if meta["format"] != _FORMAT:
                raise CacheError(f"quantised tokens have format {meta['format']}; this grace_opt reads only {_FORMAT}")
            values = {f.name: meta[f.name] for f in fields(BlockFormat)}
            form = BlockFormat(**{**values, "dtype": getattr(torch, values["dtype"])})
            counts = [form.heads, form.channels, *meta["tokens"]]
            if any(type(count) is not int or count < 1 for count in counts):
                raise CacheError(
                    f"the token counts of quantised tokens are {counts}; they must be integers of at least 1"
                )
            if any(type(number) is not int or number < 0 for row in meta["rows"] for number in row):
                raise CacheError("the sequences of quantised tokens must be lists of blocks, numbered from 0")
            blocks = []
            for number, tokens in enumerate(meta["tokens"]):
                # In order, as kernels read by address.
                own = {"memory_format": torch.contiguous_format}
                parts = [tensors[f"{number}.{name}"].clone(**own) for name in BLOCK_TENSORS]
                found, expected = [tuple(part.shape) for part in parts], form.stored_shapes(tokens)
                if found != expected:
                    raise CacheError(f"block {number} of quantised tokens has shapes {found} instead of {expected}")
                if not form.can_store(tuple(part.dtype for part in parts)):
                    raise CacheError(f"block {number} of quantised tokens has types {[p.dtype for p in parts]}")
                blocks.append(TokenBlock(tokens, *parts))
            rows = [[blocks[number] for number in row] for row in meta["rows"]]
        except (KeyError, IndexError, TypeError, AttributeError, OptionError) as error:
            raise CacheError(f"these are not the tensors and meta of quantised tokens: {error}") from error
        if not rows or not all(rows) or len({sum(block.tokens for block in row) for row in rows}) != 1:
            raise CacheError("the sequences of these quantised tokens differ in length, or there are none")
        return cls(form, rows)

    def _blocks(self) -> dict[int, TokenBlock]:
        return {id(block): block for row in self._rows for block in row}

    def __repr__(self) -> str:
        form = self._form
        kind = f"{form.bits} bits, groups of {form.width} {form.grouping}, {form.backend}"
        return f"QuantizedTokens({tuple(self.shape)}, {dtype_name(self.dtype)}, {kind}, {self.nbytes:,} bytes)"


#: A tensor (B, H, S, C), plain or quantised.
StoredTensor = Tensor | QuantizedTokens


def dequantized(part: StoredTensor) -> Tensor:
    """Return the stored numbers, dequantised if necessary."""
    return part.dequantize() if isinstance(part, QuantizedTokens) else part
