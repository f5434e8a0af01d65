"""`CodedSequence`: what is stored of one sequence, by address, as the loops read it.

It has addresses, not numbers: who keeps it must keep the codes, which never change, alive. Made once for many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .forms import (
    COUNT,
    END,
    FIELDS,
    HEAD_SCALE,
    KEYS,
    LEVEL,
    LEVEL_BYTES,
    LEVELS,
    MEANS,
    NEWEST,
    PLANES,
    SCALES,
    VALUES,
)

#: Approximate number of tasks to share among threads, and the fewest and most columns of one: sorting its channels
#: takes about as long as two hundred columns, and logits of four rows should stay in a processor's caches.
TASKS, FEWEST, COLUMNS = 12, 768, 4096

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CodesTable:
    """Where the codes of some heads are.

    Attributes
    ----------
    units : array (H n, FIELDS)
        Classes of tokens: those of the first head, then those of the next.
    tasks : array (N, 5)
        Splits of columns, those of a head side by side: the head, its first unit and the one after its last, the first
        column and the one after the last. For dense tokens the first unit is -1.
    most : int
        Most units of a head.
    numbers : int
        Coded tokens, of all heads together.
    on_device : list
        On a GPU, what :mod:`grace_opt.kernels.cache.coded.gpu` has copied there; empty before.
    """

    units: Numbers
    tasks: Numbers
    most: int
    numbers: int
    on_device: list[Any] = field(default_factory=list)

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the tasks and of the units."""
        return self.tasks.ctypes.data, self.units.ctypes.data


@dataclass(frozen=True, eq=False)
class CodedSequence:
    """The older tokens of one sequence of a batch.

    Attributes
    ----------
    table : CodesTable
        Of its codes.
    sink_keys, sink_values : Tensor
        ``(H, s, d)`` and ``(H, s, d_v)``, dense.
    key_basis, value_basis : Tensor or None
        ``(H, d, d)`` and ``(H, d_v, d_v)``: coordinates times these are keys, and values; None if they are these.
    positions : Tensor or None
        ``(H, columns)`` int16 or int32: of each coded token, in the order of the units; None where nothing is added by
        position.
    on_host : dict
        On a CPU, what :mod:`grace_opt.kernels.cache.coded.host` says in every step; empty before.
    """

    table: CodesTable
    sink_keys: Tensor
    sink_values: Tensor
    key_basis: Tensor | None
    value_basis: Tensor | None
    positions: Tensor | None = None
    on_host: dict[Any, Any] = field(default_factory=dict, repr=False)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what is dense: the sinks, and the bases and positions if there are any."""
        return self.sink_keys, self.sink_values, self.key_basis, self.value_basis, self.positions


class StoredCodes(Protocol):
    """Codes of H heads with d channels in C classes, as `grace_opt.hf.stores.coded.codes.Codes` describes them."""

    @property
    def levels(self) -> Tensor:
        """Bits of each channel's index into `WIDTHS`."""
        ...

    @property
    def means(self) -> Tensor:
        """The means, ``(H, d)``."""
        ...

    @property
    def scales(self) -> Tensor:
        """The scales of channels that have bits."""
        ...

    @property
    def unit(self) -> Tensor:
        """A power of two for each head, ``(H,)``."""
        ...

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """The bit planes of each class."""
        ...

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens of each class."""
        ...

    def widths(self) -> Tensor:
        """Return the bits of every channel, ``(C, H, d)``."""
        ...


def table_of(units: Sequence[Numbers], heads: int) -> CodesTable:
    """Return the table of what `units_of` makes of each part of a sequence."""
    every = np.concatenate([np.zeros((heads, 0, FIELDS), np.int64), *units], axis=1)
    most = every.shape[1]
    counts: list[int] = every[0, :, COUNT].tolist() if most else []
    target = min(max(-(-sum(counts) * heads // TASKS), FEWEST), COLUMNS)
    ranges = splits(counts, target)
    tasks = []
    for h in range(heads):
        tasks += [[h, h * most, (h + 1) * most, start, stop] for start, stop in ranges]
        tasks.append([h, -1, -1, 0, 0])  # short, and so last: threads end at about the same time
    return CodesTable(every.reshape(-1, FIELDS), np.array(tasks, np.int64), most, heads * sum(counts))


def splits(counts: Sequence[int], target: int) -> list[tuple[int, int]]:
    """Cut the columns of units into splits of about `target`, at most `COLUMNS`: between units, where that is possible.

    Every unit that a split reads takes time of its own.

    Examples
    --------
    >>> splits([100, 800, 2400, 4600], 1500)
    [(0, 900), (900, 2100), (2100, 3300), (3300, 4834), (4834, 6368), (6368, 7900)]
    """
    limit, cut, first, column = min(target * 5 // 4, COLUMNS), [], 0, 0
    for count in counts:
        if column > first and column + count - first > limit:
            cut.append((first, column))
            first = column
        column += count
        number = -(-(column - first) // limit)
        if number > 1:
            size = -(-(column - first) // number)
            cut += [(start, min(start + size, column)) for start in range(first, column, size)]
            first = column
    if column > first:
        cut.append((first, column))
    return cut


def batched(tables: Sequence[CodesTable], heads: int) -> CodesTable:
    """Return several sequences' tables as one with so many times the heads."""
    if len(tables) == 1:
        return tables[0]
    tasks, unit = [], 0
    for number, table in enumerate(tables):
        of_units = np.where(table.tasks[:, 1:3] < 0, -1, table.tasks[:, 1:3] + unit)
        tasks.append(np.concatenate([table.tasks[:, :1] + number * heads, of_units, table.tasks[:, 3:]], axis=1))
        unit += len(table.units)
    units = np.concatenate([table.units for table in tables])
    return CodesTable(units, np.concatenate(tasks), max(t.most for t in tables), sum(t.numbers for t in tables))


