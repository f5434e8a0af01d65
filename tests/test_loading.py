"""Ctrl-C while the command line is being imported ends it, and is left alone where others import the library."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")

#: Presses Ctrl-C as torch begins to be imported, and goes on as libraries do that lose it.
PRESSING = """
import importlib.abc, signal, sys
class Pressing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                print("lost", flush=True)
sys.meta_path.insert(0, Pressing())
"""
ENDING = """
import signal
from grace_opt.cli.app import run
try:
    run()
except SystemExit:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("loaded")
"""


def process(argv: list[str], program: str) -> subprocess.CompletedProcess[str]:
    begins = f"import sys\nsys.argv = {argv}\n"
    return subprocess.run(
        [sys.executable, "-c", begins + program], capture_output=True, text=True, timeout=120, check=False
    )


def test_ends_what_is_being_imported() -> None:
    done = process(["/usr/bin/grace-opt", "--version"], PRESSING + ENDING)
    assert done.returncode == -signal.SIGINT  # 130 in a shell
    assert done.stdout == done.stderr == ""


def test_raises_again_once_all_is_imported() -> None:
    done = process(["grace-opt", "--version"], ENDING)
    assert done.stdout.endswith("loaded\n"), done.stderr


def test_is_left_alone_in_processes_that_the_command_line_starts() -> None:
    """They have the same arguments."""
    program = """
import multiprocessing, signal
def begins():
    import grace_opt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=begins)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
    assert process(["grace-opt"], program).returncode == 0


def test_with_m() -> None:
    program = [sys.executable, "-m", "grace_opt", "--version"]
    assert subprocess.run(program, capture_output=True, timeout=120, check=False).returncode == 0


def test_is_left_alone_in_other_programs() -> None:
    program = "import signal, grace_opt\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert process(["server.py"], program).returncode == 0
    found = process(["server.py"], PRESSING + "import grace_opt")
    assert found.stdout == "lost\n"
