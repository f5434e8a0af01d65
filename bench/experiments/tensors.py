"""Where the experiments' queries, keys and values come from: a model's forward pass over a text, or a file of tensors.

When: an experiment measures what pruning does to attention itself, without decoding. A source is

- ``""`` or ``"pocket"``: the pocket model, on documents of its own grammar that it was not trained on;
- a Hub id, a folder or a ``.gguf`` file: consecutive passages of the user's texts, a folder or a file given as `texts`;
- ``smollm2-135m``, and ``canterbury`` as `texts`: weights and books that are fetched (`bench.material`);
- a ``.npz`` or ``.safetensors`` file with captured tensors, ``q``, ``k`` and ``v`` (or ``queries``, ``keys`` and
  ``values``), each (layers, heads, tokens, width), after RoPE; optionally ``layers`` (their numbers) and ``scaling``.

Models and the latest text are kept in memory, so that cells of one text run the model once.
Built on `grace_opt.hf.models.recording`.
"""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from bench.experiments.registry import Settings
from bench.material import BOOKS, books, model_path
from bench.pocket.corpus import Documents
from bench.real_model import read_text
from grace_opt.errors import GraceError, OptionError
from grace_opt.hf import capture_attention
from grace_opt.hf.models import POCKET_FOLDER, ModelError, disable_progress_bars, load_model

#: Documents of training have seeds below a thousand.
FIRST_SEED, MOST_FILLER = 10_000_000, 0.5
TENSOR_FILES = (".npz", ".safetensors")
TEXT_FILES = (".txt", ".md")
#: The accepted names of each tensor in a file.
NAMES = {"queries": ("queries", "q"), "keys": ("keys", "k"), "values": ("values", "v")}


class TensorError(GraceError, ValueError):
    """A text or a file of tensors does not hold what was asked of it."""


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
    wanted = layer_numbers(source, layers)
    if not _is_file(source):
        return list(_captured(source, text, prompt + later, wanted, seed, texts, device))
    if text:
        raise TensorError(f"{source} holds the tensors of one text: ask for one passage (--set passages=1).")
    stored = {found.layer: found for found in _stored(source)}
    length = stored[wanted[0]].keys.shape[1]
    if prompt + later > length:
        raise TensorError(
            f"{source} holds {length} tokens, fewer than prompt + later = {prompt + later}: give at most "
            f"--set prompt={max(length - later, 0)}."
        )
    return [_cut(stored[number], prompt + later, device) for number in wanted]


def layer_numbers(source: str, layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """The layers that `load` returns; of a model, only its configuration is read.

    Raises
    ------
    OptionError
        If one of `layers` is not there, or attends to a sliding window, where later queries do not see all keys.
    """
    there = tuple(found.layer for found in _stored(source)) if _is_file(source) else _full_attention(source)
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
    if not pocket and not _is_file(settings.model) and not settings.options.texts:
        return "a checkpoint reads texts of yours; name a folder of .txt files with --set texts=FOLDER"
    return ""


def _is_file(source: str) -> bool:
    return source.endswith(TENSOR_FILES)


def _cut(tensors: LayerTensors, length: int, device: str) -> LayerTensors:
    q, k, v = (x[:, :length].to(device, torch.float32) for x in (tensors.queries, tensors.keys, tensors.values))
    return LayerTensors(tensors.layer, q, k, v, tensors.scaling)


# Models


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
            f"cannot read the configuration of {source!r}: give a Hub id, a folder with config.json, or a .gguf, .npz "
            f"or .safetensors file. transformers said: {str(error).splitlines()[0]}"
        ) from error
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)
    return tuple(number for number, kind in enumerate(kinds) if kind == "full_attention")


def _where(source: str) -> str:
    return str(POCKET_FOLDER) if source in ("", "pocket") else model_path(source)


# Files of tensors


@functools.lru_cache(maxsize=2)
def _stored(source: str) -> tuple[LayerTensors, ...]:
    arrays = _arrays(source)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, accepted in NAMES.items():
        there = [a for a in accepted if a in arrays]
        if not there:
            raise TensorError(
                f"{source} has no tensor {' or '.join(accepted)}; it has {', '.join(sorted(arrays)) or 'none'}. "
                "It needs q, k and v, each (layers, heads, tokens, width)."
            )
        found[name] = arrays[there[0]]
        if found[name].ndim != 4 or not np.issubdtype(found[name].dtype, np.floating):
            raise TensorError(
                f"{source}: {there[0]} is {found[name].dtype} {found[name].shape}; it must be floating point, "
                "(layers, heads, tokens, width)."
            )
    q, k, v = found.values()
    same = q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:] and k.shape[:3] == v.shape[:3]
    if not same or not k.size or q.shape[1] % k.shape[1]:
        raise TensorError(
            f"{source}: queries {q.shape}, keys {k.shape} and values {v.shape} do not go together; layers and tokens "
            "must agree, queries and keys in width, and query heads be a multiple of KV heads."
        )
    if bad := [name for name, array in found.items() if not np.isfinite(array).all()]:
        raise TensorError(f"{source}: {bad[0]} hold numbers that are not finite.")
    numbers = np.asarray(arrays.get("layers", np.arange(len(k)))).ravel().tolist()
    if len(numbers) != len(k) or len(set(numbers)) != len(k):
        raise TensorError(f"{source}: layers={numbers} must be {len(k)} different numbers.")
    scaling = float(np.asarray(arrays.get("scaling", k.shape[-1] ** -0.5)).ravel()[0])
    layers = []
    for i, number in enumerate(numbers):
        parts = [torch.from_numpy(np.ascontiguousarray(array[i])) for array in (q, k, v)]
        layers.append(LayerTensors(int(number), parts[0], parts[1], parts[2], scaling))
    return tuple(layers)


def _arrays(source: str) -> dict[str, np.ndarray[Any, Any]]:
    try:
        if source.endswith(".safetensors"):
            return dict(load_file(source))
        with np.load(source, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError:
        raise TensorError(f"no file of tensors at {source}.") from None
    except (OSError, ValueError, TypeError, zipfile.BadZipFile, SafetensorError) as error:
        raise TensorError(
            f"{source} cannot be read ({str(error).splitlines()[0]}): give .npz or .safetensors."
        ) from None


def _ranges(numbers: Sequence[int]) -> str:
    """0 to 29, or the numbers one by one."""
    together = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if together else ", ".join(map(str, numbers))
