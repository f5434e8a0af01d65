r"""Attention of a few new queries over coded tokens on the GPU: keys and values are read in place.

The parameters and the result are those of `grace_opt.kernels.cache.coded.host.coded_attention`. A number of a coded key
is :math:`s_j\, l(c_j) + m_j`, with a scale and a mean per channel of each unit, a class of tokens of one head, so that

.. math:: q \cdot k = q' \cdot x = \sum_j q'_j m_j + \sum_j q'_j s_j\, l(c_j)

where :math:`q'` is the query in the coordinates of the keys. Small programs after one another:

1. `prepare` multiplies the queries by the basis of the keys and stores the weights of each unit's planes; other
   programs of it make all of 2 and 3 for splits of dense tokens.
2. `attend_codes`: the tokens of each unit are divided into equal splits, and each has a program for up to 16 query
   rows. Tensor cores multiply weights with signs, which are bits of a float16, and with numbers of more bits, which are
   looked up. A split has its own maximum, sum and sums of values, these in coordinates.
3. `join_coded_splits` combines the splits; values of coded tokens are still in coordinates.
4. `turn_values` multiplies these by the basis of the values, and adds those of the dense tokens.
5. `receive` adds up the attention that the newest tokens receive, from their logits.

A column that a mask hides has the smallest float32 instead of minus infinity, as in
:mod:`grace_opt.kernels.cache.decode.gpu`. Sums are float32. In float16 and bfloat16, numbers of four bits and more are
rounded to the eleven digits of float16, and dense keys and values to the ten of tensor cores (TF32); all else is exact
to 22 digits.

When: on a GPU, while decoding, if no gradients, dropout or attention weights are needed; `unsupported_reason` says why
not. Nothing waits for the device, except to make the table of sequences that have changed; the division of work
depends only on shapes.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting along the tokens; Milakov and
Gimelshein (arXiv 1805.02867) for the running softmax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from .....errors import CacheError
from ...decode.gpu import read_mask
from ...decode.host import scales_of
from ..host import MAX_ROWS, check_added, check_shapes
from ..table import CodedSequence
from .attend import prepare
from .batch import TYPES, batch_of
from .launching import launch
from .levels import levels_of

#: Widest head, of keys and of values, that one program holds.
MAX_WIDTH = 256


def unsupported_reason(query: Tensor, tail_keys: Tensor, tail_values: Tensor) -> str | None:
    """Return why :func:`coded_attention` does not support these tensors, or None if it does.

    Parameters
    ----------
    query, tail_keys, tail_values : Tensor
        As there.
    """
    tensors = (query, tail_keys, tail_values)
    rows = query.shape[1] // tail_keys.shape[1] * query.shape[2]
    width, value_width = query.shape[3], tail_values.shape[3]
    if query.dtype not in TYPES or any(t.dtype != query.dtype for t in tensors):
        types = ", ".join(sorted({str(t.dtype) for t in tensors}))
        return f"queries, keys and values are {types}; they must all be float16, bfloat16 or float32"
    if max(width, value_width) > MAX_WIDTH:
        return f"heads are {width} wide, values {value_width}; at most {MAX_WIDTH} is possible"
    if rows > MAX_ROWS:
        return f"{rows} query rows share a KV head; at most {MAX_ROWS} is possible"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are requested, and the kernels have none"
    if not query.is_cuda and not _INTERPRETED:
        return f"tensors are on {query.device}; a GPU is needed, or TRITON_INTERPRET=1 before triton is imported"
    return None


def coded_attention(
    query: Tensor,
    sequences: Sequence[CodedSequence],
    tail_keys: Tensor,
    tail_values: Tensor,
    books: Tensor,
    newest: int,
    dense_newest: Sequence[int],
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    before: Tensor | None = None,
    trellis: bool = False,
    added: Tensor | None = None,
    *,
    split_tokens: int | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over sinks, coded tokens and a dense tail.

    Parameters
    ----------
    query, sequences, tail_keys, tail_values, books, newest, dense_newest, attention_mask, scaling, softcap, causal
        As for `grace_opt.kernels.cache.coded.host.coded_attention`; all on one device.
    before
        As there; on any device.
    trellis, added
        As there.
    split_tokens, splits : int or None
        Tokens per split of coded ones (128 or 256), and number of splits of dense ones per head, for measurements; None
        chooses.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``, of the query's type.
    received : Tensor
        ``(B, H, 3, newest)`` float32, as there.

    Raises
    ------
    CacheError
        If there is an `unsupported_reason`, or shapes or devices do not go together.
    """
    reason = unsupported_reason(query, tail_keys, tail_values)
    if reason is not None:
        raise CacheError(f"the kernel for coded tokens cannot be used: {reason}; make keys and values dense")
    _check(query, sequences, tail_keys, tail_values, books)
    if added is not None:
        heads = tail_keys.shape[1]
        check_added(added, sequences, heads, query.shape[1] // heads * query.shape[2])
        added = added.float().contiguous()
    levels = levels_of(books, trellis)
    if not len(query) or not query.shape[2]:
        output = query.new_empty(len(query), query.shape[2], query.shape[1], tail_values.shape[3])
        received = query.new_zeros(len(query), tail_keys.shape[1], 3, newest, dtype=torch.float32)
    else:
        mask = read_mask(attention_mask, query, tail_keys.shape[2], causal)
        inner, outer = scales_of(query.shape[3] ** -0.5 if scaling is None else scaling, softcap)
        factors, capped = (float(inner), float(outer)), softcap is not None
        with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
            batch = batch_of(sequences, dense_newest, trellis)
            output, received = launch(
                query,
                batch,
                tail_keys,
                tail_values,
                levels,
                newest,
                mask,
                factors,
                capped,
                split_tokens,
                splits,
                trellis,
                added,
            )
    if before is not None:
        received[..., : before.shape[3]] += before.to(received.device)
    return output, received


def _check(
    query: Tensor, sequences: Sequence[CodedSequence], tail_keys: Tensor, tail_values: Tensor, books: Tensor
) -> None:
    """Check what the kernel reads by address."""
    check_shapes(query, sequences, tail_keys, tail_values)
    widths = query.shape[3], tail_values.shape[3]
    others = [(sequence.sink_keys.shape[2], sequence.sink_values.shape[2]) for sequence in sequences]
    if any(sequence != widths for sequence in others):
        raise CacheError(f"keys and values of new tokens are {widths} wide, those of the sequences {others}")
    devices = {t.device for t in (query, tail_keys, tail_values, books)} | {
        tensor.device for sequence in sequences for tensor in sequence.tensors() if tensor is not None
    }
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise CacheError(f"queries, sequences, tail and codebooks are on {names}; move them to one device")
    if not tail_keys.shape[2] and any(
        not sequence.table.most and not sequence.sink_keys.shape[1] for sequence in sequences
    ):
        raise CacheError("a sequence has no tokens at all; there must be at least the new ones")


#: Whether triton was imported with TRITON_INTERPRET=1: numpy does the work, on the CPU.
_INTERPRETED = not isinstance(prepare, triton.JITFunction)
