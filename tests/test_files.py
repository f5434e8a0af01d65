"""Whatever is written is there as a whole or not at all, where `open` would have put it, and by one writer."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import grace_opt
from grace_opt import ChannelMask, GraceError, instances
from grace_opt._util import files
from grace_opt.errors import FileError, MaskError, ProblemError
from grace_opt.sweep import Cell, Record, SweepError, write_cell

ROOT = Path(__file__).resolve().parent.parent
W = np.arange(3600.0).reshape(60, 60)
W = W + W.T

#: Every kind of file, by its suffix: how to write it, and its error. Each is larger than the limits below.
WRITERS: dict[str, tuple[Callable[[Path], Any], type[GraceError]]] = {
    **{
        suffix: (lambda path: instances.write(path, W), ProblemError)
        for suffix in (".npy", ".npz", ".safetensors", ".csv", ".mtx")
    },
    ".dat": (lambda path: instances.write(path, np.eye(60) - 1, 3), ProblemError),
    ".txt": (lambda path: instances.write(path, -W * (1 - np.eye(60)), 3), ProblemError),
    ".clq": (lambda path: instances.write(path, np.zeros((60, 60), int), None), ProblemError),
    ".col": (lambda path: instances.write(path, np.zeros((60, 60), int), None), ProblemError),
    ".mask": (lambda path: ChannelMask(torch.ones(9, 9, 64, dtype=torch.bool)).save(path), MaskError),
    ".json": (lambda path: grace_opt.compare(W, 40, ["think", "mies"]).to_json(path), FileError),
    "one.json": (lambda path: grace_opt.solve(W, 40, "mies").to_json(path), FileError),
}


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """What is written to a file beyond this many bytes fails, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_failing_write_leaves_what_was_there(suffix: str, old: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    if old is not None:
        path.write_bytes(old)
    write, error = WRITERS[suffix]
    with no_room(256), pytest.raises(error, match=f"cannot write .*x{suffix}: .*Make room"):
        write(path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if old is None else [old])
    write(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_size > 256


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB with 2 KiB left, where this user may make one."""
    folder = tmp_path / "small"
    folder.mkdir()
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("this user may not mount a file system")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (folder / "filler").write_bytes(bytes(120 * 1024))
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_full_disk(suffix: str, full: Path) -> None:
    with (full / "filler").open("ab") as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(512))
    write, error = WRITERS[suffix]
    with pytest.raises(error, match=r"cannot write .*No space left.*Make room"):
        write(full / f"x{suffix}")
    assert [p.name for p in full.iterdir()] == ["filler"]
    (full / "filler").unlink()
    write(full / f"x{suffix}")
    assert (full / f"x{suffix}").stat().st_size > 256


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_read_only_disk(suffix: str, full: Path) -> None:
    (full / f"x{suffix}").write_bytes(b"old")
    subprocess.run(["mount", "-o", "remount,ro", full], check=True)
    write, error = WRITERS[suffix]
    for name in (f"x{suffix}", f"y{suffix}"):
        with pytest.raises(error, match=r"cannot write .*Read-only file system\. Choose another place\.$"):
            write(full / name)
    assert sorted(p.name for p in full.iterdir()) == ["filler", f"x{suffix}"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_disk_that_refuses_to_clean_up_as_well(
    code: int, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told is what was refused first, and advice that can help."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    def refuse_to_clean(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EBUSY, "the clean-up failed")

    monkeypatch.setattr(os, step, refuse)
    monkeypatch.setattr(Path, "unlink", refuse_to_clean)
    with pytest.raises(FileError) as caught:
        files.write_file(tmp_path / "x", "new")
    told = f"cannot write {tmp_path / 'x'}: {os.strerror(code)}. "
    help_ = "Make room, or choose another place." if code == errno.ENOSPC else "Choose another place."
    assert str(caught.value) == told + help_


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, FileError])
def test_new_folders_go_where_nothing_comes_of_them(error: type[BaseException], tmp_path: Path) -> None:
    def fail(folder: Path, file: Path, error: type[BaseException], leave: bool = False) -> None:
        with files.new_folder(folder):
            file.write_text("something")
            if not leave:
                file.unlink()
            raise error("something failed")

    (tmp_path / "old").mkdir()
    for name, left in (("a/b/c", ["old"]), ("old", ["old"]), ("old/new", ["old"])):
        with pytest.raises(error):
            fail(tmp_path / name, tmp_path / name / "x", error)
        assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == left
    with pytest.raises(error):
        fail(tmp_path / "a" / "b", tmp_path / "a" / "x", error, leave=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "old", "x"]


@pytest.mark.parametrize("name", ["file", "file/x", "x\0", "a" * 300, "loop/x"])
def test_folders_that_cannot_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FileError, match=r"^cannot make the folder [^\[]*\.$"), files.new_folder(tmp_path / name):
        pytest.fail("there is no such folder")
    with pytest.raises(FileError, match="file: it is a file"), files.new_folder(tmp_path / "file"):
        pytest.fail("a file is no folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop"]


@pytest.mark.parametrize("suffix", WRITERS)
def test_special_files_are_never_replaced(suffix: str, tmp_path: Path) -> None:
    write, error = WRITERS[suffix]
    targets: list[Path] = [tmp_path]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "link").symlink_to("/dev/null")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(tmp_path / "socket"))  # such names are short
        targets += [Path("/dev/null"), Path("/dev/full"), *(tmp_path / name for name in ("fifo", "link", "socket"))]
    for target in targets:
        before = os.lstat(target)
        named = tmp_path / f"to{len(os.fspath(target))}{suffix}"  # instances are told by their suffix
        named.symlink_to(target)
        with pytest.raises(error, match="which a file cannot replace"):
            write(named)
        assert stat.S_IFMT(os.lstat(target).st_mode) == stat.S_IFMT(before.st_mode)
        assert os.lstat(target).st_ino == before.st_ino
        named.unlink()
    assert {p.name for p in tmp_path.iterdir()} <= {"fifo", "link", "socket"}


def write_opened(name: str, output: Path) -> None:
    """Write to `name`, with `output` for what a shell has opened as the first stream."""
    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), 1)
    os.write(1, b"before\n")
    with pytest.raises(FileError, match="a file cannot replace"):
        files.write_file(name, "x")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_what_the_shell_has_opened_is_not_replaced(name: str, tmp_path: Path, forks: BaseContext) -> None:
    if not os.path.exists(name):
        pytest.skip("there is none here")
    process = forks.Process(target=write_opened, args=(name, tmp_path / "out"))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "out").read_text() == "before\n"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_are_those_of_open(suffix: str, umask: int, tmp_path: Path) -> None:
    write, _ = WRITERS[suffix]
    path, kept = tmp_path / f"x{suffix}", tmp_path / f"kept{suffix}"
    kept.write_bytes(b"")
    kept.chmod(0o640)
    before = os.umask(umask)
    try:
        write(path)
        write(kept)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640


def test_links_are_followed_as_by_open(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    link = tmp_path / "near" / "link.json"
    link.symlink_to(Path("..") / "far" / "file.json")
    for text in ("made", "made again"):  # first of all where the link dangles
        files.write_file(link, text)
        assert link.is_symlink()
        assert (tmp_path / "far" / "file.json").read_text() == text
    assert len(list(tmp_path.rglob("*"))) == 4
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(FileError, match=r"cannot write .*loop"):
        files.write_file(loop, "x")
    assert loop.is_symlink()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/x.json", "there is no folder .*none"),
        ("~nobody/x.json", "there is no folder .*expanduser"),
        ("file/x.json", "cannot write file/x.json"),
        ("a" * 300 + ".json", "name too long"),
        ("x\0.json", "null character"),
        ("", "cannot write"),
        (".", "a folder"),
    ],
)
def test_targets_that_are_none(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=f"(?i){message}"):
        files.write_file(name, "x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(grace_opt.errors.OptionError, match="path=3"):
        files.write_file(3, "x")  # type: ignore[arg-type]


def test_names_as_long_as_the_system_has_them(tmp_path: Path) -> None:
    for name in ("a" * 250 + ".json", "a." + "b" * 253, "λ" * 127):
        files.write_file(tmp_path / name, "x")
        assert (tmp_path / name).read_text() == "x"
    assert len(list(tmp_path.iterdir())) == 3


def test_what_may_not_be_written_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    path.chmod(0o444)
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(0o555)
    try:
        if os.access(path, os.W_OK):
            pytest.skip("this user may write everywhere")
        for target in (path, tmp_path / "closed" / "x.json"):
            with pytest.raises(FileError, match="Permission denied"):
                files.write_file(target, "new")
        assert path.read_text() == "old"
    finally:
        (tmp_path / "closed").chmod(0o755)


@pytest.mark.parametrize("name", ["open", "fsync", "replace", "chmod"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_interrupts_and_errors_at_every_step(
    name: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of the system fails, or is hit by Ctrl-C after it is done: the old file stays, and no other."""
    path = tmp_path / "x"
    path.write_text("old")
    real = getattr(os, name)

    def hit(*arguments: Any, **options: Any) -> Any:
        if name != "replace":  # after that one, the new file is there
            real(*arguments, **options)
        raise error

    monkeypatch.setattr(os, name, hit)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FileError):
        files.write_file(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def write_on(path: Path) -> None:
    """Write a file again and again, until this process is killed."""
    at = 0
    while True:
        files.write_file(path, f"{at}\n" * 50_000)
        at += 1


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills")
@pytest.mark.slow
def test_a_kill_leaves_one_file_or_the_other(tmp_path: Path, forks: BaseContext) -> None:
    path = tmp_path / "x"
    for delay in (0.0, 0.003, 0.02):
        writer = forks.Process(target=write_on, args=(path,))
        writer.start()
        while not path.exists():
            assert writer.is_alive(), "the writer ended before it wrote"
            time.sleep(0.0005)
        writer.join(delay)
        assert writer.is_alive()
        writer.kill()
        writer.join()
        lines = path.read_text().splitlines()
        assert (len(lines), len(set(lines))) == (50_000, 1)


def test_sweep_records_fail_as_sweeps_do(tmp_path: Path) -> None:
    record = Record(Cell("full", {"n": 1}), [{"text": "x" * 500}], 0.1, {})
    with no_room(256), pytest.raises(SweepError, match=r"cannot write .*Make room"):
        write_cell(tmp_path, record)
    assert not list((tmp_path / "full" / "cells").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match="cannot make"):
        write_cell(tmp_path / "file", record)


#: What puts bytes into a file, or moves one; of `replace`, `rename` and `save` there are others, hence the owners.
WRITES = {"write_text", "write_bytes", "savetxt", "save_file", "mmwrite", "tofile", "fdopen", "mkstemp"}
OWNED = {
    "os": {"open", "replace", "rename", "renames", "link", "symlink"},
    "torch": {"save"},
    "shutil": {"move", "copy"},
}
#: What writes to a file by its name, or to memory: the first argument says which.
EITHER = {"savez", "savez_compressed", "savefig", "print_png", "print_svg", "to_parquet", "to_csv", "to_json", "save"}
MEMORY = {"buffer", "picture"}
#: What holds no result: an empty file that is locked, the null device, and what worker processes print.
HOLD_NOTHING = {
    ("grace_opt/_util/file_lock.py", "open"),
    ("grace_opt/cli/app.py", "open"),
    ("grace_opt/sweep/pool.py", "open"),
}


def writes(call: ast.Call) -> str | None:
    """The name of a function that is called here and writes to a file by its name."""
    called = call.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    owner = getattr(called.value, "id", "") if isinstance(called, ast.Attribute) else ""
    texts = [a.value for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)]
    opens = name == "open" and any(isinstance(t, str) and re.fullmatch("[rwaxbt+]*[wax+][bt+]*", t) for t in texts)
    either = name in EITHER and (name != "save" or owner in ("np", "numpy")) and bool(call.args)
    named = either and getattr(call.args[0], "id", "") not in MEMORY
    return name if name in WRITES or name in OWNED.get(owner, ()) or opens or named else None


@pytest.mark.slow
def test_one_writer() -> None:
    """No module but files.py opens a file for writing, renames one, or has a library do it by its name."""
    found = set()
    for path in [*(ROOT / "grace_opt").rglob("*.py"), *(ROOT / "solvers").rglob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        found |= {(path.relative_to(ROOT).as_posix(), name) for call in calls if (name := writes(call))}
    assert {place for place in found if place[0] != "grace_opt/_util/files.py"} == HOLD_NOTHING
    assert {
        ("grace_opt/_util/files.py", "replace"),
        ("grace_opt/_util/files.py", "open"),
    } <= found  # it is seen where it is


@pytest.mark.parametrize(
    "text",
    [
        *("open(p, 'w')", "p.open(mode='ab')", "np.save(p, W)", "os.replace(a, b)", "p.write_text('')"),
        *("f.savefig(p)", "c.print_png(p)"),
    ],
)
def test_another_writer_would_be_seen(text: str) -> None:
    assert writes(ast.parse(text, mode="eval").body)  # type: ignore[arg-type]


def test_what_was_read_from_a_mask_s_file_does_not_change_with_it(tmp_path: Path) -> None:
    """Tensors were the file itself: written over, they changed, and cut short it ended the process."""
    path = tmp_path / "m.safetensors"
    made = ChannelMask((torch.arange(20_000) % 3 == 0).view(100, 2, 100))
    made.save(path)
    mask = ChannelMask.load(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\1" * (size - 1000))
    assert torch.equal(mask.pruned, made.pruned)
    path.write_bytes(b"")
    assert torch.equal(mask.pruned, made.pruned)
