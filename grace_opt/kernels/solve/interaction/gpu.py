r"""The interaction matrix :math:`W = (Q^\top Q) \circ (K^\top K)` on the GPU, with one read of the keys.

Tokens are split among programs, each of which accumulates a partial Gram matrix in float32; a second kernel adds the
parts in a fixed order, without atomics, and multiplies. Half-precision keys go to the tensor cores unconverted, and
padding is masked on the way, so nothing of the cache's size is ever copied. Use it if the keys are on the device.
Source: GRACE (arXiv 2604.16983), equations 5 to 7.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import ProblemError
from ..._shared.limits import LARGEST_ON_CHIP

#: Fewest rows per program, and most parts of one Gram matrix. Neither depends on the batch, so nor do the results.
CHUNK, PARTS = 512, 32
#: Sides of the squares of a Gram matrix that one program accumulates, and that one program multiplies.
TILE, PRODUCT_TILE = 128, 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def interaction_matrix(queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    r"""Interaction matrix of every KV head, as `grace_opt.attention.interaction_matrix` defines it.

    Parameters
    ----------
    queries : Tensor (B, H_q, L_obs, d), float16, bfloat16 or float32
        Observed queries after RoPE, at the last L_obs positions; any strides.
    keys : Tensor (B, H_kv, L, d), float16, bfloat16 or float32
        Cached keys after RoPE; H_q is a multiple of H_kv and d at most `LARGEST_ON_CHIP`; of any strides.
    attention_mask : Tensor (B, L), optional
        True (or not 0) for real tokens. Padded keys, and padded queries at the last L_obs positions, are never read.

    Returns
    -------
    Tensor (B, H_kv, d, d), float32
        Symmetric bit for bit.

    Raises
    ------
    ProblemError
        On shapes, dtypes or devices that do not fit, and on empty tensors.

    Notes
    -----
    O(H_q L_obs d² + H_kv L d²), three launches; float32 products are exact to rounding (no TF32). Needs d² float32 per
    `CHUNK` tokens and head, in `PARTS` parts at most, besides the result.

    References
    ----------
    GRACE, arXiv 2604.16983, equations 5 to 7.
    """
    group = _check(queries, keys, attention_mask)
    (size, heads, _, d), device = keys.shape, keys.device
    valid = None if attention_mask is None else (attention_mask != 0).view(torch.uint8)
    W = torch.empty(size, heads, d, d, dtype=torch.float32, device=device)
    with torch.cuda.device_of(keys):
        of_queries = _partial_grams(queries, heads, group, valid)
        of_keys = _partial_grams(keys, heads, 1, valid)
        D = of_keys.shape[-1]
        tile = min(D, PRODUCT_TILE)
        _product_kernel[(size * heads, D // tile, D // tile)](
            of_queries, of_keys, W, of_queries.shape[1], of_keys.shape[1], d, D=D, T=tile,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return W


def _partial_grams(x: Tensor, heads: int, group: int, valid: Tensor | None) -> Tensor:
    """Return Gram matrices of the stacked rows of every group of heads, in parts: (B * heads, parts, D, D), float32."""
    size, _, length, d = x.shape
    rows = group * length
    half = x.dtype != torch.float32
    block = 64 if half else 16
    chunk = triton.cdiv(max(CHUNK, triton.cdiv(rows, PARTS)), block) * block
    parts = triton.cdiv(rows, chunk)
    D = max(16, triton.next_power_of_2(d))  # tensor cores need at least 16
    tile = min(D, TILE)
    grams = torch.empty(size * heads, parts, D, D, dtype=torch.float32, device=x.device)
    first = 0 if valid is None else valid.shape[-1] - length  # queries are the last positions
    _gram_kernel[(size * heads, parts, (D // tile) ** 2)](
        x, grams if valid is None else valid, grams, heads, length, rows, chunk, first, d,
        *x.stride(), *((0, 0) if valid is None else valid.stride()),
        GROUP=group, MASKED=valid is not None, D=D, T=tile, BLOCK=block,
        WIDEN=half and _interpreted(), num_warps=8 if tile >= 64 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return grams


@triton.jit
def _gram_kernel(
    x, valid, grams, heads, length, rows, chunk, first, d,
    x_b, x_h, x_l, x_d, valid_b, valid_l,
    GROUP: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    program, part, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    b, h = program // heads, program % heads
    i = (tile // (D // T)) * T + tl.arange(0, T)
    j = (tile % (D // T)) * T + tl.arange(0, T)
    x += b * x_b + h * GROUP * x_h
    gram = tl.zeros([T, T], dtype=tl.float32)
    start = part * chunk
    end = tl.minimum(start + chunk, rows)
    for place in range(start, end, BLOCK):
        row = place + tl.arange(0, BLOCK)
        here = row < end
        if GROUP == 1:
            head, token = tl.zeros_like(row).to(tl.int64), row.to(tl.int64)
        else:  # the queries of a group, head after head
            head, token = (row // length).to(tl.int64), (row % length).to(tl.int64)
        if MASKED:
            here = here & (tl.load(valid + b * valid_b + (first + token) * valid_l, mask=here, other=0) != 0)
        source = x + (head * x_h + token * x_l)[:, None]
        left = tl.load(source + i[None, :] * x_d, mask=here[:, None] & (i < d)[None, :], other=0.0)
        if D == T:  # noqa: SIM108 (decided when compiled: the keys are read once)
            right = left
        else:
            right = tl.load(source + j[None, :] * x_d, mask=here[:, None] & (j < d)[None, :], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        gram = tl.dot(tl.trans(left), right, gram, input_precision="ieee")
    out = grams + (program * tl.num_programs(1) + part) * D * D
    tl.store(out + i[:, None] * D + j[None, :], gram)


@triton.jit
def _product_kernel(of_queries, of_keys, W, query_parts, key_parts, d, D: tl.constexpr, T: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = (tl.program_id(1) * T + tl.arange(0, T))[:, None]
    j = (tl.program_id(2) * T + tl.arange(0, T))[None, :]
    # Made symmetric before they are multiplied, so that a fused multiply-add cannot undo it.
    product = _symmetric_sum(of_queries + program * query_parts * D * D, query_parts, i, j, D, T)
    product *= _symmetric_sum(of_keys + program * key_parts * D * D, key_parts, i, j, D, T)
    tl.store(W + program * d * d + i * d + j, product, mask=(i < d) & (j < d))


@triton.jit
def _symmetric_sum(grams, parts, i, j, D: tl.constexpr, T: tl.constexpr):
    """Return entries (i, j) of the sum of the parts, averaged with its transpose."""
    here, there = tl.zeros([T, T], dtype=tl.float32), tl.zeros([T, T], dtype=tl.float32)
    for _ in range(parts):
        here += tl.load(grams + i * D + j)
        there += tl.load(grams + j * D + i)
        grams += D * D
    return (here + there) * 0.5


def _interpreted() -> bool:
    """Return whether kernels run in the interpreter, which cannot multiply bfloat16 matrices."""
    return not isinstance(_gram_kernel, triton.JITFunction)


def _check(queries: Tensor, keys: Tensor, attention_mask: Tensor | None) -> int:
    """Check the inputs, and return the number of query heads per KV head."""
    for name, t, shape in (("queries", queries, "(B, H_q, L_obs, d)"), ("keys", keys, "(B, H_kv, L, d)")):
        if t.ndim != 4 or t.numel() == 0:
            raise ProblemError(f"{name} has shape {tuple(t.shape)}: expected {shape}, none of them empty.")
        if t.dtype not in _FLOATS:
            raise ProblemError(f"{name} has dtype {t.dtype}: give float16, bfloat16 or float32.")
    if queries.shape[0] != keys.shape[0] or queries.shape[-1] != keys.shape[-1]:
        raise ProblemError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} differ in batch (first) or head_dim (last)."
        )
    if keys.shape[-1] > LARGEST_ON_CHIP:
        raise ProblemError(
            f"head_dim {keys.shape[-1]}: this kernel takes at most {LARGEST_ON_CHIP}; use the torch reference."
        )
    if queries.shape[1] % keys.shape[1]:
        raise ProblemError(f"{queries.shape[1]} query heads are not a multiple of {keys.shape[1]} KV heads.")
    if queries.shape[2] > keys.shape[2]:
        raise ProblemError(
            f"L_obs = {queries.shape[2]} queries are more than L = {keys.shape[2]} keys: pass the last queries only."
        )
    expected = (keys.shape[0], keys.shape[2])
    if attention_mask is not None and tuple(attention_mask.shape) != expected:
        raise ProblemError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected {expected}, True for real tokens."
        )
    if any(t is not None and t.device != keys.device for t in (queries, attention_mask)):
        raise ProblemError("queries, keys and attention_mask live on several devices: move them to one.")
    return queries.shape[1] // keys.shape[1]
