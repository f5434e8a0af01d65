"""Needle and LongBench: scores worked out by hand, prompts cut right, bad data named, and both experiments run."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from bench.experiments import niah
from bench.experiments.longbench import data, llama, mistral, printed
from bench.experiments.longbench.generate import Setting, answer, generation, label, load, middle_truncated
from bench.experiments.longbench.metrics import (
    classification,
    count,
    edit_similarity,
    normalise,
    qa_f1,
    retrieval,
    rouge_1,
    rouge_l,
    score,
)
from bench.experiments.longbench.miniature import example, write_miniature
from bench.experiments.longbench.tasks import TASKS
from bench.experiments.registry import Experiment, Settings
from grace_opt.errors import GraceError, OptionError
from grace_opt.hf import H2O, SnapKV
from grace_opt.sweep import Cell, Description, make_report, run_sweep, write_description

EXPERIMENTS = [niah.EXPERIMENT, llama.EXPERIMENT, mistral.EXPERIMENT]


# Metrics. Expected values are fractions worked out by hand.


@pytest.mark.parametrize(
    ("ours", "reference", "expected"),
    [
        ("The cat sat.", "cat sat", 1.0),  # article and full stop do not count
        ("a black cat", "the cat sat here", 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)),  # one common of 2 and of 3
        ("cat cat cat", "cat", 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # a bag: the second "cat" finds no partner
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "an", 0.0),  # nothing is left of either
        ("U.S.-based", "us based", 0.0),  # punctuation goes without a space: "usbased"
    ],
)
def test_qa_f1(ours: str, reference: str, expected: float) -> None:
    assert qa_f1(ours, reference) == pytest.approx(expected)


def test_normalise_takes_whole_articles_only() -> None:
    assert normalise(" An  apple, THE theatre; a-b ") == "apple theatre ab"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "reference", "expected"),
    [
        ("a b c d", "a c b d", 3 / 4),  # a b d: three of four on both sides
        ("red fox", "The red fox ran.", 2 * 1 * (2 / 4) / (1 + 2 / 4)),
        ("fox red", "red fox", 1 / 2),  # the order counts
        ("", "red fox", 0.0),
    ],
)
def test_rouge_l(ours: str, reference: str, expected: float) -> None:
    assert rouge_l(ours, reference) == pytest.approx(expected)


def test_rouge_1_is_a_bag_of_words() -> None:
    assert rouge_1("fox red", "Red fox!") == 1.0
    assert rouge_1("red fox", "The password of Rome is red fox.") == pytest.approx(2 * (2 / 7) / (1 + 2 / 7))
    assert rouge_1("", "red fox") == 0.0


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ("Description of a thing", 1.0),
        ("Number or Description of a thing", 0.5),
        ("Description", 0.0),  # part of the right name: neither right nor counted against it
        ("Number", 0.0),
        ("", 0.0),
    ],
)
def test_classification(ours: str, expected: float) -> None:
    classes = ["Number", "Description", "Description of a thing"]
    assert classification(ours, "Description of a thing", classes) == expected


@pytest.mark.parametrize(
    ("ours", "expected"),
    [("Paragraph 12", 1.0), ("12 or 13 or 14", 1 / 3), ("Paragraph 1", 0.0), ("none", 0.0), ("", 0.0)],
)
def test_retrieval(ours: str, expected: float) -> None:
    assert retrieval(ours, "Paragraph 12") == pytest.approx(expected)


@pytest.mark.parametrize(("ours", "expected"), [("7", 1.0), ("7 of 30", 0.5), ("17", 0.0), ("", 0.0)])
def test_count(ours: str, expected: float) -> None:
    assert count(ours, "7") == expected


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ("x = 1\ny = 2", 1.0),  # only the first line
        ("\n```\n# no code\n// none\nx = 1", 1.0),
        ("x = 2", 2 * 4 / 10),  # four of five characters on each side
        ("# only a comment", 0.0),
        ("", 0.0),
    ],
)
def test_edit_similarity(ours: str, expected: float) -> None:
    assert edit_similarity(ours, "x = 1") == pytest.approx(expected)


def test_the_best_of_several_references_counts() -> None:
    assert score("qa_f1", "red fox", ["blue", "a red fox", "red"]) == 1.0
    assert score("classification", "b", ["a", "b"], ["a", "b"]) == 1.0


def test_only_few_shot_answers_are_cut_to_a_line() -> None:
    assert TASKS["triviaqa"].score("\nred fox\nQuestion: more", ["red fox"]) == 100.0
    assert TASKS["qasper"].score("red fox\nQuestion: more", ["red fox"]) == pytest.approx(100 * 2 * 0.5 / 1.5)


# Tasks and prompts


def test_the_official_settings() -> None:
    tokens = [128, 128, 64, 32, 32, 32, 512, 512, 512, 64, 32, 128, 32, 32, 64, 64]
    assert [task.new_tokens for task in TASKS.values()] == tokens
    assert [task.examples for task in TASKS.values()] == [200, 200, 150] + 11 * [200] + [500, 500]
    assert [name for name, task in TASKS.items() if task.stop_at_newline] == ["samsum"]
    assert [name for name, task in TASKS.items() if task.first_line] == ["trec", "triviaqa", "samsum"]
    assert (llama.EXPERIMENT.sizes["full"].max_input, mistral.EXPERIMENT.sizes["full"].max_input) == (7950, 31500)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_hold_context_and_question_as_they_are(task: str) -> None:
    text = TASKS[task].prompt("CONTEXT {input} {x}", "QUESTION {context}")
    assert text.count("CONTEXT {input} {x}") == 1
    no_question = ("gov_report", "multi_news", "passage_count", "lcc")  # their examples have none
    assert text.count("QUESTION {context}") == (0 if task in no_question else 1)


def test_truncation_keeps_head_and_tail() -> None:
    ids = torch.arange(11)[None]
    assert middle_truncated(ids, 6).tolist() == [[0, 1, 2, 8, 9, 10]]
    assert middle_truncated(ids, 5).tolist() == [[0, 1, 8, 9, 10]]
    assert middle_truncated(ids, 11) is ids
    with pytest.raises(OptionError, match="max_input=1"):
        middle_truncated(ids, 1)


class Tokens:
    """A tokenizer that knows what a newline is."""

    eos_token_id, pad_token_id = 9, None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert text == "\n"
        assert not add_special_tokens
        return [4, 5]


def test_an_answer_has_a_token_and_samsum_ends_at_the_newline() -> None:
    model, _ = load("", "cpu")
    plain = generation(model, Tokens(), 100, 32, newline=False)
    lines = generation(model, Tokens(), 100, 32, newline=True)
    assert (plain.min_length, plain.max_new_tokens, plain.do_sample, plain.pad_token_id) == (101, 32, False, 9)
    assert (plain.eos_token_id, lines.eos_token_id) == ([9], [5, 9])


@pytest.mark.slow
@pytest.mark.parametrize("held_back", [0, 1])
def test_generation_stops_at_a_newline_but_not_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch, held_back: int
) -> None:
    model, tokenizer = load("", "cpu")
    question = example("triviaqa", 0)
    ids = tokenizer(question["context"] + question["input"], return_tensors="pt").input_ids
    ask = lambda newline: answer(  # noqa: E731
        model, tokenizer, ids, Setting("grace", 0.5), 4, newline=newline, held_back=held_back
    )
    words = ask(False).split()
    assert len(words) == 4
    for place in (0, 1):
        end = tokenizer.convert_tokens_to_ids(words[place])
        monkeypatch.setattr(
            type(tokenizer), "encode", lambda self, text, end=end, **rest: [end] if text == "\n" else []
        )
        found = ask(True).split()
        monkeypatch.undo()
        if place:
            assert found == words[:2]  # stopped there
        else:
            assert found
            assert found[0] != words[0]  # an end as the first token is suppressed


def test_settings_are_those_of_the_baselines() -> None:
    snapkv = Setting("think", 0.6, "snapkv", 512).arguments()
    assert snapkv["evict"] == SnapKV(budget=512, window=32, kernel=7, pooling="max")
    assert (snapkv["recent_window"], snapkv["observation_window"], snapkv["ratio"]) == (32, 32, 0.6)
    assert Setting("grace", 0.5, "h2o", 512).arguments()["evict"] == H2O(budget=512, window=32, observed=32)
    assert Setting("dense", 0.6, "h2o", 512).arguments()["ratio"] == 0.0
    with pytest.raises(OptionError, match="snapkv"):
        Setting("think", 0.6, "snap", 512)


def test_labels() -> None:
    assert [label(name) for name in ("", "pocket", "a/b-7B", "x/Meta-Llama-3-8B-Instruct/")] == [
        "pocket",
        "pocket",
        "b-7B",
        "Llama-3-8B-Instruct",
    ]


# Data


def test_the_miniature_is_valid_for_all_tasks(tmp_path: Path) -> None:
    write_miniature(tmp_path, examples=3)
    assert len(TASKS) == 16
    _, tokenizer = load("", "cpu")
    for task in TASKS:
        examples = data.read_task(tmp_path, task)
        assert len(examples) == 3
        assert len({found.id for found in examples}) == 3
        for found in examples:
            assert TASKS[task].score(found.answers[0], found.answers, found.classes) == 100.0
            ids = tokenizer(found.context).input_ids
            unknown = ids.count(tokenizer.unk_token_id or 1)
            assert unknown < 0.1 * len(ids), task  # only digits, in the tasks that count paragraphs
    first = (tmp_path / "qasper.jsonl").read_bytes()
    assert (write_miniature(tmp_path, ("qasper",), 3) / "qasper.jsonl").read_bytes() == first
    assert (write_miniature(tmp_path, ("qasper",), 3, seed=1) / "qasper.jsonl").read_bytes() != first


def line(task: str = "qasper", **changes: Any) -> str:
    return json.dumps({**example(task, 0), **changes})


@pytest.mark.parametrize(
    ("task", "text", "match"),
    [
        ("qasper", line().replace('"context"', '"text"'), r"line 1: no field context; found .*text"),
        ("qasper", "[]", "no field input"),
        ("qasper", line() + "\n" + line()[:-9], "line 2: cut short"),
        ("qasper", line(answers=[]), r"line 1: answers=\[\] is no list of references"),
        ("qasper", line(answers="one"), "no list of references"),
        ("qasper", line(input=None), "input is NoneType"),
        ("trec", line("trec", all_classes=None), r"all_classes=\[\] lacks"),
        ("qasper", "\n", "empty"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, task: str, text: str, match: str) -> None:
    (tmp_path / f"{task}.jsonl").write_text(text)
    with pytest.raises(data.DataError, match=match) as error:
        data.read_task(tmp_path, task)
    assert f"{task}.jsonl" in str(error.value)


def test_a_missing_file_says_what_is_there(tmp_path: Path) -> None:
    write_miniature(tmp_path, ("trec", "lcc"), 1)
    with pytest.raises(data.DataError, match=r"qasper\.jsonl .*holds lcc, trec"):
        data.read_task(tmp_path, "qasper")
    (tmp_path / "qasper.jsonl").write_bytes(b"\xff")
    with pytest.raises(data.DataError, match="not UTF-8"):
        data.read_task(tmp_path, "qasper")


def test_separators_of_lines_within_a_text_do_not_cut_an_example(tmp_path: Path) -> None:
    row = json.dumps({**example("qasper", 0), "context": "one\u2028two\x85three"}, ensure_ascii=False)
    (tmp_path / "qasper.jsonl").write_text(row + "\n", encoding="utf-8")
    assert data.read_task(tmp_path, "qasper")[0].context == "one\u2028two\x85three"


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    write_miniature(tmp_path, ("qasper",), 1)
    before = data.digest(tmp_path, "qasper")
    write_miniature(tmp_path, ("qasper",), 2)
    assert len(data.read_task(tmp_path, "qasper")) == 2
    assert data.digest(tmp_path, "qasper") != before


def archive(folder: Path, tasks: tuple[str, ...]) -> Path:
    """LongBench's archive, as the Hub has it."""
    write_miniature(folder / "made", tasks, 2)
    with zipfile.ZipFile(folder / "data.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for task in tasks:
            file.write(folder / "made" / f"{task}.jsonl", f"data/{task}.jsonl")
    return folder / "data.zip"


def test_a_download_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = archive(tmp_path, ("qasper", "trec")), []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *name, **rest: asked.append(name) or str(made))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        folder = data.fetch(("qasper", "trec"))
        assert len(data.read_task(folder, "trec")) == 2
    assert asked == [("zai-org/LongBench", "data.zip")]
    with pytest.raises(data.DataError, match="lacks a task"):
        data.fetch(("lcc",))


