"""How sensitive the model's output is to errors in the keys and values of each head: Fisher information, by gradients.

What an error costs locally (`grace_opt.hf.bases.moments`) compares the channels of a head, but layers and heads poorly:
some change the next token far more than others. Here the prompt's keys and values are leaves of a graph, and next
tokens are sampled from the model: half the second moment of the gradients of their log-likelihood is what a squared
error adds to the KL divergence. Half of the later tokens are those that the text goes on with, and half a piece of the
prompt once more, which the model can only predict by looking it up.

Source: the Fisher information is the second derivative of the KL divergence (Amari, Neural Computation 10, 1998).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ...errors import CalibrationError
from ..models.implementation import attention_implementation, base_for
from ..settings.bits import SINKS
from .basis import Basis
from .classes import WINDOW

#: Exponent of the measured ratios: a few thousand tokens show them only roughly, and large ones are rather too large.
TRUST = 0.7
#: Factors beyond this one, or below its inverse, are cut.
LARGEST_FACTOR = 2.0**10


class GradientError(CalibrationError):
    """The model gives no gradients, as with some kernels for quantised weights, or without a language-model head."""


@torch.no_grad()
def information(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Cache,
    layers: Collection[int],
    positions: Tensor | None = None,
    seed: int = 0,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the Fisher information in the keys and values of a prompt that a cache holds.

    Parameters
    ----------
    model : PreTrainedModel
    ids : Tensor
        ``(1, L)``: the prompt, and as many later tokens as are asked. Half of these give way to a piece of the prompt.
    cache : Cache
        It has read the prompt, and is not needed any more.
    layers : collection of int
        Layers that keep all tokens.
    positions : Tensor, optional
        ``(L,)``, those of all tokens; by default one after the other.
    seed : int
        For sampled tokens, and the piece that is repeated.

    Returns
    -------
    dict
        For each layer ``(H, d, d)`` float64 for keys and for values: sums over the prompt's tokens that are neither
        sinks nor recent, per later token.

    Raises
    ------
    GradientError
        If the model gives no gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = [cache.layers[layer] for layer in layers]
    length = stored[0].keys.shape[2]
    later = ids.shape[1] - length
    repeated = later // 2
    start = int(torch.randint(length - repeated + 1, (), generator=generator, device="cpu"))
    fed = torch.cat([ids[:, length : ids.shape[1] - repeated], ids[:, start : start + repeated]], dim=1)
    where = {} if positions is None else {"position_ids": positions[None, length:]}
    leaves = []
    for each in stored:
        each.keys, each.values = (part.detach().requires_grad_() for part in (each.keys, each.values))
        leaves += [each.keys, each.values]
    try:
        # Not the base function: another thread may be decoding on this model from one of our caches.
        with attention_implementation(model, f"grace_{base_for(model)}"), torch.enable_grad():
            logits = getattr(model(fed, past_key_values=cache, use_cache=True, **where), "logits", None)
            if logits is None:
                raise GradientError(
                    f"{type(model).__name__} has no language-model head, so its sensitivity to errors in each head is "
                    "not known; give the whole model, write calibrate.basis(..., end_to_end=False), "
                    "or on the command line --no-end-to-end"
                )
            logits = logits[0].float()
            # Not by torch.multinomial, which draws a number for each word of the vocabulary.
            rising = logits.detach().cpu().double().softmax(-1).cumsum_(-1)
            if not rising[:, -1].isfinite().all():
                raise CalibrationError(
                    f"the next-token distributions of {type(model).__name__} are not finite numbers; load it in "
                    "bfloat16 or float32, and check that it answers sensibly"
                )
            drawn = rising[:, -1:] * torch.rand(later, 1, generator=generator, dtype=torch.float64, device="cpu")
            sampled = torch.searchsorted(rising, drawn, right=True)[:, 0].clamp(max=rising.shape[1] - 1)
            likelihood = -torch.nn.functional.cross_entropy(logits, sampled.to(logits.device), reduction="sum")
            found = torch.autograd.grad(likelihood, leaves)
    except RuntimeError as error:
        raise GradientError(
            f"{type(model).__name__} gives no gradients ({str(error).splitlines()[0]}), so its sensitivity "
            "to errors in each head is not known; write calibrate.basis(..., end_to_end=False), or on the command "
            "line --no-end-to-end"
        ) from error
    inner = [each[0, :, SINKS : length - WINDOW].cpu().double() for each in found]
    squares = [each.mT @ each / later for each in inner]
    return dict(zip(layers, zip(squares[::2], squares[1::2], strict=True), strict=True))


def factors(
    measured: Mapping[int, Tensor], local: Mapping[int, Tensor], bases: Mapping[int, Basis]
) -> dict[int, Tensor]:
    """Return how much more than its local loss says an error in each head's keys, or values, costs.

    Parameters
    ----------
    measured : mapping
        Fisher information ``(H, d, d)`` of each layer.
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
        logs.append(cost.log() - local[layer].log())
    if not logs:
        return {}
    together = torch.cat(logs)
    known = together.isfinite()
    centre = together[known].mean() if known.any() else 0.0
    most = math.log(LARGEST_FACTOR)
    # A head whose errors reach no output has minus infinity here, one without any loss NaN.
    scaled = ((together - centre) * TRUST).nan_to_num(0.0, most, -most).clamp(-most, most).exp()
    return dict(zip(measured, torch.split(scaled, [len(each) for each in logs]), strict=True))
