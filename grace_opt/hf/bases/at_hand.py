"""`basis_for`: the calibrated basis of a model, from a file, from memory, or made now.

Made once per model: it is kept in memory as long as the model is, and in the user's cache folder, under a name that
comes from the weights. A model's own folder may have one as well, which comes before. Nothing is ever fetched from a
network.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ..._util.file_lock import file_lock
from ..._util.progress import progress_bar
from ..._util.quiet import is_quiet
from ..._util.terminal import escape_path
from ..._util.warning import warn
from ...errors import CalibrationError, FileError, OptionError
from ..models.arguments import unwrap_model
from ..models.fingerprint import fingerprint
from ..models.loading import MOST_QUOTED, OWN_BASIS
from ..settings.bits import CALIBRATED
from . import basis_folder, calibrate
from .block_bases import kept_in_block, renew_in_block, used_in_block
from .calibrate import refuse_parts
from .calibrated import CalibratedBasis
from .sensitivity import GradientError
from .texts import all_token_ids, shipped_texts

_MADE: weakref.WeakKeyDictionary[PreTrainedModel, CalibratedBasis] = weakref.WeakKeyDictionary()
_LOCKS: weakref.WeakKeyDictionary[PreTrainedModel, threading.Lock] = weakref.WeakKeyDictionary()
_TOKENIZERS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, Any]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
_WARNED = threading.Event()
_INSTEAD = 'write basis=FILE, made by grace-opt calibrate basis MODEL -o FILE, or basis="none"'


def basis_for(
    model: PreTrainedModel | PreTrainedConfig,
    wanted: str | os.PathLike[str] | CalibratedBasis = CALIBRATED,
    *,
    tokenizer: Any = None,
    advance: Callable[[float], None] = lambda texts: None,
) -> CalibratedBasis:
    """Return a calibrated basis that fits a model.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
    wanted : str, path or CalibratedBasis
        A basis, the file of one, or ``"calibrated"``: the one that was made for this model before, or else is made now.
        Lines on stderr say so, and how much is left. As long as blocks of `attach` are open on the model, it is what
        was used in them before, whatever has happened to the weights.
    tokenizer : callable, optional
        The model's. None looks for it where the model was loaded from.
    advance : callable
        Called with the number of texts read, and parts of one, if the basis is made now; what it raises stops that.

    Raises
    ------
    CalibrationError
        If the basis is another model's, the file is damaged, or there is nothing at hand to make one from.

    Examples
    --------
    >>> import tempfile
    >>> from grace_opt.hf import calibrate
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> made = calibrate.basis(model, tokenizer, ["the quiet river runs past a late singer " * 40])
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
            f'basis={wanted!r}: write "calibrated", "none", the name of a file that grace-opt calibrate '
            "basis made, or a CalibratedBasis"
        )
    if wanted != CALIBRATED:
        return kept_in_block(model, os.path.abspath(wanted), lambda: _of_file(wanted, model))
    _refuse_config(model)
    with _LOCK:
        lock = _LOCKS.setdefault(model, threading.Lock())
    with lock:  # of threads that come at the same time, one calibrates
        return kept_in_block(model, CALIBRATED, lambda: _remembered(model, tokenizer, advance))


