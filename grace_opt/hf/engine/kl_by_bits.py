"""What bits leave on a model: the KL divergence of its next tokens, measured on text that its basis was not made of.

Once per model, and only if somebody asks by ``max_kl=``: each calibration text goes on where the calibration stopped. A
part of it is a prompt, which is read once and coded with each number of `kl_curve.POINTS`; the next tokens are fed to
each cache, and to a dense one.

Prompts of one model do not need different bits for the same KL: where bits follow a prompt's own spectrum at a fixed
price, its KL varies as much. What makes texts differ is how sure the model is of what comes next.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from ...errors import CalibrationError
from ..bases.at_hand import basis_for, with_measured_kl
from ..bases.calibrate import TOKENS
from ..bases.calibrated import CalibratedBasis
from ..bases.evaluated import evaluated
from ..bases.kl_curve import POINTS, bits_of_kl, curve_of
from ..models.implementation import attention_implementation, base_for
from ..models.placement import input_device
from ..settings.bits import CALIBRATED, Bits
from .filling import ReadOnce

#: Tokens of a prompt, at most and at least, and of those fed after it.
PROMPT, SHORTEST, LATER = 896, 128, 128


def within_kl(given: Bits, model: PreTrainedModel | PreTrainedConfig, make: Callable[..., Any]) -> Bits:
    """Return the bits that keep ``max_kl`` on a model, which are measured now if nobody has done so before.

    Parameters
    ----------
    given : Bits
        With ``max_kl``.
    model : PreTrainedModel or PreTrainedConfig
    make : callable
        `CompressedCache`, which asks.

    Raises
    ------
    CalibrationError
        If nothing is known of a basis that is a file, or a file that is to be measured.
    OptionError
        If the measured bits leave more.
    """
    assert given.max_kl is not None
    kind = os.fspath(given.basis)
    basis = measured_basis(model, make) if kind == CALIBRATED else basis_for(model, kind)
    if basis.kl is None:
        raise CalibrationError(
            f"{kind} does not say what bits leave on this model, which max_kl= needs; write calibrate.kl(model, FILE, "
            "tokenizer).save(FILE), or make it anew: grace-opt calibrate basis MODEL -o FILE --kl"
        )
    return replace(given, max_kl=None, bits=bits_of_kl(basis.kl, given.max_kl))


def measured_basis(model: PreTrainedModel | PreTrainedConfig, make: Callable[..., Any]) -> CalibratedBasis:
    """Return a model's own basis with what bits leave; both are made now if nobody has done so before."""

    def measure(basis: CalibratedBasis, every: Sequence[Tensor], advance: Callable[[float], None]) -> Tensor:
        return kl_curve(model, basis, every, TOKENS, make, advance)

    return with_measured_kl(model, measure)


def kl_curve(
    model: PreTrainedModel,
    basis: CalibratedBasis,
    every: Sequence[Tensor],
    skipped: int,
    make: Callable[..., Any],
    advance: Callable[[float], None],
) -> Tensor:
    """Measure the KL of each of `POINTS`, the mean over texts; ``(M, 2)``, as `curve_of` returns.

    Parameters
    ----------
    model : PreTrainedModel
    basis : CalibratedBasis
    every : sequence of Tensor
        ``(1, L)``, the token numbers of each text.
    skipped : int
        Number of first tokens of each that are left out, as the basis is made of them; but for the very first, without
        which some models predict badly.
    make : callable
        `CompressedCache`.
    advance : callable
        Called with the number of texts done so far, and parts of one.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
    most = min(PROMPT + LATER, limit)
    parts = [torch.cat([ids[:, :1], ids[:, max(skipped, 1) :]], dim=1)[:, :most] for ids in every]
    parts = [ids for ids in parts if ids.shape[1] >= SHORTEST + LATER]
    if not parts:
        raise CalibrationError(
            f"no text has {SHORTEST + LATER} tokens more than the first {skipped}, of which the basis is made; give "
            "longer texts, or say by tokens= how many of each the basis is made of"
        )
    found = torch.zeros(len(POINTS), dtype=torch.float64, device="cpu")
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.inference_mode(False),
        torch.no_grad(),
        evaluated(model),
        attention_implementation(model, f"grace_{base_for(model)}"),
    ):
        file = Path(folder) / "basis.safetensors"
        basis.save(file)
        for number, ids in enumerate(parts):
            ids = ids.to(input_device(model), copy=True)
            prompt, later = ids[:, :-LATER], ids[:, -LATER:]
            read = ReadOnce(model, prompt)
            dense = _log_probs(model, read.fill(DynamicCache(config=model.config)), later)
            for place, bits in enumerate(POINTS):
                own = _log_probs(model, read.fill(make(model, bits=bits, basis=file)), later)
                found[place] += float((dense.exp() * (dense - own)).sum(-1).mean())
                advance(number + (place + 1) / len(POINTS))
    return curve_of(POINTS, (found / len(parts)).tolist())


def _log_probs(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(ids, past_key_values=cache).logits[0].double().log_softmax(-1)
    if found.isnan().any():
        raise CalibrationError(
            f"the next-token distributions of {type(model).__name__} are not finite numbers; load it in bfloat16 or "
            "float32, and check that it answers sensibly"
        )
    return found
