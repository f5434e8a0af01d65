"""Attention-level experiments: measures against plain loops, sources of tensors and their errors, reports."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from bench.experiments import quality, reconstruction, tensors
from bench.experiments.registry import Settings
from grace_opt.errors import GraceError, OptionError
from grace_opt.sweep import Cell, Description, make_report, run_sweep, write_description

LENGTH, PROMPT, OBSERVED, RECENT, SINKS = 14, 10, 3, 2, 1


pytestmark = pytest.mark.usefixtures("one_thread")


def layer(seed: int = 0) -> tensors.LayerTensors:
    """Two KV heads, four query heads, of width 6 and 5."""
    rng = np.random.default_rng(seed)
    q, k, v = (torch.from_numpy(rng.normal(size=(h, LENGTH, d)).astype("float32")) for h, d in ((4, 6), (2, 6), (2, 5)))
    return tensors.LayerTensors(0, q, k, v, 0.4)


def by_loops(given: tensors.LayerTensors, replaced: np.ndarray[Any, Any], head: int) -> dict[str, float]:
    """All measures of one KV head, entry by entry."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (given.queries, given.keys, given.values))
    stored = k[head].copy()
    stored[SINKS : PROMPT - RECENT] = replaced[head, SINKS : PROMPT - RECENT]
    sums = {"observed": [0.0, 0.0], "later": [0.0, 0.0]}
    kl, output = [], []
    for at in range(PROMPT - OBSERVED, LENGTH):
        for query_head in (2 * head, 2 * head + 1):
            dense = [float(q[query_head, at] @ k[head, t]) for t in range(at + 1)]
            other = [float(q[query_head, at] @ stored[t]) for t in range(at + 1)]
            which = sums["observed" if at < PROMPT else "later"]
            which[0] += sum((a - b) ** 2 for a, b in zip(dense, other, strict=True))
            which[1] += sum(a**2 for a in dense)
            if at < PROMPT:
                continue
            p, p_ = ([math.exp(given.scaling * x) for x in z] for z in (dense, other))
            p, p_ = [x / sum(p) for x in p], [x / sum(p_) for x in p_]
            kl.append(sum(a * math.log(a / b) for a, b in zip(p, p_, strict=True)))
            out, out_ = (sum(a * v[head, t] for t, a in enumerate(z)) for z in (p, p_))
            output.append(float(np.linalg.norm(out - out_) / np.linalg.norm(out)))
    return {
        "change_observed": sums["observed"][0],
        "change_later": sums["later"][0],
        "logit_observed": sums["observed"][0] / sums["observed"][1],
        "logit_later": sums["later"][0] / sums["later"][1],
        "kl": float(np.mean(kl)),
        "output": float(np.mean(output)),
    }


# Measures


def test_measures_are_those_of_plain_loops() -> None:
    given = layer()
    keys = given.keys + 0.5 * layer(1).keys
    found = quality.Reference(given, PROMPT, OBSERVED, RECENT, SINKS).measure(keys)
    for head in range(2):
        for name, value in by_loops(given, keys.numpy(), head).items():
            assert float(getattr(found, name)[head]) == pytest.approx(value, rel=1e-9), (name, head)


def test_a_mask_measures_as_zeroed_keys_do_and_an_empty_one_changes_nothing() -> None:
    given = layer()
    reference = quality.Reference(given, PROMPT, OBSERVED, RECENT, SINKS)
    pruned = torch.tensor([[True, False] * 3, [False, False, True] * 2])
    found = reference.prune(pruned)
    expected = [by_loops(given, given.keys.masked_fill(pruned[:, None], 0).numpy(), head) for head in range(2)]
    assert found.kl.tolist() == pytest.approx([e["kl"] for e in expected], rel=1e-9)
    nothing = reference.prune(torch.zeros(2, 6, dtype=torch.bool))
    assert all(not getattr(nothing, field.name).any() for field in dataclasses.fields(nothing))


def test_windows_stay_dense() -> None:
    """Whatever is given for sinks, recent and later tokens is not looked at."""
    given = layer()
    reference = quality.Reference(given, PROMPT, OBSERVED, RECENT, SINKS)
    keys = given.keys.clone()
    keys[:, :SINKS] = keys[:, PROMPT - RECENT :] = 1e6
    assert not reference.measure(keys).kl.any()
    keys[:, PROMPT - RECENT - 1] += 1
    assert reference.measure(keys).kl.all()


def test_distant_logits_do_not_overflow() -> None:
    given = dataclasses.replace(layer(), scaling=400.0)
    found = quality.Reference(given, PROMPT, OBSERVED, RECENT, SINKS).measure(-given.keys)
    assert torch.isfinite(found.kl).all()
    assert torch.isfinite(found.output).all()


def test_f_is_the_change_of_all_observed_logits_and_the_optimum_is_lowest() -> None:
    given = layer()
    W, keys = quality.interactions(given, PROMPT, OBSERVED), given.keys[:, :PROMPT]
    q = given.queries[:, PROMPT - OBSERVED : PROMPT].double().reshape(2, -1, 6)
    found = {method: quality.choose(method, W, keys, 0.5) for method in quality.SOLVERS}
    for choice in found.values():
        assert choice.pruned.sum(-1).tolist() == [3, 3]
        gone = keys.double() * choice.pruned[:, None]
        assert choice.f.tolist() == pytest.approx((q @ gone.mT).square().sum((1, 2)).tolist(), rel=1e-9)
        total = (q @ keys.double().mT).square().sum((1, 2))
        assert choice.share.tolist() == pytest.approx((choice.f / total).tolist(), rel=1e-6)
        assert (found["optimum"].f <= choice.f * (1 + 1e-9)).all()
    assert found["optimum"].proved.all()
    assert not found["THINK"].proved.any()


