"""Torch's default dtype and device are the user's: they change no bit of an answer and break no call with numpy."""

import ast
import hashlib
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import grace_opt
from grace_opt import MaskProvider, Problem, bounds, compare, solve, symmetrize
from grace_opt.attention import interaction_matrix, salient_channels
from grace_opt.bounds.fixing import fixed_vertices
from tests import children

ROOT = Path(grace_opt.__file__).parent
#: What makes a tensor on the default device, of integers or of the type of what it is given.
FACTORIES = {"as_tensor", "asarray", "arange", "randint", "randperm", "tril_indices", "triu_indices"}
#: And in the default dtype besides; of integers alone, ``full`` and ``tensor`` make integers, which is not seen here.
FLOAT_FACTORIES = {"zeros", "ones", "empty", "eye", "rand", "randn", "normal", "full", "tensor", "scalar_tensor"}
FLOAT_FACTORIES |= {"linspace", "logspace", "hann_window", "hamming_window"}
METHODS = sorted(spec.name for spec in grace_opt.methods())


def _digest(*values):
    """The bits of whatever numbers there are."""
    found = hashlib.sha256()
    for value in values:
        array = np.ascontiguousarray(value.numpy() if isinstance(value, torch.Tensor) else value)
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def _of(solution):
    names = [status.name for status in solution.status.flat]
    return _digest(solution.mask, solution.indices, solution.objective, solution.lower_bound, solution.gap) + str(names)


def answers(method):
    """Every kind of call with numpy arrays, as text that tells the bits."""
    G = np.random.default_rng(0).normal(size=(2, 12, 12))
    W = G @ G.transpose(0, 2, 1)
    found = []
    for given in (W, W.astype(np.float32), W.tolist()):
        found += [_of(solve(given, [5, 4], method, protected=[0], certify=c)) for c in (False, "fast", "tight")]
        found.append(_of(solve(given, 5, method, check=False)))
    return found


def others():
    """The calls that take no method."""
    rng = np.random.default_rng(0)
    G, q, k = rng.normal(size=(2, 12, 12)), rng.normal(size=(4, 8, 16)), rng.normal(size=(2, 32, 16))
    W, mask = G @ G.transpose(0, 2, 1), np.arange(32) > 2
    both = compare(W, 5, ["mies", "exhaustive"], certify=True).verify()
    shifts = [bounds.continuous_bound(Problem.of(W, 5).flatten(), shift=shift) for shift in ("scaled", "uniform")]
    fixing = fixed_vertices(W[0], 5)
    chosen = MaskProvider("grace", ratio=0.5)(torch.from_numpy(q), torch.from_numpy(k))
    return [
        _digest(both.best.objective, both.gaps("mies"), both.best.lower_bound),
        both.best.verify().method,
        _digest(*shifts),
        _digest(fixing.inside, fixing.outside),
        _of(solve(W, 5, "local_search", start=[0, 1, 2, 3, 4], time_limit=60.0)),
        _of(solve(W, 5, "tabu", start=[[True] * 5 + [False] * 7] * 2)),
        _digest(interaction_matrix(q, k, mask), interaction_matrix(q.tolist(), k.tolist(), mask.tolist())),
        _digest(salient_channels(k, attention_mask=mask.astype(float)), symmetrize(G)),
        _digest(chosen.pruned, chosen.kept_indices),
    ]


def everything():
    return {name: answers(name) for name in METHODS} | {"others": others()}


@pytest.fixture(scope="module")
def usual():
    return everything()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_bit(dtype, usual):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(before)
    assert [name for name in usual if found[name] != usual[name]] == []


def on_the_default_device(device):
    """`everything` in a fork that imports the library anew, with this default device from before."""
    for name in [name for name in sys.modules if name == __name__ or name.partition(".")[0] == "grace_opt"]:
        del sys.modules[name]
    torch.set_default_device(device)
    return importlib.import_module(__name__).everything()


@pytest.mark.slow
def test_numpy_input_needs_no_default_device(usual):
    found = children.run(on_the_default_device, "meta")
    assert [name for name in usual if found[name] != usual[name]] == []


def _factories(path):
    """Calls of ``torch.zeros`` and the like, with the names of the arguments that they give."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "torch"
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno}", node.func.attr, {keyword.arg for keyword in node.keywords}


@pytest.mark.slow
def test_every_tensor_is_made_with_device_and_dtype():
    missing = []
    for path in sorted([*ROOT.rglob("*.py"), *(ROOT / "solvers").rglob("*.py")]):  # a link is not followed
        for where, name, given in _factories(path):
            needs = {"device"} if name in FACTORIES else {"device", "dtype"} if name in FLOAT_FACTORIES else set()
            if not needs <= given:
                missing.append(f"{where}: torch.{name} without {', '.join(sorted(needs - given))}")
    assert missing == []
