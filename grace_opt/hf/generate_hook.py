"""`GenerateHook`: replaces ``model.generate`` while blocks of `attach` are open on a model.

One hook per model holds all of its open blocks, so they may end in any order and belong to different threads. A call
belongs to the innermost block that its own thread entered; in a thread that entered none (a streamer's, a server
worker's), to the block opened last. What `Attached.start` opens belongs to no thread. When no block is open, the hook
is removed; code that still holds a reference to it then calls the plain ``generate``.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

from transformers import PreTrainedModel

from ..errors import CacheError
from .implementation import restore_in_copy

_LOCK = threading.RLock()


class OpenBlock(Protocol):
    """An open block."""

    #: The hook on which it is open; set by `open_block`.
    hook: GenerateHook | None

    def generate(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of ``generate`` inside the block."""
        ...


class GenerateHook:
    """Replaces ``model.generate``; `open_block` installs it and `close_block` removes it.

    Parameters
    ----------
    model : PreTrainedModel
        The model to hook.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._found = model, vars(model).get("generate")
        self._plain: Callable[..., Any] = model.generate
        self.blocks: list[tuple[threading.Thread | None, OpenBlock]] = []
        functools.update_wrapper(self, self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        blocks, here = tuple(self.blocks), threading.current_thread()
        own = [block for thread, block in blocks if thread is here]
        every = own or [block for _, block in blocks]
        return every[-1].generate(self._plain, args, kwargs) if every else self._plain(*args, **kwargs)

    def remove(self) -> None:
        """Restore the original, unless other code has wrapped the hook meanwhile."""
        if vars(self._model).get("generate") is self:
            if self._found is None:
                del self._model.generate
            else:
                self._model.generate = self._found

    def __deepcopy__(self, copies: dict[int, Any]) -> Any:
        """Copy the model without the hook: its own ``generate``, and its attention from before the blocks."""
        restore_in_copy(copies)
        if self._found is not None:
            return copy.deepcopy(self._found, copies)
        model = copies.get(id(self._model))
        return self._plain if model is None else MethodType(type(model).generate, model)

    def __reduce__(self) -> Any:
        raise CacheError("the model is inside a block of attach(); leave the block before you pickle the model")


def open_block(model: PreTrainedModel, block: OpenBlock, thread: threading.Thread | None) -> None:
    """Make calls of ``model.generate`` belong to this block: first those of its thread, or None for no thread's own."""
    with _LOCK:
        found = vars(model).get("generate")
        block.hook = hook = found if isinstance(found, GenerateHook) else GenerateHook(model)
        hook.blocks.append((thread, block))
        if hook is not found:
            model.generate = hook


def close_block(block: OpenBlock) -> None:
    """End the block. Safe to call several times, and after an interrupted `open_block`."""
    with _LOCK:
        hook = block.hook
        if hook is None:
            return
        hook.blocks[:] = [entry for entry in hook.blocks if entry[1] is not block]
        if not hook.blocks:
            hook.remove()
        block.hook = None
