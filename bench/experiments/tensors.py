"""Where the experiments' queries, keys and values come from: a model's forward pass over a text.

When: an experiment measures what pruning does to attention itself, without decoding. A source is

- ``""`` or ``"pocket"``: the pocket model, on documents of its own grammar that it was not trained on;
- a Hub id, a folder or a ``.gguf`` file: consecutive passages of the user's texts, a folder or a file given as `texts`;
- ``smollm2-135m``, and ``canterbury`` as `texts`: weights and books that are fetched (`bench.material`).

Models and the latest text are kept in memory, so that cells of one text run the model once.
Built on `grace_opt.hf.models.recording`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.experiments.registry import Settings
from bench.material import BOOKS, books, model_path, read_text
from bench.pocket.corpus import Documents
from grace_opt.errors import GraceError, OptionError
from grace_opt.hf import capture_attention
from grace_opt.hf.models import POCKET_FOLDER, ModelError, disable_progress_bars, load_model

#: Documents of training have seeds below a thousand.
FIRST_SEED, MOST_FILLER = 10_000_000, 0.5
TEXT_FILES = (".txt", ".md")


class TensorError(GraceError, ValueError):
    """A text does not hold what was asked of it."""


@dataclass(frozen=True)
class LayerTensors:
    """What one layer's attention works on, for one text.

    Attributes
    ----------
    layer : int
        Its number in the model.
    queries : Tensor (H_q, L, d)
        Post-RoPE, float32.
    keys, values : Tensor (H, L, d), (H, L, d_v)
        Keys post-RoPE, float32; H_q is a multiple of H, and query head i belongs to KV head i // (H_q / H).
    scaling : float
        Factor of the logits.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float


def load(
    source: str,
    text: int,
    prompt: int,
    later: int,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    texts: str = "",
    device: str = "cpu",
) -> list[LayerTensors]:
    """The tensors of some layers for one text of ``prompt + later`` tokens.

    Parameters
    ----------
    source : str
        See above.
    text : int
        Which text. Of n files, text t is passage t // n of file t % n.
    prompt, later : int
        Tokens of the prompt, and of its true continuation.
    layers : sequence of int, optional
        Default: all that have full attention.
    seed : int
        Of the pocket model's documents; texts of others do not depend on it.
    texts : str
        A text file, or a folder of ``.txt`` and ``.md`` files.
    device : str
        Where the model runs and the tensors stay.

    Returns
    -------
    list of LayerTensors
        In the order of the layers.

    Raises
    ------
    OptionError, TensorError, ModelError
        Saying what to give instead.
    """
    if prompt < 1 or later < 0 or text < 0:
        raise OptionError(f"prompt={prompt}, later={later}, text={text}: give at least 1, 0 and 0.")
    return list(_captured(source, text, prompt + later, layer_numbers(source, layers), seed, texts, device))


