"""Token eviction: which of a prompt's tokens each KV head keeps, before channels are pruned.

When: the cache should hold a fixed number of tokens per head, however long the prompt is; channels are then pruned on
the tokens that are left. The functions here only score and choose tokens, from queries, keys and perhaps values; the
cache stores the result.

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

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from .._util.names import nearest_name
from .._util.parameters import check_fields, choice, integer, shown
from ..errors import CalibrationError, OptionError
from .arguments import explains_arguments
from .attention_received import attention_received, check_valid, finished_scores
from .graph_eviction import GraphEviction
from .layer_budgets import LayerBudgets
from .layer_losses import LayerLosses
from .placement import own_heads
from .token_budget import OTHER_NAMES, Budget, WindowedBudget, check_fits


@runtime_checkable
class TokenEviction(Protocol):
    """Decides which tokens stay: one of the six classes of this package, or your own."""

    @property
    def queries_needed(self) -> int | None:
        """Return how many of the prompt's last queries `scores` reads; None means all, 0 none."""
        ...

    def tokens(self, layer: int, layers: int, length: int) -> int:
        """Return how many of `length` tokens each KV head keeps in layer `layer` of `layers`."""
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
        As in `SnapKV`; the budget is the mean over the layers.
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


def tokens_kept(
    eviction: TokenEviction, layer: int, layers: int, length: int, least: int, dense_layers: int = 0
) -> int:
    """Return how many tokens each KV head keeps; of a share of the prompt, at least `least` or all."""
    if isinstance(eviction, LayerBudgets):
        return eviction.tokens(layer, layers, length, least=least, dense_layers=dense_layers)
    count = eviction.tokens(layer, layers, length)
    is_share = isinstance(getattr(eviction, "budget", None), float)
    return max(count, min(least, length)) if is_share else count


def tokens_of_heads(
    eviction: TokenEviction, layer: int, heads: int, length: int, least: int, dense_layers: int, step: int
) -> tuple[int, ...]:
    """Return how many tokens each of this process's KV heads keeps; nothing if its budget is not divided among heads.

    Parameters
    ----------
    heads : int
        Number of KV heads here: all, or this rank's.
    step : int
        Numbers differ from `length` by a multiple of this.
    """
    if not isinstance(eviction, LayerBudgets):
        return ()
    counts = eviction.tokens_of_heads(layer, length, least=least, dense_layers=dense_layers, step=step)
    return counts[own_heads(len(counts), heads)]


def kept_tokens(
    eviction: TokenEviction,
    queries: Tensor,
    keys: Tensor,
    valid: Tensor | None,
    scaling: float,
    layer: int,
    layers: int,
    softcap: float | None = None,
    *,
    values: Tensor | None = None,
    first: int = 0,
    last: int = 0,
    count: int | None = None,
) -> Tensor | None:
    """Return the positions that each KV head keeps, ascending; None if it keeps all.

    Parameters
    ----------
    eviction : TokenEviction
        Scores the tokens and knows how many stay.
    queries, keys, valid, scaling, softcap
        As in `TokenEviction.scores`.
    layer, layers : int
        Position of the layer in the model, and the model's number of layers.
    values : Tensor (B, H, S, d_v), optional
        All values of the prompt, for evictions that read them.
    first, last : int
        Number of first real tokens, and of last tokens, that stay whatever their scores are.
    count : int, optional
        Number of tokens that stay, from `tokens_kept`; by default the budget, and one more than the first and last
        ones at least if it is a share.

    Returns
    -------
    Tensor (B, H, tokens), int64, or None
        Among equal scores the lowest position stays. Padding is dropped before any real token. A row with too few real
        tokens keeps its last padding tokens, the same in every head.
    """
    length = keys.shape[2]
    if count is None:
        count = tokens_kept(eviction, layer, layers, length, first + last + 1)
    if length <= count:
        return None
    if count <= first + last:
        raise OptionError(
            f"layer {layer} keeps {count} tokens, of which {first + last} stay dense (sink tokens, recent window, "
            f"tokens that fill no group): nothing would be left to prune. Give a larger budget."
        )
    check_valid(keys, valid)
    if isinstance(eviction, LayerBudgets):
        eviction = eviction.keeping(count)
    read = {"values": values} if _reads_values(getattr(eviction.scores, "__func__", eviction.scores)) else {}
    scores = eviction.scores(queries, keys, valid, scaling, softcap, **read)
    scores = scores.clamp(min=torch.finfo(torch.float32).min)
    number = torch.arange(1, length + 1, device=keys.device)[None] if valid is None else valid.cumsum(-1)
    place = torch.arange(length, device=keys.device)
    scores = scores.masked_fill(((number <= first) | (place >= length - last))[:, None], torch.inf)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None], -torch.inf)
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
    if valid is not None:
        missing = count - valid.sum(-1, keepdim=True)
        from_the_end = (~valid).flip(-1).cumsum(-1).flip(-1)
        keep = (keep & valid[:, None]) | (~valid & (from_the_end <= missing))[:, None]
    return keep.nonzero()[:, 2].view(*keep.shape[:2], count)


