r"""`StaticCoder` and `StaticCoders`: every token coded alike, by bases, widths, means and scales fixed beforehand.

When: for servers that give every token of a layer the same number of bytes, and for whoever writes their kernels: this
is the definition that a kernel is compared with. A cache with ``bits=`` codes each prompt by what it shows instead, at
less loss.

A vector x of a head becomes :math:`y = x E`; channel j of y becomes the index of the level nearest to
:math:`(y_j - m_j) / s_j` among the :math:`2^{b_j}` levels of its width, and stands for
:math:`m_j + s_j\,\mathrm{level}`. Channels without bits stand for their mean. Channels are sorted by width, widest
first, so those that are stored come first.

Source: Lloyd and Max's levels for a Gaussian (:mod:`grace_opt.hf.bits.codebooks`); the file is described in
docs/howto/servers.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._util.tensor_files import TensorFormat
from ...attention.masks import is_fingerprint
from ...errors import CalibrationError, OptionError
from .codebooks import WIDTHS, codebook, codebooks

FORMAT = TensorFormat("grace_opt.static", "1", "a static coding", CalibrationError)
#: What is in the file of one layer's keys, or values: types, and numbers of dimensions.
PARTS = {
    "encode": (torch.float32, 3),
    "decode": (torch.float32, 3),
    "means": (torch.float32, 2),
    "scales": (torch.float32, 2),
    "widths": (torch.uint8, 2),
    "pruned": (torch.bool, 2),
}
#: Numbers in its metadata.
NUMBERS = ("sinks", "texts", "tokens", "context")


@dataclass(frozen=True)
class StaticCoder:
    """Codes keys, or values, of one layer.

    Attributes
    ----------
    encode, decode : Tensor
        ``(H, d, d)`` float32: coordinates are ``x @ encode``, and ``decode`` is the inverse.
    means, scales : Tensor
        ``(H, d)`` float32, of the coordinates; scales are positive where there are bits.
    widths : Tensor
        ``(H, d)`` uint8, from `WIDTHS`, descending: bits of each coordinate.
    """

    encode: Tensor
    decode: Tensor
    means: Tensor
    scales: Tensor
    widths: Tensor

    @property
    def pruned(self) -> Tensor:
        """``(H, d)`` bool: channels of which nothing is stored."""
        return self.widths == 0

    def codes(self, tensor: Tensor) -> Tensor:
        """Return the codes of keys or values ``(..., H, n, d)``, uint8 of the same shape; 0 without bits.

        Exactly between two levels, the lower one is taken.

        Raises
        ------
        OptionError
            If the tensor has another shape, or numbers without a code: not finite, or too large for float32's products.
        """
        self._check(tensor)
        scales = torch.where(self.pruned, 1, self.scales)[:, None]
        found = (tensor.float() @ self.encode - self.means[:, None]) / scales
        if not found.isfinite().all():
            raise OptionError("the tensor has numbers that are not finite, or too large for products in float32")
        edges, codes = codebooks(found.device).edges, torch.zeros_like(found, dtype=torch.uint8)
        for width in WIDTHS[1:]:
            here = (self.widths == width)[:, None].expand(found.shape)
            codes[here] = torch.bucketize(found[here], edges[width, : 2**width - 1]).to(torch.uint8)
        return codes

    def restore(self, codes: Tensor) -> Tensor:
        """Return what codes stand for, ``(..., H, n, d)`` float32."""
        self._check(codes)
        levels = codebook(codes.device)[self.widths.long()[:, None].expand(codes.shape), codes.long()]
        return (self.means[:, None] + self.scales[:, None] * levels) @ self.decode

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that is written to the file, by name."""
        return {name: getattr(self, name) for name in PARTS}

    def _check(self, tensor: Tensor) -> None:
        heads, width = self.widths.shape
        if tensor.dim() < 3 or (tensor.shape[-3], tensor.shape[-1]) != (heads, width):
            raise OptionError(f"a tensor of shape {tuple(tensor.shape)}: give (..., {heads}, tokens, {width})")


