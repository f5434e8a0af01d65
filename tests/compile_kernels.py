"""Compile every Triton kernel for GPUs that are not here: ``python -m tests.compile_kernels 80 90 --all``.

Triton's interpreter runs kernels as Python does, and lets through what its compiler refuses: a variable that changes
its type in a loop, a shape that is no power of two, more shared memory than there is. The compiler and the assembler
need no GPU. Here the kernels' own host functions call them, on tensors of the CPU, with a driver that only says which
GPU to compile for; nothing is launched.

Prints one line of JSON per compiled kernel: name, registers per thread, bytes of stack per thread (what registers could
not hold) and of shared memory. With ``--all``, in over a minute per GPU, for more sizes and types.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # for doctests this file is imported, into a process with other tests
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from grace_opt.kernels.cache.coded import gpu as coded
from grace_opt.kernels.cache.coding import gpu as trellis
from grace_opt.kernels.cache.decode import gpu as decode
from grace_opt.kernels.cache.gather import gpu as gather
from grace_opt.kernels.solve.exchange import gpu as exchange
from grace_opt.kernels.solve.greedy import gpu as greedy
from grace_opt.kernels.solve.interaction import gpu as interaction
from tests.coded import Coded
from tests.packed import packed_keys, packed_values

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Absent:
    """A GPU that can be compiled for, and not used."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # kernels are remembered by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> dict[str, dict[str, Any]]:
    """From now on a launch compiles; what was compiled is found in the dictionary."""
    found: dict[str, dict[str, Any]] = {}
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        shared = kernel.metadata.shared
        found.setdefault(kernel.hash, {"kernel": self.__name__, **resources(kernel.asm["cubin"]), "shared": shared})

    JITFunction.run = run
    for host in (decode, coded):
        host.unsupported_reason = lambda *tensors: None  # of which one is that the tensors are on the CPU
    return found


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack, by the tool that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(re.search(rf"{name}:(\d+)", said).group(1)) for name in ("REG", "STACK")}


def decoding(every: bool) -> None:
    """Head widths and types of models, all kinds of masks, dense and packed keys."""
    half, bfloat16 = torch.float16, torch.bfloat16
    attend(half, 64, length=2, mask=torch.bool, softcap=30.0)
    attend(bfloat16, 128, packing=(4, "quanto", 32), values=(3, "hqq", 32))
    attend(torch.float32, 256, mask=torch.float32)
    if every:
        for d, dtype in product((64, 128, 256), decode._DTYPES):
            attend(dtype, d)
            attend(dtype, d, length=8, mask=dtype)
        for dtype, *packing in (
            (half, 4, "hqq", 32),
            (bfloat16, 8, "hqq", 128),
            (torch.float32, 3, "hqq", 64),
            (half, 2, "hqq", 7),
        ):
            attend(dtype, 128, packing=packing)
            attend(dtype, 128, packing=(*packing[:2], 32), values=(*packing[:2], 32))


def attend(dtype, d, length=1, mask=None, softcap=None, packing=None, values=None):
    heads, kept, old, tail = 2, d * 2 // 5, 7 * 256, 33

    def draw(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    keys, old_values = draw(1, heads, old, kept), draw(1, heads, 4 + old, d)
    if packing is not None:
        keys, _ = packed_keys(torch.Generator(), keys.shape, *packing, dtype=dtype)
    if values is not None:
        old_values, _ = packed_values(torch.Generator(), old_values.shape, *values, dtype=dtype)
    index = torch.arange(kept).expand(1, heads, kept).contiguous()
    shown = None if mask is None else torch.ones(1, 1, length, 4 + old + tail, dtype=mask)
    rest = draw(1, heads, 4, d), draw(1, heads, tail, d), old_values, draw(1, heads, tail, d)
    decode.decode_attention(draw(1, 4 * heads, length, d), keys, index, *rest, shown, softcap=softcap)


def in_place(every: bool) -> None:
    """Coded tokens: head widths and types of models, all kinds of masks, one new token and several."""
    half, bfloat16 = torch.float16, torch.bfloat16
    read_codes(half, 64, length=2, mask=torch.bool, softcap=30.0)
    read_codes(bfloat16, 128)
    read_codes(bfloat16, 128, added=True)
    read_codes(torch.float32, 256, mask=torch.float32)
    read_codes(bfloat16, 128, trellis=True)
    if every:
        for d, dtype in product((32, 64, 128, 256), decode._DTYPES):
            read_codes(dtype, d)
            read_codes(dtype, d, trellis=True, added=True)
            read_codes(dtype, d, length=8, mask=dtype)


def read_codes(dtype, d, length=1, mask=None, softcap=None, trellis=False, added=False):
    stored = Coded(torch.Generator(), 2, d, d, ((100, 400),), dtype, trellis=trellis)
    tails = torch.zeros(2, 1, 2, 33, d, dtype=dtype)
    shown = None if mask is None else torch.ones(1, 1, length, 33, dtype=mask)
    query = torch.zeros(1, 8, length, d, dtype=dtype)
    sequence, by_position = stored.sequence, None
    if added:
        sequence = replace(sequence, positions=torch.zeros(2, sequence.table.numbers // 2, dtype=torch.int16))
        by_position = torch.zeros(1, 2, 4 * length, 500)
    coded.coded_attention(
        query, [sequence], *tails, stored.books, 33, [0], shown, softcap=softcap, trellis=trellis, added=by_position
    )


def selecting(every: bool) -> None:
    """Interaction matrices, MIES, exchanges, gathering and codes of a trellis."""
    for d, dtype in product((64, 128, 256) if every else (128,), (torch.float32, torch.bfloat16)):
        queries, keys = (torch.zeros(1, heads, 300, d, dtype=dtype) for heads in (4, 2))
        interaction.interaction_matrix(queries[:, :, :32], keys, torch.ones(1, 300, dtype=torch.bool))
        for channel_major in (False, True):
            gather.gather_channels(keys, torch.arange(d // 2).expand(1, 2, -1), channel_major)
    trellis.searched(torch.zeros(70, 500), torch.zeros(70, 256), torch.ones(70))
    for n, dtype in product((64, 128, 256) if every else (128,), (torch.float32, torch.float64)):
        W, k, vertices = torch.zeros(2, n, n, dtype=dtype), torch.full((2,), n // 2), torch.ones(2, n, dtype=torch.bool)
        greedy.greedy_order(W, W[:, 0], k, n // 2)
        exchange.swap_refine(W, vertices, vertices, 10)


def main() -> None:
    every, found = "--all" in sys.argv, compile_only()
    for capability in (int(argument) for argument in sys.argv[1:] if argument != "--all"):
        driver.set_active(Absent(capability))
        for part in (selecting, decoding, in_place):
            part(every)
            for entry in found.values():
                print(json.dumps({"capability": capability, **entry}), flush=True)
            found.clear()


if __name__ == "__main__":
    main()
