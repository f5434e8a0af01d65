"""Bytes of K and V against what they cost, of pruning, eviction, quantisation and combinations: what to pick?

A cell is one prompt, with every setting on it, at one of two levels: attention of later queries (``attention``), or the
next-token distributions over the true continuation, of needle prompts (``needle``) or of texts (``text``). A setting is
on the Pareto front of a prompt if no other is as small and as good, and better in one of the two.
The methods are those of `grace_opt.hf`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.experiments.compressions import (
    COMBINED,
    DENSE,
    FAMILIES,
    PARTS,
    SINGLE,
    Compression,
    DenseAttention,
    compressions,
)
from bench.experiments.continuation import Reading, half_model, needle_task, read, text_task
from bench.experiments.registry import Experiment, Settings
from bench.experiments.tensors import FIRST_SEED, TENSOR_FILES, load, missing
from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

Rows = list[dict[str, Any]]
LEVELS = ("attention", "needle", "text")
#: Which column is compared, and where it goes in plots.
LOSS = {"attention": "attention_kl", "needle": "needle_kl", "text": "text_kl"}
PICTURES = {"single": SINGLE, "combined": (*PARTS, *COMBINED)}
#: At equal bytes others are compared to the first of these that fits, and only where they use so much of the budget.
BASELINES, FILLED = ("int", "SnapKV + int4"), 0.75


@dataclass(frozen=True)
class Options:
    """What is compared.

    Attributes
    ----------
    levels : tuple of str
        Of "attention", "needle" and "text".
    prompts : int
        At each level.
    tokens : int
        Of each prompt; a multiple of 32, so that groups of quantised keys are full.
    later : int
        Tokens after it, of attention and text.
    ratios : tuple of float
        Of channels pruned.
    shares : tuple of float
        Of tokens kept by eviction.
    bits : tuple of int
        Of keys and values.
    budgets : tuple of float
        Shares of dense K and V for which each family's largest setting that fits is compared.
    layers : tuple of int
        Of the attention level; empty: all of full attention.
    texts : str
        A folder of text files, or one file, for models other than the pocket model.
    """

    levels: tuple[str, ...] = ("attention", "needle")
    prompts: int = 6
    tokens: int = 512
    later: int = 64
    ratios: tuple[float, ...] = (0.3, 0.5, 0.7)
    shares: tuple[float, ...] = (0.5, 0.25, 0.125)
    bits: tuple[int, ...] = (8, 4, 3, 2)
    budgets: tuple[float, ...] = (0.8, 0.65, 0.42, 0.33, 0.27, 0.22, 0.135)
    layers: tuple[int, ...] = ()
    texts: str = ""


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each prompt of each level."""
    o: Options = settings.options
    if unknown := [level for level in o.levels if level not in LEVELS]:
        raise OptionError(f"levels: there is no {unknown[0]!r}; give some of {', '.join(LEVELS)}.")
    if o.prompts < 1 or o.tokens < 96 or o.tokens % 32:
        raise OptionError(
            f"prompts={o.prompts}, tokens={o.tokens}: give at least 1, and a multiple of 32 of 96 or more."
        )
    compressions(o.tokens, o.ratios, o.shares, o.bits)  # a wrong one is told now
    common = {"model": settings.model, "device": settings.device, "seed": settings.seed}
    changed = {n: value for n, value in dataclasses.asdict(o).items() if n not in ("levels", "prompts")}
    levels = [level for level in o.levels if level == "attention" or not settings.model.endswith(TENSOR_FILES)]
    return [{**common, **changed, "level": level, "prompt": at} for level in levels for at in range(o.prompts)]


def run(config: dict[str, Any]) -> Rows:
    """Every setting on one prompt, sorted by bytes."""
    level, tokens = config["level"], config["tokens"]
    asked = compressions(tokens, config["ratios"], config["shares"], config["bits"])
    rows = attention_rows(config, asked) if level == "attention" else model_rows(config, asked)
    pictures = [row for row in rows if row["family"] != DENSE]  # whose loss of 0 a logarithmic axis cannot show
    rows.sort(key=lambda row: -row["share"])
    loss = LOSS[level]
    best = pareto_front([(row["share"], row[loss]) for row in rows])
    table = [
        {**row, "setting": f"{row['share']:.1%} {row['name']}", f"{level}_front": float(front)}
        for row, front in zip(rows, best, strict=True)
    ]
    return [*plotted(pictures, loss), *table, *at_budgets(rows, config["budgets"], loss)]


