"""The command line: output for people and machines, and exit codes that mean something."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from grace_opt import instances
from grace_opt.cli import app
from grace_opt.testing import instance


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "w.npy"
    instances.write(path, instance("wishart", 8, 0))
    return path


def test_methods(run):
    assert "1-swap-local optimum" in run("methods").output
    names = [row["method"] for row in json.loads(run("methods", "--json").output)]
    assert {"mies", "think", "exhaustive"} <= set(names)


def test_solve_prints_a_table_or_json(run, file):
    shown = run("solve", file, "-k", 3, "--method", "exhaustive")
    assert shown.exit_code == 0
    assert "OPTIMAL" in shown.output
    (answer,) = json.loads(run("solve", file, "-k", 3, "--method", "exhaustive", "--json").output)
    assert answer["status"] == "OPTIMAL"
    assert answer["gap"] == 0.0
    assert len(answer["indices"]) == 3
    (plain,) = json.loads(run("solve", file, "-k", 3, "--json").output)
    assert plain["lower_bound"] is None  # JSON has no infinity


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


def test_k_comes_from_the_file(run, tmp_path):
    instances.write(tmp_path / "w.npz", np.stack([instance("wishart", 5, s) for s in range(25)]), np.full(25, 2))
    shown = run("compare", tmp_path / "w.npz")
    assert shown.exit_code == 0
    assert "25 instances" in shown.output
    everything = json.loads(run("compare", tmp_path / "w.npz", "--json").output)
    assert {len(s["objective"]) for s in everything} == {25}


def test_exit_codes(run, file, tmp_path):
    assert run("solve", file).exit_code == 2  # k is missing
    assert "-k 4" in run("solve", file).stderr
    assert run("solve", file, "-k", 99).exit_code == 2
    assert run("solve", tmp_path / "none.npy", "-k", 1).exit_code == 2
    assert run("solve", file, "-k", 1, "--method", "meis").exit_code == 2
    assert run("solve", file, "-k", 1, "--option", "start").exit_code == 2
    assert run("solve", file, "-k", 1, "--protected", "a").exit_code == 2
    assert run("solve", file, "-k", 2, "--method", "local_search", "--option", "max_steps=0").exit_code == 3
    assert run("solve", file, "-k", 4, "--method", "exhaustive", "--option", "max_subsets=5").exit_code == 4
    assert run("nonsense").exit_code == 2


def test_compare_says_what_it_leaves_out(run, tmp_path):
    instances.write(tmp_path / "big.npy", np.diag(np.arange(1.0, 1101.0)))
    shown = run("compare", tmp_path / "big.npy", "-k", 550)
    assert shown.exit_code == 0
    assert "exhaustive" in shown.stderr


def test_version(run):
    assert run("--version").output.startswith("grace-opt 0.")


def test_help_teaches(run):
    for command in ("solve", "compare", "demo"):
        shown = run(command, "--help")
        assert shown.exit_code == 0
        assert "Example" in shown.output or "Hides a password" in shown.output
