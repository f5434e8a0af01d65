"""Models on several processes or devices: tensor parallelism, `device_map`, and offloaded caches."""

from __future__ import annotations

import json
import types
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from grace_opt.attention.masks import ChannelMask
from grace_opt.errors import CacheError, MaskError
from grace_opt.hf import CompressedCache, calibrate
from grace_opt.hf.engine.layer import PrunedKeyLayer
from grace_opt.hf.models import placement
from grace_opt.hf.models.fingerprint import fingerprint
from grace_opt.hf.models.placement import layer_devices
from grace_opt.hf.stores.channels.kept import kept_channels
from grace_opt.hf.stores.channels.static_masks import StaticMask
from tests.hf import parallel_worker
from tests.hf.conftest import OBSERVED, RECENT, build

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
CASES = (*parallel_worker.CASES, *parallel_worker.WITH_BITS, "static masks", "beams", "attached")


def random_masks(**known):
    """Half of the channels, others in every head and layer: (2 layers, 2 KV heads, 16)."""
    order = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(4)).argsort(-1)
    return ChannelMask(order < 8, known)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """The tiny Llama on disk."""
    folder = tmp_path_factory.mktemp("parallel")
    build("Llama").save_pretrained(folder / "model")
    text = torch.randint(3, 97, (200,), generator=torch.Generator().manual_seed(9))
    calibrate.basis(build("Llama"), None, [text]).save(folder / "basis.safetensors")
    return folder


# ------------------------------------------------------------ tensor parallelism


