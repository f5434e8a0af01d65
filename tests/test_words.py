"""One word for one thing: the glossary is short, its words are used, and those that it replaced are gone."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import grace_opt

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
#: What the code said before it kept to the glossary, or to the field's words.
REPLACED = ("brought", "foretold", "heed", "heeds", "heeding", "lying", "minds", "plainly", "woven")


def pages() -> Iterator[Path]:
    """What is written by hand, and the rooms that keep to the glossary; no output of commands, no decisions of Git."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
    yield from (
        path for path in (ROOT / "docs").rglob("*.md") if not {"results", "_build", "gallery"} & set(path.parts)
    )
    yield from (path for folder in ("grace_opt", "solvers") for path in (ROOT / folder).rglob("*.py"))


def test_the_glossary_has_few_terms_and_each_is_used() -> None:
    rows = re.findall(r"^\| \*\*([^*]+)\*\* \| (.+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for row, _ in rows for term in row.split(", ")]
    assert 20 <= len(rows) <= 30
    assert len(set(terms)) == len(terms)
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "grace_opt").rglob("*.py")]
    texts += [path.read_text(encoding="utf-8") for path in pages() if path.suffix == ".md" and path != GLOSSARY]
    words = set(re.findall(r"[A-Za-z]+", " ".join(texts)))
    assert not [term for term in terms if not {term, f"{term}s"} & words and term not in " ".join(texts)]


@pytest.mark.parametrize("word", REPLACED)
def test_words_that_were_replaced_are_gone(word: str) -> None:
    found = re.compile(rf"\b{word}\b")
    assert not [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in pages()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if found.search(line)
    ]


def public() -> Iterator[tuple[str, object, str]]:
    """Names of `grace_opt` and of its command line, with their public members: where, what, its first paragraph."""
    rooms = [
        importlib.import_module(f"grace_opt.cli.{path.stem}") for path in (ROOT / "grace_opt" / "cli").glob("[a-z]*.py")
    ]
    own = [(room.__name__, name, value) for room in rooms for name, value in vars(room).items()]
    found = [(where, name, value) for where, name, value in own if getattr(value, "__module__", "") == where]
    found += [("grace_opt", name, getattr(grace_opt, name)) for name in grace_opt.__all__]
    for where, name, value in found:
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        members = vars(value).items() if inspect.isclass(value) else ()
        for inner, member in [("", value), *((f".{inner}", member) for inner, member in members if inner[0] != "_")]:
            bare = getattr(member, "__func__", member)
            if (
                inspect.isclass(bare)
                or inspect.isfunction(bare)
                or isinstance(bare, property | functools.cached_property)
            ):
                text = inspect.getdoc(bare) or ""
                yield f"{where}.{name}{inner}", bare, " ".join(text.split("\n\n")[0].split())


def test_docstrings_begin_with_a_verb_or_a_noun_phrase_and_end_with_a_stop() -> None:
    clauses = {"As", "How", "What", "When", "Where", "Whether", "Which", "Who", "Why"}
    nouns = {"A", "All", "An", "Every", "One", "The", "This"}  # in a function's place, which begins with a verb
    wrong = []
    for where, value, text in public():
        first = text.split(" ")[0].rstrip(",:;.")
        refused = clauses | nouns if inspect.isfunction(value) else clauses
        if first in refused or not text.endswith((".", ":")):
            wrong.append(f"{where}: {text}")
    assert not wrong
