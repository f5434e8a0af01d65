"""`basis_for`: the calibrated basis of a model, from a file, from memory, or made now.

Made once per model: it is kept in memory as long as the model is, and in the user's cache folder, under a name that
comes from the weights. Nothing is ever fetched from a network.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

from huggingface_hub import cached_assets_path
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ..._util.files import os_error_advice
from ..._util.progress import progress_bar
from ..._util.terminal import escape_path
from ..._util.warning import warn
from ...errors import CalibrationError, OptionError
from ..arguments import unwrap_model
from ..fingerprint import fingerprint
from ..models import MOST_QUOTED
from ..texts import shipped_texts
from .calibrate import calibrate_basis, refuse_parts
from .calibrated import CalibratedBasis
from .sensitivity import GradientError
from .settings import CALIBRATED

_MADE: weakref.WeakKeyDictionary[PreTrainedModel, CalibratedBasis] = weakref.WeakKeyDictionary()
_LOCKS: weakref.WeakKeyDictionary[PreTrainedModel, threading.Lock] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
_WARNED = threading.Event()
_INSTEAD = 'write basis=FILE, made by grace-opt basis MODEL -o FILE, or basis="prompt"'


def basis_for(
    model: PreTrainedModel | PreTrainedConfig,
    wanted: str | os.PathLike[str] | CalibratedBasis = CALIBRATED,
    *,
    tokenizer: Any = None,
    advance: Callable[[int], None] = lambda texts: None,
) -> CalibratedBasis:
    """Return a calibrated basis that fits a model.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
    wanted : str, path or CalibratedBasis
        A basis, the file of one, or ``"calibrated"``: the one that was made for this model before, or else is made now,
        which takes seconds to minutes. Lines on stderr say so.
    tokenizer : callable, optional
        The model's. None looks for it where the model was loaded from.
    advance : callable
        Called with the number of texts read, if the basis is made now; what it raises stops that.

    Raises
    ------
    CalibrationError
        If the basis is another model's, the file is damaged, or there is nothing at hand to make one from.

    Examples
    --------
    >>> import tempfile
    >>> from grace_opt.hf import calibrate_basis
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> made = calibrate_basis(model, tokenizer, ["the quiet river runs past a late singer " * 40])
    >>> path = Path(tempfile.mkdtemp()) / "pocket.safetensors"
    >>> made.save(path)
    >>> basis_for(model, path).tokens == made.tokens
    True
    """
    if not isinstance(model, PreTrainedConfig):
        model = unwrap_model(model, "basis_for")
    if isinstance(wanted, CalibratedBasis):
        wanted.check_model(model)
        return wanted
    if not isinstance(wanted, str | os.PathLike):
        raise OptionError(
            f'basis={wanted!r}: write "calibrated", "prompt", "none", the name of a file that grace-opt basis made, or '
            "a CalibratedBasis"
        )
    if wanted != CALIBRATED:
        basis = _of_file(wanted)
        basis.check_model(model)
        return basis
    if not isinstance(model, PreTrainedModel):
        raise CalibrationError(
            f"a configuration has no weights to calibrate a basis with; give the model itself, or {_INSTEAD}"
        )
    with _LOCK:
        lock = _LOCKS.setdefault(model, threading.Lock())
    with lock:  # of threads that come at the same time, one calibrates
        return _remembered(model, tokenizer, advance)


def _of_file(path: str | os.PathLike[str]) -> CalibratedBasis:
    """Return what a file has; the last one is not read again for each cache, unless it was written since."""
    try:
        here = os.stat(path)
    except OSError:
        return CalibratedBasis.load(path)  # says what is wrong
    return _read(os.path.abspath(path), (here.st_ino, here.st_size, here.st_mtime_ns))


@functools.lru_cache(maxsize=1)
def _read(path: str, version: tuple[int, ...]) -> CalibratedBasis:
    return CalibratedBasis.load(path)


def _remembered(model: PreTrainedModel, tokenizer: Any, advance: Callable[[int], None]) -> CalibratedBasis:
    here = fingerprint(model)
    found = _MADE.get(model)
    if found is not None and _fits(found, here):  # the weights may have been trained since
        return found
    refuse_parts(here)
    path = _place(here)
    found = _from_file(path, here) or _made_now(model, path, tokenizer, advance)
    _MADE[model] = found
    return found


def _place(here: dict[str, int | str]) -> Path | None:
    """Return the file of the user's cache folder; None if some weights are elsewhere, or no folder can be written."""
    if "weights" not in here:
        return None
    try:
        folder = cached_assets_path("grace_opt", "bases")
    except OSError as failure:
        _warn_not_kept(str(os_error_advice(failure)))
        return None
    except ValueError as failure:  # the folder, or one that it is in, is a file
        _warn_not_kept(f"{str(failure).splitlines()[0].rstrip('.')}.")
        return None
    return folder / f"{here['model_type']}-{str(here['weights'])[:32]}.safetensors"


