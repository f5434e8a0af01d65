"""Learned static masks: gates on key channels, learned beside the dense model, and hardened to a budget.

`learn_masks` is the call. `observe` reads windows of text and keeps some queries of each layer, `objective` says how
far gated keys move a layer's output, `stages` learns one layer's mask, `checkpoint` keeps layers that are done.
"""

from __future__ import annotations

from .call import learn_masks

__all__ = ["learn_masks"]
