"""`GracePress`: grace_opt's methods in NVIDIA's kvpress, for its evaluation harness.

When: to compare methods on the benchmarks of kvpress, alone or after a press that evicts tokens. As in
`kvpress.ThinKPress`, pruned channels are set to zero, which saves no memory; `grace_opt.hf.CompressedCache` does.

Import it by its full name, ``from grace_opt.hf.tools.press import GracePress``. `grace_opt.hf` does not import it,
because kvpress wraps every attention function of transformers and pins transformers below 5.3. Install it in a separate
virtual environment: ``pip install ".[kvpress]"`` in the checkout.

Source: the interface of kvpress 0.5.5 (``ThinKPress``, ``BasePress.forward_hook``); the methods are ours.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..._util.optional import pip_install
from ...attention.provider import MaskProvider
from ...registry import MethodOptions

MINIMUM = (0, 5, 5)

_INSTALL = f"write: {pip_install('kvpress')} (it needs transformers older than 5.3: use a separate virtual environment)"


def require_kvpress() -> None:
    """Raise an ImportError that says what to install, unless kvpress 0.5.5 or newer is installed."""
    wanted = ".".join(map(str, MINIMUM))
    try:
        version = importlib.metadata.version("kvpress")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"grace_opt.hf.tools.press needs kvpress, which is not installed; {_INSTALL}") from None
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < MINIMUM:
        raise ImportError(f"grace_opt.hf.tools.press needs kvpress >= {wanted}, but {version} is installed; {_INSTALL}")


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
        Number of last prompt queries from which the weights are built; at most the number of keys left if another press
        evicted tokens first.
    method : str
        ``"grace"`` (salient-channel protection and MIES) or any registered method.
    protect : (float, float), optional
        Lower and upper bound on the share of channels that count as salient and are never pruned. None means the
        method's default.
    weight : str
        Which W to build; see `grace_opt.MaskProvider`.
    seed : int
        Seed for methods that draw random numbers.
    options : dict
        The method's own options.

    Raises
    ------
    OptionError, UnknownSolverError
        If an argument is out of range, or no method has that name.

    Notes
    -----
    As with every press, all tokens count as real: the prompts of a batch must have equal length, without padding.
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
        """Return the provider that these arguments describe."""
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
        observed, scaling = queries[:, :, -keys.shape[2] :].detach(), getattr(module, "scaling", None)
        mask = self.provider()(observed, keys.detach(), None, values.detach(), scaling)
        return keys.masked_fill_(mask.pruned[:, :, None, :], 0.0), values
