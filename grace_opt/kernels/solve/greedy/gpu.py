r"""The greedy order on the GPU, one program per instance.

As tensor operations, greedy takes k rounds of small launches, which cost more than the arithmetic. This kernel keeps
the scores in registers and runs all steps in one launch. Use `greedy_order` for batches of attention's W on the device,
where n is the head dimension. Source: GRACE (arXiv 2604.16983), Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...._util.array_like import FLOATS
from ....errors import ProblemError
from ..._shared.gpu_checks import check_like, check_matrices


class Taken(NamedTuple):
    """The result of greedy; the shared fields are those of `grace_opt.kernels.solve.greedy.Greedy`.

    Attributes
    ----------
    order : Tensor (B, k_max), int64
        The vertices in the order in which they were taken, padded with -1 if k is smaller.
    rise : Tensor (B,), float64
        Sum of the vertices' scores when they were taken. If scores start at the diagonal, this is f.
    """

    order: Tensor
    rise: Tensor


def greedy_order(W: Tensor, scores: Tensor, k: Tensor, k_max: int) -> Taken:
    """Repeat: take the vertex with the least score, and add twice its row to the other scores.

    Parameters
    ----------
    W : Tensor (B, n, n), float16, bfloat16, float32 or float64
        Symmetric, n at most `LARGEST_ON_CHIP`, of any strides.
    scores : Tensor (B, n)
        Initial scores, infinite for vertices that must not be taken, never NaN. Sums keep their dtype, or float32 for
        half precision.
    k : Tensor (B,), int64
        Number of vertices to take, per instance, at most `k_max`.
    k_max : int
        Width of the result.

    Returns
    -------
    Taken
        Ties go to the lowest index.

    Raises
    ------
    ProblemError
        On shapes, dtypes or devices that do not fit, or n beyond `LARGEST_ON_CHIP`.

    Notes
    -----
    O(k n) per instance, one launch. Order and rise equal those of `grace_opt.kernels.solve.greedy.reference` bit for
    bit: a score grows by twice an entry of W, and doubling is exact.
    """
    size, n = check_matrices(W)
    check_like(W, scores=(scores, (size, n)), k=(k, (size,)))
    if k.dtype != torch.int64:
        raise ProblemError(f"k has dtype {k.dtype}: give int64.")
    if scores.dtype not in FLOATS:
        raise ProblemError(f"scores has dtype {scores.dtype}: give float16, bfloat16, float32 or float64.")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    order = torch.empty(size, k_max, dtype=torch.int64, device=W.device)
    rise = torch.empty(size, dtype=torch.float64, device=W.device)
    if size:
        with torch.cuda.device_of(W):
            # One warp: the minimum is then found by shuffles, without a barrier, and n is small.
            _greedy_kernel[(size,)](
                W, scores, k, order, rise, n, k_max,
                *W.stride(), *scores.stride(), k.stride(0),
                N=triton.next_power_of_2(max(n, 1)), WIDTH=triton.next_power_of_2(max(k_max, 1)),
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
    return Taken(order, rise)


@triton.jit
def _greedy_kernel(
    W, scores, count, order, rise, n, k_max,
    W_b, W_i, W_j, scores_b, scores_i, count_b,
    N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)  # offsets may pass 2**31
    k = tl.minimum(tl.load(count + b * count_b), k_max).to(tl.int32)
    vertex = tl.arange(0, N)
    inside = vertex < n
    score = tl.load(scores + b * scores_b + vertex * scores_i, mask=inside, other=float("inf"))
    row_of = W + b * W_b + vertex * W_j
    order += b * k_max
    cost = tl.full([], 0.0, tl.float64)
    for step in range(k):
        least, best = tl.min(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        row = tl.load(row_of + best.to(tl.int64) * W_i, mask=inside, other=0.0).to(score.dtype)
        tl.store(order + step, best.to(tl.int64))
        cost += least.to(tl.float64)
        score = tl.where(vertex == best, float("inf"), score + (row + row))
    tl.store(rise + b, cost)
    place = tl.arange(0, WIDTH)
    tl.store(order + place, tl.full([WIDTH], -1, tl.int64), mask=(place >= k) & (place < k_max))
