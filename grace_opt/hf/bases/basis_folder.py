"""The user's folder of calibrated bases: a file for each model, found by its weights.

A file's time is that of its last use. When another one is written, those go that nobody has used for long, and the
least recently used beyond a number of files and bytes. Several processes may do so at once: whoever finds a file gone
calibrates again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import cached_assets_path
from safetensors import SafetensorError, safe_open

from ..._util.files import os_error_advice
from ...errors import CalibrationError, GraceError
from .basis_file import FORMAT, as_tensors
from .calibrated import CalibratedBasis

#: Days after which files go that nobody has used; of those that are unfinished, or that killed processes have left.
DAYS, DAYS_UNFINISHED = 180, 7
#: Most files and bytes.
FILES, BYTES = 100, 4 * 2**30
_SECONDS = 86400
_UNFINISHED = "-unfinished"


@dataclass(frozen=True)
class KeptBasis:
    """A file of the folder.

    Attributes
    ----------
    path : Path
    model, made : str
        Name of the model, and the day on which it was calibrated; empty in files of older versions.
    bytes : int
    used : float
        Time of the last use, in seconds since 1970.
    """

    path: Path
    model: str
    made: str
    bytes: int
    used: float

    @property
    def is_finished(self) -> bool:
        """Whether it is a basis, and not what a calibration has left that was stopped."""
        return not self.path.stem.endswith(_UNFINISHED)


def folder() -> Path:
    """Return the folder, which is made if it is missing; raises `CalibrationError` if there can be none."""
    return assets_folder("bases", CalibrationError)


def assets_folder(kind: str, error: type[GraceError]) -> Path:
    """Return the user's folder of one kind of our files, which is made if it is missing; raises an error of this type
    if there can be none."""
    try:
        return cached_assets_path("grace_opt", kind)
    except OSError as failure:
        raise error(os_error_advice(failure)) from failure
    except ValueError as failure:  # the folder, or one that it is in, is a file
        raise error(f"{str(failure).splitlines()[0].rstrip('.')}.") from failure


def file_of(here: Mapping[str, int | str]) -> str:
    """Return the name of a model's file, by its fingerprint, which has its weights.

    Examples
    --------
    >>> file_of({"model_type": "llama", "weights": "0" * 64})
    'llama-00000000000000000000000000000000.safetensors'
    """
    adapters = here.get("adapters")
    own = f"-{hashlib.sha256(str(adapters).encode()).hexdigest()[:8]}" if adapters else ""
    return f"{here['model_type']}-{str(here['weights'])[:32]}{own}.safetensors"


def unfinished(path: Path) -> Path:
    """Return the file of what is done of a calibration, beside its basis."""
    return path.with_stem(f"{path.stem}{_UNFINISHED}")


def read(path: Path) -> CalibratedBasis | None:
    """Return what a file has, and note that it was used; None if there is no such file, or it is damaged."""
    with suppress(OSError):
        os.utime(path)  # first, so that it is among the last to go
    try:
        return CalibratedBasis.load(path)
    except CalibrationError:
        return None


def write(path: Path, basis: CalibratedBasis, model: str) -> None:
    """Write a file, with the model's name and the day, and remove what is old; `CalibrationError` if it cannot be."""
    about: dict[str, Any] = {"fingerprint": basis.fingerprint, "texts": basis.texts, "tokens": basis.tokens}
    FORMAT.write(path, as_tensors(basis), {**about, "model": model, "made": time.strftime("%Y-%m-%d")})
    _remove_old(path)


def kept_bases(where: Path) -> list[KeptBasis]:
    """Return the files of a folder, the most recently used first."""
    found = []
    for path in where.glob("[!.]*.safetensors"):
        try:
            state = path.stat()
        except OSError:  # another process has removed it
            continue
        about = {} if path.stem.endswith(_UNFINISHED) else _about(path)
        made_for = f"{about.get('model') or ''}", f"{about.get('made') or ''}"
        found.append(KeptBasis(path, *made_for, state.st_size, state.st_mtime))
    return sorted(found, key=lambda one: (-one.used, one.path.name))


def _about(path: Path) -> dict[str, Any]:
    """Return what a file says about itself; nothing, if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
    except (SafetensorError, OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _remove_old(new: Path) -> None:
    """Remove the files of a folder that are old, or too many, but not the new one."""
    now, total, old = time.time(), 0, []
    for place, one in enumerate(kept_bases(new.parent)):
        total += one.bytes
        days = DAYS if one.is_finished else DAYS_UNFINISHED
        if one.path != new and (now - one.used > days * _SECONDS or place >= FILES or total > BYTES):
            old.append(one)
    clear(old)
    for path in new.parent.glob(".*"):  # locks, and what was being written when a process was killed
        with suppress(OSError):
            if now - path.stat().st_mtime > DAYS_UNFINISHED * _SECONDS:
                path.unlink()


def clear(bases: list[KeptBasis]) -> int:
    """Remove files; return how many were there and are gone."""
    gone = 0
    for one in bases:
        with suppress(OSError):  # another process was faster, or reads it (on Windows)
            one.path.unlink()
            gone += 1
    return gone
