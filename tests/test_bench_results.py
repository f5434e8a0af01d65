"""Pages of results: each names a command that exists and a commit; dirty and mixed numbers are refused, or marked."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from bench import provenance, report, results, several
from bench.efficiency import report as efficiency
from bench.experiments import __main__ as experiments
from bench.experiments import pages as experiment_pages
from bench.install_size import bytes_in
from bench.pages_of_tests import adapter_matrix, every_family
from bench.pages_of_tests import test_deep as deep_page
from bench.provenance import MixedError, refuse
from grace_opt.sweep import Plot

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
CLEAN = {"date": "2026-01-02", "command": "python -m bench.answers", "commit": "1234567", "cpu": "x", "cores": 2}
CLEAN |= {"python": "3.11.0"}
PAGES = sorted(path.relative_to(RESULTS) for path in RESULTS.rglob("*.md"))
COMMIT = r"[0-9a-f]{7,}\+?"
FORMS = {
    "adapter_matrix": adapter_matrix,
    "every_family": every_family,
    "test_deep": deep_page,
    "efficiency": efficiency.page,
}


def exists(command: str) -> bool:
    """Whether a command of a page can be typed in a checkout."""
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[0] == "make":
        return bool(re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return words[:2] == ["python", "-m"] and importlib.util.find_spec(words[2]) is not None


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_each_page_names_a_command_and_a_commit(page: Path) -> None:
    text = (RESULTS / page).read_text()
    commands = re.findall(r"`((?:make |python -m )[^`]+)`", text) + re.findall(r"\| command \| (.+) \|", text)
    if page.name != "index.md" or "Made" in text:
        assert commands
    assert all(exists(command.replace("\\", "")) for command in commands), commands
    if page.parent.name != "smollm2":
        assert re.search(rf"commit ({COMMIT})", text)
        assert results.COMMANDS[page.stem] in text
        assert f"]({page.stem}.png)" in text
        assert (RESULTS / page).with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        for word in ("Asked", "Found", "How sure"):
            assert text.count(f"- **{word}**: ") == 1
        assert "target | met" not in text


@pytest.mark.parametrize("name", [page.stem for page in PAGES if len(page.parts) == 1])
def test_a_page_of_changed_files_says_so(name: str) -> None:
    sources = report.sources_of(json.loads((RESULTS / f"{name}.json").read_text()), allow_dirty=True).values()
    clean = all(map(provenance.is_clean, sources))
    assert (report.MARK in (RESULTS / f"{name}.md").read_text()) == (not clean)


def test_every_page_has_a_command_that_exists() -> None:
    made = {page.stem for page in PAGES if len(page.parts) == 1}
    assert made == {name for name in results.COMMANDS if "/" not in name}
    assert all(map(exists, results.COMMANDS.values()))
    assert not exists("python -m bench.nothing")
    assert not exists("make nothing")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_page_is_formed_again_as_it_stands(name: str, tmp_path: Path) -> None:
    """Nothing is on a page but what its JSON file holds."""
    value = report.read_results(RESULTS / name)
    text = report.write_results(tmp_path / name, value, FORMS[name], allow_dirty=True, measured=False)
    assert text == (RESULTS / f"{name}.md").read_text()
    assert not (tmp_path / f"{name}.json").exists()


def test_other_and_dirty_commits_are_refused_by_name() -> None:
    other, dirty = CLEAN | {"commit": "7654321"}, CLEAN | {"commit": "1234567+"}
    assert refuse({"a": CLEAN, "b": CLEAN | {"date": "2026-01-03"}})["date"] == "2026-01-02 to 2026-01-03"
    with pytest.raises(MixedError, match=r"several commits: measure the older ones again.*1234567: a; 7654321: b"):
        refuse({"a": CLEAN, "b": other})
    with pytest.raises(MixedError, match=r"files differ from commit 1234567: commit them.*--allow-dirty"):
        refuse({"a": dirty})
    with pytest.raises(MixedError, match="git knows no commit"):
        refuse({"a": CLEAN | {"commit": provenance.NONE}})
    merged = refuse({"a": CLEAN, "b": other}, allow_dirty=True)
    assert merged["commit"] == "1234567, 7654321"
    assert not provenance.is_clean(merged)


def test_a_file_that_no_commit_has_makes_the_tree_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "1234567", "status": "", "ls-files": "bench/new.py"}
    monkeypatch.setattr(provenance, "_git", lambda first, *rest: answers[first])
    assert provenance.commit() == "1234567+"
    with pytest.raises(MixedError, match="this run"):
        provenance.require_clean(allow_dirty=False)
    answers["ls-files"] = ""
    assert provenance.require_clean(allow_dirty=False)["commit"] == "1234567"
    answers["rev-parse"] = ""
    assert provenance.commit() == provenance.NONE


def test_the_command_is_as_it_was_typed_without_folders_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--model", "HuggingFaceTB/SmolLM2-135M", "--text", "/home/me/a b.txt", "--set", "texts=../../me/books"]
    monkeypatch.setattr(sys, "argv", ["answers", *typed, "--out", "runs/new"])
    command = provenance.provenance()["command"]
    assert command.endswith(" --model HuggingFaceTB/SmolLM2-135M --text 'a b.txt' --set texts=books --out runs/new")


def page(value: dict) -> report.Page:
    """Say one number."""
    words, line = f"It took {value['seconds']} s.", [0, value["seconds"]]
    draw = lambda figure: figure.subplots().plot(line)  # noqa: E731
    return report.Page("Seconds", "A line", "Three seconds", draw, "?", words, ".")


def test_records_count_for_their_settings_and_a_clean_commit_alone(tmp_path: Path) -> None:
    """Those of changed files counted for answers and texts of a real model, whose commit and its plus were the same."""
    path, beside, made = tmp_path / "runs" / "one.json", tmp_path / "runs" / "one.txt", []

    def measure() -> dict:
        beside.write_text("")
        made.append(1)
        return {"kl": len(made)}

    for settings, source, count in (
        ({"rows": (1, 2)}, CLEAN, 1),
        ({"rows": (1, 2)}, CLEAN | {"date": "2026-01-03"}, 1),
        ({"rows": (1, 3)}, CLEAN, 2),
        ({"rows": (1, 3)}, CLEAN | {"commit": "7654321"}, 3),
        ({"rows": (1, 3)}, CLEAN | {"commit": "7654321+"}, 4),
        ({"rows": (1, 3)}, CLEAN | {"commit": "7654321+"}, 5),
    ):
        assert provenance.recorded(path, settings, source, measure, beside)["kl"] == count
    assert provenance.recorded(path, {"rows": (1, 3)}, CLEAN, measure)["kl"] == 6
    path.write_text("{")
    assert provenance.recorded(path, {"rows": (1, 3)}, CLEAN, measure)["date"] == "2026-01-02"
    beside.unlink()
    assert provenance.recorded(path, {"rows": (1, 3)}, CLEAN, measure, beside)["kl"] == 8


@pytest.mark.slow
def test_a_page_refuses_and_marks(tmp_path: Path) -> None:
    out = tmp_path / "answers"
    dirty, clean = ({"provenance": CLEAN | {"commit": commit}, "seconds": 3} for commit in ("1234567+", "1234567"))
    with pytest.raises(MixedError):
        report.write_results(out, dirty, page)
    assert not list(tmp_path.iterdir())
    assert report.MARK in report.write_results(out, dirty, page, allow_dirty=True)
    text = report.write_results(out, clean, page)
    assert report.MARK not in text
    assert "It took 3 s." in text
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"]
    picture = out.with_suffix(".png").read_bytes()
    report.write_results(out, report.read_results(out), page, measured=False)
    assert out.with_suffix(".png").read_bytes() == picture


def page_of_models(value: dict) -> report.Page:
    """Say one number of each model."""
    said = ", ".join(f"{name}: {of['seconds']} s" for name, of in value["models"].items())
    return dataclasses.replace(page({"seconds": 3}), found=said)


@pytest.mark.slow
def test_a_model_is_measured_alone_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, seconds = tmp_path / "bits", iter(range(1, 9))
    weights = SimpleNamespace(parameters=lambda: [])
    monkeypatch.setattr(several, "open_models", lambda args: ((weights, None, name) for name in args.model))

    def run(commit: str, *models: str, tokens: int = 8, stop_at: str = "") -> str:
        def measure(source: dict, model: object, tokenizer: object, name: str) -> tuple[dict, dict]:
            assert name != stop_at, "stopped"
            return {"seconds": next(seconds)}, {}

        monkeypatch.setattr(several, "require_clean", lambda allow_dirty: CLEAN | {"commit": commit})
        args = SimpleNamespace(model=models, out=out, report_only=False, allow_dirty=False, text=None)
        several.publish_models(args, page_of_models, {"tokens": tokens}, measure)
        return out.with_suffix(".md").read_text()

    assert "gemma3-270m: 2 s, own: 1 s" in run("1234567", "own", "gemma3-270m")
    text = run("7654321", "smollm2-135m")
    assert "smollm2-135m: 3 s, gemma3-270m: 2 s, own: 1 s" in text  # in the order of `bench.material`
    assert "those of smollm2-135m from `python -m bench.answers`, 2026-01-02, commit 7654321" in text
    assert "those of gemma3-270m and own from `python -m bench.answers`, 2026-01-02, commit 1234567" in text
    with pytest.raises(SystemExit, match=r"bits has smollm2-135m, gemma3-270m, .* tokens was 8 and is 9; .*--out"):
        run("7654321", "own", tokens=9)
    with pytest.raises(AssertionError, match="stopped"):
        run("7654322", "smollm2-135m", "own", stop_at="own")
    value = report.read_results(out)
    assert [of["provenance"]["commit"] for of in value["models"].values()] == ["7654322", "1234567", "1234567"]
    assert run("7654321", "smollm2-135m", "gemma3-270m", "own", tokens=9).count("commit 7654321") == 1
    with pytest.raises(MixedError):
        run("7654321+", "own", tokens=9)


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [(0, "FLOP", "0 FLOP"), (15153, "s", "15,153 s"), (3e-7, "s", "0.3 µs"), (1.5e15, "FLOP", "1.5 PFLOP")],
)
def test_quantities_read_well(value: float, unit: str, words: str) -> None:
    assert report.si(value, unit) == words


def test_results_runs_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    ran: list[list[str]] = []

    def fake(words, **options):
        ran.append(words)
        return SimpleNamespace(returncode=int("bench.answers" in words))

    monkeypatch.setattr(results.subprocess, "run", fake)
    assert results.main(["answers", "bits", "test_deep", "--report-only", "--allow-dirty"]) == 1
    assert [words[2] for words in ran] == ["bench.bits", "bench.answers", "bench.pages_of_tests"]
    assert ran[0] == [sys.executable, "-m", "bench.bits", "--report-only", "--allow-dirty"]
    said = capsys.readouterr().out
    assert "1 failed" in said
    assert results.command_of("test_deep", report_only=False, allow_dirty=True) == [
        "make",
        "test-deep",
        "ALLOW_DIRTY=1",
    ]
    assert results.command_of("solvers", report_only=True, allow_dirty=False)[2:] == [
        "bench.solvers",
        "all",
        "--report-only",
    ]
    assert results.main(["experiments", "answers", "--skip", "answers", "--list"]) == 0
    assert capsys.readouterr().out.split()[0] == "experiments/smollm2/index"
    with pytest.raises(SystemExit):
        results.main(["nothing"])
    assert "no page is called nothing: there are real_heads" in capsys.readouterr().err


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Measure cells of a small experiment as if a commit were checked out; give all that there are."""

    def measure(folder: str, commit: str, *options: str) -> dict[str, str]:
        monkeypatch.setattr(experiments, "provenance", lambda: CLEAN | {"commit": commit})
        words = ["solver_quality", "--smoke", "--set", "instances=2", *options, "--out", str(tmp_path / folder)]
        assert experiments.main(words) == 0
        return experiment_pages.gather(tmp_path / folder)

    return measure


