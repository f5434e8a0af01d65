"""The benchmark of certificates, in small: what a row counts, what the page says, and that it is formed again."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from bench import certificates, real_heads
from bench.certificates import Case, measure, page
from bench.experiments.problems import from_files
from bench.report import MARK
from grace_opt import instances
from grace_opt.instances import generators

HEADS = np.stack([generators.attention(12, seed).W for seed in range(3)])
CASES = [
    Case("real heads, n = 12", 5, lambda: HEADS),
    Case("of both signs, n = 10", 5, lambda: certificates.mixed(10, 0)[None], tight=False),
]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_row_has_gaps_times_and_what_is_below() -> None:
    heads, both = (measure(case, rounds=2) for case in CASES)
    assert heads["instances"] == heads["not below"] == 3
    assert 0 <= heads["tabu tight"] <= heads["tabu fast"] <= heads["single"]
    assert heads["tabu fast"] <= heads["mies fast"]
    assert set(heads["ms"]) == {"1", "2"}
    assert min(heads["ms"].values()) > 0
    assert heads["best single"] in certificates.SINGLE
    assert "tabu tight" not in both
    assert torch.get_num_threads() == 2


def test_a_certificate_below_a_single_bound_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates.bounds, "certificate", lambda p, level="fast", incumbent=None: -1e9 * p.k.double())
    row = measure(CASES[0], rounds=1)
    assert row["not below"] == row["proved"] == 0
    said = page({"rounds": 1, "rows": [row]})
    assert "3 of 3 certificates are below a single bound" in said.found


@pytest.mark.slow
def test_the_command_measures_and_forms_the_page_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(certificates, "real_heads", lambda file: CASES[:1])
    monkeypatch.setattr(certificates, "pocket_heads", lambda: CASES[0])
    monkeypatch.setattr(certificates, "generated", lambda: CASES[1:])
    out = tmp_path / "certificates"
    words = ["certificates", "--rounds", "1", "--allow-dirty", "--out", str(out)]
    for more in ([], ["--report-only"]):
        monkeypatch.setattr(sys, "argv", words + more)
        certificates.main()
        text = out.with_suffix(".md").read_text()
        assert "no certificate is below any single bound (7 instances)" in text
        assert "| of both signs, n = 10 | 5 | 1 |" in text
        assert "ms, 1 thread | ms, 2 threads | tabu proved by fast | never below |" in text
        assert MARK in text or "+" not in text.rpartition("commit ")[2].split(",")[0]
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert text.strip() in capsys.readouterr().out


def test_the_sets_are_the_same_at_every_run() -> None:
    cases = [*certificates.real_heads_of(HEADS), *certificates.generated()]
    assert [case.k for case in cases[:2]] == [4, 8]
    assert len({case.name for case in cases[2:]}) == len(cases) - 2
    small = [case for case in cases if "n = 100" in case.name and "1000" not in case.name]
    assert small
    for case in small:
        assert (case.make() == case.make()).all()


def test_saved_heads_are_read_by_the_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_heads, "heads", lambda model, text: HEADS)
    monkeypatch.setattr(real_heads, "model_path", lambda model: model)
    monkeypatch.setattr(sys, "argv", ["real_heads", "--text", "any", "--save", str(tmp_path / "heads.npz")])
    real_heads.main()
    configs = from_files(str(tmp_path / "heads.npz"), 0.6)
    assert [(config["matrix"], config["k"]) for config in configs] == [(0, 8), (1, 8), (2, 8)]
    assert np.array_equal(instances.read(tmp_path / "heads.npz").W, HEADS)
