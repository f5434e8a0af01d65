"""Fig. 5: how much less than THINK each method changes the logits, layer by layer, and what is left of it later.

A cell is one text at one ratio, with all layers and methods, so that pairs are complete. The paper shows the observed
queries, from which the channels were chosen; here the queries of the text's continuation stand beside them, with the
attention's distribution and output, and with the optimum, which no method can go below.
Source: GRACE (arXiv 2604.16983), Fig. 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.experiments.quality import SOLVERS, Choice, Quality, Reference, choose, interactions
from bench.experiments.registry import Experiment, Settings
from bench.experiments.tensors import layer_numbers, load, missing
from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

#: No number of a layer is printed, only this sentence.
PAPER = (
    "The paper says about Fig. 5: on Qasper, GRACE's reconstruction error is 30 to 40 % lower than THINK's in the "
    "shallowest and deepest layers."
)
LABELS = {
    "reduction_observed": "% below THINK, observed queries",
    "reduction_later": "% below THINK, later queries",
    "kl": "attention KL (nats)",
    "output": "relative output error",
}


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes
    ----------
    texts : str
        A text file or a folder of them, for a checkpoint; the pocket model brings its own.
    passages : int
        Texts, the independent units of the intervals.
    prompt, later : int
        Tokens of a prompt, and of its continuation, whose queries are the later ones.
    layers : tuple of int
        Which; none means all.
    ratios : tuple of float
        Of channels to prune.
    observed, recent, sinks : int
        Queries that the choice is made from; last and first tokens of the prompt that stay dense.
    time_limit : float
        Seconds for the proof of a head's optimum.
    """

    texts: str = ""
    passages: int = 6
    prompt: int = 896
    later: int = 96
    layers: tuple[int, ...] = ()
    ratios: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8)
    observed: int = 32
    recent: int = 32
    sinks: int = 0
    time_limit: float = 10.0


def common_config(settings: Settings) -> dict[str, Any]:
    """What the cells of an experiment on attention have in common, of options named as here."""
    options = settings.options
    try:
        layers = layer_numbers(settings.model, [int(number) for number in options.layers])
    except ValueError:
        raise OptionError(f"--set layers={','.join(map(str, options.layers))}: give numbers, as in 0,5,11.") from None
    names = ("texts", "prompt", "later", "observed", "recent", "sinks", "time_limit")
    return {
        "model": settings.model or "pocket",
        "seed": settings.seed,
        "device": settings.device,
        "layers": list(layers),
        **{name: getattr(options, name) for name in names},
    }


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each text and ratio; the texts' are neighbours, since their tensors are kept."""
    common, options = common_config(settings), settings.options
    return [{**common, "text": text, "ratio": ratio} for text in range(options.passages) for ratio in options.ratios]


def run(config: dict[str, Any]) -> list[dict[str, Any]]:
    """All methods on one text, a row for each layer and method."""
    c = config
    rows: list[dict[str, Any]] = []
    for tensors in load(
        c["model"], c["text"], c["prompt"], c["later"], c["layers"], c["seed"], c["texts"], c["device"]
    ):
        reference = Reference(tensors, c["prompt"], c["observed"], c["recent"], c["sinks"])
        W, keys = interactions(tensors, c["prompt"], c["observed"]), tensors.keys[:, : c["prompt"]]
        base: tuple[Choice, Quality] | None = None
        measured: dict[bytes, Quality] = {}  # methods often agree
        for method in SOLVERS:
            choice = choose(method, W, keys, c["ratio"], c["seed"], c["time_limit"])
            key = choice.pruned.cpu().numpy().tobytes()
            quality = measured[key] = measured.get(key) or reference.prune(choice.pruned)
            base = base or (choice, quality)
            rows.append(
                {
                    "layer": tensors.layer,
                    "method": method,
                    "f_share": float(choice.share.mean()),
                    "reduction_observed": _less(choice.f, base[0].f),
                    "reduction_later": _less(quality.change_later, base[1].change_later),
                    "heads_observed": _mean_less(choice.f, base[0].f),
                    "heads_later": _mean_less(quality.change_later, base[1].change_later),
                    "kl": float(quality.kl.mean()),
                    "output": float(quality.output.mean()),
                    "logit_later": float(quality.logit_later.mean()),
                    **({"proved": 100 * float(choice.proved.float().mean())} if method == "optimum" else {}),
                }
            )
    return rows


