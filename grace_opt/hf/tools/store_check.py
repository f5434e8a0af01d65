"""The conformance suite of stores, on tiny models with random weights; `grace_opt.testing.check_store` runs it.

A batch has a padded row, the layers grow beyond their window, and everything that a cache can be asked for is asked
for: another order of sequences, a copy, a file, fewer tokens, another device, bytes.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...errors import CacheError
from ..engine.attach import attach
from ..engine.cache import CompressedCache
from ..engine.layer import PrunedKeyLayer
from ..evict.eviction import StreamingLLM
from ..models.implementation import attention_implementation
from ..stores.counting import storages
from ..stores.maker import StoreMaker
from ..stores.store import Store

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
#: Families whose attention differs: grouped heads, one KV head with biases, as many KV heads as queries have.
_FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"num_key_value_heads": 1},
    "Mistral": {"sliding_window": None, "num_key_value_heads": 4},
}
_PROMPT, _PADDING, _RECENT, _BLOCK = 60, 9, 8, 16
_SETTINGS = {"recent_window": _RECENT, "tail_block": _BLOCK, "sink_tokens": 4}


def check(store: StoreMaker, tolerance: float, **settings: Any) -> None:
    """Run the suite; see `grace_opt.testing.check_store`."""
    for family, model in _models():
        _Suite(family, model, store, tolerance, settings).run()


def _models() -> Iterator[tuple[str, PreTrainedModel]]:
    for family, changes in _FAMILIES.items():
        config = getattr(transformers, f"{family}Config")(**{**_SIZES, **changes})
        with torch.random.fork_rng(devices=()):  # the caller's random numbers go on as they would
            torch.manual_seed(0)
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        yield family, model


class _Suite:
    """The checks with one model."""

    def __init__(
        self, family: str, model: PreTrainedModel, store: StoreMaker, tolerance: float, settings: dict[str, Any]
    ) -> None:
        self.family, self.model, self.store, self.tolerance = family, model, store, tolerance
        self.settings = {**_SETTINGS, **settings}
        generator = torch.Generator("cpu").manual_seed(1)
        self.ids = torch.randint(3, 97, (2, _PROMPT), generator=generator, device="cpu", dtype=torch.long)
        self.more = torch.randint(3, 97, (2, 3 * _BLOCK), generator=generator, device="cpu", dtype=torch.long)
        self.mask = torch.ones(2, _PROMPT + self.more.shape[1], device="cpu", dtype=torch.long)
        self.mask[1, :_PADDING] = 0

    def run(self) -> None:
        """Run every check."""
        with torch.no_grad(), attention_implementation(self.model, "grace_sdpa"):
            cache = self._read(self._new())
            self._is_near_the_dense_one(cache)
            self._grows(cache)
            self._copies_and_orders(cache)
            self._is_saved(cache)
            self._crops(cache)
            self._counts(cache)
            self._reads_a_padded_row_as_the_row_alone(cache)
            self._evicts()
        with attach(self.model, store=self.store, **self.settings) as attached:
            output = self.model.generate(self.ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
            self._require(attached.cache.get_seq_length() >= output.shape[1] - 1, "generate lost its cache")

    def _new(self, **more: Any) -> CompressedCache:
        return CompressedCache(self.model, store=self.store, **{**self.settings, **more})

    def _require(self, holds: bool, what: str) -> None:
        assert holds, f"{getattr(self.store, '__name__', self.store)} on {self.family}: {what}"

    def _feed(self, cache: Any, tokens: Tensor, rows: slice = slice(None)) -> Tensor:
        """Feed tokens behind what is cached; returns the last logits."""
        start = cache.get_seq_length()
        mask = self.mask[rows, : start + tokens.shape[1]]
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        output = self.model(tokens, attention_mask=mask, position_ids=places, past_key_values=cache)
        logits: Tensor = output.logits[:, -1]
        self._require(bool(logits.isfinite().all()), "logits are not finite")
        return logits

    def _read(self, cache: Any) -> Any:
        self._feed(cache, self.ids)
        return cache

    def _layers(self, cache: CompressedCache) -> list[PrunedKeyLayer]:
        return [layer for layer in cache.layers if isinstance(layer, PrunedKeyLayer)]

    def _is_near_the_dense_one(self, cache: CompressedCache) -> None:
        """Decoded keys and values are those of a dense cache, but for what the store loses."""
        for layer in self._layers(cache):
            old = layer.compressed
            self._require(old is not None and 0 < old.length <= _PROMPT - _RECENT, "a prompt of 60 tokens stays dense")
        self._compare(cache, self._read(DynamicCache(config=self.model.config)))

    def _compare(self, cache: CompressedCache, dense: DynamicCache) -> None:
        for layer, other in zip(self._layers(cache), dense.layers, strict=True):
            old = layer.compressed
            for found, exact in zip(layer.full_width(), (other.keys, other.values), strict=True):
                real = self.mask[:, None, : exact.shape[2], None].expand_as(exact)
                if old is not None and old.positions is not None:
                    exact, real = _in_order(exact, old), _in_order(real, old)
                self._require(found.shape == exact.shape, f"{tuple(found.shape)} tokens for {tuple(exact.shape)}")
                error = ((found - exact) * real).norm() / (exact * real).norm()
                self._require(bool(error <= self.tolerance), f"a relative error of {error:.3g}, not {self.tolerance}")

    def _grows(self, cache: CompressedCache) -> None:
        """Tokens that have left the window join the store, and nothing before them changes."""
        grown, dense = copy.deepcopy(cache), self._read(DynamicCache(config=self.model.config))
        before = [layer.compressed.length for layer in self._layers(grown) if layer.compressed is not None]
        for token in torch.split(self.more[:, : 2 * _BLOCK], 1, dim=1):
            self._feed(grown, token)
            self._feed(dense, token)
        for layer, length in zip(self._layers(grown), before, strict=True):
            old = layer.compressed
            self._require(old is not None and old.length >= length + _BLOCK, "newer tokens do not join the store")
            self._require(layer.get_seq_length() == _PROMPT + 2 * _BLOCK, "tokens are lost when the store grows")
        self._compare(grown, dense)

    def _copies_and_orders(self, cache: CompressedCache) -> None:
        """A copy goes on as the original does, and so does every sequence, wherever it stands in the batch."""
        token, order = self.more[:, :1], torch.tensor([1, 0, 0], device="cpu", dtype=torch.long)
        expected = self._feed(copy.deepcopy(cache), token)
        self._require(torch.equal(self._feed(copy.deepcopy(cache), token), expected), "a copy goes on differently")
        moved, mask = copy.deepcopy(cache), self.mask
        moved.reorder_cache(order)
        self.mask = mask[order]
        found = self._feed(moved, token[order])
        self.mask = mask
        torch.testing.assert_close(found, expected[order], rtol=1e-4, atol=1e-4)
        away = copy.deepcopy(cache)
        for layer in self._layers(away):
            layer.offload()
            layer.prefetch()
        self._require(torch.equal(self._feed(away, token), expected), "it goes on differently after it was moved")

    def _is_saved(self, cache: CompressedCache) -> None:
        """A file gives the same logits, bit for bit."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            cache.save(path)
            loaded = CompressedCache.load(path, self.model, store=self.store)
            expected = self._feed(copy.deepcopy(cache), self.more[:, :1])
            self._require(
                torch.equal(self._feed(loaded, self.more[:, :1]), expected), "a loaded cache goes on differently"
            )

    def _crops(self, cache: CompressedCache) -> None:
        """Dropping newer tokens leaves what was; dropping older ones does, or is refused by name."""
        shorter = copy.deepcopy(cache)
        expected = self._feed(copy.deepcopy(cache), self.more[:, :1])
        self._feed(shorter, self.more[:, 1:3])
        shorter.crop(-2)
        self._require(torch.equal(self._feed(shorter, self.more[:, :1]), expected), "tokens that were cropped stay")
        alone = self._new(sink_tokens=0)  # all tokens, in order
        self.model(self.ids[:1], past_key_values=alone)
        try:
            alone.crop(20 - _PROMPT)
        except CacheError:
            return
        left = [layer.full_width()[0].shape[2] for layer in self._layers(alone)]
        self._require(set(left) == {alone.get_seq_length()} == {20}, f"crop() to 20 tokens leaves {left}")

    def _counts(self, cache: CompressedCache) -> None:
        """The report has every byte once."""
        cache = copy.deepcopy(cache)
        self._feed(cache, self.more[:, :1])  # until then, parts may be views of the prompt's tensors
        report, layers = cache.memory_report(), self._layers(cache)
        held = sum(storages([layer.stored_parts() for layer in layers]).values())
        for layer in layers:
            assert layer.tail is not None
            tail, buffers = (layer.tail.keys, layer.tail.values), layer.tail.buffers
            held -= sum(buffer.nbytes - used.nbytes for buffer, used in zip(buffers, tail, strict=True))
        counted = report.total_bytes - report.other_bytes
        self._require(counted == held, f"{counted} bytes are reported, and {held} are held")
        self._require(report.pruned_tokens > 0, "the report says that nothing is compressed")

    def _reads_a_padded_row_as_the_row_alone(self, cache: CompressedCache) -> None:
        alone, mask = self._new(), self.mask
        self.mask = mask[1:, _PADDING:]
        self._feed(alone, self.ids[1:, _PADDING:])
        single = self._feed(alone, self.more[1:, :1])
        self.mask = mask
        together = self._feed(copy.deepcopy(cache), self.more[:, :1])[1:]
        torch.testing.assert_close(together, single, rtol=1e-3, atol=1e-3)

    def _evicts(self) -> None:
        """Tokens that an eviction has left are stored, with their places."""
        cache = self._read(self._new(evict=StreamingLLM(budget=24)))
        for layer in self._layers(cache):
            old = layer.compressed
            left = None if old is None or old.positions is None else old.positions.shape[-1]
            self._require(left == 24 - _RECENT, f"an eviction to 24 tokens leaves {left} beside the recent {_RECENT}")
        self._compare(cache, self._read(DynamicCache(config=self.model.config)))
        self._feed(cache, self.more[:, :1])
        self._require(cache.get_seq_length() == _PROMPT + 1, "with an eviction, the length of the text is lost")


def _in_order(tensor: Tensor, old: Store) -> Tensor:
    """Return the tokens ``(B, H, S, d)`` of a prompt in the order of a store that has another."""
    assert old.positions is not None
    places = old.positions.long().expand(-1, tensor.shape[1], -1)[..., None]
    older = tensor.gather(2, places.expand(-1, -1, -1, tensor.shape[-1]))
    return torch.cat([older, tensor[:, :, old.length :]], dim=2)
