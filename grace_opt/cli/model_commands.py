"""The commands that run a model with smaller caches: demo, tune, lm-eval."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .._util.files import new_folder
from .._util.json_values import to_json_text
from .._util.optional import pip_install, require
from .._util.terminal import escape_path
from ..errors import OptionError
from .common import AsJson, Exit, ModelName, Seed, console, errors, errors_as_exit_codes, fail, print_json
from .model_files import load, read_text
from .tables import print_demo, print_tune

TUNE_EXIT_CODES = (
    "Exit codes: 0 a setting keeps what was asked for; 1 stdout cannot be written; 2 bad input or options, or too "
    "little memory; 3 the time limit stopped it, or no setting keeps what was asked for (the closest is shown, and "
    "cache.json not written); 4 nothing could be measured; 130 Ctrl-C. With 3 and 130, what was measured is printed "
    "and written first."
)
#: What `tune` writes; the first only if a setting keeps what was asked for.
CACHE_FILE, NUMBERS, PICTURE = "cache.json", "tune.json", "tune.png"


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
    config: Annotated[
        Path | None, typer.Option(help="File of settings, such as cache.json of grace-opt tune: one more row.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("grace-demo"),
) -> None:
    """Shrink a model's cache in several ways; see what it costs.

    The model reads a long text with passwords in it. Dense and smaller caches are compared by bits, bytes, next-token
    distributions as the text goes on, and passwords found; ways to choose channels by f and its certified gap.
    """
    with errors_as_exit_codes(), new_folder(out):  # now, not after minutes
        for module in ("matplotlib", "optimum.quanto"):  # now, not when int4 begins or the picture is drawn
            require(module, "demo", "the demo")
        try:
            from ..hf.models.loading import POCKET_FOLDER, disable_progress_bars, load_model
            from ..hf.settings.config import CacheConfig
            from ..hf.tools.demo import BITS, RATIO, providers, run_demo
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
        steps = 3 + len(providers(RATIO)) + len(BITS) + (config is not None)
        with Progress(*columns, console=errors, transient=True) as progress:
            bar = progress.add_task("loading the model", total=steps)
            if model is None:
                disable_progress_bars()  # the pocket model is on disk: nothing to wait for
            loaded, tokenizer = load_model(model or str(POCKET_FOLDER))
            settings = None if config is None else CacheConfig.from_json(config, loaded)
            report = run_demo(
                loaded,
                tokenizer,
                name=model or "pocket",
                tokens=tokens,
                depth=depth,
                distractors=distractors,
                seed=seed,
                config=settings,
                advance=lambda step: progress.update(bar, advance=1, description=step),
            )
        print_demo(console, report)  # first: writing the files may fail
        to_json_text(report.to_dict(), out / "demo.json")
        save_demo(report, out / "demo.png")
    written = escape_path(f"wrote {out / 'demo.json'} and {out / 'demo.png'}", sys.stdout)
    console.print(written, soft_wrap=True)


def tune(
    model: ModelName,
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
        str, typer.Option(help="Basis for bits: a file of grace-opt calibrate basis; default: made once per model.")
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
    cache.json, for attach(model, config="cache.json") and grace-opt demo --config, if a setting keeps what is asked
    for; the numbers (tune.json), and a picture of size against quality (tune.png). Bits are measured first. A stopped
    run goes on where it was.

    With few windows, numbers of settings that are close cannot be told apart: look at the intervals, or measure more.

    Example: grace-opt tune HuggingFaceTB/SmolLM2-135M-Instruct --text mine.txt --max-kl 0.005
    """
    with errors_as_exit_codes():
        require("matplotlib", "demo", "tune")  # now, not after minutes, when the picture is drawn
        try:
            from ..hf import tune as measure
            from ..hf.tools.tune.windows import read_prompts
        except ImportError as error:
            raise OptionError(f"tune needs transformers: {pip_install('demo')} ({error})") from None
        texts = {path.name: read_text(path) for path in text} if text else None
        if text and texts is not None and len(texts) < len(text):
            texts = {str(path): read_text(path) for path in text}
        examples = None if prompts is None else read_prompts(prompts)
        numbers = None if bits is None else _numbers(bits)
        loaded, tokenizer = load(model)
        with new_folder(out):
            result = measure(
                loaded,
                tokenizer,
                texts,
                prompts=examples,
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
        print_json(result.to_dict())
    else:
        print_tune(console, result, own=bool(text or prompts), file=out / CACHE_FILE)
    if result.recommendation is None:
        fail("error", "nothing could be measured.", Exit.LIMIT if result.out_of_time else Exit.SOLVER)
    reached, settings = result.recommendation.reached, out / CACHE_FILE
    with errors_as_exit_codes():
        if reached:
            result.save(settings)
        to_json_text(result.to_dict(), out / NUMBERS)
        result.plot(out / PICTURE)
    written = f"wrote {', '.join(str(out / name) for name in (*[CACHE_FILE] * reached, NUMBERS, PICTURE))}"
    if not reached:
        written += f"; {settings} is of an earlier run" if settings.exists() else f", and no {CACHE_FILE}"
    (errors if as_json else console).print(escape_path(written, sys.stdout), soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    if result.out_of_time or not reached:
        raise typer.Exit(Exit.LIMIT)


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on prompts in smaller caches.

    All arguments are the harness's own, but for --model, which is ours. Settings of the cache go into its --model_args,
    with the names of attach: bits, ratio, method, evict, quantize, and others. Results carry bytes and bits, and say
    how many prompts were too short to be compressed.

    Example: grace-opt lm-eval --model_args pretrained=HuggingFaceTB/SmolLM2-135M,bits=2.25 --tasks lambada_openai
    """
    if not context.args or context.args[0] in ("-h", "--help"):
        console.print(context.get_help(), soft_wrap=True)
        console.print("The harness's own arguments:\n", soft_wrap=True)
    with errors_as_exit_codes():
        try:
            from ..hf.tools.lm_eval.command import run_harness
        except ImportError as error:
            raise OptionError(f"grace-opt lm-eval needs transformers: {pip_install('lm-eval')} ({error})") from None
        run_harness(context.args or ["--help"])


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise OptionError(f"--bits {text!r}: write numbers with commas, e.g. 2,2.25,3.") from None
