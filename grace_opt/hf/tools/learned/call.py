"""`learn_masks`: static masks learned by distillation, LeanK's way, layer by layer.

When: all prompts are of one kind, there are texts like them, and minutes to learn from these.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...._util.arrays import without_autocast
from ...._util.parameters import integer, number
from ...._util.progress import progress_bar
from ...._util.warning import warn
from ....attention.masks import ChannelMask
from ....attention.provider import DEFAULT_RATIO
from ....errors import CalibrationError, OptionError, ProblemError
from ...bases.evaluated import evaluated
from ...bases.texts import all_token_ids, digest
from ...engine.cache import CompressedCache
from ...models.arguments import require_model
from ...models.fingerprint import fingerprint
from ...settings.config import CacheConfig
from .checkpoint import Checkpoint
from .observe import LayerObservation, ObservedWindow, cut, observe
from .stages import learn_layer

#: Windows of text, tokens of each, and queries observed in each.
WINDOWS, TOKENS, QUERIES = 24, 512, 256
#: Adam's steps of both stages.
STEPS = (200, 60)
#: Fewest queries that see a pruned token.
FEWEST_QUERIES = 64
#: Bytes of queries, keys and values that are held at once; more layers than fit are read again, in turn.
HELD_BYTES = 2**30


def learn_masks(
    model: PreTrainedModel,
    tokenizer: Any = None,
    texts: Sequence[str | Tensor] | None = None,
    ratio: float | Sequence[float] = DEFAULT_RATIO,
    *,
    multiple: int = 1,
    windows: int = WINDOWS,
    tokens: int = TOKENS,
    queries: int = QUERIES,
    steps: tuple[int, int] = STEPS,
    recent_window: int = CacheConfig.recent_window,
    sink_tokens: int = 0,
    dense_layers: int = 0,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    progress: bool | None = None,
) -> ChannelMask:
    r"""Learn, from several texts, which channels of every KV head to keep.

    Every layer's gates :math:`g \in [0, 1]^{H \times d}` multiply the keys that are not dense. First they minimise

    .. math:: \frac{\sum_t \|(o_t(g) - o_t(1))\, W_O\|^2}{\sum_t \|o_t(1)\, W_O\|^2}
              + \sum_h \frac{\lambda_h}{d} \sum_c g_{hc},

    where :math:`o_t` is the attention output of query t over all heads and :math:`W_O` the output projection. The price
    :math:`\lambda_h` of a head's open gates rises and falls until as many are open as the budget allows. Then only the
    largest stay, as ones, and are exchanged for others by straight-through gradients of the first term; of the hard
    masks that were met, the best on all windows is returned. The model's weights take no part.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder that computes attention through transformers' attention interface.
    tokenizer : callable, optional
        Needed if ``texts`` contains strings, or is None.
    texts : sequence of str or Tensor, optional
        Texts like the later prompts, or their token ids of shape ``(L,)`` or ``(1, L)``. By default those that ship
        with grace_opt.
    ratio : float or sequence of float
        Share of the channels of every head to prune, in [0, 1); or one per layer of the model.
    multiple : int
        Keep a multiple of this many channels in every head; up to ``multiple`` - 1 more are pruned for that.
    windows, tokens, queries : int
        Learn from at most so many windows of the texts, which take turns, of so many tokens at most, and from so many
        queries of each, at most those of the longest; a step takes 32 queries of four windows.
    steps : (int, int)
        Of both stages, in each layer.
    recent_window, sink_tokens : int
        Tokens that a query sees dense, the last and the first, as in the cache that will use the masks.
    dense_layers : int
        Number of first layers that are not pruned.
    seed : int
        Chooses windows, queries and their order: equal seeds, equal masks.
    checkpoint : path, optional
        Write each layer that is done to this file, and go on from it if it is there.
    time_limit : float, optional
        Seconds; the layers share what is left after the first reading, and harden their gates when their share is
        over. With a limit, equal seeds may give unequal masks.
    progress : bool or None
        True shows a bar, False nothing, None a bar where somebody is waiting.

    Returns
    -------
    ChannelMask
        ``(prunable layers, H, d)``, with the model's fingerprint, for ``CompressedCache(model, masks=...)``.

    Raises
    ------
    OptionError
        If there are no texts, strings come without a tokenizer, or an option is out of range.
    ProblemError
        If ``multiple`` does not divide the heads' channels, or leaves none.
    CalibrationError
        If fewer than 64 queries see a token that is not dense, the model's numbers are not finite, its output
        projection is unknown, or it is spread over several processes.
    CacheError
        If a layer's attention does not go through the attention interface, or is more than a softmax of its logits.
    MaskError
        If the checkpoint is for another model, other texts or other settings.

    Warns
    -----
    UserWarning
        If the time limit cut layers short. These are not in the checkpoint: another run learns them in full.

    Notes
    -----
    LeanK distils end to end: the loss is the change of the last hidden states, and the budget is shared by all heads of
    the model. Here each layer learns alone, from queries, keys and values of the dense model. A step then costs what
    one layer's attention over a few windows does, instead of the whole model forwards and backwards, and one layer is
    in memory at a time. What is lost is the division of channels among layers and heads: every head of a layer keeps
    equally many, as the cache stores them.

    As with `calibrate`, channels after RoPE count one by one; the two of a rotated pair may part.

    Takes O(windows · tokens²) for reading, and O(steps · queries · tokens · d) for each head. Holds at most 1 GiB of
    queries, keys and values (or one layer's), and reads the windows again for the layers that did not fit.

    References
    ----------
    LeanK, arXiv 2508.02215.

    Examples
    --------
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> texts = ["the quiet river runs past the old mill . a late singer paints the sharp compass . " * 9]
    >>> masks = learn_masks(model, tokenizer, texts, ratio=0.5, tokens=96, steps=(8, 4))
    >>> masks.kept_indices.shape
    torch.Size([3, 2, 32])
    """
    began = time.monotonic()
    model = require_model(model, "learn_masks")
    given = all_token_ids(texts, tokenizer, "learn_masks", model)
    steps = _steps(steps)
    counts = {
        name: integer(name, value, at_least=1)
        for name, value in (("windows", windows), ("tokens", tokens), ("queries", queries), ("multiple", multiple))
    }
    seed = integer("seed", seed, at_least=0)
    limit = number("time_limit", time_limit, above=0, optional=True)
    # The same checks and layers as the cache that will use the masks.
    cache = CompressedCache(
        model, "mies", ratio, recent_window=recent_window, sink_tokens=sink_tokens, dense_layers=dense_layers
    )
    recent_window, sink_tokens = cache.config.recent_window, cache.config.sink_tokens
    model_is = fingerprint(model)
    if "tensor_parallel" in model_is:
        raise CalibrationError(
            f"this process has only {model_is['tensor_parallel']} of the model; learn the masks in one process, and "
            "load the file here"
        )
    d = int(model_is["head_dim"])
    kept = {
        layer: _kept(d - cache.config.channels.provider(layer).count(d), d, counts["multiple"])
        for layer in cache.prunable_layers
    }
    pieces = _windows(given, counts, recent_window + sink_tokens, seed)
    settings = {
        **counts,
        "steps": list(steps),
        "kept": [kept[layer] for layer in cache.prunable_layers],
        "recent_window": recent_window,
        "sink_tokens": sink_tokens,
        "dense_layers": cache.config.dense_layers,
        "seed": seed,
        "texts": digest(given),
    }
    shape = int(model_is["num_key_value_heads"]), d
    done = Checkpoint(checkpoint, model_is, settings)
    done.load(shape, kept)
    for layer, count in kept.items():
        if count == d:
            done.masks[layer] = torch.zeros(shape, dtype=torch.bool, device="cpu")
    todo = [layer for layer in cache.prunable_layers if layer not in done.masks]
    deadline = float("inf") if limit is None else began + limit
    with progress_bar(progress, sum(steps) * len(todo), "steps") as show, evaluated(model):
        cut_short = _learn(model, pieces, todo, kept, done, steps, seed, deadline, show)
    if cut_short:
        warn(
            f"time_limit={limit:g} cut {len(cut_short)} of {len(kept)} layers short; their masks are worse than they "
            "could be: give more time, or fewer steps",
        )
    masks = [ChannelMask((cut_short | done.masks)[layer]).counted() for layer in cache.prunable_layers]
    return ChannelMask.stack(masks, model_is)


def _learn(
    model: PreTrainedModel,
    pieces: Sequence[ObservedWindow],
    todo: Sequence[int],
    kept: Mapping[int, int],
    done: Checkpoint,
    steps: tuple[int, int],
    seed: int,
    deadline: float,
    show: Callable[[str, int], None],
) -> dict[int, Tensor]:
    """Learn layer after layer into the checkpoint; return the masks of those that the deadline cut short."""
    cut_short: dict[int, Tensor] = {}
    at_once = _layers_at_once(model, pieces)
    recent, sinks = done.settings["recent_window"], done.settings["sink_tokens"]
    taken = 0
    readings: dict[int, LayerObservation] = {}
    for place, layer in enumerate(todo):
        if layer not in readings:
            show("reading", taken)
            # Not as inference tensors, with which no gradient could ever be computed.
            with torch.inference_mode(False), torch.no_grad():
                readings = observe(model, pieces, todo[place : place + at_once], recent, sinks)
        with torch.inference_mode(False), torch.no_grad():
            sample = readings.pop(layer).sample()

        def advance(place: int = place, layer: int = layer) -> None:
            nonlocal taken
            taken += 1
            show(f"learning layer {layer}, {place + 1} of {len(todo)}", taken)

        now = time.monotonic()
        with torch.inference_mode(False), torch.enable_grad(), without_autocast(sample.keys):
            found = learn_layer(
                sample,
                kept[layer],
                steps,
                torch.Generator().manual_seed(seed % 2**63),  # its own, whichever layers were learned before
                now + (deadline - now) / (len(todo) - place),
                advance,
            )
        if found.steps < sum(steps):
            cut_short[layer], taken = found.pruned.cpu(), sum(steps) * (place + 1)
        else:
            done.add(layer, found.pruned)
    return cut_short


def _layers_at_once(model: PreTrainedModel, pieces: Sequence[ObservedWindow]) -> int:
    """Return of how many layers the readings fit into `HELD_BYTES`; at least one."""
    model_is, config = fingerprint(model.config), model.config.get_text_config(decoder=True)
    longest = max(piece.ids.shape[1] for piece in pieces)
    keys = 2 * longest * int(model_is["num_key_value_heads"])
    queries = len(pieces[0].positions) * int(config.num_attention_heads)
    return max(1, HELD_BYTES // (4 * len(pieces) * (keys + queries) * int(model_is["head_dim"])))


def _windows(texts: Sequence[Tensor], counts: Mapping[str, int], dense: int, seed: int) -> list[ObservedWindow]:
    """Cut the texts, and refuse too little of them."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    if counts["tokens"] <= dense:
        raise OptionError(
            f"tokens={counts['tokens']}: {dense} tokens that a query sees stay dense (recent_window and sink_tokens), "
            f"so nothing would be pruned in a window; give at least {dense + FEWEST_QUERIES}"
        )
    pieces = cut(texts, counts["tokens"], counts["windows"], counts["queries"], dense, generator)
    seen = sum(piece.ids.shape[1] - dense for piece in pieces)
    if seen < FEWEST_QUERIES:
        raise CalibrationError(
            f"in the texts, {seen} queries see a token that is not dense, besides the first {dense} of every window; "
            f"at least {FEWEST_QUERIES} are needed, and some thousand are better: give longer texts"
        )
    return pieces


def _kept(kept: int, d: int, multiple: int) -> int:
    """Return the largest multiple up to `kept`."""
    if d % multiple:
        raise ProblemError(f"multiple={multiple} does not divide the heads' {d} channels; give one that does")
    if kept < multiple:
        reason = f"multiple={multiple}: the" if multiple > 1 else "the"
        instead = ", or a smaller multiple" if multiple > 1 else ""
        none = ", which is no multiple" if kept else ""
        raise ProblemError(
            f"{reason} ratio leaves {kept} of {d} channels{none}; give a ratio of at most {(d - multiple) / d:.3g}"
            f"{instead}"
        )
    return kept - kept % multiple


def _steps(steps: Any) -> tuple[int, int]:
    given = tuple(steps) if isinstance(steps, Sequence) and not isinstance(steps, str) else ()
    if len(given) != len(STEPS):
        raise OptionError(f"steps={steps!r}: give two numbers, for both stages, for instance {STEPS}")
    first = integer("steps[0]", given[0], at_least=1)
    second = integer("steps[1]", given[1], at_least=0)
    return first, second
