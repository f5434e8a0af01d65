r"""MIES and best-exchange local search on the GPU, one program per instance.

Launched step by step, greedy is k rounds of small tensor operations, and the launches cost more than the arithmetic.
Here the scores stay in registers and all steps run inside one kernel; so does the search for exchanges, and W with it.
Use `greedy_order` for batches of attention's W on the device, where n is the head dimension.
Sources: GRACE (arXiv 2604.16983), Algorithm 1; Ghosh (1996) for the exchanges.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import OptionError, ProblemError
from ..exchange.rounding import ADDITIONS, EPS

#: Largest n: scores (n) and the matrix of exchanges (n, n) have to fit into one program's registers.
LARGEST_GREEDY, LARGEST_SWAP = 256, 256
#: Entries of W that an exchange looks at together: what the registers of four warps hold in float64.
ENTRIES_AT_ONCE = 2048
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Taken(NamedTuple):
    """What greedy took; the first two fields are those of `grace_opt.kernels.greedy.Greedy`.

    Attributes
    ----------
    order : Tensor (B, k_max), int64
        The vertices in the order in which they were taken, padded with -1 where k is smaller.
    rise : Tensor (B,), float64
        Sum of the scores that they were taken at. If the scores start at the diagonal this is f.
    path : Tensor (B, k_max + 1), float32, or None
        Entry j: the sum after the first j vertices; infinite beyond k.
    """

    order: Tensor
    rise: Tensor
    path: Tensor | None


def greedy_order(W: Tensor, scores: Tensor, k: Tensor, k_max: int, path: bool = False) -> Taken:
    """Take the vertex with the least score, add twice its row to the others' scores, and again.

    Parameters
    ----------
    W : Tensor (B, n, n), float16, bfloat16, float32 or float64
        Symmetric, n at most `LARGEST_GREEDY`, of any strides.
    scores : Tensor (B, n)
        Scores at the start; infinite for vertices that must not be taken. The sums keep its dtype, or float32 if that
        is half precision. No NaN.
    k : Tensor (B,), int64
        How many to take, per instance, at most `k_max`.
    k_max : int
        Width of the result.
    path : bool
        Also return what every prefix of the order costs.

    Returns
    -------
    Taken
        Ties go to the lowest index.

    Raises
    ------
    ProblemError
        On shapes, dtypes or devices that do not fit, or n beyond `LARGEST_GREEDY`.

    Notes
    -----
    O(k n) per instance, one launch. Order and rise equal those of `grace_opt.kernels.greedy.torch_order` bit for bit: a
    score grows by twice an entry of W, and doubling is exact.
    """
    size, n = _check_matrices(W, LARGEST_GREEDY)
    _check_like(W, scores=(scores, (size, n)), k=(k, (size,)))
    if k.dtype != torch.int64:
        raise ProblemError(f"k has dtype {k.dtype}: give int64.")
    if scores.dtype not in _FLOATS:
        raise ProblemError(f"scores has dtype {scores.dtype}: give float32 or float64.")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    order = torch.empty(size, k_max, dtype=torch.int64, device=W.device)
    rise = torch.empty(size, dtype=torch.float64, device=W.device)
    costs = torch.empty(size, k_max + 1, dtype=torch.float32, device=W.device) if path else None
    if size:
        with torch.cuda.device_of(W):
            # One warp: the minimum is then found by shuffles, without a barrier, and n is small.
            _greedy_kernel[(size,)](
                W, scores, k, order, rise, rise if costs is None else costs, n, k_max,
                *W.stride(), *scores.stride(), k.stride(0),
                N=triton.next_power_of_2(max(n, 1)), WIDTH=triton.next_power_of_2(k_max + 1), PATH=path,
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
    return Taken(order, rise, costs)


def swap_refine(W: Tensor, mask: Tensor, candidates: Tensor, max_steps: int) -> Tensor:
    """Exchange one chosen for one unchosen candidate, always the best pair, until no exchange improves f.

    Parameters
    ----------
    W : Tensor (B, n, n), float16, bfloat16, float32 or float64
        Symmetric, n at most `LARGEST_SWAP`, of any strides.
    mask : Tensor (B, n), bool
        Where to start; left as it is.
    candidates : Tensor (B, n), bool
        What may be chosen.
    max_steps : int
        Largest number of exchanges per instance.

    Returns
    -------
    Tensor (B, n), bool
        As many vertices as `mask` has, per instance, and never worse.

    Raises
    ------
    ProblemError
        On shapes, dtypes or devices that do not fit, or n beyond `LARGEST_SWAP`.
    OptionError
        If `max_steps` is negative.

    Notes
    -----
    O(n²) per step, one launch. Sums are computed afresh in every step and everything is in float64, as in the solver
    ``local_search``, since entries of attention's W differ by many orders of magnitude. Its choices, too: least change
    first, then the lowest index that leaves, then the lowest that enters. Where nothing is rounded, as for integer W,
    they are the same bit for bit. When an improvement is one, says `grace_opt.kernels.exchange.rounding`.
    """
    size, n = _check_matrices(W, LARGEST_SWAP)
    _check_like(W, mask=(mask, (size, n)), candidates=(candidates, (size, n)))
    for name, given in (("mask", mask), ("candidates", candidates)):
        if given.dtype != torch.bool:
            raise ProblemError(f"{name} has dtype {given.dtype}: give bool.")
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


@triton.jit
def _greedy_kernel(
    W, scores, count, order, rise, path, n, k_max,
    W_b, W_i, W_j, scores_b, scores_i, count_b,
    N: tl.constexpr, WIDTH: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)  # offsets may pass 2**31
    k = tl.minimum(tl.load(count + b * count_b), k_max).to(tl.int32)
    vertex = tl.arange(0, N)
    inside = vertex < n
    score = tl.load(scores + b * scores_b + vertex * scores_i, mask=inside, other=float("inf"))
    row_of = W + b * W_b + vertex * W_j
    order += b * k_max
    path += b * (k_max + 1)
    cost = tl.full([], 0.0, tl.float64)
    for step in range(k):
        least, best = tl.min(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        row = tl.load(row_of + best.to(tl.int64) * W_i, mask=inside, other=0.0).to(score.dtype)
        tl.store(order + step, best.to(tl.int64))
        cost += least.to(tl.float64)
        if PATH:
            tl.store(path + step + 1, cost.to(tl.float32))
        score = tl.where(vertex == best, float("inf"), score + (row + row))
    tl.store(rise + b, cost)
    at = tl.arange(0, WIDTH)
    tl.store(order + at, tl.full([WIDTH], -1, tl.int64), mask=(at >= k) & (at < k_max))
    if PATH:
        rest = tl.where(at == 0, 0.0, float("inf"))
        tl.store(path + at, rest, mask=(at == 0) | ((at > k) & (at <= k_max)))


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
            least, at = tl.min(tl.min(cost, 1), axis=0, return_indices=True, return_indices_tie_break_left=True)
            out = tl.where(least < change, start + at, out)
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


def _check_matrices(W: Tensor, largest: int) -> tuple[int, int]:
    if W.ndim != 3 or W.shape[-1] != W.shape[-2]:
        raise ProblemError(f"W has shape {tuple(W.shape)}: expected (B, n, n).")
    if W.dtype not in _FLOATS:
        raise ProblemError(f"W has dtype {W.dtype}: give float16, bfloat16, float32 or float64.")
    if W.shape[-1] > largest:
        raise ProblemError(f"n = {W.shape[-1]}: this kernel takes n <= {largest}; use the torch reference.")
    return W.shape[0], W.shape[-1]


def _check_like(W: Tensor, **given: tuple[Tensor, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in given.items():
        if tuple(tensor.shape) != shape:
            raise ProblemError(f"{name} has shape {tuple(tensor.shape)}: expected {shape}, to fit W {tuple(W.shape)}.")
        if tensor.device != W.device:
            raise ProblemError(f"{name} is on {tensor.device} and W on {W.device}: move them to one device.")
