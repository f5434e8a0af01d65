"""What is in the file of a `CalibratedBasis`, and whether it can be: everything is checked before it is used."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..._util.tensor_files import TensorFormat
from ...attention.masks import is_fingerprint
from ...errors import CalibrationError
from .basis import Basis
from .rotary import RotaryMean

FORMAT = TensorFormat("grace_opt.basis", "1", "a calibrated basis", CalibrationError)
#: Largest entry of ``encode @ decode - I``, in proportion to what rounding to float32 could do.
INVERSE_TOLERANCE = 1e-5
_PARTS = ("encode", "decode", "energy")
_TYPES = {"encode": torch.float32, "decode": torch.float32, "energy": torch.float64, "rates": torch.float32}
_ROTARY = {"frequencies": torch.float64, "channels": torch.int64, "mean": torch.float32}
#: The tensor of the measured curve, and those of expected attention, which not every file has.
MEASURED_KL, EXPECTED = "kl", "expected"
#: How the names of tensors end that nothing which is coded depends on.
NOT_READ = (MEASURED_KL, EXPECTED)
_FIELDS = ("keys", "values", "key_rates", "value_rates")


class Contents(Protocol):
    """The fields of a `CalibratedBasis`."""

    @property
    def keys(self) -> dict[int, Basis]: ...
    @property
    def values(self) -> dict[int, Basis]: ...
    @property
    def multipliers(self) -> Tensor: ...
    @property
    def key_rates(self) -> dict[int, Tensor]: ...
    @property
    def value_rates(self) -> dict[int, Tensor]: ...
    @property
    def fingerprint(self) -> dict[str, int | str]: ...
    @property
    def kl(self) -> Tensor | None: ...
    @property
    def expected(self) -> dict[int, Tensor]: ...
    @property
    def texts(self) -> int: ...
    @property
    def tokens(self) -> int: ...


def as_tensors(contents: Contents) -> dict[str, Tensor]:
    """Return everything that is a tensor, by name."""
    found = {"multipliers": contents.multipliers}
    if contents.kl is not None:
        found[MEASURED_KL] = contents.kl
    found |= {f"{layer}.{EXPECTED}": direction for layer, direction in contents.expected.items()}
    for layer in contents.keys:
        for kind, basis, rates in (
            ("keys", contents.keys[layer], contents.key_rates[layer]),
            ("values", contents.values[layer], contents.value_rates[layer]),
        ):
            found |= {f"{layer}.{kind}.{part}": getattr(basis, part) for part in _PARTS}
            found[f"{layer}.{kind}.rates"] = rates
            if basis.rotary is not None:
                found |= {f"{layer}.{kind}.rotary.{part}": getattr(basis.rotary, part) for part in _ROTARY}
    return found


def from_tensors(about: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the fields of a `CalibratedBasis`; the inverse of `as_tensors`."""
    fingerprint = about.get("fingerprint")
    if not is_fingerprint(fingerprint):
        raise CalibrationError("the metadata do not say which model it was made for.")
    found: dict[str, Any] = {name: {} for name in _FIELDS}
    found |= {"fingerprint": dict(fingerprint), "texts": about.get("texts"), "tokens": about.get("tokens")}
    if "multipliers" not in tensors:
        raise CalibrationError("the prices are missing.")
    found |= {"multipliers": tensors.pop("multipliers"), "kl": tensors.pop(MEASURED_KL, None)}
    names = {name.partition(".")[0] for name in tensors}
    if not all(name.isdecimal() for name in names):
        raise CalibrationError("it has tensors that belong to no layer.")
    every = {layer: tensors.pop(f"{layer}.{EXPECTED}", None) for layer in sorted(map(int, names))}
    found[EXPECTED] = {layer: direction for layer, direction in every.items() if direction is not None}
    for layer in every:
        for kind, rates in (("keys", "key_rates"), ("values", "value_rates")):
            parts = {part: tensors.pop(f"{layer}.{kind}.{part}", None) for part in (*_PARTS, "rates")}
            if missing := [part for part, tensor in parts.items() if tensor is None]:
                raise CalibrationError(f"layer {layer} has no {' and no '.join(missing)} of {kind}.")
            found[rates][layer] = parts.pop("rates")
            rotary = {part: tensors.pop(f"{layer}.{kind}.rotary.{part}", None) for part in _ROTARY}
            missing = [part for part, tensor in rotary.items() if tensor is None]
            if 0 < len(missing) < len(rotary):
                raise CalibrationError(f"layer {layer} has no {' and no '.join(missing)} of the rotary mean of {kind}.")
            parts["rotary"] = None if missing else RotaryMean(**rotary)  # type: ignore[arg-type,assignment]
            found[kind][layer] = Basis(**parts)  # type: ignore[arg-type]
    if tensors:
        raise CalibrationError(f"it has tensors that belong to no layer: {', '.join(sorted(tensors))}.")
    return found


