"""Table 4: time to first token and per token, by `bench.efficiency`, with the paper's numbers in the same table.

A cell is one length of the prompt with all caches, which take turns in every round: so rounds are the pairs. For peak
memory, floors and plots, run ``python -m bench.efficiency`` itself. Source: GRACE (arXiv 2604.16983), Table 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench.efficiency.measure import MEASURED, contenders, measure
from bench.efficiency.methods import METHODS
from bench.efficiency.report import PAPER
from bench.efficiency.subject import SHAPES, random_weights
from bench.experiments.registry import Experiment, Settings
from grace_opt.errors import OptionError
from grace_opt.sweep import Paper, Plot, Table

#: The paper's machine; it does not say how long the prompt was.
THEIRS = {"shape": "llama3-8b", "device": "RTX 3090", "tokens": "not stated"}
COMMAND = "python -m bench.experiments efficiency --size full --device cuda"


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes
    ----------
    shape : str
        Of the model, whose weights are random: times do not depend on them.
    layers : int
        How many of its layers; 0 means as `bench.efficiency` chooses: on a GPU all.
    tokens : tuple of int
        Lengths of the prompt.
    ratios : tuple of float
    methods : tuple of str
        Keys of `bench.efficiency.methods.METHODS`; think among them.
    dtype : str
    new_tokens, rounds : int
    """

    shape: str = "smollm2-135m"
    layers: int = 2
    tokens: tuple[int, ...] = (512, 2048)
    ratios: tuple[float, ...] = (0.5, 0.6)
    methods: tuple[str, ...] = ("dense", "think", "grace", "grace+local_search")
    dtype: str = "float32"
    new_tokens: int = 10
    rounds: int = 6


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each length."""
    o: Options = settings.options
    if unknown := [m for m in o.methods if m not in METHODS] or [m for m in ("think",) if m not in o.methods]:
        raise OptionError(f"--set methods: {unknown[0]!r}; give some of {', '.join(METHODS)}, think among them.")
    if o.shape not in SHAPES:
        raise OptionError(f"--set shape={o.shape}: give one of {', '.join(SHAPES)}.")
    given = {name: getattr(o, name) for name in ("shape", "layers", "dtype", "new_tokens", "rounds")}
    lists = {"ratios": list(o.ratios), "methods": list(o.methods)}
    return [{**given, **lists, "device": settings.device, "length": length} for length in o.tokens]


def run(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every cache in every round; a dense cache is there once for each ratio, to stand beside it."""
    c = config
    subject = random_weights(c["shape"], c["layers"] or None, c["device"], c["dtype"])
    rows = contenders(c["methods"], c["ratios"], ("sdpa", 1, c["length"]))
    measure(
        subject.model,
        rows,
        new_tokens=c["new_tokens"],
        rounds=c["rounds"],
        device=c["device"],
        advance=lambda title: None,
    )
    if failed := [row for row in rows if row.status != MEASURED and not row.status.startswith("not run")]:
        raise OptionError(f"{METHODS[failed[0].method].title}: {failed[0].status}")
    return [
        {
            "method": METHODS[row.method].title,
            "ratio": ratio,
            "tokens": str(c["length"]),
            "round": number,
            "ttft_s": first,
            "tpot_ms": 1000 * step,
        }
        for row in rows
        for ratio in (c["ratios"] if row.ratio is None else [row.ratio])
        for number, (first, step) in enumerate(zip(row.ttft_s, row.tpot_s, strict=True))
    ]


def views(settings: Settings) -> list[Table | Plot]:
    """A plot of the time per token, and both times compared with THINK's, with the paper's numbers."""
    labels = {"tokens": "tokens of the prompt", "tpot_ms": "time per token (ms)", "ratio": "λ", "method": ""}
    steps = Plot("bar", "Time per token", x="tokens", y="tpot_ms", hue="method", facet="ratio", labels=labels)
    tables = [
        Table(
            title,
            metrics=[column],
            rows=["shape", "device", "tokens", "ratio"],
            by="method",
            baseline="THINK",
            pair=["round"],
            compare="ratio",
            paper=[
                Paper(column, {**THEIRS, "ratio": ratio, "method": METHODS[method].title}, value, "Table 4", COMMAND)
                for (method, ratio), values in PAPER.items()
                for value in [values[at] * (1000 if column == "tpot_ms" else 1)]
            ],
            note="Ratios of means over rounds: unlike times, they carry over to other machines.",
        )
        for at, (title, column) in enumerate((("Time to first token, s", "ttft_s"), ("Time per token, ms", "tpot_ms")))
    ]
    return [steps, *tables]


def needs(settings: Settings) -> str:
    """A GPU, for the whole of a large model."""
    options: Options = settings.options
    if settings.size == "full" and options.layers == 0 and not torch.cuda.is_available():
        return f"all layers of {options.shape} need a GPU; on a CPU, write --set layers=1"
    return ""


EXPERIMENT = Experiment(
    name="efficiency",
    title="Time to first token and per token",
    paper="Table 4",
    about="How long do the first token and each later token take, with each cache? A model of the named shape, with "
    "random weights, reads a prompt and generates ten tokens or more with every cache in turn. With few layers, the "
    "embedding and the logits take a large share of a step, and other work on the machine shows: bench.efficiency "
    "measures more, and more carefully.",
    sizes={
        "smoke": Options(shape="tiny", tokens=(64,), ratios=(0.5,), new_tokens=6, rounds=2),
        "pocket": Options(),
        "full": Options("llama3-8b", 0, (4096, 8192), dtype="bfloat16", new_tokens=64, rounds=10),
    },
    cells=cells,
    run=run,
    views=views,
    needs=needs,
)
