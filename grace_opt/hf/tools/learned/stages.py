"""The two stages of learning one layer's mask: gates under a penalty, and a hard mask that is refined.

When: `grace_opt.hf.tools.learned.learn_masks` has a layer's sample. Source: LeanK (arXiv 2508.02215), whose stages
these are; here the price of the penalty is steered to the budget, and the best of the hard masks counts. A layer's
gates are a few hundred numbers, learned where accelerate has the layer compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import LayerSample, output_error

#: Windows of one step, and queries of each.
BATCH, ASKED = 4, 32
#: First price of an open gate, and by how much it grows per step and share that is open too much.
PRICE, STEER = 0.01, 0.2
#: Adam's steps: of gates in the first stage, of scores in the second.
GATE_STEP, SCORE_STEP = 0.04, 0.02
#: Refined masks are compared on all windows every so many steps.
COMPARED_EVERY = 15
#: Weight of a channel's size where gates are equal.
TIE = 1e-3


@dataclass(frozen=True)
class Learned:
    """A layer's mask.

    Attributes
    ----------
    pruned : Tensor (H, d), bool
    error : float
        `output_error` on all windows.
    steps : int
        How many were taken.
    """

    pruned: Tensor
    error: float
    steps: int


def learn_layer(
    sample: LayerSample,
    kept: int,
    steps: tuple[int, int],
    generator: torch.Generator,
    deadline: float = float("inf"),
    advance: Callable[[], None] = lambda: None,
) -> Learned:
    """Learn which channels of every head to keep.

    Parameters
    ----------
    sample : LayerSample
    kept : int
        Number of channels that every head keeps.
    steps : (int, int)
        Of both stages.
    generator : Generator
        Chooses the windows and queries of each step.
    deadline : float
        `time.monotonic()` at which to harden what has been learned.
    advance : callable
        Called after every step.
    """
    gates, first = _gates(sample, kept / sample.keys.shape[-1], steps[0], generator, deadline, advance)
    return _refined(sample, gates, kept, steps[1], first, generator, deadline, advance)


def hardened(scores: Tensor, kept: int) -> Tensor:
    """Return 1 at the `kept` largest scores of every head, else 0; ties go to the lowest channel."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores).scatter_(-1, order[..., :kept], 1.0)


def mean_error(sample: LayerSample, gates: Tensor) -> float:
    """Return `output_error` on all windows, a few at a time."""
    parts = torch.split(torch.arange(len(sample), device=sample.keys.device), BATCH)
    with torch.no_grad():
        return sum(float(output_error(sample.of(part), gates)) * len(part) for part in parts) / len(sample)


def _gates(
    sample: LayerSample,
    share: float,
    steps: int,
    generator: torch.Generator,
    deadline: float,
    advance: Callable[[], None],
) -> tuple[Tensor, int]:
    """Lower gates from 1 where the output is least sensitive, until each head has `share` open."""
    heads, d = sample.keys.shape[1], sample.keys.shape[-1]
    gates = torch.ones(heads, d, dtype=torch.float32, device=sample.keys.device, requires_grad=True)
    price = torch.full((heads,), PRICE, dtype=torch.float32, device=gates.device)
    optimizer = torch.optim.Adam([gates], lr=GATE_STEP)
    for step in range(steps):
        if time.monotonic() > deadline:
            return gates.detach(), step
        (gates.grad,) = torch.autograd.grad(
            output_error(_batch(sample, generator), gates) + (price * gates.mean(-1)).sum(), [gates]
        )
        optimizer.param_groups[0]["lr"] = GATE_STEP * (1 - step / steps)
        optimizer.step()
        with torch.no_grad():
            gates.clamp_(0.0, 1.0)
            price *= (STEER * (gates.mean(-1) - share)).exp()
        advance()
    return gates.detach(), steps


def _refined(
    sample: LayerSample,
    gates: Tensor,
    kept: int,
    steps: int,
    before: int,
    generator: torch.Generator,
    deadline: float,
    advance: Callable[[], None],
) -> Learned:
    """Exchange channels of the hard mask by straight-through gradients of their scores; the best mask counts."""
    scores = (gates + TIE * _size(sample)).requires_grad_()
    best = hardened(scores.detach(), kept)
    least, done = mean_error(sample, best), 0
    optimizer = torch.optim.Adam([scores], lr=SCORE_STEP)
    for step in range(steps):
        if time.monotonic() > deadline:
            break
        mask = hardened(scores.detach(), kept)
        through = mask + scores - scores.detach()  # the mask's value, the scores' gradient
        (scores.grad,) = torch.autograd.grad(output_error(_batch(sample, generator), through), [scores])
        optimizer.param_groups[0]["lr"] = SCORE_STEP * (1 - step / steps)
        optimizer.step()
        done = step + 1
        if done % COMPARED_EVERY == 0 or done == steps:
            now = hardened(scores.detach(), kept)
            if not torch.equal(now, best) and (error := mean_error(sample, now)) < least:
                best, least = now, error
        advance()
    return Learned(best == 0, least, before + done)


def _size(sample: LayerSample) -> Tensor:
    """Return the mean squares of queries times those of keys ``(H, d)``, as THINK ranks channels; the largest is 1."""
    queries, keys = (part.square().mean((0, 2)) for part in (sample.queries, sample.keys))
    return queries * keys / (queries * keys).amax(-1, keepdim=True).clamp(min=torch.finfo(keys.dtype).tiny)


def _batch(sample: LayerSample, generator: torch.Generator) -> LayerSample:
    windows, asked = (
        torch.randperm(count, generator=generator, device="cpu")[:most].to(sample.keys.device)
        for count, most in zip(sample.visible.shape[:2], (BATCH, ASKED), strict=True)
    )
    return sample.of(windows, asked)