def with_measured_kl(
    model: PreTrainedModel | PreTrainedConfig,
    measure: Callable[[CalibratedBasis, Sequence[Tensor], Callable[[float], None]], Tensor],
) -> CalibratedBasis:
    """Return a model's own basis with what bits leave, which is measured now if nobody has done so before.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
    measure : callable
        Gets the basis, the token numbers of the texts that it is made of, and what to call with the number of texts
        done so far; returns the curve (`kl_curve`).
    """
    basis = basis_for(model)
    if basis.kl is not None:
        return basis
    assert isinstance(model, PreTrainedModel)  # else there is no basis
    with _LOCKS[model]:  # of threads that come at the same time, one measures
        basis = kept_in_block(model, CALIBRATED, lambda: _remembered(model, None, lambda done: None))
        if basis.kl is not None:
            return basis
        name, start = _name(model), time.monotonic()
        every = all_token_ids([*shipped_texts()], _tokenizer(model), "calibrate.kl", model)
        _say(f"grace_opt: measuring what bits leave on {name}, once per model, for max_kl=")
        with progress_bar(None, len(every), "texts") as show:
            curve = measure(basis, every, lambda done: show(f"measuring {name}", done))
        basis = _MADE[model] = replace(basis, kl=curve)
        renew_in_block(model, CALIBRATED, basis)
        path, own = _place(basis.fingerprint), _beside_weights(model, basis.fingerprint)
        if own is not None and own.digest() == basis.digest():
            path = _kept_as(path, own)
        if path is not None:
            with suppress(CalibrationError):  # `_made_now` has said so
                basis_folder.write(path, basis, name)
        _say(f"grace_opt: measured {name} in {time.monotonic() - start:.0f} s")
        return basis


