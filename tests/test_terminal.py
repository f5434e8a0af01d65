"""Any terminal: narrow ones, ones that know few letters, and text with brackets, which is not markup."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import grace_opt
from grace_opt import instances
from grace_opt._util.progress import progress_bar
from grace_opt._util.terminal import FittingTable
from grace_opt.cli import app as cli
from grace_opt.cli.tables import print_demo, solution_table
from grace_opt.comparison import Comparison
from grace_opt.instances import generators
from grace_opt.solution import SolverResult
from tests import starter

ROOT = Path(__file__).resolve().parent.parent
ENCODINGS = ("ascii", "cp1252", "cp437", "utf-8")


class Terminal:
    """The program, run in this process with streams of a given encoding and a given width."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def __call__(self, *arguments, encoding="utf-8", width=80):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["grace-opt", *map(str, arguments)])
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            patch.setenv("COLUMNS", str(width))
            patch.delenv("FORCE_COLOR", raising=False)
            for console in (cli.console, cli.errors):
                patch.setitem(console._environ, "COLUMNS", str(width))
                patch.setattr(console, "_width", width)
            with pytest.raises(SystemExit) as stopped:
                cli.run()
        self.code = stopped.value.code or 0
        for stream in streams:
            stream.flush()
        self.out, self.err = (stream.buffer.getvalue().decode(encoding) for stream in streams)
        return self.code


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr("grace_opt.api.DEFAULT_COMPARE_SECONDS", 0.3)
    return Terminal(monkeypatch)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "w.npz"
    instances.write(path, generators.attention(16, seed=0).W, 6)
    return path


def shown(table, width, **options):
    console = Console(file=io.StringIO(), width=width, color_system=None, **options)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_command_on_terminals_that_know_few_letters(terminal, file, tmp_path, encoding):
    folder = tmp_path / "[b]λ×東\udcff"  # the last is a byte that is no letter in UTF-8
    folder.mkdir()
    strange = folder / "[bold]é.npz"
    strange.write_bytes(file.read_bytes())
    runs = [
        ("--help",),
        ("methods",),
        ("methods", "--help"),
        ("solve", strange, "--certify"),
        ("compare", strange, "--method", "mies", "--method", "think"),
        ("generate", "planted", "-n", 9, "-k", 3, "--out", folder / "w.npy"),
    ]
    for arguments in runs:
        assert terminal(*arguments, encoding=encoding) == 0, (arguments, terminal.err)
        assert terminal.out
        assert "\\u" not in terminal.out or arguments[0] == "generate"
    assert "[b]" in terminal.out  # where generate wrote to
    assert ("λ" if encoding == "utf-8" else "\\u03bb") in terminal.out
    for arguments in (("solve", folder), ("report", folder), ("solve", folder / "λ.npz")):
        assert terminal(*arguments, encoding=encoding) == 2
        assert "rror" in terminal.err
        assert ("λ" if encoding == "utf-8" else "\\u03bb") in terminal.err


def test_names_stay_apart_on_terminals_that_know_few_letters(terminal, tmp_path):
    path = tmp_path / "w.csv"
    instances.write(path, [[0, 1, 5], [1, 0, 5], [5, 5, 0]], labels=["ÖÄ", "ÜÄ", "c"])
    assert terminal("solve", path, "-k", 2, encoding="ascii") == 0
    assert r"\xd6\xc4 \xdc\xc4" in terminal.out
    assert terminal("solve", path, "-k", 2, encoding="utf-8") == 0
    assert "ÖÄ ÜÄ" in terminal.out


def test_json_does_not_depend_on_the_encoding(terminal, file):
    answers = []
    for encoding in ENCODINGS:
        assert terminal("solve", file, "--json", "--option", "path=false", encoding=encoding, width=20) == 0
        (answer,) = json.loads(terminal.out)
        answers.append({name: value for name, value in answer.items() if name != "stats"})
    assert answers == answers[:1] * len(ENCODINGS)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[/x]", "[bold]", "[red]a[/]", ":smile:", "a\\[/b]"])
def test_what_users_write_is_not_markup(terminal, file, tmp_path, text):
    for arguments in (
        ("solve", file, "--method", text),
        ("solve", file, "--option", text),
        ("solve", file, "--option", f"start={text}", "--method", "local_search"),
        ("solve", file, "--protected", text),
        ("solve", file, text),
        ("solve", tmp_path / f"{text}.npy"),
        ("compare", file, "--method", text),
        ("generate", text, "-n", 4, "--out", "w.npy"),
        ("generate", "ties", "-n", 4, "--out", tmp_path / text / "no" / "w.npy"),
        ("demo", "--model", tmp_path / text),
        ("report", tmp_path / text),
        (text,),
    ):
        assert terminal(*arguments, width=300) == 2, (arguments, terminal.err)
        assert text in terminal.err.replace("\\\\", "\\"), arguments


