"""Bases stay as long as blocks of `attach` are open on a model, whatever happens to its weights.

When: a model is trained between calls of ``generate``. A basis of its own for every step would take longer than the
step, and fill the folder; an older one fits nearly as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedConfig, PreTrainedModel

from ..._util.warning import warn
from ..models.fingerprint import fingerprint, fingerprint_differences
from ..models.generate_hook import GenerateHook
from .calibrated import CalibratedBasis


@dataclass
class _Used:
    bases: dict[str, CalibratedBasis] = field(default_factory=dict)
    said: bool = False


_USED: weakref.WeakKeyDictionary[GenerateHook, _Used] = weakref.WeakKeyDictionary()


def used_in_block(model: PreTrainedModel | PreTrainedConfig, name: str) -> CalibratedBasis | None:
    """Return what the blocks that are open on a model have used under this name; None without any."""
    used = _used(model)
    return None if used is None else used.bases.get(name)


def kept_in_block(
    model: PreTrainedModel | PreTrainedConfig, name: str, find: Callable[[], CalibratedBasis]
) -> CalibratedBasis:
    """Return what the blocks that are open on a model have used under this name, or else what `find` returns.

    Warns
    -----
    UserWarning
        If the model has changed since; once, until the last of these blocks ends.
    """
    used = _used(model)
    if used is None:
        return find()
    if name not in used.bases:
        used.bases[name] = find()
    elif not used.said:
        basis = used.bases[name]
        if differences := fingerprint_differences("basis", basis.fingerprint, fingerprint(model)):
            used.said = True
            warn(
                f"the model has changed since its basis was calibrated ({'; '.join(differences)}). The basis stays "
                "until this block of attach() ends; bits keep a little less quality. For a new one, end the block and "
                "begin another"
            )
    return used.bases[name]


def renew_in_block(model: PreTrainedModel | PreTrainedConfig, name: str, basis: CalibratedBasis) -> None:
    """Let the blocks that are open on a model use this from now on, of which more is known; nothing without any."""
    used = _used(model)
    if used is not None:
        used.bases[name] = basis


def _used(model: PreTrainedModel | PreTrainedConfig) -> _Used | None:
    hook = vars(model).get("generate")
    return _USED.setdefault(hook, _Used()) if isinstance(hook, GenerateHook) else None
