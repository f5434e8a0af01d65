"""Switch a model's attention implementation for a block, and restore it whatever the order in which blocks end.

When: for `attach`, `capture_attention`, and code that selects ``"grace_sdpa"`` temporarily. Blocks on one model may be
nested, may end in any order, and may belong to different threads. Each block remembers what it found on every
configuration; a block that ends before a later one passes this on to it. The last block to end therefore restores what
the first one found. The switch itself is ``set_attn_implementation`` of transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import CacheError

#: Overrides not restored yet, oldest first.
_ACTIVE: list[ImplementationOverride] = []
_LOCK = threading.RLock()


class ImplementationOverride:
    """Override a model's attention implementation: `apply` it, then `restore` the one before; may be repeated.

    Parameters
    ----------
    model : PreTrainedModel
        The model; unchanged until `apply`.
    name : str
        For instance ``"grace_sdpa"``.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model, self._name = model, name
        #: The old value in each configuration that may be written to; strong references keep the ids unique.
        self.found: dict[int, tuple[PreTrainedConfig, str | None]] = {}

    @property
    def is_open(self) -> bool:
        """Whether it is applied and not restored yet."""
        return self in _ACTIVE

    def apply(self) -> None:
        """Select the implementation; raises `CacheError` if the model does not let its attention be chosen."""
        with _LOCK:
            self.found = {id(each): (each, each._attn_implementation) for each in _configurations(self._model)}
            _ACTIVE.append(self)
            self._model.set_attn_implementation(self._name)
            if self._model.config._attn_implementation != self._name:
                raise CacheError(
                    f"{type(self._model).__name__} does not let its attention be chosen, so grace_opt cannot "
                    f"replace it; use a model that computes attention through transformers' attention interface"
                )

    def restore(self) -> None:
        """Restore the old values, or leave that to the next override if that one is still open."""
        with _LOCK:
            if self not in _ACTIVE:
                return
            later = _ACTIVE[_ACTIVE.index(self) + 1 :]
            for key, (config, implementation) in self.found.items():
                heir = next((each for each in later if key in each.found), None)
                if heir is not None:
                    heir.found[key] = config, implementation
                else:
                    # The field that set_attn_implementation writes; the property would overwrite sub-configurations
                    # too.
                    config._attn_implementation_internal = implementation
            _ACTIVE.remove(self)


def restore_in_copy(copies: Mapping[int, Any]) -> None:
    """Restore in copied configurations what the originals had before any open override.

    Parameters
    ----------
    copies : mapping
        Maps the id of an original to its copy, as in ``copy.deepcopy``.
    """
    with _LOCK:
        for override in reversed(_ACTIVE):  # the oldest override wins
            for key, (_, implementation) in override.found.items():
                if key in copies:
                    copies[key]._attn_implementation_internal = implementation


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use another attention implementation inside a ``with`` block, and restore the old one afterwards.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    name : str
        For instance ``"grace_sdpa"``.

    Examples
    --------
    >>> from grace_opt.hf.models import load_pocket
    >>> model, _ = load_pocket()
    >>> with attention_implementation(model, "grace_sdpa"):
    ...     model.config._attn_implementation
    'grace_sdpa'
    >>> model.config._attn_implementation
    'sdpa'
    """
    override = ImplementationOverride(model, name)
    try:
        override.apply()
        yield
    finally:
        override.restore()


def base_for(model: PreTrainedModel) -> str:
    """Return ``"eager"`` if the model uses or needs it; else ``"sdpa"``.

    Sdpa cannot cap attention logits or add to them, and returns no attention weights.
    """
    config = model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    chosen = str(config._attn_implementation) in ("eager", "grace_eager", "grace_capture_eager")
    return "eager" if capped or chosen or not model._supports_sdpa else "sdpa"


def _configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return every configuration that switching the attention implementation may write to, each once."""
    pending: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    found: dict[int, PreTrainedConfig] = {}
    while pending:
        config = pending.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
