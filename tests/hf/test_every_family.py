"""Every causal language model of transformers generates with a smaller cache, or a message says why it cannot.

Where its configuration limits a length, the prompt crosses the limit, and in a run of its own what is generated does.
CI runs those in `ALWAYS`. ``make test-families`` runs all that `every_family` can make, and writes
docs/results/every_family.{json,md,png}.
"""

from __future__ import annotations

import os
import warnings
from functools import partial

import pytest
import transformers

from bench.pages_of_tests import every_family
from bench.provenance import require_clean
from bench.report import RESULTS, write_results
from grace_opt.errors import CacheError
from tests.hf.every_family import LATE, NotBuiltError, kinds, limits_of, tiny
from tests.hf.matrix import cell_of
from tests.hf.matrix_bits import coded_cell_of

if not hasattr(transformers.cache_utils, "LinearAttentionLayer"):
    pytest.skip("this transformers keeps the states of hybrid models in other caches", allow_module_level=True)

FULL = bool(os.environ.get("GRACE_TEST_MATRIX"))
ALLOW_DIRTY = bool(os.environ.get("GRACE_ALLOW_DIRTY"))
SOURCE = require_clean(ALLOW_DIRTY) | {"command": "make test-families"} if FULL else {}
#: State-space, convolutional and linear-attention layers beside attention; and lengths that are limited.
ALWAYS = ("JambaForCausalLM", "Lfm2ForCausalLM", "Llama4ForCausalLM", "PhimoeForCausalLM", "Qwen3NextForCausalLM")
LIMITED = ("Llama4ForCausalLM", "PhimoeForCausalLM")
#: Why a model may be refused.
REASONS = (
    "has no full-attention layer",
    "does not let its attention be chosen",
    "did not reach grace_opt's attention function",
    "changes its values between cache and attention",
    "has a kind of cache of its own",
    "fused=False",
)
FOUND: dict[str, dict[str, str]] = {}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [each for each in kinds().items() if FULL or each[0] in ALWAYS])
def test_works_or_says_why(name, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny(kind)
        except NotBuiltError as error:
            FOUND[name] = {"not built": str(error)}
            return
        FOUND[name] = {}
        for how, run in (("ratio", cell_of), ("bits", partial(coded_cell_of, may_mind_padding=True))):
            FOUND[name][how] = "fails"  # until the run has ended
            try:
                FOUND[name][how] = run(model, "greedy")
            except CacheError as error:
                FOUND[name][how] = f"raises: {error}"
            if FOUND[name][how].startswith("not in transformers"):
                break
        if limits_of(model.config) and FOUND[name]["ratio"] in ("pass", "fused=False"):
            FOUND[name]["limits"] = "fails"
            FOUND[name]["limits"] = cell_of(tiny(kind, LATE), "greedy")
            assert FOUND[name]["limits"] == FOUND[name]["ratio"]
    for said in FOUND[name].values():
        if said.startswith("raises: "):
            assert any(reason in said for reason in REASONS), said
    if name in ALWAYS:
        assert FOUND[name] == dict.fromkeys(["ratio", "bits"] + ["limits"] * (name in LIMITED), "pass")


@pytest.mark.skipif(not FULL, reason="make test-families")
def test_write_the_page():
    """Runs last."""
    log = {"provenance": SOURCE, "transformers": transformers.__version__, "classes": FOUND}
    write_results(RESULTS / "every_family", log, every_family, allow_dirty=ALLOW_DIRTY)
    assert len(FOUND) == len(kinds())
