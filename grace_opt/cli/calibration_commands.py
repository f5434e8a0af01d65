"""``grace-opt calibrate``: its commands basis and budgets measure a model once, and write a file of tensors."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .._util.optional import pip_install
from .._util.progress import progress_bar
from .._util.terminal import escape_path
from ..errors import OptionError
from .common import ModelName, console, errors_as_exit_codes
from .model_files import check_tensor_file, load, read_text
from .tables import print_bases, print_basis, print_layers

group = typer.Typer(
    help="Measure a model once: a basis, or budgets.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)


@group.callback(invoke_without_command=True)
def kept(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--list", help="List the folder of bases, as basis --list does.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove these files.")] = False,
) -> None:
    """Measure a model once: a basis for bits, or budgets of layers and heads."""
    if context.invoked_subcommand is None:
        basis(show=show, clear=clear)
    elif show or clear:
        with errors_as_exit_codes():
            raise OptionError(f"write --list and --clear after {context.invoked_subcommand}, or without it.")


@group.command()
def basis(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder or .gguf file; or pocket, the pocket model.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="File to write, for instance basis.safetensors. Default: the user's folder of bases."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file, UTF-8, to calibrate on; repeatable. Default: six short texts of grace_opt."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Number of first tokens of each text that are used; default: 1024.")
    ] = None,
    end_to_end: Annotated[
        bool, typer.Option(help="Share bits among heads by how sensitive the next tokens are; takes gradients.")
    ] = True,
    kl: Annotated[
        bool, typer.Option("--kl", help="Measure what bits leave as well, for max_kl=; takes several times as long.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--list", help="List the folder of bases: models, days, sizes, last uses. With MODEL, its.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove these files, or those of MODEL alone.")] = False,
) -> None:
    """Calibrate MODEL for caches of a few bits per element.

    Finds the coordinates in which its keys and values are stored, and how many bits each head takes; once per model.
    Without -o, the basis is kept in a folder in the user's cache, where attach(model, bits=2.25) finds it and would
    else put it at its first long prompt. A file of -o is for CompressedCache(model, bits=2.25, basis=FILE). After
    Ctrl-C, the same command goes on with the texts that are left.

    Example: grace-opt calibrate basis HuggingFaceTB/SmolLM2-135M -o smollm2.safetensors
    """
    with errors_as_exit_codes():
        if out is not None:
            check_tensor_file(out)
        elif text or tokens is not None or not end_to_end:
            raise OptionError("--text, --tokens and --no-end-to-end make a basis of your own: write -o FILE as well.")
        try:
            from ..hf import calibrate
            from ..hf.bases import basis_folder
            from ..hf.bases.at_hand import basis_for
            from ..hf.bases.calibrate import TOKENS
            from ..hf.bases.texts import shipped_texts
            from ..hf.engine.cache import CompressedCache
            from ..hf.engine.kl_by_bits import measured_basis
            from ..hf.models.loading import POCKET_FOLDER
        except ImportError as error:
            raise OptionError(f"calibration needs transformers: {pip_install('hf')} ({error})") from None
        if show or clear:
            if out is not None or (show and clear):
                raise OptionError("--list, --clear and -o FILE are for different things: write one of them.")
            where = basis_folder.folder()
            names = {model, str(POCKET_FOLDER)} if model == "pocket" else {model}
            bases = [one for one in basis_folder.kept_bases(where) if model is None or one.model in names]
            print_bases(console, where, bases, basis_folder.clear(bases) if clear else None)
            return
        if model is None:
            raise OptionError("write which MODEL to calibrate; or --list, to see what was calibrated.")
        texts = [read_text(path) for path in text] if text else shipped_texts()
        loaded, tokenizer = load(model)
        start = time.monotonic()
        if out is None:
            made = basis_for(loaded, tokenizer=tokenizer)
            made = measured_basis(loaded, CompressedCache) if kl else made
        else:
            with progress_bar(None, len(texts), "texts") as bar:
                made = calibrate.basis(
                    loaded,
                    tokenizer,
                    texts,
                    tokens=tokens or TOKENS,
                    end_to_end=end_to_end,
                    advance=lambda done: bar(f"calibrating {model}", done),
                    checkpoint=basis_folder.unfinished(out),
                )
            if kl:
                with progress_bar(None, len(texts), "texts") as bar:
                    made = calibrate.kl(
                        loaded,
                        made,
                        tokenizer,
                        texts,
                        tokens=tokens or TOKENS,
                        advance=lambda done: bar(f"measuring {model}", done),
                    )
            made.save(out)
        seconds = time.monotonic() - start
    print_basis(console, made, seconds)
    if out is not None:
        console.print(f"wrote {escape_path(str(out), sys.stdout)}", soft_wrap=True)


@group.command()
def budgets(
    model: ModelName,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, for instance losses.safetensors.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file, UTF-8, to measure on; repeatable. Default: six short texts of grace_opt."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=768, help="Number of first tokens of each text that are used.")] = 1152,
    evict: Annotated[
        str, typer.Option(help="Eviction that chooses the tokens: graph, snapkv, h2o or streaming_llm.")
    ] = "graph",
    heads: Annotated[
        bool,
        typer.Option(help="Measure every KV head, or whole layers, which takes less time and gains less."),
    ] = True,
) -> None:
    """Measure which layers and heads must keep more tokens.

    Each KV head of MODEL in turn keeps few of a prompt's tokens; what the output loses divides the budget of an
    eviction. Use the file with LayerBudgets(GraphEviction(budget=0.25), LayerLosses.load(FILE)), or with another
    eviction there: the losses of one serve the others well. Once per model, many minutes on a CPU.

    Example: grace-opt calibrate budgets HuggingFaceTB/SmolLM2-135M -o smollm2.safetensors
    """
    with errors_as_exit_codes():
        check_tensor_file(out)
        try:
            from ..hf import calibrate
            from ..hf.evict.layer_budgets import is_divisible
            from ..hf.evict.names import eviction_named
        except ImportError as error:
            raise OptionError(f"calibration needs transformers: {pip_install('hf')} ({error})") from None
        chosen = eviction_named(evict)
        if not is_divisible(chosen):  # before the model is loaded
            raise OptionError(
                f"--evict {evict}: write graph, snapkv, h2o or streaming_llm; this one divides its budget among the "
                "layers itself"
            )
        texts = [read_text(path) for path in text] if text else None
        loaded, tokenizer = load(model)
        with progress_bar(None, 100, "%") as show:
            made = calibrate.budgets(
                loaded,
                tokenizer,
                texts,
                evict=chosen,
                tokens=tokens,
                heads=heads,
                advance=lambda done, total: show("layers", 100 * done // total),
            )
        made.save(out)
    print_layers(console, made)
    console.print(f"wrote {escape_path(str(out), sys.stdout)}", soft_wrap=True)