def test_an_extra_keeps_its_brackets(terminal, monkeypatch):
    for missing, module in (
        ("transformers", "grace_opt.hf.tools.demo"),
        ("matplotlib", "matplotlib"),
        ("optimum.quanto", "optimum.quanto"),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)  # as if it were missing
            assert terminal("demo") == 2
        assert f"the demo needs {missing}" in terminal.err
        assert 'pip install ".[demo]"' in terminal.err
    assert terminal("report", "--help") == 0
    assert 'pip install ".[bench]"' in " ".join(terminal.out.split())


@pytest.fixture
def bracketed():
    """A method with a summary and a guarantee that markup would swallow or choke on."""

    def solver(problem, options, run):
        """Take the first [/k] candidates."""
        order = problem.candidates.cumsum(-1)
        return SolverResult(problem.candidates & (order <= problem.k.unsqueeze(-1)))

    grace_opt.register_solver("first", guarantee="[red]none")(solver)
    yield "first"
    grace_opt.registry.unregister("first")


def test_tables_and_bars_are_not_markup(terminal, file, bracketed, capsys):
    for width in (300, 80, 40):
        assert terminal("methods", width=width) == 0
        assert "Take the first [/k] candidates." in " ".join(terminal.out.split())
        assert "[red]none" in terminal.out
    left = Comparison(grace_opt.compare(np.eye(4), 2, [bracketed]).solutions, {"[/x]": "[/y]"})
    assert "left out: [/x]" in " ".join(str(left).split())
    print_to = Console(file=io.StringIO(), width=80)  # somebody else's, which reads markup
    print_to.print(left)
    assert "[/x]" in print_to.file.getvalue()
    with progress_bar(True, 1, "[/y]") as show:
        show("[/x]", 1)
    said = capsys.readouterr().err
    assert "[/x]" in said
    assert "[/y]" in said


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 60, 40])
def test_no_number_is_cut_or_broken(terminal, tmp_path, width):
    """Long numbers in every column: scales of 1e-300 and 1e300, several instances, all methods."""
    W = generators.attention(10, seed=1).W
    one, many = tmp_path / "one.npz", tmp_path / "many.npz"
    instances.write(one, -W * 1e299, 4)
    instances.write(many, np.stack([W * 1e-150, W, W * 1e150]), np.full(3, 4))
    methods = [word for name in ("mies", "branch_and_bound", "drop_greedy") for word in ("--method", name)]
    for path in (one, many):
        for arguments in (("solve", path, "--certify"), ("compare", path, *methods)):
            assert terminal(*arguments, "--json") in (0, 3)
            answers = json.loads(terminal.out)
            assert terminal(*arguments, width=width) in (0, 3)
            assert "…" not in terminal.out
            assert max(map(len, terminal.out.splitlines())) <= width
            words = terminal.out.split()
            for answer in answers:
                assert answer["method"] in words or f"{answer['method']}:" in words
                numbers = np.ravel(answer["objective"])
                if arguments[0] == "solve" or len(numbers) == 1:
                    assert {f"{f:.9g}" for f in numbers} <= set(words)
    assert terminal("methods", width=width) == 0
    assert "branch_and_bound" in terminal.out.split()
    assert max(map(len, terminal.out.splitlines())) <= width


def test_a_comparison_fits_eighty_columns(terminal, file):
    assert terminal("compare", file) == 0
    (row,) = (line for line in terminal.out.splitlines() if line.startswith("branch_and_bound "))
    assert row.split()[2:5] == ["0.000%", "optimal", "OPTIMAL"]
    assert terminal.out.startswith("method")


def test_a_batch_is_a_table_or_a_list():
    batch = grace_opt.solve(np.stack([generators.attention(12, seed=s).W for s in range(25)]), 4, certify=True)
    wide = shown(solution_table(batch, "as the file says"), 80)
    assert wide.startswith("instance")
    assert "the first 20 shown; --json gives all; as the file says" in " ".join(wide.split())
    narrow = shown(solution_table(batch), 30)
    for text in (wide, narrow):
        for b in range(20):
            assert f"{batch.objective[b]:.9g}" in text.split()
            assert f"{batch.gap[b]:.3%}" in text.split()
            assert " ".join(map(str, batch.indices[b])) in " ".join(text.split())
        assert f"{batch.objective[20]:.9g}" not in text.split()


