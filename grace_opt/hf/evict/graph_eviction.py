"""`GraphEviction`: tokens as vertices. Drop those without which outputs change least, together.

SnapKV and H2O score each token on its own, by attention. This one also reads the values, and drops tokens greedily:
each time those that add least to the error of the drops before (`grace_opt.attention.tokens`).

When: quality at a given budget matters more than the milliseconds that it takes (docs/results/evictions.md has both).
Source: the problem and the greedy method of GRACE (arXiv 2604.16983), there for channels.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..._util.arrays import working_dtype
from ..._util.parameters import check_fields, flag, integer, plain
from ...attention.tokens import TokenGraph, drop_order, own_losses
from ...errors import OptionError, ProblemError
from ..models.arguments import explains_arguments
from .received import attention_weights, last_queries, queries_at_once
from .token_budget import OTHER_NAMES, WindowedBudget

#: Largest number of attention weights at once: 128 MiB in float32, plus a few temporaries of that size.
MAX_WEIGHTS = 2**25
#: Share of the weight that the queries of the whole prompt have beside the last ones.
WHOLE = 2 / 3


@explains_arguments(OTHER_NAMES)
@dataclass(frozen=True)
class GraphEviction(WindowedBudget):
    """Drop the tokens without which the outputs of observed queries change least, together.

    Observed are the last queries, and those of the whole prompt, which count twice as much: what follows asks as the
    last ones do, and as the others did before. Of each of the two, the attention of consecutive queries is averaged.

    Attributes
    ----------
    budget : int or float
        Number of tokens that each KV head keeps, the window included; or a share of the prompt's, as in `SnapKV`.
    window : int or None
        Number of last tokens that are always kept; None for half of the budget, as what comes next asks for the last
        tokens far more than the observed queries, which come before many of them, say.
    observed : int
        Number of last queries that are observed.
    stride : int
        Every how many queries one of the whole prompt is observed: 1 for all, 0 for none. With 0, only the last
        queries are needed.
    averages : int
        Number of averages into which the last queries go, and those of the whole prompt.
    block : int, float or None
        Number of tokens dropped at a time, or a share of those that are left; 1 is the exact greedy order, and slow.
        None is fast: each token by what its own loss changes.
    renormalise : bool
        Whether the error is that of the renormalised outputs, or that to first order: f of W.

    Examples
    --------
    >>> GraphEviction(budget=0.25).tokens(layer=0, layers=2, length=500)
    125
    """

    window: int | None = None
    observed: int = 256
    stride: int = 1
    averages: int = 64
    block: int | float | None = 0.2
    renormalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, integer, "stride", at_least=0)
        check_fields(self, integer, "observed", at_least=0 if self.stride else 1)
        check_fields(self, integer, "averages", at_least=1)
        check_fields(self, flag, "renormalise")
        if self.block is not None:
            object.__setattr__(self, "block", _checked_block(self.block))

    @property
    def queries_needed(self) -> int | None:
        """Return None, all, if queries of the whole prompt are observed."""
        return None if self.stride else self.observed

    def scores(
        self,
        queries: Tensor,
        keys: Tensor,
        valid: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        *,
        values: Tensor | None = None,
    ) -> Tensor:
        """See `TokenEviction.scores`: a token's place in the order of drops, or its loss as a share of the largest.

        Parameters
        ----------
        values : Tensor (B, H, S, d_v)
            All values of the prompt.

        Raises
        ------
        ProblemError
            If there are no values, or the shapes do not fit.
        """
        queries = last_queries(queries, keys, valid, self.queries_needed)
        if values is None or values.shape[:3] != keys.shape[:3]:
            raise ProblemError(
                f"values {'missing' if values is None else f'of shape {tuple(values.shape)}'}: GraphEviction reads the "
                f"prompt's values, {(*keys.shape[:3], 'd_v')}; give values="
            )
        found = torch.full(keys.shape[:3], -torch.inf, dtype=torch.float32, device=keys.device)
        kept, recent = self.count(keys.shape[2]), self.recent(keys.shape[2])
        for row in range(len(keys)):  # a padded row is scored as it would be alone
            padding = 0 if valid is None else int((~valid[row]).sum())
            real = keys.shape[2] - padding
            if real:
                own = queries[row, :, -min(queries.shape[2], real) :]
                parts = (own, keys[row, :, padding:], values[row, :, padding:])
                found[row, :, padding:] = self._scores_of_row(*parts, scaling, softcap, kept, recent)
        return found

    def graph(
        self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None = None
    ) -> TokenGraph:
        """Return W of one sequence's tokens, in factors, as the observed queries make it.

        Parameters
        ----------
        queries : Tensor (H_q, L, d)
            Its last queries, as many as are needed.
        keys, values : Tensor (H, S, d) and (H, S, d_v)
            All of its keys and values.
        scaling, softcap
            As in `scores`.
        """
        heads, length, _ = keys.shape
        dtype = working_dtype(keys.dtype)
        grouped, keys = queries.detach().reshape(heads, -1, *queries.shape[1:]).to(dtype), keys.detach().to(dtype)
        first, device = length - grouped.shape[2], keys.device
        last = torch.arange(length - min(self.observed, length), length, device=device)
        whole = last[:0]
        if self.stride:  # the last one is always among them
            whole = torch.arange((length - 1) % self.stride, length, self.stride, device=device)
        attention, weights = [], []
        for places, share in ((last, 1 - WHOLE), (whole, WHOLE)):
            if len(places):
                means = _means(grouped[:, :, places - first], keys, places, self.averages, scaling, softcap)
                attention.append(means.flatten(1, 2))
                weights.append(torch.full_like(attention[-1][0, :, 0], share / attention[-1].shape[1]))
        every = torch.cat(weights)
        return TokenGraph.of(torch.cat(attention, dim=1), values.detach().to(dtype), every / every.sum())

    def _scores_of_row(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        softcap: float | None,
        kept: int,
        recent: int,
    ) -> Tensor:
        """Score the tokens of one sequence, (H, S), of which `kept` are to stay, the `recent` last ones among them."""
        heads, length, _ = keys.shape
        group = queries.shape[0] // heads
        scores = torch.full((heads, length), torch.inf, dtype=torch.float32, device=keys.device)
        older = max(length - recent, 0)
        candidates = torch.arange(length, device=keys.device) < older
        dropped = max(length - max(kept, recent), 0)
        step = max(MAX_WEIGHTS // (group * (2 * self.averages) * length), 1)
        for first in range(0, heads, step):
            some = slice(first, first + step)
            graph = self.graph(queries[group * first :][: group * step], keys[some], values[some], scaling, softcap)
            if self.block is None:
                losses = own_losses(graph, self.renormalise)
                losses = losses.nan_to_num(nan=torch.finfo(losses.dtype).max)  # such a token is kept
                losses /= losses.amax(-1, keepdim=True).clamp(min=torch.finfo(losses.dtype).tiny)
                scores[some, :older] = losses[:, :older]
                continue
            order = drop_order(graph, dropped, candidates, self.block, self.renormalise)
            place = torch.arange(order.shape[1], device=keys.device, dtype=scores.dtype)
            scores[some].scatter_(-1, order, place.expand_as(order))
        return scores


def _means(queries: Tensor, keys: Tensor, places: Tensor, count: int, scaling: float, softcap: float | None) -> Tensor:
    """Return the attention of queries at ascending places, averaged over `count` runs of them: (H, group, count, S)."""
    (heads, group, number, _), length = queries.shape, keys.shape[1]
    count = min(count, number)
    run = ((torch.arange(number, device=keys.device) + 1) * count - 1) // number  # which average each one goes into
    share = functional.one_hot(run, count).mT.to(keys.dtype)
    share /= share.sum(-1, keepdim=True)
    means = torch.zeros(heads, group, count, length, dtype=keys.dtype, device=keys.device)
    step = queries_at_once(group * length, keys.device)
    together = max(step // number, 1)  # few queries of several heads are one product
    for head, first in itertools.product(range(0, heads, together), range(0, number, step)):
        some, own = slice(first, first + step), slice(head, head + together)
        least, seen = int(places[first]) + 1, int(places[some][-1]) + 1  # nobody sees a later key
        hidden = torch.arange(least, seen, device=keys.device) > places[some, None]
        weights = attention_weights(queries[own, :, some], keys[own, :seen], hidden, scaling, softcap)
        means[own, ..., :seen] += share[:, some] @ weights
    return means


def _checked_block(block: object) -> int | float:
    given = plain(block)
    if isinstance(given, float) and 0 < given < 1:
        return given
    if isinstance(given, float):
        raise OptionError(f"block={given}: give a number of tokens, an integer, or a share between 0 and 1")
    return integer("block", block, at_least=1, hint="or a share of the tokens left, more than 0 and less than 1")
