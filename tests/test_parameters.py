"""Every integer and every number that a user can give: one check, one manner of saying what is wrong."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from grace_opt import ChannelMask, MaskProvider, compare, methods, solve
from grace_opt._util.parameters import choice, flag, integer, number, shown
from grace_opt.attention import prune_count
from grace_opt.errors import GraceError, OptionError
from grace_opt.hf import H2O, Bits, CacheConfig, Channels, PyramidKV, Quantize, SnapKV, StreamingLLM
from grace_opt.hf.tools.needle import make_prompt
from grace_opt.instances import generators
from grace_opt.sweep import Cell, run_sweep
from grace_opt.sweep.bootstrap import mean_interval

W = np.diag([3.0, 1.0, 2.0])


class Parameter(NamedTuple):
    """One parameter of one call."""

    where: str
    name: str
    call: Callable[[Any], Any]
    good: Any  # a Python number that is taken
    optional: bool = False  # None is taken as well
    negative: bool = False  # so is -1
    kept: bool = False  # what the call returns has it as an attribute


def _of_class(kind: type, where: str, **good: Any) -> list[Parameter]:
    """The numbers among a dataclass's fields, by their annotations."""
    found = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        kinds = set(typing.get_args(hints[field.name]) or (hints[field.name],))
        if not kinds & {int, float} or kinds - {int, float, type(None)} - set(good.pop("also", ())):
            continue
        value = good.get(field.name, field.default)
        if value is None or value is dataclasses.MISSING:
            value = 8 if int in kinds else 0.5

        def call(given: Any, name: str = field.name) -> Any:
            together = _TOGETHER.get((where, name), {}) if given is not None else {}
            return kind(**{**together, name: given})

        optional = type(None) in kinds or field.default is None
        found.append(Parameter(where, field.name, call, value, optional, kept=True))
    return found


#: What goes only together.
_TOGETHER = {
    ("Bits", "key_bits"): {"value_bits": 2.0},
    ("Bits", "value_bits"): {"key_bits": 2.0},
}


def _of_generators() -> list[Parameter]:
    found = []
    for name, make in generators.GENERATORS.items():
        for parameter in inspect.signature(make).parameters.values():
            if parameter.annotation not in ("int", "float", "int | None"):
                continue

            def call(given: Any, make: Any = make, key: str = parameter.name, planted: bool = name == "planted") -> Any:
                return make(**({"n": 12} | ({"k": 3} if planted else {}) | {key: given}))

            usual = {"n": 12, "k": 3}.get(parameter.name, parameter.default)
            good = 2 if usual is None else usual
            found.append(Parameter(name, parameter.name, call, good, "None" in parameter.annotation))
    return found


def _sweep(tmp: str) -> Callable[..., Any]:
    return lambda **given: run_sweep([Cell("nothing", {"n": 1})], lambda config: [], tmp, progress=False, **given)


PARAMETERS = [
    *(p for spec in methods() for p in _of_class(spec.options, spec.name)),
    *_of_class(CacheConfig, "CacheConfig", also=(), tail_block=32),
    *_of_class(Channels, "Channels"),
    *_of_class(Bits, "Bits"),
    *_of_class(Quantize, "Quantize", values=4),
    *(p for kind in (SnapKV, PyramidKV, H2O, StreamingLLM) for p in _of_class(kind, kind.__name__)),
    *_of_generators(),
    Parameter("solve", "seed", lambda v: solve(W, 1, seed=v), 3),
    Parameter("solve", "time_limit", lambda v: solve(W, 1, time_limit=v), 2, True),
    Parameter("solve", "patience", lambda v: solve(W, 1, patience=v), 2, True),
    Parameter("solve", "target", lambda v: solve(W, 1, target=v), 2, True, negative=True),
    Parameter("compare", "seed", lambda v: compare(W, 1, ["mies"], seed=v), 3),
    Parameter("compare", "time_limit", lambda v: compare(W, 1, ["mies"], time_limit=v), 2, True),
    Parameter("compare", "patience", lambda v: compare(W, 1, ["mies"], patience=v), 2, True),
    Parameter("compare", "target", lambda v: compare(W, 1, ["mies"], target=v), 2, True, negative=True),
    Parameter("MaskProvider", "ratio", lambda v: MaskProvider(ratio=v), 0.25, kept=True),
    Parameter("MaskProvider", "kept_channels", lambda v: MaskProvider(kept_channels=v), 4, True, kept=True),
    Parameter("MaskProvider", "seed", lambda v: MaskProvider(seed=v), 4, kept=True),
    Parameter("Channels", "ratio", lambda v: CacheConfig(ratio=v).channels, 0.25, optional=True, kept=True),
    Parameter("prune_count", "ratio", lambda v: prune_count(v, 8), 0.25),
    Parameter("prune_count", "d", lambda v: prune_count(0.5, v), 8),
    Parameter(
        "ChannelMask",
        "pruned_per_head",
        lambda v: ChannelMask(torch.zeros(1, 4, dtype=torch.bool), pruned_per_head=v),
        0,
        True,
        kept=True,
    ),
    *(
        Parameter(
            "make_prompt",
            name,
            lambda v, name=name: make_prompt(**{"tokens": 200, "depth": 0, "count": lambda s: len(s.split()), name: v}),
            good,
        )
        for name, good in (("tokens", 200), ("depth", 0.5), ("seed", 3), ("distractors", 2))
    ),
    Parameter("mean_interval", "confidence", lambda v: mean_interval([1.0, 2.0, 4.0], confidence=v), 0.5),
    Parameter("mean_interval", "resamples", lambda v: mean_interval([1.0, 2.0, 4.0], resamples=v), 50),
    Parameter("mean_interval", "seed", lambda v: mean_interval([1.0, 2.0, 4.0], seed=v), 3),
]


