"""Keys in bits: pruned channels beside quantised keys, and both together, at the bits that a key element costs.

A ratio alone does not say whether pruning is worth it: who needs smaller keys may as well store each in 4 bits. A cell
is one text with every way of storing, so that pairs are complete. Quantisation is the plain one: per channel, groups of
32 tokens, between the group's least and largest value, with a scale and a zero of 16 bits each.
Source: the grouping is KIVI's (arXiv 2402.02750).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.experiments.quality import Reference, choose, interactions
from bench.experiments.reconstruction import Options as Common
from bench.experiments.reconstruction import common_config
from bench.experiments.registry import Experiment, Settings
from bench.experiments.tensors import LayerTensors, load, missing
from grace_opt.attention.weights import prune_count
from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

#: Tokens that share a scale and a zero, and the bits of both.
GROUP, SCALES = 32, 32
DENSE = 16
METHODS = ("THINK", "GRACE", "optimum")


@dataclass(frozen=True)
class Options(Common):
    """What is measured, besides what `reconstruction` says of it.

    Attributes
    ----------
    recent : int
        Least number of the prompt's last tokens that stay dense; more if whole groups need it.
    widths : tuple of int
        Bits of quantised keys, alone.
    together : tuple of int
        Bits of the kept channels, where pruning and quantisation are combined.
    """

    ratios: tuple[float, ...] = (0.25, 0.5, 0.6)
    sinks: int = 4
    widths: tuple[int, ...] = (8, 4, 3, 2)
    together: tuple[int, ...] = (4, 3)


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each text."""
    options: Options = settings.options
    if bad := [bits for bits in (*options.widths, *options.together) if not 1 <= bits <= 8]:
        raise OptionError(f"--set widths and together: {bad[0]} bits; give 1 to 8.")
    lists = {name: list(getattr(options, name)) for name in ("ratios", "widths", "together")}
    return [{**common_config(settings), **lists, "text": text} for text in range(options.passages)]


