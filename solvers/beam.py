r"""Beam search: MIES with the `width` best partial sets kept at every step instead of one, and with lookahead.

Maths: every kept set S is extended by every vertex j, at :math:`f(S) + W_{jj} + 2 (W 1_S)_j`; sets reached in several
orders count once. The `width` best are kept. Without lookahead they are ranked by f. With ``lookahead``, the
``width · lookahead`` best by f are completed greedily to k vertices and ranked by f of the completion; the best
completion seen is remembered (the pilot method). Complexity per instance: O(k · width · n log(width · n)); lookahead
adds O(k² n · width · lookahead / 2). Guarantee: never worse than MIES, which is beam search with width 1. Good where
MIES and local search fall a little short and no proof is needed. Reference: Lowerre, The HARPY speech recognition
system (1976), for the beam; Duin & Voss, The pilot method, Networks 34 (1999), for the lookahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grace_opt.kernels.solve.completion import completions
from grace_opt.kernels.solve.greedy import first_scores, greedy_order
from grace_opt.objective import evaluate, mask_from_indices
from grace_opt.problem import Problem
from grace_opt.registry import check_fields, integer, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult

#: Approximate seconds that a completion takes per vertex it looks at.
SECONDS_PER_SCORE = 1e-9
#: Approximate number of bytes for partial sets; larger batches are split.
MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class BeamOptions:
    """Options of `beam`.

    Attributes
    ----------
    width : int
        Number of partial sets kept per step. 1 without lookahead is MIES.
    lookahead : int
        Complete the best ``width * lookahead`` extensions greedily, and keep those with the best completions; 0: rank
        by f alone.
    """

    width: int = 16
    lookahead: int = 4

    def __post_init__(self) -> None:
        check_fields(self, integer, "width", at_least=1)
        check_fields(self, integer, "lookahead", at_least=0)


@dataclass
class _Level:
    """Partial sets of one size; dead slots, where there are fewer than `width`, have infinite f."""

    mask: Tensor  # (B, width, n) bool
    scores: Tensor  # (B, width, n), what f grows by when a vertex joins; infinite for those that must not
    f: Tensor  # (B, width) float64
    key: Tensor  # (B, width) int64, equal for equal sets


@dataclass
class _Closed:
    """Instances that target or patience ended while others of the batch continue, with the best sets they found."""

    closed: Tensor  # (B,) bool
    ended: Tensor
    ended_f: Tensor

    @classmethod
    def of(cls, ended: Tensor, ended_f: Tensor, run: Run) -> _Closed:
        closed = ~torch.tensor(run.open(), dtype=torch.bool, device=ended.device)
        return cls(closed, ended[closed], ended_f[closed])

    def restore(self, ended: Tensor, ended_f: Tensor) -> Tensor:
        """Undo what a step did to closed instances; returns which instances are closed."""
        ended[self.closed], ended_f[self.closed] = self.ended, self.ended_f
        return self.closed


@register_solver(
    "beam", options=BeamOptions, batched=True, guarantee="never worse than MIES", compiled=True, searches=True
)
def beam(problem: Problem, options: BeamOptions, run: Run) -> SolverResult:
    """Greedy with several partial sets at once, ranked by f or by f of their greedy completions."""
    pool = options.width * max(1, options.lookahead)
    share = max(1, MAX_BYTES // (64 * problem.n * (options.width + pool)))
    size = problem.W.shape[0]
    parts = [
        _search(problem.W[at], problem.candidates[at], problem.k[at], options, run.instances(range(size)[at]))
        for at in (slice(b, b + share) for b in range(0, size, share))
    ]
    mask, limit = (torch.cat(tensors) for tensors in zip(*(part[:2] for part in parts), strict=True))
    return SolverResult(mask, limit=limit, stats={"iterations": sum(part[2] for part in parts)})


def _search(W: Tensor, candidates: Tensor, k: Tensor, options: BeamOptions, run: Run) -> tuple[Tensor, Tensor, int]:
    """The chosen masks, the instances that the clock cut short, and the number of steps."""
    size, n = candidates.shape
    k_max = int(k.max())
    scores = first_scores(W, candidates)
    answer = greedy_order(W, None, candidates, k, k_max).mask  # MIES: the answer unless the search beats it
    run.ctrl_c_stops()
    if run.watches:
        run.note(evaluate(W, answer).tolist())
        run.begin()
    # Sums of random keys identify sets, whatever the order; a collision only makes the beam a little narrower.
    random = torch.Generator("cpu").manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=random, device="cpu").to(W.device)
    level = _Level(
        torch.zeros(size, 1, n, dtype=torch.bool, device=W.device),
        scores.unsqueeze(1),
        torch.zeros(size, 1, dtype=torch.float64, device=W.device),
        torch.zeros(size, 1, dtype=torch.int64, device=W.device),
    )
    # The best set that the search itself found.
    ended, ended_f = answer.clone(), W.new_full((size,), torch.inf, dtype=torch.float64)
    limit = torch.zeros_like(k, dtype=torch.bool)
    for step in range(1, k_max + 1):
        most = (k_max - step) * n * size * options.width * options.lookahead
        if not run.has_time(SECONDS_PER_SCORE * most):
            limit, step = limit | (k >= step), step - 1
            break
        before = _Closed.of(ended, ended_f, run) if run.watches else None
        level = _extended(W, level, keys, options.width * max(1, options.lookahead))
        if options.lookahead:
            level = _looked_ahead(W, level, k - step, k_max - step, options.width, ended, ended_f)
        arrived = (step == k) & (level.f[:, 0] < ended_f)
        ended[arrived], ended_f[arrived] = level.mask[arrived, 0], level.f[arrived, 0]
        if before is not None:
            limit |= before.restore(ended, ended_f) & (k >= step)
            run.note(evaluate(W, ended).tolist())
    else:
        step = k_max
    better = evaluate(W, ended) < evaluate(W, answer)  # exact sums; f during the search was rounded
    return torch.where(better.unsqueeze(-1), ended, answer), limit, step


def _extended(W: Tensor, level: _Level, keys: Tensor, count: int) -> _Level:
    """The `count` best distinct sets with one vertex more, by f; ties to the better parent, then the lowest index."""
    size, width, n = level.scores.shape
    # Relative to the best parent: adding all of f would round away differences between scores.
    base = level.f.amin(-1, keepdim=True)
    base = torch.where(base.isfinite(), base, 0.0)
    total, place = ((level.f - base).unsqueeze(-1) + level.scores).flatten(1).sort(dim=-1, stable=True)
    # A set has at most `width` parents, so this many of the best contain `count` distinct ones, if they exist.
    total, place = total[:, : count * width], place[:, : count * width]
    parent, vertex = place // n, place % n
    key = level.key.gather(1, parent) + keys[vertex]
    if width > 1:
        same, order = key.sort(dim=-1, stable=True)
        repeated = torch.zeros_like(same, dtype=torch.bool)
        repeated[:, 1:] = same[:, 1:] == same[:, :-1]
        repeated = torch.zeros_like(repeated).scatter_(-1, order, repeated)
        total, first = total.masked_fill_(repeated, torch.inf).sort(dim=-1, stable=True)
        parent, vertex, key = (t.gather(1, first[:, :count]) for t in (parent, vertex, key))
    else:
        parent, vertex, key = (t[:, :count] for t in (parent, vertex, key))
    total = total[:, :count]
    row = torch.arange(size, device=W.device).unsqueeze(-1)
    at = vertex.unsqueeze(-1)
    rise = level.scores[row, parent, vertex].to(torch.float64)
    f = torch.where(total.isfinite(), level.f.gather(1, parent) + rise, torch.inf)
    scores = level.scores[row, parent].add_(W[row, vertex], alpha=2).scatter_(-1, at, torch.inf)
    return _Level(level.mask[row, parent].scatter_(-1, at, True), scores, f, key)


def _looked_ahead(
    W: Tensor, level: _Level, missing: Tensor, most: int, width: int, ended: Tensor, ended_f: Tensor
) -> _Level:
    """The `width` sets of `level` with the best greedy completions; updates `ended`, `ended_f` with the best of all."""
    size, count, n = level.scores.shape
    owner = torch.arange(size, device=W.device).repeat_interleave(count)
    need = missing.clamp_min(0).repeat_interleave(count)
    order, cost = completions(W, owner, level.scores.flatten(0, 1), need, most)
    total, rank = (level.f + cost.reshape(size, count)).sort(dim=-1, stable=True)
    row = torch.arange(size, device=W.device)
    first = rank[:, 0]
    better = (missing >= 0) & (total[:, 0] < ended_f)
    full = level.mask[row, first] | mask_from_indices(order.reshape(size, count, most)[row, first], n)
    ended[better], ended_f[better] = full[better], total[better, 0]
    row, rank = row.unsqueeze(-1), rank[:, :width]
    return _Level(level.mask[row, rank], level.scores[row, rank], level.f[row, rank], level.key[row, rank])
