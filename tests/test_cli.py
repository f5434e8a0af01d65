"""The command line: output for people and machines, and exit codes that mean something."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import grace_opt
from grace_opt import api, instances
from grace_opt.cli.app import app
from grace_opt.cli.values import parse_options
from grace_opt.instances import generators
from grace_opt.testing import instance


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr("grace_opt.cli.app.console.width", 200)
    monkeypatch.setattr("grace_opt.api.DEFAULT_COMPARE_SECONDS", 0.5)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "w.npy"
    instances.write(path, instance("wishart", 8, 0))
    return path


def test_methods(run):
    assert "1-swap-local optimum" in run("methods").output
    names = [row["method"] for row in json.loads(run("methods", "--json").stdout)]
    assert {"mies", "think", "exhaustive"} <= set(names)


def test_solve_prints_a_table_or_json(run, file):
    shown = run("solve", file, "-k", 3, "--method", "exhaustive")
    assert shown.exit_code == 0
    assert "OPTIMAL" in shown.output
    (answer,) = json.loads(run("solve", file, "-k", 3, "--method", "exhaustive", "--json").stdout)
    assert answer["status"] == "OPTIMAL"
    assert answer["gap"] == 0.0
    assert len(answer["indices"]) == 3
    (plain,) = json.loads(run("solve", file, "-k", 3, "--json").stdout)
    assert plain["lower_bound"] is None  # JSON has no infinity


def test_tight_gives_a_tighter_bound(run, file):
    (loose,) = json.loads(run("solve", file, "-k", 3, "--certify", "--json").stdout)
    (tight,) = json.loads(run("solve", file, "-k", 3, "--tight", "--json").stdout)
    assert loose["lower_bound"] <= tight["lower_bound"] <= tight["objective"]
    for command in ("solve", "compare"):
        refused = run(command, file, "-k", 3, "--tight", "--no-certify")
        assert refused.exit_code == 2
        assert "leave out one of them" in refused.output


def test_solve_passes_options_protection_and_seed(run, file):
    (answer,) = json.loads(
        run(
            *(
                "solve",
                file,
                "-k",
                2,
                "--method",
                "local_search",
                "--option",
                "start=random",
                "--option",
                "max_steps=0",
            ),
            *("--protected", "0,1", "--seed", 3, "--json"),
        ).output
    )
    assert answer["options"] == {"start": "random", "max_steps": 0}
    assert answer["seed"] == 3
    assert not {0, 1} & set(answer["indices"])


@pytest.mark.slow
def test_k_comes_from_the_file(run, tmp_path):
    instances.write(tmp_path / "w.npz", np.stack([instance("wishart", 5, s) for s in range(25)]), np.full(25, 2))
    shown = run("compare", tmp_path / "w.npz")
    assert shown.exit_code == 0
    assert "25 instances" in shown.output
    everything = json.loads(run("compare", tmp_path / "w.npz", "--json").stdout)
    assert {len(s["objective"]) for s in everything} == {25}


def test_exit_codes(run, file, tmp_path):
    assert run("solve", file).exit_code == 2  # k is missing
    assert "-k 4" in run("solve", file).stderr
    assert run("solve", file, "-k", 99).exit_code == 2
    assert run("solve", tmp_path / "none.npy", "-k", 1).exit_code == 2
    assert run("solve", file, "-k", 1, "--method", "meis").exit_code == 2
    assert run("solve", file, "-k", 1, "--option", "start").exit_code == 2
    for wrong in ("a", "1_0", "\uff11"):  # int() takes the last two, as 10 and 1
        assert "write vertex numbers with commas" in run("solve", file, "-k", 1, "--protected", wrong).stderr
    assert run("solve", file, "-k", 2, "--method", "local_search", "--option", "max_steps=0").exit_code == 3
    assert run("solve", file, "-k", 4, "--method", "exhaustive", "--option", "max_subsets=5").exit_code == 4
    assert run("nonsense").exit_code == 2


@pytest.mark.slow
def test_compare_says_what_it_leaves_out(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "grace_opt.solvers.sdp.free_memory", lambda: 0.0
    )  # else sdp would take a minute to set itself up
    instances.write(tmp_path / "big.npy", np.diag(np.arange(1.0, 1101.0)))
    shown = run("compare", tmp_path / "big.npy", "-k", 550)
    assert shown.exit_code == 0
    assert "exhaustive" in shown.stderr
    assert "sdp" in shown.stderr


def test_compare_as_table_and_json(run, file):
    chosen = ("--method", "mies", "--method", "exhaustive")
    shown = run("compare", file, "-k", 3, *chosen)
    assert shown.exit_code == 0
    assert "the best lower bound of all methods" in shown.output
    for flags, certified in ((), True), (("--no-certify",), False):
        (alone,) = json.loads(run("compare", file, "-k", 3, *chosen[:2], *flags, "--json").stdout)
        assert (alone["lower_bound"] is not None) == certified
    mies, exact = json.loads(run("compare", file, "-k", 3, *chosen, "--json").stdout)
    assert (mies["method"], exact["gap_to_best_bound"]) == ("mies", 0)
    assert mies["gap_to_best_bound"] == pytest.approx((mies["objective"] - exact["objective"]) / mies["objective"])


def test_compare_prints_what_had_finished_before_a_failure(run, tmp_path):
    instances.write(tmp_path / "w.npy", instance("wishart", 60, 0))
    shown = run("compare", tmp_path / "w.npy", "-k", 30, "--method", "mies", "--method", "exhaustive")
    assert shown.exit_code == 4
    assert "mies" in shown.stdout
    assert "exhaustive" in shown.stderr


def test_compare_interrupted(run, file):
    def interrupted(problem, options, run):
        raise KeyboardInterrupt

    grace_opt.register_solver("interrupted")(interrupted)
    try:
        shown = run("compare", file, "-k", 3, "--method", "mies", "--method", "interrupted", "--json")
    finally:
        grace_opt.registry.unregister("interrupted")
    assert shown.exit_code == 130
    assert [s["method"] for s in json.loads(shown.stdout)] == ["mies"]
    assert "left out: interrupted" in shown.stderr


@pytest.mark.parametrize("text", ["0,1,2", "[0, 1, 2]"])
def test_vertices_as_an_option(run, file, text):
    options = ("--option", f"start={text}", "--option", "max_steps=0")
    (answer,) = json.loads(run("solve", file, "-k", 3, "--method", "local_search", *options, "--json").stdout)
    assert answer["indices"] == [0, 1, 2]


def test_the_sources_own_terms(run, tmp_path):
    (tmp_path / "g.dat").write_text("4 3 4\n1 2 0.5\n2 3 0.5\n1 3 0.5\n3 4 0.5\n")
    assert "edges: 3" in run("solve", tmp_path / "g.dat", "--method", "exhaustive").stdout
    chosen = ("--method", "mies", "--method", "exhaustive")
    assert "best: edges: 3" in run("compare", tmp_path / "g.dat", *chosen).stdout
    (tmp_path / "d.txt").write_text("3 2\n0 1 1.5\n0 2 2.5\n1 2 0.5\n")
    assert "dispersion: 2.5" in run("solve", tmp_path / "d.txt", "--method", "exhaustive").stdout


@pytest.mark.parametrize("suffix", [".dat", ".clq", ".mtx"])
def test_files_that_count_from_1_say_so(run, tmp_path, suffix):
    path, W = tmp_path / f"g{suffix}", np.array([[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    instances.write(path, -W if suffix == ".dat" else W, 2 if suffix == ".dat" else None)
    shown = run("solve", path, "-k", 2, "--required", "0").stdout
    assert "count from 0 here, from 1 in the file" in " ".join(shown.split())
    assert "counted from 0" in " ".join(run("solve", "--help").stdout.split())


def test_generate(run, tmp_path):
    path = tmp_path / "g.dat"
    shown = run("generate", "k_cluster", "-n", 12, "-k", 4, "--option", "density=0.25", "--seed", 3, "--out", path)
    assert (shown.exit_code, shown.stdout) == (0, f"wrote {path}: k_cluster, n = 12, k = 4, seed 3\n")
    assert np.array_equal(instances.read(path).W, generators.k_cluster(12, 3, k=4, density=0.25).W)
    assert instances.read(path).k == 4
    shown = run("generate", "planted", "-n", 10, "-k", 3, "--out", tmp_path / "p.npy")
    assert "k = 3 (not in the file)" in shown.stdout
    assert f"planted: {' '.join(map(str, generators.planted(10, 3).planted))}" in shown.stdout
    for arguments, message in (
        (("wishart", "-n", 4, "--out", path), "there are attention, planted"),
        (("ties", "-n", 4, "--option", "size=3", "--out", path), "accepts k, classes, levels"),
        (("planted", "-n", 8, "--out", path), "-k 4"),
        (("attention", "-n", 4, "--out", tmp_path / "w.dat"), "cannot write"),
        (("ties", "-n", 4, "--out", tmp_path / "no" / "w.npy"), "there is no folder"),
    ):
        shown = run("generate", *arguments)
        assert shown.exit_code == 2, shown.output
        assert message in shown.stderr


@pytest.mark.parametrize(
    ("given", "read"),
    [("True", True), ("true", True), ("False", False), ("false", False), ("None", None), ("null", None)],
)
def test_options_as_python_or_json_spells_them(run, file, monkeypatch, given, read):
    def told(W, k, method, **options):
        raise grace_opt.errors.OptionError(repr(options["x"]))

    monkeypatch.setattr("grace_opt.api.solve", told)
    assert f"error: {read!r}\n" in run("solve", file, "-k", 3, "--option", f"x={given}").stderr


def test_methods_take_python_spellings(run, file):
    shown = run("solve", file, "-k", 3, "--option", "path=True", "--json")
    assert shown.exit_code == 0, shown.stderr
    steps = ("--method", "local_search", "--option", "max_steps=None")
    assert run("solve", file, "-k", 3, *steps).exit_code == 0
    for command in ("solve", "generate"):
        assert "True, False and None" in " ".join(run(command, "--help").output.split())


@pytest.mark.parametrize(
    ("given", "read"), [("1e3", 1000), ("-2E1", -20), ("1.0", 1.0), ("1e-3", 0.001), ("1e999", math.inf)]
)
def test_powers_of_ten_as_options(given, read):
    (value,) = parse_options([f"x={given}"]).values()
    assert value == read
    assert type(value) is type(read)


@pytest.mark.parametrize("command", [("solve", "w.npy"), ("generate", "ties", "-n", 4, "--out", "x.npy")])
def test_an_option_given_twice_is_refused(run, file, monkeypatch, command):
    monkeypatch.chdir(file.parent)
    shown = run(*command, "-k", 3, "--option", "levels=2", "--option", "levels=3")
    assert shown.exit_code == 2
    assert "--option levels=... is given twice" in shown.stderr


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000, "1," + "9" * 5000])
def test_options_too_long_to_be_read(run, file, value):
    shown = run("solve", file, "-k", 3, "--option", f"start={value}")
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
    assert "--option start=" in shown.stderr


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        *((kind, 999_999_999) for kind in ("attention", "k_cluster", "dispersion")),  # the others fill GiB first
        *((kind, n) for kind in generators.GENERATORS for n in (9_999_999_999, 10**25)),
    ],
)
def test_instances_larger_than_memory(run, tmp_path, kind, n):
    """6.94 EiB are on no machine: the system refuses them at once."""
    shown = run("generate", kind, "-n", n, "-k", 3, "--out", tmp_path / "x.npy")
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1), shown.output
    assert shown.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 7 EiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.parametrize("command", ["solve", "compare"])
def test_too_little_memory_is_one_line(run, file, monkeypatch, command, error):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr(f"grace_opt.api.{command}", full)
    shown = run(command, file, "-k", 3)
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
    assert "error: there is too little memory" in shown.stderr


def test_bugs_keep_their_traceback(run, file, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr("grace_opt.api.solve", broken)
    assert isinstance(run("solve", file, "-k", 3).exception, RuntimeError)


def test_version(run):
    assert run("--version").output.startswith("grace-opt 0.")


def test_help_teaches(run):
    for command in ("solve", "compare", "generate", "demo"):
        shown = run(command, "--help")
        assert shown.exit_code == 0
        assert "Example" in shown.output or "passwords found" in shown.output


def test_what_a_library_prints_is_no_answer(run, tmp_path, monkeypatch):
    """SCS prints a line of its own at Ctrl-C, which made `--json` invalid."""
    np.save(tmp_path / "w.npy", np.eye(3))
    for name in ("solve", "compare"):
        real = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *a, real=real, **b: (print("Failure:interrupted"), real(*a, **b))[1])
        shown = run(name, tmp_path / "w.npy", "-k", 1, "--method", "mies", "--json")
        assert json.loads(shown.stdout)
        assert "Failure:interrupted" in shown.stderr


@pytest.fixture
def named(tmp_path):
    path = tmp_path / "w.csv.gz"
    instances.write(path, [[4.0, 1, -2], [1, 3, 0], [-2, 0, 5]], labels=["a", "b", "2"])
    return path


@pytest.mark.parametrize("command", ["solve", "compare"])
def test_the_most_with_vertices_by_name_or_number(run, named, command):
    exact = ("--method", "exhaustive", "--json")
    for required, protected in (("a", "2"), ("a", "b")):
        result = run(command, named, "-k", 2, *exact, "--maximize", "--required", required, "--protected", protected)
        (answer,) = json.loads(result.stdout)
        assert answer["labels"] == (["a", "b"] if protected == "2" else ["a", "2"])
        assert answer["lower_bound"] == answer["objective"] == answer["upper_bound"] == (9 if protected == "2" else 5)
        assert answer["maximize"] is True
    shown = run(command, named, "-k", 2, "--method", "exhaustive", "--maximize").output
    assert "upper bound" in shown
    assert command == "compare" or "chosen vertices  a b" in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--required", "q"], "required names 'q'"),
        (["--protected", "7"], "protected names '7'"),
        (["--required", "2,0"], "required names '0'"),  # numbers are names here, as one of them is
        (["--required", "a,b,2"], "required names 3 vertices, but k = 2"),
        (["--required", "a", "--protected", "a"], "both"),
    ],
)
def test_vertices_that_are_not_in_the_file(run, named, given, message):
    result = run("solve", named, "-k", 2, *given)
    assert result.exit_code == 2
    assert message in result.output


def test_the_largest_f_of_the_literatures_files_is_the_worst(run, tmp_path):
    path = tmp_path / "g.dat.gz"
    assert "(not in the file)" not in run("generate", "k_cluster", "-n", 8, "-k", 3, "--out", path).output
    best, worst = (run("solve", path, "--method", "exhaustive", *most) for most in ([], ["--maximize"]))
    assert "note: in k-cluster files the least f is the best; --maximize seeks the least edges" in worst.output
    edges = [int(result.stdout.split("edges: ")[1].split()[0]) for result in (best, worst)]
    assert edges[0] > edges[1]
    assert "note: in" not in best.output


def test_numbers_are_vertices_where_no_name_is_a_number(run, tmp_path):
    path = tmp_path / "w.csv"
    instances.write(path, [[4.0, 1, -2], [1, 3, 0], [-2, 0, 5]], labels=["a", "b", "c"])
    (answer,) = json.loads(run("solve", path, "-k", 2, "--required", "2", "--protected", "1", "--json").stdout)
    assert answer["labels"] == ["a", "c"]
    assert "7 is neither a name" in run("solve", path, "-k", 2, "--protected", "7").output


@pytest.fixture
def commas(tmp_path):
    path = tmp_path / "w.tsv"
    instances.write(path, [[4.0, 1, -2], [1, 3, 0], [-2, 0, 5]], labels=["a,b", 'the "c"', "d"])
    return path


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (["--required", '"a,b"'], ["a,b", "d"]),
        (["--required", '"a,b", "the ""c"""'], ["a,b", 'the "c"']),
        (["--protected", 'd,"a,b"', "-k", 1], ['the "c"']),
        (["--required", "", "--protected", ""], ["a,b", "d"]),
        (["--option", 'start="a,b",d', "--method", "local_search", "--option", "max_steps=0"], ["a,b", "d"]),
        (["--option", 'start="a,b"', "--method", "local_search", "--option", "max_steps=0", "-k", 1], ["a,b"]),
        (["--option", "start=0,2", "--method", "local_search", "--option", "max_steps=0"], ["a,b", "d"]),
        (["--option", "start=1", "--method", "local_search", "--option", "max_steps=0", "-k", 1], ['the "c"']),
        (["--option", 'start=["d"]', "--method", "local_search", "--option", "max_steps=0", "-k", 1], ["d"]),
        (["--option", "start=think", "--method", "local_search"], ["a,b", "d"]),
    ],
)
def test_names_with_commas_are_quoted(run, commas, given, chosen):
    more = [] if "--method" in given else ["--method", "exhaustive"]
    result = run("solve", commas, "-k", 2, *more, "--json", *given)
    assert result.exit_code in (0, 3), result.output  # 3: no step was taken
    assert json.loads(result.stdout)[0]["labels"] == chosen


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--required", '"a,b'], "cannot be read"),
        (["--required", "a,b"], "required names 'a'"),
        (["--method", "tabu", "--option", "start=d,q"], "start names 'q'"),
        (["--method", "tabu", "--option", "start=thnk"], "Did you mean 'think'"),
    ],
)
def test_names_that_are_not_quoted(run, commas, given, message):
    result = run("solve", commas, "-k", 2, *given)
    assert result.exit_code == 2
    assert message in result.output
    assert """'"a,b",c'""" in " ".join(run("solve", "--help").output.split())


