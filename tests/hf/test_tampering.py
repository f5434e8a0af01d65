"""Saved caches and masks that were damaged or edited: a `CacheError` or `MaskError` at loading, not in `generate`.

First whatever was changed by somebody, or something, that does not know the digest; then, field by field and tensor by
tensor, what was changed by somebody who does.
"""

from __future__ import annotations

import copy
import math
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from grace_opt.attention.masks import FILE_FORMAT, ChannelMask
from grace_opt.errors import CacheError, GraceError, MaskError
from grace_opt.hf import H2O, CacheConfig, CompressedCache, Quantize, SnapKV
from grace_opt.hf.engine import saving
from tests.hf.test_saving import filled, go_on, kind, same_bits  # noqa: F401  (a fixture)

KINDS = ["plain", "evicted", kind("all at once"), "sliding and full", "empty"]
#: In a file with 83 tensors, what is read as its neighbour is: the second layer, and the packed pieces in the middle.
ALIKE = re.compile(r"(layers\.)?1\.|.*(old_values|pruned_keys)(\.tokens)?\.[1-4]\b")
VALUES = (None, True, -1, 0, 7, 10**30, 0.5, math.nan, math.inf, "", "x", [], {}, [[]])


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Thousands of files are read back at once, by this process: none has to survive a power cut.

    A name that goes over an older file waits as well, for what the older one may have lost.
    """

    def rename(source, target):
        Path(target).unlink(missing_ok=True)
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", rename)


@pytest.fixture
def saved(filled, tmp_path, request):  # noqa: F811
    model, cache = filled(request.param)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    return model, cache, path, request.param


def tensors_changed(tensor):
    """The same tensor in other shapes, types and values, by what was done to it."""
    yield "cut", tensor[..., : tensor.shape[-1] // 2].contiguous()
    yield "longer", torch.cat([tensor, tensor], dim=-1)
    yield "more rows", torch.cat([tensor, tensor], dim=0)
    yield "flat", tensor.reshape(-1)
    yield "a dimension more", tensor[None]
    yield "a scalar", torch.zeros((), dtype=tensor.dtype)
    yield "empty", tensor[:0]
    if tensor.dim() > 2:
        yield "fewer tokens", tensor[:, :, 1:].contiguous()
        yield "fewer heads", tensor[:, 1:].contiguous()
        yield "turned", tensor.transpose(1, 2).contiguous()
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool):
        if dtype != tensor.dtype:
            yield f"as {dtype}", tensor.to(dtype)
    if tensor.numel():
        yield "turned round", tensor.flip(-1)
        yield "zeros", torch.zeros_like(tensor)
        yield "one more", tensor + 1
        yield "negative", -tensor - 1 if tensor.dtype != torch.uint8 else ~tensor
        if tensor.dtype.is_floating_point:
            yield "not a number", torch.full_like(tensor, math.nan)
        else:
            yield "large", torch.full_like(tensor, torch.iinfo(tensor.dtype).max)


def edited(names, which):
    """Those of the names, dotted or as tuples, that are edited in such a file."""
    return [name for name in names if which != "all at once" or not ALIKE.match(dotted(name))]


def dotted(name):
    return name if isinstance(name, str) else ".".join(map(str, name))


def fields(value, at=()):
    """The places of all values in nested dicts and lists."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        yield from fields(entry, (*at, key))


def changed_at(about, at, change):
    about = copy.deepcopy(about)
    owner = about
    for key in at[:-1]:
        owner = owner[key]
    change(owner, at[-1])
    return about


@pytest.mark.slow
@pytest.mark.parametrize("saved", [kind("all at once"), "sliding and full"], indirect=True)
def test_whatever_changes_without_the_digest_is_told(saved):
    model, cache, path, which = saved
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    for name in edited(tensors, which):
        tensor = tensors[name]
        for what, other in tensors_changed(tensor):
            if other.dtype == tensor.dtype and other.shape == tensor.shape and torch.equal(other, tensor):
                continue
            save_file({**tensors, name: other}, path, metadata)
            with pytest.raises(CacheError, match=r"cache\.safetensors"):
                pytest.fail(f"{name}, {what}: {CompressedCache.load(path, model)}")
        save_file({key: t for key, t in tensors.items() if key != name}, path, metadata)
        with pytest.raises(CacheError, match="digest"):
            CompressedCache.load(path, model)
    save_file({**tensors, "more": torch.ones(1)}, path, metadata)
    with pytest.raises(CacheError, match="digest"):
        CompressedCache.load(path, model)
    for name, text in metadata.items():
        less = {key: value for key, value in metadata.items() if key != name}
        for other in (less, {**less, name: text + " "}, {**less, name: ""}, {**less, name: "{" * 100_000}):
            save_file(tensors, path, other)
            with pytest.raises(CacheError, match=r"cache\.safetensors"):
                CompressedCache.load(path, model)
    save_file(tensors, path, metadata)
    assert same_bits(CompressedCache.load(path, model), cache)


