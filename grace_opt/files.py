"""Write a file aside and rename it, so that a reader never sees half of one and a failure leaves the old one in place.

Source: ours; `os.replace` is atomic within one folder on every system that Python runs on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name in the folder of `path`, with its suffix, to write to; renamed to `path` if the block succeeds.

    Parameters
    ----------
    path : path
        Where the file shall stand in the end.

    Yields
    ------
    Path
        What to write to. It is removed if the block raises.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with aside(path) as name:
    ...     _ = name.write_text("hello")
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('hello', 1)
    """
    path = Path(path)
    # Not by tempfile: its files are readable to their owner alone, and stay so when renamed.
    name = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield name
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
