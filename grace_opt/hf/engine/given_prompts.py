"""`GivenPrompts`: the prompts of one call, as a `PromptStore` can know them: by their tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._util.warning import warn
from ...errors import OptionError
from .prompt_store import FEWEST
from .saving import Tokens

#: Arguments of ``generate`` that are the prompt, or its padding.
_PLAIN = ("input_ids", "inputs", "attention_mask")


@dataclass(frozen=True)
class GivenPrompts:
    """The prompts of a call.

    Attributes
    ----------
    tokens : list of array
        Those of each, without padding.
    padding : list of int
        How many places come before them.
    rows : int
        How many sequences of the cache each of them becomes.
    """

    tokens: list[Tokens]
    padding: list[int]
    rows: int = 1

    @property
    def length(self) -> int:
        """Number of places."""
        return len(self.tokens[0]) + self.padding[0]

    @property
    def is_batch(self) -> bool:
        """Whether there is more than one prompt, or padding."""
        return len(self.tokens) > 1 or self.padding[0] > 0

    @classmethod
    def of_call(cls, named: Mapping[str, Any], ids: Tensor | None, rows: int, pad: int | None) -> GivenPrompts | None:
        """Return the prompts of a call of ``generate``; None if they are too short, or more than tokens.

        Parameters
        ----------
        named : mapping
            The call's arguments by name.
        ids : Tensor or None
            Its tokens.
        rows : int
            How many sequences become of each prompt.
        pad : int or None
            What ``generate`` takes for padding if there is no attention mask.
        """
        if named.get("inputs_embeds") is not None:
            raise OptionError(
                "inputs_embeds beside prompts=: embeddings have no tokens by which a prompt could be found; give "
                "input_ids, or leave out prompts="
            )
        others = [name for name, value in named.items() if isinstance(value, Tensor) and name not in _PLAIN]
        if others:
            warn(f"{others[0]}= is given, on which the cache may depend, so prompts= is not used for this call")
            return None
        if ids is None or ids.dim() != 2 or ids.shape[1] <= FEWEST:
            return None
        mask = named.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        if real.shape != ids.shape or (mask is None and pad is not None and bool((ids == pad).any())):
            return None
        padding = (real.cumsum(1) == 0).sum(1)
        if bool((real.sum(1) + padding != ids.shape[1]).any()):  # more is hidden
            return None
        every = zip(ids.detach().cpu().numpy().astype(np.int64), padding.tolist(), strict=True)
        tokens = [own[first:] for own, first in every]
        return cls(tokens, padding.tolist(), rows)
