"""Input and output of commands about a model: the model, texts, and the file of tensors that they are to make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._util.files import TEXT
from ..errors import OptionError


def check_tensor_file(out: Path) -> None:
    """Raise OptionError now, not after minutes, if tensors cannot be written there, or their file would be misnamed."""
    if out.is_dir():
        raise OptionError(f"{out} is a folder; name a file in it, for instance -o {out / 'file.safetensors'}.")
    if out.suffix.lower() != ".safetensors":
        raise OptionError(f"{out}: cannot write {out.suffix!r}, only .safetensors; for instance -o file.safetensors.")
    if not out.absolute().parent.is_dir():
        raise OptionError(f"cannot write {out}: there is no folder {out.absolute().parent}.")


def load(name: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer; the pocket model is on disk, so there is no bar to see."""
    from ..hf.models.loading import POCKET_FOLDER, disable_progress_bars, load_model

    if name == "pocket":
        disable_progress_bars()
    return load_model(str(POCKET_FOLDER) if name == "pocket" else name)


def read_text(path: Path, option: str = "--text ") -> str:
    """Return the text of a file that is given after an option, or raise OptionError."""
    if path.is_dir():  # an empty name is the folder that one is in
        again = f", and {option}again for each further one" if option else ""
        raise OptionError(f"{option}{path} is a folder; give a text file in UTF-8{again}.")
    try:
        text = path.read_text(encoding=TEXT)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null character in the name
        raise OptionError(f"{option}{path} cannot be read: {error}; give a text file in UTF-8.") from None
    if not text.strip():
        raise OptionError(f"{option}{path} is empty; leave it out, or give another file.")
    return text
