"""What keys, interactions and queries of attention look like: the paper's Figs. 1, 3 and 4, with their numbers.

A cell is one text. Pictures are drawn of the first text, of KV head `head` of the first, middle and last layer: the
magnitude of key channels over tokens, |W| in the channels' own order and sorted by the diagonal, and mean against
standard deviation of query channels. What the pictures suggest is counted over all heads, layers and texts.
Source: GRACE (arXiv 2604.16983), sections 3.1 to 3.4; the measures are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.experiments.registry import Experiment, Settings
from bench.experiments.tensors import LayerTensors, layer_numbers, load, missing
from grace_opt.attention.weights import interaction_matrix, salient_channels
from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

Rows = list[dict[str, Any]]
#: Below this share of the mean node weight, an interaction is shown as nothing.
FLOOR = 1e-6
#: What is counted, in the table's order: name of the column, heading.
MEASURES = {
    "key_spread": "largest / median norm of a key channel",
    "key_mean": "share of K's energy in its mean over tokens",
    "off_diagonal": "off-diagonal / diagonal of W, sums of |.|",
    "diagonal_spread": "largest / median node weight of W",
    "query_steadiness": "|mean| / standard deviation of a query channel, median",
    "salient": "salient channels, those above mean + 1 std",
    "protected": "protected channels, salient ones clamped to our [a, b]",
}


@dataclass(frozen=True)
class Options:
    """What is looked at.

    Attributes
    ----------
    passages : int
        Texts; pictures are of the first.
    prompt : int
        Tokens of each.
    observed : int
        Last queries of which W is made.
    head : int
        The KV head in the pictures, and the first query head of its group.
    panels : int
        Layers in the pictures, evenly from the first to the last.
    bins : int
        Number of groups that tokens, and channels if there are more of them, are gathered into.
    texts : str
        A folder of text files, or one file, for models other than the pocket model.
    """

    passages: int = 8
    prompt: int = 512
    observed: int = 32
    head: int = 0
    panels: int = 3
    bins: int = 64
    texts: str = ""


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each text."""
    o: Options = settings.options
    if o.passages < 1 or o.panels < 1 or o.bins < 1 or not 1 <= o.observed <= o.prompt:
        raise OptionError(f"{o}: give passages, panels and bins of at least 1, and 1 <= observed <= prompt.")
    common = {"model": settings.model, "device": settings.device, "seed": settings.seed, "texts": o.texts}
    shown = {"prompt": o.prompt, "observed": o.observed, "head": o.head, "panels": o.panels, "bins": o.bins}
    return [{**common, **shown, "text": text, "pictures": text == 0} for text in range(o.passages)]


def run(config: dict[str, Any]) -> Rows:
    """Count over all layers and heads of one text; of the first text, also the pictures."""
    where, names = config["model"], config["texts"]
    numbers = layer_numbers(where)
    found = load(where, config["text"], config["prompt"], 0, numbers, config["seed"], names, config["device"])
    shown = [found[at] for at in shown_layers(len(found), config["panels"])]
    measured = {tensors.layer: measures(tensors, config["observed"]) for tensors in found}
    rows: Rows = [{"where": f"layer {t.layer}", **measured[t.layer]} for t in shown]
    rows.append({"where": "all layers", **_mean(list(measured.values()))})
    # Columns of pictures are whole numbers in every row: a gap would make pandas, and so the axes, write 0.0, 1.0, ...
    rows = [{"layer": 0, "row": 0, "column": 0, **row} for row in rows]
    if config["pictures"]:
        rows += [row for t in shown for row in picture_rows(t, config["observed"], config["head"], config["bins"])]
    return rows


def shown_layers(count: int, panels: int) -> list[int]:
    """Positions of `panels` layers, evenly from the first to the last.

    Examples
    --------
    >>> shown_layers(30, 3), shown_layers(2, 3)
    ([0, 14, 29], [0, 1])
    """
    return sorted({round(at) for at in torch.linspace(0, count - 1, min(panels, count)).tolist()})


def picture_rows(tensors: LayerTensors, observed: int, head: int, bins: int) -> Rows:
    """All points of the pictures of one layer and head."""
    heads = tensors.keys.shape[0]
    if not 0 <= head < heads:
        raise OptionError(f"head={head}: the model has KV heads 0 to {heads - 1}; give one with --set head=...")
    group = tensors.queries.shape[0] // heads
    W = interaction_matrix(tensors.queries[:, -observed:], tensors.keys)[head]
    rows = key_rows(tensors.keys[head], bins) + interaction_rows(W, bins) + query_rows(tensors.queries[head * group])
    return [{"layer": tensors.layer, "row": 0, "column": 0, **row} for row in rows]


def key_rows(keys: Tensor, bins: int) -> Rows:
    """Mean |key| of each channel in each bin of consecutive tokens, (L, d) to at most (bins, bins)."""
    tokens, means = _gathered(keys.abs(), bins, dim=0)
    channels, means = _gathered(means, bins, dim=1)
    return _grid(tokens, channels, "key_magnitude", means)