def layer_numbers(source: str, layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """The layers that `load` returns; only the model's configuration is read.

    Raises
    ------
    OptionError
        If one of `layers` is not there, or attends to a sliding window, where later queries do not see all keys.
    """
    there = _full_attention(source)
    if layers is None or not len(layers):
        return there
    if unknown := [number for number in layers if number not in there]:
        raise OptionError(
            f"layers={list(layers)}: {source or 'pocket'} has no layer {unknown[0]} of full attention; "
            f"there are {_ranges(there)}."
        )
    return tuple(sorted(set(layers)))


def missing(settings: Settings) -> str:
    """What is not given, for an experiment's `needs`: a checkpoint at size "full", texts for a checkpoint."""
    pocket = settings.model in ("", "pocket")
    if pocket and settings.size == "full":
        return "this size measures a real checkpoint; name one with --model, and texts with --set texts=FOLDER"
    if not pocket and not settings.options.texts:
        return "a checkpoint reads texts of yours; name a folder of .txt files with --set texts=FOLDER"
    return ""


@functools.lru_cache(maxsize=1)
def model_and_tokenizer(source: str, device: str) -> tuple[Any, Any]:
    """The model of a source, kept in memory."""
    disable_progress_bars()
    model, tokenizer = load_model(_where(source))
    return model.to(device), tokenizer


@functools.lru_cache(maxsize=1)
def _captured(
    source: str, text: int, length: int, layers: tuple[int, ...], seed: int, texts: str, device: str
) -> tuple[LayerTensors, ...]:
    model, _ = model_and_tokenizer(source, device)
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and length > context:
        raise OptionError(
            f"prompt + later = {length} tokens are more than this model's context of {context}: give less with "
            "--set prompt=..."
        )
    found = capture_attention(model, token_ids(source, text, length, seed, texts, device).to(device), layers=layers)
    return tuple(
        LayerTensors(layer, c.queries[0].float(), c.keys[0].float(), c.values[0].float(), c.scaling)
        for layer, c in found.items()
    )


def token_ids(source: str, text: int, length: int, seed: int = 0, texts: str = "", device: str = "cpu") -> Tensor:
    """The tokens of a text, (1, length)."""
    _, tokenizer = model_and_tokenizer(source, device)
    if _where(source) == str(POCKET_FOLDER):
        made = Documents(tokenizer.backend_tokenizer, FIRST_SEED + 1000 * seed + text)
        return torch.tensor([made.document(length, MOST_FILLER)[0]])
    if not texts:
        raise OptionError(
            f"{source} reads texts of yours: name a folder of .txt files, or one file, with --set texts=FOLDER."
        )
    files = text_files(texts)
    ids = _book(source, files[text % len(files)], device)
    start = tokenizer("a").input_ids[:1]  # the model's own first token, if it expects one
    first = torch.tensor([start if start == [tokenizer.bos_token_id] else []], dtype=torch.long)
    own = length - first.shape[1]
    at = text // len(files) * own
    if at + own > ids.shape[1]:
        raise TensorError(
            f"{files[text % len(files)].name} has {ids.shape[1]} tokens, too few for passage {text // len(files) + 1} "
            f"of {own}: ask for fewer texts or tokens, or add files."
        )
    return torch.cat([first, ids[:, at : at + own]], dim=1)


def text_files(texts: str) -> list[Path]:
    """The text files of a folder, by name; or the file."""
    if texts == BOOKS:
        return books()
    path = Path(texts)
    files = sorted(p for p in path.iterdir() if p.suffix in TEXT_FILES) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise TensorError(f"no text at {texts}: name a text file, or a folder with {' or '.join(TEXT_FILES)} files.")
    return files


@functools.lru_cache(maxsize=8)
def _book(source: str, path: Path, device: str) -> Tensor:
    _, tokenizer = model_and_tokenizer(source, device)
    try:
        _, text = read_text(path)
    except UnicodeDecodeError as error:
        raise TensorError(f"{path.name} is no UTF-8 text ({error.reason} at byte {error.start}).") from None
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
    return ids


@functools.lru_cache(maxsize=4)
def _full_attention(source: str) -> tuple[int, ...]:
    from transformers import AutoConfig

    where = Path(_where(source))
    try:
        if where.suffix == ".gguf":
            if not where.is_file():
                raise ModelError(f"no GGUF file at {source}.")
            config = AutoConfig.from_pretrained(str(where.parent), gguf_file=where.name)
        else:
            config = AutoConfig.from_pretrained(_where(source))
    except ModelError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(
            f"cannot read the configuration of {source!r}: give a Hub id, a folder with config.json, or a .gguf file. "
            f"transformers said: {str(error).splitlines()[0]}"
        ) from error
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)
    return tuple(number for number, kind in enumerate(kinds) if kind == "full_attention")


def _where(source: str) -> str:
    return str(POCKET_FOLDER) if source in ("", "pocket") else model_path(source)


def _ranges(numbers: Sequence[int]) -> str:
    """0 to 29, or the numbers one by one."""
    together = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if together else ", ".join(map(str, numbers))
