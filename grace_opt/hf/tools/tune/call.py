"""`tune`: measure settings on a model and texts, and recommend one.

Each measurement is a cell of `grace_opt.sweep`: one setting on one window. With a folder, a stopped run goes on where
it was; windows come one after the other, so that whatever was measured can be compared.
"""

from __future__ import annotations

import os
import platform
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from ...._util.parameters import integer, number
from ...._util.quiet import quietly
from ....errors import GraceError, OptionError
from ....sweep import Cell, Failure, read_cell, run_sweep
from ....sweep.measure import cpu_name
from ...bases.at_hand import basis_for
from ...bases.texts import texts_by_name
from ...models.arguments import require_model
from ...models.fingerprint import fingerprint
from ...settings.bits import CALIBRATED, NO_BASIS
from .candidates import BITS, Candidate, default_candidates
from .measuring import Measurer
from .recommend import recommend, target_of
from .result import TuneResult
from .rows import rows_of, with_differences
from .windows import LATER, WINDOWS, Window, windows_of_prompts, windows_of_texts

EXPERIMENT = "tune"
#: A context for models that name none.
ANY_LENGTH = 2**30


class _TimeUpError(GraceError):
    """The time limit passed while a basis was calibrated."""


def tune(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: str | Sequence[str] | Mapping[str, str] | None = None,
    *,
    prompts: Sequence[Mapping[str, str]] | None = None,
    max_kl: float | None = None,
    max_share: float | None = None,
    bits: Sequence[float] | None = None,
    candidates: Sequence[Candidate] | None = None,
    windows: int = WINDOWS,
    tokens: int | None = None,
    later: int = LATER,
    basis: str | os.PathLike[str] = CALIBRATED,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    progress: bool | None = None,
) -> TuneResult:
    """Measure settings of a cache on your own model and texts, and recommend one.

    Each window of text is read, every setting compresses the cache, later tokens and questions about hidden facts are
    fed, and all is compared with the dense cache.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model.
    tokenizer : callable
        The model's.
    texts : str, sequence or mapping of str, optional
        Texts, by name if you like, that are like what the model is used for. None takes the texts that ship with
        grace_opt, for a first try: bases are calibrated on them too.
    prompts : sequence of mapping, optional
        Instead of texts: each has ``prompt``, and perhaps ``answer`` (or ``completion``), which is then what is fed.
    max_kl : float, optional
        Recommend the smallest cache whose KL is at most this, nats per token. Without any target, 0.005.
    max_share : float, optional
        Recommend the least KL among caches of at most this share of the dense one's bytes.
    bits : sequence of float, optional
        Mean bits per element at which the budgeted cache is measured. Without another target, recommend the least KL
        at no more bits than the largest.
    candidates : sequence of Candidate, optional
        What to measure, instead of the default list.
    windows, tokens, later : int
        Number of windows, tokens of each (None: the longest of 768, 512, 384 and 256 that fits), and how many of
        these are fed after the rest was compressed.
    basis : str or path
        Of the budgeted cache, as in `CacheConfig`.
    seed : int
        Decides hidden facts and resampling: equal seeds, equal answers, but for times.
    folder : path, optional
        Keep the measurements there, and use those that are there already.
    time_limit : float, optional
        Begin nothing new after so many seconds; what was measured counts.
    progress : bool or None
        True shows a bar, False nothing, None a bar where somebody is waiting.

    Returns
    -------
    TuneResult
        After Ctrl-C too, if anything was measured.

    Raises
    ------
    OptionError
        If there is no text or tokenizer, texts are too short, or an option is out of range.

    Notes
    -----
    Costs a reading of each window, and per setting and window about as much as feeding `later` tokens twice.

    Examples
    --------
    >>> from grace_opt.hf.models import load_pocket
    >>> from grace_opt.hf.tools.tune import Candidate
    >>> from grace_opt.hf import CacheConfig
    >>> model, tokenizer = load_pocket()
    >>> one = Candidate("ratio 0.5", "pruned", CacheConfig(ratio=0.5))
    >>> text = "the quiet river runs past the old mill . " * 80
    >>> result = tune(model, tokenizer, text, candidates=[one], windows=2, tokens=256, progress=False)
    >>> result.rows[0].windows, result.config.channels.ratio
    (2, 0.5)
    """
    began = time.monotonic()
    model, target = require_model(model, "tune"), target_of(max_kl, max_share, bits)
    if not callable(tokenizer):
        raise OptionError(f"tokenizer is {tokenizer!r}: texts need the model's tokenizer; write tune(model, tokenizer)")
    count, later = integer("windows", windows, at_least=1), integer("later", later, at_least=2)
    tokens, seed = integer("tokens", tokens, at_least=1, optional=True), integer("seed", seed, at_least=0)
    limit = number("time_limit", time_limit, above=0, optional=True)
    pieces = _windows(model, tokenizer, texts, prompts, count, tokens, later, seed)
    shortest = min(one.context.shape[1] for one in pieces)
    if candidates is None:
        candidates = default_candidates(shortest, bits=BITS if bits is None else bits, basis=_as_setting(basis))
    elif bits is not None:
        raise OptionError("candidates already says what is measured; leave out bits")
    if len(by_name := {one.name: one for one in candidates}) < len(candidates) or not by_name:
        raise OptionError("candidates: give at least one, each with a name of its own")
    left_out = {one.name: why for one in candidates if (why := one.missing)}
    with quietly() if progress is False else nullcontext():
        digest = _basis(model, tokenizer, candidates, left_out, began, limit)
    todo = [one for one in candidates if one.name not in left_out]
    cells = _cells(model, todo, pieces, digest)
    interrupted = False
    with ExitStack() as stack:
        place = os.fspath(stack.enter_context(tempfile.TemporaryDirectory()) if folder is None else folder)
        left = None if limit is None else max(limit - (time.monotonic() - began), 0.0)
        failures: tuple[Failure, ...] = ()
        try:
            measure = Measurer(model, pieces, by_name)
            if cells:
                failures = run_sweep(cells, measure, place, progress=progress, time_limit=left).failures
        except KeyboardInterrupt:
            interrupted = True
        measured = {
            (cell.config["setting"], cell.config["place"]): read_cell(cell.path(place)).rows
            for cell in cells
            if cell.path(place).exists()
        }
    if interrupted and not measured:
        raise KeyboardInterrupt
    for failure in failures:
        left_out.setdefault(failure.config["setting"], failure.error)
    rows = rows_of([one for one in todo if one.name not in left_out], measured, seed)
    out_of_time = not interrupted and len(measured) + len(failures) < len(cells)
    for one in todo:
        if one.name not in left_out and all(row.name != one.name for row in rows):
            left_out[one.name] = f"not measured before {'Ctrl-C' if interrupted else 'the time limit'}"
    found = recommend(rows, target)
    return TuneResult(
        rows=tuple(rows) if found is None else with_differences(rows, found.row, seed),
        target=target,
        recommendation=found,
        left_out=left_out,
        windows=[
            {"name": one.name, "tokens": one.context.shape[1], "later": one.later.shape[1], "digest": one.digest}
            for one in pieces
        ],
        fingerprint=fingerprint(model),
        measured=measured,
        provenance=_provenance(model, seed, time.monotonic() - began),
        interrupted=interrupted,
        out_of_time=out_of_time,
    )


