"""The transformers adapter: a key cache that stores only the channels a solver keeps.

Three lines make an unmodified model decode from a smaller cache, and restore it afterwards::

    from grace_opt.hf import attach
    with attach(model, method="grace", ratio=0.5):
        output = model.generate(**inputs)

or with an explicit cache::

    model.set_attn_implementation("grace_sdpa")
    cache = CompressedCache(model, method="grace", ratio=0.5)
    output = model.generate(**inputs, past_key_values=cache)

In few bits, divided among the channels and tokens of keys and values, instead of without some channels::

    with attach(model, bits=2.25):
        output = model.generate(**inputs)

Importing this package registers the attention functions ``"grace_sdpa"`` and ``"grace_eager"`` with transformers,
through its documented registration interface; nothing is patched. With any other cache they behave exactly like
``"sdpa"`` and ``"eager"``. Needs ``pip install ".[hf]"`` in the checkout (transformers 5.2 or newer).
"""

from __future__ import annotations

from ._compat import require_transformers

require_transformers()

from .._util.moved import refuse_moved  # noqa: E402
from .attach import Attached, attach  # noqa: E402
from .attention import register_attention  # noqa: E402
from .bits.calibrate import calibrate_basis  # noqa: E402
from .bits.calibrated import CalibratedBasis  # noqa: E402
from .cache import CompressedCache  # noqa: E402
from .calibrate_eviction import calibrate_eviction  # noqa: E402
from .calibration import calibrate  # noqa: E402
from .config import CacheConfig  # noqa: E402
from .eviction import H2O, PyramidKV, SnapKV, StreamingLLM  # noqa: E402
from .graph_eviction import GraphEviction  # noqa: E402
from .implementation import attention_implementation  # noqa: E402
from .layer_budgets import LayerBudgets  # noqa: E402
from .layer_losses import LayerLosses  # noqa: E402
from .learned import learn_masks  # noqa: E402
from .quantization import Quantization  # noqa: E402
from .reading import LayerReading, ReadReport, TopTokens  # noqa: E402
from .recording import CapturedAttention, capture_attention, register_capture  # noqa: E402
from .report import MemoryReport  # noqa: E402
from .tune import tune  # noqa: E402

register_attention()
register_capture()

__all__ = [
    "H2O",
    "Attached",
    "CacheConfig",
    "CalibratedBasis",
    "CapturedAttention",
    "CompressedCache",
    "GraphEviction",
    "LayerBudgets",
    "LayerLosses",
    "LayerReading",
    "MemoryReport",
    "PyramidKV",
    "Quantization",
    "ReadReport",
    "SnapKV",
    "StreamingLLM",
    "TopTokens",
    "attach",
    "attention_implementation",
    "calibrate",
    "calibrate_basis",
    "calibrate_eviction",
    "capture_attention",
    "learn_masks",
    "tune",
]

__getattr__ = refuse_moved(
    __name__,
    {
        "PrunedKeyCache": "grace_opt.hf.CompressedCache",
        "PruningConfig": "grace_opt.hf.CacheConfig",
        "capture": "grace_opt.hf.capture_attention",
    },
)
