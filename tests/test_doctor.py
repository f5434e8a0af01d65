"""`kernels.explain` and ``grace-opt doctor``: what they say is so, and a loop that is wrong is found."""

import ast
import json
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from grace_opt import kernels
from grace_opt._util.cores import cores
from grace_opt.cli.app import app
from grace_opt.kernels import doctor
from grace_opt.kernels.operations import OPERATIONS

FOLDER = Path(kernels.__file__).parent
#: Of each operation, by name.
FOLDERS = {at.parent.name: at.parent for at in FOLDER.glob("**/__init__.py") if "OPERATION =" in at.read_text("utf-8")}
LOOPS = {operation.name: operation.cpu for operation in OPERATIONS if operation.cpu is not None}


def choice(found, operation, device="cpu"):
    (one,) = [c for c in found.choices if (c.operation, c.device) == (operation, device)]
    return one


def test_every_folder_is_an_operation_and_has_what_it_says():
    inner = [*FOLDER.glob("[!_]*/__init__.py"), *(FOLDER / "cache").glob("*/__init__.py")]
    inner += (FOLDER / "solve").glob("*/__init__.py")
    assert {at.parent.name for at in inner} - {"cache", "solve"} == {operation.name for operation in OPERATIONS}
    assert FOLDERS.keys() == {operation.name for operation in OPERATIONS}

    def there(operation, part):
        folder = FOLDERS[operation.name]
        return (folder / f"{part}.py").exists() or (folder / part / "__init__.py").exists()

    for operation in OPERATIONS:
        assert there(operation, "reference") == operation.reference, operation.name
        assert there(operation, "cpu") == (operation.cpu is not None), operation.name
        assert there(operation, "gpu") == bool(operation.gpu), operation.name


def imports():
    """Module -> modules of the kernels that it imports, at its top or in a function; trials are found by name."""
    files = {}
    for file in FOLDER.rglob("*.py"):
        parts = ("kernels", *file.relative_to(FOLDER).with_suffix("").parts)
        files[".".join(parts).removesuffix(".__init__")] = file
    graph = {}
    for name, file in files.items():
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        found = set()
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], node.module or ""])
                base = base.removesuffix(".")
                inner = {f"{base}.{alias.name}" for alias in node.names} & files.keys()
                found |= inner or ({base} & files.keys())
        if "trial_of(__name__" in text:
            found.add(f"{name}.trial")
        graph[name] = found
    return graph


@pytest.mark.slow
def test_no_kernel_imports_what_imports_it():
    """Neither at its top nor in a function."""
    graph = imports()
    greedy = "kernels.solve.greedy"
    assert {f"{greedy}.cpu", f"{greedy}.gpu", f"{greedy}.trial"} <= graph[greedy]
    assert f"{greedy}.reference" in graph[f"{greedy}.trial"]
    assert all(called <= graph.keys() for called in graph.values())
    TopologicalSorter(graph).prepare()


def test_switches_and_machines_are_named(switch):
    for name in ("GRACE_OPT_LLVM", "GRACE_OPT_OPENMP", "GRACE_OPT_TRITON", "GRACE_OPT_PLAIN", "GRACE_OPT_AHEAD"):
        switch(name, None)
    plain = kernels.explain()
    assert choice(plain, "decode").code == choice(plain, "greedy").code == "compiled loop"
    assert choice(plain, "interaction").code == "torch"
    assert plain.switched_off == ()
    assert plain.machine_code == "", "a checkout has no machine code"
    assert "compiled ahead of time: nothing" in str(plain)
    assert plain.threads == min(torch.get_num_threads(), cores())
    switch("GRACE_OPT_LLVM", "0")
    switch("GRACE_OPT_OPENMP", "0")
    off = kernels.explain()
    assert (choice(off, "decode").code, choice(off, "decode").why) == ("torch", "GRACE_OPT_LLVM=0")
    assert choice(off, "greedy").code == "compiled loop"
    assert "plain loops (GRACE_OPT_LLVM=0)" in choice(off, "greedy").why
    assert "LLVM" not in choice(off, "tabu").why
    assert off.switched_off == ("GRACE_OPT_LLVM=0", "GRACE_OPT_OPENMP=0")
    assert off.decoding_threads == "threads of ours (GRACE_OPT_OPENMP=0)"
    assert "switched off: GRACE_OPT_LLVM=0, GRACE_OPT_OPENMP=0" in str(off)
    assert off.to_dict()["choices"][0]["operation"] == OPERATIONS[0].name