def units_of(keys: StoredCodes, values: StoredCodes, heads: int, newest: bool = False) -> Numbers:
    """Return the units of each head, ``(heads, n, FIELDS)`` int64, without those that have no tokens.

    Parameters
    ----------
    keys, values : StoredCodes
    heads : int
        Number of heads; codes of a multiple of it are those of consecutive blocks of tokens.
    newest : bool
        Whether their tokens are the first of the newest ones, in the order of the sequence.
    """
    blocks, classes = len(keys.means) // heads, len(keys.counts)
    units = np.zeros((classes, blocks * heads, FIELDS), np.int64)
    units[..., COUNT] = np.array(keys.counts)[:, None]
    units[..., NEWEST] = np.arange(blocks * heads) // heads * keys.counts[0] if newest else -1
    for first, codes in ((KEYS, keys), (VALUES, values)):
        widths = codes.widths().cpu().numpy()
        _describe(units[..., first : first + HEAD_SCALE + 1], codes, widths)
    units = units.reshape(classes, blocks, heads, FIELDS).transpose(2, 0, 1, 3).reshape(heads, -1, FIELDS)
    return np.ascontiguousarray(units[:, units[0, :, COUNT] > 0])


def _describe(fields: Numbers, codes: StoredCodes, widths: npt.NDArray[np.uint8]) -> None:
    """Fill ``(C, H, 8)`` fields, of codes with widths ``(C, H, d)``."""
    classes, heads, width = widths.shape
    numbers = np.arange(classes * heads).reshape(classes, heads)
    wide = np.cumsum((widths > 0).sum(2).ravel())
    fields[..., SCALES] = codes.scales.data_ptr() + 2 * np.concatenate([[0], wide[:-1]]).reshape(classes, heads)
    planes = widths.sum(2, dtype=np.int64)
    for number, (of_class, count) in enumerate(zip(codes.planes, codes.counts, strict=True)):
        before = np.cumsum(planes[number]) - planes[number]
        fields[number, :, PLANES] = of_class.data_ptr() + before * -(-count // 8)
        fields[number, :, END] = of_class.data_ptr() + of_class.nbytes
    fields[..., LEVELS] = codes.levels.data_ptr()
    fields[..., LEVEL_BYTES] = codes.levels.shape[1]
    fields[..., LEVEL] = numbers * width
    fields[..., MEANS] = codes.means.data_ptr() + 2 * width * np.arange(heads)
    fields[..., HEAD_SCALE] = codes.unit.data_ptr() + 4 * np.arange(heads)