@pytest.fixture(scope="module")
def ranks(saved_model, forks):
    """What each of two processes saw, the heads divided among them."""
    random_masks(**fingerprint(build("Llama"))).save(saved_model / "masks.safetensors")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    with ProcessPoolExecutor(2, mp_context=forks) as pool:
        running = [pool.submit(parallel_worker.main, saved_model, rank, 2, store.port) for rank in range(2)]
        for each in running:
            each.result(timeout=120)
    return [json.loads((saved_model / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(saved_model):
    """What one process sees."""
    return parallel_worker.outcomes(
        parallel_worker.load(saved_model / "model"), random_masks(), saved_model / "basis.safetensors"
    )


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
class TestTensorParallel:
    @pytest.mark.parametrize("case", CASES)
    def test_every_rank_generates_the_tokens_of_one_process(self, case, ranks, alone):
        for seen in ranks:
            assert seen["outcomes"][case]["tokens"] == alone[case]["tokens"]

    @pytest.mark.parametrize("case", [case for case in CASES if case != "beams"])
    def test_every_rank_stores_and_prunes_its_own_heads_alone(self, case, ranks, alone):
        heads = [torch.tensor(seen["outcomes"][case]["kept"]) for seen in ranks]
        assert all(kept.shape[2] == 1 for kept in heads)
        assert torch.equal(torch.cat(heads, dim=2), torch.tensor(alone[case]["kept"]))

    def test_heads_keep_different_channels(self, alone):
        """Otherwise a rank that took another's heads would pass."""
        for case in ("half", "static masks"):
            kept = torch.tensor(alone[case]["kept"])
            assert not torch.equal(kept[:, :, 0], kept[:, :, 1])

    def test_the_fingerprint_names_the_rank_instead_of_the_weights(self, ranks):
        whole = fingerprint(build("Llama"))
        del whole["weights"]
        assert [seen["fingerprint"] for seen in ranks] == [
            {**whole, "tensor_parallel": f"rank {rank} of 2"} for rank in range(2)
        ]

    def test_a_rank_reads_its_own_files_and_refuses_those_of_another(self, ranks):
        for rank, seen in enumerate(ranks):
            assert seen["saved"]["equal"]
            cache, mask = seen["saved"]["refused"]
            assert f"tensor_parallel: 'rank {1 - rank} of 2' in the file, 'rank {rank} of 2' in this model" in cache
            assert f"tensor_parallel: mask 'rank {1 - rank} of 2', model 'rank {rank} of 2'" in mask


class TestStaticMasksOnARank:
    """Without starting processes: torch.distributed says what it is made to say."""

    @pytest.fixture(params=[0, 1, 2])
    def rank(self, request, monkeypatch):
        says = {"is_available": True, "is_initialized": True, "get_world_size": 3, "get_rank": request.param}
        functions = {name: lambda value=value: value for name, value in says.items()}
        monkeypatch.setattr(placement, "dist", types.SimpleNamespace(**functions))
        return request.param

    @pytest.fixture
    def pruned(self):
        """Six heads of eight channels."""
        return torch.rand(6, 8, generator=torch.Generator().manual_seed(5)).argsort(-1) < 3

    def test_a_rank_takes_its_own_run_of_heads(self, rank, pruned):
        keys = torch.zeros(4, 2, 5, 8)
        own = pruned[2 * rank : 2 * rank + 2].expand(4, -1, -1)
        assert torch.equal(StaticMask(ChannelMask(pruned))(keys, keys).pruned, own)
        by_row = torch.stack([pruned, pruned.flip(-1), pruned, pruned])
        found = StaticMask(ChannelMask(by_row))(keys, keys).pruned
        assert torch.equal(found, by_row[:, 2 * rank : 2 * rank + 2])

    @pytest.mark.parametrize("heads", [6, 3, 1])
    def test_other_numbers_of_heads_are_left_alone(self, heads, rank, pruned):
        keys = torch.zeros(4, heads, 5, 8)
        mask = StaticMask(ChannelMask(pruned))(keys, keys)
        assert torch.equal(mask.pruned, pruned.expand(4, -1, -1))
        if heads != 6:
            with pytest.raises(MaskError, match=r"\(4, 6, 8\) for keys with .* = "):
                kept_channels(mask, keys)

    def test_one_process_takes_no_part_of_a_mask(self, pruned):
        keys = torch.zeros(1, 3, 5, 8)
        assert StaticMask(ChannelMask(pruned))(keys, keys).pruned.shape == (1, 6, 8)


class TestFingerprintOfPartOfAModel:
    def test_no_digest_of_sharded_weights(self, monkeypatch):
        whole = fingerprint(build("Llama"))
        assert "weights" in whole
        monkeypatch.setattr(build("Llama").lm_head.weight, "placements", (), raising=False)
        assert fingerprint(build("Llama")) == {name: value for name, value in whole.items() if name != "weights"}

    @pytest.mark.parametrize("ranks", [None, 1])
    def test_one_rank_has_the_whole_model(self, ranks, monkeypatch):
        monkeypatch.setattr(PreTrainedModel, "_tp_size", ranks, raising=False)
        assert fingerprint(build("Llama")).keys() >= {"weights"}
        assert "tensor_parallel" not in fingerprint(build("Llama"))


# ------------------------------------------------------------ device_map

LAYERS_APART = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "lm_head": "cpu",
}
DEVICE_MAPS = {"layers apart": LAYERS_APART, "all layers on disk": {"model": "disk", "lm_head": "cpu"}}


class TestDeviceMap:
    @pytest.fixture(params=DEVICE_MAPS)
    def dispatched(self, request, saved_model, tmp_path):
        """The tiny Llama as accelerate spreads it."""
        pytest.importorskip("accelerate")
        model = LlamaForCausalLM.from_pretrained(
            saved_model / "model", device_map=DEVICE_MAPS[request.param], offload_folder=tmp_path / "offloaded"
        ).eval()
        assert any(parameter.is_meta for parameter in model.parameters())
        model.set_attn_implementation("grace_sdpa")
        return model

    @pytest.mark.slow
    @pytest.mark.parametrize("settings", [{"ratio": 0.0}, {"ratio": 0.5}, {"ratio": 0.5, "sink_tokens": 2}])
    def test_the_tokens_of_the_model_in_one_place(self, settings, dispatched, tiny, padded, generate):
        found, expected = (
            generate(model, CompressedCache(model, "grace", **WINDOWS, **settings), *padded)
            for model in (dispatched, tiny())
        )
        assert torch.equal(found, expected)

    @pytest.mark.slow
    def test_static_masks_of_the_model_in_one_place(self, dispatched, tiny, padded, generate):
        masks = random_masks(**fingerprint(tiny()))
        assert "weights" in masks.fingerprint
        found, expected = (
            generate(model, CompressedCache(model, masks=masks, **WINDOWS), *padded) for model in (dispatched, tiny())
        )
        assert torch.equal(found, expected)

    def test_a_saved_cache_goes_where_its_layers_compute_and_between_both(self, dispatched, tiny, prompt, tmp_path):
        whole = tiny()
        for saving, loading in ((dispatched, dispatched), (dispatched, whole), (whole, dispatched)):
            cache = CompressedCache(saving, "grace", **WINDOWS)
            with torch.no_grad():
                saving(prompt, past_key_values=cache)
                cache.save(tmp_path / "cache.safetensors")
                loaded = CompressedCache.load(tmp_path / "cache.safetensors", loading)
                assert {layer.tail.keys.device.type for layer in loaded.layers} == {"cpu"}
                found = loading(prompt[:, :1], past_key_values=loaded).logits
                assert torch.equal(found, saving(prompt[:, :1], past_key_values=cache).logits)

    def test_the_weights_are_known_where_they_all_are(self, dispatched, tiny):
        whole, part = fingerprint(tiny()), fingerprint(dispatched)
        assert part == {name: value for name, value in whole.items() if name != "weights"}


def test_layers_compute_where_accelerates_hooks_say():
    hooks = pytest.importorskip("accelerate.hooks")
    model = LlamaForCausalLM(build("Llama").config)
    assert layer_devices(model, 2) == dict.fromkeys(range(2), torch.device("cpu"))
    place = hooks.AlignDevicesHook(execution_device="meta")
    for hook in (place, hooks.SequentialHook(hooks.ModelHook(), place)):
        hooks.add_hook_to_module(model.model.layers[1].self_attn.q_proj, hooks.ModelHook())
        model.model.layers[1].self_attn.k_proj._hf_hook = hook
        assert layer_devices(model, 2) == {0: torch.device("cpu"), 1: torch.device("meta")}


# ------------------------------------------------------------ offloaded caches


class FakeStream:
    """Stands in for a CUDA stream, which transformers' offloading asks for whatever the device."""

    def wait_stream(self, other):
        """Nothing runs at the same time here."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


@pytest.fixture
def elsewhere(monkeypatch):
    """Offloading that can be told from staying: what is away is in float64, its channels in reverse.

    transformers' own `Cache.update` decides when; whoever reads a layer that is away, rather than what was handed out,
    goes wrong, as on a GPU with tensors of another device.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: FakeStream())
    moves = []

    def move(layer, device):
        away = device == "cpu"
        moves.append((layer.plan.index, away))

        def change(part):
            if not part.is_floating_point() or (part.dtype == torch.float64) == away:
                return part.clone()
            return part.flip(-1).to(torch.float64 if away else torch.float32)

        if layer.tail is not None:
            layer.tail.map(change)
        if layer.compressed is not None:
            layer.compressed = layer.compressed.changed(change)

    monkeypatch.setattr(PrunedKeyLayer, "_move", move)
    return moves


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    "settings",
    [{"ratio": 0.0}, {"ratio": 0.5}, {"ratio": 0.5, "sink_tokens": 2, "tail_block": 4}, {"ratio": 0.5, "fused": False}],
    ids=["dense", "half", "sinks", "zero-filled"],
)
def test_layers_may_leave_between_update_and_attention(settings, options, elsewhere, tiny, padded, generate):
    model = tiny()
    stays = CompressedCache(model, "grace", **WINDOWS, **settings)
    moves = CompressedCache(model, "grace", **WINDOWS, **settings, offloading=True)
    moves.prefetch_stream = FakeStream()
    expected, found = (generate(model, cache, *padded, **options) for cache in (stays, moves))
    assert torch.equal(found, expected)
    assert {(layer, away) for layer in range(2) for away in (True, False)} == set(elsewhere)
    # The last step has sent layer 1 away and fetched layer 0 for a next one.
    assert moves.layers[1].tail.keys.dtype == moves.layers[1].compressed.pruned_keys.dtype == torch.float64


def test_offloading_needs_cuda(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CacheError, match=r"offloading=True needs CUDA.*leave it out"):
        CompressedCache(tiny(), offloading=True)