@dataclass(frozen=True)
class StaticCoders:
    """Static coders of a model's keys and values, as `grace_opt.hf.export_static` writes them.

    Attributes
    ----------
    keys, values : dict
        The `StaticCoder` of each layer that can be coded, by its position in the model.
    fingerprint : dict
        Which model it was made for; see `grace_opt.hf.fingerprint.fingerprint`.
    sinks : int
        Number of first tokens that were left out, as they are unlike all others: keep them dense.
    texts, tokens : int
        Number of calibration texts, and of the tokens that means and scales come from, as often as they were read.
    context : int
        Number of positions over which these tokens are spread; later ones may be unlike them.
    """

    keys: dict[int, StaticCoder]
    values: dict[int, StaticCoder]
    fingerprint: dict[str, int | str] = field(default_factory=dict)
    sinks: int = 0
    texts: int = 0
    tokens: int = 0
    context: int = 0

    @property
    def bits(self) -> float:
        """Mean bits per element of keys and values; nothing else is stored of a token."""
        every = torch.cat([coder.widths.flatten() for part in (self.keys, self.values) for coder in part.values()])
        return float(every.double().mean())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; raises `CalibrationError` if it cannot be written."""
        tensors = {"codebook": codebook(torch.device("cpu"))}
        for kind, coders in (("keys", self.keys), ("values", self.values)):
            for layer, coder in coders.items():
                tensors |= {f"layers.{layer}.{kind}.{name}": part for name, part in coder.tensors().items()}
        about = {"fingerprint": self.fingerprint, **{name: getattr(self, name) for name in NUMBERS}}
        FORMAT.write(path, tensors, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StaticCoders:
        """Read a file that `save` wrote; raises `CalibrationError` if it is another, or damaged."""
        about, tensors = FORMAT.read(path)
        try:
            return cls(*_coders_in(tensors), **_checked(about))
        except CalibrationError as error:
            raise CalibrationError(f"{os.fspath(path)}: {error} Make it anew: grace-opt export MODEL -o FILE") from None


def _coders_in(tensors: Mapping[str, Tensor]) -> tuple[dict[int, StaticCoder], dict[int, StaticCoder]]:
    """Return the coders of keys and of values in a file, ascending by layer."""
    found: dict[str, dict[int, dict[str, Tensor]]] = {"keys": {}, "values": {}}
    for name, tensor in tensors.items():
        match name.split("."):
            case ["codebook"]:
                if not torch.equal(tensor, codebook(torch.device("cpu"))):
                    raise CalibrationError("its levels are not those of this grace_opt.")
            case ["layers", layer, ("keys" | "values") as kind, part] if layer.isdecimal() and part in PARTS:
                found[kind].setdefault(int(layer), {})[part] = tensor
            case _:
                raise CalibrationError(f"it has a tensor {name!r} that belongs to no layer.")
    if "codebook" not in tensors or not found["keys"] or set(found["keys"]) != set(found["values"]):
        raise CalibrationError("levels, keys or values of some layer are missing.")
    keys, values = (
        {layer: _coder(f"layer {layer}, {kind}", parts) for layer, parts in sorted(found[kind].items())}
        for kind in ("keys", "values")
    )
    return keys, values


def _coder(where: str, parts: dict[str, Tensor]) -> StaticCoder:
    if missing := [name for name in PARTS if name not in parts]:
        raise CalibrationError(f"{where}: {', '.join(missing)} missing.")
    shape = parts["widths"].shape
    for name, (dtype, dim) in PARTS.items():
        expected = (*shape, shape[-1])[:dim] if len(shape) == 2 else ()
        if parts[name].dtype != dtype or tuple(parts[name].shape) != expected or not parts[name].numel():
            raise CalibrationError(f"{where}: {name} is {parts[name].dtype} {tuple(parts[name].shape)}.")
        if not parts[name].isfinite().all():
            raise CalibrationError(f"{where}: {name} has numbers that are not finite.")
    pruned = parts.pop("pruned")
    coder, widths = StaticCoder(**parts), parts["widths"].long()
    known = torch.isin(widths, torch.tensor(WIDTHS, dtype=widths.dtype, device=widths.device))
    if not known.all() or (widths[:, 1:] > widths[:, :-1]).any() or not torch.equal(pruned, coder.pruned):
        raise CalibrationError(f"{where}: its widths are none that can be, not descending, or not those of its mask.")
    if not (coder.scales[~pruned] > 0).all():
        raise CalibrationError(f"{where}: a scale is not positive.")
    return coder


def _checked(about: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: about.get(name) for name in NUMBERS}
    if not is_fingerprint(about.get("fingerprint")) or not all(type(n) is int and n >= 0 for n in numbers.values()):
        raise CalibrationError("the metadata do not say which model it was made for, and from what.")
    return {"fingerprint": dict(about["fingerprint"]), **numbers}
