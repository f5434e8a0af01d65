"""Machine code that a wheel brings is used where it fits and is whole; otherwise everything is compiled here."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from bench import machine_code, wheel
from grace_opt import kernels
from grace_opt.kernels import operations
from grace_opt.kernels._shared import ahead, lanes
from grace_opt.kernels._shared.operation import Compiled
from grace_opt.kernels.cache.received.cpu import add_received_at as function
from tests import starter

ROOT = Path(__file__).resolve().parent.parent
LINUX = sys.platform == "linux" and platform.machine() == "x86_64"
#: The one that takes the least time to compile.
NAME = ahead.name_of(function.function)
HERE = ",".join(sorted(lanes.FEATURES))
#: Says where it came from, and whether it is right.
CALL = """
from grace_opt import kernels
from grace_opt.kernels.cache import received
from grace_opt.kernels._shared import compiling
from grace_opt.kernels.cache.received.cpu import add_received_at
compiling.SECONDS_BEFORE_LINE = 300.0
right = received.OPERATION.cpu.trial()
print(right, "brought" if add_received_at._compiled is None else "compiled", kernels.explain().machine_code or "-")
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where files of machine code are looked for: a folder without any."""
    monkeypatch.setattr(ahead, "FOLDER", tmp_path)
    ahead.file_for_this_processor.cache_clear()
    ahead._engine.cache_clear()
    yield tmp_path
    ahead.file_for_this_processor.cache_clear()
    ahead._engine.cache_clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One function's machine code for this processor."""
    found = tmp_path_factory.mktemp("made") / "here.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "FOLDER", found.parent)
        machine_code.write(found, HERE, frozenset([NAME]))
    return found


@pytest.fixture
def file(made: Path, folder: Path) -> Path:
    """The same where it is looked for."""
    return Path(shutil.copy(made, folder))


