"""Command line of the solver benchmark: ``run`` measures, ``report`` writes docs/results/solvers.{json,md}."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.solvers import report, run
from bench.solvers.suites import OPTIONAL, SUITES

RESULTS = Path(__file__).resolve().parent.parent.parent / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.solvers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure the cells that are not on record yet")
    measure.add_argument("--data", type=Path, required=True, help="folder with interaction/, k-cluster/, mdplib/")
    measure.add_argument("--out", type=Path, required=True, help="folder for the records, one file a cell")
    known = ", ".join(f"{name} (only when named)" if name in OPTIONAL else name for name in SUITES)
    measure.add_argument("--suite", nargs="+", metavar="NAME", help=f"some of: {known}")
    measure.add_argument("--method", nargs="+", metavar="NAME", help="only these; any registered method or peer")
    measure.add_argument("--limit", type=float, metavar="SECONDS", help="no cell gets more than this")
    measure.add_argument("--retry-failed", action="store_true", help="measure again what failed")
    tell = commands.add_parser("report", help="write the tables from the records")
    tell.add_argument("--runs", type=Path, required=True, help="the folder that `run --out` filled")
    tell.add_argument("--results", type=Path, default=RESULTS, help="where the tables go (default: docs/results)")
    args = parser.parse_args()
    if args.command == "report":
        print(report.write(args.runs, args.results))
        return
    try:
        done = run.run(args.data, args.out, args.suite, args.method, args.limit, args.retry_failed)
    except KeyboardInterrupt:
        raise SystemExit(
            f"stopped: what is finished is kept in {args.out}; the same command goes on from there"
        ) from None
    print(f"{done} cells measured; python -m bench.solvers report --runs {args.out} writes the tables")


if __name__ == "__main__":
    main()