@pytest.mark.slow
def test_a_byte_changed_anywhere(filled, tmp_path):  # noqa: F811
    model, cache = filled()
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    whole = path.read_bytes()
    for at in [*range(0, 200), *range(200, len(whole), 97)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            loaded = CompressedCache.load(path, model)
        except CacheError:
            continue
        assert same_bits(loaded, cache), at


@torch.no_grad()
def usable(path, model, what):
    """Load and go on by one token: works, or says why not; a width that fits all else is left to the model's own."""
    try:
        loaded = CompressedCache.load(path, model)
    except CacheError as error:
        return str(error)
    try:
        go_on(model, loaded, loaded.get_seq_length() + 1)
    except Exception as error:
        if isinstance(error, CacheError) and "head_dim" in str(error):
            return str(error)
        pytest.fail(f"{what}: loaded, then {type(error).__name__}: {error}")
    return None


@pytest.mark.slow
@pytest.mark.parametrize("saved", KINDS, indirect=True)
def test_every_field_edited_by_somebody_who_knows_the_digest(saved, digest_known):
    model, _, path, which = saved
    assert usable(path, model, "nothing") is None
    about, tensors = digest_known(path)
    refused = 0
    for at in edited(fields(about), which):
        changes = [lambda owner, key: owner.__delitem__(key)]
        changes += [lambda owner, key, v=value: owner.__setitem__(key, v) for value in VALUES]
        if isinstance(at[-1], str):
            changes.append(lambda owner, key: owner.update({f"{key} more": 1}))
        for number, change in enumerate(changes):
            saving.FILE_FORMAT.write(path, tensors, changed_at(about, at, change))
            value = VALUES[number - 1] if 0 < number <= len(VALUES) else "dropped or added"
            refused += usable(path, model, f"{at} {value!r}") is not None
    assert refused > 50


@pytest.mark.slow
@pytest.mark.parametrize("saved", KINDS, indirect=True)
def test_every_tensor_edited_by_somebody_who_knows_the_digest(saved, digest_known):
    model, _, path, which = saved
    about, tensors = digest_known(path)
    for name in edited(tensors, which):
        tensor = tensors[name]
        saving.FILE_FORMAT.write(path, {key: t for key, t in tensors.items() if key != name}, about)
        assert usable(path, model, f"{name} dropped") is not None
        for what, other in tensors_changed(tensor):
            saving.FILE_FORMAT.write(path, {**tensors, name: other}, about)
            said = usable(path, model, f"{name}, {what}")
            alike = (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
            shared = name.endswith("positions") and what == "fewer heads"  # all heads may have the same
            assert said is not None or alike or shared, (name, what)
            if "indices" in name and not torch.equal(other, tensor) and what != "one more":
                assert said is not None, what
    for more in ("0.more", "more", "9.keys", "0.pruned_keys.0.packed"):
        saving.FILE_FORMAT.write(path, {**tensors, more: torch.ones(1)}, about)
        assert usable(path, model, f"{more} added") is not None


@pytest.mark.parametrize("change", ["twice", "unsorted", "negative", "beyond", "other length"])
def test_indices_and_lengths_by_name(change, filled, tmp_path):  # noqa: F811
    model, cache = filled()
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    about, tensors = saving.FILE_FORMAT.read(path)
    kept = tensors["1.kept_indices"]
    if change == "other length":
        about["layers"][1]["length"] += 1
    else:
        kept[0, 0, :2] = torch.tensor(
            {"twice": [3, 3], "unsorted": [4, 3], "negative": [-1, 3], "beyond": [3, 16]}[change]
        )
        if change == "beyond":
            kept[0, 0, -1] = 16
    saving.FILE_FORMAT.write(path, tensors, about)
    with pytest.raises(CacheError, match=r"cache\.safetensors: layer 1 of the saved cache: (kept_indices|length=33)"):
        CompressedCache.load(path, model)


def test_older_tokens_of_which_none_are_stored(filled, tmp_path):  # noqa: F811
    model, cache = filled("evicted")
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    about, tensors = saving.FILE_FORMAT.read(path)
    for name, tensor in tensors.items():
        if name.endswith(("sink_keys", "pruned_keys", "old_values")):
            tensors[name] = tensor[:, :, :0].contiguous()
        elif name.endswith("positions"):
            tensors[name] = tensor[..., :0].contiguous()
    saving.FILE_FORMAT.write(path, tensors, about)
    with pytest.raises(CacheError, match="for 0 stored tokens"):
        CompressedCache.load(path, model)


def test_another_models_file_is_refused_before_anything_else(filled, tiny, tmp_path):  # noqa: F811
    _, cache = filled("a ratio per layer")
    cache.save(tmp_path / "x")
    with pytest.raises(
        CacheError, match=r"saved for another model .*num_hidden_layers: 2 in the file, 3 in this model"
    ):
        CompressedCache.load(tmp_path / "x", tiny(num_hidden_layers=3))
    about, tensors = saving.FILE_FORMAT.read(tmp_path / "x")
    saving.FILE_FORMAT.write(tmp_path / "x", tensors, {**about, "fingerprint": {}})
    with pytest.raises(CacheError, match=r"saved for another model .*head_dim: None in the file"):
        CompressedCache.load(tmp_path / "x", tiny())


def test_masks(tmp_path):
    path = tmp_path / "mask.safetensors"
    mask = ChannelMask(torch.rand(3, 4, 65) < 0.3, {"model_type": "llama", "head_dim": 65})
    mask.save(path)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    about = FILE_FORMAT.read(path)[0]
    for what, other in tensors_changed(tensors["pruned"].to(torch.uint8)):
        for pruned in (other, other.bool()):
            if pruned.shape == mask.pruned.shape and torch.equal(pruned, mask.pruned):
                continue
            save_file({"pruned": pruned}, path, metadata)
            with pytest.raises(MaskError, match="digest differs"):
                ChannelMask.load(path)
            FILE_FORMAT.write(path, {"pruned": pruned}, about)
            if pruned.dtype != torch.bool or pruned.dim() < 2 or not pruned.numel():
                with pytest.raises(MaskError, match="a mask is a bool tensor"):
                    pytest.fail(f"{what}: {ChannelMask.load(path)}")
            else:
                assert torch.equal(ChannelMask.load(path).pruned, pruned)
    for name, text in metadata.items():
        less = {key: value for key, value in metadata.items() if key != name}
        for other in (less, {**less, name: text + " "}, {**less, name: ""}):
            save_file(tensors, path, other)
            with pytest.raises(MaskError, match=r"mask\.safetensors"):
                ChannelMask.load(path)
    for at in fields(about):
        for value in VALUES:
            FILE_FORMAT.write(
                path, tensors, changed_at(about, at, lambda owner, key, v=value: owner.__setitem__(key, v))
            )
            try:
                loaded = ChannelMask.load(path)
            except MaskError:
                continue
            assert torch.equal(loaded.pruned, mask.pruned)
            assert all(type(entry) in (str, int) for entry in loaded.fingerprint.values())
    save_file({**tensors, "more": torch.ones(1)}, path, metadata)
    with pytest.raises(MaskError, match="digest"):
        ChannelMask.load(path)


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig(),
        CacheConfig(ratio=0.3),
        CacheConfig(ratio=[0.25, 0.5], protect=(0.1, 0.2), tail_block=8, evict=SnapKV(budget=64)),
        CacheConfig(method="local_search", kept_channels=9, options={"start": "think"}, quantize=Quantize(keys=4)),
        CacheConfig(evict=H2O(budget=64)),
        CacheConfig(bits=2.25),
        CacheConfig(key_bits=4, value_bits=2, basis="none"),
        CacheConfig(total_bytes=10**6, basis="b.safetensors"),
    ],
)
def test_every_setting_of_a_file(config):
    """Whatever stands where a setting should: a configuration, or a `GraceError`."""
    whole = config.to_dict()
    for at in fields(whole):
        for value in (*VALUES, [None], ["x"], [[], {}], {"name": []}, [0.5, math.nan], {"a": 1}, "\ud800"):
            changed = changed_at(whole, at, lambda owner, key, v=value: owner.__setitem__(key, v))
            try:
                CacheConfig.from_dict(changed)
            except GraceError:
                continue
            except Exception as error:
                pytest.fail(f"{at}={value!r}: {type(error).__name__}: {error}")
        with suppress(GraceError):
            CacheConfig.from_dict(changed_at(whole, at, lambda owner, key: owner.__delitem__(key)))
