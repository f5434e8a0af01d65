"""What a newcomer types, and what the error tells them to write instead."""

from __future__ import annotations

import copy
import pickle
import re
import sys

import pytest

from grace_opt.attention.provider import MaskProvider
from grace_opt.errors import OptionError, UnknownSolverError
from grace_opt.hf import H2O, CacheConfig, CompressedCache, PyramidKV, Quantize, SnapKV, StreamingLLM, attach


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lambda_": 0.5}, r"For lambda_, write ratio=\."),
        ({"sparsity": 0.5}, r"For sparsity, write ratio=\."),
        ({"nbits": 4}, r"For nbits, write bits=, .* or quantize=Quantize\(4\) for the same"),
        ({"max_capacity_prompt": 64}, r"For max_capacity_prompt, write evict=SnapKV\(budget=512\)\."),
        ({"device": "cpu"}, "For device, leave it out: the cache is on the model's device"),
        ({"layers": [0, 1]}, r"For layers, write one ratio per layer .* ratio=\[0, 0\.5"),
        ({"max_new_tokens": 3}, r"For max_new_tokens, pass it to generate\(\)"),
        ({"recent_windw": 3}, r"For recent_windw, write recent_window=\."),
        ({"ratio": 60}, r"ratio=60: .*; write ratio=0\.6$"),
        ({"ratio": "0.6"}, r"ratio='0\.6': .*; write ratio=0\.6$"),
        ({"ratio": "60 %"}, r"; write ratio=0\.6$"),
        ({"ratio": [0.5, 60]}, r"layer 1: ratio=60: .*; write ratio=0\.6$"),
        ({"ratio": "half"}, r"or a list with one per layer$"),
        (
            {"method": 0.6},
            r"method=0\.6: write a name, .* the share to prune is another argument, ratio=, and so are bits=$",
        ),
        ({"evict": SnapKV}, r"evict=<class .*SnapKV'>: write an eviction, for instance SnapKV\(budget=512\)"),
        ({"quantize": Quantize}, r"for instance Quantize\(4\)"),
        ({"provider": "mies"}, r"provider='mies': write a function .* a name alone is method="),
        ({"provider": divmod}, r"provider\(queries, keys, attention_mask\): too many .* three"),
        ({"provider": MaskProvider}, r"write a function .* for instance MaskProvider\(\"mies\", 0\.5\)"),
        ({"config": CacheConfig}, r"config must be a CacheConfig, or the name of a file .*, not <class"),
    ],
    ids=str,
)
def test_of_settings(settings, says, tiny):
    for make in (CompressedCache, attach):
        with pytest.raises(OptionError, match=says):
            make(tiny(), **settings)


def test_of_a_method_with_a_blank(tiny):
    with pytest.raises(UnknownSolverError, match="Did you mean 'mies'"):
        attach(tiny(), "mies ")


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (Quantize, {"nbits": 4}, r"Quantize has no nbits; its arguments are bits, .* write bits=4"),
        (Quantize, {"group_sise": 4}, r"For group_sise, write group_size=\."),
        (SnapKV, {"max_capacity_prompt": 1}, r"SnapKV has no max_capacity_prompt; .* write budget="),
        (PyramidKV, {"kernel_size": 5}, "PyramidKV has no kernel_size; .*beta.* write kernel="),
        (H2O, {"recent_size": 5}, "H2O has no recent_size; .*observed.* write window="),
        (StreamingLLM, {"n_sink": 5}, "StreamingLLM has no n_sink; .* write sinks="),
        (CacheConfig, {"lambda_": 0.5}, r"no lambda_; .* For lambda_, write ratio=\. Give the options of a method"),
        (CacheConfig, {"start": "think"}, r"no start; .* as options=\{"),
    ],
    ids=str,
)
def test_of_arguments(make, arguments, says):
    with pytest.raises(OptionError, match=says):
        make(**arguments)


def test_too_many_by_position_are_named_too():
    with pytest.raises(OptionError, match="StreamingLLM got 3 arguments by position; its arguments are budget, sinks"):
        StreamingLLM(64, 4, 2)


@pytest.mark.parametrize(
    "value", [CacheConfig(ratio=0.25), SnapKV(64, 8), PyramidKV(64, beta=3), Quantize(keys=2, values=4)]
)
def test_checked_constructors_still_copy_pickle_and_compare(value):
    assert copy.deepcopy(value) == value == pickle.loads(pickle.dumps(value))  # noqa: S301


@pytest.mark.parametrize("name", ["evaluation", "needle", "press", "bits_press", "lm_eval", "eviction"])
def test_modules_that_moved_say_where_to(name):
    new = f"grace_opt.hf.evict.{name}" if name == "eviction" else f"grace_opt.hf.tools.{name}"
    with pytest.raises(OptionError, match=rf"grace_opt\.hf\.{name} has moved: write {re.escape(new)}\."):
        exec(f"from grace_opt.hf.{name} import anything")
    assert not hasattr(sys.modules[f"grace_opt.hf.{name}"], "__file__")
