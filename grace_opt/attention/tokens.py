r"""Tokens as vertices: which cached tokens to drop so that the outputs of observed queries change least.

Maths: query q has attention probabilities :math:`p_q`, the values are V, and its output is :math:`o_q = \sum_i p_{qi}
v_i`. With :math:`z_{qi} = p_{qi} (v_i - o_q)`, dropping the tokens S and renormalising what is left changes the output
by

.. math:: o_q' - o_q = -\frac{\sum_{i \in S} z_{qi}}{1 - \sum_{i \in S} p_{qi}},

and to first order by the numerator alone. Summed over queries with weights :math:`w_q`, the square of that is
:math:`f(S) = 1_S^\top W 1_S` with

.. math:: W = \sum_q w_q\, (p_q p_q^\top) \circ (V - 1 o_q^\top) (V - 1 o_q^\top)^\top,

the problem that GRACE (arXiv 2604.16983) solves for channels, with tokens as vertices. W would have T² entries; here it
stays in its factors p, V and o. The greedy order is that of `mies`, a block of vertices at a time.

When: `grace_opt.hf.GraphEviction` asks for the order; the benchmarks form W of short prompts to bound f.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ProblemError
from ..kernels.solve.greedy import greedy_order

#: Least share of a query's attention that is left by assumption: what it sees beside that may be rounding.
LEAST_LEFT = 1e-6
#: Number of tokens among which a block is chosen, for each token of the block.
SHORTLIST = 2


class TokenGraph(NamedTuple):
    """W of some heads' tokens, in factors.

    Attributes
    ----------
    attention : Tensor
        ``(B, R, T)``: probabilities of R observed queries over T tokens; zero where a query sees nothing.
    outputs : Tensor
        ``(B, R, d_v)``: attention times values.
    values : Tensor
        ``(B, T, d_v)``.
    weights : Tensor
        ``(R,)``, or of each head ``(B, R)``: how much each query counts, at least 0.
    """

    attention: Tensor
    outputs: Tensor
    values: Tensor
    weights: Tensor

    @classmethod
    def of(cls, attention: Tensor, values: Tensor, weights: Tensor | None = None) -> TokenGraph:
        """Return the graph of attention and values; without weights, all queries count alike.

        Raises
        ------
        ProblemError
            If the shapes do not fit.

        Examples
        --------
        >>> graph = TokenGraph.of(torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[1.0], [3.0], [3.0]]]))
        >>> graph.outputs.tolist(), graph.weights.tolist()
        ([[[2.0]]], [1.0])
        """
        if attention.ndim != 3 or values.ndim != 3 or attention.shape[::2] != values.shape[:2]:
            raise ProblemError(
                f"attention has shape {tuple(attention.shape)}, values {tuple(values.shape)}: expected (B, R, T) and "
                "(B, T, d_v)."
            )
        queries = attention.shape[1]
        if weights is None:
            weights = torch.full((queries,), 1 / max(queries, 1), dtype=attention.dtype, device=attention.device)
        if weights.shape != (queries,):
            raise ProblemError(f"weights has shape {tuple(weights.shape)}: expected ({queries},), one for each query.")
        return cls(attention, attention @ values, values, weights)


def formed(graph: TokenGraph) -> Tensor:
    """Return W itself, ``(B, T, T)``, for few tokens: it takes O(T²) memory and O(T² R) operations per head.

    Examples
    --------
    >>> graph = TokenGraph.of(torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[1.0], [3.0], [3.0]]]))
    >>> formed(graph)[0, 0].tolist()  # the tokens that pull the output down, and the two that pull it up
    [0.25, -0.125, -0.125]
    """
    p, o, v, w = graph
    weighted = w[..., None] * p
    crossed = (weighted * (o @ v.mT)).mT @ p
    squares = o.square().sum(-1, keepdim=True)
    return (weighted.mT @ p) * (v @ v.mT) - crossed - crossed.mT + (weighted * squares).mT @ p


def output_change(graph: TokenGraph, dropped: Tensor, renormalise: bool = False) -> Tensor:
    """Return how much dropping tokens changes the outputs: the weighted sum of squared differences, ``(B,)``.

    Parameters
    ----------
    graph : TokenGraph
    dropped : Tensor
        ``(B, T)`` bool.
    renormalise : bool
        False: to first order, which is f. True: exactly, with the other tokens' probabilities scaled up.
    """
    lost = graph.attention * dropped[:, None]
    share = lost.sum(-1, keepdim=True)
    change = lost @ graph.values - share * graph.outputs
    if renormalise:
        change = change / (1 - share).clamp(min=LEAST_LEFT)
    return change.square().sum(-1) @ graph.weights


@torch.no_grad()
def own_losses(graph: TokenGraph, renormalise: bool = True) -> Tensor:
    """Return what the loss of each token alone does to the outputs, ``(B, T)``: to first order, the diagonal of W.

    Parameters
    ----------
    graph : TokenGraph
    renormalise : bool
        As in `output_change`.

    Notes
    -----
    O(T R d_v) operations a head, in a product of matrices; memory for a few times the attention.

    Examples
    --------
    >>> graph = TokenGraph.of(torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[1.0], [3.0], [3.0]]]))
    >>> own_losses(graph, renormalise=False)
    tensor([[0.2500, 0.0625, 0.0625]])
    """
    p, o, v, w = graph
    centre = v.mean(1, keepdim=True)  # small differences of large values lose less to rounding
    squares = torch.cdist(v, centre, compute_mode="donot_use_mm_for_euclid_dist").square_().mT
    moved = o - centre
    squares = torch.baddbmm(squares, moved, v.mT, alpha=-2).add_((moved * (o + centre)).sum(-1, keepdim=True))
    if not renormalise:
        return (w[..., None, :] @ (p.square() * squares))[..., 0, :]
    left = (1 - p).clamp_(min=LEAST_LEFT)
    weight, (largest, top) = (p / left).square_(), p.max(dim=-1)
    weight.scatter_(-1, top[..., None], 0)  # as in `_losses`
    found = (w[..., None, :] @ weight.mul_(squares))[..., 0, :]
    moved = (_rows(v, top) - o) * (largest / left.gather(-1, top[..., None])[..., 0])[..., None]
    return found.scatter_add_(-1, top, w * moved.square().sum(-1))


@torch.no_grad()
def drop_order(
    graph: TokenGraph, count: int, candidates: Tensor, block: int | float = 1, renormalise: bool = True
) -> Tensor:
    """Return the order in which greedy drops tokens: each time those that add least to the error.

    Each round computes what the loss of each token would add to the error of the drops before, takes the cheapest
    tokens, `SHORTLIST` times as many as are to be dropped, and chooses among them by `mies` on their own W. One at a
    time, and without renormalisation, this is `mies` on `formed`.

    Parameters
    ----------
    graph : TokenGraph
    count : int
        Number of tokens to drop.
    candidates : Tensor
        ``(T,)`` bool: tokens that may be dropped, in every head.
    block : int or float
        Number of tokens to drop in a round, or a share of the candidates that are left; at least one.
    renormalise : bool
        Whether the error is that of the renormalised outputs, or that to first order. The former is exact for each
        token alone; within a block, probabilities are scaled up by what the blocks before have left.

    Returns
    -------
    Tensor
        ``(B, candidates)`` int64: all candidates, first the `count` dropped ones in their order, then the others, the
        cheapest first. Ties go to the lowest index.

    Raises
    ------
    ProblemError
        If there are fewer candidates than `count`.

    Notes
    -----
    O(T R d_v + m² R) operations a round and head, m the size of the shortlist, in products of matrices; memory for a
    few times the attention.

    Examples
    --------
    >>> graph = TokenGraph.of(torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[1.0], [3.0], [2.0]]]))
    >>> drop_order(graph, 1, torch.tensor([True, True, True])).tolist()  # that value is nearest to the output
    [[2, 1, 0]]
    """
    p, o, v, w = graph
    if not 0 <= count <= int(candidates.sum()):
        raise ProblemError(f"count={count}: there are {int(candidates.sum())} tokens to drop from.")
    centre = v.mean(1, keepdim=True)  # W only knows differences of values: small numbers lose less to rounding
    places, dropped = candidates.nonzero()[:, 0], list[Tensor]()
    if bool(candidates[: len(places)].all()):  # the first ones, as with a window: nothing to look up
        p, v = p[..., : len(places)], v[:, : len(places)]
    else:
        p, v = p[..., places], v[:, places]
    v, o, left = v - centre, o - centre, places.expand(len(p), -1)
    p = p.mT.contiguous()
    lost, change = torch.zeros_like(o[..., 0]), torch.zeros_like(o)
    while left.shape[1]:
        losses = _losses(p, o, v, w, lost, change, renormalise)
        if not count:
            return torch.cat([*dropped, left.gather(-1, losses.argsort(dim=-1, stable=True))], dim=-1)
        some = min(block if isinstance(block, int) else max(int(block * left.shape[1]), 1), count)
        scale = w / (1 - lost).clamp(min=LEAST_LEFT).square() if renormalise else w
        taken = _taken(p, o, v, scale, losses, some)
        dropped.append(left.gather(-1, taken))
        attention, count = _rows(p, taken).mT, count - some
        share = attention.sum(-1)
        change, lost = change + attention @ _rows(v, taken) - share[..., None] * o, lost + share
        kept = torch.ones_like(left, dtype=torch.bool).scatter_(-1, taken, False)
        kept = kept.nonzero()[:, 1].view(len(p), -1)
        left, p, v = left.gather(-1, kept), _rows(p, kept), _rows(v, kept)
    return torch.cat([*dropped, left], dim=-1)


def _taken(p: Tensor, o: Tensor, v: Tensor, w: Tensor, losses: Tensor, count: int) -> Tensor:
    """Return the tokens that greedy takes from the cheapest, ``(B, count)``, in its order."""
    ranked = losses.argsort(dim=-1, stable=True)
    if count == 1:
        return ranked[:, :1]
    listed = ranked[:, : SHORTLIST * count].sort(dim=-1).values
    W = formed(TokenGraph(_rows(p, listed).mT, o, _rows(v, listed), w))
    every, counts = torch.ones_like(listed, dtype=torch.bool), torch.full_like(listed[:, 0], count)
    return listed.gather(-1, greedy_order(W, losses.gather(-1, listed), every, counts, count).order)


def _losses(p: Tensor, o: Tensor, v: Tensor, w: Tensor, lost: Tensor, change: Tensor, renormalise: bool) -> Tensor:
    """Return what each token's loss would add to the error, ``(B, T)``.

    Parameters
    ----------
    p, o, v, w : Tensor
        Attention ``(B, T, R)`` to the tokens that are left, outputs before any loss, values, weights of queries.
    lost, change : Tensor
        ``(B, R)`` and ``(B, R, d_v)``: attention to the tokens dropped so far, and the sum of their z.
    renormalise : bool
    """
    left, size = (1 - lost).clamp(min=LEAST_LEFT), change.square().sum(-1, keepdim=True)
    largest, top = p.max(dim=1)
    if renormalise:
        weight = (left[:, None] - p).clamp_(min=LEAST_LEFT).square_().reciprocal_().mul_(w)
        weight.scatter_(1, top[:, None], 0)
        common = (weight @ size)[..., 0] - ((size[..., 0] / left.square()) @ w)[:, None]
        weight *= p
    else:
        common, weight = torch.zeros_like(left[:, :1]), p * w
    # |c + z|² = |c|² + 2 c·z + |z|² with z = p (v - o): each term is a product of matrices, and W is never there.
    linear = weight @ torch.cat([change, (change * o).sum(-1, keepdim=True)], dim=-1)
    weight *= p
    squares = o.square().sum(-1, keepdim=True)
    square = weight @ torch.cat([o, squares, torch.ones_like(squares)], dim=-1)
    found = ((v * square[..., -1:] + 2 * (linear[..., :-1] - square[..., :-2])) * v).sum(-1)
    found += square[..., -2] - 2 * linear[..., -1] + common
    if renormalise:
        # A token with nearly all of a query's attention is nearly its output: the terms above would cancel, and what
        # is left be divided by a tiny number. Only one token of each query can be such: its z comes from a difference.
        moved = change + largest[..., None] * (_rows(v, top) - o)
        moved = moved / (left - largest).clamp(min=LEAST_LEFT)[..., None]
        found.scatter_add_(-1, top, w * moved.square().sum(-1))
    return found


def _rows(v: Tensor, index: Tensor) -> Tensor:
    return v[torch.arange(len(v), device=v.device)[:, None], index]
