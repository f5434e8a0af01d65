"""The experiment that draws attention: rows of hand-made tensors are right, and its smoke size reports."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.experiments import anatomy
from bench.experiments.registry import Settings
from bench.experiments.tensors import LayerTensors
from grace_opt.errors import GraceError, OptionError
from grace_opt.sweep import Cell, Description, make_report, run_sweep, write_description


def tensors(prompt: int = 96, later: int = 16, d: int = 16, seed: int = 0, layer: int = 3) -> LayerTensors:
    """Two KV heads with two query heads each; key channel 5 is an outlier."""
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(h, prompt + later, d, generator=made) for h in (4, 2, 2))
    k[..., 5] *= 20
    return LayerTensors(layer, q, k, v, d**-0.5)


def settings(size: str = "smoke", **changes: Any) -> Settings:
    return Settings(size, 0, "", "cpu", dataclasses.replace(anatomy.EXPERIMENT.sizes[size], **changes))


@pytest.mark.slow
def test_the_smoke_size_gives_a_report_with_its_pictures(tmp_path: Path) -> None:
    experiment = anatomy.EXPERIMENT
    asked = settings()
    cells = [Cell(experiment.name, config) for config in experiment.cells(asked)]
    views = list(experiment.views(asked))
    text = (experiment.name, experiment.title, experiment.paper, experiment.about, "the command")
    write_description(tmp_path, Description(*text, [cell.key for cell in cells], views))
    done = run_sweep(cells, experiment.run, tmp_path, progress=None)
    assert done.complete, done.failures
    _, page = make_report(tmp_path)
    assert "ot run here" not in page.read_text()
    plots = [at for at, view in enumerate(views, 1) if type(view).__name__ == "Plot"]
    assert plots
    for at in plots:
        for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            assert (page.parent / f"{experiment.name}-{at}.{suffix}").read_bytes().startswith(start)


def test_the_full_size_says_that_it_needs_a_checkpoint() -> None:
    assert "--model" in anatomy.EXPERIMENT.needs(settings("full"))
    assert anatomy.EXPERIMENT.needs(settings()) == ""


def test_wrong_options_are_told_before_anything_runs() -> None:
    with pytest.raises(GraceError, match="observed <= prompt"):
        anatomy.EXPERIMENT.cells(settings(observed=97))


# Pictures of attention


def test_a_planted_outlier_stands_out_in_every_picture() -> None:
    made = tensors()
    rows = anatomy.picture_rows(made, observed=32, head=1, bins=16)
    assert all(row["layer"] == 3 and isinstance(row["row"], int) and isinstance(row["column"], int) for row in rows)
    keys = [row for row in rows if "key_magnitude" in row]
    assert len(keys) == 16 * 16
    for at in {row["row"] for row in keys}:
        assert max((row for row in keys if row["row"] == at), key=lambda row: row["key_magnitude"])["column"] == 5
    first = next(row for row in keys if (row["row"], row["column"]) == (0, 5))
    assert first["key_magnitude"] == pytest.approx(float(made.keys[1, :7, 5].abs().mean()), rel=1e-5)  # 112 / 16 = 7
    plain = {(row["row"], row["column"]): row["interaction"] for row in rows if "interaction" in row}
    ordered = {(row["row"], row["column"]): row["interaction_sorted"] for row in rows if "interaction_sorted" in row}
    assert max(plain, key=lambda at: plain[at]) == (5, 5)
    assert ordered[0, 0] == plain[5, 5]
    diagonal = [ordered[at, at] for at in range(16)]
    assert diagonal == sorted(diagonal, reverse=True)
    assert sorted(plain.values()) == sorted(ordered.values())


def test_interactions_are_logarithms_beside_the_mean_node_weight_and_bins_are_means() -> None:
    W = torch.tensor([[1.0, -0.2, 0.0, 0.0], [-0.2, 3.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.6], [0.0, 0.0, 0.6, 2.0]])
    rows = anatomy.interaction_rows(W, 4)
    found = {(row["row"], row["column"]): row["interaction"] for row in rows if "interaction" in row}
    assert found[1, 1] == pytest.approx(math.log10(1.5))
    assert found[0, 1] == pytest.approx(-1.0)
    assert found[0, 2] == pytest.approx(math.log10(anatomy.FLOOR))
    halves = {
        (row["row"], row["column"]): row["interaction"]
        for row in anatomy.interaction_rows(W, 2)
        if "interaction" in row
    }
    assert list(halves) == [(0, 0), (0, 2), (2, 0), (2, 2)]
    assert halves[0, 0] == pytest.approx(math.log10((1 + 3 + 0.2 + 0.2) / 4 / 2))


def test_query_channels_have_their_mean_and_standard_deviation() -> None:
    rows = anatomy.query_rows(torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0]]))
    assert rows[0] == {"query_channel": 0, "query_mean": 3.0, "query_std": pytest.approx(math.sqrt(8 / 3))}
    assert rows[1] == {"query_channel": 1, "query_mean": 2.0, "query_std": 0.0}


def test_measures_of_keys_that_are_their_mean() -> None:
    made = tensors(d=8)
    keys = torch.ones_like(made.keys) * torch.tensor([1.0] * 7 + [8.0])
    found = anatomy.measures(dataclasses.replace(made, keys=keys), 32)
    assert found["key_mean"] == pytest.approx(1.0)
    assert found["key_spread"] == pytest.approx(8.0)
    assert found["salient"] == 1.0


def test_a_head_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OptionError, match="0 to 1"):
        anatomy.picture_rows(tensors(), 32, 2, 8)
