"""Load a causal language model and its tokenizer from a Hub id, a folder or a GGUF file, or the pocket model that ships
with grace_opt.

`load_pocket` gives experiments a trained model without a network. Source: transformers' Auto classes.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ..._util.optional import require
from ...errors import GraceError

#: Folder of the pocket model in the installed package.
POCKET_FOLDER = Path(__file__).parents[2] / "data" / "pocket"
#: A calibrated basis that comes with a model, in its folder.
OWN_BASIS = "grace_opt_basis.safetensors"
#: The pocket model's, which `python -m bench.pocket.basis` makes from documents of its own grammar.
POCKET_BASIS = POCKET_FOLDER / OWN_BASIS
#: Most characters of another library's error that a message quotes.
MOST_QUOTED = 300


class ModelError(GraceError, OSError):
    """A model could not be loaded from the given place."""


def disable_progress_bars() -> None:
    """Turn transformers' own progress bars off."""
    logging.disable_progress_bar()


def load_pocket() -> tuple[PreTrainedModel, Any]:
    """Load the pocket model and its tokenizer, in float32 on the CPU.

    Returns
    -------
    model : LlamaForCausalLM
        Three layers, four query and two KV heads of width 64; see the model card in the same folder.
    tokenizer : PreTrainedTokenizerFast

    Examples
    --------
    >>> model, tokenizer = load_pocket()
    >>> model.config.head_dim
    64
    """
    return load_model(str(POCKET_FOLDER))


def load_model(where: str) -> tuple[PreTrainedModel, Any]:
    """Load a model for inference in float32 on the CPU, and its tokenizer.

    Parameters
    ----------
    where : str
        Hub id, folder, or path of a ``.gguf`` file. Code from the Hub is never run.

    Raises
    ------
    ModelError
        If it is neither here nor to be had from the Hub, or transformers cannot load it, because files are missing,
        damaged or do not fit each other; the message quotes transformers' error.
    """
    path, options = Path(where), {}
    source = where
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no GGUF file at {where}.")
        require("gguf", "hf", f"reading {path.name}")
        source, options = str(path.parent), {"gguf_file": path.name}
    elif not path.exists() and (where.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2):
        raise ModelError(f"no folder at {where}; a Hub id has the form name, or owner/name.")  # the Hub is not asked
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file ends in whatever error the library raises that reads this kind of file
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            raise ModelError(
                f"{where!r} is not on this machine, and the Hub cannot be reached: give a folder with config.json or a "
                ".gguf file that is here."
            ) from error
        raise ModelError(
            f"cannot load a model from {where!r}: give a Hub id, a folder with config.json, or a .gguf file. "
            f"transformers said: {type(error).__name__}: {shorten(str(error), MOST_QUOTED, placeholder=' ...')}"
        ) from error
    return model.eval(), tokenizer
