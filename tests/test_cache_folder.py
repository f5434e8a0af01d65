"""Where compiled loops are kept: no folder, damaged files, a full disk, other versions, two processes at once.

Each case runs in a process of its own, on a copy of the library, as users have it. Where numba finds its folder is
tested in processes that start from nothing, what happens in the folder in forks that have torch and numba already. Root
may write anywhere: what can not be written to is a file where a folder should be.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import BaseContext
from pathlib import Path
from unittest import mock

import numba
import pytest

from grace_opt.kernels._shared import disk_cache as keeping
from tests import children, starter

ROOT = Path(__file__).resolve().parent.parent
#: Compiles one small loop, in less than a second.
EVALUATE = """
import numpy as np, torch, grace_opt
from grace_opt.kernels.solve.objective.cpu import objective
W = torch.ones(1200, 1200)
print("f =", float(grace_opt.objective.evaluate(W, torch.arange(1200) < 3)))
"""
ANSWER = "f = 9.0"
#: Compiles another.
LARGEST = """
from grace_opt.kernels.solve.extremes.cpu import largest_row
print("row", largest_row(np.diag(np.arange(3.0))))
"""
FOUND = "row [0. 0. 2.]"


#: Errors are empty on a busy machine, too, where compiling takes long enough for a line that says so.
PATIENT = "from grace_opt.kernels._shared import compiling\ncompiling.SECONDS_BEFORE_LINE = 300.0\n"
#: A function that C calls; the one that takes the least time to compile.
FOR_C = "from grace_opt.kernels.cache.received.cpu import add_received_at as for_c"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, without what numba and Python keep beside it."""
    work = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "grace_opt", work / "grace_opt", ignore=shutil.ignore_patterns("__pycache__", "data"))
    return work


