"""`BlockCodec`: blocks of a model's keys and values as bytes of a known size, for caches of other programs.

Servers keep what they may need again in blocks of tokens that stand alone: no query comes with them, nobody says where
in its text a block was, and its size must be known before. `attach` knows all that, and has a half to a tenth of the KL
for the same bits; what is here is for what lies in another program's memory, on disks, or is sent.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .._util.parameters import integer, number, shown
from ..errors import CacheError, CalibrationError, OptionError
from ..hf.bases.calibrated import CalibratedBasis
from .block_layer import DENSE, BlockLayer, fixed_bytes

#: Blocks with fewer tokens stay as they are: means and scales would take most of the bits.
LEAST_TOKENS = 64
#: Most tokens of a block: places of tokens take 15 bits.
MOST_TOKENS = 2**15 - 1
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Numbers have at most 8 bits; what is stored beside them takes the rest.
MOST_BITS = 9.0
#: Largest number: squares of larger ones would leave float32.
LARGEST = 2.0**60
#: What every block begins with: a checksum of what follows, a name, the basis, the bits, tokens, the place of its type
#: in `_DTYPES`.
_HEADER = struct.Struct("<I4s8sdII")
_NAME = b"GOB1"
#: Bytes of the checksum.
_CHECK = 4


class BlockCodec:
    r"""Code blocks of a model's keys and values, each by itself, in a number of bytes that its shape decides.

    Parameters
    ----------
    basis : CalibratedBasis or path
        Of the model; ``grace-opt calibrate basis MODEL -o FILE`` makes the file.
    bits : float
        Mean bits per number of the layers that are coded, with all that is stored beside: more than 0, at most 9.
        Layers with a sliding window, which have no basis, stay as they are.

    Raises
    ------
    OptionError
        If `bits` is no such number.
    CalibrationError
        If the basis is older than blocks: calibrate it again.

    Notes
    -----
    A block has means, widths and scales of its own. Its tokens are in two classes by the attention that their keys let
    one expect (`grace_opt.hf.bases.expected`), and the two that would cost most stay dense in each layer. Codes are
    those of `attach(model, bits=...)`: a trellis, in coordinates and with shares from the calibration.

    O(n d (d + b)) per head for n tokens of d numbers with b bits. Safe to call from several threads.

    References
    ----------
    The codes: docs/theory/bits.md. What is lost and what blocks cost beside it: docs/adr/0029-blocks-for-servers.md.

    Examples
    --------
    >>> import torch
    >>> from grace_opt.hf import calibrate
    >>> from grace_opt.hf.models import load_pocket
    >>> from grace_opt.serving import BlockCodec
    >>> model, tokenizer = load_pocket()
    >>> codec = BlockCodec(calibrate.basis(model, tokenizer, ["the quiet river runs past a late singer " * 40]), bits=3)
    >>> block = torch.randn(2, 3, 256, 128)  # keys and values, layers, tokens, heads × channels
    >>> data = codec.encode(block)
    >>> len(data) == codec.nbytes(256, torch.float32), round(8 * len(data) / block.numel(), 1)
    (True, 3.0)
    >>> codec.decode(data).shape
    torch.Size([2, 3, 256, 128])
    """

    def __init__(self, basis: CalibratedBasis | str | os.PathLike[str], bits: float = 2.5) -> None:
        known, self._bits = isinstance(basis, CalibratedBasis), number("bits", bits, above=0, at_most=MOST_BITS)
        self._basis = basis if isinstance(basis, CalibratedBasis) else CalibratedBasis.load(basis)
        if not self.basis.expected:
            raise CalibrationError(
                f"the basis{'' if known else f' in {os.fspath(basis)}'} was made before blocks could be coded; "  # type: ignore[arg-type]
                "make it anew: grace-opt calibrate basis MODEL -o FILE"
            )
        shapes = {each.energy.shape for kind in (self.basis.keys, self.basis.values) for each in kind.values()}
        if len(shapes) > 1:
            raise CalibrationError(
                f"blocks are of models with as many heads, as wide, in all layers; this one has {sorted(shapes)}"
            )
        self._heads, self._width = next(iter(shapes))
        self._layers = int(self.basis.fingerprint["num_hidden_layers"])
        self._digest = bytes.fromhex(self.basis.digest())[:8]
        self._known: dict[tuple[int, torch.dtype], dict[int, BlockLayer]] = {}

    @property
    def basis(self) -> CalibratedBasis:
        """The model's basis."""
        return self._basis

    @property
    def bits(self) -> float:
        """Mean bits per number of the layers that are coded."""
        return self._bits

    def __repr__(self) -> str:
        return f"<BlockCodec with bits={self.bits:g}, basis {self._digest.hex()}>"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise `CacheError` unless this is the shape of a block of the model, ``(2, L, n, H d)``."""
        wanted = (2, self._layers, "tokens", self._heads * self._width)
        if len(shape) != 4 or (*shape[:2], "tokens", shape[3]) != wanted:
            raise CacheError(f"the block has shape {tuple(shape)}, and one of this model has {wanted}")

    def nbytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of a block.

        Parameters
        ----------
        tokens : int
            From 1 to 32,767.
        dtype : torch.dtype
            Of keys and values: float16, bfloat16 or float32.

        Raises
        ------
        OptionError
            If one of these is another, or the bits are too few for so short blocks.
        """
        integer("tokens", tokens, at_least=1, at_most=MOST_TOKENS)
        if dtype not in _DTYPES:
            raise OptionError(f"dtype={shown(dtype)}: blocks are of {', '.join(map(str, _DTYPES))}.")
        coded = self._coded(tokens, dtype)
        whole = (self._layers - len(coded)) * 2 * tokens * self._heads * self._width * dtype.itemsize
        return _HEADER.size + whole + sum(each.nbytes for each in coded.values())

    @torch.no_grad()
    def encode(self, block: Tensor) -> Tensor:
        """Code a block.

        Parameters
        ----------
        block : Tensor
            ``(2, L, n, H d)``: keys, after rotary embeddings, and values of all layers of the model.

        Returns
        -------
        Tensor
            ``(nbytes,)`` uint8, on the CPU.

        Raises
        ------
        CacheError
            If it is not the model's, or not finite.
        """
        if not isinstance(block, Tensor):
            raise CacheError(f"the block is {shown(block)}: give a tensor")
        self.check_shape(block.shape)
        length = self.nbytes(block.shape[2], block.dtype) - _HEADER.size
        here = block.detach().cpu()
        if not (here.abs() <= LARGEST).all():
            raise CacheError("the block has numbers that are not finite, or larger than 2^60")
        coded = self._coded(here.shape[2], here.dtype)
        with torch.autocast("cpu", enabled=False):  # the same bytes wherever it is called
            parts = [
                coded[layer].encode(*self._by_heads(here[:, layer])) if layer in coded else _as_bytes(here[:, layer])
                for layer in range(self._layers)
            ]
        body = torch.cat(parts)
        assert len(body) == length
        about = (_NAME, self._digest, self.bits, here.shape[2], _DTYPES.index(here.dtype))
        header = torch.frombuffer(bytearray(_HEADER.pack(0, *about)), dtype=torch.uint8)
        data = torch.cat([header, body])
        data[:_CHECK] = torch.frombuffer(bytearray(_checksum(data[_CHECK:])), dtype=torch.uint8)
        return data

    @torch.no_grad()
    def decode(self, data: Tensor) -> Tensor:
        """Read a block again.

        Parameters
        ----------
        data : Tensor
            ``(m,)`` uint8 on the CPU, of `encode`; more bytes after it are not read.

        Returns
        -------
        Tensor
            ``(2, L, n, H d)``, of the type that it had.

        Raises
        ------
        CacheError
            If it is no block, one of another basis or of other bits, or damaged.
        """
        if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.dim() != 1 or len(data) < _HEADER.size:
            raise CacheError(
                f"this is no block: {shown(data)}; give its bytes as a tensor of uint8, as "
                "torch.frombuffer(bytearray(data), dtype=torch.uint8)"
            )
        _, name, digest, bits, tokens, kind = _HEADER.unpack(data[: _HEADER.size].numpy().tobytes())
        if name != _NAME:
            raise CacheError("this is no block of grace_opt, or a damaged one")
        size = -1
        if digest == self._digest and bits == self.bits and kind < len(_DTYPES) and 0 < tokens <= MOST_TOKENS:
            size = self.nbytes(tokens, _DTYPES[kind])
        body = data[_HEADER.size : size]
        if size < 0 or len(data) < size or data[:_CHECK].numpy().tobytes() != _checksum(data[_CHECK:size]):
            if size < 0 and (digest != self._digest or bits != self.bits):
                raise CacheError(
                    f"the block was coded with bits={bits!r} and basis {digest.hex()}, and is read with "
                    f"bits={self.bits!r} and basis {self._digest.hex()}: read it with those, or it is damaged"
                )
            raise CacheError("the block is damaged: its bytes are not those that were written")
        dtype = _DTYPES[kind]
        coded, shape = self._coded(tokens, dtype), (2, tokens, self._heads * self._width)
        found, at = [], 0
        with torch.autocast("cpu", enabled=False):
            for layer in range(self._layers):
                if layer in coded:
                    part = body[at : at + coded[layer].nbytes]
                    found.append(torch.stack(coded[layer].decode(part)).transpose(1, 2).reshape(shape))
                else:
                    part = body[at : at + math.prod(shape) * dtype.itemsize]
                    found.append(part.clone().view(dtype).view(shape))
                at += len(part)
            return torch.stack(found, dim=1)

    def _by_heads(self, layer: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values ``(H, n, d)`` of ``(2, n, H d)``."""
        keys, values = layer.view(2, -1, self._heads, self._width).transpose(1, 2)
        return keys, values

    def _coded(self, tokens: int, dtype: torch.dtype) -> dict[int, BlockLayer]:
        """Return how each layer is coded that is; none of a short block."""
        if tokens < LEAST_TOKENS:
            return {}
        if (tokens, dtype) not in self._known:
            self._known[tokens, dtype] = self._shared(tokens, dtype)
        return self._known[tokens, dtype]

    def _shared(self, tokens: int, dtype: torch.dtype) -> dict[int, BlockLayer]:
        """Share the bits of a block of so many tokens among layers and heads."""
        basis, left = self.basis, tokens - DENSE
        first = basis.layers[0]
        fixed = fixed_bytes(basis.keys[first], basis.values[first], tokens, dtype)
        numbers = self._heads * self._width
        # Besides what every layer takes, of which dense tokens are a part.
        means = [(self.bits * tokens - 8 * each / numbers) / left for each in fixed]
        if min(means) < 0:
            least = math.ceil(1e3 * max(8 * each / numbers / tokens for each in fixed)) / 1e3
            raise OptionError(
                f"bits={self.bits:g}: of blocks of {tokens} tokens, means and dense tokens alone take {least:g} bits "
                "per number; write more, or use longer blocks"
            )
        return {
            layer: BlockLayer(
                basis.keys[layer],
                basis.values[layer],
                basis.expected[layer],
                tuple(each * left * self._width for each in shares),  # type: ignore[arg-type]
                tokens,
                dtype,
            )
            for layer, shares in basis.shares(min(means[0], 16.0), min(means[1], 16.0)).items()
        }


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _checksum(tensor: Tensor) -> bytes:
    return struct.pack("<I", zlib.crc32(tensor.numpy().tobytes()))
