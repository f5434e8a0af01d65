"""Texts to calibrate with: the user's, as strings or token numbers, or those that ship with grace_opt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import OptionError

#: Folder of the calibration texts in the installed package.
TEXTS_FOLDER = Path(__file__).parents[2] / "data" / "calibration"


def texts_by_name() -> dict[str, str]:
    """Return the texts that ship with grace_opt, by name, in the order of their names."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEXTS_FOLDER.glob("*.txt"))}


def shipped_texts() -> list[str]:
    """Return the texts that ship with grace_opt, in the order of their names.

    Examples
    --------
    >>> len(shipped_texts())
    6
    """
    return list(texts_by_name().values())


def given_texts(texts: Any, tokenizer: Any, call: str) -> list[str | Tensor]:
    """Return the texts that were given, or else those that ship with grace_opt; refuse what is no list of texts.

    Parameters
    ----------
    texts : iterable of str or Tensor, optional
    tokenizer : callable or None
        Needed if one is a string.
    call : str
        Name of the called function, for messages.
    """
    if isinstance(tokenizer, str | list | tuple | Tensor):
        raise OptionError(
            f"the tokenizer comes before the texts; write {call}(model, tokenizer, texts), or {call}(model, texts=...) "
            "if they are token numbers"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise OptionError(f"a {type(tokenizer).__name__} is not a tokenizer; write {call}(model, tokenizer, texts)")
    if texts is None and tokenizer is None:
        raise OptionError(
            f"the texts that ship with grace_opt need the model's tokenizer; write {call}(model, tokenizer), or give "
            "texts as token numbers"
        )
    if isinstance(texts, str | Tensor) or not (texts is None or isinstance(texts, Iterable)):
        raise OptionError(f"texts must be a list; write {call}(model, tokenizer, [text, ...])")
    given: list[str | Tensor] = [*shipped_texts()] if texts is None else list(texts)
    if not given:
        raise OptionError("texts is an empty list; leave it out for the texts that ship with grace_opt")
    return given


def all_token_ids(texts: Any, tokenizer: Any, call: str, model: Any) -> list[Tensor]:
    """Return the token numbers of several texts, ``(1, L)`` each, all of which the model knows; else as `given_texts`.

    Parameters
    ----------
    texts, tokenizer, call : object
        As there.
    model : PreTrainedModel
    """
    every = [token_ids(text, tokenizer, n, call) for n, text in enumerate(given_texts(texts, tokenizer, call), 1)]
    check_known(every, model)
    return every


def check_known(every: list[Tensor], model: Any) -> None:
    """Raise OptionError if a text has a token that the model does not know."""
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    for number, ids in enumerate(every, 1):
        if known is not None and ((ids < 0) | (ids >= known)).any():
            worst = int(ids.max()) if int(ids.max()) >= known else int(ids.min())
            raise OptionError(
                f"text {number} has the token number {worst}, and the model knows 0 to {known - 1}: take the tokenizer "
                "that belongs to the model"
            )


def token_ids(text: str | Tensor, tokenizer: Any, number: int, call: str) -> Tensor:
    """Return the token numbers of a text, ``(1, L)``.

    Parameters
    ----------
    text : str or Tensor
        A text, or its token numbers ``(L,)`` or ``(1, L)``.
    tokenizer : callable or None
        Needed if the text is a string.
    number : int
        Which text it is, for messages.
    call : str
        Name of the called function, for messages.
    """
    if isinstance(text, Tensor):
        ids = text[None] if text.dim() == 1 else text
    elif not isinstance(text, str):
        raise OptionError(f"text {number} is of type {type(text).__name__}; write a string or a tensor of its tokens")
    elif tokenizer is None:
        raise OptionError(f"texts need their tokenizer; write {call}(model, tokenizer, texts)")
    else:
        ids = torch.as_tensor(tokenizer(text, return_tensors="pt").input_ids, device="cpu")
    if isinstance(text, str) and not ids.numel():
        raise OptionError(f"text {number} is empty; leave it out")
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise OptionError(
            f"text {number} has token numbers of shape {tuple(ids.shape)}; give one sequence, (L,) or (1, L)"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise OptionError(f"text {number} is of {ids.dtype}, and token numbers are integers; write ids.long()")
    return ids


def digest(texts: Sequence[Tensor]) -> str:
    """Return the SHA-256 of token numbers.

    Examples
    --------
    >>> digest([torch.tensor([[1, 2]])]) == digest([torch.tensor([[1], [2]]).T])
    True
    """
    found = hashlib.sha256()
    for ids in texts:
        found.update(f"{tuple(ids.shape)}".encode() + ids.to("cpu", torch.int64).contiguous().numpy().tobytes())
    return found.hexdigest()
