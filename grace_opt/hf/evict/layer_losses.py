"""`LayerLosses`: what a model's output loses if one KV head keeps few of a prompt's tokens, measured once per model.

When: `calibrate.budgets` makes one, and `LayerBudgets` divides an eviction's budget among layers and heads by it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..._util.parameters import shown
from ..._util.tensor_files import TensorFormat
from ...attention.masks import is_fingerprint
from ...errors import CalibrationError
from ..models.arguments import unwrap_model
from ..models.fingerprint import fingerprint as fingerprint_of
from ..models.fingerprint import fingerprint_differences

FORMAT = TensorFormat("grace_opt.layer_losses", "1", "a file of losses of layers", CalibrationError)
#: A loss below this share of the largest one is rounding, and counts as this much.
NOTHING = 1e-12
#: Logarithm of how much larger than all measured losses one becomes below the least share.
LARGEST = 600.0
_AGAIN = "measure them again: calibrate.budgets(model, tokenizer)"


@dataclass(frozen=True, repr=False)
class LayerLosses:
    """The KL divergence, in nats per next token, if one KV head alone keeps a share of a prompt's tokens.

    Attributes
    ----------
    layers : tuple of int
        Positions in the model, ascending.
    shares : tuple of float
        Shares of the tokens that were kept, ascending, between 0 and 1.
    losses : tuple
        One for each share, for each head, for each layer; or for each layer, if all of its heads keep the same share.
        Not negative.
    fingerprint : mapping
        Which model they were measured on; see `grace_opt.hf.models.fingerprint.fingerprint`.

    Examples
    --------
    >>> losses = LayerLosses((0, 1), (0.25, 0.5), ((0.04, 0.01), (0.0004, 0.0001)))
    >>> losses.curves([0.25, 0.5, 1.0]).round(9).tolist()
    [[0.04, 0.01, 0.0], [0.0004, 0.0001, 0.0]]
    >>> by_heads = LayerLosses((5,), (0.25, 0.5), (((0.03, 0.01), (0.0, 0.0)),))
    >>> by_heads, by_heads.of_layers().losses
    (LayerLosses(1 layers, 2 heads), ((0.03, 0.01),))
    """

    layers: tuple[int, ...]
    shares: tuple[float, ...]
    losses: tuple[Any, ...]
    fingerprint: Mapping[str, int | str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Take lists, too, as JSON has them; refuse numbers that do not belong together."""
        for name in ("layers", "shares", "losses"):
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        _check(self)

    def __repr__(self) -> str:
        return f"LayerLosses({len(self.layers)} layers{f', {self.heads} heads' if self.heads else ''})"

    @property
    def heads(self) -> int:
        """Number of KV heads of a layer; 0 if the losses are those of layers."""
        return len(self.losses[0]) if isinstance(self.losses[0][0], tuple) else 0

    def of_layers(self) -> LayerLosses:
        """Return the losses of layers: the sums of their heads'."""
        if not self.heads:
            return self
        return LayerLosses(self.layers, self.shares, tuple(np.sum(self.losses, axis=1).tolist()), self.fingerprint)

    def curves(self, shares: Any) -> np.ndarray:
        """Return the loss of each layer at each of some shares between 0 and 1, ``(layers, n)``: the sum of its heads'.

        Between the shares that were measured, and below, the logarithm of the loss is linear in that of the share;
        above, the loss falls to 0 in a straight line. A larger share never loses more.
        """
        found: np.ndarray = self.relative_curves(shares).sum(axis=1) * np.max(self.losses)
        return found

    def relative_curves(self, shares: Any) -> np.ndarray:
        """Return the curve of each head in proportion to the largest loss that was measured: ``(layers, heads, n)``.

        Of losses of layers: ``(layers, 1, n)``.
        """
        wanted, known = np.asarray(shares, np.float64), np.log(self.shares)
        measured = np.asarray(self.losses, np.float64).reshape(len(self.layers), -1, len(known))
        measured = np.maximum.accumulate(measured[..., ::-1], axis=-1)[..., ::-1]
        measured = np.log(np.maximum(measured / (measured.max() or 1.0), NOTHING))
        found = np.empty((*measured.shape[:2], len(wanted)))
        for place in np.ndindex(*measured.shape[:2]):
            row, each = found[place], measured[place]
            row[:] = np.interp(np.log(wanted), known, each)
            slope = (each[1] - each[0]) / (known[1] - known[0])
            row += np.minimum(np.log(wanted) - known[0], 0) * slope
        return np.exp(np.minimum(found, LARGEST)) * np.clip((1 - wanted) / (1 - self.shares[-1]), 0, 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; raises `CalibrationError` if it cannot be written."""
        tensors = {
            "layers": torch.tensor(self.layers, dtype=torch.int64, device="cpu"),
            "shares": torch.tensor(self.shares, dtype=torch.float64, device="cpu"),
            "losses": torch.tensor(self.losses, dtype=torch.float64, device="cpu"),
        }
        FORMAT.write(path, tensors, {"fingerprint": dict(self.fingerprint)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerLosses:
        """Read a file that `save` wrote; raises `CalibrationError` if it is another, or damaged."""
        about, tensors = FORMAT.read(path)
        if set(tensors) != {"layers", "shares", "losses"} or set(about) != {"fingerprint"}:
            raise CalibrationError(f"{os.fspath(path)} has {sorted(tensors)} and {sorted(about)}; {_AGAIN}")
        try:
            fields: dict[str, Any] = {name: part.tolist() for name, part in tensors.items()}
            return cls(**fields, **about)
        except CalibrationError as error:
            raise CalibrationError(f"{os.fspath(path)}: {error}") from None

    def check_model(self, model: PreTrainedModel | PreTrainedConfig) -> None:
        """Raise `CalibrationError`, naming every difference, if they were measured on another model."""
        if not isinstance(model, PreTrainedConfig):
            model = unwrap_model(model, "check_model")
        self.check_fingerprint(fingerprint_of(model))

    def check_fingerprint(self, here: Mapping[str, int | str]) -> None:
        """Do so by the model's fingerprint."""
        differences = fingerprint_differences("losses", self.fingerprint, here)
        if not differences and self.layers[-1] >= int(here["num_hidden_layers"]):
            differences = [f"losses of layer {self.layers[-1]}, model with {here['num_hidden_layers']} layers"]
        heads = int(here.get("num_key_value_heads", self.heads))
        if not differences and self.heads not in (0, heads):
            differences = [f"losses of {self.heads} heads, model with {heads}"]
        if differences:
            raise CalibrationError(
                f"the losses of layers were measured on another model ({'; '.join(differences)}); {_AGAIN}"
            )


def _tuples(value: Any) -> Any:
    """Return lists and arrays as tuples, whatever is in them."""
    value = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
    return tuple(_tuples(each) for each in value) if isinstance(value, list | tuple) else value


def _check(losses: LayerLosses) -> None:
    """Raise `CalibrationError` unless the fields belong together."""
    for name in ("layers", "shares", "losses"):
        if not isinstance(getattr(losses, name), tuple):
            raise CalibrationError(f"{name}={shown(getattr(losses, name))}: give a list, or {_AGAIN}")
    layers, shares, rows = losses.layers, losses.shares, losses.losses
    if not layers or any(type(layer) is not int or layer < 0 for layer in layers) or list(layers) != sorted({*layers}):
        raise CalibrationError(f"layers={layers}: give positions in the model, ascending, at least one")
    good = all(isinstance(share, float) and 0 < share < 1 for share in shares)
    if len(shares) < 2 or not good or list(shares) != sorted({*shares}):
        raise CalibrationError(f"shares={shares}: give at least two, ascending, between 0 and 1")
    if len(rows) != len(layers):
        raise CalibrationError(f"losses: give {len(layers)} rows, one for each layer, of {len(shares)} numbers")
    by_heads = isinstance(rows[0], tuple) and bool(rows[0]) and isinstance(rows[0][0], tuple)
    for layer, row in zip(layers, rows, strict=True):
        for head in row if by_heads and isinstance(row, tuple) else (row,):
            if not isinstance(head, tuple) or len(head) != len(shares):
                raise CalibrationError(
                    f"losses of layer {layer}: give {len(layers)} rows, one for each layer, of {len(shares)} numbers; "
                    "or of as many rows, one for each of its heads"
                )
            if not all(isinstance(loss, int | float) and math.isfinite(loss) and loss >= 0 for loss in head):
                raise CalibrationError(f"losses of layer {layer}: {head}; give numbers, not negative")
        if by_heads and len(row) != len(rows[0]):
            raise CalibrationError(f"losses of layer {layer}: {len(row)} heads, and {len(rows[0])} of the first layer")
    if not is_fingerprint(losses.fingerprint):
        raise CalibrationError(f"fingerprint={losses.fingerprint!r}: give a mapping of names to texts or integers")
