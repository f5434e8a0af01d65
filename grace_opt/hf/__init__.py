"""The transformers adapter: key-value caches that take a fraction of the bytes.

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

from .models.compat import require_transformers

require_transformers()

from .._util.moved import refuse_modules, refuse_moved  # noqa: E402
from . import calibrate  # noqa: E402
from .bases.calibrated import CalibratedBasis  # noqa: E402
from .engine.attach import Attached, attach  # noqa: E402
from .engine.attention import register_attention  # noqa: E402
from .engine.cache import CompressedCache  # noqa: E402
from .engine.prompt_store import PromptStore  # noqa: E402
from .engine.read_prompt import read_prompt  # noqa: E402
from .engine.report import MemoryReport  # noqa: E402
from .evict.eviction import H2O, PyramidKV, SnapKV, StreamingLLM  # noqa: E402
from .evict.graph_eviction import GraphEviction  # noqa: E402
from .evict.layer_budgets import LayerBudgets  # noqa: E402
from .evict.layer_losses import LayerLosses  # noqa: E402
from .models.implementation import attention_implementation  # noqa: E402
from .models.recording import CapturedAttention, capture_attention, register_capture  # noqa: E402
from .settings.bits import Bits  # noqa: E402
from .settings.channels import Channels  # noqa: E402
from .settings.config import CacheConfig  # noqa: E402
from .settings.quantization import Quantize  # noqa: E402
from .settings.reading import TopTokens  # noqa: E402
from .stores.tally import LayerReading, ReadReport  # noqa: E402
from .tools.learned import learn_masks  # noqa: E402
from .tools.tune import tune  # noqa: E402

register_attention()
register_capture()

__all__ = [
    "H2O",
    "Attached",
    "Bits",
    "CacheConfig",
    "CalibratedBasis",
    "CapturedAttention",
    "Channels",
    "CompressedCache",
    "GraphEviction",
    "LayerBudgets",
    "LayerLosses",
    "LayerReading",
    "MemoryReport",
    "PromptStore",
    "PyramidKV",
    "Quantize",
    "ReadReport",
    "SnapKV",
    "StreamingLLM",
    "TopTokens",
    "attach",
    "attention_implementation",
    "calibrate",
    "capture_attention",
    "learn_masks",
    "read_prompt",
    "tune",
]

__getattr__ = refuse_moved(
    __name__,
    {
        "PrunedKeyCache": "grace_opt.hf.CompressedCache",
        "PruningConfig": "grace_opt.hf.CacheConfig",
        "Quantization": "grace_opt.hf.Quantize",
        "calibrate_basis": "grace_opt.hf.calibrate.basis",
        "calibrate_eviction": "grace_opt.hf.calibrate.budgets",
        "capture": "grace_opt.hf.capture_attention",
    },
)
refuse_modules(
    {
        f"{__name__}.{name}": f"{__name__}.tools.{name}"
        for name in ("bits_press", "evaluation", "lm_eval", "needle", "press")
    }
    | {f"{__name__}.eviction": f"{__name__}.evict.eviction"}
)
