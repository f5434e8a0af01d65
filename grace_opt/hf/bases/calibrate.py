"""`basis`: the bases of a model's keys and values and the shares of its layers and heads, from a few texts.

When: once per model, before its cache is compressed to a given number of bits; the result can be saved. One forward
pass per text, whose layers are taken in as they come, so no more than one layer's queries is held; then a few tokens
with gradients, which say how much each head's errors matter to the model's output.

A text is read as what is left of a longer one: in runs of neighbouring tokens with gaps between them, over as many
positions as a prompt has. Keys turn with their position, so a basis made from the first thousand positions alone is
another one; tokens are what takes time, and positions cost nothing. Layers with a window have never seen such gaps: for
models that have some, a text is one run, and each text begins at another position.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from ..._util.parameters import flag, integer
from ..._util.warning import warn
from ...errors import CacheError, CalibrationError
from ..models.arguments import require_model
from ..models.fingerprint import fingerprint
from ..models.placement import input_device
from ..models.prunable import prunable_layers, text_config
from ..models.recording import AttentionCall, record
from ..settings.bits import SINKS
from .calibrated import CalibratedBasis
from .classes import WINDOW
from .evaluated import evaluated
from .moments import LayerMoments
from .rates import price_grid, rates
from .rotary import frequencies_of
from .sensitivity import factors, information
from .texts import digest, given_texts, token_ids
from .unfinished import Unfinished

#: Number of first tokens of each text that are used.
TOKENS = 1024
#: Of these, how many are fed later, with gradients; at most a quarter of a text.
LATER = 64
#: Positions over which the tokens of a text are spread, and number of neighbours that stay together.
SPAN, RUN = 2048, 32
#: Positions for each token of a short text, at most.
SPARSEST = 4
#: Fewest tokens, sinks and recent windows not counted, that moments are made from.
FEWEST_TOKENS = 64
#: Tokens per channel below which moments are mostly chance, and a warning says so.
SENSIBLE_TOKENS_PER_CHANNEL = 4
#: Share of a text's time that reading it takes, roughly; gradients take the rest.
READING = 0.75


def basis(
    model: PreTrainedModel,
    tokenizer: Any = None,
    texts: Sequence[str | Tensor] | None = None,
    *,
    tokens: int = TOKENS,
    end_to_end: bool = True,
    advance: Callable[[float], None] = lambda done: None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> CalibratedBasis:
    """Find the coordinates in which a model's keys and values are stored with few bits, and who gets how many.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder that computes attention through transformers' attention interface.
    tokenizer : callable, optional
        Needed if ``texts`` contains strings, or is None.
    texts : sequence of str or Tensor, optional
        Texts, or their token ids of shape ``(L,)`` or ``(1, L)``. By default those that ship with grace_opt: a story, a
        report, a dialogue, code, tables and letters.
    tokens : int
        Number of first tokens of each text that are used, at most as many as the model has positions.
    end_to_end : bool
        Share bits among layers and heads by how much the model's next tokens mind their errors. That takes gradients;
        without, shares follow from the change of each layer's own output, and cost several tenths of a bit.
    advance : callable
        Called with the number of texts done so far, and parts of one, for a progress bar; what it raises stops the
        calibration.
    checkpoint : path, optional
        File of what is done, from which a call with the same arguments goes on after Ctrl-C or a crash, to the same
        basis. Removed at the end; one that is damaged, or of another model, other texts or other settings, is written
        over.

    Returns
    -------
    CalibratedBasis

    Raises
    ------
    OptionError
        If a text has no tokens, or strings come without a tokenizer.
    CalibrationError
        If the texts have fewer than 64 tokens besides sinks and windows, the model's numbers are not finite, its output
        projection is unknown, it gives no gradients, or it is spread over several processes.
    CacheError
        If the model's attention does not go through the attention interface.

    Warns
    -----
    UserWarning
        If there are fewer than four tokens per channel of a head, sinks and windows not counted.

    Examples
    --------
    >>> from grace_opt.hf import calibrate
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> made = calibrate.basis(model, tokenizer, ["the quiet river runs past a late singer " * 40])
    >>> made.layers, made.keys[0].encode.shape
    ((0, 1, 2), torch.Size([2, 64, 64]))
    """
    model = require_model(model, "calibrate.basis")
    given = given_texts(texts, tokenizer, "calibrate.basis")
    config = text_config(model, "calibrate.basis")
    longest = min(integer("tokens", tokens, at_least=1), getattr(config, "max_position_embeddings", None) or tokens)
    model_is = fingerprint(model)
    refuse_parts(model_is)
    every = [token_ids(text, tokenizer, n, "calibrate.basis")[:, :longest] for n, text in enumerate(given, 1)]
    long_enough = [ids for ids in every if ids.shape[1] > SINKS + WINDOW]
    count = sum(ids.shape[1] - SINKS - WINDOW for ids in long_enough)
    if count < FEWEST_TOKENS:
        raise CalibrationError(
            f"the texts have {count} tokens besides the first {SINKS} and last {WINDOW} of each, which stay dense; at "
            f"least {FEWEST_TOKENS} are needed, and some thousand are better"
        )
    sensible = SENSIBLE_TOKENS_PER_CHANNEL * int(model_is["head_dim"])
    if count < sensible:
        warn(
            f"the basis is made from {count} tokens, and with fewer than {sensible} it is mostly chance, which costs "
            "quality: give longer texts, some thousand tokens of several kinds",
        )
    end_to_end = flag("end_to_end", end_to_end)
    about = {"model": model_is, "dtype": str(model.dtype), "texts": digest(long_enough), "end_to_end": end_to_end}
    kept = Unfinished(checkpoint, about)
    layers = kept.load() or {index: LayerMoments(index) for index in prunable_layers(config)}
    done, short, device = kept.texts, len(every) - len(long_enough), input_device(model)
    frequencies = frequencies_of(model)
    seen, share = 0, (READING if end_to_end else 1.0) / len(layers)
    advance(short + done)

    def take(call: AttentionCall) -> None:
        nonlocal seen
        index = getattr(call.module, "layer_idx", None)
        if index in layers:
            length = call.key.shape[2]
            own = torch.arange(length, device="cpu") if positions is None else positions[:length]
            layers[index].add(call, own, frequencies)
            seen += 1
            advance(short + done + min(seen * share, 0.99))

    # Not as inference tensors, with which no gradient could ever be computed.
    with kept.told_if_stopped(len(long_enough)), torch.inference_mode(False), torch.no_grad(), evaluated(model):
        for ids in long_enough[done:]:
            # Copied, as a tensor of inference mode could not be saved for gradients.
            ids, positions = ids.to(device, copy=True), places(model, ids.shape[1], done / max(len(long_enough) - 1, 1))
            later = min(LATER, ids.shape[1] // 4) if end_to_end else 0
            prompt = ids.shape[1] - later
            cache = DynamicCache(config=model.config) if later and prompt > SINKS + WINDOW else None
            read = slice(None) if cache is None else slice(prompt)
            record(model, ids[:, read], None, take, cache, None if positions is None else positions[read])
            if missing := sorted(index for index, moments in layers.items() if moments.texts <= done):
                raise CacheError(
                    f"layers {missing} of {type(model).__name__} did not call the attention interface, so they cannot "
                    'be calibrated; write basis="none", or use transformers\' own caches'
                )
            if cache is not None and any(0 < cache.get_seq_length(index) < prompt for index in layers):
                raise CalibrationError(
                    f"something drops tokens of {type(model).__name__} while it is calibrated, as a press of kvpress "
                    "does; calibrate it beforehand: grace-opt calibrate basis MODEL, or basis=FILE"
                )
            if cache is not None:
                for index, fisher in information(model, ids, cache, tuple(layers), positions).items():
                    layers[index].add_information(*fisher)
            done, seen = done + 1, 0
            if done < len(long_enough):
                kept.keep(done, layers)
            advance(short + done)
        made = _finished(layers, model_is, len(long_enough), sum(ids.shape[1] for ids in long_enough))
    kept.remove()
    return made


def places(model: PreTrainedModel, length: int, share: float) -> Tensor | None:
    """Return the positions of a text's tokens ``(length,)``, ascending, within `SPAN`; None if the model chooses them.

    Parameters
    ----------
    model : PreTrainedModel
    length : int
        Number of tokens.
    share : float
        From 0 to 1: how late a text begins that is one run, of the room that it has.
    """
    if not all("position_ids" in inspect.signature(each.forward).parameters for each in (model, model.base_model)):
        return None
    config = model.config.get_text_config(decoder=True)
    span = max(min(SPAN, SPARSEST * length, getattr(config, "max_position_embeddings", None) or SPAN), length)
    every = torch.arange(length, device=input_device(model))
    if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=model.config).layers):
        return every + int(share * (span - length))
    runs = max(length // RUN, 1)
    size = -(-length // runs)
    return every + every // size * (span // runs - size)


def refuse_parts(model_is: Mapping[str, int | str]) -> None:
    """Raise `CalibrationError` if, by its fingerprint, this process has only some of the model's heads."""
    if "tensor_parallel" in model_is:
        raise CalibrationError(
            f"this process has only {model_is['tensor_parallel']} of the model; calibrate it in one process "
            "(grace-opt calibrate basis MODEL -o FILE) and write basis=FILE"
        )


