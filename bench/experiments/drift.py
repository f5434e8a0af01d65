"""How long a choice of channels lasts: the loss of later queries by their distance from the prompt's end.

A cell is one text. Channels are chosen once, from the prompt's last queries; queries further on may want others. The
last recent tokens and all later ones are dense, as in the cache.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.experiments.protection import over_layers
from bench.experiments.quality import Quality, Reference, choose, interactions
from bench.experiments.registry import Experiment, Settings
from bench.experiments.tensors import LayerTensors, load, missing
from grace_opt.attention.weights import interaction_matrix
from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

Rows = list[dict[str, Any]]
METHODS = ("THINK", "MIES", "GRACE")
#: An oracle: MIES on the very queries whose loss is measured. What is lost beside it is lost by drift.
FRESH = "MIES, refreshed"


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes
    ----------
    passages : int
        Texts.
    prompt : int
        Tokens of each prompt.
    ratios : tuple of float
        Of channels to prune.
    distances : tuple of int
        Where the bins of later queries end; the last one says how many later tokens there are.
    layers : tuple of int
        Empty: all of full attention.
    texts : str
        A folder of text files, or one file, for models other than the pocket model.
    """

    passages: int = 10
    prompt: int = 512
    ratios: tuple[float, ...] = (0.5, 0.6)
    distances: tuple[int, ...] = (32, 64, 128, 256)
    layers: tuple[int, ...] = ()
    texts: str = ""


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each text."""
    o: Options = settings.options
    if list(o.distances) != sorted(set(o.distances)) or not o.distances or o.distances[0] < 1:
        raise OptionError(f"distances={o.distances}: give rising numbers of tokens, for instance 32,64,128.")
    widest = max(end - start for start, end in itertools.pairwise((0, *o.distances)))
    if o.passages < 1 or o.prompt < widest:
        raise OptionError(f"passages={o.passages}, prompt={o.prompt}: give at least 1, and {widest}, the widest bin.")
    common = {"model": settings.model, "device": settings.device, "seed": settings.seed}
    changed = {name: value for name, value in dataclasses.asdict(o).items() if name != "passages"}
    return [{**common, **changed, "text": text} for text in range(o.passages)]


def run(config: dict[str, Any]) -> Rows:
    """All methods and distances of one text; means over layers and KV heads."""
    where = config["model"], config["text"], config["prompt"], config["distances"][-1], config["layers"] or None
    layers = load(*where, config["seed"], config["texts"], config["device"])
    rows: Rows = []
    for ratio in config["ratios"]:
        parts = [drift(tensors, config["prompt"], ratio, config["distances"]) for tensors in layers]
        rows += [{"pruned": ratio, **row} for row in over_layers(parts)]
    return rows


def drift(tensors: LayerTensors, prompt: int, ratio: float, distances: Sequence[int]) -> Rows:
    """Loss of one layer's later queries in each bin of their distance, means over its KV heads."""
    W, keys = interactions(tensors, prompt), tensors.keys[:, :prompt]
    masks = {method: choose(method, W, keys, ratio).pruned for method in METHODS}
    rows: Rows = []
    before: Reference | None = None
    start = 0
    for end in distances:
        cut = {n: getattr(tensors, n)[:, : prompt + end] for n in ("queries", "keys", "values")}
        reference = Reference(dataclasses.replace(tensors, **cut), prompt)
        own = interaction_matrix(tensors.queries[:, prompt + start : prompt + end].double(), keys.double())
        for method, mask in {**masks, FRESH: choose("MIES", own, keys, ratio).pruned}.items():
            sums = _sums(reference.prune(mask), end)
            last = {} if before is None else _sums(before.prune(mask), start)
            inside = {name: value - last.get(name, 0.0) for name, value in sums.items()}
            found = {
                "kl": inside["kl"] / (end - start),
                "output": inside["output"] / (end - start),
                "logit": inside["change"] / inside["total"],
            }
            means = {name: float(value.mean()) for name, value in found.items()}
            rows.append({"distance": f"{start + 1}-{end}", "method": method, **means})
        before, start = reference, end
    return rows


def _sums(found: Quality, count: int) -> dict[str, Tensor]:
    """Means over the later queries as sums, so that of two windows the difference is that of what lies between."""
    total = found.change_later / found.logit_later
    return {"kl": found.kl * count, "output": found.output * count, "change": found.change_later, "total": total}


def views(settings: Settings) -> list[Table | Plot]:
    """A table, and two plots."""
    names = {"distance": "tokens after the prompt", "kl": "attention KL (nats)", "logit": "relative logit error"}
    names |= {"pruned": "λ"}
    note = (
        "All queries see the same pruned keys, but later queries also see more dense ones, so the loss can fall "
        "although the choice is no better: compare methods at one distance. "
        f"“{FRESH}” is an oracle, chosen from the queries that are measured: the difference between it and MIES is the "
        "cost of drift."
    )
    table = Table(
        "Loss by distance from the prompt's end",
        ["kl", "output", "logit"],
        ["pruned", "distance"],
        "method",
        baseline="MIES",
        pair=["text"],
        note=note,
    )
    plots = [
        Plot("line", f"{what} by distance", x="distance", y=y, hue="method", facet="pruned", labels=names, note=note)
        for y, what in (("kl", "Attention KL"), ("logit", "Logit error"))
    ]
    return [table, *plots]


EXPERIMENT = Experiment(
    name="drift",
    title="How long a choice of channels lasts",
    paper="",
    about="For how many tokens after the prompt does a choice of channels stay good? Channels are chosen from the "
    "prompt's last 32 queries. Attention of later queries is compared with dense attention: attention KL in nats (kl), "
    "relative error of the output (output) and of the logits (logit). Numbers are means over all layers and KV heads "
    "of a text; differences are paired by text.",
    sizes={
        "smoke": Options(passages=2, prompt=96, ratios=(0.5,), distances=(8, 16)),
        "pocket": Options(),
        "full": Options(passages=20, prompt=4096, distances=(32, 64, 128, 256, 512)),
    },
    cells=cells,
    run=run,
    views=views,
    needs=missing,
)