def interaction_rows(W: Tensor, bins: int) -> Rows:
    """log10 |W_ij| relative to the mean node weight, in the channels' order, and sorted by falling node weight.

    Of more than `bins` channels, neighbours share a point: the mean of |W|.
    """
    diagonal = W.diagonal()
    relative = W.abs() / diagonal.abs().mean().clamp_min(torch.finfo(W.dtype).tiny)
    order = diagonal.argsort(descending=True, stable=True)
    rows: Rows = []
    for value, shown in (("interaction", relative), ("interaction_sorted", relative[order][:, order])):
        firsts, means = _gathered(_gathered(shown, bins, dim=0)[1], bins, dim=1)
        rows += _grid(firsts, firsts, value, means.clamp_min(FLOOR).log10())
    return rows


def query_rows(queries: Tensor) -> Rows:
    """Mean over the tokens and standard deviation (ddof 0) of every channel of one query head (L, d)."""
    means, deviations = queries.double().mean(0).tolist(), queries.double().std(0, correction=0).tolist()
    return [
        {"query_channel": at, "query_mean": mean, "query_std": deviation}
        for at, (mean, deviation) in enumerate(zip(means, deviations, strict=True))
    ]


def measures(tensors: LayerTensors, observed: int) -> dict[str, float]:
    """`MEASURES` of one layer, means over its KV heads."""
    q, k = tensors.queries.double(), tensors.keys.double()
    W = interaction_matrix(q[:, -observed:], k)
    diagonal, norms = W.diagonal(dim1=-2, dim2=-1), torch.linalg.vector_norm(k, dim=-2)
    group = q.shape[0] // k.shape[0]
    steady = (q.mean(-2).abs() / q.std(-2, correction=0).clamp_min(1e-300)).reshape(k.shape[0], group, -1)
    tiny = torch.finfo(k.dtype).tiny
    values = {
        "key_spread": norms.amax(-1) / norms.median(-1).values.clamp_min(tiny),
        "key_mean": k.mean(-2).square().sum(-1) / k.square().mean(-2).sum(-1).clamp_min(tiny),
        "off_diagonal": W.abs().sum((-2, -1)) / diagonal.sum(-1).clamp_min(tiny) - 1,
        "diagonal_spread": diagonal.amax(-1) / diagonal.median(-1).values.clamp_min(tiny),
        "query_steadiness": steady.flatten(1).median(-1).values,
        "salient": (norms > norms.mean(-1, keepdim=True) + norms.std(-1, correction=0, keepdim=True)).double().sum(-1),
        "protected": salient_channels(k).double().sum(-1),
    }
    return {name: float(value.mean()) for name, value in values.items()}


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(values[name] for values in found) / len(found) for name in found[0]}


def _gathered(values: Tensor, bins: int, dim: int) -> tuple[list[int], Tensor]:
    """Means of consecutive entries, at most `bins` of them, and where each bin begins."""
    parts = values.tensor_split(min(bins, values.shape[dim]), dim)
    sizes = [part.shape[dim] for part in parts]
    return [sum(sizes[:at]) for at in range(len(sizes))], torch.stack([part.mean(dim) for part in parts], dim)


def _grid(ys: list[int], xs: list[int], value: str, values: Tensor) -> Rows:
    return [
        {"row": y, "column": x, value: number}
        for y, line in zip(ys, values.tolist(), strict=True)
        for x, number in zip(xs, line, strict=True)
    ]


def _heatmap(title: str, value: str, row: str, column: str, shown: str, note: str = "") -> Plot:
    note = f"One KV head of one text. Each panel has its own colour scale. {note}".strip()
    labels = {"row": row, "column": column, value: shown}
    return Plot("heatmap", title, x="column", y="row", value=value, facet="layer", labels=labels, note=note)


def views(settings: Settings) -> list[Table | Plot]:
    """The four pictures, and the table."""
    weight = "log10(|W| / mean node weight)"
    ranks = "i-th largest node weight", "j-th largest node weight"
    seen = "THINK prunes from the end of this order and ignores everything off the diagonal."
    return [
        _heatmap(
            "Key channels over tokens (Fig. 1)",
            "key_magnitude",
            "token",
            "channel",
            "mean |key|",
            "Each line is the mean of consecutive tokens.",
        ),
        _heatmap("Interactions |W| of channels (Fig. 3)", "interaction", "channel i", "channel j", weight),
        _heatmap("Interactions |W|, sorted by node weight", "interaction_sorted", *ranks, weight, seen),
        Plot(
            "scatter",
            "Query channels: mean and standard deviation (Fig. 4)",
            x="query_mean",
            y="query_std",
            facet="layer",
            labels={"query_mean": "mean", "query_std": "standard deviation"},
            note="Each point is one channel of one query head, over all tokens of one text.",
        ),
        Table(
            "The same in numbers",
            metrics=[*MEASURES],
            rows=[],
            by="where",
            note="; ".join(f"{name}: {text}" for name, text in MEASURES.items())
            + ". Means over the KV heads of a text; intervals are over texts.",
        ),
    ]


EXPERIMENT = Experiment(
    name="anatomy",
    title="Keys, interactions and queries in pictures",
    paper="Figs. 1, 3 and 4",
    about="What do a model's keys, queries and interactions of channels look like? Queries and keys of whole texts are "
    "taken after the rotary embedding. W is made from the last queries of all query heads of a group, and all keys.",
    sizes={
        "smoke": Options(passages=1, prompt=96, panels=2, bins=8),
        "pocket": Options(),
        "full": Options(passages=20, prompt=4096),
    },
    cells=cells,
    run=run,
    views=views,
    needs=missing,
)