@functools.cache
def _reads_values(scores: Callable[..., Tensor]) -> bool:
    """Return whether an eviction's method has a parameter for the values: those from before there was one have none."""
    return "values" in inspect.signature(scores).parameters


Ours = SnapKV | H2O | StreamingLLM | GraphEviction | LayerBudgets
#: That of evictions divided among layers is no name to choose by: they want losses.
DIVIDED = "layer_budgets"
_NAMES: dict[str, type[SnapKV | H2O | StreamingLLM | GraphEviction]] = {
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "h2o": H2O,
    "streaming_llm": StreamingLLM,
    "graph": GraphEviction,
}


def eviction_named(name: str) -> Ours:
    """Return the eviction of this name with its defaults; case, hyphens and underscores do not matter.

    Raises
    ------
    OptionError
        If the name is unknown; suggests the nearest one.

    Examples
    --------
    >>> eviction_named("streaming-LLM")
    StreamingLLM(budget=512, sinks=4)
    """
    short = {known.replace("_", ""): known for known in _NAMES}
    meant = name.lower().replace("_", "").replace("-", "")
    if meant not in short:
        near = nearest_name(meant, short)
        raise OptionError(
            f"evict={shown(name)}: write one of {', '.join(map(repr, _NAMES))}, or an eviction with its budget, for "
            f"instance SnapKV(budget=0.25){'' if near is None else f'. Did you mean {short[near]!r}?'}"
        )
    return _NAMES[short[meant]]()


def eviction_to_dict(eviction: TokenEviction) -> dict[str, Any]:
    """Return an eviction as plain values for JSON; `eviction_from_dict` reads them back.

    Examples
    --------
    >>> eviction_to_dict(StreamingLLM(budget=64))
    {'name': 'streaming_llm', 'budget': 64, 'sinks': 4}
    """
    if isinstance(eviction, LayerBudgets):
        losses = dataclasses.asdict(eviction.losses)
        return {"name": DIVIDED, "evict": eviction_to_dict(eviction.evict), "losses": losses}
    for name, kind in _NAMES.items():
        if type(eviction) is kind:
            return {"name": name, **dataclasses.asdict(eviction)}
    known = ", ".join(kind.__name__ for kind in _NAMES.values())
    raise OptionError(f"eviction={shown(eviction)} cannot be saved: give one of {known}.")


def eviction_from_dict(values: Mapping[str, Any]) -> Ours:
    """Read the eviction that `eviction_to_dict` wrote; missing fields get their defaults.

    Raises
    ------
    OptionError
        If the name or a field is unknown, or a value out of range.
    """
    known = ", ".join(map(repr, _NAMES))
    name = values.get("name") if isinstance(values, Mapping) else None
    if name == DIVIDED:
        return _divided_from_dict(values)
    if not isinstance(name, str) or name not in _NAMES:
        raise OptionError(f'eviction {shown(values)}: give {{"name": ..., "budget": ...}}, with a name from {known}.')
    given = {key: value for key, value in values.items() if key != "name"}
    fields = [field.name for field in dataclasses.fields(_NAMES[name])]
    unknown = [key for key in given if key not in fields]
    if unknown:
        raise OptionError(f"{name!r} has no {', '.join(map(repr, unknown))}: its fields are {fields}.")
    return _NAMES[name](**given)


def _divided_from_dict(values: Mapping[str, Any]) -> LayerBudgets:
    parts = values.get("evict"), values.get("losses")
    names = {field.name for field in dataclasses.fields(LayerLosses)}
    wanted = names - {"fingerprint"}
    good = all(isinstance(part, Mapping) for part in parts) and wanted <= set(parts[1] or ()) <= names
    if not good or set(values) != {"name", "evict", "losses"}:
        raise OptionError(f'{DIVIDED!r} has "evict", an eviction, and "losses" with {sorted(names)}; and nothing else')
    try:
        return LayerBudgets(eviction_from_dict(parts[0]), LayerLosses(**parts[1]))  # type: ignore[arg-type]
    except CalibrationError as error:
        raise OptionError(f"the losses of {DIVIDED!r}: {error}") from None
