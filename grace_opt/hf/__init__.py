"""The transformers adapter: a key cache that stores only the channels that a solver kept.

Three lines make a stock model decode from a smaller cache, and leave it as it was::

    from grace_opt.hf import attach
    with attach(model, method="grace", ratio=0.5):
        output = model.generate(**inputs)

or, with the cache in hand::

    model.set_attn_implementation("grace_sdpa")
    cache = PrunedKeyCache(model, method="grace", ratio=0.5)
    output = model.generate(**inputs, past_key_values=cache)

Importing this package registers the attention functions ``"grace_sdpa"`` and ``"grace_eager"`` with transformers,
through its documented registration interface (nothing is patched); with any other cache they behave exactly as
``"sdpa"`` and ``"eager"``. Needs ``pip install "grace-opt[hf]"`` (transformers 5.2 or newer).

======================  ===================================================================================
room                    what is in it
======================  ===================================================================================
``attach``              :func:`attach`: a ``with`` block in which ``generate`` prunes
``cache``               :class:`PrunedKeyCache`, what users construct
``config``              :class:`PruningConfig`, every setting of a cache
``layer``               one layer: how it grows, shrinks and is re-ordered
``storage``             what a layer stores: the compressed prompt, the dense tail
``compression``         from a prompt's keys and values to what is stored of them
``prompt``              when the prompt is over, and which queries it has shown
``plan``                how one layer is to be pruned
``eviction``            which tokens to drop first: SnapKV, PyramidKV, H2O, StreamingLLM
``attention_received``  what eviction's scores are made of
``quantization``        keys and values in a few bits
``packing``             what optimum-quanto and hqq do for them
``attention``           the registered attention functions
``segments``            the arithmetic: pruned segment and dense tail under one softmax
``report``              :class:`MemoryReport`, the bytes that the tensors really hold
``masking``             masks and models: fingerprints, static masks, conversion of stored indices
``calibration``         :func:`calibrate`: static masks from a few texts
``saving``              a pruned prompt as a file
``capture``             post-RoPE queries, keys and values of a forward pass
``implementation``      which attention implementation a model uses, and putting it back
``arguments``           what is meant by arguments that nothing here has
``press``               the same choice of channels as a press for kvpress (imported by itself)
``_compat``             differences between transformers versions
======================  ===================================================================================
"""

from __future__ import annotations

from ._compat import require_transformers

require_transformers()

from .attach import Attached, attach  # noqa: E402
from .attention import register_attention  # noqa: E402
from .cache import PrunedKeyCache  # noqa: E402
from .calibration import calibrate  # noqa: E402
from .capture import CapturedAttention, capture, register_capture  # noqa: E402
from .config import PruningConfig  # noqa: E402
from .eviction import H2O, PyramidKV, SnapKV, StreamingLLM  # noqa: E402
from .implementation import attention_implementation  # noqa: E402
from .quantization import Quantization  # noqa: E402
from .report import MemoryReport  # noqa: E402

register_attention()
register_capture()

__all__ = [
    "H2O",
    "Attached",
    "CapturedAttention",
    "MemoryReport",
    "PrunedKeyCache",
    "PruningConfig",
    "PyramidKV",
    "Quantization",
    "SnapKV",
    "StreamingLLM",
    "attach",
    "attention_implementation",
    "calibrate",
    "capture",
]
