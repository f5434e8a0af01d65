"""The Triton kernels compile for the oldest GPU that they are for, though there is none here."""

import json
import os
from pathlib import Path

import pytest

from grace_opt.kernels._shared.dispatch import OLDEST
from tests import starter

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
#: What ``python -W ignore -m tests.compile_kernels`` does.
COMPILE = f"""
import runpy, sys, warnings
warnings.simplefilter("ignore")
sys.argv[1:] = ["{"".join(map(str, OLDEST))}"]
runpy.run_module("tests.compile_kernels", run_name="__main__")
"""
#: Bytes of shared memory that a program can have on the GPUs of 8.6 and 8.9, which have least.
SHARED = 99 * 1024


@pytest.mark.slow
def test_every_kernel_compiles_and_fits():
    """In another process: in this one Triton may be an interpreter.

    Triton keeps what it compiled, by sources, its own version and the compiler's, for the next time.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(Path(__file__).parent / "__pycache__" / "triton")
    done = starter.python(COMPILE, environment, ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    expected = {"_gram_kernel", "_product_kernel", "_gather_kernel", "_greedy_kernel", "_swap_kernel"}
    expected |= {"_search"}
    expected |= {"attend_split", "join_splits"}
    expected |= {"list_channels", "prepare", "attend_codes", "join_coded_splits", "turn_values", "receive"}
    assert {entry["kernel"] for entry in found} == expected
    for entry in found:
        assert entry["shared"] <= SHARED, entry
        assert entry["stack"] <= 64, f"registers do not suffice: {entry}"
