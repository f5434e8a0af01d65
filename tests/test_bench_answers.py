"""Answers kept by smaller caches, in small: prompts, what counts, bytes by width, and a run that goes on."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from bench import answers, provenance, questions
from bench.efficiency.methods import held_bytes
from bench.report import RESULTS, read_results
from grace_opt.hf import attention_implementation, calibrate
from grace_opt.hf.models import POCKET_FOLDER, load_model, load_pocket
from grace_opt.hf.tools.demo import ADVICE, RATIOS
from grace_opt.hf.tools.needle import fact, filler, question

pytest.importorskip("optimum.quanto")
pytest.importorskip("hqq")
CALIBRATION = "the quiet river runs past a late singer . the old baker took the bell near the mill . " * 8
NO_BASIS = Path("none")
PASSWORDS = {"Rome": "amber fox", "Oslo": "jade whale", "Lima": "ivory panda"}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """A set in the words of the pocket model, in which the answer to one question stands nowhere before it."""
    rng = random.Random(0)
    facts = [{"says": fact(c, p), "asks": question(c), "answer": [p]} for c, p in PASSWORDS.items()]
    facts.append({"says": "The old baker took the bell.", "asks": question("Paris"), "answer": ["bell"]})
    lines = [f"filler = [{json.dumps([filler(rng) for _ in range(40)])}]"]
    for title in ("first", "second"):
        inner = ", ".join("{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in one.items()) + "}" for one in facts)
        lines.append(f"[[text]]\ntitle = '{title}'\nfacts = [{inner}]")
    path = tmp_path / "asked.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def start(tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the benchmark as from the command line, calibrated on little text."""
    make = calibrate.basis
    monkeypatch.setattr(calibrate, "basis", lambda *of: make(*of, [CALIBRATION], end_to_end=False))

    def run(*changes: str) -> dict:
        arguments = f"--model {POCKET_FOLDER} --questions {asked} --tokens 300 --new-tokens 2 --allow-dirty".split()
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "results" / "pocket")]
        monkeypatch.setattr(sys, "argv", ["answers", *arguments, *folders, *changes])
        answers.main()
        return json.loads((tmp_path / "results" / "pocket.json").read_text())

    return run


# The questions