def check_contents(contents: Contents) -> None:
    """Raise `CalibrationError` unless everything has the right shape and type, is finite and fits together."""
    layers, known = list(contents.keys), contents.fingerprint
    if not layers or any(list(getattr(contents, name)) != layers for name in _FIELDS):
        raise CalibrationError("keys, values and their rates must be of the same layers, at least one.")
    if layers != sorted(layers) or layers[0] < 0 or layers[-1] >= int(known.get("num_hidden_layers", layers[-1] + 1)):
        raise CalibrationError(f"it has layers {layers}, but the model has {known.get('num_hidden_layers')}.")
    for name in ("texts", "tokens"):
        value = getattr(contents, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CalibrationError(f"its number of {name} is {value!r}.")
    prices = contents.multipliers
    _require(prices, "multipliers", torch.float64, 1)
    if len(prices) < 2 or not (prices > 0).all() or not (prices[1:] > prices[:-1]).all():
        raise CalibrationError("its prices are not positive and ascending.")
    if contents.kl is not None:
        _check_curve(contents.kl)
    for layer in layers:
        for kind, basis, rates in (
            ("keys", contents.keys[layer], contents.key_rates[layer]),
            ("values", contents.values[layer], contents.value_rates[layer]),
        ):
            _check_basis(f"layer {layer}, {kind}", basis, rates, len(prices))
        heads = contents.keys[layer].energy.shape[0], contents.values[layer].energy.shape[0]
        # Not compared to the configuration, whose num_key_value_heads some models ignore (GPT-NeoX, GPTBigCode).
        if contents.expected:
            _check_expected(f"layer {layer}, expected attention", contents.expected.get(layer), contents.keys[layer])
        if heads[0] != heads[1]:
            raise CalibrationError(f"layer {layer}: {heads[0]} heads of keys, but {heads[1]} of values.")


def _check_basis(where: str, basis: Basis, rates: Tensor, prices: int) -> None:
    for part in _PARTS:
        _require(getattr(basis, part), f"{where}, {part}", _TYPES[part], 2 if part == "energy" else 3)
    _require(rates, f"{where}, rates", _TYPES["rates"], 2)
    (heads, width), square = basis.energy.shape, (*basis.energy.shape, basis.energy.shape[-1])
    if basis.encode.shape != square or basis.decode.shape != square or rates.shape != (heads, prices):
        raise CalibrationError(
            f"{where}: encode {tuple(basis.encode.shape)}, decode {tuple(basis.decode.shape)}, energy {(heads, width)} "
            f"and rates {tuple(rates.shape)} do not fit each other."
        )
    if basis.rotary is not None:
        _check_rotary(f"{where}, rotary mean", basis.rotary, heads, width)
    if not (basis.energy > 0).all():
        raise CalibrationError(f"{where}: an energy is not positive.")
    if not (rates >= 0).all() or not (rates[:, 1:] <= rates[:, :-1] + 1e-6).all():
        raise CalibrationError(f"{where}: the rates do not fall as the price rises.")
    encode, decode = basis.encode.double(), basis.decode.double()
    off = (encode @ decode - torch.eye(width, dtype=torch.float64, device=encode.device)).abs()
    if not (off <= INVERSE_TOLERANCE * (1 + encode.abs() @ decode.abs())).all():
        raise CalibrationError(f"{where}: decode is not the inverse of encode.")


def _check_expected(where: str, direction: Tensor | None, keys: Basis) -> None:
    _require(direction, where, torch.float32, 3)
    assert direction is not None
    heads, width = keys.energy.shape
    if direction.shape != (heads, 2 * width, 2):
        raise CalibrationError(f"{where}: {tuple(direction.shape)} is not {(heads, 2 * width, 2)}.")


def _check_curve(curve: Tensor) -> None:
    _require(curve, "measured KL", torch.float64, 2)
    if len(curve) < 2 or curve.shape[1] != 2 or not (curve > 0).all():
        raise CalibrationError(f"its measured KL is {tuple(curve.shape)}, and not some bits and the KL of each.")
    bits, kl = curve.T
    if not (bits[1:] > bits[:-1]).all() or not (kl[1:] <= kl[:-1]).all():
        raise CalibrationError("its measured KL does not fall as the bits rise.")


def _check_rotary(where: str, rotary: RotaryMean, heads: int, width: int) -> None:
    for (part, dtype), dim in zip(_ROTARY.items(), (1, 2, 3), strict=True):
        _require(getattr(rotary, part), f"{where}, {part}", dtype, dim)
    pairs = len(rotary.frequencies)
    if rotary.channels.shape != (2, pairs) or rotary.mean.shape != (heads, 2, pairs):
        raise CalibrationError(
            f"{where}: {pairs} frequencies, channels {tuple(rotary.channels.shape)} and mean "
            f"{tuple(rotary.mean.shape)} do not fit each other, or {heads} heads."
        )
    channels = rotary.channels.flatten().tolist()
    if not all(0 <= each < width for each in channels) or len({*channels}) < len(channels):
        raise CalibrationError(f"{where}: its channels are not different ones from 0 to {width - 1}.")


def _require(tensor: Any, what: str, dtype: torch.dtype, dim: int) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.dim() != dim or not tensor.numel():
        shown = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise CalibrationError(f"{what}: {shown}, but expected {dtype} with {dim} dimensions.")
    if not tensor.isfinite().all():
        raise CalibrationError(f"{what}: not all numbers are finite.")