@pytest.mark.parametrize(
    "windows", [(0, OBSERVED, 2, 1), (LENGTH, OBSERVED, 2, 1), (PROMPT, 11, 2, 1), (PROMPT, 3, 9, 1)]
)
def test_windows_that_do_not_fit(windows: tuple[int, int, int, int]) -> None:
    with pytest.raises(GraceError, match=r"give|leave nothing"):
        quality.Reference(layer(), *windows)


# Where tensors come from


def test_the_pocket_model_brings_its_own_texts() -> None:
    first, second = tensors.load("", 0, 40, 8, [0, 2]), tensors.load("pocket", 0, 40, 8, [2])
    assert [found.layer for found in first] == [0, 2]
    assert torch.equal(first[1].keys, second[0].keys)
    assert first[0].queries.shape == (4, 48, 64)
    texts = [tensors.token_ids("", *of).tolist() for of in ((0, 48), (1, 48), (0, 48, 1))]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    with pytest.raises(OptionError, match="context of 1152"):
        tensors.load("", 0, 1152, 8)


def test_passages_of_texts_take_turns(tmp_path: Path) -> None:
    """The pocket model's folder, as if it were a user's checkpoint."""
    from grace_opt.hf.models import POCKET_FOLDER

    model = str(POCKET_FOLDER.parent / "." / "pocket") + "/"
    words = [f"the {colour} {animal} ." for colour in ("red", "blue", "green") for animal in ("fox", "bear")]
    (tmp_path / "a.txt").write_text(" ".join(words))  # 24 tokens
    (tmp_path / "b.md").write_text(" ".join(reversed(words)))
    (tmp_path / "c.csv").write_text("no text")
    _, tokenizer = tensors.model_and_tokenizer(model, "cpu")
    expected = [tokenizer(w).input_ids for w in (" ".join(words), " ".join(reversed(words)))]
    for text, (book, start) in enumerate([(0, 0), (1, 0), (0, 10), (1, 10)]):
        ids = tensors.token_ids(model, text, 10, texts=str(tmp_path))
        assert ids.tolist() == [expected[book][start : start + 10]]
    with pytest.raises(tensors.TensorError, match=r"a.txt has 24 tokens, too few for passage 3 of 10"):
        tensors.token_ids(model, 4, 10, texts=str(tmp_path))
    with pytest.raises(OptionError, match="name a folder"):
        tensors.load(model, 0, 8, 2)
    with pytest.raises(tensors.TensorError, match="no text at"):
        tensors.text_files(str(tmp_path / "none"))
    with pytest.raises(GraceError, match="configuration"):
        tensors.layer_numbers(str(tmp_path))


# Experiments


@pytest.mark.slow
def test_smoke_size_runs_and_reports(tmp_path: Path) -> None:
    experiment = reconstruction.EXPERIMENT
    settings = Settings("smoke", 0, "", "cpu", experiment.options("smoke", {"layers": "0"}))
    assert not experiment.needs(settings)
    cells = [Cell(experiment.name, config) for config in experiment.cells(settings)]
    views = experiment.views(settings)
    keys = [cell.key for cell in cells]
    about = (experiment.name, experiment.title, experiment.paper, experiment.about, "python x.py", keys, views)
    write_description(tmp_path, Description(*about))
    done = run_sweep(cells, experiment.run, tmp_path, progress=False)
    assert done.complete
    assert not done.failures
    make_report(tmp_path)
    page = (tmp_path / "report" / f"{experiment.name}.md").read_text()
    assert "not run here" not in page
    assert "left out" not in page
    assert all(view.title in page for view in views)


def test_what_is_missing_is_said() -> None:
    experiment = reconstruction.EXPERIMENT
    options = experiment.options("full", {})
    assert "--model" in experiment.needs(Settings("full", 0, "", "cpu", options))
    assert "--set texts" in experiment.needs(Settings("pocket", 0, "some/model", "cpu", options))
    with pytest.raises(OptionError, match="layers=two"):
        experiment.cells(Settings("smoke", 0, "", "cpu", experiment.options("smoke", {"layers": "two"})))


def test_rows_of_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """THINK is its own baseline, and the optimum is lowest."""
    rng = np.random.default_rng(0)
    # Channels of a trained head are correlated; of unrelated ones, THINK's choice is mostly the best.
    made = {
        n: rng.normal(size=(1, h, 140, 4)) @ rng.normal(size=(4, 16)) for n, h in zip("qkv", (4, 2, 2), strict=True)
    }
    parts = (torch.from_numpy(array + 0.3 * rng.normal(size=array.shape))[0].float() for array in made.values())
    given = tensors.LayerTensors(0, *(part[:, :132] for part in parts), scaling=0.25)
    monkeypatch.setattr(reconstruction, "load", lambda *_: [given])
    settings = Settings("smoke", 0, "", "cpu", reconstruction.Options(prompt=120, later=12, ratios=(0.5,)))
    rows = {row["method"]: row for row in reconstruction.run(reconstruction.cells(settings)[0])}
    assert rows["THINK"]["reduction_observed"] == rows["THINK"]["reduction_later"] == 0
    assert rows["optimum"]["reduction_observed"] >= max(row["reduction_observed"] for row in rows.values()) - 1e-9
    assert rows["optimum"]["proved"] == 100
    W = quality.interactions(given, 120)
    f = {m: quality.choose(m, W, given.keys[:, :120], 0.5).f for m in ("THINK", "MIES")}
    assert f["MIES"].sum() != f["THINK"].sum()
    below = 100 * float(1 - f["MIES"].sum() / f["THINK"].sum())
    assert rows["MIES"]["reduction_observed"] == pytest.approx(below)
    assert rows["MIES"]["reduction_later"] != 0
