"""A device that is not there: tensors of the CPU that say they are elsewhere, to see what a GPU would be asked for.

A tensor made by `elsewhere` says that its device is "meta", so the library takes the way that it takes on a GPU. Inside
`watched()`, every operation on such tensors runs on the CPU and is counted; those that a GPU's host has to wait for are
counted once more, as are copies to the device. An operation on tensors here and elsewhere raises, as it would on a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import grace_opt

LIBRARY = str(Path(grace_opt.__file__).parent)
THERE = torch.device("meta")
#: Operations that give numbers or sizes that depend on numbers, or look whether they have succeeded.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::_linalg_eigh",
    "aten::equal",
    "aten::linalg_inv_ex",
    "aten::masked_select",
    "aten::nonzero",
}


class Elsewhere(torch.Tensor):
    """Says that it is elsewhere; its numbers are here."""

    @staticmethod
    def __new__(cls, here):
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=THERE,
        )
        found.here = here
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of watched()")


def elsewhere(tensor):
    """The same numbers, elsewhere."""
    return None if tensor is None else Elsewhere(tensor)


def here(tensor):
    """The same numbers, here."""
    return tensor.here if isinstance(tensor, Elsewhere) else tensor


class _Functions(TorchFunctionMode):
    """Functions that do not ask for dispatch: numbers to a tensor elsewhere, and back."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.tensor and str(kwargs.get("device")) == THERE.type:
            kwargs.pop("device")
            return func(*args, **kwargs).to(THERE)
        if func is torch.Tensor.tolist and isinstance(args[0], Elsewhere):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


class Watch(TorchDispatchMode):
    """Runs operations on the CPU, and counts them by name: all, waits, and copies to the device by the caller."""

    def __init__(self):
        super().__init__()
        self.operations, self.waits, self.copies = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, given = dict(kwargs or {}), []
        tree_map(lambda each: given.append(each) if isinstance(each, torch.Tensor) else None, (args, kwargs))
        there = [each for each in given if isinstance(each, Elsewhere)]
        goes = kwargs.get("device")
        if not there and goes != THERE:
            return func(*args, **kwargs)
        name = func._schema.name
        mixed = len(there) < len(given) and any(each.dim() for each in given if not isinstance(each, Elsewhere))
        assert not there or not mixed, f"{name} of tensors on two devices"
        self._count(func, name, args, there, goes)
        kwargs |= {"device": torch.device("cpu")} if goes == THERE else {}
        found = func(*tree_map(here, args), **tree_map(here, kwargs))
        if goes is not None and goes != THERE:
            return found
        same = {id(each.here): each for each in there}  # what an operation in place returns

        def moved(each):
            return same[id(each)] if id(each) in same else Elsewhere(each) if type(each) is torch.Tensor else each

        return tree_map(moved, found)

    def _count(self, func, name, args, there, goes):
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if views or name in ("aten::_unsafe_view", "aten::empty"):
            return
        self.operations[name] += 1
        by_mask = name in ("aten::index", "aten::index_put_") and any(
            each.dtype == torch.bool for each in args[1] if each is not None
        )
        back = name == "aten::_to_copy" and goes is not None and goes != THERE
        if name in WAITING or by_mask or back:
            self.waits[name] += 1
        if name == "aten::_to_copy" and not there:
            self.copies[_caller()] += 1


def _caller():
    """The function of the library that asked."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(LIBRARY):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_name


@contextmanager
def watched():
    """Inside, operations on tensors that are elsewhere run, and are counted."""
    with _Functions(), Watch() as watch:
        yield watch
