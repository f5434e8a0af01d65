"""What GRACE's details are worth: which channels it protects, sink tokens, and how much it observes.

A cell is one text. One thing at a time is changed from the default: the bounds [a, b] of the protected proportion; the
threshold mean + c std above which a channel is salient, with wide bounds, so that the threshold decides; sink tokens
set aside; the number of observed queries. How long a choice lasts is `drift`'s question.
Source: GRACE (arXiv 2604.16983), section 3.4, which gives c = 1 and no [a, b]; the ablation is ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.experiments.quality import Reference, interactions
from bench.experiments.registry import Experiment, Settings
from bench.experiments.tensors import LayerTensors, load, missing
from grace_opt import solve
from grace_opt.attention.weights import PROTECT_HIGH, PROTECT_LOW, check_protection, prune_count
from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

Rows = list[dict[str, Any]]
#: Wide enough for the threshold to decide.
OPEN = (0.0, 0.35)
SINKS = 4
#: One for each value of `Setting.factor`: what its table compares to.
DEFAULTS = {"protect": f"{PROTECT_LOW:g}:{PROTECT_HIGH:g}", "threshold": "1", "sinks": "0", "window": "32"}


@dataclass(frozen=True)
class Options:
    """What is varied.

    Attributes
    ----------
    passages : int
        Texts.
    prompt : int
        Tokens of each prompt.
    ratios : tuple of float
        Of channels to prune; settings that protect too many for one are left out there.
    bounds : tuple of str
        "a:b".
    thresholds : tuple of float
        c, in units of the standard deviation.
    windows : tuple of int
        Observed queries.
    later : int
        Tokens after it, whose queries count.
    layers : tuple of int
        Empty: all of full attention.
    texts : str
        A folder of text files, or one file, for models other than the pocket model.
    """

    passages: int = 10
    prompt: int = 512
    ratios: tuple[float, ...] = (0.6,)
    bounds: tuple[str, ...] = ("0:0", "0.05:0.05", "0.05:0.15", "0.05:0.25", "0.15:0.15", "0.25:0.25", "0:0.35")
    thresholds: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
    windows: tuple[int, ...] = (8, 16, 32, 64, 128)
    later: int = 128
    layers: tuple[int, ...] = ()
    texts: str = ""


@dataclass(frozen=True)
class Setting:
    """One change of the default.

    Attributes
    ----------
    factor, value : str
        What is changed, and to what: a column and its text.
    low, high, threshold : float
        Of the protection.
    sinks : int
        First tokens that stay dense.
    seen : bool
        Whether W is built from them as well.
    window : int
        Observed queries.
    """

    factor: str
    value: str
    low: float = PROTECT_LOW
    high: float = PROTECT_HIGH
    threshold: float = 1.0
    sinks: int = 0
    seen: bool = True
    window: int = 32


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each text."""
    o: Options = settings.options
    list(_settings(o.bounds, o.thresholds, o.windows))  # a wrong one is told now
    if o.passages < 1 or o.prompt < max(o.windows):
        raise OptionError(f"passages={o.passages}, prompt={o.prompt}: give at least 1 and {max(o.windows)}.")
    common = {"model": settings.model, "device": settings.device, "seed": settings.seed}
    changed = {name: value for name, value in dataclasses.asdict(o).items() if name != "passages"}
    return [{**common, **changed, "text": text} for text in range(o.passages)]


def _settings(bounds: Sequence[str], thresholds: Sequence[float], windows: Sequence[int]) -> Iterator[Setting]:
    for text in bounds:
        try:
            ends = tuple(map(float, text.split(":")))
        except ValueError:
            ends = ()
        if len(ends) != 2:
            raise OptionError(f"bounds={text!r}: write a:b, for instance 0.05:0.15.")
        low, high = check_protection(ends)
        yield Setting("protect", f"{low:g}:{high:g}", low=low, high=high)
    for c in thresholds:
        yield Setting("threshold", f"{c:g}", *OPEN, threshold=c)
    yield Setting("sinks", "0")
    yield Setting("sinks", f"{SINKS} dense", sinks=SINKS)
    yield Setting("sinks", f"{SINKS} dense and unseen", sinks=SINKS, seen=False)
    for window in windows:
        if window < 1:
            raise OptionError(f"windows: {window} queries cannot be observed; give at least 1.")
        yield Setting("window", str(window), window=window)


def run(config: dict[str, Any]) -> Rows:
    """All settings and distances of one text; means over layers and KV heads."""
    prompt = config["prompt"]
    where = config["model"], config["text"], prompt, config["later"], config["layers"] or None
    layers = load(*where, config["seed"], config["texts"], config["device"])
    settings = list(_settings(config["bounds"], config["thresholds"], config["windows"]))
    rows: Rows = []
    for ratio in config["ratios"]:
        parts = [ablation(tensors, prompt, ratio, settings) for tensors in layers]
        rows += [{"pruned": ratio, **row} for row in over_layers(parts)]
    return rows


