"""Every family in every way of generating (`tests/hf/matrix.py` says what is compared).

CI runs three families in full and the others greedily, with a padded row. ``make test-matrix`` runs every cell and
writes docs/results/adapter_matrix.{json,md}.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from bench.provenance import caption, provenance, write_json
from grace_opt._util.files import atomic_write
from tests.hf.matrix import BFLOAT16_RTOL, FAMILIES, IN_FULL, MODES, cell

FULL = bool(os.environ.get("GRACE_TEST_MATRIX"))
RESULTS = Path(__file__).parents[2] / "docs" / "results"
CELLS = [(family, mode) for family in FAMILIES for mode in MODES if FULL or family in IN_FULL or mode == "greedy"]
#: What can not be pruned, and a word of the message that says so.
REFUSED = {
    "Mistral, sliding window": "no full-attention layer",
    "DiffLlama": "changes its values|does not let its attention be chosen",
    "Falcon": "does not let its attention be chosen",
    "Bloom": "does not let its attention be chosen",
}
FOUND: dict[str, dict[str, str]] = {}


@pytest.mark.parametrize(("family", "mode"), CELLS)
def test_cell(family, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = cell(family, mode)
    FOUND.setdefault(family, {})[mode] = found
    if family in REFUSED:
        assert found.startswith("raises: ")
        assert any(word in found for word in REFUSED[family].split("|")), found
    else:
        if found.startswith("not in transformers"):
            assert "crop" in found, found
            return
        assert found in ("pass", "fused=False"), found
        assert (found == "fused=False") == ("attention sinks" in family)


@pytest.mark.skipif(not FULL, reason="make test-matrix")
def test_write_the_table():
    """Runs last."""
    source = provenance() | {"command": "make test-matrix"}
    log = {"provenance": source, "torch": torch.__version__, "bfloat16_rtol": BFLOAT16_RTOL, "cells": FOUND}
    write_json(RESULTS / "adapter_matrix.json", log)
    with atomic_write(RESULTS / "adapter_matrix.md") as path:
        path.write_text(_markdown(source))
    assert len(FOUND) == len(FAMILIES)
    assert all(len(row) == len(MODES) for row in FOUND.values())


def _markdown(source):
    rows, notes = [], []
    for family in FAMILIES:
        marks = []
        for mode in MODES:
            answer = FOUND.get(family, {}).get(mode, "fails")
            marks.append(answer.split(":")[0])
            if answer.startswith("raises: ") and f"* {family}" not in str(notes):
                notes.append(f"* {family}: {answer.removeprefix('raises: ')}")
        rows.append(f"| {family} | {' | '.join(marks)} |")
    return (
        f"| family | {' | '.join(MODES)} |\n|---|{'---|' * len(MODES)}\n"
        + "\n".join(rows)
        + "\n\nThe messages:\n\n"
        + "\n".join(notes)
        + f"\n\nTransformers {transformers.__version__}. {caption(source)}\n"
    )