def test_the_set_that_is_shipped_can_be_asked() -> None:
    texts = questions.read_questions(questions.DEFAULT)
    facts = [one for text in texts for one in text.facts]
    assert len({text.title for text in texts}) == len(texts) >= 4
    assert len({one.asks for one in facts}) == len(facts) >= 24
    for text in texts:
        for one in text.facts:
            assert not questions.answered(one.asks, one.answer), "a model that repeats the question would be right"
            others = [other.says for other in text.facts if other is not one]
            assert not any(questions.answered(other, one.answer) for other in others), (text.title, one.asks)
            assert not any(questions.answered(part, one.answer) for parts in text.filler for part in parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "cannot be read as TOML"),
        ("[[text]]\ntitle = 'a'", r"give it filler"),
        ("filler = ['a']", r"give it filler"),
        ("filler = [['a']]", r"no \[\[text\]\]"),
        ("filler = [['a']]\n[[text]]\ntitle = 'a'", r"text 1: give it title"),
        ("filler = [['a']]\n[[text]]\ntitle = 'a'\nfacts = [{says = 'a'}]", r"text 1, fact 1: write"),
        ("filler = [['a']]\n[[text]]\ntitle = 'a'\nfacts = [{says='a b', asks='b', answer='b'}]", "fact 1: write"),
        ("filler = [['a']]\n[[text]]\ntitle = 'a'\nfacts = [{says='a b', asks='b', answer=['.']}]", "fact 1: write"),
        ("filler = [['a']]\n[[text]]\ntitle = 'a'\nfacts = [{says='ab', asks='b', answer=['b']}]", "holds none"),
    ],
)
def test_a_set_that_can_not_be_asked_says_why(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        questions.read_questions(path)


def test_prompts_are_of_one_text_and_end_with_the_question(asked: Path) -> None:
    _, tokenizer = load_pocket()
    text = questions.read_questions(asked)[0]
    found = questions.prompts(text, tokenizer, 300)
    assert found == questions.prompts(text, tokenizer, 300)
    assert found != questions.prompts(text, tokenizer, 300, seed=1)
    assert 270 < max(len(one.ids) for one in found) <= 300
    shared = questions.in_common(found)
    assert 250 < shared < min(len(one.ids) for one in found)
    for one in found:
        assert one.ids[:shared] == found[0].ids[:shared]
        written = tokenizer.decode(one.ids)
        assert written.endswith(questions.normal(one.fact.asks).split()[-1] + ":")
        assert all(other.says.split()[-1].rstrip(".").lower() in written for other in text.facts)
    with pytest.raises(SystemExit, match="facts of 'first' and a question alone have"):
        questions.prompts(text, tokenizer, 30)


def test_a_chat_template_is_used() -> None:
    class Chat:
        chat_template = "yes"

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            assert not tokenize
            assert add_generation_prompt
            return f"<user> {messages[0]['content']} <assistant>"

        def __call__(self, text, add_special_tokens=True):
            assert not add_special_tokens  # the template has them
            return type("Encoded", (), {"input_ids": [hash(word) for word in text.split()]})

    text = questions.read_questions(questions.DEFAULT)[0]
    for one in questions.prompts(text, Chat(), 400):
        assert one.ids[0] == hash("<user>")
        assert one.ids[-1] == hash("<assistant>")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("The captain is INGRID  Solberg.", True),
        ("“Ingrid-Solberg”", True),
        ("Ingrid", False),
        ("Ingrid Solbergson", False),
        ("Solberg, Ingrid", False),
        ("", False),
    ],
)
def test_what_counts_as_an_answer(answer: str, right: bool) -> None:
    assert questions.answered(answer, ["Ingrid Solberg"]) is right


# The caches


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, s in answers.SETTINGS.items() if s.config is not None])
def test_bytes_are_those_of_the_report_at_either_width(name: str, asked: Path) -> None:
    model, tokenizer = load_model(str(POCKET_FOLDER))
    prompt = questions.prompts(questions.read_questions(asked)[0], tokenizer, 300)[0]
    ids, found = torch.tensor([prompt.ids]), {}
    near = 1e-3 if name == "bits-2.25" else 0  # what codes are units of has 32 bits in any model
    for width, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        cache = answers.new_cache(name, model.to(dtype), NO_BASIS)
        cache.declare_prompt(ids.shape[1])
        with attention_implementation(model, "grace_sdpa"), torch.no_grad():
            model(ids, past_key_values=cache)
        found[width] = cache
        report = cache.memory_report()
        assert report.pruned_tokens > 0
        expected = report.key_bytes, report.value_bytes
        assert answers.stored_bytes(cache, width) == pytest.approx(expected, rel=near * (width == 2))
    assert answers.stored_bytes(found[4], 2) == pytest.approx(answers.stored_bytes(found[2], 2), rel=near)
    assert sum(answers.stored_bytes(found[4], 2)) < sum(answers.stored_bytes(found[4], 4))


@pytest.mark.parametrize("name", ["dense", "transformers-4bit"])
def test_bytes_of_caches_that_are_not_ours(name: str, asked: Path) -> None:
    model, tokenizer = load_pocket()
    cache = answers.new_cache(name, model, NO_BASIS)
    ids = torch.tensor([questions.prompts(questions.read_questions(asked)[0], tokenizer, 300)[0].ids])
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert sum(answers.stored_bytes(cache, 4)) == held_bytes(cache)
    dense = 2 * 3 * 2 * 64 * ids.shape[1]  # K and V, layers, KV heads, channels
    assert (sum(answers.stored_bytes(cache, 2)) == 2 * dense) is (name == "dense")
    assert sum(answers.stored_bytes(cache, 2)) <= 2 * dense


