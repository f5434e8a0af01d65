"""Loops that Python calls, from a wheel's machine code: what goes in and comes out, and what they are not for."""

from __future__ import annotations

import itertools
import pkgutil
import sys
import threading
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import b1, f4, f8, i1, i4, i8, types, u8

from grace_opt import kernels
from grace_opt.kernels._shared import ahead
from grace_opt.kernels._shared.jit import Loop, jit
from grace_opt.kernels._shared.precompiled import PrecompiledLoop
from grace_opt.kernels._shared.table_function import table_function
from grace_opt.kernels._shared.threads import CALLED
from grace_opt.kernels.solve.relaxation import cpu as relaxation


class Inner(NamedTuple):
    keys: Any
    bits: Any


class Outer(NamedTuple):
    inner: Inner
    few: Any


INNER = types.NamedTuple((f8[::1], u8[::1]), Inner)
OUTER = types.NamedTuple((INNER, i4[::1]), Outer)
ECHO = types.Tuple((f8, i8, b1, f8))(f8[:, ::1], b1[::1], OUTER, i8, f8, b1, f4[:, :, ::1], i1[::1])


@jit(ahead=[ECHO])
def echo(W, chosen, outer, count, number, yes, halves, small):
    """Write to every array, and return what the numbers are."""
    chosen[0] = not chosen[0]
    outer.inner.keys[0] += 1.0
    outer.inner.bits[0] ^= u8(1)
    outer.few[0] += 1
    small[0] += 1
    total = 0.0
    for i in range(W.shape[0]):
        for j in range(W.shape[1]):
            W[i, j] += i + 10.0 * j
    for i in range(halves.shape[0]):
        for j in range(halves.shape[1]):
            for k in range(halves.shape[2]):
                total += halves[i, j, k] * (1 + i + 10 * j + 100 * k)
    return number, count, not yes, total


@jit(ahead=[i8(f8[::1])])
def fails(x):
    """Raise where a number is not positive."""
    if not x[0] > 0.0:
        raise ValueError("planted")
    return 7


def precompiled(loop: Loop, at: int = 0) -> PrecompiledLoop:
    """One of its signatures, compiled as for a wheel, and found as if a wheel had it."""
    one = PrecompiledLoop(loop.py_func, loop.precompiled[at].signature, at)
    made = table_function(loop, one.signature).compile()
    one._made, one._looked_for, one._call = made, True, CALLED(made.address)  # type: ignore[attr-defined]
    return one


@pytest.fixture(scope="module")
def echoes() -> PrecompiledLoop:
    return precompiled(echo)


def arguments(count: Any = 3, number: Any = 0.5, yes: Any = True) -> list[Any]:
    rng = np.random.default_rng(0)
    W, halves = rng.random((3, 2)), rng.random((2, 3, 4)).astype(np.float32)
    outer = Outer(Inner(np.ones(2), np.full(3, 2**64 - 1, np.uint64)), np.array([4], np.int32))
    return [W, np.array([True, False]), outer, count, number, yes, halves, np.array([-1], np.int8)]


@given(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.booleans())
def test_everything_goes_in_and_comes_out(echoes, count, number, yes, of_numpy):
    if of_numpy:
        count, number, yes = np.int64(count), np.float64(number), np.bool_(yes)
    here, there = arguments(count, number, yes), arguments(count, number, yes)
    call = echoes.prepared(tuple(here))
    assert call is not None
    found, expected = call(*here), echo.py_func(*there)
    assert [type(each) for each in found] == [float, int, bool, float]
    assert np.array_equal(found[0], expected[0], equal_nan=True)
    assert np.signbit(found[0]) == np.signbit(expected[0])
    assert found[1:3] == expected[1:3]
    assert found[3] == pytest.approx(expected[3])
    flat = [[w, c, o.inner.keys, o.inner.bits, o.few, h, s] for w, c, o, _, _, _, h, s in (here, there)]
    assert all(map(np.array_equal, *flat))