def run(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every way of storing the keys of one text; a row for each, means over layers and heads."""
    c = config
    recent = c["recent"] + max(c["prompt"] - c["recent"] - c["sinks"], 0) % GROUP
    found: dict[str, list[dict[str, Any]]] = {}
    for tensors in load(
        c["model"], c["text"], c["prompt"], c["later"], c["layers"], c["seed"], c["texts"], c["device"]
    ):
        reference = Reference(tensors, c["prompt"], c["observed"], recent, c["sinks"])
        for way, keys in _ways(tensors, reference.stored, config):
            name = f"{way.name}, {way.bits:.3g} bits"
            found.setdefault(name, []).append({**way.numbers, **reference.measure(keys).means(), "way": way})
    rows = []
    for name, parts in found.items():
        way = parts[0].pop("way")
        row = {n: sum(part[n] for part in parts) / len(parts) for n in parts[0]}
        # A method and ratio by themselves, only where keys keep their 16 bits; a curve, only for one of the methods.
        alone = {"method": way.method, "ratio": way.ratio} if way.family.endswith("16 bit") else {}
        curve = {} if way.method in ("THINK", "optimum") else {"curve_kl": row["kl"], "curve_output": row["output"]}
        rows.append({"way": name, "bits": way.bits, "family": way.family, **alone, **row, **curve})
    return sorted(rows, key=lambda row: -row["bits"])


@dataclass(frozen=True)
class Way:
    """A way of storing keys: its name, line in the plot, bits for each element, and what belongs to its choice."""

    name: str
    family: str
    bits: float
    method: str = ""
    ratio: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)


def _ways(tensors: LayerTensors, stored: slice, config: dict[str, Any]) -> Iterator[tuple[Way, Tensor]]:
    """All ways of storing one layer's keys, and the keys as they are read back."""
    keys = tensors.keys[:, : config["prompt"]]
    narrow: dict[int, Tensor] = {}
    for bits in sorted({*config["widths"], *config["together"]}, reverse=True):
        narrow[bits] = keys.clone()
        narrow[bits][:, stored] = quantise(keys[:, stored], bits)
        if bits in config["widths"]:
            yield Way(f"int{bits}", "quantised", bits + SCALES / GROUP), narrow[bits]
    W, d = interactions(tensors, config["prompt"], config["observed"]), keys.shape[-1]
    for ratio in config["ratios"]:
        kept = 1 - prune_count(ratio, d) / d
        for method in METHODS:
            choice = choose(method, W, keys, ratio, config["seed"], config["time_limit"])
            gone = choice.pruned[:, None]
            numbers = {"f_share": float(choice.share.mean())}
            numbers |= {"proved": 100 * float(choice.proved.float().mean())} if method == "optimum" else {}
            name = f"{method} {ratio:g}"
            way = Way(f"{name}, 16 bit", f"{method}, 16 bit", kept * DENSE, method, ratio, numbers)
            yield way, keys.masked_fill(gone, 0.0)
            for bits in config["together"]:
                cost = kept * (bits + SCALES / GROUP)
                yield (
                    Way(f"{name}, int{bits}", f"{method}, int{bits}", cost, method),
                    narrow[bits].masked_fill(gone, 0.0),
                )


def quantise(keys: Tensor, bits: int) -> Tensor:
    """Keys (H, T, d) as they are read back: the nearest of 2^bits levels in each channel's groups of tokens.

    T is a multiple of `GROUP`. Scale and zero are rounded to 16 bits.
    """
    groups = keys.unflatten(1, (-1, GROUP))
    zero = groups.amin(2, keepdim=True).half().float()
    step = ((groups.amax(2, keepdim=True) - zero) / (2**bits - 1)).half().float()
    levels = ((groups - zero) / step.clamp_min(torch.finfo(torch.float16).tiny)).round().clamp(0, 2**bits - 1)
    return (levels * step + zero).flatten(1, 2)


def views(settings: Settings) -> list[Table | Plot]:
    """Methods beside each other, everything beside the fewest bits, and curves."""
    options: Options = settings.options
    what = (
        "Bits are those of a stored key element, with scales and zero points, without kept indices and dense windows. "
        "kl: attention KL in nats; output: relative error of attention's output; both on later queries, means over "
        "layers and KV heads (defined in bench/experiments/quality.py)."
    )
    tables: list[Table | Plot] = [
        Table(
            "THINK, GRACE and the optimum, kept channels in 16 bits",
            metrics=["f_share", "logit_observed", "logit_later", "kl", "output"],
            rows=["ratio", "bits"],
            by="method",
            baseline="THINK",
            pair=["text"],
            note="ratio: share of channels pruned. f_share: f(S) / f(all channels). logit_observed, logit_later: "
            "relative error of the logits, on the queries that the choice was made from and on later ones. " + what,
        )
    ]
    if options.widths:
        least = min(options.widths)
        bits = least + SCALES / GROUP
        tables.append(
            Table(
                f"Everything compared with int{least}, from many bits to few",
                metrics=["kl", "output"],
                rows=[],
                by="way",
                baseline=f"int{least}, {bits:.3g} bits",
                pair=["text"],
                note="Worse at more bits than the baseline: quantisation alone is the better choice. Pruning is useful "
                f"where it is better at {bits:g} bits or fewer; below {bits:g} bits, every row prunes. " + what,
            )
        )
    plots = [
        Plot("line", title, "bits", y, hue="family", log=["y"], labels={"bits": "bits per key element", y: label})
        for title, y, label in (
            ("Attention KL by bits", "curve_kl", "attention KL (nats)"),
            ("Output error by bits", "curve_output", "relative output error"),
        )
    ]
    proved = Table(
        "Optima that were proved (%)", metrics=["proved"], rows=["ratio"], by="method", note="Share of KV heads."
    )
    return [*tables, *plots, proved]


EXPERIMENT = Experiment(
    name="bits",
    title="Pruned and quantised keys in bits per element",
    paper="",
    about="At equal bits per key element, is it better to prune keys, to quantise them, or to do both? The keys of a "
    "prompt are pruned (by THINK, GRACE or the proved optimum of f), quantised to a few bits, or both, and measured on "
    "the queries of the text's continuation. Quantisation is plain rounding, without rotation or separate outliers, "
    "and nothing compensates for pruned channels: both can be improved. Bits are counted, not time. Attention is "
    "measured layer by layer on the dense model's inputs, so errors do not add up over layers. On the pocket model "
    "this shows that the code runs, and little about real keys.",
    sizes={
        "smoke": Options(passages=1, prompt=160, later=24, ratios=(0.5,), layers=(0, 2)),
        "pocket": Options(),
        "full": Options(passages=10, prompt=2048, later=256),
    },
    cells=cells,
    run=run,
    views=views,
    needs=missing,
)
