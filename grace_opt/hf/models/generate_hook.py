"""`GenerateHook`: replaces ``model.generate`` while blocks of `attach` are open on a model.

One hook per model holds all of its open blocks, so they may end in any order and belong to different threads. A call
belongs to the innermost block that its own thread entered; in a thread that entered none (a streamer's, a server
worker's), to the block opened last. What `Attached.start` opens belongs to no thread. When no block is open, the hook
is removed; code that still holds a reference to it then calls the plain ``generate``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from transformers import PreTrainedModel

from .method_hook import LOCK, MethodHook


class OpenBlock(Protocol):
    """An open block."""

    #: The hook on which it is open; set by `open_block`.
    hook: GenerateHook | None

    def generate(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of ``generate`` inside the block."""
        ...


class GenerateHook(MethodHook):
    """Replaces ``model.generate``; `open_block` installs it and `close_block` removes it."""

    name = "generate"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.blocks: list[tuple[threading.Thread | None, OpenBlock]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        blocks, here = tuple(self.blocks), threading.current_thread()
        own = [block for thread, block in blocks if thread is here]
        every = own or [block for _, block in blocks]
        return every[-1].generate(self._plain, args, kwargs) if every else self._plain(*args, **kwargs)


def open_block(model: PreTrainedModel, block: OpenBlock, thread: threading.Thread | None) -> None:
    """Make calls of ``model.generate`` belong to this block: first those of its thread, or None for no thread's own."""
    with LOCK:
        block.hook = hook = GenerateHook.of(model)
        hook.blocks.append((thread, block))
        hook.install()


def close_block(block: OpenBlock) -> None:
    """End the block. Safe to call several times, and after an interrupted `open_block`."""
    with LOCK:
        hook = block.hook
        if hook is None:
            return
        hook.blocks[:] = [entry for entry in hook.blocks if entry[1] is not block]
        if not hook.blocks:
            hook.remove()
        block.hook = None
