"""Every family in every way of generating (`tests/hf/matrix.py` says what is compared).

CI runs three families in full and the others greedily, with a padded row. ``make test-matrix`` runs every cell and
writes docs/results/adapter_matrix.{json,md,png}.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from bench.pages_of_tests import adapter_matrix
from bench.provenance import require_clean
from bench.report import RESULTS, write_results
from tests.hf import matrix_bits
from tests.hf.conftest import reads_in_chunks
from tests.hf.matrix import BFLOAT16_RTOL, FAMILIES, IN_FULL, MODES, cell, model_of
from tests.hf.matrix_bits import coded_cell

FULL = bool(os.environ.get("GRACE_TEST_MATRIX"))
ALLOW_DIRTY = bool(os.environ.get("GRACE_ALLOW_DIRTY"))
#: Asked before the first cell: a table that cannot be committed is not worth ten minutes.
SOURCE = require_clean(ALLOW_DIRTY) | {"command": "make test-matrix"} if FULL else {}
CELLS = [(family, mode) for family in FAMILIES for mode in MODES if FULL or family in IN_FULL or mode == "greedy"]
#: What cannot be pruned, and a word of the message that says so.
REFUSED = {
    "Mistral, sliding window": "no full-attention layer",
    "DiffLlama": "changes its values|does not let its attention be chosen",
    "Falcon": "does not let its attention be chosen",
    "Bloom": "does not let its attention be chosen",
}
#: With bits: as above, but one compiled step is enough, and a family's own attention is the same in all modes.
WITH_BITS = [
    (family, mode)
    for family, mode in CELLS
    if FULL or mode == "greedy" or (family in IN_FULL and mode != "compiled step")
] + [("Llama", "compiled step")] * (not FULL)
FOUND: dict[str, dict[str, str]] = {}
FOUND_WITH_BITS: dict[str, dict[str, str]] = {}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), CELLS)
def test_cell(family, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = cell(family, mode)
    FOUND.setdefault(family, {})[mode] = found
    check_refusal(family, found)
    if family not in REFUSED:
        if found.startswith("not in transformers"):
            assert "crop" in found or "forgotten" in found, found
            return
        assert found in ("pass", "fused=False"), found
        assert (found == "fused=False") == ("attention sinks" in family)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), WITH_BITS)
def test_cell_with_bits(family, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mode == "chunked prefill" and not reads_in_chunks(model_of(family)):
            pytest.skip("this transformers reads a prompt in chunks otherwise than at once, with its own cache too")
        found = coded_cell(family, mode)
    if "`crop` a `DynamicSlidingWindowLayer`" in found:  # transformers 5.2 cannot, and candidates need it
        pytest.skip("this transformers cannot crop sliding windows")
    FOUND_WITH_BITS.setdefault(family, {})[mode] = found
    if family not in REFUSED:
        assert found == "pass"
    check_refusal(family, found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "chunked prefill"])
def test_cell_without_a_trellis(mode, monkeypatch):
    monkeypatch.setitem(matrix_bits.SETTINGS, "trellis", False)
    assert coded_cell("Llama", mode) == "pass"


def check_refusal(family, found):
    """Families that cannot be pruned say why."""
    if family in REFUSED:
        assert found.startswith("raises: ")
        assert any(word in found for word in REFUSED[family].split("|")), found


@pytest.mark.skipif(not FULL, reason="make test-matrix")
def test_write_the_table():
    """Runs last."""
    cells, coded = ({family: found.get(family, {}) for family in FAMILIES} for found in (FOUND, FOUND_WITH_BITS))
    log = {"provenance": SOURCE, "torch": torch.__version__, "bfloat16_rtol": BFLOAT16_RTOL, "cells": cells}
    log["cells_with_bits"] = coded
    write_results(RESULTS / "adapter_matrix", log, adapter_matrix, allow_dirty=ALLOW_DIRTY)
    assert len(FOUND) == len(FAMILIES)
    assert all(len(row) == len(MODES) for row in FOUND.values())
