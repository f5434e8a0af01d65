"""Triton's interpreter without work that it repeats: import this before running kernels on the CPU.

Triton turns its language into numpy's at every launch, and again at every call of a function inside a kernel, which
changes nothing and costs a third of the time. Here each of its modules is turned once for as long as it stays so.

When: tests whose kernels run without a GPU. Source: ``triton/runtime/interpreter.py`` of Triton 3.7; where that has
other names, nothing is changed.
"""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_turned: set[int] = set()


class _Kept:
    """The scope of a call inside a kernel: the launch puts the language back."""

    def restore(self) -> None:
        """Leave it."""


class _Launch:
    """The scope of whoever turned the language first."""

    def __init__(self, scope: Any, modules: set[int]) -> None:
        self.scope, self.modules = scope, modules

    def restore(self) -> None:
        """Put the language back, and remember that."""
        self.scope.restore()
        _turned.difference_update(self.modules)


def _once(turn: Any) -> Any:
    @functools.wraps(turn)
    def patch_lang(fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules <= _turned:
            return _Kept()
        scope = _Launch(turn(fn), modules)
        _turned.update(modules)
        return scope

    return patch_lang


if hasattr(interpreter, "_patch_lang") and not hasattr(interpreter._patch_lang, "__wrapped__"):
    interpreter._patch_lang = _once(interpreter._patch_lang)
