"""``grace-opt doctor``: show versions, which code runs, a trial of each part, and what is missing."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console

from .._util.optional import pip_install
from .._util.terminal import FittingTable
from ._shared.operation import Operation
from .explanation import COMPILED, ON_GPU, Choice, Explanation, explain
from .operations import OPERATIONS

#: Libraries to look for: distribution, the extra of ours that installs it (empty: always needed), its purpose.
PACKAGES = (
    ("torch", "", "everything"),
    ("numpy", "", "everything"),
    ("numba", "", "compiled loops"),
    ("llvmlite", "", "compiled loops"),
    ("cvxpy", "", "the sdp method"),
    ("transformers", "hf", "pruning key caches"),
    ("accelerate", "hf", "models on several devices, and grace-opt lm-eval"),
    ("gguf", "hf", "models in .gguf files"),
    ("triton", "gpu", "kernels for the GPU"),
    ("hqq", "quant", "keys and values in few bits"),
    ("optimum-quanto", "quant", "keys and values in few bits"),
    ("lm_eval", "lm-eval", "grace-opt lm-eval"),
    ("matplotlib", "demo", "the demo's pictures"),
    ("pandas", "bench", "reports of experiments"),
)
#: The solvers that the sdp method can use through cvxpy.
SDP_SOLVERS = ("CLARABEL", "SCS")


@dataclass(frozen=True)
class Trial:
    """Result of one implementation's trial; `problem` is empty if it agreed with the reference."""

    operation: str
    device: str
    kernel: str
    problem: str


@dataclass(frozen=True)
class Report:
    """What `examine` found.

    Attributes
    ----------
    versions : dict
        Versions of Python and of installed libraries.
    sdp_solvers : tuple of str
        Solvers for semidefinite programs that cvxpy can use.
    missing : dict
        Maps a distribution to its purpose and how to install it.
    explanation : Explanation
    trials : tuple of Trial
        Empty if no trials were requested.
    """

    versions: dict[str, str]
    sdp_solvers: tuple[str, ...]
    missing: dict[str, str]
    explanation: Explanation
    trials: tuple[Trial, ...]

    @property
    def problems(self) -> list[str]:
        """What is broken, one line each."""
        return [f"{t.kernel} on {t.device} ({t.operation}): {t.problem}" for t in self.trials if t.problem]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "versions": self.versions,
            "sdp_solvers": list(self.sdp_solvers),
            "missing": self.missing,
            **self.explanation.to_dict(),
            "trials": [vars(trial) for trial in self.trials],
            "problems": self.problems,
        }


def examine(trials: bool = True, advance: Callable[[str], None] = lambda step: None) -> Report:
    """Examine the machine, and compare every loop and kernel that would run on it with its reference.

    Parameters
    ----------
    trials : bool
        Whether to run the trials; the first time this compiles all loops, which takes about a minute.
    advance : callable
        Called with the name of the next trial.
    """
    explanation = explain()
    installed = {name: _version(name) for name, _, _ in PACKAGES}
    versions = {"python": platform.python_version(), "grace-opt": _version("grace-opt") or "a checkout"}
    return Report(
        versions | {name: found for name, found in installed.items() if found},
        _sdp_solvers(),
        {name: _how_to_get(extra, use) for name, extra, use in PACKAGES if not installed[name]},
        explanation,
        tuple(_trials(explanation, advance)) if trials else (),
    )


def show(report: Report, console: Console) -> None:
    """Print a report as tables."""
    by_code = {(t.operation, t.device): "" for t in report.trials}
    for t in report.trials:
        by_code[t.operation, t.device] = by_code[t.operation, t.device] or t.problem
    table = FittingTable("operation", "device", "runs", "trial")
    table.add_column("why", min_width=30)
    for choice in report.explanation.choices:
        if choice.code:
            problem = by_code.get((choice.operation, choice.device))
            tried = "" if problem is None else "FAILED" if problem else "ok"
            table.add_row(choice.operation, choice.device, choice.code, tried, f"{choice.what}: {choice.why}")
    console.print(table)
    for line in _lines(report):
        console.print(line, soft_wrap=True)


def _lines(report: Report) -> list[str]:
    explanation = report.explanation
    writing = "which can be written to"
    if not explanation.cache.writable:
        writing = "which cannot be written to: each process compiles anew; set NUMBA_CACHE_DIR to a folder that can be"
        writing = "which cannot be written to, and need not be" if explanation.machine_code else writing
    devices = {choice.device for choice in explanation.choices if choice.device != "cpu" and choice.code}
    tried = "broken:" if report.problems else "all trials agree with their references" if report.trials else "not tried"
    return [
        "versions: " + ", ".join(f"{name} {number}" for name, number in report.versions.items()),
        f"solvers for the sdp method: {', '.join(report.sdp_solvers) or 'none'}",
        f"GPUs: {', '.join(sorted(devices)) or 'none, torch sees no CUDA device'}",
        f"threads: {explanation.threads}; decoding on the CPU in {explanation.decoding_threads}",
        f"compiled loops are kept in {explanation.cache.path}, {writing}",
        f"compiled ahead of time: {explanation.ahead}",
        f"switched off: {', '.join(explanation.switched_off) or 'nothing'}",
        *(f"not installed: {name}, for {how}" for name, how in report.missing.items()),
        f"result: {tried}",
        *(f"  {problem}" for problem in report.problems),
    ]


def _trials(explanation: Explanation, advance: Callable[[str], None]) -> list[Trial]:
    by_name = {operation.name: operation for operation in OPERATIONS}
    trials = []
    for choice in explanation.choices:
        for kernel, trial in _code(by_name[choice.operation], choice):
            advance(kernel)
            trials.append(Trial(choice.operation, choice.device, kernel, _problem(trial)))
    return trials


def _code(operation: Operation, choice: Choice) -> list[tuple[str, Callable[[], bool]]]:
    """Return the trials of one choice, each with its name."""
    if choice.code == COMPILED and choice.device == "cpu" and operation.cpu is not None:
        return [(f"the compiled loop {operation.name}", operation.cpu.trial)]
    if choice.code != ON_GPU:
        return []
    device = torch.device(choice.device)
    return [(f"the Triton kernel {one.name}", partial(one.trial, device)) for one in operation.gpu]


def _problem(trial: Callable[[], bool]) -> str:
    try:
        with torch.no_grad():
            agrees = trial()
    except Exception as error:  # a compiler or driver may raise anything; the next trial may still work
        return f"its trial failed ({type(error).__name__}: {error}); please report this"
    return "" if agrees else "it differs from its reference; please report this"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _how_to_get(extra: str, use: str) -> str:
    return f"{use}: {pip_install(extra)}"


def _sdp_solvers() -> tuple[str, ...]:
    try:
        from cvxpy import installed_solvers
    except ImportError:  # one of `missing`
        return ()
    names: list[str] = installed_solvers()  # type: ignore[no-untyped-call]
    return tuple(name for name in SDP_SOLVERS if name in names)
