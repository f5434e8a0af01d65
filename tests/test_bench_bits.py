"""What a budget of bits costs, in small: passages, hidden words, caches filled without the model, page and errors."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("optimum.quanto")
pytest.importorskip("matplotlib")

import torch

from bench import bits, bits_page, caches, provenance
from bench.bits_variants import VARIANTS
from bench.material import read_text
from bench.passages import WORDS, cases, passages
from grace_opt.hf import CompressedCache, attention_implementation, calibrate, capture_attention
from grace_opt.hf.bases import importance
from grace_opt.hf.models import POCKET_FOLDER, load_pocket

CALIBRATION = "the quiet river runs past a late singer . the old baker took the bell near the mill . " * 8


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(tmp_path: Path, books: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, calibrated on little text."""

    def run(*changes: str) -> str:
        sizes = "--tokens 200 --later 12 --cases 2 --context 120 --rounds 1 --passages 2 --allow-dirty".split()
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        texts = ["--text", *map(str, books)]
        bits.main(["--model", str(POCKET_FOLDER), *texts, *sizes, *folders, *changes])
        return (tmp_path / "results" / "pocket.md").read_text()

    make = calibrate.basis

    def little(model: object, tokenizer: object, texts: Sequence[str] = (CALIBRATION,), **rest: object) -> object:
        return make(model, tokenizer, texts, **rest)

    monkeypatch.setattr(calibrate, "basis", little)
    return run


# The material


@pytest.mark.slow
def test_each_source_gives_a_passage_to_each_half_and_four_kinds_are_no_books(books: list[Path]) -> None:
    _, tokenizer = load_pocket()
    found = passages(books, tokenizer, 100)
    assert [one.half for one in found] == ["A", "B"] * 6
    assert len(bits.passages([*books, *books], tokenizer, 100)) >= 12
    for half in "AB":
        kinds = [one.kind for one in found if one.half == half]
        assert len([kind for kind in kinds if kind != "book"]) == 4
        assert set(kinds) == {"book", "Python", "JSON", "lines"}
    assert all(one.ids.shape == (1, 100) for one in found)
    again = passages(books, tokenizer, 100)
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(found, again, strict=True))
    _, text = read_text(books[0])
    whole = tokenizer(text, add_special_tokens=False).input_ids
    first, second = (one.ids[0].tolist() for one in found[:2])
    place = int(0.6 * len(whole))
    assert second == whole[place : place + 100]
    assert first == whole[int(0.3 * len(whole)) :][:100]
    with pytest.raises(SystemExit, match=r"'Rivers' has \d+ tokens, too few for two passages of 900"):
        passages(books, tokenizer, 900)


