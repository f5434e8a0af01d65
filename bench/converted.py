"""A GGUF file as a folder of float32, which loads in seconds; and whether a model is what it was.

transformers parses a GGUF file three times in Python, which takes a minute or more. The folder has the same weights to
the bit, and results record their digest: bfloat16 would be half as large, but other weights.

When: `bench.material` converts what it has fetched, once, and checks it with ``--check``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from bench.packages import staging
from grace_opt.hf.models import load_model

#: Tokens of the passage whose likelihood is compared.
TOKENS = 1024
#: Bytes of a weight, and of a tokenizer with its settings, at most.
WEIGHT, TOKENIZER = 4, 50_000_000


def converted(file: Path, parameters: int) -> Path:
    """The folder of a GGUF file, beside it, made if it is missing; where there is no room, the file itself.

    Parameters
    ----------
    file : Path
    parameters : int
        How many numbers the model has.

    Raises
    ------
    SystemExit
        If the system refuses to write.
    """
    folder = file.with_suffix("")
    with staging(folder) as parts:
        if folder.is_dir():  # another process has made it
            return folder
        size = WEIGHT * parameters + TOKENIZER
        if shutil.disk_usage(parts).free < size:
            print(
                f"{file.name} is converted each time, which takes minutes: {size / 1e6:,.0f} MB are not free in "
                f"{file.parent}",
                file=sys.stderr,
            )
            return file
        print(f"converting {file.name}, once ...", file=sys.stderr, flush=True)
        model, tokenizer = load_model(str(file))
        model.hf_quantizer = None  # with it, transformers saves nothing
        vars(model.config).pop("quantization_config", None)
        with tempfile.TemporaryDirectory(dir=parts) as name:
            made = Path(name) / folder.name
            try:
                model.save_pretrained(made)
            except SafetensorError as error:
                raise OSError(str(error)) from None
            tokenizer.save_pretrained(made)
            for saved in made.iterdir():
                saved.chmod((made / "config.json").stat().st_mode)  # safetensors lets only the owner read
                with saved.open("rb+") as written:
                    os.fsync(written.fileno())
            made.replace(folder)
    return folder


def likelihood(model: Any, tokenizer: Any, text: str) -> tuple[float, bool]:
    """Nats per token of a text's first `TOKENS` tokens, and whether the whole text survives the tokenizer."""
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    with torch.no_grad():
        found = model(ids[:, :TOKENS], labels=ids[:, :TOKENS]).loss
    return float(found), bool(tokenizer.decode(ids[0], skip_special_tokens=True) == text)
