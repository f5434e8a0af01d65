"""What the hosts of the compiled loops have in common: which tensors they support, their shapes and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....errors import CacheError
from ..._shared.switches import LLVM, is_off
from ..decode.checks import check_lengths, kind_of_mask
from .forms import COUNTS, KEPT, MASK, OLD_KEYS, OLD_VALUES, PLACES, QUERY, REACH, SINK_KEYS, TAIL_KEYS, TAIL_VALUES
from .hashes import HashTables
from .pages import PageScores
from .stored import Stored

#: Most query heads of a KV head.
MAX_GROUP = 64
#: Number of tasks, at least, that the work is cut into: some for each thread of a few, whatever their number is.
TASKS = 12
#: If fewer numbers are read, waking other threads takes longer than it saves.
ALONE_BELOW = 2**17


def unsupported_reason(
    query: Tensor, stored: Stored, mask: Tensor | None, softcap: float | None, pages: PageScores | HashTables
) -> str | None:
    """Return why the compiled loops do not support these tensors, or None if they do.

    Parameters
    ----------
    query, stored, pages
        What is read, as `grace_opt.kernels.cache.reading.reference.attention` gets it.
    mask, softcap
        As there.
    """
    tensors = (query, *stored._replace(kept_indices=stored.keys), pages.reach)
    if is_off(LLVM):
        return f"{LLVM}=0 turns off what is written as LLVM instructions"
    if not all(t.is_cpu and t.dtype == torch.float32 for t in tensors):
        if not all(t.is_cpu for t in tensors):
            return "tensors are not on the CPU"
        return f"{', '.join(sorted({str(t.dtype) for t in tensors}))}: all must be float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are requested, and the kernel has none"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and cannot look into the kernel"
    if softcap is not None or query.shape[2] != 1:
        return "logits are capped, or there are several new tokens"
    if query.shape[1] // stored.keys.shape[1] > MAX_GROUP:
        return f"more than {MAX_GROUP} query heads share a KV head"
    if mask is not None and mask.dtype != torch.bool:
        return "the mask is additive"
    return None


def check(query: Tensor, stored: Stored, more: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Check shapes: the kernel reads by address, so a tensor that is too small must not get there.

    Parameters
    ----------
    query, stored
        As in `unsupported_reason`.
    more : dict
        Other tensors and what shapes they should have, by name.
    """
    batch, query_heads, _, width = query.shape
    heads, old, kept_count = stored.keys.shape[1:]
    (sinks, _, tail), value_width = stored.lengths, stored.tail_values.shape[3]
    check_lengths(sinks, old, tail, stored.old_values, stored.tail_values)
    expected: dict[str, tuple[int, ...]] = {
        "keys": (batch, heads, old, kept_count),
        "kept_indices": (batch, heads, kept_count),
        "sink_keys": (batch, heads, sinks, width),
        "tail_keys": (batch, heads, tail, width),
        "old_values": (batch, heads, sinks + old, value_width),
        "tail_values": (batch, heads, tail, value_width),
    }
    check_shapes({name: (getattr(stored, name), expected[name]) for name in expected} | more)
    if query_heads % heads:
        raise CacheError(f"{query_heads} query heads cannot share {heads} KV heads; their number must be a multiple")


def check_shapes(tensors: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Refuse tensors, by name, that have other shapes than they should."""
    for name, (tensor, shape) in tensors.items():
        if tensor.shape != shape:
            raise CacheError(f"{name} has shape {tuple(tensor.shape)} and should have {shape}, to go with the others")


class ReadAddresses(NamedTuple):
    """What is read in every step, by address.

    Attributes
    ----------
    where : tuple
        Addresses and shapes of the tensors that this was made for.
    places : array (16, 5)
        As the compiled loops read them; zeros for what each step brings.
    alive : list of Tensor
    """

    where: tuple[Any, ...]
    places: npt.NDArray[np.int64]
    alive: list[Tensor]


def stored_of(
    pages: PageScores | HashTables, stored: Stored, place_pages: Callable[[npt.NDArray[np.int64]], list[Tensor]]
) -> npt.NDArray[np.int64]:
    """Return the locations of what is read in every step, listed once for as long as the tensors stay where they are.

    Parameters
    ----------
    pages, stored
        As in `unsupported_reason`.
    place_pages : callable
        Writes where the tensors of `pages` are, but for `tokens_per_page` and `reach`; returns those to keep alive.
    """
    tensors = stored.keys, stored.kept_indices, stored.sink_keys, stored.old_values, pages.tokens_per_page, pages.reach
    where = tuple((t.data_ptr(), t.shape, t.stride()) for t in tensors)
    addresses: ReadAddresses | None = pages.places.get("addresses")
    if addresses is not None and addresses.where == where:
        return addresses.places.copy()
    kept_indices, tokens_per_page = (
        stored.kept_indices.to(torch.int64).contiguous(),
        pages.tokens_per_page.to(torch.int32).contiguous(),
    )
    reach, rows = pages.reach.contiguous(), [rowwise(t) for t in (stored.sink_keys, stored.keys, stored.old_values)]
    places = np.zeros((PLACES, 5), np.int64)
    places[KEPT] = [kept_indices.data_ptr(), 8 * kept_indices.stride(0), 8 * kept_indices.stride(1), 0, 8]
    for row, tensor in zip((SINK_KEYS, OLD_KEYS, OLD_VALUES), rows, strict=True):
        places[row] = place(tensor)
    places[COUNTS], places[REACH] = (
        [tokens_per_page.data_ptr(), 4 * tokens_per_page.stride(0), 0, 4, 0],
        [*place(reach), 0],
    )
    # What was given is kept alive as well: as long as it is, nothing else can be at its address.
    pages.places["addresses"] = ReadAddresses(
        where, places, [*tensors, kept_indices, tokens_per_page, reach, *rows, *place_pages(places)]
    )
    return places.copy()


def place_step(
    places: npt.NDArray[np.int64], query: Tensor, stored: Stored, mask: Tensor | None
) -> tuple[int, list[Tensor]]:
    """Write the locations of what a step brings; return the kind of its mask, and what to keep alive."""
    news = [rowwise(t) for t in (query, stored.tail_keys, stored.tail_values)]
    for row, tensor in zip((QUERY, TAIL_KEYS, TAIL_VALUES), news, strict=True):
        places[row] = place(tensor)
    kind = kind_of_mask(mask, query, sum(stored.lengths), causal=False)
    if mask is not None:
        address, *steps = place(mask)
        broadcast = enumerate(zip(mask.shape, steps, strict=True))
        places[MASK] = [address, *(0 if n == 1 and number < 3 else step for number, (n, step) in broadcast)]
        news.append(mask)
    return kind, news


def rowwise(tensor: Tensor) -> Tensor:
    """Return the tensor, copied unless the numbers of its last dimension are adjacent."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def place(tensor: Tensor) -> list[int]:
    """Address and strides, in bytes."""
    size = tensor.element_size()
    return [tensor.data_ptr(), *(size * step for step in tensor.stride())]
