"""Token eviction: which of a prompt's tokens each KV head keeps, before channels are pruned.

When: the cache should hold a fixed number of tokens per head, however long the prompt is; channels are then pruned on
the tokens that are left. The classes here score tokens, from queries, keys and perhaps values; `kept_tokens` chooses
by the scores, and the cache stores the result.

================  ==========================================================================================
SnapKV            attention of the last queries, pooled along the tokens (arXiv 2404.14469)
PyramidKV         the scores of SnapKV, more tokens in early layers than in late ones (arXiv 2406.02069)
H2O               accumulated attention (arXiv 2306.14048), or only that of the last queries, as in ThinK's runs
StreamingLLM      the first tokens and the last ones (arXiv 2309.17453)
GraphEviction     the tokens without which outputs change most, together (`graph_eviction`)
LayerBudgets      any of these but PyramidKV, with its budget divided among layers and heads (`layer_budgets`)
================  ==========================================================================================

Source: the papers, and ThinK (arXiv 2407.21018) for ``H2O(observed=32)``. A KV head has one score per token, the mean
over the query heads of its group, as in kvpress.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from ..._util.parameters import check_fields, choice, integer
from ...errors import OptionError
from ..models.arguments import explains_arguments
from .received import attention_received, check_valid, finished_scores
from .token_budget import OTHER_NAMES, Budget, WindowedBudget, check_fits


@runtime_checkable
class TokenEviction(Protocol):
    """Decides which tokens stay: one of the six classes of this package, or your own."""

    @property
    def queries_needed(self) -> int | None:
        """Return how many of the prompt's last queries `scores` reads; None means all, 0 none."""
        ...

    def tokens(self, layer: int, layers: int, length: int) -> int:
        """Return how many of `length` tokens each KV head keeps in layer `layer` of the `layers` that evict."""
        ...

    def scores(
        self, queries: Tensor, keys: Tensor, valid: Tensor | None, scaling: float, softcap: float | None = None
    ) -> Tensor:
        """Return scores (B, H, S), float32: the highest are kept first, +inf always; -inf is padding.

        Parameters
        ----------
        queries : Tensor (B, H_q, L, d)
            The last L queries of the prompt, after RoPE.
        keys : Tensor (B, H, S, d)
            All keys of the prompt, after RoPE.
        valid : Tensor (B, S), bool, optional
            False at padding, which is on the left.
        scaling : float
            Factor applied to the logits.
        softcap : float, optional
            Logits become ``softcap * tanh(logits / softcap)``.

        Notes
        -----
        If the method has a parameter ``values``, it gets all values of the prompt (B, H, S, d_v) by that name, as
        `GraphEviction` does.
        """
        ...


@explains_arguments(OTHER_NAMES)
@dataclass(frozen=True)
class SnapKV(Budget):
    """Keep the tokens that the last queries attend to most: attention summed, pooled over tokens, averaged per group.

    Attributes
    ----------
    budget : int or float
        Number of tokens that each KV head keeps, the window included; or a share of the prompt's tokens, padding
        counted, as a float between 0 and 1. A share never keeps fewer than the window.
    window : int
        Number of last tokens whose queries are observed, and that are always kept.
    kernel : int
        Width of the pooling, an odd number; 1 means no pooling.
    pooling : {"max", "avg"}
        How neighbouring tokens are pooled, per query head. Before the prompt's first token and in the window, pooling
        reads zeros.

    Examples
    --------
    >>> SnapKV(budget=64).tokens(layer=0, layers=2, length=500)
    64
    >>> SnapKV(budget=0.25).tokens(layer=0, layers=2, length=500)
    125
    """

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, integer, "window", "kernel", at_least=1)
        check_fits(self, "window")
        if self.kernel % 2 == 0:
            raise OptionError(f"kernel={self.kernel}: give an odd width, for instance {self.kernel + 1}.")
        check_fields(self, choice, "pooling", allowed=("max", "avg"))

    @property
    def always(self) -> int:
        """The window."""
        return self.window

    @property
    def queries_needed(self) -> int | None:
        """The window."""
        return self.window

    def scores(
        self, queries: Tensor, keys: Tensor, valid: Tensor | None, scaling: float, softcap: float | None = None
    ) -> Tensor:
        """See `TokenEviction.scores`."""
        received = attention_received(queries, keys, valid, scaling, softcap, self.window)
        older = received[..., : max(keys.shape[2] - self.window, 0)]
        if older.shape[-1]:
            rows, side = older.flatten(0, 2), self.kernel // 2  # padding received no attention: zeros, as at the edge
            if self.pooling == "max":
                rows = functional.max_pool1d(rows, self.kernel, stride=1, padding=side)
            else:
                rows = functional.avg_pool1d(rows, self.kernel, stride=1, padding=side)
            older = rows.view(older.shape)
        return finished_scores(older.mean(2), keys, valid, self.window)


