"""Instances for the combinatorial experiments, named by a config: a model's heads, files, generators, families.

When: `bounds` makes its cells from what `from_heads`, `from_files` and `generated` list, and `make` builds the
matrices where a cell is measured. W of a head is made as in GRACE (arXiv 2604.16983), section 3.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.experiments.families import FAMILIES
from bench.experiments.registry import Settings
from grace_opt import instances
from grace_opt.attention import interaction_matrix, prune_count, salient_channels
from grace_opt.errors import OptionError, ProblemError
from grace_opt.instances import generators

Array = npt.NDArray[Any]
Config = dict[str, Any]
#: Queries that W is made of, as in the paper.
OBSERVED = 32


@dataclass(frozen=True)
class Named:
    """One instance.

    Attributes
    ----------
    instance : str
        Its name, which no other instance of the experiment has.
    unit : str
        What is independent: all heads of one prompt have the same.
    W : ndarray (n, n)
    k : int
    protected : ndarray (n,) of bool
        Channels that GRACE would protect.
    """

    instance: str
    unit: str
    W: Array
    k: int
    protected: Array


def from_heads(settings: Settings, prompts: int, tokens: int, ratio: float) -> list[Config]:
    """A config for each prompt: all KV heads of the model on it."""
    common = {"kind": "heads", "model": settings.model, "device": settings.device, "tokens": tokens, "ratio": ratio}
    return [{**common, "seed": settings.seed + at} for at in range(prompts)]


def from_files(path: str, ratio: float) -> list[Config]:
    """A config for each matrix of a file, or of every instance file in a folder; a changed file makes new cells.

    Raises
    ------
    ProblemError
        If there is no such file, no instance in the folder, or a file cannot be read.
    """
    found = []
    for file in instance_files(path):
        made = instances.read(file)
        if made.W.ndim < 2 or made.W.shape[-1] != made.W.shape[-2] or made.W.size == 0:
            raise ProblemError(f"{file} holds W of shape {made.W.shape}: store (n, n), or (heads, n, n) for several.")
        n, count = made.W.shape[-1], int(np.prod(made.W.shape[:-2]))
        usual = prune_count(ratio, n) if made.k is None else made.k
        try:
            sizes = np.broadcast_to(np.asarray(usual), made.W.shape[:-2]).ravel().tolist()
        except ValueError:
            raise ProblemError(
                f"{file}: k has shape {np.shape(made.k)}, W {made.W.shape}: store one k, or one for each matrix."
            ) from None
        if bad := [k for k in sizes if not isinstance(k, int) or not 0 < k < n]:
            raise ProblemError(f"{file}: k = {bad[0]!r} with n = {n}: store an integer, 0 < k < n.")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        common = {"kind": "file", "path": str(file), "digest": digest, "seed": 0}
        found += [{**common, "matrix": at, "k": k} for at, k in zip(range(count), sizes, strict=True)]
    return found


def instance_files(path: str) -> list[Path]:
    """The file itself, or what a folder holds of readable kinds, by name."""
    place = Path(path)
    if not place.exists():
        raise ProblemError(f"--set instances={path}: nothing is there; give an instance file or a folder of them.")
    if not place.is_dir():
        return [place]
    # A collection's own lists (optima.csv) are no instances, and a table's name says nothing of what it holds: name it.
    readable = set(instances.SUFFIXES) - {".csv", ".tsv"}
    files = sorted(f for f in place.iterdir() if f.suffix.lower() in readable)
    if not files:
        raise ProblemError(f"--set instances={path}: no instance in this folder; readable are {instances.SUFFIXES}.")
    return files


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise an `OptionError` that lists the generators if one of these is none, before anything is measured."""
    if unknown := [kind for kind in kinds if kind not in generators.GENERATORS]:
        raise OptionError(f"--set kinds={unknown[0]}: no such generator; there are {', '.join(generators.GENERATORS)}.")


def generated(kinds: Sequence[str], n: int, count: int, seed: int) -> list[Config]:
    """`count` configs of each generator, k the largest even number up to n / 2, as `cancellation` wants it."""
    check_kinds(kinds)
    if kinds and n < 4:
        raise OptionError(f"--set n={n}: give at least 4 vertices.")
    return [{"kind": kind, "n": n, "k": n // 4 * 2, "seed": seed + at} for kind in kinds for at in range(count)]


def make(config: Config) -> list[Named]:
    """The instances of a config, one, or as many as the model has KV heads."""
    kind = config["kind"]
    if kind == "heads":
        return _heads(config)
    if kind == "file":
        W, name = _matrix(config["path"], config["digest"], config["matrix"])
        return [Named(name, name, W, config["k"], protected(W))]
    maker: Callable[..., Any] = FAMILIES.get(kind) or generators.GENERATORS[kind]
    arguments = {name: value for name, value in config.items() if name in ARGUMENTS}
    W = np.asarray(maker(**arguments).W if kind in generators.GENERATORS else maker(**arguments))
    name = " ".join([kind, *(f"{key}={value:g}" for key, value in sorted(arguments.items()))])
    return [Named(name, name, W, config["k"], protected(W))]


def protected(W: Array) -> Array:
    """GRACE's rule on the roots of W's diagonal, where the keys themselves are not known."""
    return np.asarray(salient_channels(np.sqrt(np.abs(np.diag(W)))[None, :].astype(np.float64)))


#: What of a config goes to its generator.
ARGUMENTS = ("n", "k", "seed", "ridge", "weight", "correlation", "rows", "sigma")


def _heads(config: Config) -> list[Named]:
    """W of every KV head on one prompt, and the channels that GRACE protects."""
    from grace_opt.hf.models.recording import capture_attention
    from grace_opt.hf.tools.needle import make_prompt

    model, tokenizer = _model(config["model"], config["device"])
    depth = (0.5 + 0.618 * config["seed"]) % 1  # spread over the text
    prompt = make_prompt(
        config["tokens"],
        depth,
        count=lambda text: len(tokenizer(text, add_special_tokens=False).input_ids),
        seed=config["seed"],
    )
    ids = tokenizer(prompt.text, return_tensors="pt").input_ids[:, :-1].to(config["device"])
    found = []
    for layer, seen in sorted(capture_attention(model, ids).items()):
        W = interaction_matrix(seen.queries[0, :, -OBSERVED:], seen.keys[0]).double().cpu().numpy()
        safe = salient_channels(seen.keys[0]).cpu().numpy()
        k = prune_count(config["ratio"], W.shape[-1])
        unit = f"prompt {config['seed']}"
        found += [Named(f"{unit} layer {layer} head {head}", unit, W[head], k, safe[head]) for head in range(len(W))]
    return found


@functools.lru_cache(maxsize=1)
def _model(where: str, device: str) -> tuple[Any, Any]:
    from grace_opt.hf.models import POCKET_FOLDER, disable_progress_bars, load_model

    disable_progress_bars()
    model, tokenizer = load_model(where or str(POCKET_FOLDER))
    return model.to(device), tokenizer


@functools.lru_cache(maxsize=4)
def _file(path: str, digest: str) -> Array:
    """The matrices of a file, (count, n, n)."""
    if not Path(path).is_file() or hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] != digest:
        raise ProblemError(f"{path} is not there, or is not the file that these cells were made for: start again.")
    W = np.asarray(instances.read(path).W)
    return W.reshape(-1, *W.shape[-2:])


def _matrix(path: str, digest: str, matrix: int) -> tuple[Array, str]:
    W = _file(path, digest)
    return W[matrix], Path(path).name if len(W) == 1 else f"{Path(path).name}#{matrix}"
