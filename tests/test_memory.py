"""Arrays of compiled loops are numpy's: where they lie, who owns their memory, what they hold."""

from __future__ import annotations

import gc

import numba
import numpy as np
import pytest

from grace_opt.kernels._shared.memory import ALIGNED, array_at, empty, start_of, view, zeros
from grace_opt.kernels._shared.switches import LLVM, is_off

pytestmark = pytest.mark.skipif(is_off(LLVM), reason=f"{LLVM}=0: arrays are numba's own")

KINDS = [np.float32, np.float64, np.int16, np.int64, np.uint8, np.uint64, np.bool_]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_new_ones_own_their_memory(kind):
    @numba.njit
    def make(rows, width):
        return empty((rows, width), kind), zeros((rows, 3, width), kind), zeros((rows,), kind)

    made = [make(5, width) for width in range(20)]
    gc.collect()
    for width, (room, cube, line) in enumerate(made):
        assert (room.shape, cube.shape, line.shape) == ((5, width), (5, 3, width), (5,))
        for each in (room, cube, line):
            assert each.dtype == kind
            assert each.flags.c_contiguous
            assert each.ctypes.data % ALIGNED == 0 or not each.size
        assert not cube.any()
        assert not line.any()
        room[:], cube[:] = 1, 1  # writes to memory of another would show below
    assert not any(line.any() for _, _, line in made)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_those_at_an_address_are_what_lies_there(kind):
    @numba.njit
    def add_up(at, rows, width):
        total, seen = 0, array_at(at, (rows, width), kind)
        for r in range(rows):
            for c in range(width):
                total += (r + 1) * seen[r, c]
            seen[r, 0] = 1
        return total

    there = np.arange(12).reshape(3, 4).astype(kind)
    expected = sum((r + 1) * int(row.sum(dtype=np.int64)) for r, row in enumerate(there))
    assert add_up(there.ctypes.data, 3, 4) == expected
    assert (there[:, 0] == 1).all()


def test_a_view_keeps_the_memory_alive():
    @numba.njit
    def make(count):
        numbers = zeros((2, count), np.uint64)
        for i in range(count):
            numbers[1, i] = 2**8 * i + 1
        return view(numbers, np.uint8), view(view(numbers, np.uint8), np.float32)

    for count in (0, 1, 300):
        as_bytes, floats = make(count)
        gc.collect()
        junk = [make(count) for _ in range(20)]
        numbers = np.zeros((2, count), np.uint64)
        numbers[1] = 2**8 * np.arange(count, dtype=np.uint64) + 1
        assert as_bytes.shape == (2, 8 * count)
        assert np.array_equal(as_bytes, numbers.view(np.uint8))
        assert np.array_equal(floats, numbers.view(np.float32))
        del junk


def test_a_view_of_scattered_numbers_is_refused():
    @numba.njit
    def look(numbers):
        return view(numbers, np.int32)

    with pytest.raises(numba.TypingError):
        look(np.zeros((4, 4), np.float32)[:, ::2])


def test_where_one_begins_is_a_number_that_sums_keep_exact():
    @numba.njit
    def walk(numbers, row, steps):
        at = start_of(numbers[row])
        for _ in range(steps):
            at += numbers.itemsize
        return at

    numbers = np.zeros((4, 6), np.float32)[:, ::2]
    for row in range(4):
        found = walk(numbers, row, 5)
        assert type(found) is int  # a float64 would be a float here
        assert found == numbers[row].ctypes.data + 20
