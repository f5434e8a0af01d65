"""Which attention implementation a model uses: chosen for the length of a block, and put back in whatever order blocks
end.

When: for `attach`, `capture`, and whoever selects ``"grace_sdpa"`` for a while. Blocks on one model may be nested, may
end in another order than last in, first out, and may belong to different threads: each remembers what it found on every
configuration, and one that ends before a later one hands that down to it. So the last one that ends puts back what the
first one found.

``set_attn_implementation`` of transformers does the choosing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import CacheError

#: Overrides that have not been restored, the oldest first.
_ACTIVE: list[ImplementationOverride] = []
_LOCK = threading.RLock()


class ImplementationOverride:
    """Another attention implementation for a model: `apply` it, `restore` what was there, once or several times.

    Parameters
    ----------
    model : PreTrainedModel
        The model, which is not changed yet.
    name : str
        For instance ``"grace_sdpa"``.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model, self._name = model, name
        #: What stood in every configuration that choosing may write to; strong references keep the ids unique.
        self.found: dict[int, tuple[PreTrainedConfig, str | None]] = {}

    @property
    def is_open(self) -> bool:
        """Whether it was applied, and not restored since."""
        return self in _ACTIVE

    def apply(self) -> None:
        """Select the implementation; raises `CacheError` if the model does not let its attention be chosen."""
        with _LOCK:
            self.found = {id(each): (each, each._attn_implementation) for each in _configurations(self._model)}
            _ACTIVE.append(self)
            self._model.set_attn_implementation(self._name)
            if self._model.config._attn_implementation != self._name:
                raise CacheError(
                    f"{type(self._model).__name__} does not let its attention be chosen, so grace_opt cannot reach "
                    "it; use a model whose attention goes through transformers' attention interface"
                )

    def restore(self) -> None:
        """Put back what was found, or leave that to the override that was applied next and is open still."""
        with _LOCK:
            if self not in _ACTIVE:
                return
            later = _ACTIVE[_ACTIVE.index(self) + 1 :]
            for key, (config, implementation) in self.found.items():
                heir = next((each for each in later if key in each.found), None)
                if heir is not None:
                    heir.found[key] = config, implementation
                else:
                    # What set_attn_implementation itself writes; the property would overwrite sub-configurations too.
                    config._attn_implementation_internal = implementation
            _ACTIVE.remove(self)


def restore_in_copy(copies: Mapping[int, Any]) -> None:
    """Put back, in copied configurations, what stood in the originals before any override that is open.

    Parameters
    ----------
    copies : mapping
        From the id of an original to its copy, as ``copy.deepcopy`` keeps them.
    """
    with _LOCK:
        for override in reversed(_ACTIVE):  # the oldest has the last word
            for key, (_, implementation) in override.found.items():
                if key in copies:
                    copies[key]._attn_implementation_internal = implementation


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use another attention implementation inside a ``with`` block and put back the one found, whatever happens.

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
    """``"eager"`` if that is what the model uses now, or what it needs; else ``"sdpa"``.

    Sdpa can neither cap attention logits nor add to them, and returns no attention weights.
    """
    config = model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    chosen = str(config._attn_implementation) in ("eager", "grace_eager", "grace_capture_eager")
    return "eager" if capped or chosen or not model._supports_sdpa else "sdpa"


def _configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration that choosing an attention implementation may write to, each once."""
    pending: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    found: dict[int, PreTrainedConfig] = {}
    while pending:
        config = pending.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