def test_a_fitting_table_fits_exactly():
    table = FittingTable("name", title="[title]", caption="[caption]")
    table.add_column("number", justify="right")
    table.add_column("words", min_width=10)
    table.add_row("a", "123456789", "some words that are wrapped")
    least = len("name") + 2 + 9 + 2 + 10
    for width in (least, least + 1, 200):
        text = shown(table, width)
        assert "a     123456789  some words" in text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    text = shown(table, least - 1)
    assert text.split() == "[title] name a number: 123456789 words: some words that are wrapped [caption]".split()


def report(name="GRACE + local search"):
    from grace_opt.hf.tools.demo import DemoReport, DemoRow, SolverRow

    rows = [DemoRow("dense", 16, 3_129_344, 1.0, 0.0, 1.0, 5), DemoRow(name, 12.0, 2_206_187, 0.705, 3.1e-5, 0.5, 4)]
    values = {"model": "org/[bold]m", "question": "Who [/]?", "answer": "[red]x", "rows": rows, "questions": 5}
    values |= {
        "layers": [0],
        "kv_heads": 2,
        "head_dim": 64,
        "context_tokens": 1010,
        "later_tokens": 128,
        "seconds": 1.0,
    }
    values |= {"solvers": [SolverRow("GRACE + local search", 0.6, 3.19e8, 0.058)]}
    from dataclasses import fields

    return DemoReport(**{f.name: values.get(f.name) for f in fields(DemoReport)})


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_the_demo_shows_what_it_measured(width):
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=width, color_system=None)
    print_demo(console, report("[/x] it"))
    console.file.flush()
    text = console.file.buffer.getvalue().decode("ascii")
    for part in ("org/[bold]m", "Who [/]? [red]x", "[/x] it", "4 of 5"):
        assert part in " ".join(text.split())
    assert {"3.19e+08", "5.8%", "3.1e-05", "2,154", "70.5"} <= set(text.split())
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()[2:]) <= width
    assert ("\nmethod [/x]" in text) == (width < 80)  # tables there, lists here


@pytest.mark.slow
def test_compare_answers_where_optimality_was_proved(terminal, file):
    """One method's proof serves another that a limit stopped; without a proof, the optimum is missed."""
    stopped = ("--method", "local_search", "--method", "tabu", "--no-certify", "--time-limit", "1e-9")
    assert terminal("compare", file, *stopped) == 3
    assert "LIMIT" in terminal.out
    assert terminal("compare", file, *stopped, "--json") == 3
    assert terminal("compare", file, "--method", "tabu", "--method", "branch_and_bound", "--time-limit", "0.2") == 0
    assert terminal.out.count("OPTIMAL") == 2
    assert terminal("compare", file) == 0


def test_compare_of_no_method_is_no_answer(terminal, file, monkeypatch):
    monkeypatch.setattr("grace_opt.api.compare", lambda *a, **b: Comparison((), {"mies": "refused"}))
    assert terminal("compare", file) == 4
    assert "left out: mies: refused" in terminal.err


@pytest.mark.parametrize(
    ("command", "first"),
    [
        *(((*words, "--help"), "answered") for words in ((), ("solve",), ("compare",))),
        (("tune", "--help"), "a setting keeps what was asked for"),
    ],
)
def test_help_lists_the_exit_codes(terminal, command, first):
    assert terminal(*command) == 0
    told = " ".join(terminal.out.split())
    assert f"Exit codes: 0 {first}" in told
    assert all(f" {code} " in told for code in cli.Exit)
    assert not [
        line for line in terminal.out.splitlines() if line.startswith("  ") and line.endswith("...")
    ]  # summaries that are cut


def test_ctrl_c_is_one_line_and_130(terminal, file, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("grace_opt.api.solve", stop)
    assert terminal("solve", file) == 130
    assert terminal.err == "interrupted: nothing had been found yet.\n"


def written_to(stdout, *arguments):
    """Exit code and errors of the program, in a process of its own that writes to an open file."""
    code = f"""
import runpy, sys
sys.argv[1:] = {[str(argument) for argument in arguments]}
runpy.run_module("grace_opt", run_name="__main__", alter_sys=True)
"""
    with tempfile.TemporaryFile() as errors:
        starter.start(code, os.environ | {"COLUMNS": "80"}, stdout, errors.fileno(), ROOT)
        ended = starter.end()
        errors.seek(0)
        return ended, errors.read()


def start(*arguments, **options):
    """The program in a process of its own, from the very start of Python."""
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("LC_", "LANG", "PYTHONUTF8", "PYTHONIO", "PYTHONUNBUF"))
    }
    environment |= {"COLUMNS": "80", **options.pop("env", {})}
    options.setdefault("stdout", subprocess.PIPE)
    command = [sys.executable, "-m", "grace_opt", *map(str, arguments)]
    return subprocess.run(command, env=environment, timeout=300, stderr=subprocess.PIPE, **options)


