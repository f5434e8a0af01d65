"""`Operation`: what code there is for a step, when it runs, and how to try it; each door has one, as ``OPERATION``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch


def trial_of(package: str, kind: str) -> Callable[..., bool]:
    """`kind` (``cpu`` or ``gpu``) of a door's ``trial``, imported when it is called: it imports numba, or triton."""

    def trial(*arguments: Any) -> bool:
        return bool(getattr(import_module(f"{package}.trial"), kind)(*arguments))

    return trial


@dataclass(frozen=True)
class Compiled:
    """A loop compiled by numba, for the CPU.

    Attributes
    ----------
    when : str
        For which calls it does the work.
    trial : callable
        Whether it agrees with the reference, or with enumeration, on a small case.
    without_llvm : str
        What does the work with ``GRACE_OPT_LLVM=0``; empty if nothing changes.
    """

    when: str
    trial: Callable[[], bool]
    without_llvm: str = ""


@dataclass(frozen=True)
class Triton:
    """A kernel for the GPU.

    Attributes
    ----------
    name : str
        Of the kernel, in warnings.
    when : str
        For which calls it does the work.
    trial : callable
        Whether it agrees with the reference on a small case on this device: asked before it is used there.
    """

    name: str
    when: str
    trial: Callable[[torch.device], bool]


@dataclass(frozen=True)
class Operation:
    """A step and its implementations.

    Attributes
    ----------
    name, what : str
        Its folder, and what it does.
    reference : bool
        Whether torch operations define it, and do the work where nothing else does.
    cpu : Compiled or None
    gpu : tuple of Triton
    """

    name: str
    what: str
    reference: bool = True
    cpu: Compiled | None = None
    gpu: tuple[Triton, ...] = ()
