"""``grace-opt prompts``: its commands list, add, verify and clear are about a folder of compressed prompts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._util.optional import pip_install
from .._util.progress import progress_bar
from .._util.terminal import FittingTable, escape_path
from ..errors import CacheError, OptionError
from .common import ModelName, console, errors_as_exit_codes
from .model_files import load, read_text

if TYPE_CHECKING:
    from ..hf import PromptStore

group = typer.Typer(
    help="Prompts that were read once: list, add, verify, clear.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)

Folder = Annotated[
    Path | None, typer.Option(help="The folder; default: the one of PromptStore(), in the user's cache.")
]


@group.command(name="list")
def list_(folder: Folder = None) -> None:
    """List the prompts, the most recently used first.

    Example: grace-opt prompts list --folder prompts
    """
    with errors_as_exit_codes():
        store = _store(folder)
        prompts = store.prompts()
    if prompts:
        table = FittingTable()
        for name in ("model and settings", "tokens", "MiB", "last use"):
            table.add_column(name, justify="right" if name in ("tokens", "MiB") else "left")
        for kept in prompts:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.used))
            name = escape_path(kept.model, sys.stdout)
            table.add_row(name, f"{kept.tokens:,}", f"{kept.bytes / 2**20:,.1f}", used)
        console.print(table)
    size = sum(kept.bytes for kept in prompts) / 2**20
    where = escape_path(str(store.path), sys.stdout)
    console.print(f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}, {size:,.1f} MiB, in {where}", soft_wrap=True)


@group.command()
def add(
    model: ModelName,
    text: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Text files, UTF-8, each of them a prompt.")],
    folder: Folder = None,
    bits: Annotated[float, typer.Option(help="Bits per element, as in attach(model, bits=2.25).")] = 2.25,
    max_bytes: Annotated[str, typer.Option(help="Of the folder: the least recently used prompts go.")] = "20GiB",
) -> None:
    """Read texts with MODEL, so that prompts which begin with them need not read them again.

    A text is tokenized as it is, with the tokenizer's first token and without a chat template. It serves
    attach(model, bits=BITS, prompts=FOLDER) of the same model, in the type that it is loaded in here.

    Example: grace-opt prompts add HuggingFaceTB/SmolLM2-135M-Instruct manual.txt --folder prompts
    """
    with errors_as_exit_codes():
        texts = [read_text(path, option="") for path in text]
        store = _store(folder, max_bytes, new=True)
        from ..hf import read_prompt  # loaded already
        from ..hf.engine.kept_prompts import KeptPrompts
        from ..hf.engine.prompt_store import FEWEST

        loaded, tokenizer = load(model)
        prompts = [tokenizer(each, return_tensors="pt").input_ids for each in texts]
        for path, ids in zip(text, prompts, strict=True):
            if ids.shape[1] <= FEWEST:
                raise OptionError(f"{path} has {ids.shape[1]} tokens; prompts are stored from {FEWEST + 1} tokens on.")
        said = []
        with progress_bar(None, len(texts), "texts") as bar:
            for path, ids in zip(text, prompts, strict=True):
                cache = read_prompt(loaded, ids, store, bits=bits)
                held = KeptPrompts(store, loaded, cache.config).held(cache, ids[0].numpy())
                if not held:
                    raise CacheError(f"{path} was not stored in {store.path}.")
                rest = ids.shape[1] - held
                said.append(f"{ids.shape[1]:,} tokens" + f"; all but the last {rest} were there already" * (rest > 0))
                bar(f"reading {path.name}", len(said))
    for path, what in zip(text, said, strict=True):
        console.print(f"{escape_path(str(path), sys.stdout)}: {what}", soft_wrap=True)


@group.command()
def verify(folder: Folder = None) -> None:
    """Read all files, and remove those that are damaged: their prompts will be read again."""
    with errors_as_exit_codes():
        store = _store(folder)
        damaged = store.verify()
        left = len(store.prompts())
    for path in damaged:
        console.print(f"removed {escape_path(str(path), sys.stdout)}: it is damaged", soft_wrap=True)
    console.print(f"{left} prompt{'s' * (left != 1)} as written", soft_wrap=True)


@group.command()
def clear(folder: Folder = None) -> None:
    """Remove all prompts."""
    with errors_as_exit_codes():
        store = _store(folder)
        count = store.clear()
    where = escape_path(str(store.path), sys.stdout)
    console.print(f"removed {count} prompt{'s' * (count != 1)} from {where}", soft_wrap=True)


def _store(folder: Path | None, max_bytes: str = "20GiB", new: bool = False) -> PromptStore:
    """Return the store; raise OptionError if there is none, unless it may be a `new` one."""
    if folder is not None and not (new or folder.expanduser().is_dir()):
        raise OptionError(f"there is no folder {folder}; write the one that prompts were stored in.")
    try:
        from ..hf import PromptStore
    except ImportError as error:
        raise OptionError(f"prompts needs transformers: {pip_install('hf')} ({error})") from None
    return PromptStore(folder, max_bytes)
