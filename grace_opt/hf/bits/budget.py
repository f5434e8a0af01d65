"""`BitBudget`: how many bits per element each head of each layer gets, before its prompt divides them.

Layers are compressed one after the other while the prompt is read, ranks of a tensor-parallel model see only their own
heads, and rows of a batch are coded alone. So the shares of layers and heads, and of K and V, come from the
calibration; within a head, `allocate` divides by what the prompt shows. Without a calibrated basis, all shares are
equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import CacheError, OptionError
from .at_hand import basis_for
from .basis import Basis
from .calibrated import CalibratedBasis
from .row import CLASS_BITS
from .settings import CALIBRATED, NO_BASIS, OF_PROMPT


@dataclass(frozen=True)
class BitBudget:
    """The budget of a whole cache, and the bases of its layers.

    Attributes
    ----------
    key_bits, value_bits : float or None
        Mean bits per element; None if `total_bytes` is given.
    total_bytes : int or None
        Bytes of the whole cache at the end of the prompt.
    basis : str
        "calibrated", "prompt" or "none".
    calibrated : CalibratedBasis or None
    layers : tuple of int
        The prunable layers.
    """

    key_bits: float | None
    value_bits: float | None
    total_bytes: int | None
    basis: str
    calibrated: CalibratedBasis | None
    layers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: Any,
        model: PreTrainedModel | PreTrainedConfig,
        shape: Mapping[str, Any],
        layers: Sequence[int],
        all_layers: int,
    ) -> BitBudget:
        """Make the budget that a configuration asks for.

        Parameters
        ----------
        config : PruningConfig
            With ``is_coded``.
        model : PreTrainedModel or PreTrainedConfig
            Whose basis is wanted.
        shape : mapping
            The model's fingerprint, at least without its weights.
        layers, all_layers : sequence of int, int
            The prunable layers, and the number of all.

        Raises
        ------
        OptionError
            If the budget is smaller than any can be, or cannot be divided among the layers.
        CacheError
            If there is no basis for this model.
        """
        key_bits = config.bits if config.key_bits is None else config.key_bits
        value_bits = config.bits if config.value_bits is None else config.value_bits
        least = CLASS_BITS / 2 / int(shape["head_dim"])
        for name in ("bits", "key_bits", "value_bits"):
            value = getattr(config, name)
            if value is not None and value <= least:
                raise OptionError(
                    f"{name}={value:g}: the classes of the tokens alone take {least:g} bits per element of this model; "
                    "write more, such as 1 or 2.25"
                )
        if config.total_bytes is not None and len(layers) != all_layers:
            raise OptionError(
                f"total_bytes= is for models in which every layer is coded, and here {all_layers - len(layers)} of "
                f"{all_layers} are not (sliding windows, or dense_layers=); write bits="
            )
        kind, calibrated = config.basis, None
        if kind not in (OF_PROMPT, NO_BASIS):
            calibrated = basis_for(model, kind)
            lacking = sorted(set(layers) - set(calibrated.keys))
            if lacking:
                raise CacheError(f"the basis has no layer {lacking[0]}, which this cache codes; make it again")
            kind = CALIBRATED
        return cls(key_bits, value_bits, config.total_bytes, kind, calibrated, tuple(layers))

    def bases(self, layer: int, heads: int, rank: int) -> tuple[Basis, Basis] | None:
        """Return the calibrated bases of a layer's keys and values, of this rank's `heads`; None without calibration."""
        if self.calibrated is None:
            return None
        start = _start(len(self.calibrated.keys[layer].encode), heads, rank)
        return (
            self.calibrated.keys[layer].heads(start, start + heads),
            self.calibrated.values[layer].heads(start, start + heads),
        )

    def head_bits(self, layer: int, heads: int, rank: int, mean: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Return the bits per element of a layer's keys and values, ``(H,)`` float64 each, for given means."""
        if self.calibrated is None:
            return torch.full((heads,), mean[0], dtype=torch.float64), torch.full(
                (heads,), mean[1], dtype=torch.float64
            )
        keys, values = self.calibrated.shares(*mean)[layer]
        start = _start(len(keys), heads, rank)
        return keys[start : start + heads], values[start : start + heads]

    def means(self, sequences: int, elements: int, dense_bytes: int) -> tuple[float, float]:
        """Return the mean bits per element of keys and of values.

        Parameters
        ----------
        sequences : int
            Number of sequences in the batch.
        elements : int
            Number of coded elements of a layer, of K and V, in this sequence.
        dense_bytes : int
            Bytes of what stays dense in a layer, in this sequence.

        Raises
        ------
        CacheError
            If ``total_bytes`` is less than what stays dense.
        """
        if self.total_bytes is None:
            assert self.key_bits is not None
            assert self.value_bits is not None
            return self.key_bits, self.value_bits
        count = len(self.layers)
        left = 8 * (self.total_bytes / sequences / count - dense_bytes)
        if left <= 0:
            raise CacheError(
                f"total_bytes={self.total_bytes} is too few: {count} layers of {sequences} sequences keep "
                f"{dense_bytes * count * sequences} bytes dense already (sink tokens and the recent window); write more"
            )
        return left / elements, left / elements


def _start(whole: int, heads: int, rank: int) -> int:
    return 0 if heads == whole else rank * heads