def _finished(
    layers: dict[int, LayerMoments], model_is: dict[str, int | str], texts: int, tokens: int
) -> CalibratedBasis:
    bases = {index: moments.bases() for index, moments in layers.items()}
    losses = {index: moments.losses(*bases[index]) for index, moments in layers.items()}
    steps = []
    for which in (0, 1):
        matter = factors(
            {index: each.information[which] for index, each in layers.items() if each.information is not None},
            {index: moments.mean_loss(losses[index][which]) for index, moments in layers.items()},
            {index: pair[which] for index, pair in bases.items()},
        )
        steps.append(
            {index: moments.steps(losses[index][which], matter.get(index, 1.0)) for index, moments in layers.items()}
        )
    largest = max(float(prices.max()) for each in steps for groups in each.values() for prices, _, _ in groups)
    multipliers = price_grid(largest)
    curves = [
        {
            index: sum(share * rates(prices, gains, multipliers) for prices, gains, share in groups).float()  # type: ignore[union-attr]
            for index, groups in each.items()
        }
        for each in steps
    ]
    return CalibratedBasis(
        keys={index: pair[0] for index, pair in bases.items()},
        values={index: pair[1] for index, pair in bases.items()},
        multipliers=multipliers,
        key_rates=curves[0],
        value_rates=curves[1],
        fingerprint=model_is,
        texts=texts,
        tokens=tokens,
        expected={index: moments.expects() for index, moments in layers.items()},
    )
