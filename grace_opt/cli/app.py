"""The command line, ``grace-opt``: demo, tune, solve, compare, generate, methods, basis, export, lm-eval, report,
doctor.

Text is printed as it is: rich's markup is never interpreted in text from users, files or models. For the exit codes
see `Exit`. Built on typer and rich.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from enum import IntEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from .. import api, instances
from .._util.files import NO_SPACE_ERRORS, new_folder
from .._util.optional import pip_install, require
from .._util.progress import progress_bar
from .._util.terminal import FittingTable, escape_path, use_ascii_fallback
from ..comparison import Comparison, ComparisonError
from ..comparison.json_values import solution_to_dict, to_json_text
from ..errors import GraceError, OptionError, SolverError
from ..instances import generators
from ..problem import Problem
from ..problem import symmetrize as symmetrize_matrix
from ..solution import Solution
from .tables import print_basis, print_demo, print_layers, print_tune, solution_table
from .values import parse_option, parse_vertices

EXIT_CODES = (
    "Exit codes: 0 answered; 1 the output cannot be written; 2 bad input or options, or too little memory; 3 a limit "
    "stopped a method, and the best answer is not proved optimal; 4 a method refused or failed; 130 Ctrl-C. With 3, 4 "
    "and 130, the results so far are printed first."
)
TUNE_EXIT_CODES = (
    "Exit codes: 0 a setting keeps what was asked for; 1 the output cannot be written; 2 bad input or options, or too "
    "little memory; 3 the time limit stopped it, or no setting keeps what was asked for (the closest is shown); 4 "
    "nothing could be measured; 130 Ctrl-C. With 3 and 130, what was measured is printed and written first."
)
app = typer.Typer(
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # else brackets in a help text or in a user's words would be styles, or an error
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console, errors = (Console(stderr=stderr, markup=False, emoji=False, highlight=False) for stderr in (False, True))


#: What `tune` writes.
TUNE_FILES = ("cache.json", "tune.json", "tune.png")


class Exit(IntEnum):
    """What the exit code means."""

    OK = 0
    OUTPUT = 1
    BAD_INPUT = 2
    LIMIT = 3
    SOLVER = 4
    INTERRUPTED = 130


VERTICES_HELP = "vertices such as 0,3,17, or names that the file gives them, quoted if they have commas: '\"a,b\",c'"
File = Annotated[
    Path,
    typer.Argument(
        help=f"Instance: {', '.join(instances.SUFFIXES)} (k-cluster .dat, MDPLIB .txt, DIMACS .clq, .col); text also "
        "gzipped, as in W.csv.gz."
    ),
]
K = Annotated[int | None, typer.Option("-k", "--k", help="Number of vertices to choose; default: as in the file.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        help="Stop a method after this many seconds and keep its best choice. In solve, --certify counts as well; in "
        "compare, it gets as long once more."
    ),
]
Target = Annotated[
    float | None, typer.Option(help="Stop searching as soon as f is at most this; with --maximize, at least this.")
]
Patience = Annotated[
    float | None, typer.Option(help="Stop a search after this many seconds without improvement; not reproducible.")
]
Certify = Annotated[bool, typer.Option(help="Compute a certified bound and the gap to it.")]
Tight = Annotated[bool, typer.Option("--tight", help="Compute a tighter bound, which takes longer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Maximize = Annotated[
    bool, typer.Option("--maximize", help="Seek the largest f: the heaviest, densest or most diverse choice.")
]
Symmetrize = Annotated[
    bool, typer.Option("--symmetrize", help="If the file's W is asymmetric, take (W + W^T)/2, which has the same f.")
]
Required = Annotated[str | None, typer.Option(help=f"Always chosen: {VERTICES_HELP}.")]
Protected = Annotated[str | None, typer.Option(help=f"Never chosen: {VERTICES_HELP}.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"grace-opt {version('grace-opt')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Find minimum-weight induced subgraphs of k vertices, and prune key caches with them. Try first: grace-opt demo"""


