"""`explain`: say for every operation which code runs on this machine, and why. Compiles nothing."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .._util.cores import thread_count
from ._shared.dispatch import DEVICE_TYPE, unsupported_machine
from ._shared.operation import Operation
from ._shared.switches import AHEAD, LLVM, OPENMP, PLAIN, TRITON, is_off
from ._shared.threads import no_team_reason
from .operations import OPERATIONS

REFERENCE, COMPILED, ON_GPU = "torch", "compiled loop", "Triton kernel"


@dataclass(frozen=True)
class Choice:
    """The code that runs one operation on one device.

    Attributes
    ----------
    operation, what : str
        Its folder in `grace_opt.kernels`, and what it does.
    device : str
        ``"cpu"``, ``"cuda:0"``, ...; ``"cuda"`` if the machine has none.
    code : str
        ``"torch"`` (the reference), ``"compiled loop"``, ``"Triton kernel"``, or ``""`` if nothing runs there.
    why : str
        When this code is used instead of the reference, or why not.
    """

    operation: str
    what: str
    device: str
    code: str
    why: str


@dataclass(frozen=True)
class CacheFolder:
    """Where compiled loops are kept.

    Attributes
    ----------
    path : str
        The folder that numba uses; if it keeps each loop next to its module, ``**`` stands for their folders.
    writable : bool
        If not, each process compiles what it needs.
    """

    path: str
    writable: bool


@dataclass(frozen=True)
class Explanation:
    """Which code runs on this machine.

    Attributes
    ----------
    choices : tuple of Choice
        One entry per operation and kind of device.
    threads : int
        Number of threads of the compiled loops: those of torch, or one for each core if there are fewer cores.
    decoding_threads : str
        The threads in which decoding on the CPU runs.
    cache : CacheFolder
    machine_code : str
        The kind of processor whose precompiled loops the wheel has and this machine runs, such as ``"x86-64-v4"``;
        empty if there is none, as in a checkout, and loops are compiled here.
    switched_off : tuple of str
        The switches that are off, as written in the environment.
    """

    choices: tuple[Choice, ...]
    threads: int
    decoding_threads: str
    cache: CacheFolder
    machine_code: str
    switched_off: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(choice.operation) for choice in self.choices)
        lines = [f"{c.operation:{width}}  {c.device:6}  {c.code or '-':13}  {c.why}" for c in self.choices]
        writing = "can be written to" if self.cache.writable else "cannot be written to"
        return "\n".join(
            [
                *lines,
                f"threads: {self.threads}; decoding in {self.decoding_threads}",
                f"compiled loops are kept in {self.cache.path}, which {writing}",
                f"compiled ahead of time: {self.ahead}",
                f"switched off: {', '.join(self.switched_off) or 'nothing'}",
            ]
        )

    @property
    def ahead(self) -> str:
        """Which loops need not be compiled here, in words."""
        if self.machine_code:
            return f"all loops, for {self.machine_code}"
        if f"{AHEAD}=0" in self.switched_off:
            return f"nothing: {AHEAD}=0"
        return (
            "nothing: no machine code for this processor and version of numba is installed, or it is damaged "
            "(a checkout has none)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def explain() -> Explanation:
    """Say for every operation which code runs on this machine, and why.

    Returns
    -------
    Explanation
        Prints as a table; ``to_dict()`` gives plain values.

    Notes
    -----
    Compiles nothing and waits for no device; ``grace-opt doctor`` also tries the loops and kernels.

    Examples
    --------
    >>> from grace_opt import kernels
    >>> found = kernels.explain()
    >>> next(c.code for c in found.choices if (c.operation, c.device) == ("interaction", "cpu"))
    'torch'
    >>> print(found)
    interaction  cpu     torch          there is no compiled loop
    ...
    """
    devices = [torch.device(DEVICE_TYPE, i) for i in range(torch.cuda.device_count())] if DEVICE_TYPE == "cuda" else []
    choices = [_on_cpu(operation) for operation in OPERATIONS]
    for device in devices or [torch.device(DEVICE_TYPE)]:
        choices += [_on_gpu(operation, device, bool(devices)) for operation in OPERATIONS]
    reason = no_team_reason()
    return Explanation(
        tuple(choices),
        thread_count(torch.get_num_threads()),
        "torch's own threads" if reason is None else f"threads of ours ({reason})",
        _cache_folder(),
        _machine_code(),
        tuple(f"{name}=0" for name in (TRITON, LLVM, OPENMP, PLAIN, AHEAD) if is_off(name)),
    )


def _cache_folder() -> CacheFolder:
    from ._shared.disk_cache import cache_folder  # numba takes a while

    folder = cache_folder()
    if folder is None:
        return CacheFolder(os.environ.get("NUMBA_CACHE_DIR") or "__pycache__ beside the modules", False)
    return CacheFolder(str(folder), True)


def _machine_code() -> str:
    from ._shared.ahead import file_for_this_processor, is_whole  # numba takes a while

    file = file_for_this_processor()
    return file.stem if file is not None and is_whole(file) else ""


def _on_cpu(operation: Operation) -> Choice:
    loop, about = operation.cpu, (operation.name, operation.what, "cpu")
    if loop is None:
        return Choice(*about, REFERENCE, "there is no compiled loop")
    if is_off(LLVM) and loop.without_llvm.split(",")[0] == REFERENCE:
        return Choice(*about, REFERENCE, f"{LLVM}=0{loop.without_llvm.removeprefix(REFERENCE)}")
    why = loop.when if not operation.reference or loop.when == "always" else f"{loop.when}; torch below"
    if is_off(LLVM) and loop.without_llvm:
        why += f"; {loop.without_llvm} ({LLVM}=0)"
    return Choice(*about, COMPILED, why)


def _on_gpu(operation: Operation, device: torch.device, present: bool) -> Choice:
    def chosen(code: str, why: str) -> Choice:
        return Choice(operation.name, operation.what, str(device), code, why)

    if not present:
        return chosen("", "torch sees no CUDA device")
    if not operation.gpu and not operation.reference:
        return chosen(COMPILED, "there is no kernel: the CPU does it")
    if not operation.gpu:
        return chosen(REFERENCE, "there is no kernel: torch's operations run there")
    if is_off(TRITON):
        return chosen(REFERENCE, f"{TRITON}=0")
    if (reason := unsupported_machine(device)) is not None:
        return chosen(REFERENCE, reason)
    return chosen(ON_GPU, f"{operation.gpu[0].when}; torch for the rest, and where a trial fails")