def _less(values: Tensor, base: Tensor) -> float:
    """Percent below the baseline, of sums over a layer's heads; 0 where there is nothing to change."""
    return 100 * float(1 - values.sum() / base.sum()) if float(base.sum()) > 0 else 0.0


def _mean_less(values: Tensor, base: Tensor) -> float:
    """Percent below the baseline, mean over heads."""
    return 100 * float(torch.where(base > 0, 1 - values / base, 0.0).mean())


def views(settings: Settings) -> list[Table | Plot]:
    """By layer and over all layers, observed beside later; and the lines of the figure."""
    pair, unit = ["text", "layer"], ["text"]
    whole = Table(
        "Change of the logits below THINK's (%), all layers",
        metrics=["reduction_observed", "reduction_later", "heads_observed", "heads_later"],
        rows=["ratio"],
        by="method",
        baseline="THINK",
        pair=pair,
        unit=unit,
        better="higher",
        note="reduction: of ‖QKᵀ - QSKᵀ‖², summed over the heads of a layer, mean over layers. heads: reduction of "
        "each head, mean over heads. observed: on the queries that the choice was made from; later: on those of the "
        "continuation. Negative: worse than THINK. " + PAPER,
    )
    attention = Table(
        "Effect on attention, all layers",
        metrics=["f_share", "logit_later", "kl", "output"],
        rows=["ratio"],
        by="method",
        baseline="THINK",
        pair=pair,
        unit=unit,
        note="f_share: f(S) / f(all channels), on the observed queries. On later queries, with recent tokens dense: "
        "logit_later, relative error of the logits; kl, attention KL in nats; output, relative error of attention's "
        "output. A lower f need not mean a lower KL.",
    )
    proved = Table(
        "Optima that were proved (%)",
        metrics=["proved"],
        rows=["ratio"],
        by="method",
        note=f"Share of KV heads, by branch and bound in {settings.options.time_limit:g} s each. For the others, "
        "“optimum” is the best set found.",
    )
    by_layer = Table(
        "Change of the logits below THINK's (%), by layer",
        metrics=["reduction_observed", "reduction_later"],
        rows=["ratio", "layer"],
        by="method",
        baseline="THINK",
        pair=["text"],
        better="higher",
        note=PAPER,
    )
    facets = [
        Plot("line", title, x="layer", y=y, hue="method", facet="ratio", labels=LABELS, note=note)
        for title, y, note in (
            ("Fig. 5: observed queries", "reduction_observed", PAPER),
            ("Later queries, which no method has seen", "reduction_later", ""),
            ("Attention KL on later queries", "kl", ""),
            ("Output error on later queries", "output", ""),
        )
    ]
    return [whole, attention, proved, *facets, by_layer]


EXPERIMENT = Experiment(
    name="reconstruction",
    title="Reconstruction error of the logits against THINK, layer by layer",
    paper="Fig. 5",
    about="How much smaller is the error of the logits than with THINK's choice of channels, layer by layer? Channels "
    "are chosen from a prompt's last queries and all its keys. The error is measured on those observed queries and all "
    "keys, as in the paper, and on the queries of the text's continuation, with recent tokens dense; so are the "
    "changes of attention's distributions and outputs. The optimum is proved by branch and bound: on observed queries, "
    "no other choice of as many channels has a smaller error. So the tables show the largest possible advantage over "
    "THINK, and how much of it remains on later queries. They do not show what happens to generated text, and the "
    "pocket model's three layers say nothing about the layers of large models.",
    sizes={
        "smoke": Options(passages=1, prompt=160, later=24, ratios=(0.6,), layers=(0, 2)),
        "pocket": Options(),
        "full": Options(passages=20, prompt=7168, later=512, time_limit=30.0),
    },
    cells=cells,
    run=run,
    views=views,
    needs=missing,
)