@pytest.mark.slow
def test_nothing_is_compiled_where_machine_code_fits(file: Path, tmp_path: Path) -> None:
    """In a process that begins without compiled loops, on a copy of the library; unless a switch is off."""
    skip = shutil.ignore_patterns("__pycache__", "pocket")
    shutil.copytree(ROOT / "grace_opt", tmp_path / "library" / "grace_opt", ignore=skip)
    (brought := tmp_path / "library" / "grace_opt" / "data" / "machine_code").mkdir()
    shutil.copy(file, brought)
    for settings, expected in (({}, "True brought here"), ({"GRACE_OPT_AHEAD": "0"}, "True compiled -")):
        loops = {"PYTHONPATH": str(tmp_path / "library"), "NUMBA_CACHE_DIR": str(tmp_path / "loops")}
        done = starter.python(CALL, os.environ | loops | settings, tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout.strip() == expected
        kept = [each.name for each in (tmp_path / "loops").rglob("*add_received_at*")]
        assert bool(kept) == bool(settings), "what was brought was compiled, or what was compiled is not kept"


def test_it_is_found_and_nothing_without_it(made: Path, folder: Path) -> None:
    assert ahead.address_of(NAME) == 0
    shutil.copy(made, folder)
    assert ahead.address_of(NAME) == 0, "it is looked for once"
    ahead.file_for_this_processor.cache_clear()
    assert ahead.address_of(NAME) != 0


def other(**said: str) -> Callable[[dict[str, str]], None]:
    return lambda found: found.update(said)


#: What a file's metadata may say besides.
OTHERS = {
    "other sources": other(sources="0123"),
    "nothing of it": lambda found: found.pop(NAME),
    "no symbol": other(**{NAME: "0123"}),
    "another system": other(triple="x86_64-apple-darwin"),
    "a richer processor": other(features=f"{HERE},+of-tomorrow"),
    "no features": lambda found: found.pop("features"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_fit_is_not_used(file: Path, name: str) -> None:
    with safe_open(file, "numpy") as opened:
        said = opened.metadata()
    OTHERS[name](said)
    save_file(load_file(file), file, said)
    assert ahead.address_of(NAME) == 0


def test_other_vectors_than_what_calls_the_loops_counts_on_are_not_used(file: Path) -> None:
    """A processor's widest are asked for by Python, too: code for narrower ones would get other tables."""
    poorer = HERE.replace("+avx512f", "-avx512f")
    if lanes.decided(frozenset(poorer.split(","))) == lanes.decided(lanes.FEATURES):
        pytest.skip("this processor has none that are wider")
    with safe_open(file, "numpy") as opened:
        said = opened.metadata() | {ahead.NEEDED: "+sse2"}
    save_file(load_file(file), file, said)
    assert ahead.address_of(NAME) == 0


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    """One bit in the middle of the code."""
    found = bytearray(file.read_bytes())
    found[-file.stat().st_size // 3] ^= 1
    file.write_bytes(found)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink])
@pytest.mark.parametrize("when", ["before", "after it was chosen"])
def test_a_damaged_file_is_not_used(file: Path, damage: Callable[[Path], None], when: str) -> None:
    if when != "before":
        assert ahead.file_for_this_processor() == file
    damage(file)
    assert ahead.address_of(NAME) == 0
    assert kernels.explain().machine_code == "", "doctor says what is not so"


def test_changed_sources_are_compiled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "stamp_of_sources", lambda: "another")
    assert ahead.address_of(NAME) == 0
    assert kernels.explain().machine_code == "", "doctor says what is not so"


@pytest.mark.parametrize(
    ("switches", "why"), [({}, "no machine code for this"), ({"GRACE_OPT_AHEAD": "0"}, "nothing: GRACE_OPT_AHEAD=0")]
)
def test_what_is_said_where_there_is_none(
    folder: Path, switch: Callable[..., None], switches: dict[str, str], why: str
) -> None:
    switch("GRACE_OPT_AHEAD", None)
    for name, value in switches.items():
        switch(name, value)
    assert why in kernels.explain().ahead


def test_the_richest_that_fits_is_taken(folder: Path) -> None:
    few = sorted({"+avx512f", "+gfni", "+avx512vbmi", "+sse2"} & lanes.FEATURES)
    for name, features in (("few", few), ("many", sorted(lanes.FEATURES)), ("too_many", [*few, "+of-tomorrow"])):
        said = {ahead.NEEDED: ",".join(features), **ahead.made_here()}
        save_file({}, folder / f"{name}.safetensors", said)
    found = ahead.file_for_this_processor()
    assert found is not None
    assert found.stem == "many"


def test_every_c_function_is_compiled_ahead() -> None:
    """Those of every operation, once each, and none for a GPU."""
    names = [name for name, _ in machine_code.c_functions()]
    assert len(names) == len(set(names))
    assert NAME in names
    compiled = {one.name for one in operations.OPERATIONS if isinstance(one.cpu, Compiled)}
    assert {
        name.removeprefix("grace_opt.kernels.").removeprefix("cache.").removeprefix("solve.").partition(".")[0]
        for name in names
    } == compiled


def test_kinds_differ_in_what_loops_ask_of_a_processor() -> None:
    """And each has what the one before has."""
    kinds = [frozenset(f"+{feature}" for feature in features.split()) for features in wheel.KINDS.values()]
    assert len({lanes.decided(features) for features in kinds}) == len(kinds)
    assert kinds == sorted(kinds, key=len)
    assert all(one < other for one, other in itertools.pairwise(kinds))


@pytest.mark.skipif(not LINUX, reason="machine code is made on Linux, on x86-64")
@pytest.mark.slow
def test_a_wheel_brings_machine_code(tmp_path: Path) -> None:
    made = wheel.build(tmp_path / "dist", ["x86-64-v3"], [NAME])
    assert made.name.endswith("-py3-none-any.whl")
    file = "grace_opt/data/machine_code/x86-64-v3.safetensors"
    with zipfile.ZipFile(made) as archive:
        assert archive.getinfo(file).external_attr >> 16 & 0o444 == 0o444
        archive.extract(file, tmp_path)
    with safe_open(tmp_path / file, "numpy") as opened:
        said = opened.metadata()
        assert set(opened.keys()) == {NAME}
        assert opened.get_tensor(NAME).tobytes()[:4] == b"\x7fELF"
    assert said[ahead.NEEDED].split(",") == [f"+{feature}" for feature in wheel.V3.split()]
    code = load_file(tmp_path / file)[NAME].tobytes()
    assert said[NAME] == ahead.said_of(said[NAME].split(" ")[0], code)
    assert ahead.made_here().items() <= said.items(), "it was made from other sources"


def test_other_sources_than_those_of_the_wheel_are_not_compiled(tmp_path: Path) -> None:
    """Where there are none, Python finds a library that is installed."""
    with pytest.raises(SystemExit, match="is elsewhere"):
        machine_code.write(tmp_path / "here.safetensors", HERE)
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(SystemExit, match=r"cannot write to .*: give another folder"):
            wheel.main(["-o", str(wrong)])
    with pytest.raises(SystemExit, match="planted"):
        wheel._run([sys.executable, "-c", "raise ValueError('planted')"], tmp_path)
