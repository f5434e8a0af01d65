"""Command line: measures what is not on record. Exit codes: 0 all there, 1 cells failed, 2 bad input, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.experiments.registry import SIZES, Experiment, Settings, experiments
from bench.provenance import provenance
from grace_opt._util.optional import require
from grace_opt.errors import GraceError, OptionError
from grace_opt.sweep import Cell, Description, SweepResult, run_sweep, write_description


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return its exit code."""
    args = _parser().parse_args(arguments)
    known = experiments()
    if args.list or not args.names:
        for experiment in known.values():
            paper = f", {experiment.paper}" if experiment.paper else ""
            lines = f"{experiment.name}{paper}", experiment.title, f"--set {', '.join(experiment.option_names)}"
            print("\n    ".join([lines[0], lines[1], *textwrap.wrap(lines[2], 76)]))
        return 0
    try:
        chosen = _chosen(args.names, known)
        changes, only = dict(_pair("--set", text) for text in args.set), [_pair("--only", text) for text in args.only]
        if stray := [name for name in changes if not any(name in e.option_names for e in chosen)]:
            offered = sorted({name for e in chosen for name in e.option_names})
            raise OptionError(f"--set {stray[0]}: no such option; there are {', '.join(offered)}.")
        with _executor(args.dask) as executor:
            source = {**provenance(), "device": _device(args.device)}
            results = [_run(experiment, args, changes, only, executor, source) for experiment in chosen]
    except GraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped: finished cells are kept in {args.out}; the same command continues from there", file=sys.stderr)
        return 130
    print(f"grace-opt report {shlex.quote(str(args.out))} writes the report")
    return 1 if any(result and result.failures for result in results) else 0


def _run(
    experiment: Experiment,
    args: argparse.Namespace,
    changes: dict[str, str],
    only: list[tuple[str, str]],
    executor: Any,
    source: dict[str, Any],
) -> SweepResult | None:
    settings = _settings(experiment, args, changes)
    cells = [Cell(experiment.name, config) for config in experiment.cells(settings)]
    wanted = [cell for cell in cells if _matches(cell.config, only)]
    if cells and not wanted:
        there = "; ".join(f"{n}: {', '.join(sorted({str(c.config[n]) for c in cells}))}" for n in dict(only))
        raise OptionError(f"--only leaves no cell of {experiment.name}, whose cells have {there}.")
    missing = experiment.needs(settings)
    command = f"python -m bench.experiments {experiment.name} --size {args.size}"
    command += "".join(f" --set {shlex.quote(f'{k}={v}')}" for k, v in changes.items() if k in experiment.option_names)
    command += f" --model {shlex.quote(args.model)}" if args.model else ""
    command += "" if args.device == "cpu" else f" --device {args.device}"
    command += f" --seed {args.seed}" if args.seed else ""
    write_description(
        args.out,
        Description(
            experiment.name,
            experiment.title,
            experiment.paper,
            experiment.about,
            command,
            [cell.key for cell in cells],
            list(experiment.views(settings)),
            missing,
        ),
    )
    if missing:
        print(f"{experiment.name}: not run here: {missing}")
        return None
    done = run_sweep(
        wanted, experiment.run, args.out, workers=args.workers, executor=executor, provenance=source, progress=None
    )
    print(f"{experiment.name}: {done.before + done.made} of {done.total} cells done, {done.made} of them now")
    for failure in done.failures:
        print(f"  failed: {json.dumps(failure.config)}: {failure.error}", file=sys.stderr)
    return done


def settings_of(experiment: Experiment, arguments: Sequence[str]) -> Settings:
    """Return the settings of an experiment that these arguments ask for.

    Parameters
    ----------
    experiment : Experiment
    arguments : sequence of str
        What follows ``python -m bench.experiments``.
    """
    args = _parser().parse_args(arguments)
    return _settings(experiment, args, dict(_pair("--set", text) for text in args.set))


def _settings(experiment: Experiment, args: argparse.Namespace, changes: dict[str, str]) -> Settings:
    return Settings(args.size, args.seed, args.model, args.device, experiment.options(args.size, changes))


def _chosen(names: Sequence[str], known: dict[str, Experiment]) -> list[Experiment]:
    if unknown := [name for name in names if name not in known and name != "all"]:
        raise OptionError(f"no experiment is called {unknown[0]!r}; there are {', '.join(known)}, and all.")
    return list(known.values()) if "all" in names else [known[name] for name in dict.fromkeys(names)]


def _matches(config: dict[str, Any], only: list[tuple[str, str]]) -> bool:
    """Whether the config has, for every name, one of the values that were given for it."""
    if stray := [name for name, _ in only if name not in config]:
        raise OptionError(f"--only {stray[0]}: cells have no such setting: there are {', '.join(config)}.")
    return all(str(config[name]) in {value for other, value in only if other == name} for name, _ in only)


@contextlib.contextmanager
def _executor(address: str) -> Iterator[Any]:
    """Dask's, at the address of its scheduler; None without an address."""
    if not address:
        yield None
        return
    try:
        client = require("distributed", "bench", "--dask").Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise OptionError(f"--dask {address}: no scheduler answers there ({error}).") from None
    with client:
        yield client.get_executor()


def _device(name: str) -> str:
    """The device in words, or an error if it is not there."""
    import torch

    try:
        torch.empty(1, device=name)
    except (AssertionError, RuntimeError) as error:
        raise OptionError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return f"{name} ({torch.cuda.get_device_name(name)})" if torch.device(name).type == "cuda" else name


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise OptionError(f"{flag} {text!r}: write name=value.")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experiments",
        description="The paper's experiments. Finished cells are not measured again, so you can stop and resume.",
        epilog="Example: python -m bench.experiments solver_quality --size smoke && grace-opt report results",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments, or all; none: list them")
    parser.add_argument("--list", action="store_true", help="list the experiments and their options")
    parser.add_argument("--size", choices=SIZES, default="pocket", help="seconds, minutes offline, or the paper's")
    parser.add_argument("--smoke", dest="size", action="store_const", const="smoke", help="the same as --size smoke")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an experiment's option")
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE", help="only cells with this setting")
    parser.add_argument("--model", default="", help="Hub id, folder or .gguf file; default: the pocket model")
    parser.add_argument("--device", default="cpu", help="as torch names it (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="all randomness comes from it (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default: results)")
    parser.add_argument("--workers", type=int, default=1, help="processes on this machine (default: 1)")
    parser.add_argument("--dask", default="", metavar="ADDRESS", help="a Dask scheduler, tcp://host:8786, instead")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
