"""Measure one setting on one window: what it changes, what it takes, and how long a token takes beside the dense cache.

A window is read once, and every cache filled with it (`ReadOnce`).

Each measurement proves that the compressed cache was used: it held compressed tokens before and after the model read
it, grew by what was fed, took fewer bytes than the dense one, and the model's answers were not the dense cache's, bit
for bit. What fails is an error that names the setting, never a row.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ....errors import EvaluationError
from ...engine.cache import CompressedCache
from ...engine.filling import ReadOnce
from ...models.implementation import attention_implementation, base_for
from ..evaluation import StoredBits, compare_predictions, next_token_log_probs, score_answer, stored_bits
from .candidates import Candidate
from .foreign import quantized_bits
from .windows import Window

#: Rounds of single tokens that are timed, and of those before them, which compile and wake threads.
ROUNDS, WARM = 8, 2
#: Bytes of a number of a dense cache, as sizes are counted.
DENSE_BYTES = 2


@dataclass
class _Read:
    """The window that was read last, and what the dense cache makes of it."""

    number: int
    prompt: ReadOnce
    dense: Any
    log_probs: Tensor
    elements: tuple[int, int]


class Measurer:
    """Measures settings on windows; the window that was read last is kept.

    Parameters
    ----------
    model : PreTrainedModel
    windows : sequence of Window
    candidates : mapping
        By name.
    """

    def __init__(self, model: PreTrainedModel, windows: Sequence[Window], candidates: Mapping[str, Candidate]) -> None:
        self._model, self._windows, self._candidates = model, windows, candidates
        self._last: _Read | None = None

    @torch.no_grad()
    def __call__(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Measure ``config["setting"]`` on window number ``config["place"]``; times too if ``config["timed"]``.

        Returns
        -------
        list of dict
            First what was found, then, if it is timed, a row for each round.

        Raises
        ------
        EvaluationError
            If nothing proves that the compressed cache was used.
        """
        candidate, window = self._candidates[config["setting"]], self._windows[config["place"]]
        with attention_implementation(self._model, f"grace_{base_for(self._model)}"):
            read = self._read(config["place"])
            cache = read.prompt.fill(candidate.make(self._model))
            sizes, tokens = self._size(cache, read)
            found = next_token_log_probs(self._model, cache, window.fed.to(self._model.device))
            self._check_used(cache, window, tokens, found, read)
            row = _row(found, read, window) | asdict(sizes) | {"share": sizes.share, "compressed_tokens": tokens}
            row |= {"tokens": window.context.shape[1], "bytes": sizes.share * DENSE_BYTES * sum(read.elements)}
            return [row, *(self._times(cache, read, window) if config["timed"] else [])]

    def _read(self, number: int) -> _Read:
        if self._last is None or self._last.number != number:
            self._last = None  # two windows at once may not fit
            window, model = self._windows[number], self._model
            prompt = ReadOnce(model, window.context.to(model.device))
            dense = prompt.fill(DynamicCache(config=model.config))
            read = _Read(number, prompt, dense, torch.empty(0, device="cpu", dtype=torch.float64), (0, 0))
            read.elements = _elements(dense)
            read.log_probs = next_token_log_probs(model, dense, window.fed.to(model.device))
            self._last = read
        return self._last

    def _size(self, cache: Any, read: _Read) -> tuple[StoredBits, int]:
        """Return the bits that it takes, and how many tokens are compressed."""
        if not isinstance(cache, CompressedCache):
            return quantized_bits(cache, read.elements), cache.get_seq_length()
        report = cache.memory_report()
        if not report.pruned_tokens or report.total_ratio >= 1:
            raise EvaluationError(
                f"memory_report() says {report.pruned_tokens} compressed tokens and {report.total_ratio:.1%} of the "
                "dense cache's bytes: nothing was compressed, so these would be the dense cache's numbers"
            )
        return stored_bits(cache), report.pruned_tokens

    def _check_used(self, cache: Any, window: Window, tokens: int, found: Tensor, read: _Read) -> None:
        """Raise unless the model read this cache, and it is still compressed."""
        held, expected = cache.get_seq_length(), window.context.shape[1] + window.fed.shape[1]
        still = cache.memory_report().pruned_tokens if isinstance(cache, CompressedCache) else tokens
        if held != expected or still < tokens:
            raise EvaluationError(
                f"after {expected} tokens this cache holds {held}, {still} of them compressed where {tokens} were: the "
                "model did not use it"
            )
        if torch.equal(found, read.log_probs):
            raise EvaluationError(
                "the model's answers are those of the dense cache, bit for bit: it did not read the compressed one"
            )

    def _times(self, cache: Any, read: _Read, window: Window) -> list[dict[str, Any]]:
        """Time single tokens, with this cache and the dense one in turn."""
        token, dense = window.later[:, -1:].to(self._model.device), copy.deepcopy(read.dense)
        rows = []
        for turn in range(WARM + ROUNDS):
            taken = {"dense_ms": self._timed(token, dense), "ms": self._timed(token, cache)}
            if turn >= WARM:
                rows.append({"round": turn - WARM, **taken})
        return rows

    def _timed(self, token: Tensor, cache: Any) -> float:
        began = time.perf_counter()
        logits = self._model(token, past_key_values=cache).logits
        logits[0, -1, 0].item()  # waits for a device
        return 1000 * (time.perf_counter() - began)


def _elements(cache: DynamicCache) -> tuple[int, int]:
    """Return the numbers of elements of keys and of values in a dense cache."""
    pairs = [(layer.keys, layer.values) for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    return sum(keys.numel() for keys, _ in pairs), sum(values.numel() for _, values in pairs)


def _row(found: Tensor, read: _Read, window: Window) -> dict[str, Any]:
    """Return how far predictions are from the dense cache's, and how many facts are found."""
    count, following = window.later.shape[1], window.later[0, 1:].to(found.device)
    differs = compare_predictions(found[:count], read.log_probs[:count], following)
    hits, start = {"found": 0, "dense_found": 0, "kept": 0}, count
    for question, answer in window.asked:
        start += question.shape[1]
        places = slice(start - 1, start + answer.shape[1] - 1)
        right, before = (
            score_answer(part[places], answer[0].to(part.device)).exact for part in (found, read.log_probs)
        )
        hits = {"found": hits["found"] + right, "dense_found": hits["dense_found"] + before,
                "kept": hits["kept"] + (right and before)}  # fmt: skip
        start += answer.shape[1]
    return asdict(differs) | hits | {"asked": len(window.asked)}