def _windows(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: str | Sequence[str] | Mapping[str, str] | None,
    prompts: Sequence[Mapping[str, str]] | None,
    count: int,
    tokens: int | None,
    later: int,
    seed: int,
) -> list[Window]:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or ANY_LENGTH
    if prompts is not None:
        if texts is not None or tokens is not None:
            raise OptionError("prompts already says what is measured on; leave out texts and tokens")
        return windows_of_prompts(prompts, tokenizer, count=count, later=later, seed=seed, limit=limit)
    if texts is None:
        texts = texts_by_name()
    elif isinstance(texts, str):
        texts = {"text": texts}
    elif not isinstance(texts, Mapping):
        texts = {f"text {number}": text for number, text in enumerate(texts, 1)}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise OptionError(f"{wrong[0]} is a {type(texts[wrong[0]]).__name__}: give texts as strings")
    return windows_of_texts(texts, tokenizer, count=count, tokens=tokens, later=later, seed=seed, limit=limit)


def _as_setting(basis: str | os.PathLike[str]) -> str:
    """Return the basis as a setting that means the same in every folder: what `tune` recommends is used elsewhere."""
    name = os.fspath(basis)
    return name if name in (CALIBRATED, NO_BASIS) else os.path.abspath(name)


def _basis(
    model: PreTrainedModel,
    tokenizer: Any,
    candidates: Sequence[Candidate],
    left_out: dict[str, str],
    began: float,
    limit: float | None,
) -> str | None:
    """Calibrate, if it was not done before; if there is no time for it, name the settings that need it."""
    coded = [one for one in candidates if one.basis]
    wanted = {one.basis for one in coded} - {NO_BASIS}
    if not wanted:
        return None

    def check(done: float) -> None:
        if limit is not None and time.monotonic() - began > limit:
            raise _TimeUpError

    try:
        digests = sorted(basis_for(model, one, tokenizer=tokenizer, advance=check).digest() for one in wanted)
    except _TimeUpError:
        why = "the basis was not calibrated within the time limit; make it beforehand: grace-opt calibrate basis MODEL"
        left_out |= {one.name: why for one in coded}
        return None
    return " ".join(digests)


def _cells(
    model: PreTrainedModel, candidates: Sequence[Candidate], windows: Sequence[Window], basis: str | None
) -> list[Cell]:
    """Return the measurements, window after window; times are taken on the first."""
    made_for = fingerprint(model)
    about: dict[str, Any] = {
        "model": made_for,
        "dtype": str(model.dtype),
        "versions": {name: version(name) for name in ("grace-opt", "torch", "transformers")},
    }
    if "weights" not in made_for:  # somebody else's records cannot be told from those of this model
        about["run"] = secrets.token_hex(8)
    return [
        Cell(
            EXPERIMENT,
            {
                "setting": one.name,
                "settings": one.settings(),
                "basis": basis if one.basis else None,
                "place": place,
                "window": window.digest,
                "timed": place == 0,
                **about,
            },
        )
        for place, window in enumerate(windows)
        for one in candidates
    ]


def _provenance(model: PreTrainedModel, seed: int, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "dtype": str(model.dtype),
        "device": str(model.device),
        "seed": seed,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("grace-opt", "torch", "transformers")},
        "seconds": round(seconds, 1),
    }
