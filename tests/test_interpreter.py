"""What `tests.interpreter` leaves out of Triton's interpreter changes nothing: types, numbers and errors stay."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU", allow_module_level=True)
pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype, interpreter_semantic

from tests import interpreter  # noqa: F401  (what is tested)

TYPES = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
SHAPES = ((), (4,), (1, 4), (2, 1), (8,))
OPERANDS = type(interpreter_semantic).binary_op_type_checking_impl
CAST = type(interpreter_semantic).cast
if not hasattr(CAST, "__wrapped__"):
    pytest.skip("this Triton has other names, so nothing is left out", allow_module_level=True)


def tensor(of: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
    """Some numbers of a type."""
    data = np.arange(np.prod(shape, dtype=int)).astype(_get_np_dtype(of)).reshape(shape or (1,))
    return tl.tensor(TensorHandle(data, of), tl.block_type(of, list(shape)) if shape else of)


def said(call, *given):
    """The types and numbers of what a call returns, or its error."""
    try:
        found = call(interpreter_semantic, *given)
    except (TypeError, ValueError, AttributeError) as error:
        return type(error), str(error)
    found = found if isinstance(found, tuple) else (found,)
    return [(str(each.type), each.handle.data.tolist(), each.numel.value) for each in found]


@pytest.mark.parametrize("of", TYPES, ids=str)
def test_operands_and_casts_are_those_of_triton(of: tl.dtype) -> None:
    errors = 0
    for other, left, right in product(TYPES, SHAPES, SHAPES):
        pair = tensor(of, left), tensor(other, right)
        for flags in ((), (True, True), (False, False, False), (False, False, True, True)):
            found = said(OPERANDS, *pair, *flags)
            assert found == said(OPERANDS.__wrapped__, *pair, *flags)
            errors += found[0] is ValueError
        assert said(CAST, pair[0], other) == said(CAST.__wrapped__, pair[0], other)
    assert errors  # shapes that do not fit
    for scalar in (0, 3, -1, 2.5):
        given = tensor(of, (4,)), scalar
        assert said(OPERANDS, *given) == said(OPERANDS.__wrapped__, *given)
