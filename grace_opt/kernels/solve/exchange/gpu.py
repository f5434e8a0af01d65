r"""Best-exchange local search on the GPU, one program per instance: one kernel holds W and makes all steps.

Use it for batches of attention's W on the device, where n is the head dimension. Source: Ghosh (1996).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import OptionError, ProblemError
from ..._shared.gpu_checks import check_like, check_matrices
from .rounding import ADDITIONS, EPS

#: Number of entries of W examined together: as many as the registers of four warps hold in float64.
ENTRIES_AT_ONCE = 2048


def swap_refine(W: Tensor, mask: Tensor, candidates: Tensor, max_steps: int) -> Tensor:
    """Exchange a chosen vertex for an unchosen candidate, always the best pair, until no exchange improves f.

    Parameters
    ----------
    W : Tensor (B, n, n), float16, bfloat16, float32 or float64
        Symmetric, n at most `LARGEST_ON_CHIP`, of any strides.
    mask : Tensor (B, n), bool
        Starting choice; not changed.
    candidates : Tensor (B, n), bool
        Vertices that may be chosen.
    max_steps : int
        Largest number of exchanges per instance.

    Returns
    -------
    Tensor (B, n), bool
        A choice of equal size per instance, never worse than `mask`.

    Raises
    ------
    ProblemError
        On shapes, dtypes or devices that do not fit, or n beyond `LARGEST_ON_CHIP`.
    OptionError
        If `max_steps` is negative.

    Notes
    -----
    O(n²) per step, one launch. Sums are computed afresh in every step and everything is in float64, as in the solver
    ``local_search``, since entries of attention's W differ by many orders of magnitude. Its choices, too: least change
    first, then the lowest index that leaves, then the lowest that enters. Where nothing is rounded, as for integer W,
    they are the same bit for bit. When an improvement is one, says `grace_opt.kernels.solve.exchange.rounding`.
    """
    size, n = check_matrices(W)
    check_like(W, mask=(mask, (size, n)), candidates=(candidates, (size, n)))
    for name, tensor in (("mask", mask), ("candidates", candidates)):
        if tensor.dtype != torch.bool:
            raise ProblemError(f"{name} has dtype {tensor.dtype}: give bool.")
    if max_steps < 0:
        raise OptionError(f"max_steps={max_steps}: give a non-negative integer.")
    result = torch.empty(size, n, dtype=torch.bool, device=W.device)
    if size and n:
        mask, candidates, N = mask.view(torch.uint8), candidates.view(torch.uint8), triton.next_power_of_2(n)
        with torch.cuda.device_of(W):
            _swap_kernel[(size,)](
                W, mask, candidates, result.view(torch.uint8), n, max_steps,
                *W.stride(), *mask.stride(), *candidates.stride(),
                N=N, T=max(min(N, ENTRIES_AT_ONCE // N), 1), ADDITIONS=ADDITIONS, EPS=EPS,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["max_steps"])
def _swap_kernel(
    W, mask, candidates, result, n, max_steps,
    W_b, W_i, W_j, mask_b, mask_i, candidates_b, candidates_i,
    N: tl.constexpr, T: tl.constexpr, ADDITIONS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    vertex = tl.arange(0, N)
    inside = vertex < n
    row_of = W + b * W_b + vertex * W_j
    diagonal = tl.load(row_of + vertex * W_i, mask=inside, other=0.0).to(tl.float64)
    chosen = tl.load(mask + b * mask_b + vertex * mask_i, mask=inside, other=0).to(tl.int32)
    free = tl.load(candidates + b * candidates_b + vertex * candidates_i, mask=inside, other=0).to(tl.int32)
    tolerance = (tl.full([], ADDITIONS, tl.float64) + n) * EPS  # n = 1 is a constant, which has no `to`
    careful = tl.full([], 0, tl.int32)
    left = tl.full([], 0, tl.int32) + max_steps
    while left > 0:
        sums, size = tl.zeros([N], tl.float64), tl.abs(diagonal)
        for start in range(0, N, T):
            i = start + tl.arange(0, T)
            w = _rows(row_of, W_i, i, inside, n)
            w = tl.where(_pick(chosen, vertex, i)[:, None] != 0, w, 0.0)
            sums += tl.sum(w, 0)
            size += 2 * tl.sum(tl.abs(w), 0)
        margin = tl.where(careful != 0, tolerance * size, 0.0)
        enter = tl.where((chosen == 0) & (free != 0), (diagonal + 2 * sums) + margin, float("inf"))
        leave = tl.where(chosen != 0, (diagonal - 2 * sums) + margin, float("inf"))
        change, out = tl.full([], float("inf"), tl.float64), tl.full([], 0, tl.int32)
        for start in range(0, N, T):
            i = start + tl.arange(0, T)
            cost = (_pick(leave, vertex, i)[:, None] + enter[None, :]) - 2 * _rows(row_of, W_i, i, inside, n)
            least, place = tl.min(tl.min(cost, 1), axis=0, return_indices=True, return_indices_tie_break_left=True)
            out = tl.where(least < change, start + place, out)
            change = tl.minimum(least, change)
        # Only the best row is looked through for the partner: an index for every entry would not fit into registers.
        row = tl.load(row_of + out.to(tl.int64) * W_i, mask=inside, other=0.0).to(tl.float64)
        into = tl.argmin((tl.sum(tl.where(vertex == out, leave, 0.0), 0) + enter) - 2 * row, 0, tie_break_left=True)
        # Rounding is added to what was found or, if that leaves a doubt, to all that is looked through once more.
        ends = tl.sum(tl.where((vertex == out) | (vertex == into), size, 0.0), 0)
        improves = tl.where(careful != 0, change, change + tolerance * ends) < 0
        careful = tl.where((change < 0) & (improves == 0) & (careful == 0), 1, 0)
        swapped = tl.where(vertex == out, 0, tl.where(vertex == into, 1, chosen))
        chosen = tl.where(improves, swapped, chosen)
        left = tl.where(improves, left - 1, tl.where(careful != 0, left, 0))
    tl.store(result + b * n + vertex, chosen.to(tl.uint8), mask=inside)


@triton.jit
def _rows(row_of, step, i, inside, n):
    """Rows `i` of W in float64; from a cache, as W fits one, and not from registers, which it does not fit."""
    there = (i < n)[:, None] & inside[None, :]
    return tl.load(row_of[None, :] + i.to(tl.int64)[:, None] * step, mask=there, other=0.0).to(tl.float64)


@triton.jit
def _pick(values, vertex, i):
    """The values of vertices `i`: all others count as zero in a sum."""
    return tl.sum(tl.where(i[:, None] == vertex[None, :], values[None, :], 0), 1)