def test_sliding_windows_count_as_in_a_dense_cache_and_are_refused_by_transformers() -> None:
    sizes = {"vocab_size": 9, "hidden_size": 32, "intermediate_size": 32, "head_dim": 64, "sliding_window": 16}
    heads = {"num_hidden_layers": 6, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**sizes, **heads)).eval()
    ids, found = torch.arange(100)[None] % 9, {}
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        for name in ("dense", "grace-0.5"):
            cache = answers.new_cache(name, model, NO_BASIS)
            if name != "dense":
                cache.declare_prompt(100)
            model(ids, past_key_values=cache)
            found[name] = answers.stored_bytes(cache, 4)
    report = cache.memory_report()
    assert found["dense"][0] - found["grace-0.5"][0] == report.dense_equivalent_key_bytes - report.key_bytes > 0
    assert found["dense"][1] == found["grace-0.5"][1]
    assert {*answers.SETTINGS} - {*answers.smaller_caches(model, list(answers.SETTINGS))} == {"dense", answers.THEIRS}
    with pytest.raises(ValueError, match="sliding"):
        answers.new_cache(answers.THEIRS, model, NO_BASIS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "bits-2.25", "grace-0.5", "grace-0.3-4bit"])
def test_reading_a_text_once_changes_no_answer(name: str, asked: Path) -> None:
    model, tokenizer = load_pocket()
    found = questions.prompts(questions.read_questions(asked)[0], tokenizer, 300)
    with attention_implementation(model, "grace_sdpa"):
        one, each = (
            answers.ask(model, tokenizer, name, found, 6, NO_BASIS, int, shared=shared) for shared in (None, 0)
        )
    assert one == each
    assert len({record["answer"] for record in one}) > 2


# The run


@pytest.mark.slow
def test_only_what_the_dense_cache_answers_counts(start, tmp_path: Path) -> None:
    names = ["bits-2.25", "grace-0.3", "grace-0.3-4bit", "transformers-4bit"]
    found = start("--settings", *names)
    (of,) = found["models"].values()
    assert [row["setting"] for row in of["rows"]] == ["dense", *names]
    assert (found["asked"], found["texts"]) == (8, 2)
    dense, coded, pruned, both, _ = of["rows"]
    asked = [one for text in of["answers"]["dense"] for one in text["asked"]]
    assert [one["right"] for one in asked if "Paris" in one["question"]] == [False, False]
    assert 4 <= dense["right"] == dense["asked"] == sum(one["right"] for one in asked)
    for row in of["rows"][1:]:
        assert row["asked"] == dense["right"]
        assert row["right"] <= row["asked"]
        assert row["interval"][0] < row["right"] / row["asked"] <= row["interval"][1]
    assert [dense[f"K+V, {bits} bit"] for bits in (32, 16)] == [1, 1]
    assert pruned["K, 32 bit"] == pytest.approx(0.73, abs=0.03)  # 44 of 64 channels, and 34 of 300 tokens dense
    assert pruned["K+V, 32 bit"] == pytest.approx((1 + pruned["K, 32 bit"]) / 2)
    assert pruned["K, 16 bit"] > pruned["K, 32 bit"]  # the indices stay as they are
    assert coded["K+V, 16 bit"] < both["K+V, 16 bit"]
    assert both["K+V, 32 bit"] < both["K+V, 16 bit"] < pruned["K+V, 16 bit"]
    text = (tmp_path / "results" / "pocket.md").read_text()
    for row in of["rows"][1:]:
        assert f"| {row['title']} | {row['right']} of {row['asked']} <small>" in text
    assert f"questions about texts of 300 tokens, pocket answers {dense['right']} from a dense cache" in text
    assert str(tmp_path) not in text + json.dumps(found)

    found["models"] |= {
        "worse": {"rows": [dense, *({**row, "right": 1} for row in of["rows"][2:])]},
        "none": {"rows": []},
    }
    page = answers.page(found)
    assert f"kept by the worst of 2 models: GRACE, λ = 0.3: 1 of {dense['right']} (worse)" in page.found
    assert page.found.endswith("from a dense cache by none, so there is nothing to keep.")
    assert "| `bits=2.25` |" in "\n".join(page.tables)
    assert page.headline == "No smaller cache keeps nine of ten answers of every model"


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, done = answers.ask, []

    def counting(*arguments, **options):
        done.append(arguments[2])
        if len(done) == stop:
            raise KeyboardInterrupt
        return ask(*arguments, **options)

    monkeypatch.setattr(answers, "ask", counting)
    monkeypatch.setattr(provenance, "is_clean", lambda source: True)
    stop = 4
    with pytest.raises(KeyboardInterrupt):
        start("--settings", "grace-0.5")
    assert done == ["dense", "dense", "grace-0.5", "grace-0.5"]
    assert not (tmp_path / "results").exists()
    before = start("--settings", "grace-0.5")
    assert done[4:] == ["grace-0.5"]
    assert start("--settings", "grace-0.5")["models"]["pocket"]["rows"] == before["models"]["pocket"]["rows"]
    assert len(done) == 5
    start("--settings", "grace-0.5", "--new-tokens", "3")  # other settings: nothing of before counts
    assert len(done) == 9


