"""Processes that begin with torch imported, and nothing else: ``python -c`` without the two seconds that torch takes.

When: a test needs a process in which nothing of ours, nor numba, was imported, and `tests.children` would give one that
has everything: what an import loads, variables read at an import, folders of compiled loops, first use, the exit. The
interpreter ends such a process as it ends any. Not when the very start matters (encodings, options of Python), or what
torch itself reads when it is imported.

How: one process imports torch, and forks when it is told to. A message has three open files: what to run (JSON), and
where its output and errors go; the answers are the fork's number, and how it ended. The server ends with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_ANSWER = 8


@cache
def _server() -> socket.socket:
    ours, other = socket.socketpair()
    with other:
        # In a session of its own, as Ctrl-C is for the tests.
        command = [sys.executable, str(Path(__file__).resolve()), str(other.fileno())]
        process = subprocess.Popen(command, pass_fds=[other.fileno()], start_new_session=True)
    ours.settimeout(1200)  # a guard against hanging, however busy the machine is
    atexit.register(process.wait)
    atexit.register(ours.close)  # first, which ends the server
    return ours


def start(code: str, env: dict[str, str], out: int, err: int, cwd: Path | None = None) -> int:
    """Start a process that runs `code`, and return its number; `end` must be called before the next one starts."""
    asked = {"code": code, "env": env, "cwd": str(cwd or Path.cwd())}
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(asked).encode())
        file.flush()
        socket.send_fds(_server(), [b"."], [file.fileno(), out, err])
        return _answer()


def end() -> int:
    """Wait for the process that was started last, and return its exit code."""
    return _answer()


def _answer() -> int:
    found = b""
    while len(found) < _ANSWER:
        more = _server().recv(_ANSWER - len(found))
        assert more, "the server of processes is gone"
        found += more
    return int.from_bytes(found, "big", signed=True)


def python(code: str, env: dict[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What ``python -c`` writes, and how it ends."""
    if not hasattr(os, "fork"):
        command: Sequence[str] = [sys.executable, "-c", code]
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=1200)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        number = start(code, env, out.fileno(), err.fileno(), cwd)
        try:
            ended = end()
        except TimeoutError:
            os.kill(number, signal.SIGKILL)
            end()
            raise
        return subprocess.CompletedProcess(["python", "-c", code], ended, _read(out), _read(err))


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _serve(connection: socket.socket) -> str:
    """Fork whenever a message comes; return, in each fork, the code that it is to run."""
    while True:
        message, files, *_ = socket.recv_fds(connection, 1, 3)
        if not message:
            sys.exit()
        number = os.fork()
        if not number:
            connection.close()
            return _become(*files)
        for file in files:
            os.close(file)
        connection.sendall(number.to_bytes(_ANSWER, "big"))
        ended = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        connection.sendall(ended.to_bytes(_ANSWER, "big", signed=True))


def _become(asked: int, out: int, err: int) -> str:
    """Be as if this process had been started with these files and this environment."""
    with open(asked, "rb") as file:
        file.seek(0)
        given: dict[str, Any] = json.load(file)
    for name, place, opened, buffering in (("stdout", 1, out, -1), ("stderr", 2, err, 1)):
        os.dup2(opened, place)
        os.close(opened)
        old = getattr(sys, name)  # which believes that it can seek, if the tests' own file can
        new = os.fdopen(place, "w", buffering, encoding=old.encoding, errors=old.errors, closefd=False)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(given["env"])
    os.chdir(given["cwd"])
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv, sys.path = ["-c"], ["", *paths, *_PATH]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    return str(given["code"])


if __name__ == "__main__":
    import gc

    _outer = {*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), sys.path[0]}
    _PATH = [path for path in sys.path if path not in _outer]
    import torch

    gc.freeze()
    exec(compile(_serve(socket.socket(fileno=int(sys.argv[1]))), "<string>", "exec"), {"__name__": "__main__"})
