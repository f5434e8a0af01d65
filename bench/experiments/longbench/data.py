"""The examples of LongBench: read from files in its own format, or downloaded from the Hub first.

When: an experiment asks for examples. A data set is a folder with a TASK.jsonl for each task, one JSON object per line
with the fields of `FIELDS`. "hub" downloads LongBench's archive with huggingface_hub and unpacks the tasks into a cache
folder, each file written atomically, so that what was interrupted is no file; another machine may be given a
copy of that folder. "miniature" is made, see `miniature`. Source: LongBench (arXiv 2308.14508), zai-org/LongBench.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiments.longbench.tasks import TASKS
from grace_opt._util.files import atomic_write
from grace_opt._util.optional import require
from grace_opt.errors import GraceError

HUB, ARCHIVE = "zai-org/LongBench", "data.zip"
#: Of every line of a file; what else it holds is passed over.
FIELDS = ("input", "context", "answers", "length", "dataset", "language", "all_classes", "_id")
WRITE = "Give a folder with LongBench's own TASK.jsonl files, --set data=FOLDER; data=hub downloads them."


class DataError(GraceError, ValueError):
    """A data set is missing, incomplete, or not in LongBench's format."""


@dataclass(frozen=True)
class Example:
    """One question with its references; `id` is LongBench's ``_id``."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


def read_task(folder: str | os.PathLike[str], task: str) -> tuple[Example, ...]:
    """The examples of one task, in the order of its file.

    Raises
    ------
    DataError
        If the file is missing, cut short, empty, lacks a field, or has an example without references.
    """
    return _read(Path(folder) / f"{task}.jsonl")[0]


def digest(folder: str | os.PathLike[str], task: str) -> str:
    """16 hexadecimal digits of a task's file: results of another file are other results."""
    return _read(Path(folder) / f"{task}.jsonl")[1]


def cache_folder() -> Path:
    """Where "hub" unpacks to."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grace_opt" / "longbench"


def fetch(tasks: Sequence[str], folder: str | os.PathLike[str] | None = None) -> Path:
    """Download the tasks that are not there yet.

    Parameters
    ----------
    tasks : sequence of str
    folder : path, optional
        Where they go; default `cache_folder`.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    DataError
        If the Hub cannot be reached, the download is cut short or has no such task, or the disk is full. What was
        finished stays, and the next start goes on from there.
    """
    folder = cache_folder() if folder is None else Path(folder)
    missing = [task for task in tasks if not (folder / f"{task}.jsonl").is_file()]
    if not missing:
        return folder
    hub, errors = (require(f"huggingface_hub{part}", "hf", "data=hub") for part in ("", ".errors"))
    try:
        archive = hub.hf_hub_download(HUB, ARCHIVE, repo_type="dataset")
    except (OSError, ValueError, errors.HfHubHTTPError) as error:  # no network, no room; offline; refused
        raise DataError(
            f"cannot download {ARCHIVE} of {HUB}: {_first(error)} Start again when the Hub can be reached, or put "
            f"LongBench's files into a folder and give it with --set data=FOLDER."
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(archive) as opened:
            for task in missing:
                with (
                    opened.open(f"data/{task}.jsonl") as packed,
                    atomic_write(folder / f"{task}.jsonl") as name,
                    name.open("wb") as file,
                ):
                    shutil.copyfileobj(packed, file)
    except KeyError as error:
        raise DataError(f"{archive} lacks a task: {_first(error)} Was it replaced by another file?") from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"cannot unpack {archive}: {_first(error)} If it is damaged, delete it and start again; else make room."
        ) from None
    return folder


def _read(path: Path) -> tuple[tuple[Example, ...], str]:
    """Examples and digest of a file, which is read again only after a change."""
    try:
        state = path.stat()
        return _parsed(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        there = sorted(found.stem for found in path.parent.glob("*.jsonl") if found.stem in TASKS)
        said = f"{path.parent} holds {', '.join(there) or 'no task of LongBench'}"
        raise DataError(f"cannot read {path} ({error.strerror}); {said}. {WRITE}") from None


@functools.lru_cache(maxsize=2)
def _parsed(path: Path, changed: int, size: int) -> tuple[tuple[Example, ...], str]:
    content = path.read_bytes()
    try:
        lines = content.decode("utf-8").split("\n")  # not splitlines(): texts hold other separators of lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}). {WRITE}") from None
    examples = tuple(_example(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not examples:
        raise DataError(f"{path} is empty. {WRITE}")
    return examples, hashlib.sha256(content).hexdigest()[:16]


def _example(path: Path, number: int, line: str) -> Example:
    where = f"{path}, line {number}"
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: cut short or not JSON ({error}). Download or copy the file again.") from None
    absent = [name for name in FIELDS if not isinstance(fields, dict) or name not in fields]
    if absent:
        found = ", ".join(map(str, fields)) if isinstance(fields, dict) else type(fields).__name__
        raise DataError(f"{where}: no field {', '.join(absent)}; found {found}. LongBench has {', '.join(FIELDS)}.")
    for name in ("input", "context"):
        if not isinstance(fields[name], str):
            raise DataError(f"{where}: {name} is {type(fields[name]).__name__}, not text.")
    answers, classes = fields["answers"], fields["all_classes"] or []
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(
            f"{where}: answers={answers!r} is no list of references; without one an answer cannot be scored. Leave "
            f"the example out, or the task, with --set tasks=..."
        )
    if TASKS[path.stem].metric == "classification" and not set(answers) <= set(classes):
        raise DataError(f"{where}: all_classes={classes!r} lacks the reference {answers[0]!r}.")
    return Example(str(fields["_id"]), fields["context"], fields["input"], tuple(answers), tuple(classes))


def _first(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".") + "."
