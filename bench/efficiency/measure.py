"""Times and bytes of one prompt and the tokens after it, the caches taking turns.

A turn makes a cache, reads the prompt, and then feeds the likeliest token by hand, so that nothing of ``generate`` is
timed. The first turn of every cache warms it up and is used for peak memory alone: on a CPU that needs the profiler.

When: `bench.efficiency` runs it.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from bench.efficiency.methods import METHODS, Clock, held_bytes, missing
from grace_opt.hf import attention_implementation

#: Steps after the prompt that count for nothing: room to grow is made, kernels are chosen.
WARM_UP = 3
MEASURED, STOPPED = "measured", "stopped before it was measured"


@dataclass
class Row:
    """One cache at one size.

    Attributes
    ----------
    attention, batch, context
        Attention function, prompts at once, tokens of each.
    method, ratio
        Key of `METHODS`, and λ, or None where it makes no difference.
    status : str
        ``"measured"``, or why not.
    ttft_s, tpot_s, selection_s : list of float
        Seconds of every round: to the first token; per token after it, the median of the round's steps; of choosing
        channels, which is part of the first.
    peak_bytes, cache_bytes : int, optional
        At most allocated at once besides the weights, and held by the cache after the last token.
    """

    attention: str
    batch: int
    context: int
    method: str
    ratio: float | None
    status: str = STOPPED
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    selection_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    cache_bytes: int | None = None

    def median(self, part: str) -> float | None:
        """Of ``"ttft_s"``, ``"tpot_s"`` or ``"selection_s"``; None if it was not measured."""
        return statistics.median(values) if (values := getattr(self, part)) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values with the medians, for JSON."""
        parts = ("ttft_s", "tpot_s", "selection_s")
        return {**asdict(self), "median": {part: self.median(part) for part in parts}}


@torch.no_grad()
def turn(model: PreTrainedModel, row: Row, ids: Tensor, new_tokens: int, clock: Clock) -> None:
    """One prompt and its new tokens; adds to a row what it took.

    Parameters
    ----------
    model : PreTrainedModel
    row : Row
        Says which cache.
    ids : Tensor
        ``(batch, context)``.
    new_tokens : int
        The first of them ends the time to first token; more than `WARM_UP` + 1.
    clock : Clock
        Of the model's device.
    """
    method = METHODS[row.method]
    name = f"grace_{row.attention}" if method.ours else row.attention
    with attention_implementation(model, name):
        clock.wait()
        marks = [clock.mark()]
        made = method.make(model, row.ratio or 0.0, clock)
        with made.reading:
            logits = model(ids, past_key_values=made.cache, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        marks.append(clock.mark())
        for _ in range(new_tokens - 1):
            token = model(token, past_key_values=made.cache).logits[:, -1].argmax(-1, keepdim=True)
            marks.append(clock.mark())
        clock.wait()
    first, *steps = (clock.seconds(*pair) for pair in pairwise(marks))
    row.ttft_s.append(first)
    row.tpot_s.append(statistics.median(steps[WARM_UP:]))
    if made.selection is not None:
        row.selection_s.append(sum(clock.seconds(*span) for span in made.selection.spans))
    row.cache_bytes = held_bytes(made.cache)


def peak(run: Callable[[], None], device: str) -> int:
    """Most bytes that were allocated at once beyond those before; on a CPU by the profiler's allocation events."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its lines would tear the progress bar
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def guarded(row: Row, run: Callable[[], None]) -> None:
    """Run; what goes wrong is noted in the row, and the others go on."""
    try:
        run()
        return
    except (RuntimeError, ImportError, OSError, MemoryError) as error:
        text = str(error) or type(error).__name__
        spent = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text
        row.status = "out of memory" if spent else f"failed: {text.splitlines()[0]}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def contenders(methods: Sequence[str], ratios: Sequence[float], size: tuple[str, int, int]) -> list[Row]:
    """Empty rows of one attention, batch and context; a method that does not prune is there once, not once per λ."""
    pairs = [(name, ratio) for name in methods for ratio in (ratios if METHODS[name].prunes else [None])]
    rows = [Row(*size, name, ratio) for name, ratio in pairs]
    for row in rows:
        row.status = missing(row.method) or row.status
    return rows


def measure(
    model: PreTrainedModel,
    rows: Sequence[Row],
    *,
    new_tokens: int,
    rounds: int,
    device: str,
    advance: Callable[[str], None],
) -> None:
    """Fill in the rows of one size.

    Parameters
    ----------
    model : PreTrainedModel
    rows : sequence of Row
        As `contenders` gives them; filled in as it goes, so that what is done is not lost.
    new_tokens, rounds : int
        As in `turn`; turns that count, after one that does not.
    device : str
    advance : callable
        Told what is about to run, once per row and round.
    """
    first, clock = rows[0], Clock(device)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (first.batch, first.context), generator=generator).to(device)
    for number in range(rounds + 1):
        shift = number % len(rows)  # nobody always follows the same one
        for row in [*rows[shift:], *rows[:shift]]:
            title = METHODS[row.method].title + (f" {row.ratio:g}" if row.ratio is not None else "")
            advance(f"{title}, {f'round {number}' if number else 'warm-up'}")
            if row.status not in (MEASURED, STOPPED):
                continue
            guarded(row, partial(turn if number else _warm_up, model, row, ids, new_tokens, clock))
            if number and row.status == STOPPED:
                row.status = MEASURED


def _warm_up(model: PreTrainedModel, row: Row, ids: Tensor, new_tokens: int, clock: Clock) -> None:
    """A turn whose times are thrown away."""
    scratch = Row(row.attention, row.batch, row.context, row.method, row.ratio)
    row.peak_bytes = peak(lambda: turn(model, scratch, ids, new_tokens, clock), clock.device)