def plotted(rows: Rows, loss: str) -> Rows:
    """Rows for the plots, in the order of the families: a column for single means, and one for combinations."""
    found: Rows = []
    for row in rows:
        parts = [part for part, families in PICTURES.items() if row["family"] in families]
        columns = [name for name in (loss, "later_recall") if name in row]
        here = {f"{name}_{part}": row[name] for name in columns for part in parts}
        found.append({"curve": row["family"], "share": row["share"], **here})
    return found


def attention_rows(config: dict[str, Any], asked: Sequence[Compression]) -> Rows:
    """Means over the layers of what each setting does to attention."""
    where = config["model"], config["prompt"], config["tokens"], config["later"], config["layers"] or None
    layers = load(*where, config["seed"], config["texts"], config["device"])
    dense = [DenseAttention(tensors, config["tokens"], at, len(layers)) for at, tensors in enumerate(layers)]
    rows: Rows = [{"family": DENSE, "name": DENSE, "share": 1.0, "attention_kl": 0.0, "output_error": 0.0}]
    for setting in asked:
        found = [layer.measure(setting.config) for layer in dense]
        share = sum(a.stored for a in found) / sum(a.dense for a in found)
        kl, error = (sum(getattr(a, name) for a in found) / len(found) for name in ("kl", "output"))
        row = {"family": setting.family, "name": setting.name, "share": round(share, 6)}
        rows.append({**row, "attention_kl": kl, "output_error": error})
    return rows


def model_rows(config: dict[str, Any], asked: Sequence[Compression]) -> Rows:
    """What each setting makes of a prompt's continuation."""
    level, seed, at = config["level"], config["seed"], config["prompt"]
    model, tokenizer = half_model(config["model"], config["device"])
    tokens = config["tokens"] + 1  # the last one is fed, and not compressed
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", math.inf)
    if level == "needle":
        task = needle_task(tokenizer, tokens, FIRST_SEED + 1000 * seed + at)
    else:
        task = text_task(config["model"], at, tokens, config["later"], seed, config["texts"])
    if len(task.prompt) + len(task.continuation) > context:
        raise OptionError(f"--set tokens={config['tokens']}: with its continuation more than the context of {context}.")
    dense = read(model, task, None)
    rows = [_row(level, DENSE, DENSE, dense)]
    return rows + [_row(level, s.family, s.name, read(model, task, s.config, dense)) for s in asked]