def _from_file(path: Path | None, here: dict[str, int | str]) -> CalibratedBasis | None:
    """Return what an earlier process has made; None if there is no such file, or it is damaged."""
    if path is None or not path.exists():
        return None
    try:
        found = CalibratedBasis.load(path)
    except CalibrationError:
        return None  # made anew, and written over
    return found if _fits(found, here) else None


def _fits(found: CalibratedBasis, here: dict[str, int | str]) -> bool:
    """Return whether all that the basis notes of its model is so; older files do not note the rotary embedding."""
    return found.fingerprint.items() <= here.items()


def _made_now(
    model: PreTrainedModel, path: Path | None, tokenizer: Any, advance: Callable[[int], None]
) -> CalibratedBasis:
    tokenizer, texts = tokenizer_of(model) if tokenizer is None else tokenizer, shipped_texts()
    name = str(model.config._name_or_path or model.config.model_type)
    _say(f"grace_opt: calibrating {name} on {len(texts)} texts; takes seconds to minutes, once per model")
    start = time.monotonic()
    with progress_bar(None, len(texts)) as show:

        def made(end_to_end: bool) -> CalibratedBasis:
            def shown(done: int) -> None:
                show("calibrating", done)
                advance(done)

            return calibrate_basis(model, tokenizer, texts, end_to_end=end_to_end, advance=shown)

        try:
            found = made(True)
        except GradientError as failure:
            why = str(failure).split(", so")[0]
            _say(f"grace_opt: {why}: layers and heads share bits by their local errors only, at some cost in quality")
            # Under another name, so that a process with gradients makes its own.
            path = None if path is None else path.with_stem(f"{path.stem}-local")
            found = _from_file(path, fingerprint(model)) or made(False)
    kept = "in memory"
    if path is not None:
        try:
            found.save(path)
            kept = f"in {path}"
        except CalibrationError as failure:
            _warn_not_kept(str(failure))
    _say(f"grace_opt: calibrated {name} in {time.monotonic() - start:.0f} s; kept {kept}")
    return found


def tokenizer_of(model: PreTrainedModel) -> Any:
    """Return the tokenizer of the folder or Hub id that the model was loaded from, if it is on this machine."""
    name = model.config._name_or_path
    if not name:
        raise CalibrationError(
            "the model was not loaded from a folder or the Hub, so its tokenizer is unknown; write "
            'calibrate_basis(model, tokenizer).save(FILE) and basis=FILE, or basis="prompt"'
        )
    try:
        # A model does not say that it was loaded from a GGUF file, nor from which of several.
        own = [] if (Path(name) / "config.json").exists() else list(Path(name).glob("*.gguf"))
        inside = {"gguf_file": own[0].name} if len(own) == 1 else {}
        return AutoTokenizer.from_pretrained(name, local_files_only=True, **inside)
    except Exception as error:  # a damaged file ends in whatever error the library raises that reads it
        said = shorten(str(error), MOST_QUOTED, placeholder=" ...")
        raise CalibrationError(
            f"the tokenizer of {name} is not on this machine or cannot be read ({type(error).__name__}: {said}); "
            f"{_INSTEAD}; or calibrate_basis(model, tokenizer).save(FILE) and basis=FILE"
        ) from error


def _warn_not_kept(why: str) -> None:
    if not _WARNED.is_set():
        _WARNED.set()
        warn(
            f"calibrated bases are kept in memory only, so each process makes its own: {why} Here, set the environment "
            "variable HF_ASSETS_CACHE to a folder that can be written to.",
        )


def _say(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(escape_path(line, sys.stderr) + "\n")
        sys.stderr.flush()
