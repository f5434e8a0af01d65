"""`budget_of`: the bit budget of a cache, from its settings and the model's calibrated basis."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..._util.files import path_text
from ..._util.names import did_you_mean
from ...errors import CacheError, CalibrationError, OptionError
from ..models.placement import is_tensor_parallel
from ..settings.bits import CALIBRATED, NO_BASIS, Bits
from .at_hand import basis_for, check_at_hand
from .budget import BasisSource, BitBudget
from .byte_limit import ByteLimit
from .calibrated import CalibratedBasis
from .classes import CLASS_BITS
from .guard import Guard


def budget_of(
    given: Bits,
    model: PreTrainedModel | PreTrainedConfig,
    shape: Mapping[str, Any],
    layers: Sequence[int],
    all_layers: int,
    elsewhere: int = 0,
) -> BitBudget:
    """Make the budget that settings ask for.

    Parameters
    ----------
    given : Bits
    model : PreTrainedModel or PreTrainedConfig
        Whose basis is wanted.
    shape : mapping
        The model's fingerprint, at least without its weights.
    layers, all_layers : sequence of int, int
        The prunable layers, and the number of all.
    elsewhere : int
        Most bytes that the others take, for each sequence.

    Raises
    ------
    OptionError
        If the budget is smaller than any can be, or cannot be divided among the layers.
    CacheError
        If there is no basis for this model.
    """
    key_bits = given.bits if given.key_bits is None else given.key_bits
    value_bits = given.bits if given.value_bits is None else given.value_bits
    least = CLASS_BITS / 2 / int(shape["head_dim"])
    for name in ("bits", "key_bits", "value_bits"):
        value = getattr(given, name)
        if value is not None and value <= least:
            raise OptionError(
                f"{name}={value:g}: the classes of the tokens alone take {least:g} bits per element of this model; "
                "write more, such as 1 or 2.25"
            )
    if given.total_bytes is not None and len(layers) != all_layers:
        raise OptionError(
            f"total_bytes= is for models in which every layer is coded, and here {all_layers - len(layers)} of "
            f"{all_layers} are not (sliding windows, or dense_layers=); write bits="
        )
    of_bytes = next((name for name in ("total_bytes", "max_bytes") if getattr(given, name) is not None), None)
    if of_bytes is not None and isinstance(model, PreTrainedModel) and is_tensor_parallel(model):
        raise OptionError(
            f"{of_bytes}= is for the cache of one process, and this model is tensor-parallel; write bits="
        )
    kind, source = os.fspath(given.basis), None
    if kind != NO_BASIS:
        # Not the model itself: copying a cache must not copy the model.
        source = BasisSource(functools.partial(_basis, weakref.ref(model), kind, tuple(layers)))
        if kind == CALIBRATED:
            check_at_hand(model)
        elif os.path.exists(path_text(kind)):
            source()  # nothing has to be made
        else:
            meant = did_you_mean(path_text(kind), (CALIBRATED, NO_BASIS))
            raise CalibrationError(
                f'basis={kind!r}: there is no such file. Write "{CALIBRATED}" or "{NO_BASIS}", or make '
                f"the file: grace-opt calibrate basis MODEL -o FILE.{meant}"
            )
        kind = CALIBRATED
    guard = Guard(given.guard, layers[0])
    most = given.max_bytes
    limit = None if most is None else ByteLimit(int(most), len(layers), layers[0], elsewhere)
    return BitBudget(key_bits, value_bits, given.total_bytes, kind, source, tuple(layers), given.trellis, guard, limit)


def _basis(
    model: Callable[[], PreTrainedModel | PreTrainedConfig | None], kind: str, layers: Sequence[int]
) -> CalibratedBasis:
    found = model()
    if found is None:
        raise CalibrationError(
            "the model that this cache was made for is gone, so no basis can be calibrated; make the cache with the "
            "model that it is used with"
        )
    basis = basis_for(found, kind)
    lacking = sorted(set(layers) - set(basis.keys))
    if lacking:
        raise CacheError(f"the basis has no layer {lacking[0]}, which this cache codes; make it again")
    return _of_layers(basis, layers)


def _of_layers(basis: CalibratedBasis, layers: Sequence[int]) -> CalibratedBasis:
    """Return the part of a basis for some layers, which share the bits among themselves."""
    if set(layers) == set(basis.keys):
        return basis
    return replace(
        basis,
        keys={layer: basis.keys[layer] for layer in layers},
        values={layer: basis.values[layer] for layer in layers},
        key_rates={layer: basis.key_rates[layer] for layer in layers},
        value_rates={layer: basis.value_rates[layer] for layer in layers},
        expected={layer: basis.expected[layer] for layer in layers if layer in basis.expected},
    )