@pytest.mark.slow
def test_what_can_not_be_asked_says_why(start) -> None:
    with pytest.raises(SystemExit, match=r"--new-tokens 0: give at least 1"):
        start("--new-tokens", "0")
    with pytest.raises(SystemExit, match="more than the context of pocket"):
        start("--tokens", "1200")


@pytest.mark.slow
def test_models_that_answer_nothing_have_nothing_to_keep(start, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(POCKET_FOLDER, other)
    found = start("--new-tokens", "1", "--model", str(POCKET_FOLDER), str(other))  # passwords have two words
    assert {name: (of["rows"], list(of["answers"])) for name, of in found["models"].items()} == {
        name: ([], ["dense"]) for name in ("pocket", "other")
    }
    text = (tmp_path / "results" / "pocket.md").read_text()
    assert "**Found**: None of the questions is answered from a dense cache by pocket, other, so there is" in text


# What is recommended


def test_what_the_pages_recommend_is_what_was_measured_to_work() -> None:
    """The README's example pruned 60 %, at which a real model loses most of its answers."""
    models = read_results(RESULTS / "answers")["models"]
    every = {label: {row["setting"]: row for row in of["rows"]} for label, of in models.items()}
    rows = every["smollm2-135m"]
    works = {f"{RATIOS[0]:g}"}
    assert {name for name in works if rows[f"grace-{name}"]["interval"][0] > 0.75} == works
    assert rows["dense"]["asked"] >= 16
    root = Path(answers.__file__).parents[1]
    pages = ("choose_a_setting", "prune_a_cache", "compose", "scale")
    for page in ("README.md", *(f"docs/howto/{name}.md" for name in pages)):
        text = (root / page).read_text()
        shown = set(re.findall(r"\bratio=([\d.]+)", text))
        assert shown <= works | {"0.0"}, page  # 0.0: quantised, nothing pruned
        assert works <= shown, page
    arena = (root / "docs" / "results" / "arena.md").read_text()
    assert "bits=2.25" in ADVICE
    (kept,) = re.findall(r"^\| `bits=2\.25` \| (\d+ of 26) ", arena, re.M)
    for page in ("README.md", "docs/index.md", "docs/howto/choose_a_setting.md", "docs/tutorials/first_cache.py"):
        said = re.findall(r"\b(\d+ of) (?:the |its )?26 answers", (root / page).read_text())
        assert f"{said[0]} 26" == kept, page
    advice = (root / "docs" / "howto" / "choose_a_setting.md").read_text()
    for name in ("bits-2.25", "grace-0.3", "grace-0.5", "grace-0.6", "4bit", "grace-0.3-4bit"):
        said = ""
        for of in every.values():
            row = of.get(name)
            shares = ["–"] * 2 if row is None else [f"{row[f'K+V, {bits} bit']:.0%}" for bits in answers.WIDTHS]
            kept = "–" if row is None else f"{row['right']} of {row['asked']}"
            said += f" | {kept} | {' | '.join(shares).replace('%', ' %')}"
        assert f"{said} |" in advice, name
