"""ChannelMask and MaskProvider: shapes, files, any registered method, protection."""

import dataclasses
import types

import pytest
import torch

import grace_opt
from grace_opt import ChannelMask, MaskProvider, registry, solve
from grace_opt.attention import interaction_matrix, salient_channels
from grace_opt.errors import MaskError, ProblemError
from grace_opt.solution import SolverResult

Q, K = torch.randn(2, 8, 32, 64), torch.randn(2, 4, 200, 64)


def test_indices_and_layers():
    pruned = torch.rand(3, 2, 4, 16) < 0.5
    mask = ChannelMask(pruned)
    assert (mask.kv_heads, mask.head_dim) == (4, 16)
    for index in [(0, 0, 0), (2, 1, 3)]:
        kept = mask.kept_indices[index]
        assert kept[kept >= 0].tolist() == (~pruned[index]).nonzero().flatten().tolist()
        gone = mask.pruned_indices[index]
        assert gone[gone >= 0].tolist() == pruned[index].nonzero().flatten().tolist()
    assert torch.equal(ChannelMask.stack([mask.layer(i) for i in range(3)]).pruned, pruned)
    assert torch.equal(mask.layer(-1).pruned, pruned[2])
    with pytest.raises(MaskError, match=r"i=3: give an integer >= -3 and <= 2"):
        mask.layer(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.pruned = pruned


def test_files_come_back_bit_for_bit(tmp_path):
    mask = ChannelMask(torch.rand(3, 4, 65) < 0.3, {"model_type": "llama", "head_dim": 65})
    mask.save(tmp_path / "m.safetensors")
    again = ChannelMask.load(tmp_path / "m.safetensors")
    assert torch.equal(again.pruned, mask.pruned)
    assert again.fingerprint == mask.fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]  # nothing left aside


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    ChannelMask(torch.eye(4, dtype=torch.bool)).save(path)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(grace_opt.errors.MaskError, match=r"cannot write .*disk full"):
        ChannelMask(torch.ones(4, 4, dtype=torch.bool)).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("method", ["think", "mies", "local_search", "random"])
def test_the_provider_solves_each_head(method):
    pruned = MaskProvider(method, ratio=0.6)(Q, K).pruned
    W = interaction_matrix(Q, K)
    expected = solve(W, 39, method).mask
    assert pruned.shape == (2, 4, 64)
    assert torch.equal(pruned, expected)


def test_grace_is_protection_and_mies():
    keys = K.clone()
    keys[..., 7] *= 30
    mask = MaskProvider("grace", ratio=0.6)(Q, keys)
    protected = salient_channels(keys)
    assert protected[..., 7].all()
    assert not (mask.pruned & protected).any()
    assert torch.equal(mask.pruned, solve(interaction_matrix(Q, keys), 39, "mies", protected=protected).mask)


def test_padding_reaches_weights_and_protection():
    valid = torch.ones(2, 200, dtype=torch.bool)
    valid[0, :50] = False
    keys = K.clone()
    keys[0, :, :50] = 1e3
    mask = MaskProvider("grace", 0.5)(Q, keys, valid)
    alone = MaskProvider("grace", 0.5)(Q[:1], keys[:1, :, 50:])
    assert torch.equal(mask.pruned[0], alone.pruned[0])


def test_a_registered_solver_is_a_provider_at_once():
    @registry.register_solver("last_channels", batched=True)
    def last_channels(problem, options, run):
        """Prune the last k."""
        return SolverResult(
            torch.arange(problem.n).expand_as(problem.candidates) >= problem.n - problem.k.unsqueeze(-1)
        )

    try:
        pruned = MaskProvider("last_channels", 0.25)(Q, K).pruned
        assert torch.equal(pruned, (torch.arange(64) >= 48).expand(2, 4, 64))
    finally:
        registry.unregister("last_channels")


def test_ratio_zero_prunes_nothing():
    assert not MaskProvider("grace", 0.0)(Q, K).pruned.any()


@pytest.mark.parametrize("count", [True, 1.0, -1, 4])
def test_a_count_that_no_head_can_have(count):
    with pytest.raises(MaskError, match="pruned_per_head"):
        ChannelMask(torch.eye(3, dtype=torch.bool), {}, count)


def test_an_empty_mask():
    with pytest.raises(MaskError, match="empty"):
        ChannelMask(torch.zeros(0, 3, dtype=torch.bool))


@pytest.mark.parametrize("fingerprint", ["fp", None, 3, [("a", 1)], {"a": 1.5}, {"a": True}, {"a": None}, {1: "a"}])
def test_a_fingerprint_that_no_file_can_hold(fingerprint):
    """Refused where it is given, not in `save`."""
    with pytest.raises(MaskError, match=r"fingerprint=.*mapping of names"):
        ChannelMask(torch.eye(4, dtype=torch.bool), fingerprint)


def test_a_fingerprint_is_any_mapping(tmp_path):
    made = ChannelMask(torch.eye(4, dtype=torch.bool), types.MappingProxyType({"model_type": "llama", "layers": 3}))
    made.save(tmp_path / "m.safetensors")
    assert ChannelMask.load(tmp_path / "m.safetensors").fingerprint == {"model_type": "llama", "layers": 3}


@pytest.mark.parametrize("head_dim", [5, 31, 32, 64, 80, 96, 128, 192, 256, 576])
def test_the_advised_ratio_is_one_that_is_taken(head_dim):
    with pytest.raises(ProblemError, match="lower ratio") as error:
        MaskProvider("grace", 0.95).count(head_dim)
    advised = float(str(error.value).split("at most ")[1].split(",")[0])
    assert MaskProvider("grace", advised).count(head_dim) <= head_dim
    assert advised >= 0.8
