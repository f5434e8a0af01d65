"""Decide whether a Triton kernel is used: the GPU must support it, and it must pass a trial first.

Every kernel has a torch reference, which runs everywhere else. If a kernel is expected but not used, one warning says
why. Before its first use on a device, a kernel solves a small case, and the result is compared with the reference. If
it fails or differs, the reference is used from then on: a faulty compiler, driver or GPU costs speed, but never gives
wrong numbers.

``GRACE_OPT_TRITON=0`` in the environment turns the kernels off. Code that ``torch.compile`` traces uses the references,
which ``torch.compile`` turns into kernels itself.
"""

from __future__ import annotations

import importlib.util
import threading

import torch

from ..._util.optional import pip_install
from ..._util.warning import warn
from .compiling import KERNELS
from .operation import Triton
from .switches import TRITON, is_off

#: The device type of the kernels.
DEVICE_TYPE = "cuda"
#: The lowest compute capability for which Triton compiles.
OLDEST = (8, 0)
#: Results so far: why a device can run no kernel, and how each kernel's trial went.
_machines: dict[torch.device, str | None] = {}
_verdicts: dict[tuple[str, torch.device], bool] = {}
_said: set[tuple[str, str]] = set()
_trying = threading.RLock()  # reentrant: a kernel's trial may use another kernel


def use_triton(kernel: Triton, device: torch.device, unsupported: str | None = None) -> bool:
    """Return whether this kernel is used on this device.

    Parameters
    ----------
    kernel : Triton
    device : torch.device
    unsupported : str or None
        Why it does not support the given input; None if it does.

    Notes
    -----
    Waits for the device only the first time, for the kernel's trial. While a CUDA graph is captured, no trial runs, and
    only kernels that have passed theirs are used.
    """
    if device.type != DEVICE_TYPE or torch.compiler.is_compiling() or is_off(TRITON):
        return False
    verdict = _verdicts.get((kernel.name, device))
    if unsupported is None and verdict is not None:
        return verdict
    with _trying:  # one trial per kernel, in the first thread that needs it
        if device not in _machines:
            _machines[device] = unsupported_machine(device)
        unsupported = _machines[device] or unsupported
        if unsupported is not None:
            return _refused(kernel, unsupported)
        if (kernel.name, device) not in _verdicts:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            _verdicts[kernel.name, device] = _tried(kernel, device)
        return _verdicts[kernel.name, device]


def unsupported_machine(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed: {pip_install('gpu')}"
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} has compute capability {capability[0]}.{capability[1]}, and Triton needs {OLDEST[0]}.{OLDEST[1]}"


def _tried(kernel: Triton, device: torch.device) -> bool:
    try:
        with torch.no_grad(), KERNELS.block():
            agrees = kernel.trial(device)
    except Exception as error:  # a compiler or driver may raise anything; the reference needs neither
        return _refused(kernel, f"its trial on {device} failed ({type(error).__name__}: {error})")
    return agrees or _refused(kernel, f"its trial on {device} differed from the reference; please report this")


def _refused(kernel: Triton, why: str) -> bool:
    if (kernel.name, why) not in _said:
        _said.add((kernel.name, why))
        warn(f"the Triton kernel for {kernel.name} is not used, torch runs instead: {why}")
    return False
