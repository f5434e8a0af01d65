"""`DecodedBitsPress`: what ``bits=`` keeps of keys and values, decoded, in NVIDIA's kvpress. It saves no memory.

When: to score ``bits=`` on the benchmarks of kvpress beside its presses. A press has to hand dense tensors back, so the
codes are made, read, and thrown away: the model answers from the numbers that a `CompressedCache` would hold, at the
dense cache's bytes. `DecodedBitsPress.stored` says what the codes took. To save memory, use `grace_opt.hf.attach`.

Import it by its full name, ``from grace_opt.hf.tools.bits_press import DecodedBitsPress``; see
`grace_opt.hf.tools.press`.

Source: the interface of kvpress 0.5.5 (``BasePress``, ``ThinKPress.compute_window_queries``); the codes are ours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import CacheError
from ..bases.calibrated import CalibratedBasis
from ..engine.cache import CompressedCache
from ..models.observation import Observation
from ..settings.bits import CALIBRATED
from .evaluation.sizes import StoredBits, stored_bits
from .press import require_kvpress

require_kvpress()

from kvpress import BasePress, ThinKPress  # noqa: E402


@dataclass
class DecodedBitsPress(BasePress):
    """Replace the prompt's keys and values by what ``bits=`` would have kept of them, at full size.

    Parameters
    ----------
    bits : float
        Mean bits per element, as in `grace_opt.hf.attach`.
    basis : str, path or CalibratedBasis
        As in `grace_opt.hf.attach`.
    trellis : bool
        As in `grace_opt.hf.attach`.

    Raises
    ------
    OptionError, CalibrationError
        If an argument is wrong, when the press is put on a model.
    CacheError
        If another press has evicted tokens first, or the prompt is too short to be coded.

    Notes
    -----
    As with every press, all tokens count as real: the prompts of a batch must have equal length, without padding.
    Tokens after the prompt stay as they are; a `CompressedCache` codes them later, in blocks.
    """

    bits: float = 2.25
    basis: str | os.PathLike[str] | CalibratedBasis = CALIBRATED
    trellis: bool = True
    _cache: CompressedCache | None = field(default=None, init=False, repr=False, compare=False)

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Prepare for the prompts of a model; makes its basis if there is none yet."""
        self._cache = CompressedCache(model, bits=self.bits, basis=self.basis, trellis=self.trellis)
        if self._cache.basis_source is not None:
            self._cache.basis_source()  # in a prompt, the calibration would run through this press

    @property
    def compression_ratio(self) -> float:
        """0.0, the share of memory that is saved."""
        return 0.0

    @property
    def stored(self) -> StoredBits:
        """What the codes of the latest prompt took, as if the model had 16 bits.

        Raises
        ------
        CacheError
            If no prompt was read yet.
        """
        cache = self._cache
        counts = set() if cache is None else {cache.get_seq_length(index) for index in cache.prunable_layers}
        if cache is None or len(counts) != 1 or 0 in counts:
            raise CacheError(
                "no prompt was read to its end: write `with press(model): model(prompt, past_key_values=cache)`"
            )
        return stored_bits(cache)

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Code the keys and values of a layer, and return what can be read from the codes."""
        if self._cache is None:
            raise CacheError("the press is on no model yet: write `with press(model):`")
        length, index = hidden_states.shape[1], int(module.layer_idx)  # type: ignore[arg-type]
        if index not in self._cache.prunable_layers:
            return keys, values
        if keys.shape[2] != length:
            raise CacheError(
                f"of {length} tokens, {keys.shape[2]} are left for DecodedBitsPress: leave the press out that evicts "
                "tokens before it, or write attach(model, bits=..., evict=...)"
            )
        layer = self._cache.layers[index]
        layer.reset()
        self._cache.update(keys, values, index)
        queries = ThinKPress(window_size=length).compute_window_queries(
            module, hidden_states, kwargs["position_embeddings"]
        )
        layer.attended()
        scaling = float(module.scaling)  # type: ignore[arg-type]
        layer.observe(Observation(queries.detach(), None, length, scaling, None), keys.detach(), values.detach())
        if layer.compressed is None:
            raise CacheError(f"nothing of the {length} tokens can be coded in {self.bits:g} bits: give a longer prompt")
        kept: tuple[Tensor, Tensor] = layer.full_width()
        return kept