class Pieces:
    """A tokenizer that knows every word."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def __call__(
        self, text: str, add_special_tokens: bool = False, return_tensors: str | None = None
    ) -> SimpleNamespace:
        pieces = re.findall(r"\s*\w+|\s*[^\w\s]", text)
        self.known += [piece for piece in pieces if piece not in self.known]
        ids = [self.known.index(piece) for piece in pieces]
        return SimpleNamespace(input_ids=ids if return_tensors is None else torch.tensor([ids]))

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.known[number] for number in ids)


def test_hidden_words_stand_once_at_depths_over_all_of_the_text(books: list[Path]) -> None:
    tokenizer = Pieces()
    found = cases(books, tokenizer, 16, 200)
    for number, case in enumerate(found):
        said, asked, word = (tokenizer.decode(ids[0].tolist()) for ids in (case.context, case.question, case.answer))
        (sentence,) = re.findall(r"[.!?] (Remember this: the secret word of \w+ is \w+\.)", said)
        assert asked.endswith(f"Answer: T{sentence.split(': t')[1].split(word)[0]}")
        assert sentence.endswith(f"{word}.")
        assert word.strip() in WORDS
        assert said.index(sentence) / (len(said) - len(sentence)) == pytest.approx(case.depth, abs=0.01)
        assert 200 < case.context.shape[1] < 200 + bits.ASKED
        assert case.question.shape[1] + case.answer.shape[1] < bits.ASKED
        assert case.name == ("Rivers", "Mills")[number % 2]
    depths = sorted(case.depth for case in found)
    assert depths[0] < 0.15 < 0.85 < depths[-1] <= 1
    assert len({tuple(case.context[0].tolist()) for case in found}) == 16
    assert len(set(WORDS)) == len(WORDS)
    with pytest.raises(SystemExit, match="too few for --cases 3"):
        cases(books, tokenizer, 3, 5000)


# The caches


@pytest.fixture(scope="module")
def basis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, tokenizer = load_pocket()
    path = tmp_path_factory.mktemp("basis") / "pocket.safetensors"
    calibrate.basis(model, tokenizer, [CALIBRATION]).save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bits-2.25", "int4", "ratio-0.3"])
def test_a_filled_cache_is_that_of_a_prompt_that_is_read(name: str, books: list[Path], basis: Path) -> None:
    model, tokenizer = load_pocket()
    ids = passages(books, tokenizer, 200)[0].ids
    prompt, later = ids[:, :180], ids[:, 180:]
    settings = bits.settings_of(name, basis)
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        captured = capture_attention(model, prompt)
        read = CompressedCache(model, **settings)
        model(prompt, past_key_values=read)
        for _ in range(2):  # nothing that is captured is changed
            cache = bits.filled(CompressedCache(model, **settings), captured)
            for one, other in zip(cache.layers, read.layers, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one.full_width(), other.full_width(), strict=True))
            sizes = bits.sizes_of(bits.stored_bits(cache))
            logits = model(later, past_key_values=cache).logits
        assert torch.equal(logits, model(later, past_key_values=read).logits)
        dense = bits.dense_cache(model, captured)
        exact = model(ids).logits[:, 180:]
        assert torch.allclose(model(later, past_key_values=dense).logits, exact, atol=1e-4)
        assert not torch.allclose(logits, exact, atol=1e-4)
    old, all_tokens = 180 - bits.SINKS - bits.WINDOW, 180
    if name.startswith("bits"):
        assert 2.15 < sizes["bits"] <= 2.25
        old_share = sizes["bits"] / 16
    else:
        at_16 = {"int4": (5.3, 5.0), "ratio-0.3": (11.2, 16.0)}[name]  # places of groups and indices included
        assert sizes["key_bits"] == pytest.approx(at_16[0], abs=0.4)
        assert sizes["value_bits"] == pytest.approx(at_16[1], abs=0.4)
        old_share = sizes["bits"] / 16
        old -= old % 32 if name == "int4" else 0
    assert sizes["share"] == pytest.approx((all_tokens - old + old * old_share) / all_tokens, abs=0.02)


def test_a_basis_is_made_once_for_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_pocket()
    basis, made = calibrate.basis(model, tokenizer, [CALIBRATION], end_to_end=False), []
    monkeypatch.setattr(calibrate, "basis", lambda *given, **options: made.append(options) or basis)
    source = {"date": "2026-01-02", "commit": "0123456", "torch": "1", "transformers": "2"}
    file = tmp_path / "runs" / "basis.safetensors"
    for now, options, count in (
        (source, {}, 1),
        (source, {}, 1),  # read again
        ({**source, "commit": "0123456+"}, {}, 2),  # files have changed
        ({**source, "commit": "0123456+"}, {}, 3),
        (source, {}, 4),
        ({**source, "transformers": "3"}, {}, 5),
        ({**source, "transformers": "3"}, {"end_to_end": False}, 6),
    ):
        found, seconds = caches.calibrated(model, tokenizer, file, now, **options)
        assert len(made) == count
        assert seconds >= 0
        assert all(torch.equal(found.key_rates[layer], basis.key_rates[layer]) for layer in basis.layers)
    file.unlink()
    caches.calibrated(model, tokenizer, file, {**source, "transformers": "3"}, end_to_end=False)
    assert len(made) == 7


# The run


@pytest.mark.slow
def test_a_run_from_the_command_line(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    monkeypatch.setattr(importance, "LONG", 64)  # so that heads take turns in these short passages, too
    other = tmp_path / "other"
    shutil.copytree(POCKET_FOLDER, other)
    text = start("--brief", str(other))
    value = json.loads((tmp_path / "results" / "pocket.json").read_text())
    assert str(tmp_path) not in text + json.dumps(value)
    assert list(value["models"]) == [POCKET_FOLDER.name, "other"]
    whole, brief = value["models"].values()
    for passage in whole["passages"]:
        rows = passage["rows"]
        assert set(rows) == set(bits_page.ROWS)
        assert 0 < rows["bits-3"]["kl"] < rows["bits-1.5"]["kl"] < rows["bits-1"]["kl"]
        assert all(rows[name]["bits"] <= (bits_page.ROWS[name] or 16) for name in rows)
    kl = {name: statistics.fmean(each["rows"][name]["kl"] for each in whole["passages"]) for name in rows}
    assert kl["bits-3"] < kl["bits-1"]
    changed = {rows[name]["kl"] for name in ("bits-2.25", *VARIANTS)}
    assert len(changed) == len(VARIANTS) + 1
    for case in whole["cases"]:
        assert set(case["rows"]) == {"dense", *bits_page.RETRIEVAL}
        assert all(one["nll"] > 0 for one in case["rows"].values())
    assert set(whole["seconds"]) == {"dense", bits_page.TIMED}
    assert (brief["cases"], brief["seconds"]) == ([], {})
    for passage, of_other in zip(whole["passages"], brief["passages"], strict=True):  # the same weights
        names = set(bits_page.ROWS) - set(VARIANTS)
        assert of_other["rows"] == {name: row for name, row in passage["rows"].items() if name in names}
    assert f"is {POCKET_FOLDER.name}, with a KL of {kl['bits-2.25']:.4f} nats" in text
    for said in (
        f"| cache | {POCKET_FOLDER.name} | other |",
        "| pocket | `bits=2.25` | 2.2",
        "**Hidden words**",
        "| two classes | × ",
        "over dense",
    ):
        assert said in text
    assert "not to be reported" not in text
    bits.main(["--report-only", "--out", str(tmp_path / "results" / "pocket"), "--allow-dirty"])
    assert (tmp_path / "results" / "pocket.md").read_text() == text

    measured, rows = [], whole["passages"][0]["rows"]
    monkeypatch.setattr(bits, "measure_passage", lambda model, one, *rest: measured.append(one.half) or rows)
    start("--rounds", "0", "--cases", "0")
    assert measured == []  # taken from their records
    (tmp_path / "results" / "pocket.json").unlink()  # whose other model is of the other half
    half = start("--half", "A", "--rounds", "0", "--cases", "0")
    assert measured == ["A"] * 2
    assert "not to be reported" in half
    assert "**Hidden words**" not in half
    monkeypatch.setattr(provenance, "is_clean", lambda source: False)
    start("--half", "A", "--rounds", "0", "--cases", "0")
    assert measured == ["A"] * 4  # files may have changed without another commit


def test_what_cannot_be_measured_says_why(start, tmp_path: Path) -> None:
    for changes, message in (
        (["--later", "1"], "give at least 2, and fewer than the 200"),
        (["--text", str(tmp_path / "none.txt")], "no text at"),
        (["--tokens", "1200"], "the context of pocket has 1152"),
        (["--context", "1100"], "a question takes up to"),
    ):
        with pytest.raises(SystemExit, match=message):
            start(*changes)