@pytest.fixture
def locked(sources: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a user who may write nowhere."""
    shutil.copytree(sources / "grace_opt", tmp_path / "grace_opt")
    for folder in [tmp_path, *(at for at in (tmp_path / "grace_opt").rglob("*") if at.is_dir())]:
        (folder / "__pycache__").touch()
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "below")
    return environment(tmp_path) | dict.fromkeys(("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"), nowhere)


def environment(library: Path, **more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(library), "OMP_NUM_THREADS": "1"} | more


def python(code: str, env: dict[str, str]) -> tuple[str, str]:
    """What a new process writes."""
    done = starter.python(PATIENT + code, env, Path(env["PYTHONPATH"]))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def executed(code: str, env: dict[str, str]) -> tuple[str, str]:
    """The same in a fork (see `tests.children`), which imports this library and reads numba's settings anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "grace_opt"]:
        del sys.modules[name]
    sys.path.insert(0, env["PYTHONPATH"])
    os.environ.clear()
    os.environ.update(env)
    numba.config.reload_config()
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        exec(PATIENT + code, {"__name__": "__main__"})
    import grace_opt

    assert grace_opt.__file__.startswith(env["PYTHONPATH"])
    return out.getvalue(), err.getvalue()


def fork(code: str, env: dict[str, str]) -> tuple[str, str]:
    return children.run(executed, code, env)


@pytest.mark.slow
def test_without_a_folder_everything_works_and_says_so_once(locked: dict[str, str], tmp_path: Path) -> None:
    env = locked | {"NUMBA_CACHE_DIR": str(tmp_path / "file")}
    loops = sorted((ROOT / "grace_opt" / "kernels").glob("**/cpu.py")) + sorted(
        (ROOT / "grace_opt").glob("**/cpu/__init__.py")
    )
    modules = [".".join(loop.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for loop in loops]
    assert len(modules) > 15
    loading = f"import importlib\nfor m in {modules}: importlib.import_module(m)"
    out, err = python(f"{EVALUATE}\n{LARGEST}\n{FOR_C}\n{loading}\nassert for_c.address", env)
    assert ANSWER in out
    assert FOUND in out
    assert err.count("Warning") == 1, err
    assert f"NUMBA_CACHE_DIR={tmp_path / 'file'}" in err
    assert "set NUMBA_CACHE_DIR in the environment to a folder" in err


@pytest.mark.slow
def test_the_folder_is_the_one_that_numba_cache_dir_names(locked: dict[str, str], tmp_path: Path) -> None:
    env = locked | {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    assert python(EVALUATE, env)[1] == ""
    assert list((tmp_path / "kept").rglob("*.nbc"))
    out, err = python(f"{EVALUATE}\nprint(sum(objective.stats.cache_hits.values()))", env)
    assert (out.split()[-1], err) == ("1", "")


@pytest.fixture(scope="module")
def kept(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The loop of `EVALUATE`, on disk."""
    folder = tmp_path_factory.mktemp("kept")
    fork(EVALUATE, environment(sources, NUMBA_CACHE_DIR=str(folder)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_files_are_replaced(sources: Path, kept: Path, tmp_path: Path, suffix: str) -> None:
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.rglob(f"*objective*.{suffix}")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    out, err = fork(EVALUATE, environment(sources, NUMBA_CACHE_DIR=str(tmp_path)))
    assert ANSWER in out
    assert err == ""
    (again,) = tmp_path.rglob(f"*objective*.{suffix}")
    assert len(again.read_bytes()) > len(whole) // 2 + 1


@pytest.mark.slow
def test_a_folder_that_fills_up_or_turns_read_only(sources: Path, tmp_path: Path) -> None:
    """While the file is written: where one can be opened, writing to it may fail still."""
    full = """
import errno
from numba.core.caching import IndexDataCacheFile
def fails(*arguments):
    raise OSError(errno.ENOSPC, "planted")
IndexDataCacheFile._save_index = fails
"""
    out, err = fork(full + EVALUATE + LARGEST, environment(sources, NUMBA_CACHE_DIR=str(tmp_path)))
    assert ANSWER in out
    assert err.count("Warning") == 1, err
    assert "planted" in err
    assert str(tmp_path) in err


@pytest.mark.slow
def test_a_change_in_one_file_is_seen_by_the_loops_that_call_into_it(sources: Path, tmp_path: Path) -> None:
    """numba looks at a function's own file alone: loops of another version would go on being used after an update."""
    shutil.copytree(sources / "grace_opt", tmp_path / "grace_opt")
    code = f"import numpy as np\n{LARGEST}\nprint(sum(largest_row.stats.cache_hits.values()))"
    env = environment(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
    assert [fork(code, env)[0].split()[-1] for _ in range(2)] == ["0", "1"]
    called = tmp_path / "grace_opt" / "kernels" / "_shared" / "vectors.py"
    called.write_text(called.read_text(encoding="utf-8") + "\n# another version\n", encoding="utf-8")
    assert fork(code, env)[0].split()[-1] == "0"


@pytest.mark.slow
def test_two_processes_at_once_and_files_that_took_each_others_names(
    sources: Path, tmp_path: Path, forks: BaseContext
) -> None:
    env = environment(sources, NUMBA_CACHE_DIR=str(tmp_path))
    code = """
import sys, numpy as np
from grace_opt.kernels.solve.objective.cpu import objective
f, W, mask = np.zeros(1), np.arange(9).reshape(1, 3, 3), np.ones((1, 3), bool)
objective(W.astype(sys.argv[1]), mask, f, f.copy(), f.copy())
print(f[0])
"""
    codes = [code.replace("sys.argv[1]", repr(name)) for name in ("float32", "float64")]
    both = "\n".join(codes)
    with ProcessPoolExecutor(2, mp_context=forks) as pool:
        assert list(pool.map(executed, codes, [env, env])) == [("36.0\n", "")] * 2
    # What a race can leave: the index promises a loop for one type, the file holds the one for the other.
    fork(both, env)
    files = sorted(tmp_path.rglob("cpu.objective*.nbc"))
    files[-1].write_bytes(files[0].read_bytes())
    assert fork(both, env) == ("36.0\n36.0\n", "")


def test_every_loop_that_is_kept_is_kept_in_one_way() -> None:
    """numba's own ``cache=True`` fails where there is no folder."""
    for folder in ("grace_opt", "solvers"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"(njit|cfunc|jit)\([^)]*cache\s*=", text), file


def test_what_nobody_compiles_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that a wheel brings are never compiled, and need no folder."""
    monkeypatch.setattr(keeping, "_said", False)
    monkeypatch.setattr(keeping, "_Cache", mock.Mock(side_effect=RuntimeError))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = keeping.cache_of(test_what_nobody_compiles_warns_of_nothing)
        assert not cache.is_on_disk()
    with pytest.warns(RuntimeWarning, match="compiled loops cannot be kept: neither .* can be written to"):
        cache.save_overload(None, None)
