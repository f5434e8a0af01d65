"""How much the model's output minds errors in the keys and values of each head: Fisher information, by gradients.

What an error costs locally (`grace_opt.hf.bits.moments`) compares the channels of a head, but layers and heads poorly:
some change the next token far more than others. Here the prompt's keys and values are leaves of a graph, and next
tokens are sampled from the model: half the second moment of the gradients of their log-likelihood is what a squared
error adds to the KL divergence. Two kinds of later tokens are asked, equally important: those that the text goes on
with, and a piece of the prompt once more, which the model can only predict by looking it up.

Source: the Fisher information is the second derivative of the KL divergence (Amari, Neural Computation 10, 1998).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ...errors import CalibrationError
from ..implementation import attention_implementation, base_for
from .basis import Basis
from .classes import SINKS, WINDOW

#: Number of later tokens of each kind, at most a quarter of the text.
LATER = 256
#: Exponent of the measured ratios: a few thousand tokens show them only roughly, and large ones are rather too large.
TRUST = 0.7
#: Factors beyond this one, or below its inverse, are cut.
LARGEST_FACTOR = 2.0**10
#: Continued, and repeated.
KINDS = 2


class GradientError(CalibrationError):
    """The model gives no gradients, as with some kernels for quantised weights, or without a language-model head."""


@torch.no_grad()
def information(
    model: PreTrainedModel, ids: Tensor, layers: Collection[int], seed: int = 0, read: Cache | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the Fisher information in the keys and values of a text's first tokens, by kind of later tokens.

    Parameters
    ----------
    model : PreTrainedModel
    ids : Tensor
        ``(1, L)``.
    layers : collection of int
        Layers that keep all tokens.
    seed : int
        For sampled tokens, and the piece that is repeated.
    read : Cache, optional
        One that has read the whole text, which is not needed any more; else its beginning is read here.

    Returns
    -------
    dict
        For each layer ``(2, H, d, d)`` float64 for keys and for values: sums over the prompt's tokens that are neither
        sinks nor recent, per later token. Empty if the text is too short.

    Raises
    ------
    GradientError
        If the model gives no gradients.
    """
    later = min(LATER, ids.shape[1] // 4)
    length = ids.shape[1] - later
    if length <= SINKS + WINDOW:
        return {}
    generator = torch.Generator().manual_seed(seed)
    start = int(torch.randint(length - later + 1, (), generator=generator))
    found: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    # Not the base function: another thread may be decoding on this model from one of our caches.
    with attention_implementation(model, f"grace_{base_for(model)}"):
        ids = ids.clone()  # a tensor of inference mode could not be saved for gradients
        if read is not None and all(type(layer) is DynamicLayer for layer in read.layers):
            read.crop(-later)
            prompt = read
        else:  # other layers have forgotten tokens, or have states
            prompt = model(ids[:, :length], use_cache=True, logits_to_keep=1).past_key_values
        for fed in (ids[:, length:], ids[:, start : start + later]):
            gradients = _gradients(model, fed, copy.deepcopy(prompt), layers, generator)
            for layer, pair in zip(layers, gradients, strict=True):
                inner = [each[0, :, SINKS : length - WINDOW].cpu().double() for each in pair]
                found[layer].append((inner[0].mT @ inner[0] / later, inner[1].mT @ inner[1] / later))
    return {
        layer: (torch.stack([keys for keys, _ in pairs]), torch.stack([values for _, values in pairs]))
        for layer, pairs in found.items()
    }


def _gradients(
    model: PreTrainedModel, fed: Tensor, cache: object, layers: Collection[int], generator: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Return the gradients in each layer's cached keys and values of one sample of the tokens after each one fed."""
    stored = [cache.layers[layer] for layer in layers]  # type: ignore[attr-defined]
    leaves = []
    for each in stored:
        each.keys, each.values = (part.detach().requires_grad_() for part in (each.keys, each.values))
        leaves += [each.keys, each.values]
    try:
        with torch.enable_grad():
            logits = getattr(model(fed, past_key_values=cache, use_cache=True), "logits", None)
            if logits is None:
                raise GradientError(
                    f"{type(model).__name__} has no language-model head, so it is not known how much its output minds "
                    "errors in each head; give the whole model, write calibrate_basis(..., end_to_end=False), "
                    "or on the command line --no-end-to-end"
                )
            logits = logits[0].float()
            probabilities = logits.detach().softmax(-1).cpu()
            if not probabilities.isfinite().all():
                raise CalibrationError(
                    f"the next-token distributions of {type(model).__name__} are not finite numbers; load it in "
                    "bfloat16 or float32, and check that it answers sensibly"
                )
            sampled = torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)
            likelihood = -torch.nn.functional.cross_entropy(logits, sampled, reduction="sum")
            found = torch.autograd.grad(likelihood, leaves)
    except RuntimeError as error:
        raise GradientError(
            f"{type(model).__name__} gives no gradients ({str(error).splitlines()[0]}), so it is not known how much "
            "its output minds errors in each head; write calibrate_basis(..., end_to_end=False), or on the command "
            "line --no-end-to-end"
        ) from error
    return list(zip(found[::2], found[1::2], strict=True))


def factors(
    measured: Mapping[int, Tensor], local: Mapping[int, Tensor], bases: Mapping[int, Basis]
) -> dict[int, Tensor]:
    """Return how much more than its local loss says an error in each head's keys, or values, costs.

    Parameters
    ----------
    measured : mapping
        Fisher information ``(2, H, d, d)`` of each layer.
    local : mapping
        What each head would lose with no bits at all, by its local loss, ``(H,)``.
    bases : mapping
        Those of the keys, or values; a coordinate has variance one.

    Returns
    -------
    dict
        ``(H,)`` float64 for each layer that was measured; their geometric mean is one. Heads without any loss count as
        the mean.
    """
    logs = []
    for layer, each in measured.items():
        decode = bases[layer].decode.double()
        # The trace in coordinates of variance one: what no bits at all would cost.
        cost = ((decode @ each) * decode).sum((-2, -1))
        logs.append((cost.log() - local[layer].log()).mean(0))
    if not logs:
        return {}
    together = torch.cat(logs)
    known = together.isfinite()
    centre = together[known].mean() if known.any() else torch.zeros((), dtype=torch.float64)
    most = math.log(LARGEST_FACTOR)
    # A head whose errors reach no output has minus infinity here, one without any loss NaN.
    scaled = ((together - centre) * TRUST).nan_to_num(0.0, most, -most).clamp(-most, most).exp()
    return dict(zip(measured, torch.split(scaled, [len(each) for each in logs]), strict=True))
