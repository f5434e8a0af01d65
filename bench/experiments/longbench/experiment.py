"""What Tables 1 and 2 have in common: a cell is one example with all methods, a table is one eviction and KV size.

When: `llama` and `mistral` say which checkpoint, evictions and KV sizes. In every table the difference to THINK is
paired by example; in the average over tasks, as the paper's last column, the tasks are what is resampled.
Source: GRACE (arXiv 2604.16983), Tables 1 and 2.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from bench.experiments.longbench import printed
from bench.experiments.longbench.data import DataError, Example, cache_folder, digest, fetch, read_task
from bench.experiments.longbench.generate import (
    DENSE,
    Setting,
    answer,
    check_context,
    label,
    load,
    middle_truncated,
)
from bench.experiments.longbench.miniature import write_miniature
from bench.experiments.longbench.tasks import PROMPTS, TASKS
from bench.experiments.registry import Experiment, Settings
from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

#: Number of examples of a task in the miniature, if all are asked for.
MINIATURE = 8


@dataclass(frozen=True)
class Options:
    """What is answered, and by which caches.

    Attributes
    ----------
    data : str
        "miniature" (made here), "hub" (downloaded), or a folder with LongBench's own TASK.jsonl files.
    tasks : tuple of str
    examples : int
        Number of examples per task, from the first; 0 for all.
    evictions, budgets : tuple
        Every eviction with every KV size; "none" with budget 0 evicts nothing.
    ratios, methods : tuple
        Shares of channels pruned, and by which methods; eviction alone, "dense", is always measured.
    max_input : int
        Longer prompts lose their middle.
    max_new : int
        Largest number of new tokens, whatever the task says; 0 for the task's own.
    held_back : int
        Number of the prompt's last tokens decoded from the pruned cache; the paper's setting is 0.
    """

    data: str = "miniature"
    tasks: tuple[str, ...] = tuple(TASKS)
    examples: int = 0
    evictions: tuple[str, ...] = ("snapkv",)
    budgets: tuple[int, ...] = (96,)
    ratios: tuple[float, ...] = (0.5, 0.6)
    methods: tuple[str, ...] = ("think", "grace")
    max_input: int = 512
    max_new: int = 0
    held_back: int = 0


@dataclass(frozen=True)
class Subject:
    """One of the paper's tables: its number and the checkpoint's Hub id."""

    table: int
    checkpoint: str

    @property
    def name(self) -> str:
        """As on the command line."""
        return {1: "longbench_llama", 2: "longbench_mistral"}[self.table]

    @property
    def command(self) -> str:
        """What measures the paper's numbers."""
        return f"python -m bench.experiments {self.name} --size full --model {self.checkpoint} --device cuda"


def experiment(subject: Subject, full: Options, pocket: Options) -> Experiment:
    """The experiment of one table."""
    return Experiment(
        name=subject.name,
        title=f"LongBench with {label(subject.checkpoint)}",
        paper=f"Table {subject.table}",
        about=f"What are the scores on LongBench's 16 English tasks if tokens are evicted and key channels pruned? "
        "Scores are 0 to 100, with greedy decoding. The paper's settings are "
        f"{label(subject.checkpoint)} in half precision, prompts of at most {full.max_input} tokens, cut in the "
        "middle, and no chat template. dense is eviction without pruning; it is repeated at each ratio for "
        "comparison. With the pocket model, on miniature tasks, this shows that the code runs. That model cannot "
        "summarise, count or program: most of its scores are near zero for every method and say nothing about the "
        "methods.",
        sizes={
            "smoke": replace(pocket, examples=1, budgets=(64,), ratios=(0.6,), max_input=192, max_new=2),
            "pocket": pocket,
            "full": full,
        },
        cells=partial(cells, subject),
        run=run,
        views=partial(views, subject),
        needs=partial(needs, subject),
    )


def needs(subject: Subject, settings: Settings) -> str:
    """The paper's size wants its checkpoint, and data from the Hub are downloaded before anything starts."""
    if settings.size == "full" and settings.model in ("", "pocket"):
        return f"this size needs a checkpoint and a GPU: {subject.command}"
    if settings.options.data == "hub":
        fetch(settings.options.tasks)
    return ""


def cells(subject: Subject, settings: Settings) -> list[dict[str, Any]]:
    """One for each example of each task."""
    options: Options = settings.options
    if unknown := [task for task in options.tasks if task not in TASKS]:
        raise OptionError(f"tasks: LongBench has no {unknown[0]!r} in English; there are {', '.join(TASKS)}.")
    for setting in _settings(options.evictions, options.budgets, options.ratios, options.methods):
        setting.check()
    shared = {
        "table": subject.table,
        "model": settings.model,
        "device": settings.device,
        "data": options.data,
        "evictions": list(options.evictions),
        "budgets": list(options.budgets),
        "ratios": list(options.ratios),
        "methods": list(options.methods),
        "max_input": options.max_input,
        "max_new": options.max_new,
        "held_back": options.held_back,
        "prompts": PROMPTS,
        "seed": settings.seed,
    }
    found = []
    for task in options.tasks:
        there, mark = _there(options.data, task)
        wanted = min(options.examples or there, there)
        found += [{"task": task, "example": at, "digest": mark, **shared} for at in range(wanted)]
    return found


