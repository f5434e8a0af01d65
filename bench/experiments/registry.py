"""`Experiment`, what a file in this folder defines; `Settings`, what it is asked with; and the list of all of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

#: Modules of this folder, in the order in which `all` runs them.
MODULES: tuple[str, ...] = (
    "reconstruction",
    "solver_quality",
    "niah",
    "longbench.llama",
    "longbench.mistral",
)
SIZES = ("smoke", "pocket", "full")


@dataclass(frozen=True)
class Settings:
    """What the command line says, common flags and the experiment's own options.

    Attributes
    ----------
    size : str
        "smoke" (seconds), "pocket" (minutes, offline) or "full" (the paper's, with a checkpoint and mostly a GPU).
    seed : int
    model : str
        Hub id, folder or .gguf file; empty for the pocket model, where an experiment needs one.
    device : str
        As torch has it: "cpu", "cuda", ...
    options : frozen dataclass
        The experiment's own, of `Experiment.sizes`, as ``--set`` changed them.
    """

    size: str
    seed: int
    model: str
    device: str
    options: Any


@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    Attributes
    ----------
    name : str
        As on the command line, and the folder of the results.
    title : str
    paper : str
        Which figure or table of the paper, "Fig. 5"; empty if it is none of them.
    about : str
        One paragraph for the report: what is measured, how, on what.
    sizes : dict
        For each of "smoke", "pocket" and "full" an instance of the experiment's options, a frozen dataclass.
    cells : callable
        ``cells(settings)`` lists one config for each measurement: a dict that JSON can hold, with all that `run` needs
        (model, device and seed included), since the result is filed under it.
    run : callable
        ``run(config)`` measures and returns rows: flat dicts of numbers and text. It is sent to other processes by
        name, so it stands at the top of its module. Raise a `GraceError` for what a user can mend.
    views : callable
        ``views(settings)`` lists what the report shows, each a `Table` or a `Plot`.
    needs : callable
        ``needs(settings)`` says what is missing here (no GPU, no weights), or "" if nothing is. Where something is, no
        cell is started, and the report says "not run here".
    """

    name: str
    title: str
    paper: str
    about: str
    sizes: Mapping[str, Any]
    cells: Callable[[Settings], Sequence[dict[str, Any]]]
    run: Callable[[dict[str, Any]], list[dict[str, Any]]]
    views: Callable[[Settings], Sequence[Table | Plot]]
    needs: Callable[[Settings], str] = lambda settings: ""

    def __post_init__(self) -> None:
        if sorted(self.sizes) != sorted(SIZES):
            raise OptionError(f"{self.name}: sizes has {sorted(self.sizes)}; give options for each of {SIZES}.")

    @property
    def option_names(self) -> tuple[str, ...]:
        """What ``--set`` can set."""
        return tuple(field.name for field in dataclasses.fields(self.sizes["pocket"]))

    def options(self, size: str, changes: Mapping[str, str]) -> Any:
        """The options of a size, changed by texts such as "3", "0.5", "mies" or "4,6"; those of others are ignored."""
        options = self.sizes[size]
        known = {name: text for name, text in changes.items() if name in self.option_names}
        return dataclasses.replace(options, **{k: _value(k, text, getattr(options, k)) for k, text in known.items()})


def experiments() -> dict[str, Experiment]:
    """All experiments by name, in the order of `MODULES`."""
    found = {}
    for module in MODULES:
        experiment: Experiment = importlib.import_module(f"bench.experiments.{module}").EXPERIMENT
        found[experiment.name] = experiment
    return found


def _value(name: str, text: str, default: Any) -> Any:
    """The text as a value of the default's type; a list is written with commas."""
    if isinstance(default, tuple):
        parts = [part for part in text.split(",") if part]
        return tuple(_value(name, part, default[0] if default else part) for part in parts)
    if isinstance(default, str) or default is None:
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        raise OptionError(
            f"--set {name}={text}: give a value of type {type(default).__name__}, as the default, {default!r}."
        )
    return value
