"""`GracePress`: the channels that our methods choose, in NVIDIA's kvpress; for its evaluation harness.

When: to compare methods on the benchmarks that kvpress runs, alone or after a press that evicts tokens. As with
`kvpress.ThinKPress`, pruned channels are zeroed and no memory is saved; `grace_opt.hf.PrunedKeyCache` saves it.

Import it by its full name, ``from grace_opt.hf.press import GracePress``: `grace_opt.hf` does not, because importing
kvpress wraps every attention function of transformers, and kvpress pins transformers below 5.3. Give it a virtual
environment of its own: ``pip install "grace-opt[kvpress]"``.

Source: the interface of kvpress 0.5.5 (``ThinKPress``, ``BasePress.forward_hook``); the methods are ours.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..attention.provider import MaskProvider
from ..registry import MethodOptions

MINIMUM = (0, 5, 5)

_INSTALL = (
    'write: pip install "grace-opt[kvpress]" (it needs transformers older than 5.3: use a virtual environment of its '
    "own)"
)


def require_kvpress() -> None:
    """Raise an ImportError that says what to install, unless kvpress 0.5.5 or newer is installed."""
    wanted = ".".join(map(str, MINIMUM))
    try:
        version = importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"grace_opt.hf.press needs kvpress, which is not installed; {_INSTALL}") from None
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < MINIMUM:
        raise ImportError(f"grace_opt.hf.press needs kvpress >= {wanted}, but {version} is installed; {_INSTALL}")


require_kvpress()

from kvpress import ThinKPress  # noqa: E402


@dataclass
class GracePress(ThinKPress):
    """Zero the key channels that a method of grace_opt chooses, per KV head, when the prompt is over.

    Parameters
    ----------
    key_channel_compression_ratio : float
        Share of the channels to prune, in [0, 1). It is rounded up, as in `grace_opt.MaskProvider`:
        ⌈ratio · d⌉ channels; ThinKPress rounds down.
    window_size : int
        Number of the prompt's last queries that the weights are built from; no more than the keys that are left, if
        another press evicted tokens before.
    method : str
        ``"grace"`` (salient-channel protection and MIES) or any registered method.
    protect : (float, float), optional
        Bounds of the share of salient channels that cannot be pruned; None is the method's own default.
    weight : str
        Which W to build from queries and keys.
    seed : int
        For methods that draw random numbers.
    options : dict
        The method's own options.

    Raises
    ------
    OptionError, UnknownSolverError
        If an argument is out of range, or no method has that name.

    Notes
    -----
    As with every press, all tokens count as real: prompts of a batch must be of one length, without padding.
    Arguments may be changed after construction, as the evaluation harness does; they are read at every prompt.
    """

    method: str | MethodOptions = "grace"
    protect: tuple[float, float] | None = None
    weight: str = "frobenius"
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.provider()

    def provider(self) -> MaskProvider:
        """The provider that these arguments describe."""
        return MaskProvider(
            self.method,
            self.key_channel_compression_ratio,
            protect=self.protect,
            weight=self.weight,
            seed=self.seed,
            **self.options,
        )

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Zero the chosen channels of all keys, in place, and return keys and values."""
        if self.key_channel_compression_ratio == 0:
            return keys, values
        queries = self.compute_window_queries(module, hidden_states, kwargs["position_embeddings"])
        mask = self.provider()(queries[:, :, -keys.shape[2] :].detach(), keys.detach())
        return keys.masked_fill_(mask.pruned[:, :, None, :], 0.0), values