@explains_arguments(OTHER_NAMES)
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with a budget that falls linearly from early to late layers, `budget` tokens on average.

    Of the m = budget - window tokens outside the window, the last layer keeps m / beta and the first 2m - m / beta. If
    the prompt has fewer, the first layer keeps all of them and the last layer more.

    Attributes
    ----------
    budget, window, kernel, pooling
        As in `SnapKV`; the budget is the mean over the layers that evict.
    beta : int
        Steepness, at least 1; 1 gives every layer the same budget.

    Notes
    -----
    The budgets are those of KVCache-Factory, without its intermediate rounding. For prompts shorter than 2m,
    KVCache-Factory makes the budget flat; this class, like kvpress, makes the slope gentler. kvpress does not add the
    window, and uses a flat budget if m / beta < window.

    Examples
    --------
    >>> [PyramidKV(budget=64, window=8, beta=4).tokens(layer, 3, 500) for layer in range(3)]
    [106, 64, 22]
    """

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, integer, "beta", at_least=1)

    def tokens(self, layer: int, layers: int, length: int) -> int:
        """Return this layer's share; all tokens if there are no more than the budget."""
        if not 0 <= layer < layers:
            raise OptionError(f"layer={layer} of layers={layers}: give 0 <= layer < layers.")
        budget = self.count(length)
        if length <= budget or layers == 1:
            return budget
        mean = budget - self.window
        most = min(2 * mean - mean / self.beta, length - self.window)
        step = 2 * (most - mean) / (layers - 1)
        return self.window + round(most - layer * step)


@explains_arguments(OTHER_NAMES)
@dataclass(frozen=True)
class H2O(WindowedBudget):
    """Keep the heavy hitters (the tokens that received most attention) and the last tokens.

    Attributes
    ----------
    budget : int or float
        Number of tokens that each KV head keeps, the window included; or a share of the prompt's, as in `SnapKV`.
    window : int or None
        Number of last tokens that are always kept; None means half of the budget, as in the H2O paper.
    observed : int or None
        Number of last queries whose attention counts, as in ThinK's code; None for all, as in the paper.

    Examples
    --------
    >>> H2O(budget=64, window=None).recent(length=500)
    32
    """

    window: int | None = 32
    observed: int | None = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, integer, "observed", at_least=1, optional=True)

    @property
    def queries_needed(self) -> int | None:
        """Return the number of observed queries."""
        return self.observed

    def scores(
        self, queries: Tensor, keys: Tensor, valid: Tensor | None, scaling: float, softcap: float | None = None
    ) -> Tensor:
        """See `TokenEviction.scores`."""
        received = attention_received(queries, keys, valid, scaling, softcap, self.observed).mean(2)
        recent = self.recent(keys.shape[2])
        return finished_scores(received[..., : max(keys.shape[2] - recent, 0)], keys, valid, recent)


@explains_arguments(OTHER_NAMES)
@dataclass(frozen=True)
class StreamingLLM(Budget):
    """Keep the first tokens (the attention sinks) and the last ones, whatever the model attends to.

    Attributes
    ----------
    budget : int or float
        Number of tokens that each KV head keeps; or a share of the prompt's, as in `SnapKV`.
    sinks : int
        Number of first tokens among them, padding not counted.

    Notes
    -----
    The kept keys keep their positions, as with every eviction here; the paper renumbers them.

    Examples
    --------
    >>> from grace_opt.hf.evict.kept_tokens import kept_tokens
    >>> keys = torch.zeros(1, 1, 6, 2)  # one sequence, one KV head, six tokens
    >>> kept_tokens(StreamingLLM(budget=4, sinks=2), keys[:, :, :0], keys, None, 1.0, layer=0, layers=1).tolist()
    [[[0, 1, 4, 5]]]
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, integer, "sinks", at_least=0)
        check_fits(self, "sinks")

    @property
    def always(self) -> int:
        """The sinks."""
        return self.sinks

    @property
    def queries_needed(self) -> int | None:
        """Return 0: no query is read."""
        return 0

    def scores(
        self, queries: Tensor, keys: Tensor, valid: Tensor | None, scaling: float, softcap: float | None = None
    ) -> Tensor:
        """See `TokenEviction.scores`; the queries are not read."""
        check_valid(keys, valid)
        batch, heads, length, _ = keys.shape
        real = torch.ones(batch, length, dtype=torch.bool, device=keys.device) if valid is None else valid
        number = real.cumsum(-1)
        row = (number - 1).float().masked_fill(number <= self.sinks, torch.inf)
        return finished_scores(row[:, None].repeat(1, heads, 1), keys, valid, 0)