@contextmanager
def _errors_as_exit_codes() -> Iterator[None]:
    """Turn our errors and Ctrl-C into one line and an exit code; anything else is a bug and keeps its traceback."""
    try:
        yield
    except SolverError as error:
        _fail("refused", error, Exit.SOLVER)
    except GraceError as error:
        _fail("error", error, Exit.BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        told = str(error).rstrip(".") or "no details given"
        _fail("error", f"there is too little memory: {told}. Use a smaller instance.", Exit.BAD_INPUT)
    except KeyboardInterrupt:
        _fail("interrupted", "nothing had been found yet.", Exit.INTERRUPTED)


def _is_memory(error: Exception) -> bool:
    """Whether memory ran out; on the CPU, torch has no exception type for it."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error)


def _fail(what: str, why: object, code: Exit) -> NoReturn:
    errors.print(Text.assemble((f"{what}:", "red"), f" {escape_path(str(why), sys.stderr)}"), soft_wrap=True)
    raise typer.Exit(code)


def run() -> None:
    """Run ``grace-opt``, whatever the terminal's encoding and wherever the output goes."""
    if sys.stderr is None:  # closed, as by 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the end)
    if sys.stdout is None:  # before there is an answer that nobody could read
        errors.print("error: the output cannot be written: it is closed.", soft_wrap=True)
        sys.exit(Exit.OUTPUT)
    for stream in (sys.stdout, sys.stderr):
        use_ascii_fallback(stream)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # not at the interpreter's end, where nobody could say what went wrong
    except OSError as error:
        if error.errno not in (*NO_SPACE_ERRORS, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushing the rest would fail again
        if error.errno != errno.EPIPE:  # a reader such as head has closed the pipe: not an error
            errors.print(f"error: the output cannot be written: {error.strerror}.", soft_wrap=True)
        sys.exit(Exit.OUTPUT)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the solvers, their guarantees and their options."""
    rows: list[dict[str, Any]] = [
        {
            "method": spec.name,
            "exact": spec.exact,
            "searches": spec.searches,
            "guarantee": spec.guarantee,
            "options": {field.name: field.default for field in dataclasses.fields(spec.options)},
            "summary": spec.summary,
        }
        for spec in api.methods()
    ]
    if as_json:
        _print_json(rows)
        return
    table = FittingTable("method", "exact", "guarantee", "options")
    table.add_column("summary", min_width=30)
    for row in rows:
        options = "\n".join(f"{name}={value}" for name, value in row["options"].items())
        table.add_row(row["method"], "yes" if row["exact"] else "", row["guarantee"], options, row["summary"])
    console.print(table)


@app.command(epilog=EXIT_CODES)
def solve(
    file: File,
    k: K = None,
    method: Annotated[str, typer.Option(help="Name of the solver; for a list: grace-opt methods")] = "mies",
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of the method, name=value; repeatable. True, False and None as in Python or JSON; start= also "
            "takes vertices, as --required does."
        ),
    ] = None,
    maximize: Maximize = False,
    symmetrize: Symmetrize = False,
    required: Required = None,
    protected: Protected = None,
    seed: Seed = 0,
    time_limit: TimeLimit = None,
    target: Target = None,
    patience: Patience = None,
    certify: Certify = False,
    tight: Tight = False,
    as_json: AsJson = False,
) -> None:
    """Solve the instance in FILE by one method.

    Example: grace-opt solve W.npy -k 39 --method local_search --option start=think --certify
    """
    with _errors_as_exit_codes():
        instance = _read(file, symmetrize)
        options = dict(parse_option(text, instance.labels) for text in option or [])
        common = _common(seed, (time_limit, target, patience), "tight" if tight else certify)
        common |= _wanted(instance, maximize, required)
        problem = _problem(instance, _k(k, instance, file), protected)
        with redirect_stdout(sys.stderr):  # libraries print too, such as SCS at Ctrl-C; stdout is for the answer
            solution = api.solve(problem, None, method, **common, **options)
    if as_json:
        _print_json([solution_to_dict(solution)])
    else:
        console.print(solution_table(solution, _in_source_terms(instance, solution)))
    _exit_unless_finished({status.name for status in np.ravel(np.asarray(solution.status, dtype=object))})


@app.command(epilog=EXIT_CODES)
def compare(
    file: File,
    k: K = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Name of a method; repeatable. Default: all that accept this size.")
    ] = None,
    maximize: Maximize = False,
    symmetrize: Symmetrize = False,
    required: Required = None,
    protected: Protected = None,
    seed: Seed = 0,
    time_limit: TimeLimit = None,
    target: Target = None,
    patience: Patience = None,
    certify: Certify = True,
    tight: Tight = False,
    as_json: AsJson = False,
) -> None:
    """Solve the instance in FILE by several methods, side by side.

    Every method gets 10 seconds, unless --method or --time-limit is given.

    Example: grace-opt compare W.npz -k 39 --method think --method mies --method local_search
    """
    with _errors_as_exit_codes():
        instance = _read(file, symmetrize)
        common = _common(seed, (time_limit, target, patience), "tight" if tight else certify)
        common |= _wanted(instance, maximize, required)
        problem = _problem(instance, _k(k, instance, file), protected)
        try:
            with redirect_stdout(sys.stderr):
                compared = api.compare(problem, None, method or None, **common)
        except ComparisonError as error:
            _show(instance, error.partial, as_json)
            raise
    _show(instance, compared, as_json)
    if compared.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    if not compared:
        raise typer.Exit(Exit.SOLVER)
    rows = compared.rows()
    proved = {row["instance"] for row in rows if row["optimal"]}
    missed = {row["status"] for row in rows if row["instance"] not in proved}
    # Reaching the default limit is no failure.
    asked = method or time_limit is not None or patience is not None
    _exit_unless_finished(missed if asked else missed - {"LIMIT"})


@app.command()
def generate(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(generators.GENERATORS)}.")],
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of vertices.")],
    out: Annotated[Path, typer.Option(help="File to write; its suffix decides the format.")],
    k: Annotated[int | None, typer.Option("-k", "--k", help="Number to choose; default: depends on KIND.")] = None,
    seed: Seed = 0,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Option of KIND, name=value; repeatable. True, False and None as in Python or JSON."),
    ] = None,
) -> None:
    """Write a random instance of KIND to a file.

    Example: grace-opt generate k_cluster -n 40 -k 10 --option density=0.25 --out graph.dat
    """
    with _errors_as_exit_codes():
        make = generators.GENERATORS.get(kind)
        if make is None:
            raise OptionError(f"no kind is called {kind!r}; there are {', '.join(generators.GENERATORS)}.")
        given = dict(parse_option(text) for text in option or []) | ({} if k is None else {"k": k})
        accepted = [name for name in inspect.signature(make).parameters if name not in ("n", "seed")]
        if unknown := sorted(set(given) - set(accepted)):
            raise OptionError(f"kind {kind!r} has no option {unknown[0]!r}; it accepts {', '.join(accepted)}.")
        if kind == "planted" and k is None:
            raise OptionError(f"k is missing: give the number of vertices to plant, e.g. -k {max(1, n // 2)}.")
        made = make(n, seed=seed, **given)
        has_room = instances.suffix_of(out) in instances.SUFFIXES_WITH_K
        instances.write(out, made.W, made.k if has_room else None)
    # If the file cannot store k, this line must say it.
    stated = "" if made.k is None else f", k = {made.k}" + ("" if has_room else " (not in the file)")
    console.print(f"wrote {escape_path(str(out), sys.stdout)}: {kind}, n = {n}{stated}, seed {seed}", soft_wrap=True)
    if made.planted is not None:
        console.print(f"planted: {' '.join(map(str, made.planted))}", soft_wrap=True)


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Hub id, folder or .gguf file of any Llama-like model; default: the pocket model."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length of the text, in tokens.")] = 1024,
    depth: Annotated[
        float, typer.Option(help="Where the first password is hidden: 0 = at the start, 1 = at the end.")
    ] = 0.5,
    distractors: Annotated[int, typer.Option(help="Number of other passwords in the text.")] = 4,
    seed: Seed = 0,
    pruning: Annotated[
        Path | None, typer.Option(help="File of settings, such as cache.json of grace-opt tune: one more row.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("grace-demo"),
) -> None:
    """Shrink a model's cache in several ways; see what it costs.

    The model reads a long text with passwords in it. Dense and smaller caches are compared by bits, bytes, next-token
    distributions as the text goes on, and passwords found; ways to choose channels by f and its certified gap.
    """
    with _errors_as_exit_codes():
        for module in ("matplotlib", "optimum.quanto"):  # now, not when int4 begins or the picture is drawn
            require(module, "demo", "the demo")
        try:
            from ..hf.config import PruningConfig
            from ..hf.demo import BITS, RATIO, providers, run_demo
            from ..hf.models import POCKET_BASIS, POCKET_FOLDER, disable_progress_bars, load_model
            from .figures import save_demo
        except ImportError as error:
            raise OptionError(f"the demo needs transformers: {pip_install('demo')} ({error})") from None
        except UnicodeDecodeError as error:  # torch reads some of its own files in the locale's encoding
            raise OptionError(f"torch cannot be loaded in this locale ({error}): set PYTHONUTF8=1.") from None
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        steps = 3 + len(providers(RATIO)) + len(BITS) + (pruning is not None)
        with Progress(*columns, console=errors, transient=True) as progress:
            bar = progress.add_task("loading the model", total=steps)
            if model is None:
                disable_progress_bars()  # the pocket model is on disk: nothing to wait for
            loaded, tokenizer = load_model(model or str(POCKET_FOLDER))
            settings = None if pruning is None else PruningConfig.from_json(pruning, loaded)
            report = run_demo(
                loaded,
                tokenizer,
                name=model or "pocket",
                tokens=tokens,
                depth=depth,
                distractors=distractors,
                seed=seed,
                basis=None if model else POCKET_BASIS,
                pruning=settings,
                advance=lambda step: progress.update(bar, advance=1, description=step),
            )
    print_demo(console, report)  # first: writing the files may fail
    with _errors_as_exit_codes(), new_folder(out):
        to_json_text(report.to_dict(), out / "demo.json")
        save_demo(report, out / "demo.png")
    written = escape_path(f"wrote {out / 'demo.json'} and {out / 'demo.png'}", sys.stdout)
    console.print(written, soft_wrap=True)


@app.command(epilog=TUNE_EXIT_CODES)
def tune(
    model: Annotated[str, typer.Argument(help="Hub id, folder or .gguf file; or pocket, the pocket model.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file, UTF-8, like what the model will read; repeatable. Default: texts of grace_opt."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='Instead of texts, a file with a prompt on each line: {"prompt": "...", "answer": "..."}.'),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Recommend the smallest cache whose KL is at most this; default 0.005 nats.")
    ] = None,
    max_share: Annotated[
        float | None, typer.Option(help="Recommend the least KL in at most this share of the bytes, e.g. 0.2.")
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            help="Bits at which the budgeted cache is measured, e.g. 2,2.25,3; alone, recommend the least KL in at "
            "most the largest."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Number of windows of text, or of prompts, to measure on.")] = 6,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a window; default: the longest of 768 to 256 that fits.")
    ] = None,
    later: Annotated[int, typer.Option(min=2, help="How many of these are fed after the rest was compressed.")] = 96,
    basis: Annotated[
        str, typer.Option(help="Basis for bits: a file of grace-opt basis; default: made once per model.")
    ] = "calibrated",
    seed: Seed = 0,
    time_limit: Annotated[
        float | None, typer.Option(help="Begin nothing new after so many seconds; what was measured counts.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for cache.json, tune.json, tune.png and the measurements.")] = Path(
        "grace-tune"
    ),
    as_json: AsJson = False,
) -> None:
    """Measure settings on MODEL and your texts, and recommend one.

    Pieces of text are read, compressed by each setting, and continued: how far are the next tokens from those of the
    dense cache, are hidden facts still found, how many bytes does it take, how long does a token take? Writes
    cache.json, for attach(model, pruning="cache.json") and grace-opt demo --pruning; the numbers (tune.json), and a
    picture of size against quality (tune.png). A stopped run goes on where it was.

    With few windows, numbers of settings that are close cannot be told apart: look at the intervals, or measure more.

    Example: grace-opt tune HuggingFaceTB/SmolLM2-135M-Instruct --text mine.txt --max-kl 0.005
    """
    with _errors_as_exit_codes():
        require("matplotlib", "demo", "tune")  # now, not after minutes, when the picture is drawn
        try:
            from ..hf import tune as measure
            from ..hf.tune.windows import read_prompts
        except ImportError as error:
            raise OptionError(f"tune needs transformers: {pip_install('demo')} ({error})") from None
        given = {path.name: _text(path) for path in text} if text else None
        if text and given is not None and len(given) < len(text):
            given = {str(path): _text(path) for path in text}
        asked = None if prompts is None else read_prompts(prompts)
        numbers = None if bits is None else _numbers(bits)
        loaded, tokenizer = _load_model(model)
        with new_folder(out):
            result = measure(
                loaded,
                tokenizer,
                given,
                prompts=asked,
                max_kl=max_kl,
                max_share=max_share,
                bits=numbers,
                windows=windows,
                tokens=tokens,
                later=later,
                basis=basis,
                seed=seed,
                folder=out,
                time_limit=time_limit,
            )
    if as_json:
        _print_json(result.to_dict())
    else:
        print_tune(console, result, own=bool(text or prompts))
    if result.recommendation is None:
        _fail("error", "nothing could be measured.", Exit.LIMIT if result.out_of_time else Exit.SOLVER)
    with _errors_as_exit_codes():
        result.save(out / "cache.json")
        to_json_text(result.to_dict(), out / "tune.json")
        result.plot(out / "tune.png")
    written = escape_path(f"wrote {', '.join(str(out / name) for name in TUNE_FILES)}", sys.stdout)
    (errors if as_json else console).print(written, soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    if result.out_of_time or not result.recommendation.reached:
        raise typer.Exit(Exit.LIMIT)


@app.command()
def basis(
    model: Annotated[str, typer.Argument(help="Hub id, folder or .gguf file; or pocket, the pocket model.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, for instance basis.safetensors.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file, UTF-8, to calibrate on; repeatable. Default: six short texts of grace_opt."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Number of first tokens of each text that are used.")] = 2048,
    end_to_end: Annotated[
        bool, typer.Option(help="Share bits among heads by how much the next tokens mind; takes gradients.")
    ] = True,
) -> None:
    """Calibrate MODEL for caches of a few bits per element.

    Finds the coordinates in which its keys and values are stored, and how many bits each head takes; once per model.
    Use the file with PrunedKeyCache(model, bits=2.25, basis=FILE). Takes a few times as long as reading
    the texts.

    Example: grace-opt basis HuggingFaceTB/SmolLM2-135M -o smollm2.safetensors
    """
    with _errors_as_exit_codes():
        _check_tensor_file(out)
        try:
            from ..hf.bits.calibrate import calibrate_basis
            from ..hf.texts import shipped_texts
        except ImportError as error:
            raise OptionError(f"calibration needs transformers: {pip_install('hf')} ({error})") from None
        texts = [_text(path) for path in text] if text else shipped_texts()
        loaded, tokenizer = _load_model(model)
        start = time.monotonic()
        with progress_bar(None, len(texts)) as show:
            made = calibrate_basis(
                loaded,
                tokenizer,
                texts,
                tokens=tokens,
                end_to_end=end_to_end,
                advance=lambda done: show("calibrating", done),
            )
        seconds = time.monotonic() - start
        made.save(out)
    print_basis(console, made, seconds, out.stat().st_size)
    console.print(f"wrote {escape_path(str(out), sys.stdout)}", soft_wrap=True)


@app.command()
def layers(
    model: Annotated[str, typer.Argument(help="Hub id, folder or .gguf file; or pocket, the pocket model.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, for instance losses.safetensors.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file, UTF-8, to measure on; repeatable. Default: six short texts of grace_opt."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=768, help="Number of first tokens of each text that are used.")] = 1152,
) -> None:
    """Measure which layers and heads must keep more tokens.

    Each KV head of MODEL in turn keeps few of a prompt's tokens; what the output loses divides the budget of an
    eviction. Use the file with LayerBudgets(GraphEviction(budget=0.25), LayerLosses.load(FILE)). Once per model, many
    minutes on a CPU.

    Example: grace-opt layers HuggingFaceTB/SmolLM2-135M -o smollm2.safetensors
    """
    with _errors_as_exit_codes():
        _check_tensor_file(out)
        try:
            from ..hf.calibrate_eviction import calibrate_eviction
        except ImportError as error:
            raise OptionError(f"calibration needs transformers: {pip_install('hf')} ({error})") from None
        texts = [_text(path) for path in text] if text else None
        loaded, tokenizer = _load_model(model)
        with progress_bar(None, 100) as show:
            made = calibrate_eviction(
                loaded,
                tokenizer,
                texts,
                tokens=tokens,
                advance=lambda done, total: show("layers", 100 * done // total),
            )
        made.save(out)
    print_layers(console, made)
    console.print(f"wrote {escape_path(str(out), sys.stdout)}", soft_wrap=True)


@app.command(
    name="lm-eval",
    epilog=EXIT_CODES,
    # Every argument is the harness's own, and reaches it as it was written.
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with prompts read into smaller caches.

    All arguments are the harness's own, but for --model, which is ours. Settings of the cache go into its --model_args,
    with the names of attach: bits, ratio, method, evict, quantize, and others. Results carry bytes and bits, and say
    how many prompts were too short to be compressed.

    Example: grace-opt lm-eval --model_args pretrained=HuggingFaceTB/SmolLM2-135M,bits=2.25 --tasks lambada_openai
    """
    if not context.args or context.args[0] in ("-h", "--help"):
        console.print(context.get_help(), soft_wrap=True)
        console.print("The harness's own arguments:\n", soft_wrap=True)
    with _errors_as_exit_codes():
        try:
            from ..hf.lm_eval.command import run_harness
        except ImportError as error:
            raise OptionError(f"grace-opt lm-eval needs transformers: {pip_install('lm-eval')} ({error})") from None
        run_harness(context.args or ["--help"])


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Hub id, folder or .gguf file; or pocket, the pocket model.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, for instance static.safetensors.")],
    bits: Annotated[float, typer.Option(help="Mean bits per element of keys and values, from 0 to 8.")] = 2.25,
    basis: Annotated[
        Path | None, typer.Option(help="File of grace-opt basis. Default: the model's own, made once and kept.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file, UTF-8, for widths and scales; repeatable. Default: six short texts of grace_opt."
        ),
    ] = None,
) -> None:
    """Write what a server needs to store MODEL's cache in few bits.

    The file is for those who build kernels for vLLM, SGLang, llama.cpp or others: every token of a layer takes the same
    number of bits. docs/howto/servers.md describes it. To use few bits with transformers, see attach(model, bits=2.25).

    Example: grace-opt export HuggingFaceTB/SmolLM2-135M --bits 2.25 -o static.safetensors
    """
    with _errors_as_exit_codes():
        _check_tensor_file(out)
        try:
            from ..hf.bits.export import export_static
            from ..hf.bits.settings import CALIBRATED
        except ImportError as error:
            raise OptionError(f"exporting needs transformers: {pip_install('hf')} ({error})") from None
        texts = [_text(path) for path in text] if text else None
        loaded, tokenizer = _load_model(model)
        made = export_static(loaded, out, bits, tokenizer=tokenizer, texts=texts, basis=basis or CALIBRATED)
    console.print(
        f"wrote {escape_path(str(out), sys.stdout)}: {made.bits:.3f} bits per element, {len(made.keys)} layers, from "
        f"{made.tokens} tokens of {made.texts} text{'s' if made.texts > 1 else ''}",
        soft_wrap=True,
    )


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Results folder of python -m bench.experiments.")],
    out: Annotated[Path | None, typer.Option(help="Folder for pages and plots; default: DIR/report.")] = None,
) -> None:
    """Turn the experiments' results in DIR into pages.

    Writes Markdown and HTML, with tables and plots. Unfinished experiments show the results so far. Needs pandas,
    pyarrow and matplotlib: pip install ".[bench]" in the checkout.

    Example: grace-opt report results --out docs/results/experiments
    """
    from ..sweep import make_report

    with _errors_as_exit_codes():
        pages = make_report(directory, out)
    count = f"{len(pages) - 1} experiment{'s' if len(pages) > 2 else ''}"
    console.print(f"wrote {escape_path(str(pages[0].with_suffix('.html')), sys.stdout)}: {count}", soft_wrap=True)


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Run no tests; only show which code would run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which code runs on this machine, and test it.

    For every operation and device: whether compiled code, Triton or torch does the work, and how to switch it off.
    Compares each loop and kernel with its reference on a small case; the first time this compiles them (about a
    minute). Also shows versions, the folder of compiled loops, and what is missing and how to get it. Exit code 1 if a
    result differs.

    Example: GRACE_OPT_LLVM=0 grace-opt doctor --quick
    """
    from ..kernels.doctor import examine, show

    with _errors_as_exit_codes(), errors.status("trying what runs here ...") as status:
        report = examine(not quick, lambda step: status.update(f"trying {step} ..."))
    if as_json:
        _print_json(report.to_dict())
    else:
        show(report, console)
    if report.problems:
        raise typer.Exit(1)


def _show(instance: instances.Instance, compared: Comparison, as_json: bool) -> None:
    for name, why in compared.left_out.items():
        errors.print(f"left out: {name}: {why}", style="dim", soft_wrap=True)
    if as_json:
        _print_json(compared.values()["solutions"])
    elif compared:
        console.print(compared.table())
        if note := _in_source_terms(instance, compared.best):
            console.print(f"best: {note}", style="dim")


def _in_source_terms(instance: instances.Instance, solution: Solution) -> str | None:
    return instance.describe(float(solution.objective)) if np.ndim(solution.objective) == 0 else None


def _exit_unless_finished(statuses: set[str]) -> None:
    for status in (Exit.INTERRUPTED, Exit.LIMIT):  # names of `Status` as well
        if status.name in statuses:
            raise typer.Exit(status)


def _read(file: Path, symmetric: bool) -> instances.Instance:
    instance = instances.read(file)
    if symmetric and not _is_symmetric(instance.W):  # whole numbers stay whole if they can
        return dataclasses.replace(instance, W=symmetrize_matrix(instance.W))
    return instance


def _is_symmetric(W: Any) -> bool:
    if hasattr(W, "tocsr"):  # sparse
        return bool(W.shape[0] == W.shape[1] and (W != W.T).nnz == 0)
    return np.array_equal(W, W.swapaxes(-1, -2))


def _k(k: int | None, instance: instances.Instance, file: Path) -> Any:
    if k is None and instance.k is None:
        half = max(1, instance.W.shape[-1] // 2)
        raise OptionError(f"{file} does not state k: give the number of vertices to choose, e.g. -k {half}.")
    return instance.k if k is None else k


def _common(
    seed: int, stopping: tuple[float | None, float | None, float | None], certify: bool | str
) -> dict[str, Any]:
    """The arguments that `solve` and `compare` share."""
    stops = dict(zip(("time_limit", "target", "patience"), stopping, strict=True))
    return {"seed": seed, **stops, "certify": certify}


def _problem(instance: instances.Instance, k: Any, protected: str | None) -> Problem:
    blocked = parse_vertices("protected", protected, instance.labels)
    return Problem.of(instance.W, k, protected=blocked, labels=instance.labels)


def _wanted(instance: instances.Instance, maximize: bool, required: str | None) -> dict[str, Any]:
    """What is sought: the most, and with which vertices."""
    if maximize and instance.source in instances.OBJECTIVE_TERMS:
        factor, counted = instances.OBJECTIVE_TERMS[instance.source]
        extreme = "least" if factor < 0 else "most"  # of what the file counts
        errors.print(
            f"note: in {instance.source} files the least f is the best; --maximize seeks the {extreme} {counted}.",
            style="dim",
            soft_wrap=True,
        )
    return {"maximize": maximize, "required": parse_vertices("required", required, instance.labels)}


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise OptionError(f"--bits {text!r}: write numbers with commas, e.g. 2,2.25,3.") from None


def _check_tensor_file(out: Path) -> None:
    """Raise OptionError now, not after minutes, if tensors cannot be written there, or their file would be misnamed."""
    if out.is_dir():
        raise OptionError(f"{out} is a folder; name a file in it, for instance -o {out / 'file.safetensors'}.")
    if out.suffix.lower() != ".safetensors":
        raise OptionError(f"{out}: cannot write {out.suffix!r}, only .safetensors; for instance -o file.safetensors.")
    if not out.absolute().parent.is_dir():
        raise OptionError(f"cannot write {out}: there is no folder {out.absolute().parent}.")


def _load_model(name: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer; the pocket model is on disk, so there is no bar to see."""
    from ..hf.models import POCKET_FOLDER, disable_progress_bars, load_model

    if name == "pocket":
        disable_progress_bars()
    return load_model(str(POCKET_FOLDER) if name == "pocket" else name)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null character in the name
        raise OptionError(f"--text {path} cannot be read: {error}; give a text file in UTF-8.") from None


def _print_json(value: Any) -> None:
    sys.stdout.write(to_json_text(value))
