"""One layer of the pruned key cache: what is stored, and how it grows, shrinks and is re-ordered.

Storage, for ``B`` sequences, ``H`` KV heads, head width ``d`` and ``S`` cached tokens, ``S_p`` of them pruned::

    pruned_keys   (B, H, S_p, d')     only the kept channels of the old tokens
    kept_indices  (B, H, d')          which channels these are, sorted
    keys          (B, H, S - S_p, d)  the recent tokens, dense: the recent window and all that came after it
    values        (B, H, S, d_v)      all of them, dense

Life of a layer: ``update`` appends and hands the keys to the attention function (:mod:`grace_opt.hf.attention`); after
the prompt's attention has run dense, that function calls :meth:`PrunedKeyLayer.compress` with the last queries it saw.
From then on ``update`` returns the dense tail only, with the pruned segment pinned to it (the fused path), or keys of
full width whose pruned channels are zero (``fused=False``, which suits any attention function).

Every stored tensor owns exactly its bytes: slices are copied, because a view would keep the whole original alive and
the memory report would lie.

Source: ``DynamicLayer`` of transformers, whose contract this class keeps; ThinK (arXiv 2407.21018) for two segments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..errors import CacheError, OptionError
from ._compat import crop_is_relative
from .masking import kept_channels
from .plan import LayerPlan
from .segments import Handoff, pin, zero_filled

_CROP_IS_RELATIVE = crop_is_relative()


class PrunedKeyLayer(DynamicLayer):
    """A dynamic cache layer whose old keys keep only some channels per KV head.

    Parameters
    ----------
    plan : LayerPlan
        How this layer is to be pruned.
    """

    is_sliding = False
    is_croppable = True
    TENSORS = ("pruned_keys", "kept_indices", "keys", "values")

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.pruned_keys: Tensor | None = None
        self.kept_indices: Tensor | None = None
        self.head_dim = 0
        self._awaits_attention = False
        self._announced = False

    # ------------------------------------------------------------ growing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type, device and shape from the first keys and values; stores nothing yet."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.head_dim = key_states.shape[-1]
        self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens and return what the attention function is to work on.

        Returns
        -------
        keys, values : Tensor
            Before the prompt is compressed: everything, dense. Afterwards, fused: the dense tail alone, with the
            pruned segment pinned to it; otherwise keys of full width with zeros in the pruned channels.

        Raises
        ------
        CacheError
            If the keys of the step before never reached grace_opt's attention function, or if the shapes do not
            continue what is cached.
        """
        self.check_attended()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_continues(key_states)
        self._append(key_states, value_states)
        keys, values = self._stored()
        if self.pruned_keys is not None and not self.plan.fused:
            return self.full_width_keys(), values
        self._awaits_attention = True
        return pin(keys, Handoff(self, self.pruned_keys, self.kept_indices)), values

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Add tokens to the dense tail: the only place where storage grows, so that other ways to grow fit in."""
        keys, values = self._stored()
        self.keys = torch.cat([keys, key_states], dim=-2)
        self.values = torch.cat([values, value_states], dim=-2)

    def full_width_keys(self) -> Tensor:
        """All cached keys at full width, pruned channels as zeros; costs one dense layer while it lives."""
        keys, _ = self._stored()
        return zero_filled(self.pruned_keys, self.kept_indices, keys)

    # --------------------------------------- with the attention function

    def check_attended(self) -> None:
        """Raise if keys were handed out that grace_opt's attention function never saw: they can not be pruned."""
        if self._awaits_attention:
            raise CacheError(
                f"the keys of layer {self.plan.index} did not reach grace_opt's attention function, so the cache could "
                'only stay dense; write model.set_attn_implementation("grace_sdpa") before generating ("grace_eager" '
                "for models that need eager attention) and start from a new or reset() cache"
            )

    def attended(self) -> None:
        """Note that the attention function has received what ``update`` handed out."""
        self._awaits_attention = False

    def prompt_is_over(self, query_length: int) -> bool:
        """Whether to compress now: after the first forward pass of several tokens that outgrows the recent window.

        The single place that decides it, so that prompts in declared chunks can decide otherwise.
        """
        if self.pruned_keys is not None:
            return False
        length = self.get_seq_length()
        if length <= self.plan.recent_window:
            self._announce_short(length)
            return False
        return query_length > 1

    def _announce_short(self, length: int) -> None:
        if self.plan.announces and not self._announced:
            self._announced = True
            warnings.warn(
                f"the prompt has {length} tokens and the last recent_window={self.plan.recent_window} stay dense, so "
                "nothing is pruned; write a smaller recent_window to prune prompts as short as this",
                UserWarning,
                stacklevel=2,
            )

    def compress(self, queries: Tensor, valid: Tensor | None) -> None:
        """Choose channels from all cached keys and store the tokens before the recent window without the others.

        Parameters
        ----------
        queries : Tensor
            ``(B, H_q, L, d)``, the last post-RoPE queries of the prompt; the last ``observation_window`` are used.
        valid : Tensor or None
            ``(B, S)`` bool, False at padding; None means no padding.
        """
        keys, _ = self._stored()
        observed = queries[:, :, -self.plan.observation_window :]
        with torch.no_grad():
            mask = self.plan.source(observed, keys, attention_mask=valid)
            kept = kept_channels(mask, keys)
        old = keys.shape[-2] - self.plan.recent_window
        self.pruned_keys = keys[:, :, :old].gather(-1, kept[:, :, None, :].expand(-1, -1, old, -1))
        self.kept_indices = kept
        self.keys = keys[:, :, old:].clone(memory_format=torch.contiguous_format)

    # -------------------------------------------------------------- sizes

    @property
    def pruned_length(self) -> int:
        """Number of tokens in the pruned segment."""
        return 0 if self.pruned_keys is None else self.pruned_keys.shape[-2]

    def get_seq_length(self) -> int:
        """Number of cached tokens, pruned and dense together."""
        return 0 if self.keys is None else self.pruned_length + self.keys.shape[-2]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset for the mask; old transformers pass the new tokens' positions, not their number."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        if count == 0:
            raise CacheError(
                f"there are no new tokens: the cache holds {self.get_seq_length()} already, and the input has no more; "
                "for another prompt, make a new PrunedKeyCache or call reset()"
            )
        return self.get_seq_length() + count, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum, under the name that old transformers use."""
        return -1

    def stored_tensors(self) -> dict[str, Tensor]:
        """All tensors that the layer keeps alive, by name."""
        return {name: tensor for name in self.TENSORS if (tensor := getattr(self, name)) is not None}

    # --------------------------------------- shrinking, re-ordering, moving

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens, across the border of the segments if need be.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: so many tokens go. Zero or positive as the installed transformers means it: in old ones the
            length to keep; in later ones zero removes nothing and positive numbers are refused.
        """
        length = self.get_seq_length()
        if tokens_to_remove >= 0 and _CROP_IS_RELATIVE:
            if tokens_to_remove > 0:
                raise OptionError(
                    f"crop({tokens_to_remove}) is ambiguous; write crop(-{tokens_to_remove}) to remove so many tokens, "
                    f"or crop({min(tokens_to_remove - length, 0)}) to keep so many"
                )
            return
        keep = length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove
        if keep >= length:
            return
        if keep <= 0:
            self.reset()
            return
        keys, values = self._stored()
        self.values = values[:, :, :keep].clone()
        self.keys = keys[:, :, : max(keep - self.pruned_length, 0)].clone()
        if self.pruned_keys is not None and keep < self.pruned_length:
            self.pruned_keys = self.pruned_keys[:, :, :keep].clone()

    def reset(self) -> None:
        """Forget everything; the layer can then be used for another prompt."""
        self.keys = self.values = self.pruned_keys = self.kept_indices = None
        self.is_initialized = False
        self._awaits_attention = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams of beam search."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences only."""
        self._map(lambda tensor: tensor[indices, ...])

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back to where it came from."""
        if self.is_initialized:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for name, tensor in self.stored_tensors().items():
            setattr(self, name, change(tensor))

    # ------------------------------------------------------------- checks

    def _stored(self) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            raise CacheError(f"layer {self.plan.index} of the cache is empty; run the model on a prompt first")
        return self.keys, self.values

    def _check_continues(self, key_states: Tensor) -> None:
        keys, _ = self._stored()
        expected = (keys.shape[0], keys.shape[1], keys.shape[3])
        found = (key_states.shape[0], key_states.shape[1], key_states.shape[3])
        if expected != found:
            raise CacheError(
                f"layer {self.plan.index} of the cache holds (batch, KV heads, head_dim) = {expected} and the new keys "
                f"have {found}; use one cache per batch and model, or call reset() in between"
            )