def run(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer one example with every cache."""
    task, example = TASKS[config["task"]], _example(config)
    model, tokenizer = load(config["model"], config["device"])
    check_context(
        model, config["model"], config["max_input"], "max_input", "give at most that many with --set max_input=..."
    )
    ids = tokenizer(task.prompt(example.context, example.question), return_tensors="pt").input_ids
    prompt = middle_truncated(ids, config["max_input"])
    new_tokens = min(task.new_tokens, config["max_new"] or task.new_tokens)
    tables = _columns(config["table"], config["evictions"], config["budgets"])
    rows, texts = [], dict[Setting, str]()
    for setting in _settings(config["evictions"], config["budgets"], config["ratios"], config["methods"]):
        once = replace(setting, ratio=0.0) if setting.method == DENSE else setting
        if once not in texts:
            texts[once] = answer(
                model,
                tokenizer,
                prompt,
                once,
                new_tokens,
                newline=task.stop_at_newline,
                held_back=config["held_back"],
            )
        points = task.score(texts[once], example.answers, example.classes)
        rows.append(
            {
                "checkpoint": label(config["model"]),
                "eviction": setting.eviction,
                "kv": setting.kv,
                "ratio": setting.ratio,
                "method": setting.method,
                "panel": f"{_named(setting.eviction)}, {setting.kv}, λ = {setting.ratio:g}",
                "score": points,
                **{name: points if name == _column(setting.eviction, setting.kv) else None for name in tables},
                "id": example.id,
                "tokens": prompt.shape[1],
                "cut": ids.shape[1] - prompt.shape[1],
                "answer": texts[once],
            }
        )
    return rows


def views(subject: Subject, settings: Settings) -> list[Table | Plot]:
    """The average over tasks, then a table for each eviction and KV size, then a picture of all tasks."""
    options: Options = settings.options
    average = Table(
        "Average over the tasks",
        metrics=["score"],
        rows=["checkpoint", "eviction", "kv", "ratio"],
        by="method",
        baseline="think",
        pair=["task", "example"],
        unit=["task"],
        better="higher",
        paper=printed.averages(subject.table, subject.command),
        note="Mean of the tasks' means; intervals are over tasks. dense: eviction only. ratio: share of key channels "
        "pruned, which is at most half that share of keys and values together.",
        digits=4,
    )
    found: list[Table | Plot] = [average]
    for eviction, kv in _pairs(subject.table, options.evictions, options.budgets):
        found.append(
            Table(
                f"{_named(eviction)}, KV size {kv}",
                metrics=[_column(eviction, kv)],
                rows=["checkpoint", "ratio", "task"],
                by="method",
                baseline="think",
                pair=["example"],
                better="higher",
                paper=printed.scores(subject.table, eviction, kv, subject.command),
            )
        )
    found.append(
        Plot(
            "heatmap",
            "Scores by task",
            x="method",
            y="task",
            value="score",
            facet="panel",
            labels={"panel": "cache", "method": ""},
        )
    )
    return found


def _settings(evictions: Any, budgets: Any, ratios: Any, methods: Any) -> list[Setting]:
    return [
        Setting(method, ratio, eviction, kv)
        for eviction in evictions
        for kv in budgets
        for ratio in ratios
        for method in (DENSE, *methods)
    ]


def _there(data: str, task: str) -> tuple[int, str]:
    """How many examples a task has, and the digest of its file where a file can differ."""
    if data == "miniature":
        return MINIATURE, ""
    if data == "hub":
        return TASKS[task].examples, ""
    return len(read_task(data, task)), digest(data, task)


def _example(config: dict[str, Any]) -> Example:
    task, data, at = config["task"], config["data"], config["example"]
    if data == "miniature":
        made: Example = _miniature(config["seed"], task)[at]
        return made
    folder = fetch([task]) if data == "hub" else Path(data)
    if data != "hub" and digest(folder, task) != config["digest"]:
        raise DataError(f"{folder / task}.jsonl has changed since the sweep started: start it again.")
    examples = read_task(folder, task)
    if at >= len(examples):
        raise DataError(
            f"{folder / task}.jsonl has {len(examples)} examples, LongBench {TASKS[task].examples}: delete the files "
            f"in {cache_folder()} and start again."
        )
    found: Example = examples[at]
    return found


@lru_cache(maxsize=2)
def _miniature(seed: int, task: str) -> tuple[Example, ...]:
    """Through files, as any other data set."""
    with tempfile.TemporaryDirectory() as folder:
        return read_task(write_miniature(Path(folder), (task,), MINIATURE, seed), task)


def _pairs(table: int, evictions: Any, budgets: Any) -> list[tuple[str, int]]:
    """The evictions and KV sizes of the paper's table, then those that are measured beside them."""
    return list(dict.fromkeys([*printed.pairs(table), *((e, kv) for e in evictions for kv in budgets)]))


def _columns(table: int, evictions: Any, budgets: Any) -> list[str]:
    return [_column(eviction, kv) for eviction, kv in _pairs(table, evictions, budgets)]


def _column(eviction: str, kv: int) -> str:
    return f"{eviction} {kv}"


def _named(eviction: str) -> str:
    return {"snapkv": "SnapKV", "h2o": "H2O", "none": "No eviction"}[eviction]