def _spellings(good: Any) -> list[Any]:
    """The same number as numpy and torch write it."""
    small = (np.uint8,) if isinstance(good, int) and good < 256 else ()
    kinds = (np.int64, *small) if isinstance(good, int) else (np.float64, np.float32)
    return [good, *(kind(good) for kind in kinds), np.array(good), torch.tensor(good)]


def test_the_walk_meets_what_there_is():
    met = {(p.where, p.name) for p in PARAMETERS}
    assert {
        ("annealing", "sweeps"),
        ("annealing", "restarts"),
        ("tabu", "iterations"),
        ("tabu", "restart_after"),
        ("beam", "width"),
        ("exhaustive", "max_subsets"),
        ("branch_and_bound", "node_limit"),
        ("local_search", "max_steps"),
        ("portfolio", "iterations"),
        ("sdp", "eps"),
        ("sdp", "max_memory"),
        ("CacheConfig", "sink_tokens"),
        ("Quantize", "keys"),
        ("SnapKV", "kernel"),
        ("H2O", "observed"),
        ("attention", "mix"),
        ("planted", "k"),
        ("ties", "levels"),
    } <= met
    assert len(met) == len(PARAMETERS) > 70


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: f"{p.where}-{p.name}")
def test_whatever_stands_for_the_number_is_taken(parameter):
    for value in _spellings(parameter.good):
        made = parameter.call(value)
        if parameter.kept:
            kept = getattr(made, parameter.name)
            assert type(kept) in (int, float), f"{value!r} is kept as {kept!r}"
            assert kept == pytest.approx(parameter.good, rel=1e-6)
    if parameter.optional:
        parameter.call(None)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: f"{p.where}-{p.name}")
def test_whatever_does_not_is_refused_by_name(parameter):
    bad = [True, np.True_, torch.tensor(True), "3", float("nan"), np.float64("nan"), 1j, [[1]], {}, object()]
    if isinstance(parameter.good, int) and parameter.name not in ("time_limit", "patience", "target"):
        bad += [1.5, 2.0, np.float32(2), torch.tensor(2.5), float("inf")]
    if not parameter.negative:
        bad += [-1, np.int64(-1), -(10**400)]
    if not parameter.optional:
        bad.append(None)
    for value in bad:
        with pytest.raises(GraceError, match=rf"(^|\W){parameter.name}\W") as caught:
            parameter.call(value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["workers", "retries"])
def test_numbers_of_a_sweep(name, tmp_path):
    sweep = _sweep(str(tmp_path))
    assert sweep(**{name: np.int64(1)}).total == 1
    for value in (True, 1.5, "3", float("nan"), -1, None):
        with pytest.raises(OptionError, match=rf"^{name}=.*: give an integer >= [01]\.$"):
            sweep(**{name: value})


def test_messages_say_the_range():
    for call, says in (
        (lambda: integer("a", -1), None),
        (lambda: integer("a", 9, at_least=1, at_most=4), "a=9: give an integer >= 1 and <= 4."),
        (lambda: integer("a", 0, at_least=1, optional=True), "a=0: give an integer >= 1, or None."),
        (lambda: integer("a", "x", hint="as in b"), "a='x': give an integer; as in b."),
        (lambda: number("a", 0, above=0), "a=0: give a finite number > 0."),
        (lambda: number("a", float("inf")), "a=inf: give a finite number."),
        (lambda: number("a", float("inf"), infinite=True), None),
        (lambda: number("a", 1, at_least=0, below=1), "a=1: give a number >= 0 and < 1."),
        (lambda: number("a", 10**400, infinite=True), "give a number."),
        (lambda: flag("a", 1), "a=1: give True or False."),
        (lambda: flag("a", np.True_), None),
        (lambda: choice("a", ["x"], ("x", "y")), r"a=['x']: give 'x' or 'y'."),
        (lambda: choice("a", "z", ("x",)), "a='z': give 'x'."),
    ):
        if says is None:
            call()
            continue
        with pytest.raises(OptionError) as caught:
            call()
        assert says in str(caught.value)


def test_long_values_are_cut():
    assert len(shown(np.zeros((50, 50)).tolist())) == 120
    assert shown(-(10**5000)) == "an int of 16610 bits"
    assert shown(torch.zeros(2, device="meta")).startswith("tensor")
    with pytest.raises(OptionError, match=r"seed=tensor\(.*: give an integer >= 0"):
        solve(W, 1, seed=torch.zeros((), dtype=torch.int64, device="meta"))
