"""Triton's interpreter without work that it repeats: import this before running kernels on the CPU.

Triton turns its language into numpy's at every launch, and again at every call of a function inside a kernel, which
changes nothing and costs a third of the time. Here each of its modules is turned once for as long as it stays so.

Of what is left, nearly half is types: each sum makes some, checks the same shapes again, and looks up numpy's name for
the same numbers. Here what was found for a shape, or for a type of numbers, is kept, and two operands of one type and
one shape are not asked which they have in common.

A third of that was spent on whether sums of integers overflow: outside Triton's debug mode, nobody reads the answer.

When: tests whose kernels run without a GPU. Source: ``triton/runtime/interpreter.py`` of Triton 3.7; where that has
other names, nothing is changed.
"""

from __future__ import annotations

import functools
import os
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


class _Shape(tl.tuple):
    """A shape that has been checked: how many numbers, its tensors' shape and number, names of its types."""

    def __init__(self, shape: Any, numel: int) -> None:
        super().__init__(shape.values, shape.type)
        self.numel = numel
        self.of_tensors = tl.constexpr(numel), tl.tuple([tl.constexpr(size) for size in shape.values])
        self.names: dict[str, str] = {}


_shapes: dict[tuple[int, ...], _Shape] = {}
_ALONE = _Shape(tl.tuple([]), 1)


def _block_type(check: Any) -> Any:
    @functools.wraps(check)
    def init(self: Any, element_ty: Any, shape: Any) -> None:
        known = shape if type(shape) is _Shape else None
        if known is None:
            check(self, element_ty, shape)  # anything but whole numbers, powers of two, is refused
            sizes = tuple(self.shape.values)
            known = _shapes.get(sizes) or _shapes.setdefault(sizes, _Shape(self.shape, self.numel))
        self.element_ty, self.shape, self.numel = element_ty, known, known.numel
        name = known.names.get(element_ty.name)
        if name is None:
            name = known.names[element_ty.name] = f"<{known}, {element_ty}>"
        self.name = name

    return init


def _tensor(usual: Any) -> Any:
    @functools.wraps(usual)
    def init(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else _ALONE
        if shape.__class__ is not _Shape:
            usual(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape.of_tensors

    return init


def _numpy_type(find: Any) -> Any:
    found: dict[str, Any] = {}

    @functools.wraps(find)
    def get(given: Any) -> Any:
        inner = given.element_ty if isinstance(given, tl.block_type) else given
        if inner.name not in found:
            found[inner.name] = find(inner)
        return found[inner.name]

    return get


def _overflow(check: Any) -> Any:
    @functools.wraps(check)
    def sanitize(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, operation)

    return sanitize


def _operands(usual: Any) -> Any:
    @functools.wraps(usual)
    def alike(self: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> Any:
        divides = len(given) > 3 or "div_or_mod" in named  # quotients of halves are wider
        if lhs.__class__ is tl.tensor and rhs.__class__ is tl.tensor and lhs.dtype is rhs.dtype and not divides:
            first, second = (each.type.shape if each.type.is_block() else _ALONE for each in (lhs, rhs))
            if first is second and first.__class__ is _Shape and not lhs.dtype.is_ptr():
                return lhs, rhs
        return usual(self, lhs, rhs, *given, **named)

    return alike


def _cast(usual: Any) -> Any:
    @functools.wraps(usual)
    def cast(self: Any, given: Any, wanted: Any, *rounding: Any, **named: Any) -> Any:
        return given if given.type.scalar is wanted.scalar else usual(self, given, wanted, *rounding, **named)

    return cast


if hasattr(interpreter, "_patch_lang") and not hasattr(interpreter._patch_lang, "__wrapped__"):
    interpreter._patch_lang = _once(interpreter._patch_lang)


def _as_expected() -> bool:
    """Whether types and tensors of this Triton have what is set here, and nothing else."""
    if not (
        os.environ.get("TRITON_INTERPRET") == "1" and hasattr(interpreter, "_get_np_dtype") and hasattr(tl, "tuple")
    ):
        return False
    block = tl.block_type(tl.int32, [2])
    of_block, of_tensor = {"element_ty", "shape", "numel", "name"}, {"handle", "shape", "numel", "type", "dtype"}
    names = set(vars(block)), set(vars(tl.tensor(None, block)))
    return isinstance(block.shape, tl.tuple) and names == (of_block, of_tensor)


if not hasattr(tl.tensor.__init__, "__wrapped__") and _as_expected():
    interpreter._get_np_dtype = _numpy_type(interpreter._get_np_dtype)
    tl.block_type.__init__ = _block_type(tl.block_type.__init__)
    tl.tensor.__init__ = _tensor(tl.tensor.__init__)
    of = tl.semantic.TritonSemantic
    of.binary_op_sanitize_overflow_impl = _overflow(of.binary_op_sanitize_overflow_impl)
    of.binary_op_type_checking_impl = _operands(of.binary_op_type_checking_impl)
    of.cast = _cast(of.cast)