def test_an_interrupted_download_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = archive(tmp_path, ("qasper",))
    whole = bytearray(made.read_bytes())
    whole[len(whole) // 3] ^= 0xFF  # what is packed is damaged, the list of contents is not
    made.write_bytes(whole)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *name, **rest: str(made))
    with pytest.raises(data.DataError, match="If it is damaged, delete it"):
        data.fetch(("qasper",), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []

    def cut(*name: str, **rest: str) -> str:
        raise ConnectionError("the line is dead")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cut)
    with pytest.raises(data.DataError, match=r"line is dead\. .*--set data=FOLDER"):
        data.fetch(("qasper",), tmp_path / "out")


# The experiments


def settings(experiment: Experiment, size: str = "smoke", model: str = "", **changes: Any) -> Settings:
    options = dataclasses.replace(experiment.sizes[size], **changes)
    return Settings(size, 0, model, "cpu", options)


def reported(experiment: Experiment, asked: Settings, folder: Path) -> str:
    """The page of an experiment after its sweep, if it can be run."""
    cells = [Cell(experiment.name, config) for config in experiment.cells(asked)]
    missing = experiment.needs(asked)
    keys, views = [cell.key for cell in cells], list(experiment.views(asked))
    about = (experiment.name, experiment.title, experiment.paper, experiment.about, "the command")
    write_description(folder, Description(*about, keys, views, missing))
    if not missing:
        done = run_sweep(cells, experiment.run, folder, progress=False)
        assert not done.failures
    return make_report(folder)[1].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_smoke_size_runs_and_the_papers_models_are_not_run_here(experiment: Experiment, tmp_path: Path) -> None:
    few = {} if experiment is niah.EXPERIMENT else {"tasks": ("triviaqa", "samsum"), "budgets": (64,)}
    page = reported(experiment, settings(experiment, **few), tmp_path)
    checkpoint = "Mistral-7B-Instruct-v0.2" if experiment is mistral.EXPERIMENT else "Llama-3-8B-Instruct"
    ours = [row for row in page.splitlines() if row.startswith("| pocket")]
    theirs = [row for row in page.splitlines() if row.startswith(f"| {checkpoint}")]
    assert ours
    assert not any("not run here" in row for row in ours)
    assert theirs
    assert all("not run here" in row and "--size full --model" in row for row in theirs)
    assert list((tmp_path / "report").glob(f"{experiment.name}-*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_the_full_size_says_what_it_needs(experiment: Experiment, tmp_path: Path) -> None:
    page = reported(experiment, settings(experiment, "full"), tmp_path)
    assert "Not run here" in page
    assert "--device cuda" in page


def test_every_number_of_the_paper_is_shown() -> None:
    shown = {1: 0, 2: 0}
    for table, experiment in ((1, llama.EXPERIMENT), (2, mistral.EXPERIMENT)):
        views = experiment.views(settings(experiment, "full"))
        shown[table] = len({(n.metric, *n.at.items()) for view in views for n in getattr(view, "paper", ())})
    assert shown == {1: 4 * 6 * 17, 2: 2 * 6 * 17}  # eviction alone stands at both ratios
    assert len(printed.needle("")) == 12
    assert {number.at["method"] for number in printed.averages(1, "")} == {"dense", "think", "grace"}
    average = next(n for n in printed.averages(1, "") if n.at == {
        "checkpoint": "Llama-3-8B-Instruct", "eviction": "h2o", "kv": 2048, "ratio": 0.6, "method": "grace"
    })  # fmt: skip
    assert average.value == 38.73
    for row in printed.rows("longbench.csv"):
        mean = sum(float(row[task]) for task in TASKS) / 16
        assert float(row["Avg"]) == pytest.approx(mean, abs=0.0075)  # so no column is mistaken for another


@pytest.mark.slow
def test_a_cell_has_all_methods_and_eviction_alone_is_the_same_at_every_ratio() -> None:
    asked = settings(llama.EXPERIMENT, tasks=("triviaqa",), ratios=(0.5, 0.6), evictions=("snapkv",), budgets=(64, 80))
    (config,) = llama.EXPERIMENT.cells(asked)
    rows = llama.EXPERIMENT.run(config)
    assert [(r["kv"], r["ratio"], r["method"]) for r in rows] == [
        (kv, ratio, method) for kv in (64, 80) for ratio in (0.5, 0.6) for method in ("dense", "think", "grace")
    ]
    assert rows[0]["answer"] == rows[3]["answer"]
    assert {r["tokens"] for r in rows} == {192}
    assert rows[0]["cut"] > 0
    for row in rows:
        assert row[f"snapkv {row['kv']}"] == row["score"]
        assert row[f"snapkv {144 - row['kv']}"] is None


def test_examples_of_a_folder_are_used(tmp_path: Path) -> None:
    write_miniature(tmp_path, ("triviaqa",), 3)
    asked = settings(llama.EXPERIMENT, data=str(tmp_path), tasks=("triviaqa",), examples=2, evictions=("snapkv",))
    configs = llama.EXPERIMENT.cells(asked)
    assert len(configs) == 2
    assert llama.EXPERIMENT.run(configs[1])[0]["id"] == "triviaqa-0-1"
    write_miniature(tmp_path, ("triviaqa",), 3, seed=5)
    with pytest.raises(data.DataError, match="has changed"):
        llama.EXPERIMENT.run(configs[1])
    with pytest.raises(data.DataError, match=r"qasper\.jsonl"):
        llama.EXPERIMENT.cells(settings(llama.EXPERIMENT, data=str(tmp_path), tasks=("qasper",)))


def test_bad_options_are_named() -> None:
    with pytest.raises(OptionError, match="no 'dureader' in English"):
        llama.EXPERIMENT.cells(settings(llama.EXPERIMENT, tasks=("dureader",)))
    with pytest.raises(GraceError, match="thnik"):
        llama.EXPERIMENT.cells(settings(llama.EXPERIMENT, methods=("thnik",)))
    with pytest.raises(OptionError, match="'many' is no KV size"):
        niah.EXPERIMENT.cells(settings(niah.EXPERIMENT, budgets=("many",)))
    with pytest.raises(OptionError, match=r"depths: 1\.5"):
        niah.EXPERIMENT.cells(settings(niah.EXPERIMENT, depths=(1.5,)))
    with pytest.raises(OptionError, match="go together"):
        niah.EXPERIMENT.cells(settings(niah.EXPERIMENT, needle="a needle"))


def test_a_model_that_is_too_short_is_named_with_both_numbers() -> None:
    config = niah.EXPERIMENT.cells(settings(niah.EXPERIMENT, lengths=(1151,)))[0]
    with pytest.raises(OptionError, match=r"length=1151 with 2 new tokens is 1153 tokens, and pocket has .* 1152"):
        niah.EXPERIMENT.run(config)
    config = llama.EXPERIMENT.cells(settings(llama.EXPERIMENT, tasks=("lcc",), max_input=2000))[0]
    with pytest.raises(OptionError, match=r"2000 tokens, and pocket has a context of 1152"):
        llama.EXPERIMENT.run(config)


# Haystacks of the user


def sentences(number: int) -> str:
    return " ".join(f"This is sentence {at} of the book." for at in range(number))


def test_the_needle_lies_between_sentences_at_its_depth() -> None:
    words = lambda text: len(text.split())  # noqa: E731
    for depth in (0.0, 0.3, 0.5, 1.0):
        text = niah.haystack_prompt(sentences(500), 400, depth, "A red fox.", "What is red?", words, seed=1)
        assert 395 <= words(text) <= 400
        before, found, after = text.partition("A red fox.")
        assert found
        assert before.count("\n\n") == 1  # the needle is in the text, not in the instructions
        hay_before, hay_after = before.split("\n\n")[1].split(), after.split("\n\n")[0].split()
        assert len(hay_before) / (len(hay_before) + len(hay_after)) == pytest.approx(depth, abs=0.03)
        if 0 < depth < 1:
            assert before.rstrip().endswith(".")
            assert after.lstrip().startswith("This")
        assert text.endswith("Question: What is red?\nAnswer:")


def test_passages_differ_by_seed_and_short_texts_are_refused() -> None:
    words = lambda text: len(text.split())  # noqa: E731
    one, two = (niah.haystack_prompt(sentences(500), 200, 0.5, "N.", "Q?", words, seed=seed) for seed in (0, 1))
    assert one != two
    with pytest.raises(niah.HaystackError, match="has 70 tokens, and length=200 wants 183"):
        niah.haystack_prompt(sentences(10), 200, 0.5, "N.", "Q?", words, seed=0)
    with pytest.raises(OptionError, match="length=10"):
        niah.haystack_prompt(sentences(10), 10, 0.5, "N.", "Q?", words, seed=0)


def test_a_haystack_of_the_user_is_scored_against_its_needle(tmp_path: Path) -> None:
    with pytest.raises(niah.HaystackError, match="no text"):
        niah.EXPERIMENT.cells(settings(niah.EXPERIMENT, haystack=str(tmp_path)))
    (tmp_path / "book.txt").write_text(sentences(300))
    asked = settings(
        niah.EXPERIMENT, haystack=str(tmp_path), needle="The old king.", question="Who?", depths=(0.5,), budgets=("96",)
    )
    (config,) = niah.EXPERIMENT.cells(asked)
    rows = niah.EXPERIMENT.run(config)
    assert {row["reference"] for row in rows} == {"The old king."}
    assert all(0 <= row["score"] <= 1 and row["tokens"] <= 256 for row in rows)
    passwords = niah.EXPERIMENT.run({**config, "needle": "", "question": ""})
    assert passwords[0]["reference"].startswith("The password of ")
    (tmp_path / "book.txt").write_text(sentences(299))
    changed = niah.EXPERIMENT.cells(asked)[0]
    assert changed["digest"] != config["digest"]
    with pytest.raises(niah.HaystackError, match="has changed"):
        niah.EXPERIMENT.run(config)
