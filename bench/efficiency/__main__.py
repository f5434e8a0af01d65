"""Time to first token, time per token and memory of caches, side by side: ``python -m bench.efficiency``.

Writes docs/results/efficiency.{json,md,png}, or ``--out``. Ctrl-C keeps what is measured. If a cache runs out of memory
or fails, the page says so, and the others are still measured.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.efficiency.measure import MEASURED, STOPPED, WARM_UP, Row, contenders, measure
from bench.efficiency.methods import METHODS
from bench.efficiency.report import page
from bench.efficiency.subject import DTYPES, SHAPES, Subject, random_weights, real_weights
from bench.provenance import require_clean
from bench.report import parser_of, read_results, write_results
from grace_opt import MaskProvider
from grace_opt.errors import GraceError
from grace_opt.hf.models import disable_progress_bars

ATTENTION = ("sdpa", "eager")
#: Tokens that stay dense: no prompt is shorter.
RECENT = 32


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; everything that can be checked without a model is."""
    parser = parser_of("efficiency", __doc__)
    parser.add_argument("--shape", default="smollm2-135m", help=f"{', '.join(SHAPES)} (default %(default)s)")
    parser.add_argument("--model", help="a real model instead: Hub id, folder or .gguf file")
    parser.add_argument("--layers", type=int, help="of the shape (default: all; on a CPU 8 of smollm2-135m, 1 of 7-8B)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default %(default)s")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="prompts at once (default %(default)s)")
    parser.add_argument("--context", nargs="+", type=int, default=[2048, 8192], help="tokens (default %(default)s)")
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.6], help="share pruned (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="that count, after one (default %(default)s)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help=f"of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--attention", nargs="+", default=["sdpa"], help="sdpa, eager or both (default: sdpa)")
    args = parser.parse_args(given)
    for option, names, known in (
        ("--shape", [args.shape], SHAPES),
        ("--methods", args.methods, METHODS),
        ("--attention", args.attention, ATTENTION),
    ):
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(f"{option} {' '.join(unknown)}: write one of {', '.join(known)}")
    if args.model is not None and args.layers is not None:
        raise SystemExit("--layers cuts a --shape; with --model, leave it out")
    for option, least in (("batch", 1), ("rounds", 1), ("layers", 1), ("context", RECENT + 1), ("new_tokens", 2)):
        least += WARM_UP if option == "new_tokens" else 0
        values = getattr(args, option)
        if any(value < least for value in (values if isinstance(values, list) else [values]) if value is not None):
            raise SystemExit(f"--{option.replace('_', '-')}: write at least {least}")
    if not all(0 < ratio < 1 for ratio in args.ratio):
        raise SystemExit("--ratio: write shares between 0 and 1, for instance 0.6")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device; write --device cpu")
    return args


def check(args: argparse.Namespace, subject: Subject) -> None:
    """Stop where the model does not allow what was asked for."""
    if max(args.context) > subject.maximum:
        raise SystemExit(
            f"--context {max(args.context)}: this model reads at most {subject.maximum}; write that or less"
        )
    for ratio in args.ratio:
        try:
            MaskProvider("grace", ratio).count(subject.head_dim)
        except GraceError as error:
            raise SystemExit(f"--ratio {ratio:g}: {error}") from None


def run(args: argparse.Namespace, subject: Subject, rows: list[Row]) -> None:
    """Measure every size; `rows` fills as it goes.

    Parameters
    ----------
    args : argparse.Namespace
    subject : Subject
    rows : list of Row
        Empty.
    """
    sizes = [(a, b, c) for a in args.attention for b in args.batch for c in args.context]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        rows += [row for size in sizes for row in contenders(args.methods, args.ratio, size)]
        task = bar.add_task("", total=len(rows) * (1 + args.rounds))
        for size in sizes:
            of_size = [row for row in rows if (row.attention, row.batch, row.context) == size]
            label = f"{size[0]}, {size[2]:,} × {size[1]}"
            begun: list[str] = []

            def advance(step: str, label: str = label, begun: list[str] = begun) -> None:
                bar.update(task, advance=1 if begun else 0, description=f"{label}: {step}")
                begun.append(step)

            settings: dict[str, Any] = {"new_tokens": args.new_tokens, "rounds": args.rounds, "device": args.device}
            measure(subject.model, of_size, **settings, advance=advance)
            bar.advance(task)


def results(args: argparse.Namespace, subject: Subject, rows: Sequence[Row], source: dict[str, Any]) -> dict[str, Any]:
    """Everything that the page is formed from."""
    about = {
        "words": subject.words,
        "shape": subject.shape,
        "layers": subject.layers,
        **{name: getattr(args, name) for name in ("device", "dtype", "rounds", "new_tokens")},
        "device_name": torch.cuda.get_device_name() if args.device == "cuda" else "the CPU",
        "threads": torch.get_num_threads(),
    }
    return {"provenance": source, **about, "rows": [row.to_dict() for row in rows]}


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    source = require_clean(args.allow_dirty)
    disable_progress_bars()
    # The pocket of memory that a cache keeps is the subject, not whether a prompt is worth pruning.
    warnings.filterwarnings("ignore", message="the prompt has .* tokens and the last")
    if args.model is None:
        subject = random_weights(args.shape, args.layers, args.device, args.dtype)
    else:
        subject = real_weights(args.model, args.device, args.dtype)
    check(args, subject)
    rows: list[Row] = []
    stopped = False
    try:
        run(args, subject, rows)
    except KeyboardInterrupt:
        stopped = True
    if not any(row.status == MEASURED for row in rows):
        found = ", ".join(sorted({row.status for row in rows if row.status != STOPPED})) or "stopped"
        raise SystemExit(f"nothing was measured ({found}), so nothing is written")
    print(write_results(args.out, results(args, subject, rows, source), page, allow_dirty=args.allow_dirty))
    if stopped:
        raise SystemExit(f"stopped; what was measured is in {args.out.name}.json, .md and .png")


if __name__ == "__main__":
    main()