@pytest.mark.slow
def test_the_plainest_locale(tmp_path):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    out = os.fsencode(tmp_path) + "/λ[x].dat".encode()
    done = start(
        "generate", "k_cluster", "-n", 8, "-k", 3, "--out", os.fsdecode(out), env=plain, stdout=subprocess.PIPE
    )
    assert done.returncode == 0, done.stderr
    assert b"[x].dat: k_cluster, n = 8, k = 3, seed 0" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["0", "1", "10"])
def test_a_terminal_without_columns(columns, file, tmp_path):
    """Nothing was printed, and the exit code was 0."""
    done = start("solve", file, "-k", 3, env={"COLUMNS": columns})
    assert done.returncode == 0
    assert re.search(rb"objective +[-\d]", done.stdout)
    done = start("solve", tmp_path / "none\x1b[31m.npy", "-k", 3, env={"COLUMNS": columns})
    assert done.returncode == 2
    assert rb"none\x1b[31m.npy" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_full_disk_is_one_line(file, flags):
    with open("/dev/full", "wb") as full:
        done = written_to(full.fileno(), "solve", file, *flags)
    assert done == (1, b"error: the output cannot be written: No space left on device.\n")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a shell closes the streams")
@pytest.mark.parametrize("flags", ["", "--json"])
@pytest.mark.parametrize(
    ("closed", "code", "told"),
    [(">&-", 1, b"error: the output cannot be written: it is closed.\n"), ("2>&-", 0, b""), (">&- 2>&-", 1, b"")],
)
def test_closed_streams(file, flags, closed, code, told):
    command = f'"{sys.executable}" -m grace_opt solve "{file}" {flags} {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (code, told)
    assert bool(done.stdout) == (code == 0)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pipes are POSIX")
def test_a_reader_that_has_seen_enough(file):
    """What is left in the buffer when the reader is gone ended in a traceback."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = written_to(write, "solve", file, "--json")
    finally:
        os.close(write)
    assert done == (1, b"")


@pytest.mark.parametrize("refused", ["folder", "full"])
def test_a_demo_that_cannot_be_written_is_shown_and_leaves_no_folder(terminal, monkeypatch, tmp_path, refused):
    """The folder is refused in one sentence before anything is measured, the files after that was shown."""
    made = report()
    monkeypatch.setattr(type(made), "to_dict", lambda self: {})
    monkeypatch.setattr("grace_opt.hf.models.loading.load_model", lambda *a: (None, None))
    monkeypatch.setattr("grace_opt.hf.tools.demo.run_demo", lambda *a, **b: made)
    out = tmp_path / "new" / "demo"
    if refused == "folder":
        (tmp_path / "new").write_text("")
        told = f"cannot make the folder {out}: Not a directory. Choose another place."
    else:
        real = os.open

        def full(path, flags, *mode):
            if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(path, flags, *mode)

        monkeypatch.setattr(os, "open", full)
        told = f"cannot write {out / 'demo.json'}: No space left on device. Make room, or choose another place."
    assert terminal("demo", "--out", out, width=300) == 2
    assert terminal.err.strip() == f"error: {told}"  # where the bar was, there may be an empty line
    assert ("GRACE + local search" in terminal.out) == (refused == "full")
    assert [p.name for p in tmp_path.iterdir()] == (["new"] if refused == "folder" else [])


@pytest.mark.slow
def test_what_is_told_names_no_file_that_only_the_repository_has():
    """`pip install` brings no docs: a message that sends there sends nowhere."""
    package = Path(grace_opt.__file__).parent
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        described = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
        }
        told = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described
        ]
        assert not [text for text in told if "docs/" in text], path


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "is_table"), [(None, True), ("60", False)])
def test_a_table_stays_a_table_in_a_file(tmp_path, columns, is_table):
    """A file, or a pipe, is no terminal of 80 columns: a line there may be as long as it wants."""
    code = """if True:
        from grace_opt.cli.common import console
        from grace_opt.cli.tables import FittingTable
        table = FittingTable(*(f"a column with a long name {n}" for n in range(9)))
        for row in range(3):
            table.add_row(*(f"row {row}, number {n}" for n in range(9)))
        console.print(table)
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")} | {
        "PYTHONPATH": str(ROOT)
    }
    environment |= {} if columns is None else {"COLUMNS": columns}
    shown = starter.python(code, environment).stdout
    rows = [line for line in shown.splitlines() if "row 1, number 0" in line and "row 1, number 8" in line]
    assert (len(rows) == 1) == is_table, shown
    assert ("a column with a long name 3:" in shown) != is_table  # as in a list
