"""The transformers adapter: a key cache that stores only the channels that a solver kept.

Three lines make a stock model decode from a smaller cache::

    from grace_opt.hf import PrunedKeyCache
    model.set_attn_implementation("grace_sdpa")
    model.generate(**inputs, past_key_values=PrunedKeyCache(model.config, method="grace", ratio=0.5))

Importing this package registers the attention functions ``"grace_sdpa"`` and ``"grace_eager"`` with transformers,
through its documented registration interface (nothing is patched); with any other cache they behave exactly as
``"sdpa"`` and ``"eager"``. Needs ``pip install "grace-opt[hf]"`` (transformers 5.2 or newer).

=================  ===================================================================================
room               what is in it
=================  ===================================================================================
``cache``          :class:`PrunedKeyCache`, what users construct
``layer``          one layer's storage: pruned old keys, dense recent keys, all values
``plan``           how one layer is to be pruned
``attention``      the registered attention functions
``segments``       the arithmetic: pruned segment and dense tail under one softmax
``report``         :class:`MemoryReport`, the bytes that the tensors really hold
``masking``        masks and models: fingerprints, static masks, conversion of stored indices
``capture``        post-RoPE queries, keys and values of a forward pass
``_compat``        differences between transformers versions
=================  ===================================================================================
"""

from __future__ import annotations

from ._compat import require_transformers

require_transformers()

from .attention import register_attention  # noqa: E402
from .cache import PrunedKeyCache  # noqa: E402
from .capture import CapturedAttention, attention_implementation, capture, register_capture  # noqa: E402
from .report import MemoryReport  # noqa: E402

register_attention()
register_capture()

__all__ = [
    "CapturedAttention",
    "MemoryReport",
    "PrunedKeyCache",
    "attention_implementation",
    "capture",
]
