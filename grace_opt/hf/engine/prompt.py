"""Decide when the prompt is over, and collect its last queries.

The first forward pass of several tokens is the prompt, with two exceptions:

* a declared length (``prompt_length=``): the prompt ends exactly there, however many passes it takes, and further
  tokens of the last pass (candidates of assisted decoding) are not part of it;
* a chunk size (the model's ``generation_config.prefill_chunk_size``): a pass of exactly that many tokens may be
  followed by more of the prompt; the next pass shows whether it is.

The passes are those of ``_prefill`` and ``_assisted_decoding`` in transformers' ``generation/utils.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import CacheError
from ..bases.importance import spread_queries
from ..models.observation import Observation
from ..stores.plan import LayerPlan

#: What is said of a prompt of length 0.
NO_TOKENS = (
    "the prompt has no tokens: input_ids, or inputs_embeds, has the length 0; give at least one token, for instance "
    "tokenizer.bos_token_id"
)


class Prompt:
    """Collects a layer's last queries until the prompt is over.

    Parameters
    ----------
    plan : LayerPlan
        Says how many queries are needed.
    """

    def __init__(self, plan: LayerPlan) -> None:
        self._plan = plan
        self.declared: int | None = None
        self.assisted = False
        self._waiting: Observation | None = None

    def observe(self, now: Observation) -> Observation | None:
        """Take in one forward pass.

        Parameters
        ----------
        now : Observation
            This pass: its queries, and the padding and number of all tokens so far, new ones included.

        Returns
        -------
        Observation or None
            The observation of the whole prompt if it is over; None while more may come.
        """
        new, length = now.queries.shape[2], now.length
        if self.declared is not None:
            if length - new >= self.declared:
                return None  # over already, and too short to prune
            end = min(length, self.declared)
            shown = now._replace(
                queries=now.queries[:, :, : new - (length - end)],
                valid=None if now.valid is None else now.valid[:, :end],
                length=end,
            )
            self._collect(shown)
            return self._take() if length >= self.declared else None
        if new == 1 and self._waiting is None:
            return None
        if self.assisted:
            raise CacheError(
                "assisted decoding feeds its candidates together with the prompt, and they "
                "must not be taken for observed queries; say where the prompt ends: CompressedCache(..., prompt_length="
                "inputs.input_ids.shape[1]), or generate inside `with grace_opt.hf.attach(model):`"
            )
        self._collect(now)
        return None if new == self._plan.chunk_size else self._take()

    def pending(self, new: int) -> Observation | None:
        """Return the whole prompt's observation if a pass of ``new`` tokens shows that the prompt is over."""
        return self._take() if self.declared is None and self._waiting is not None and new == 1 else None

    def goes_on(self, new: int, length: int) -> bool:
        """Return whether the prompt goes on after a pass of ``new`` tokens that follows ``length`` others."""
        if self.declared is not None:
            return length + new < self.declared
        return new == self._plan.chunk_size

    def behind(self, new: int, length: int) -> int:
        """Return how many of ``new`` tokens (``length`` in all) follow a declared prompt that ends among them."""
        extra = 0 if self.declared is None else length - self.declared
        return extra if 0 < extra < new else 0

    @property
    def waiting(self) -> bool:
        """Whether part of a prompt was seen and more may come."""
        return self._waiting is not None

    def crop(self, length: int, layer: int) -> None:
        """Forget the queries of a prompt that is still being read from a length on.

        Raises
        ------
        CacheError
            If none are left.
        """
        now = self._waiting
        if now is None or length >= now.length:
            return
        valid = None if now.valid is None else now.valid[:, :length]
        if now.places is None:
            count = now.queries.shape[2] - (now.length - length)
            self._waiting = now._replace(queries=now.queries[:, :, : max(count, 0)].clone(), valid=valid, length=length)
        else:
            kept = ((now.places >= 0) & (now.places < length)).any(0)
            count, places = int(kept.sum()), now.places[:, kept]
            places = torch.where(places < length, places, -1)
            queries = now.queries[:, :, kept.to(now.queries.device)]
            self._waiting = now._replace(queries=queries, valid=valid, length=length, places=places)
        if count <= 0 and self.declared is None:
            raise CacheError(
                f"layer {layer}: the prompt is still being read, and without its last {now.length - length} tokens no "
                "queries are left to choose by; call reset() and read it again"
            )

    def reset(self) -> None:
        """Expect another prompt."""
        self.declared, self.assisted, self._waiting = None, False, None

    def map_rows(self, rows: Tensor) -> None:
        """Select, repeat or re-order the sequences of the batch."""
        if self._waiting is not None:
            pick = rows.to(self._waiting.queries.device)
            valid = None if self._waiting.valid is None else self._waiting.valid[pick]
            places = None if self._waiting.places is None else self._waiting.places[pick]
            self._waiting = self._waiting._replace(queries=self._waiting.queries[pick], valid=valid, places=places)

    def _collect(self, now: Observation) -> None:
        if self._plan.bits is not None:
            self._waiting = spread_queries(now, self._waiting)
            return
        queries = now.queries
        if self._waiting is not None:
            queries = torch.cat([self._waiting.queries, queries], dim=2)
        if self._plan.observed is not None:
            queries = queries[:, :, max(queries.shape[2] - self._plan.observed, 0) :]
        # A view would keep all queries of the pass alive until the prompt is over.
        self._waiting = now._replace(queries=queries.clone())

    def _take(self) -> Observation | None:
        taken, self._waiting = self._waiting, None
        return taken