@pytest.mark.parametrize("command", ["solve", "compare"])
def test_an_asymmetric_file_says_what_to_write_here(run, tmp_path, command):
    (tmp_path / "w.csv").write_text("1,4\n0,1\n")
    given = (command, tmp_path / "w.csv", "-k", 2, "--method", "mies", "--json")
    refused = run(*given)
    assert refused.exit_code == 2
    assert "on the command line, --symmetrize" in refused.output
    assert json.loads(run(*given, "--symmetrize").stdout)[0]["objective"] == 6


BUDGETS = ("calibrate", "budgets", "pocket")


@pytest.mark.slow
def test_budgets_writes_what_each_layer_loses_and_shows_who_keeps_how_much(run, tmp_path):
    (tmp_path / "text.txt").write_text("the quiet river runs past a late singer , and the mill stands . " * 60)
    done = run(*BUDGETS, "--text", tmp_path / "text.txt", "--tokens", 768, "-o", tmp_path / "l.safetensors")
    assert done.exit_code == 0, done.output
    assert "with 25% of the tokens on average" in done.output
    losses = pytest.importorskip("grace_opt.hf").LayerLosses.load(tmp_path / "l.safetensors")
    assert losses.layers == (0, 1, 2)
    assert losses.heads == 2
    assert f"wrote {tmp_path / 'l.safetensors'}" in done.output.replace("\n", "")
    others = []
    for more in ((), ("--evict", "streaming-llm")):
        given = (*BUDGETS, "--text", tmp_path / "text.txt", "--tokens", 768, "-o", tmp_path / "n.safetensors")
        done = run(*given, "--no-heads", *more)
        assert done.exit_code == 0, done.output
        others.append(pytest.importorskip("grace_opt.hf").LayerLosses.load(tmp_path / "n.safetensors"))
    assert [each.heads for each in others] == [0, 0]
    assert others[0] != others[1]
    (tmp_path / "text.txt").write_text("too short")
    refused = run(*BUDGETS, "--text", tmp_path / "text.txt", "-o", tmp_path / "m.safetensors")
    assert refused.exit_code == 2
    assert "no text has 768 tokens" in refused.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pyramidkv", "write graph, snapkv, h2o or streaming_llm; this one divides"),
        ("snapkw", "Did you mean 'snapkv'?"),
    ],
)
def test_layers_are_measured_for_evictions_with_one_budget(run, tmp_path, name, words):
    refused = run("calibrate", "budgets", "no such model", "--evict", name, "-o", tmp_path / "l.safetensors")
    assert refused.exit_code == 2
    assert words in " ".join(refused.output.split())


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_text_is_named(run, tmp_path, text):
    (tmp_path / "empty.txt").write_text(text)
    refused = run("calibrate", "basis", "pocket", "--text", tmp_path / "empty.txt", "-o", tmp_path / "b.safetensors")
    assert refused.exit_code == 2
    assert "empty.txt is empty; leave it out" in refused.output.replace("\n", " ")


