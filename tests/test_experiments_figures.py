"""The experiments that draw: rows of hand-made tensors are right, Pareto fronts too, and every smoke size reports."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.experiments import anatomy, compressions, continuation, drift, pareto, protection
from bench.experiments.quality import Reference, choose, interactions
from bench.experiments.registry import Experiment, Settings
from bench.experiments.tensors import LayerTensors, load
from grace_opt.attention.weights import salient_channels
from grace_opt.errors import GraceError, OptionError
from grace_opt.hf import CacheConfig, Quantization, SnapKV, StreamingLLM
from grace_opt.sweep import Cell, Description, make_report, run_sweep, write_description
from grace_opt.sweep.plots import PALETTE

EXPERIMENTS = [anatomy.EXPERIMENT, protection.EXPERIMENT, drift.EXPERIMENT, pareto.EXPERIMENT]


def tensors(prompt: int = 96, later: int = 16, d: int = 16, seed: int = 0, layer: int = 3) -> LayerTensors:
    """Two KV heads with two query heads each; key channel 5 is an outlier."""
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(h, prompt + later, d, generator=made) for h in (4, 2, 2))
    k[..., 5] *= 20
    return LayerTensors(layer, q, k, v, d**-0.5)


def settings(experiment: Experiment, size: str = "smoke", **changes: Any) -> Settings:
    return Settings(size, 0, "", "cpu", dataclasses.replace(experiment.sizes[size], **changes))


# Every experiment, from cells to pictures


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_the_smoke_size_gives_a_report_with_its_pictures(experiment: Experiment, tmp_path: Path) -> None:
    asked = settings(experiment)
    cells = [Cell(experiment.name, config) for config in experiment.cells(asked)]
    views = list(experiment.views(asked))
    text = (experiment.name, experiment.title, experiment.paper, experiment.about, "the command")
    write_description(tmp_path, Description(*text, [cell.key for cell in cells], views))
    done = run_sweep(cells, experiment.run, tmp_path, progress=None)
    assert done.complete, done.failures
    _, page = make_report(tmp_path)
    assert "ot run here" not in page.read_text()
    plots = [at for at, view in enumerate(views, 1) if type(view).__name__ == "Plot"]
    for at in plots:
        for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            assert (page.parent / f"{experiment.name}-{at}.{suffix}").read_bytes().startswith(start)
    assert plots or experiment.name == "protection"


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_the_full_size_says_that_it_needs_a_checkpoint(experiment: Experiment) -> None:
    assert "--model" in experiment.needs(settings(experiment, "full"))
    assert experiment.needs(settings(experiment)) == ""


@pytest.mark.parametrize(
    ("experiment", "changes", "says"),
    [
        (anatomy, {"observed": 97}, "observed <= prompt"),
        (protection, {"bounds": ("0.2",)}, "a:b"),
        (protection, {"bounds": ("0.3:0.1",)}, "low <= high"),
        (protection, {"windows": (0,)}, "at least 1"),
        (protection, {"prompt": 8}, "32"),
        (drift, {"distances": (16, 8)}, "rising"),
        (drift, {"prompt": 7}, "widest"),
        (pareto, {"levels": ("attnetion",)}, "attention, needle, text"),
        (pareto, {"tokens": 100}, "multiple of 32"),
        (pareto, {"bits": (5,)}, "5"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(experiment: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(GraceError, match=says):
        experiment.EXPERIMENT.cells(settings(experiment.EXPERIMENT, **changes))


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


# Protection and drift


@pytest.mark.parametrize("bounds", [(0.05, 0.15), (0.0, 0.35), (0.2, 0.2)])
def test_at_one_standard_deviation_the_threshold_is_the_librarys(bounds: tuple[float, float]) -> None:
    keys = load("", 0, 64, 0)[0].keys
    assert torch.equal(protection.salient(keys, 1.0, *bounds), salient_channels(keys, *bounds))
    counts = [int(protection.salient(keys, c, 0.0, 1.0).sum()) for c in (-1.0, 0.0, 1.0, 2.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_every_setting_is_measured_and_none_protects_more_than_can_be_kept() -> None:
    made = tensors()
    asked = [protection.Setting("protect", "0:0", low=0.0, high=0.0), protection.Setting("protect", "0:0.9", high=0.9)]
    (row,) = protection.ablation(made, 96, 0.5, asked)
    mies = choose("MIES", interactions(made, 96), made.keys[:, :96], 0.5).pruned
    assert row["protect"] == "0:0"
    assert row["protected"] == 0.0
    assert row["kl"] == pytest.approx(Reference(made, 96).prune(mies).means()["kl"])


def test_sinks_change_what_is_dense_and_what_is_seen() -> None:
    made = tensors()
    made.keys[:, 4:, 7], made.keys[:, :4, 7] = 0.0, 300.0  # a channel that only the sinks have
    dense, unseen = (protection.Setting("sinks", str(seen), sinks=4, seen=seen) for seen in (True, False))
    plain, kept, given_up = protection.ablation(made, 96, 0.6, [protection.Setting("sinks", "0"), dense, unseen])
    assert (plain["sinks"], kept["sinks"], given_up["sinks"]) == ("0", "True", "False")
    assert plain["kl"] != kept["kl"]
    assert given_up["kl"] < kept["kl"]  # the sinks are dense: to keep their channel for others is a waste


def test_bins_of_distance_add_up_to_all_later_queries() -> None:
    made = tensors()
    rows = {row["method"]: row for row in drift.drift(made, 96, 0.5, (16,))}
    parts = [row for row in drift.drift(made, 96, 0.5, (4, 16)) if row["method"] == "THINK"]
    assert [row["distance"] for row in parts] == ["1-4", "5-16"]
    for measure in ("kl", "output"):
        mean = (4 * parts[0][measure] + 12 * parts[1][measure]) / 16
        assert mean == pytest.approx(rows["THINK"][measure])
    mask = choose("THINK", interactions(made, 96), made.keys[:, :96], 0.5).pruned
    last = Reference(dataclasses.replace(made, queries=made.queries.clone()), 96).prune(mask)
    assert rows["THINK"]["logit"] == pytest.approx(float(last.logit_later.mean()))
    assert drift.FRESH in rows


# Bytes against quality


def test_the_pareto_front_of_points_in_the_plane() -> None:
    points = [(1.0, 0.0), (0.5, 0.1), (0.5, 0.1), (0.6, 0.1), (0.5, 0.2), (0.2, 5.0), (0.7, 0.05)]
    assert pareto.pareto_front(points) == [True, True, True, False, False, True, True]
    assert pareto.pareto_front([]) == []


def test_within_a_budget_the_largest_setting_is_taken_whatever_its_loss() -> None:
    points = (("int", 0.6, 0.1), ("int", 0.4, 0.9), ("int", 0.3, 0.2), ("H2O", 0.1, 0.3), ("SnapKV + int4", 0.1, 0.5))
    rows = [{"family": family, "share": share, "attention_kl": kl} for family, share, kl in points]
    found = pareto.at_budgets(rows, [0.5, 0.12], "attention_kl")
    assert found == [
        {"budget_int": "50%", "chosen_int": "int", "attention_kl_at": 0.9},  # H2O leaves four fifths of it unused
        {"budget_SnapKV + int4": "12%", "chosen_SnapKV + int4": "H2O", "attention_kl_at": 0.3},
        {"budget_SnapKV + int4": "12%", "chosen_SnapKV + int4": "SnapKV + int4", "attention_kl_at": 0.5},
    ]


def test_each_picture_has_its_families_and_no_more_than_there_are_colours() -> None:
    rows = [{"family": family, "share": 0.5, "needle_kl": 0.1, "later_recall": 1.0} for family in compressions.FAMILIES]
    found = pareto.plotted(rows, "needle_kl")
    for part, families in pareto.PICTURES.items():
        assert tuple(row["curve"] for row in found if f"needle_kl_{part}" in row) == families
        assert len(families) <= len(PALETTE)


def test_rows_of_a_cell_are_sorted_by_bytes_and_say_which_are_on_the_front() -> None:
    (config,) = [c for c in pareto.EXPERIMENT.cells(settings(pareto.EXPERIMENT)) if c["level"] == "attention"]
    table = [row for row in pareto.EXPERIMENT.run(config) if row.get("setting")]
    assert table[0]["setting"] == "100.0% dense"
    assert [row["share"] for row in table] == sorted((row["share"] for row in table), reverse=True)
    front = [row for row in table if row["attention_front"]]
    assert [row["attention_kl"] for row in front] == sorted(row["attention_kl"] for row in front)
    assert 2 <= len(front) < len(table)


def test_attention_of_a_compression_is_what_reference_measures() -> None:
    made = tensors(prompt=128)
    half = dataclasses.replace(made, **{n: getattr(made, n).half().float() for n in ("queries", "keys", "values")})
    dense = compressions.DenseAttention(half, 128)
    found = dense.measure(CacheConfig(method="mies", ratio=0.5))
    mask = choose("MIES", interactions(half, 128), half.keys[:, :128], 0.5).pruned
    assert found.output == pytest.approx(Reference(half, 128).prune(mask).means()["output"], rel=1e-6)
    kept = 2 * 96 * 8 * 2 + 2 * 8 * 8 + 2 * 32 * 16 * 2 + 2 * 128 * 16 * 2  # old keys, indices, recent keys, values
    assert (found.stored, found.dense) == (kept, 2 * 2 * 128 * 16 * 2)
    same = dense.measure(CacheConfig(method="think", ratio=0.0))
    assert (same.kl, same.output) == (0.0, 0.0)


def test_eviction_loses_the_attention_that_the_evicted_had() -> None:
    made = tensors(prompt=128)
    made = dataclasses.replace(made, queries=torch.zeros_like(made.queries))  # all keys weigh the same
    found = compressions.DenseAttention(made, 128).measure(CacheConfig("think", 0.0, evict=StreamingLLM(64)))
    expected = sum(math.log((128 + n) / (64 + n)) for n in range(1, 17)) / 16
    assert found.kl == pytest.approx(expected, rel=1e-6)


def test_fewer_bits_are_fewer_bytes_and_more_loss() -> None:
    dense = compressions.DenseAttention(tensors(prompt=128, d=32), 128)
    found = [dense.measure(CacheConfig("think", 0.0, quantize=Quantization(b, b, backend="hqq"))) for b in (8, 4, 2)]
    assert [f.stored for f in found] == sorted((f.stored for f in found), reverse=True)
    assert [f.kl for f in found] == sorted(f.kl for f in found)


def test_a_needle_task_has_exactly_its_tokens_and_all_answers_are_in_the_prompt() -> None:
    model, tokenizer = continuation.half_model("", "cpu")
    for seed in range(5):
        task = continuation.needle_task(tokenizer, 160, seed)
        assert len(task.prompt) == 160
        assert len(task.answers) == 5
        text = tokenizer.decode(task.prompt)
        for first, end in task.answers:
            assert tokenizer.decode(task.continuation[first:end]) in text
    dense = continuation.read(model, task, None)
    assert (dense.first, dense.later, dense.kl, dense.share) == (1.0, 1.0, 0.0, 1.0)
    lost = continuation.read(model, task, CacheConfig("think", 0.0, evict=SnapKV(40)), dense)
    assert lost.kl > 0.1
    assert lost.share < 0.4
    assert lost.nll > dense.nll


def test_every_family_has_its_settings() -> None:
    found = compressions.compressions(512, (0.3, 0.5), (0.5,), (8, 4))
    assert list(dict.fromkeys(c.family for c in found)) == list(compressions.FAMILIES)
    assert [c.name for c in found if c.family == "int"] == ["int8", "int4"]
    assert len({c.name for c in found}) == len(found)
    (both,) = [c.config for c in found if c.family == "SnapKV + GRACE + int4"]
    assert both.evict == SnapKV(256)
    assert both.ratio == 0.5
    assert both.quantize is not None
    assert both.quantize.keys == both.quantize.values == 4
