"""Options as a whole, ``solve(W, k, TabuOptions(iterations=500))``, wherever a method is named."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

import grace_opt
from grace_opt import MaskProvider, SolverResult, compare, methods, registry, solve, solvers
from grace_opt.errors import OptionError, UnknownSolverError
from grace_opt.hf import CacheConfig
from grace_opt.registry import NoOptions
from grace_opt.solvers import BeamOptions, LocalSearchOptions, MiesOptions, TabuOptions

W = np.random.default_rng(0).normal(size=(12, 12))
W = W + W.T


@dataclasses.dataclass(frozen=True)
class OtherOptions:
    reverse: bool = False


@pytest.fixture
def other():
    @grace_opt.register_solver("other", options=OtherOptions, batched=True)
    def other(problem, options, run):
        """Take the first vertices, or the last."""
        place = torch.arange(problem.n)
        place = place.flip(0) if options.reverse else place
        return SolverResult((place < problem.k.unsqueeze(-1)).expand_as(problem.candidates))

    yield
    registry.unregister("other")


#: A new solver works without its class being listed; these have been listed and stay.
LISTED = "Beam BranchAndBound DropGreedy Exhaustive LocalSearch Mies Portfolio Sdp Tabu".split()


@pytest.mark.parametrize("name", [f"{method}Options" for method in LISTED])
def test_the_classes_of_our_methods_are_at_hand(name):
    assert getattr(solvers, name) in [spec.options for spec in methods()]
    assert name in solvers.__all__


@pytest.mark.parametrize("spec", [s for s in methods() if s.options is not NoOptions], ids=lambda spec: spec.name)
def test_every_class_knows_its_method(spec):
    kind = spec.options
    by_name, whole = solve(W[:6, :6], 3, spec.name), solve(W[:6, :6], 3, kind())
    assert (by_name.mask == whole.mask).all()
    assert (whole.method, whole.options) == (spec.name, by_name.options)


def test_values_reach_the_method():
    sol = solve(W, 6, TabuOptions(iterations=np.int64(37), start="think"))
    assert sol.stats["iterations"] == 37
    assert sol.options["start"] == "think"


def test_in_a_comparison():
    several = [TabuOptions(iterations=5), "mies", TabuOptions(iterations=50), BeamOptions(width=2)]
    found = compare(W, 6, several, options={"mies": {"path": True}})
    assert found.methods == ("tabu", "mies", "tabu", "beam")
    assert [s.options.get("iterations") for s in found] == [5, None, 50, None]
    table = str(found)
    assert "tabu iterations=5 " in table
    assert "tabu iterations=50 " in table
    assert "beam " in table
    assert "width" not in table
    with pytest.raises(OptionError, match=r"options= names 'tabu', which is not among the names"):
        compare(W, 6, [TabuOptions()], options={"tabu": {"iterations": 3}})
    with pytest.raises(OptionError, match=r"methods=TabuOptions\(.*give a list, \[TabuOptions\("):
        compare(W, 6, TabuOptions())


def test_in_a_provider():
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 40, 16)
    whole, named = MaskProvider(TabuOptions(iterations=30)), MaskProvider("tabu", iterations=30)
    assert (whole(q, k).pruned == named(q, k).pruned).all()
    assert whole.method == "tabu"
    assert repr(whole) == repr(named)


def test_in_a_configuration():
    config = CacheConfig(LocalSearchOptions(max_steps=np.int64(3)), sink_tokens=2)
    assert (config.channels.method, config.channels.options) == ("local_search", {"max_steps": 3})
    assert config == CacheConfig("local_search", options={"max_steps": 3}, sink_tokens=2)
    assert CacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert CacheConfig.of({"method": LocalSearchOptions(max_steps=3), "sink_tokens": 2}) == config
    for wrong in ({"options": {"max_steps": 4}}, {"path": True}):
        with pytest.raises(OptionError, match="LocalSearchOptions already"):
            CacheConfig.of({"method": LocalSearchOptions(), **wrong})


def test_by_somebody_else(other):
    assert solve(W, 2, OtherOptions(reverse=True)).indices.tolist() == [10, 11]
    assert compare(W, 2, [OtherOptions(), "other"]).methods == ("other", "other")
    assert CacheConfig(OtherOptions(reverse=True)).to_dict()["options"] == {"reverse": True}


def test_what_is_wrong_says_what_to_write(other):
    for method, error, says in (
        (TabuOptions, OptionError, r"TabuOptions is a class: write TabuOptions\(\.\.\.\)"),
        (7, OptionError, r"method=7: give a method's name, such as 'tabu', or its options"),
        (None, OptionError, "method=None: give a method's name"),
        (dict, OptionError, "give a method's name"),
        (NoOptions(), OptionError, "NoOptions belongs to 'random', 'think'; give one of these names"),
        (np.array(["tabu"]), OptionError, "give a method's name"),
        (methods()[0], OptionError, "describes a method; write its name, 'annealing'"),
    ):
        for call in (lambda m: solve(W, 2, m), lambda m: compare(W, 2, [m]), MaskProvider):
            with pytest.raises(error, match=says):
                call(method)
    with pytest.raises(OptionError, match=r"write TabuOptions\(iterations=\.\.\.\), or method='tabu' and all"):
        solve(W, 2, TabuOptions(), iterations=3)
    registry.unregister("other")
    with pytest.raises(UnknownSolverError, match=r"no method is registered with options=OtherOptions"):
        solve(W, 2, OtherOptions())


def test_only_what_was_changed_is_written_down():
    start = torch.tensor([0, 1])
    assert registry.changed(TabuOptions()) == {}
    assert registry.changed(TabuOptions(start=start, tenure=3)) == {"start": start, "tenure": 3}
    assert registry.changed(MiesOptions(path=True)) == {"path": True}


def test_an_option_of_other_methods_is_said_to_be_theirs():
    with pytest.raises(OptionError, match=r"'mies' has no option 'start'; it .*\. It is one of .*local_search.*tabu"):
        solve(W, 2, "mies", start="think")
    with pytest.raises(OptionError, match=r"'tabu' has no option 'iteration'; .* Did you mean 'iterations'\?"):
        solve(W, 2, "tabu", iteration=3)