@pytest.mark.parametrize("command", ["basis", "budgets"])
def test_files_of_tensors_are_named_so(run, tmp_path, command):
    for name, words in {"st.bin": "only .safetensors", "st": "only .safetensors", ".": "is a folder"}.items():
        refused = run("calibrate", command, "pocket", "-o", tmp_path / name)
        assert refused.exit_code == 2
        assert words in refused.output.replace("\n", " ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("old", "new"), [("basis", "calibrate basis"), ("layers", "calibrate budgets")])
def test_commands_that_moved_say_their_new_name(run, old, new):
    for given in ((), ("pocket", "-o", "file.safetensors", "--no-heads"), ("--list",), ("--help",)):
        refused = run(old, *given)
        assert refused.exit_code == 2
        assert f"error: grace-opt {old} has another name now: write grace-opt {new}." in refused.output
    assert f"\n  {old} " not in run("--help").output


def test_bases_are_listed_with_and_without_the_name_of_their_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr("grace_opt.hf.bases.basis_folder.cached_assets_path", lambda *names: tmp_path)
    for given in (("--list",), ("--clear",)):
        plain, named = run("calibrate", *given), run("calibrate", "basis", *given)
        assert plain.exit_code == named.exit_code == 0
        assert "0 files" in plain.output
        assert plain.output == named.output
    assert "different things" in run("calibrate", "--list", "--clear").output
    refused = run("calibrate", "--list", "budgets", "pocket", "-o", "x.safetensors")
    assert refused.exit_code == 2
    assert "write --list and --clear after budgets, or without it" in refused.output


def test_prompts_are_added_listed_verified_and_cleared(run, tmp_path):
    text, folder = tmp_path / "manual.txt", tmp_path / "prompts"
    text.write_text("the quiet river runs past a late singer , and the mill stands . " * 30, encoding="utf-8")
    given = "--folder", folder
    added = run("prompts", "add", "pocket", text, *given)
    assert added.exit_code == 0, added.output
    assert re.search(r"manual\.txt: 4\d\d tokens$", added.output.replace("\n", ""))
    longer = tmp_path / "longer.txt"
    longer.write_text(text.read_text(encoding="utf-8") + "the quiet river", encoding="utf-8")
    assert re.search(r"all but the last \d were there already", run("prompts", "add", "pocket", longer, *given).output)
    assert run("prompts", "add", "pocket", text, text, *given).exit_code == 0  # there already
    listed = run("prompts", "list", *given)
    assert re.search(r"llama-[0-9a-f]{32} +4\d\d", listed.output)
    assert "1 prompt, " in listed.output
    assert "1 prompt as written" in run("prompts", "verify", *given).output
    (path,) = folder.glob("*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    verified = run("prompts", "verify", *given)
    assert "it is damaged" in verified.output.replace("\n", " ")
    assert "0 prompts as written" in verified.output
    assert run("prompts", "add", "pocket", text, *given, "--bits", "3", "--max-bytes", "1 GB").exit_code == 0
    assert "removed 1 prompt from" in run("prompts", "clear", *given).output
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("list", "--folder", "missing"), "there is no folder missing; write the one that prompts were stored in"),
        (("clear", "--folder", "missing"), "there is no folder missing"),
        (("add", "pocket", "missing.txt", "--folder", "new"), "missing.txt cannot be read"),
        (("add", "pocket", ".", "--folder", "new"), ". is a folder; give a text file in UTF-8."),
        (("add", "pocket", "text.txt", "--folder", "text.txt"), "it is a file"),
        (("add", "pocket", "text.txt", "--folder", "new", "--max-bytes", "much"), "max_bytes='much': write a number"),
        (("add", "pocket", "text.txt", "--folder", "new", "--bits", "0"), "bits=0"),
        (("add", "pocket", "short.txt", "--folder", "new"), "short.txt has 3 tokens; prompts are stored from 129"),
        (("add", "pocket", "text.txt", "--folder", "new", "--max-bytes", "10 B"), "text.txt was not stored in"),
    ],
)
def test_prompts_and_wrong_input(run, tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quiet river " * 100, encoding="utf-8")
    Path("short.txt").write_text("the quiet river", encoding="utf-8")
    refused = run("prompts", *given)
    assert refused.exit_code == 2
    assert words in refused.output.replace("\n", " ")
    assert not list(tmp_path.glob("new/*/*"))