def _row(level: str, family: str, name: str, found: Reading) -> dict[str, Any]:
    row = {"family": family, "name": name, "share": round(found.share, 6), LOSS[level]: found.kl}
    row[f"{level}_perplexity"] = math.exp(found.nll)
    return row | {
        column: value for column, value in (("recall", found.first), ("later_recall", found.later)) if value is not None
    }


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether no other point is as small in both numbers, and smaller in one.

    Examples
    --------
    >>> pareto_front([(1.0, 0.0), (0.5, 0.1), (0.6, 0.2), (0.5, 0.3)])
    [True, True, False, False]
    """
    return [not any(o[0] <= p[0] and o[1] <= p[1] and (o[0] < p[0] or o[1] < p[1]) for o in points) for p in points]


def at_budgets(rows: Rows, budgets: Sequence[float], loss: str) -> Rows:
    """Of each family, the largest setting within each budget: chosen by bytes, before its loss is looked at."""
    found: Rows = []
    for budget in budgets:
        fit = [row for row in rows if row["share"] <= budget]
        there = {name: max((r for r in fit if r["family"] == name), key=_share, default=None) for name in FAMILIES}
        base = next((name for name in BASELINES if there[name]), None)
        for family, best in there.items():
            if best and base and (family == base or best["share"] >= FILLED * budget):
                here = {f"budget_{base}": f"{100 * budget:g}%", f"chosen_{base}": family, f"{loss}_at": best[loss]}
                if "later_recall" in best:
                    here["later_recall_at"] = best["later_recall"]
                found.append(here)
    return found


def _share(row: dict[str, Any]) -> float:
    return float(row["share"])


def needs(settings: Settings) -> str:
    """A checkpoint and texts at full size, and the library that packs bits."""
    if importlib.util.find_spec("hqq") is None:
        return "quantised caches need hqq: pip install '.[quant]'"
    return missing(settings)


def views(settings: Settings) -> list[Table | Plot]:
    """For each level plots and a table, and the families at equal budgets."""
    levels = settings.options.levels
    found: list[Table | Plot] = []
    names = {"share": "K+V, share of dense in 16 bits", "curve": ""}
    text = {
        "attention": "Attention KL",
        "needle": "KL of the next token (needles)",
        "text": "KL of the next token (texts)",
    }
    for part, what in (("single", "one technique"), ("combined", "combinations")):
        for level in levels:
            y = f"{LOSS[level]}_{part}"
            labels = {**names, y: f"{text[level]}, nats"}
            found.append(Plot("line", f"{text[level]}: {what}", "share", y, hue="curve", log=["y"], labels=labels))
        if "needle" in levels:
            y = f"later_recall_{part}"
            labels = {**names, y: "share found"}
            title = f"Passwords asked for after compression: {what}"
            found.append(Plot("line", title, "share", y, hue="curve", labels=labels))
    for level in levels:
        extra = {"attention": ["output_error"], "needle": [], "text": []}[level]
        metrics = [LOSS[level], *extra, f"{level}_front"]
        note = f"Sorted by bytes, as a share of dense K+V. {level}_front: share of prompts with it on the Pareto front."
        found.append(Table(f"Settings by bytes: {text[level]}", metrics, [], "setting", note=note))
    against: dict[str, Any] = {"baseline": f"100.0% {DENSE}", "pair": ["prompt"]}
    for level in [level for level in levels if level != "attention"]:
        title = f"Perplexity of the true continuation: {level}"
        note = "A cache that makes the model less sure can win where the dense one is wrong: read it with the KL."
        found.append(Table(title, [f"{level}_perplexity"], [], "setting", **against, note=note))
    if "needle" in levels:
        note = "Share found. recall: the question ends the prompt. later_recall: four questions after the prompt."
        metrics = ["recall", "later_recall"]
        found.append(Table("Passwords found", metrics, [], "setting", **against, better="higher", note=note))
    for base in BASELINES:
        for level in levels:
            found.append(_equal_bytes(base, text[level], f"{LOSS[level]}_at", "lower"))
        if "needle" in levels:
            found.append(_equal_bytes(base, "Passwords asked for after compression", "later_recall_at", "higher"))
    return found


def _equal_bytes(base: str, title: str, metric: str, better: str) -> Table:
    by = f"chosen_{base}"
    note = (
        f"Budgets are shares of dense K+V. Each family is shown with its largest setting within the budget, if that "
        f"uses at least {FILLED:.0%} of it; {base} is always shown."
    )
    title = f"Within a budget, compared with {base}: {title}"
    return Table(title, [metric], [f"budget_{base}"], by, baseline=base, pair=["prompt"], better=better, note=note)


EXPERIMENT = Experiment(
    name="pareto",
    title="Bytes against quality: prune, evict, quantise, or combine?",
    paper="",
    about="For a given number of bytes, which loses least: pruning channels, evicting tokens, quantising, or a "
    "combination? Caches are stored as the library stores them, in 16 bits unless quantised, with the last 32 tokens "
    "dense. The settings are the share of channels pruned, the share of tokens kept, and the bits of keys and values "
    "(in groups of 32). Attention KL is KL(compressed ‖ dense), which stays finite when tokens are evicted, mean over "
    "layers; KL of the next token is KL(dense ‖ compressed). Intervals are over prompts.",
    sizes={
        "smoke": Options(prompts=1, tokens=160, later=8, ratios=(0.5,), shares=(0.5,), bits=(4,), budgets=(0.82, 0.4)),
        "pocket": Options(),
        "full": Options(levels=LEVELS, prompts=20, tokens=4096, later=256),
    },
    cells=cells,
    run=run,
    views=views,
    needs=needs,
)
