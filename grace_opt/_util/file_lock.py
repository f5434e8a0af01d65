"""A lock that processes share: a file that one of them holds, and that the system releases when the process ends.

When: two processes would do the same long work, or write into the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import FileError, GraceError
from .files import os_error_advice


@contextmanager
def file_lock(path: Path, busy: Callable[[], None], error: type[GraceError] = FileError) -> Iterator[None]:
    """Hold a lock within the block; the file is removed afterwards.

    Without locks, as on Windows and on some file systems of networks, the block is entered in any case.

    Parameters
    ----------
    path : Path
        The file, in a folder that exists.
    busy : callable
        Called if somebody else holds the lock; it may raise. If it returns, the lock is waited for.
    error : type
        What to raise where the system refuses to make the file.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / ".lock"
    >>> with file_lock(path, lambda: print("busy")):
    ...     path.exists()
    True
    >>> path.exists()
    False
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    while True:
        try:
            file = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as failure:
            raise error(f"cannot write to {path.parent}: {os_error_advice(failure)}") from None
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy()
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass  # a file system without locks
            if not _is_still_there(path, file):  # who held it has removed it
                continue
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()
            return
        finally:
            os.close(file)


def _is_still_there(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False
