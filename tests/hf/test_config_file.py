"""Files of settings: what is written is read; what is damaged, foreign, newer or another model's is refused by name."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, Qwen2Config

from grace_opt.errors import GraceError, OptionError
from grace_opt.hf import CacheConfig, CompressedCache, Quantize, SnapKV

SETTINGS = [
    CacheConfig(ratio=0.6, protect=(0.1, 0.2), sink_tokens=4),
    CacheConfig(bits=2.25, basis="none"),
    CacheConfig("local_search", options={"start": "think"}, dense_layers=1),
    CacheConfig(ratio=0.0, quantize=Quantize(keys=4, values=2), evict=SnapKV(budget=99)),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_written_is_read(settings, tmp_path) -> None:
    path = tmp_path / "cache.json"
    text = settings.to_json(path, LlamaConfig())
    assert path.read_text() == text
    assert CacheConfig.from_json(path) == CacheConfig.from_json(path, LlamaConfig()) == settings
    with pytest.raises(OptionError, match=r"another model \(model_type: file llama, model qwen2"):
        CacheConfig.from_json(path, Qwen2Config())
    settings.to_json(path)  # for any model
    assert CacheConfig.from_json(path, Qwen2Config()) == settings


def test_a_cache_takes_the_name_of_a_file(tmp_path) -> None:
    path = tmp_path / "cache.json"
    CacheConfig(ratio=0.4).to_json(path, LlamaConfig(num_hidden_layers=2))
    assert CompressedCache(LlamaConfig(num_hidden_layers=2), config=path).config.channels.ratio == 0.4
    with pytest.raises(OptionError, match="num_hidden_layers: file 2, model 3"):
        CompressedCache(LlamaConfig(num_hidden_layers=3), config=str(path))
    with pytest.raises(OptionError, match="already decides all settings; leave out ratio"):
        CompressedCache(LlamaConfig(num_hidden_layers=2), config=path, ratio=0.5)


def test_a_file_that_is_none_says_why(tmp_path) -> None:
    path = tmp_path / "cache.json"
    with pytest.raises(OptionError, match="there is no such file"):
        CacheConfig.from_json(path)
    with pytest.raises(OptionError, match="it cannot be opened"):
        CacheConfig.from_json(tmp_path)
    whole = json.loads(CacheConfig().to_json(path))
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as some editors do
    assert CacheConfig.from_json(path) == CacheConfig()
    for text, message in (
        (path.read_text()[:-9], "it is not JSON"),
        ("[1]", "no file of cache settings"),
        (json.dumps({"recommended": "x"}), "no file of cache settings"),
        (json.dumps({**whole, "version": "3"}), "format version '3', and this grace_opt reads '2'"),
        (json.dumps({**whole, "pruning": 3}), "lacks its settings"),
        (json.dumps({**whole, "fingerprint": {"weights": 0.5}}), "lacks its settings or the model"),
        (json.dumps({**whole, "pruning": {"ratios": 0.5}}), "has no ratios"),
        (json.dumps({**whole, "pruning": {"ratio": "much"}}), "ratio='much'"),
        (json.dumps({**whole, "pruning": {"evict": 3}}), "evict"),
    ):
        path.write_text(text)
        with pytest.raises(GraceError, match=message):
            CacheConfig.from_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(OptionError, match="it is not JSON"):
        CacheConfig.from_json(path)
    with pytest.raises(OptionError, match="cannot write"):
        CacheConfig().to_json(tmp_path / "none" / "cache.json")
