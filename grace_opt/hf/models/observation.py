"""`Observation`: what the attention function tells a layer about its prompt."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Observation(NamedTuple):
    """What is known about a finished prompt.

    Attributes
    ----------
    queries : Tensor
        ``(B, H_q, L, d)``, the last ones of the prompt.
    valid : Tensor or None
        ``(B, length)`` bool, False at padding.
    length : int
        Number of tokens of the prompt.
    scaling, softcap : float or None
        The model's factor and soft cap for its logits.
    places : Tensor or None
        ``(B, L)``: the position of each query in the sequence, -1 for none; None means the last L, in order.
    """

    queries: Tensor
    valid: Tensor | None
    length: int
    scaling: float
    softcap: float | None
    places: Tensor | None = None