@pytest.mark.slow
def test_pages_of_experiments_are_of_one_commit(cells, tmp_path: Path) -> None:
    """Records go into one file and back; a set of two commits is refused, and written with a mark if one insists."""
    cells("mixed", "1234560", "--only", "seed=0")
    mixed = cells("mixed", "1234561")
    with pytest.raises(MixedError, match=r"several commits.*123456[01]: .*; 123456[01]: "):
        experiment_pages.report(mixed, tmp_path / "out", allow_dirty=False)
    pages = experiment_pages.report(mixed, tmp_path / "out", allow_dirty=True)
    assert report.MARK in pages[0].read_text()
    index, page = experiment_pages.report(cells("one", "1234560"), tmp_path / "out", allow_dirty=False)
    assert report.MARK not in index.read_text()
    assert "`python -m bench.experiments.pages smollm2`" in index.read_text()
    for text in (index.read_text(), page.read_text()):
        assert text.index("# ") < text.index("![") < text.index("- **Asked**") < text.index("- **Found**")
        assert text.index("- **Found**") < text.index("- **How sure**") < text.index("\n| ")
    text = page.read_text()
    assert text.index("- **How sure**") < text.index("## ") < text.index("<details>")
    assert "(solver_quality.md): Comparisons with think in the first table: " in index.read_text()
    for line in re.findall(r"\]\(([^)]+)\)", index.read_text()):
        assert (tmp_path / "out" / line).is_file(), line
    with pytest.raises(SystemExit, match="leads out of its folder"):
        experiment_pages.spread({"../stray.json": "{}"}, tmp_path / "out")


@pytest.mark.slow
def test_pages_of_experiments_take_their_words_from_todays_code(
    cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = cells("old", "1234560")
    known = experiments.experiments()
    reworded = dataclasses.replace(known["solver_quality"], title="Another title", about="Is it so? It is.")
    monkeypatch.setattr(experiment_pages, "experiments", lambda: {**known, "solver_quality": reworded})
    index, page = experiment_pages.report(files, tmp_path / "out", allow_dirty=False)
    assert page.read_text().startswith("# Another title, on SmolLM2-135M\n")
    assert "- **Asked**: Is it so?\n" in page.read_text()
    assert "[Another title](solver_quality.md)" in index.read_text()


def test_each_experiment_asks_a_question_and_has_a_picture() -> None:
    for name, experiment in experiments.experiments().items():
        views = experiment.views(experiments.settings_of(experiment, [name, "--size", "pocket"]))
        assert any(isinstance(view, Plot) for view in views), name
        assert re.match(r"[^.?!]*\?( |$)", experiment.about), name


def test_bytes_on_the_disk_count_links_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10_000))
    once = bytes_in(tmp_path)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert bytes_in(tmp_path) == once >= 10_000