def check_at_hand(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise `CalibrationError` if a model has no calibrated basis and none can be made: before a long prompt is read.

    The tokenizer is looked for; the model does nothing.
    """
    _refuse_config(model)
    here = fingerprint(model)
    found = _MADE.get(model)
    if (found is not None and _fits(found, here)) or used_in_block(model, CALIBRATED) is not None:
        return
    refuse_parts(here)
    path = _place(here)
    if (path is None or not path.exists()) and _beside_weights(model, here) is None:
        _tokenizer(model)


def _refuse_config(model: PreTrainedModel | PreTrainedConfig) -> None:
    if not isinstance(model, PreTrainedModel):
        raise CalibrationError(
            f"a configuration has no weights to calibrate a basis with; give the model itself, or {_INSTEAD}"
        )


def _of_file(path: str | os.PathLike[str], model: PreTrainedModel | PreTrainedConfig) -> CalibratedBasis:
    """Return what a file has; the last one is not read again for each cache, unless it was written since."""
    try:
        here = os.stat(path)
    except OSError:
        return CalibratedBasis.load(path)  # says what is wrong
    basis = _read(os.path.abspath(path), (here.st_ino, here.st_size, here.st_mtime_ns))
    basis.check_model(model)
    return basis


@functools.lru_cache(maxsize=1)
def _read(path: str, version: tuple[int, ...]) -> CalibratedBasis:
    return CalibratedBasis.load(path)


def _remembered(model: PreTrainedModel, tokenizer: Any, advance: Callable[[float], None]) -> CalibratedBasis:
    here = fingerprint(model)
    found = _MADE.get(model)
    if found is not None and _fits(found, here):  # the weights may have been trained since
        return found
    refuse_parts(here)
    path = _place(here)
    own = _beside_weights(model, here, told=True)
    found = _from_file(path, here) if own is None else _from_file(_kept_as(path, own), here) or own
    if found is None:
        with ExitStack() as held:
            if path is not None:
                with suppress(FileError):  # a folder that is only read
                    held.enter_context(file_lock(path.with_name(f".{path.stem}.lock"), _say_busy))
            # Once more, as another process may just have made it.
            found = _from_file(path, here) or _made_now(model, path, tokenizer, advance)
    _MADE[model] = found
    return found


def _say_busy() -> None:
    _say("grace_opt: another process is calibrating this model; its basis is waited for")


def _place(here: dict[str, int | str]) -> Path | None:
    """Return the file of the user's cache folder; None if some weights are elsewhere, or no folder can be written."""
    if "weights" not in here:
        return None
    try:
        return basis_folder.folder() / basis_folder.file_of(here)
    except CalibrationError as failure:
        _warn_not_kept(str(failure))
        return None


def _from_file(path: Path | None, here: dict[str, int | str]) -> CalibratedBasis | None:
    """Return what an earlier process has made; None if there is no such file, or it is damaged, or of another model."""
    found = None if path is None or not path.exists() else basis_folder.read(path)
    return found if found is not None and _fits(found, here) else None


def _beside_weights(model: PreTrainedModel, here: dict[str, int | str], told: bool = False) -> CalibratedBasis | None:
    """Return the basis that comes with a model, in the folder that it was loaded from; None if none does that fits.

    `told` warns of one that is damaged.
    """
    path = Path(model.config._name_or_path or os.devnull) / OWN_BASIS
    try:
        if path.exists() and _fits(found := CalibratedBasis.load(path), here):
            return found
    except CalibrationError as failure:
        if told:
            warn(f"the basis that comes with the model is not used, and one is calibrated: {failure}")
    except OSError:  # no folder has such a name, or nobody may look into it
        pass
    return None


def _kept_as(path: Path | None, own: CalibratedBasis) -> Path | None:
    """Return the file for a basis that comes with a model, once its KL is known: not that of a calibrated one."""
    return None if path is None else path.with_stem(f"{path.stem}-{own.digest()[:16]}")


def _fits(found: CalibratedBasis, here: dict[str, int | str]) -> bool:
    """Return whether all that the basis notes of its model is so; older files do not note the rotary embedding."""
    return found.fingerprint.items() <= here.items()


def _made_now(
    model: PreTrainedModel, path: Path | None, tokenizer: Any, advance: Callable[[float], None]
) -> CalibratedBasis:
    tokenizer, texts = _tokenizer(model) if tokenizer is None else tokenizer, shipped_texts()
    name = _name(model)
    why = "as its weights have changed" if model in _MADE else "once per model"
    _say(f"grace_opt: calibrating {name} on {len(texts)} texts, {why}")
    start, said = time.monotonic(), [False]
    with progress_bar(None, len(texts), "texts") as show, _told_what_to_do():

        def made(end_to_end: bool) -> CalibratedBasis:
            def shown(done: float) -> None:
                if done >= 1 and not said[0]:
                    _say(f"grace_opt: {done:.0f} of {len(texts)} texts were done before, and it goes on from there")
                said[0] = True
                show(f"calibrating {name}", done)
                advance(done)

            part = None if path is None else basis_folder.unfinished(path)
            return calibrate.basis(model, tokenizer, texts, end_to_end=end_to_end, advance=shown, checkpoint=part)

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
            basis_folder.write(path, found, name)
            kept = f"in {path}"
        except CalibrationError as failure:
            _warn_not_kept(str(failure))
    _say(f"grace_opt: calibrated {name} in {time.monotonic() - start:.0f} s; kept {kept}")
    return found


@contextmanager
def _told_what_to_do() -> Iterator[None]:
    """Say after Ctrl-C in this block how to do without what takes so long."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(
            'To calibrate at another time: grace-opt calibrate basis MODEL. Without a calibration: basis="none".'
        )
        raise


def _name(model: PreTrainedModel) -> str:
    return str(model.config._name_or_path or model.config.model_type)


def _tokenizer(model: PreTrainedModel) -> Any:
    """Return `tokenizer_of` a model, which is read once."""
    if model not in _TOKENIZERS or _TOKENIZERS[model][0] != _name(model):
        _TOKENIZERS[model] = _name(model), tokenizer_of(model)
    return _TOKENIZERS[model][1]


def tokenizer_of(model: PreTrainedModel) -> Any:
    """Return the tokenizer of the folder or Hub id that the model was loaded from, if it is on this machine."""
    name = model.config._name_or_path
    if not name:
        raise CalibrationError(
            "the model was not loaded from a folder or the Hub, so its tokenizer is unknown; write "
            'calibrate.basis(model, tokenizer).save(FILE) and basis=FILE, or basis="none"'
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
            f"{_INSTEAD}; or calibrate.basis(model, tokenizer).save(FILE) and basis=FILE"
        ) from error


def _warn_not_kept(why: str) -> None:
    if not _WARNED.is_set():
        _WARNED.set()
        warn(
            f"calibrated bases are kept in memory only, so each process makes its own: {why} Here, set the environment "
            "variable HF_ASSETS_CACHE to a folder that can be written to."
        )


def _say(line: str) -> None:
    if sys.stderr is not None and not is_quiet():
        sys.stderr.write(escape_path(line, sys.stderr) + "\n")
        sys.stderr.flush()
