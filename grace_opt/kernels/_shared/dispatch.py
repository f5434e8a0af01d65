"""Whether Triton's kernels do the work: on a GPU that can run them, for what they can do, and after they proved it.

Every kernel stands beside a torch reference, which is what runs anywhere else. Where a kernel was expected and is not
used, one warning says why. The first time that a kernel is used on a device it solves a small case beside its
reference; if it fails or differs, the reference does the work from then on. So a wrong compiler, driver or GPU costs
speed, not numbers.

``GRACE_OPT_TRITON=0`` in the environment turns the kernels off. Code that ``torch.compile`` traces uses the references,
which it makes kernels of itself.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings

import torch

from .operation import Triton
from .switches import TRITON, is_off

#: The kind of device that the kernels are for.
DEVICE_TYPE = "cuda"
#: Triton compiles for GPUs from this compute capability on.
OLDEST = (8, 0)
#: What has been found out: why a device can run none, and how each kernel did on its first case.
_machines: dict[torch.device, str | None] = {}
_verdicts: dict[tuple[str, torch.device], bool] = {}
_said: set[tuple[str, str]] = set()
_trying = threading.RLock()  # a kernel's trial may use another kernel


def use_triton(kernel: Triton, device: torch.device, unsupported: str | None = None) -> bool:
    """Whether this kernel is to be used on this device.

    Parameters
    ----------
    kernel : Triton
    device : torch.device
    unsupported : str or None
        Why it cannot take what it would be given.

    Notes
    -----
    Waits for the device the first time only, for the kernel's trial; not while a CUDA graph is captured, when only
    kernels that have had their trial are used.
    """
    if device.type != DEVICE_TYPE or torch.compiler.is_compiling() or is_off(TRITON):
        return False
    verdict = _verdicts.get((kernel.name, device))
    if unsupported is None and verdict is not None:
        return verdict
    with _trying:  # one trial of each kernel, whichever thread comes first
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
    """Why no kernel of Triton can run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed: pip install "grace-opt[gpu]"'
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_capability(device)
    if found >= OLDEST:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} has compute capability {found[0]}.{found[1]}, and Triton needs {OLDEST[0]}.{OLDEST[1]}"


def _tried(kernel: Triton, device: torch.device) -> bool:
    try:
        with torch.no_grad():
            agrees = kernel.trial(device)
    except Exception as error:  # whatever a compiler or driver can raise: the reference does not need them
        return _refused(kernel, f"its trial on {device} failed ({type(error).__name__}: {error})")
    return agrees or _refused(kernel, f"in its trial on {device} it differed from the reference; please report this")


def _refused(kernel: Triton, why: str) -> bool:
    if (kernel.name, why) not in _said:
        _said.add((kernel.name, why))
        warnings.warn(f"the Triton kernel for {kernel.name} is not used, torch does its work: {why}", stacklevel=4)
    return False
