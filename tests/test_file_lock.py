"""A lock of which the file is removed: nobody enters with a file that is gone, and a lock that is held stays so."""

from __future__ import annotations

import os

import pytest

from grace_opt._util.file_lock import file_lock

fcntl = pytest.importorskip("fcntl", reason="no lock that processes share")


def held(path):
    """Hold the lock as another process does; return what to release it with, which removes the file first."""
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise

    def release():
        path.unlink()
        os.close(file)

    return release


def test_who_has_waited_for_a_file_that_is_gone_waits_for_the_next_one(tmp_path):
    path, others = tmp_path / ".lock", []
    others.append(held(path))

    def busy():
        """The other one ends, and the first time yet another one is faster."""
        others[-1]()
        if len(others) == 1:
            others.append(held(path))
        else:
            others.append(None)

    with file_lock(path, busy):
        assert others[2:] == [None]
        with pytest.raises(BlockingIOError):
            held(path)
    assert not path.exists()


def test_what_busy_raises_leaves_the_lock_to_its_holder(tmp_path):
    path = tmp_path / ".lock"
    release = held(path)

    def busy():
        raise TimeoutError

    with pytest.raises(TimeoutError), file_lock(path, busy):
        pytest.fail("entered")
    with pytest.raises(BlockingIOError):
        held(path)
    release()
    with file_lock(path, busy):
        assert path.exists()