@pytest.mark.skipif(torch.cuda.is_available(), reason="plays a GPU")
def test_a_gpu_is_explained(monkeypatch, switch):
    pytest.importorskip("triton")
    assert choice(kernels.explain(), "greedy", "cuda").why == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = kernels.explain()
    assert choice(found, "greedy", "cuda:0").code == "Triton kernel"
    assert choice(found, "objective", "cuda:0").code == "torch"
    assert choice(found, "tabu", "cuda:0").code == "compiled loop"
    switch("GRACE_OPT_TRITON", "0")
    assert choice(kernels.explain(), "greedy", "cuda:0").why == "GRACE_OPT_TRITON=0"
    switch("GRACE_OPT_TRITON", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GeForce GTX 1080")
    old = choice(kernels.explain(), "greedy", "cuda:0")
    assert (old.code, "capability 6.1" in old.why) == ("torch", True)


@pytest.mark.parametrize("name", LOOPS)
def test_compiled_loops_pass_their_trials(name):
    assert LOOPS[name].trial()


def after(change):
    """The function, whose result `change` spoils."""
    return lambda original: lambda *a, **kw: change(original(*a, **kw))


def spoil_mask(original):
    def call(*arguments):
        original(*arguments)
        arguments[3][:] = arguments[3][:, ::-1]

    return call


def spoil_values(original):
    def call(*arguments):
        original(*arguments)
        arguments[9][1] += 1.0

    return call


@pytest.mark.parametrize(
    ("name", "function", "spoil"),
    [
        ("greedy", "cpu.greedy_order", after(lambda found: (found[0].flip(-1), *found[1:]))),
        ("completion", "cpu.completions", after(lambda found: (found[0], found[1] + 1))),
        ("coding", "cpu.scaled_and_coded", after(lambda found: (found[0], [plane ^ 1 for plane in found[1]]))),
        ("exchange", "cpu.improve", spoil_mask),
        ("extremes", "cpu.extremes_of", after(lambda found: found._replace(asymmetry=found.asymmetry * 0))),
        ("objective", "cpu.sums", after(lambda found: found._replace(value=found.value * 1.0001))),
        ("indices", "cpu.indices_from_mask", after(lambda found: found.flip(-1))),
        ("heads", "host.code_heads", after(lambda found: [found[0]._replace(levels=found[0].levels ^ 1)])),
        ("received", "host.attention_received", after(lambda found: (found[0], found[1] * 1.001))),
        ("decode", "host.decode_attention", after(lambda found: found * 1.001)),
        ("enumeration", "cpu.advance", after(lambda found: (found[0] - 1, found[1]))),
        ("constrained", "cpu.enumeration.advance", after(lambda found: (found[0] - 1, found[1]))),
        ("constrained", "cpu.search.search", after(lambda found: (*found[:2], False))),
        ("relaxation", "cpu.minimise", after(lambda found: (found[0] + 100.0, *found[1:]))),
        ("shift", "cpu.ascend", after(lambda found: -found)),
        ("search", "cpu.search", after(lambda found: (found[0], found[1] - 1.0, *found[2:]))),
        ("steps", "cpu.within_budget", after(lambda found: (found[0] * 0, found[1]))),
        ("tabu", "cpu.run", spoil_values),
    ],
)
def test_trials_notice(name, function, spoil, monkeypatch):
    target = ".".join(("grace_opt.kernels", *FOLDERS[name].relative_to(FOLDER).parts, function))
    LOOPS[name].trial()  # imports it
    module, _, attribute = target.rpartition(".")
    original = getattr(__import__(module, fromlist=[attribute]), attribute)
    monkeypatch.setattr(target, spoil(original))
    assert not LOOPS[name].trial()


@pytest.fixture
def run(monkeypatch):
    """The command, which tries two loops."""
    found = kernels.explain()
    few = tuple(c for c in found.choices if c.operation in ("greedy", "extremes"))
    monkeypatch.setattr(doctor, "explain", lambda: type(found)(**{**vars(found), "choices": few}))
    monkeypatch.setattr("grace_opt.cli.app.console.width", 200)
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def test_doctor_says_what_runs(run):
    shown = run()
    assert shown.exit_code == 0, shown.output
    assert "all trials agree with their references" in shown.output
    assert f"torch {torch.__version__}" in shown.output
    found = json.loads(run("--quick", "--json").stdout)
    assert found["trials"] == found["problems"] == []
    assert found["threads"] == min(torch.get_num_threads(), cores())
    assert found["cache"]["path"]
    assert "SCS" in found["sdp_solvers"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [(lambda: False, "it differs from its reference"), (lambda: 1 // 0, "its trial failed (ZeroDivisionError")],
)
def test_doctor_finds_a_loop_that_is_wrong(run, monkeypatch, wrong, why):
    LOOPS["greedy"].trial()
    monkeypatch.setattr("grace_opt.kernels.solve.greedy.trial.cpu", wrong)
    shown = run()
    assert shown.exit_code == 1
    assert f"the compiled loop greedy on cpu (greedy): {why}" in shown.output
    assert "FAILED" in shown.output
    found = json.loads(run("--json").stdout)
    assert [trial["operation"] for trial in found["trials"] if trial["problem"]] == ["greedy"]
    assert run("--quick").exit_code == 0


def test_what_is_not_installed_is_named_with_the_way_to_get_it(run, monkeypatch):
    original = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == "transformers" else original(name))
    assert 'not installed: transformers, for pruning key caches: pip install ".[hf]"' in run("--quick").output
