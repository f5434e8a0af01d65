"""RULER's rules: scores of hand cases, what each task hides and asks, and that a smaller cache is really asked."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
import shutil
from collections import Counter

import pytest
import torch

from bench import report
from bench.arena.contenders import Subject, contenders
from bench.arena.prompt import Prompt
from bench.ruler import __main__ as ruler
from bench.ruler.cases import NOISE, TASKS, Case, make_case
from bench.ruler.measure import answer, measure, string_match_all
from bench.ruler.page import page
from grace_opt.hf import CalibratedBasis, attention_implementation
from grace_opt.hf.models import POCKET_BASIS, POCKET_FOLDER, load_pocket
from grace_opt.hf.tools.needle import make_prompt, question
from tests.test_bench_results import CLEAN

ESSAY = [f"Nothing of note happened on day {day} of the journey." for day in range(400)]
pocket = functools.cache(load_pocket)


def count(text):
    return len(re.findall(r"\w+|[^\w\s]", text))


def case_of(task, seed=0, tokens=1500):
    return make_case(task, tokens, count, ESSAY, seed)


# ---------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("said", "expected", "all_of"),
    [
        (" 1234567.", ["1234567"], 1),
        ("the values are 11, 22 and 44", ["11", "22", "33", "44"], 0.75),
        ("OSLO", ["oslo", "Bergen"], 0.5),
        ("12345678", ["2345"], 1),  # RULER looks for strings, not for words
        ("1 2", ["12"], 0),
        ("a\x07b", ["a\nb"], 1),  # control characters are line breaks
        ("", ["x"], 0),
    ],
)
def test_scores_by_hand(said, expected, all_of):
    assert string_match_all(said, expected) == all_of


# ----------------------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("task", TASKS)
def test_cases_are_as_long_as_fits_and_of_their_seed(task):
    case = case_of(task)
    used = count(case.context) + count(case.question) + case.new_tokens
    assert 1500 - 80 <= used <= 1500
    assert case == case_of(task)
    assert case.context != case_of(task, seed=1).context
    assert all(each in case.context for each in case.expected)
    assert not any(each in case.question for each in case.expected)
    with pytest.raises(SystemExit, match="give more with --tokens"):
        case_of(task, tokens=100)


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_needles_say_what_is_expected(task):
    """Read back from the text: what the sentences say of the keys in the question is what is expected."""
    case = case_of(task)
    values: dict[str, list[str]] = {}
    for key, value in re.findall(r"special magic \w+ for (\S+) is: (\S+)\.", case.context):
        values.setdefault(key, []).append(value)
    asked = re.findall(r"[\w-]+", re.search(r" for (.*?) mentioned", case.question)[1].replace(", and ", ", "))
    assert Counter(value for key in asked for value in values[key]) == Counter(case.expected)
    sizes = {"niah_multivalue": (1, 4), "niah_multiquery": (4, 4), "niah_multikey_1": (4, 1)}
    keys, expected = sizes.get(task, (1, 1))
    assert len(case.expected) == expected
    if not task.startswith("niah_multikey_") or task == "niah_multikey_1":
        assert len(values) == keys
    else:
        assert len(values) > 20  # the haystack is made of needles
    assert case.question.endswith(" is" if expected == 1 else " are")
    assert (NOISE in case.context) == (task == "niah_single_1")


def test_variables_are_one_chain_after_an_example():
    case = case_of("vt")
    example, context = case.context.split("\n\nMemorize")
    number = re.search(r"assigned the value (\d+)", case.question)[1]
    found = [name for name, value in re.findall(r"VAR (\w+) = (\d+)", context) if value == number]
    for name, of in re.findall(r"VAR (\w+) = VAR (\w+)", context):  # in the order of the text
        found += [name] * (of in found)
    assert tuple(found) == case.expected
    assert len(found) == 5
    assert len(re.findall(r"VAR \w{3} = ", example)) == 5
    assert re.search(r"they are: (\w{3} ?){5}$", example)


def test_common_words_are_the_most_common():
    listed = re.findall(r"\d+\. ([a-z]+)", case_of("cwe").context.rpartition("appear most often.\n")[2])
    counts = Counter(listed)
    expected = case_of("cwe").expected
    assert {counts[word] for word in expected} == {6}
    assert {counts[word] for word in set(counts) - set(expected)} == {1}
    longer = Counter(re.findall(r"\d+\. ([a-z]+)", case_of("cwe", tokens=4096).context.rpartition("often.\n")[2]))
    assert set(longer.values()) == {30, 3}


def test_frequent_words_come_after_the_noise():
    case = case_of("fwe")
    counts = Counter(case.context.partition("coded words. ")[2].split())
    assert tuple(word for word, _ in counts.most_common(4)) == ("...", *case.expected)
    shares = [number for _, number in counts.most_common(4)]
    assert shares[0] / shares[1] == pytest.approx(4, rel=0.05)  # Zipf with exponent 2
    assert shares[0] / shares[2] == pytest.approx(9, rel=0.1)


# --------------------------------------------------------------------------------------------------------- answers


def needle_case(seed=2):
    _, tokenizer = pocket()
    prompt = make_prompt(300, 0.5, count=lambda text: len(tokenizer(text).input_ids), seed=seed)
    return Case("niah", prompt.context, question(prompt.city), (prompt.answer,), 6)


def test_answers_come_from_the_cache_that_is_measured():
    """Dense and 3 bits find the password; a cache of another text, which has none for this city, does not."""
    model, tokenizer = pocket()
    subject = Subject(model, CalibratedBasis.load(POCKET_BASIS), POCKET_BASIS)
    three, case, other = contenders([])["bits-3"], needle_case(), needle_case(3)

    def another(subject, prompt):
        return three.make(subject, Prompt(model, tokenizer(other.context, return_tensors="pt").input_ids))

    some = {"bits-3": three, "another": dataclasses.replace(three, make=another)}
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        tokens, rows = measure(subject, tokenizer, some, case)
    assert tokens == len(tokenizer(case.context).input_ids)
    assert [row["score"] for row in rows.values()] == [1, 1, 0]
    assert rows["dense"]["answer"].split() == case.expected[0].split()  # nothing is said after that
    assert 2.9 < rows["bits-3"]["bits"] <= 3
    assert "bits" not in rows["dense"]


def test_answers_have_as_many_tokens_as_asked_for():
    model, tokenizer = pocket()
    case = Case("niah", "", "what is the password", ("nothing of the kind",), 5)
    from transformers import DynamicCache

    asked = tokenizer(case.question, return_tensors="pt").input_ids
    text = answer(model, tokenizer, DynamicCache(config=model.config), asked, case)
    assert len(tokenizer(text).input_ids) == 5


def value():
    """Two tasks of two cases; int4 loses one of them, and costs a third of the bytes."""
    size = {"bits": 5.0, "share": 0.33, "answer": ""}
    cases = [
        {"task": task, "tokens": 1000, "expected": ["x"],
         "rows": {"dense": {"score": dense, "answer": ""}, "int4": {"score": small, **size}}}
        for task, dense, small in (("vt", 1.0, 1.0), ("vt", 0.5, 0.0), ("cwe", 0.0, 0.0), ("cwe", 1.0, 1.0))
    ]  # fmt: skip
    settings = {"length": 2048, "tasks": ["vt", "cwe"], "each": 2, "methods": {"int4": "four bits"}}
    return {**settings, "models": {"M": {"cases": cases}}}


def test_the_page_has_means_and_differences(tmp_path):
    found = value()
    made = page(found)
    assert made.found == (
        "The lowest beside its dense cache is four bits on M: -12.5 points from 62.5. By cache: four bits -12.5 points "
        "at 33.0% of the bytes."
    )
    assert "| M | vt | 75 | 50 |" in made.tables
    assert "| M | cwe | 50 | 50 |" in made.tables
    assert any(row.startswith("| M | dense | 16.00 | 100.0% | 62.5 ") for row in made.tables)
    assert "nothing can be lost" not in made.sure
    found["models"]["N"] = copy.deepcopy(found["models"]["M"])
    for case in found["models"]["N"]["cases"]:
        case["rows"]["int4"]["share"] = 0.7
        case["rows"]["dense"]["score"] *= case["task"] != "cwe"  # which it cannot do
    made = page(found)
    assert "is four bits on M, the worst of 2 models: -12.5 points from 62.5." in made.found
    assert "four bits -12.5 to +12.5 points at 33.0% to 70.0% of the bytes" in made.found
    assert made.sure.startswith("4 cases of 1,000 tokens (mean) for each of 2 small models.")
    assert made.sure.endswith("Where the dense cache scores 0, nothing can be lost: cwe (N).")
    report.save(made, tmp_path / "page.png")


@pytest.mark.slow
def test_the_command_writes_a_page(tmp_path, monkeypatch):
    """Of two cases in the pocket model's own words; its basis is not made anew."""

    def shipped(model, tokenizer, path, source):
        path.parent.mkdir(parents=True)
        shutil.copy(POCKET_BASIS, path)
        return CalibratedBasis.load(path), 0.0

    monkeypatch.setattr(ruler, "calibrated", shipped)
    monkeypatch.setattr(
        ruler, "make_case", lambda *given: dataclasses.replace(needle_case(given[-1] + 2), task=given[0])
    )
    shutil.copytree(POCKET_FOLDER, tmp_path / "other")
    (tmp_path / "essay.txt").write_text("Nothing of note happened.")
    out = tmp_path / "ruler"
    given = ["--model", str(POCKET_FOLDER), str(tmp_path / "other"), "--text", str(tmp_path / "essay.txt")]
    given += ["--tasks", "niah_single_1"]
    given += ["--cases", "2", "--methods", "bits-3", "--runs", str(tmp_path / "runs")]
    ruler.main([*given, "--out", str(out), "--allow-dirty"])
    text, found = (tmp_path / "ruler.md").read_text(), json.loads((tmp_path / "ruler.json").read_text())
    assert list(found["models"]) == ["pocket", "other"]
    for label, of in found["models"].items():
        assert f"| {label} | niah_single_1 | 100 | 100 |" in text
        assert [case["rows"]["bits-3"]["score"] for case in of["cases"]] == [1, 1]
        assert of["provenance"].keys() >= CLEAN.keys()
        assert (tmp_path / "runs" / label / "basis.safetensors").exists()
    for words, message in (("a b", "too few to compress"), ("a b " * 600, "the context of pocket 1152")):
        monkeypatch.setattr(ruler, "make_case", lambda *given, words=words: Case("niah", words, "c", ("x",), 1))
        with pytest.raises(SystemExit, match=message):
            ruler.main([*given, "--out", str(out), "--allow-dirty"])
    with pytest.raises(SystemExit):
        ruler.main(["--methods", "nothing"])