def salient(keys: Tensor, threshold: float, low: float, high: float) -> Tensor:
    """`grace_opt.salient_channels` with mean + `threshold` std for mean + std: (H, L, d) to (H, d)."""
    norms = torch.linalg.vector_norm(keys, dim=-2)
    above = norms > norms.mean(-1, keepdim=True) + threshold * norms.std(-1, correction=0, keepdim=True)
    count = (above.double().mean(-1, keepdim=True).clamp(low, high) * norms.shape[-1] + 0.5).floor()
    keep: Tensor = norms.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < count
    return keep


def ablation(tensors: LayerTensors, prompt: int, ratio: float, settings: Sequence[Setting]) -> Rows:
    """A row for each setting that leaves enough channels to prune: measures of one layer, means over its heads."""
    d, rows = tensors.keys.shape[-1], []
    k = prune_count(ratio, d)
    references = {sinks: Reference(tensors, prompt, sinks=sinks) for sinks in {s.sinks for s in settings}}
    for setting in settings:
        if k + math.floor(setting.high * d + 0.5) > d:
            continue
        first = 0 if setting.seen else setting.sinks
        seen = dataclasses.replace(
            tensors, **{n: getattr(tensors, n)[:, first:] for n in ("queries", "keys", "values")}
        )
        W = interactions(seen, prompt - first, setting.window)
        keep = salient(seen.keys[:, : prompt - first], setting.threshold, setting.low, setting.high)
        pruned = solve(W, k, "mies", protected=keep).mask
        found = references[setting.sinks].prune(pruned)
        rows.append({setting.factor: setting.value, **found.means(), "protected": float(keep.double().sum(-1).mean())})
    return rows


def over_layers(parts: list[Rows]) -> Rows:
    """Row by row the mean over the layers, which all have the same rows."""
    return [
        {
            name: value if isinstance(value, str) else sum(row[name] for row in same) / len(same)
            for name, value in same[0].items()
        }
        for same in zip(*parts, strict=True)
    ]


def views(settings: Settings) -> list[Table | Plot]:
    """A plot of the protection, and a table for each factor."""
    o: Options = settings.options
    titles = {
        "protect": (
            "Bounds a:b of the share of protected channels",
            f"0:0 protects nothing, which is plain MIES. {DEFAULTS['protect']} is our default.",
        ),
        "threshold": (
            "Threshold: a channel is salient if its norm is above mean + c std",
            f"The first column is c. Bounds are {OPEN[0]:g}:{OPEN[1]:g}, wide enough for c to decide.",
        ),
        "sinks": (
            "Dense sink tokens",
            "dense: the keys of the first tokens are stored unpruned, which costs a few bytes. unseen: W and the norms "
            "are also computed without them.",
        ),
        "window": ("Number of observed queries", "W is built from this many last queries of the prompt."),
    }
    offered = {
        name: [s.value for s in _settings(o.bounds, o.thresholds, o.windows) if s.factor == name] for name in titles
    }
    labels = {"protect": "bounds a:b of the share of protected channels", "kl": "attention KL (nats)", "pruned": "λ"}
    found: list[Table | Plot] = [
        Plot("bar", "Attention KL by protection", x="protect", y="kl", hue="pruned", labels=labels)
    ]
    for factor, (title, note) in titles.items():
        base = DEFAULTS[factor] if DEFAULTS[factor] in offered[factor] else offered[factor][0]
        measures = ["kl", "output", "logit_later"]
        found.append(Table(title, measures, ["pruned"], factor, baseline=base, pair=["text"], note=note))
    found.append(Table("How many channels are protected", ["protected"], [], "threshold", note="Mean per KV head."))
    return found


EXPERIMENT = Experiment(
    name="protection",
    title="Protection, sinks and observed queries",
    paper="",
    about="What do protected channels, dense sink tokens and the number of observed queries change? Channels are "
    "chosen from the prompt as in the cache, and the last 32 tokens stay dense. Attention of later queries is "
    "compared with dense attention: attention KL in nats (kl), relative error of the output (output) and of the logits "
    "(logit_later). Numbers are means over all layers and KV heads of a text; differences are paired by text.",
    sizes={
        "smoke": Options(passages=2, prompt=96, ratios=(0.5,), windows=(16, 32), later=16),
        "pocket": Options(),
        "full": Options(passages=20, prompt=4096, later=256, ratios=(0.5, 0.6)),
    },
    cells=cells,
    run=run,
    views=views,
    needs=missing,
)
