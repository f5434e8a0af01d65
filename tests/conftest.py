"""One hypothesis profile for everyone: no deadlines (machines are shared), and the same draws on every run in CI.

Without a GPU, Triton's kernels run in its interpreter, which has to be said before anything imports triton. Where a
shell has started everything in the background, Ctrl-C is ignored, and so are the interrupts that tests send.

No test outlives a power cut, so nothing here waits for the disk; tests/test_files.py sees that the library does.

CPython 3.11 keeps the frames of Python functions in pieces of 16 KiB, and a function called again and again at the end
of one gets and returns memory at each call. That took up to three quarters of a test's time, depending on how deep its
calls are. So the whole session runs inside a function that asks for more room than one piece has.

The garbage collector never looks through what was imported before the tests began, which stays anyway and would take it
half a second each time, and starts less often than by default.
"""

import gc
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import children, quanto
from tests.clock import Clock, held

gc.disable()  # until the tests begin
gc.set_threshold(10_000, 20, 20)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("GRACE_OPT_PLAIN", "0")  # the loops themselves, also where nothing was compiled yet

os.fsync = lambda file: None

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def _with_room(call):
    return call()


#: Eight bytes each: CPython rounds up to a piece of 1 MiB, and nearly half of it is left for what is called.
_with_room.__code__ = _with_room.__code__.replace(co_stacksize=70_000)
_rooms = []


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if _rooms:
        return None
    _rooms.append(config)
    return _with_room(lambda: config.hook.pytest_cmdline_main(config=config))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str | None], None]]:
    """Set a switch of the environment, or remove it, where each is looked up once."""
    from grace_opt.kernels._shared.switches import is_off

    def turn(name: str, value: str | None) -> None:
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        is_off.cache_clear()

    yield turn
    is_off.cache_clear()


@pytest.fixture
def second_model(tmp_path: Path) -> Callable[[], Path]:
    """Copy the pocket model, and what a benchmark has recorded of it, under another name: so it is not measured."""

    def make() -> Path:
        from grace_opt.hf.models import POCKET_FOLDER

        for folder, other in ((POCKET_FOLDER, tmp_path), (tmp_path / "runs" / POCKET_FOLDER.name, tmp_path / "runs")):
            shutil.copytree(folder, other / "other")
        return tmp_path / "other"

    return make


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two texts in the words of the pocket model."""
    from grace_opt.hf.tools.needle import filler

    folder, found = tmp_path_factory.mktemp("books"), []
    for name in ("Rivers", "Mills"):
        rng = random.Random(name)
        path = folder / f"{name}.txt"
        path.write_text(f"Title: {name}\n\n" + " ".join(filler(rng) for _ in range(120)))
        found.append(path)
    return found


@pytest.fixture
def books_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated text is too short in the tokens of the pocket model."""
    from bench import passages

    whole = passages.sources
    monkeypatch.setattr(passages, "sources", lambda *given: [each for each in whole(*given) if each[0] == "book"])


@pytest.fixture(autouse=True)
def quanto_without_a_compiler() -> None:
    """Once more for each test, as a test may be the first to import quanto."""
    quanto.use_no_compiler()


@pytest.fixture(scope="session")
def forks() -> BaseContext:
    """Starts processes that have everything imported; `tests.children` says when not to use it."""
    return children.context()


@pytest.fixture
def forked_pools(forks: BaseContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of `grace_opt.sweep` begin as such forks."""
    monkeypatch.setattr("grace_opt.sweep.pool.CONTEXT", forks)


@pytest.fixture
def clock() -> Iterator[Clock]:
    """What `time.monotonic` says, in the hands of the test."""
    with held() as clock:
        yield clock


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices: threads only cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
