"""`Operation`: which implementations a step has, when they run, and how to try them; ``OPERATION`` in each folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from .threads import always_compiled


def trial_of(package: str, kind: str) -> Callable[..., bool]:
    """Return the trial `kind` (``cpu`` or ``gpu``), imported only when called: it imports numba or triton."""

    def trial(*arguments: Any) -> bool:
        with always_compiled():  # small cases must not run in Python
            return bool(getattr(import_module(f"{package}.trial"), kind)(*arguments))

    return trial


@dataclass(frozen=True)
class Compiled:
    """A loop compiled by numba, for the CPU.

    Attributes
    ----------
    when : str
        The calls for which it is used.
    trial : callable
        Returns whether it agrees with the reference, or with enumeration, on a small case.
    without_llvm : str
        What runs instead with ``GRACE_OPT_LLVM=0``; empty if nothing changes.
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
        Name of the kernel, for warnings.
    when : str
        The calls for which it is used.
    trial : callable
        Returns whether it agrees with the reference on a small case on a device; called before its first use there.
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
        The name of its folder, and what it does.
    reference : bool
        Whether torch operations define it, and run if nothing else does.
    cpu : Compiled or None
    gpu : tuple of Triton
    """

    name: str
    what: str
    reference: bool = True
    cpu: Compiled | None = None
    gpu: tuple[Triton, ...] = ()