READ_ONLY = np.ones((3, 2))
READ_ONLY.flags.writeable = False
#: What stands in an argument's place and is not what the loop was compiled for.
OTHERS = {
    "another number": (0, np.ones((3, 2), np.float32)),
    "whole numbers": (0, np.ones((3, 2), np.int64)),
    "other dimensions": (0, np.ones(6)),
    "columns first": (0, np.ones((3, 2), order="F")),
    "every other": (0, np.ones((3, 4))[:, ::2]),
    "not to be written to": (0, READ_ONLY),
    "between two numbers": (0, np.ones(56, np.uint8)[1:49].view(np.float64).reshape(3, 2)),
    "another byte order": (0, np.ones((3, 2), ">f8")),
    "a list": (0, [[1.0, 2.0]]),
    "a tuple without names": (2, tuple(arguments()[2])),
    "another tuple": (2, arguments()[2].inner),
    "another array in a tuple": (2, arguments()[2]._replace(few=np.zeros(1, np.int64))),
    "a fraction": (3, 1.0),
    "a truth": (3, True),
    "32 bits": (3, np.int32(1)),
    "64 bits without a sign": (3, np.uint64(1)),
    "too large": (3, 2**63),
    "too small": (3, -(2**63) - 1),
    "a whole number": (4, 1),
    "half a number": (4, np.float32(1)),
    "zero or one": (5, 1),
    "nothing": (5, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_left_to_numba(echoes, name):
    values = arguments()
    assert echoes.prepared(tuple(values)) is not None
    at, other = OTHERS[name]
    values[at] = other
    assert echoes.prepared(tuple(values)) is None


def test_too_few_or_too_many_are_left_to_numba(echoes):
    values = arguments()
    assert echoes.prepared(tuple(values[:-1])) is None
    assert echoes.prepared((*values, 1)) is None


def test_an_error_in_a_loop_is_an_error(monkeypatch):
    """A C function only writes to stderr, and what it should have found would be zeros."""
    one = precompiled(fails)
    good, bad, written = np.ones(1), np.zeros(1), []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: written.append(str(said.exc_value)))
    assert one.prepared((good,))(good) == 7  # type: ignore[misc]
    with pytest.raises(MemoryError, match=r"fails 0 ended early; the lines above say why"):
        one.prepared((bad,))(bad)  # type: ignore[misc]
    assert written == ["planted"]


def test_a_wrong_type_of_the_result_is_not_compiled():
    @jit(ahead=[f8(f8[::1])])
    def whole(x):
        return len(x)

    with pytest.raises(Exception, match="returns int64, and is said to"):
        table_function(whole, whole.precompiled[0].signature).compile()


def test_a_loop_is_called_from_machine_code_before_anything_else(monkeypatch):
    """Not compiled, and not run as plain Python; what does not fit it is, and what is switched off."""
    x = np.array([2.0, -1.0, 0.25])
    one = precompiled(relaxation.repair)
    looked_up = []
    monkeypatch.setattr(ahead, "address_of", lambda name: looked_up.append(name) or one._made.address)  # type: ignore[attr-defined]
    loop = jit(relaxation.repair.py_func, ahead=[one.signature], small=1000)
    monkeypatch.setattr(loop, "_run_interpreted", None)
    expected = x.copy()
    relaxation.repair.py_func(expected, 1.5)
    for _ in range(2):
        there = x.copy()
        loop(there, 1.5)
        assert np.array_equal(there, expected)
    assert (len(looked_up), loop.nopython_signatures) == (1, [])
    assert looked_up[0].endswith("repair 0")


def test_threads_that_begin_together_look_for_it_once(monkeypatch):
    made = table_function(relaxation.repair, relaxation.repair.precompiled[0].signature).compile()
    looked_up, start, found = [], threading.Barrier(4), []
    monkeypatch.setattr(ahead, "address_of", lambda name: looked_up.append(name) or made.address)
    one = PrecompiledLoop(relaxation.repair.py_func, relaxation.repair.precompiled[0].signature, 0)

    def work() -> None:
        start.wait()
        x = np.array([2.0, 0.5])
        one.prepared((x, 1.0))(x, 1.0)  # type: ignore[misc]
        found.append(x.tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (len(looked_up), len(found)) == (1, 4)
    assert len({tuple(each) for each in found}) == 1


def loops() -> dict[str, Loop]:
    """All of the library's that Python may call, by name."""
    names = (each.name for each in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."))
    modules = (import_module(name) for name in names if ".gpu" not in name)
    found = itertools.chain.from_iterable(vars(module).values() for module in modules)
    return {ahead.name_of(each.py_func): each for each in found if isinstance(each, Loop)}


def test_every_loop_is_precompiled():
    """But those that other loops call; and each for the types of its results."""
    without = {name.rpartition(".")[2] for name, loop in loops().items() if not loop.precompiled}
    assert without == {"largest_row", "mean", "mean_square", "step_of", "weighted"}
    for loop in loops().values():
        for one in loop.precompiled:
            loop.compile(one.signature.args)  # from disk, if it was before
            assert loop.overloads[one.signature.args].signature.return_type == one.signature.return_type, one.name
