"""`MaskProvider`: turn observed queries and cached keys into a `ChannelMask`, by any registered method.

Inference code calls it. Any method that you register can be used here. Source: GRACE
(arXiv 2604.16983): the preset ``"grace"`` is salient-channel protection plus MIES.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import registry
from .._util.arrays import to_float_tensor
from .._util.names import did_you_mean
from .._util.parameters import choice, integer
from ..errors import ProblemError, UnknownSolverError
from ..problem import Problem
from ..registry import MethodOptions
from ..run import Run, checked_seed
from .masks import ChannelMask
from .outputs import output_matrix
from .weights import PROTECT_HIGH, PROTECT_LOW, check_protection, interaction_matrix, prune_count, salient_channels

#: Presets: name -> (method, protection bounds).
PRESETS: Mapping[str, tuple[str, tuple[float, float]]] = {"grace": ("mies", (PROTECT_LOW, PROTECT_HIGH))}

#: What ``weight=`` may be: the change of the logits, or that of the attention's output.
FROBENIUS, OUTPUT = WEIGHTS = ("frobenius", "output")

#: Share of channels to prune where none is given; docs/results/answers.md shows what larger shares cost.
DEFAULT_RATIO = 0.3


class MaskProvider:
    """Choose which key channels to prune, one KV head at a time.

    Parameters
    ----------
    method : str or options object
        A registered method, the preset ``"grace"`` (protection and MIES), or a method's options object such as
        ``grace_opt.solvers.TabuOptions(iterations=500)``.
    ratio : float
        Fraction of channels to prune, in [0, 1); ⌈ratio · d⌉ channels of every head are pruned.
    kept_channels : int, optional
        Number of channels to keep in every head; replaces `ratio`.
    protect : (low, high), optional
        Bounds of the protected proportion, see `salient_channels`. None protects nothing, or for the preset means its
        own bounds.
    weight : {"frobenius", "output"}
        Which W to build: the paper's, of the logits (`interaction_matrix`), or that of the attention's output
        (`output_matrix`), which needs values too. With ``"output"``, begin with ``method="think"``: most of what
        interactions gain to first order is lost.
    seed : int
        Seed for randomised methods.
    **options
        The method's own options.

    Examples
    --------
    >>> q, k = torch.randn(1, 4, 32, 64), torch.randn(1, 2, 500, 64)
    >>> MaskProvider("grace", ratio=0.3)(q, k).kept_indices.shape
    torch.Size([1, 2, 44])
    """

    def __init__(
        self,
        method: str | MethodOptions = "mies",
        ratio: float = DEFAULT_RATIO,
        *,
        kept_channels: int | None = None,
        protect: tuple[float, float] | None = None,
        weight: str = FROBENIUS,
        seed: int = 0,
        **options: Any,
    ) -> None:
        solver, preset_protect = PRESETS.get(method, (method, None)) if isinstance(method, str) else (method, None)
        protect = preset_protect if protect is None else protect
        prune_count(ratio, 1)  # checks the range
        self.ratio, self.seed = float(ratio), checked_seed(seed)
        self.weight = choice("weight", weight, WEIGHTS)
        self.kept_channels = integer("kept_channels", kept_channels, at_least=1, optional=True)
        self.protect = None if protect is None else check_protection(protect)
        if not isinstance(method, str):
            self._spec, self._options = registry.chosen(method, options)
            self.method = self._spec.name
            return
        self.method = method
        try:
            self._spec = registry.get(str(solver))
        except UnknownSolverError as error:
            presets = ", ".join(
                f"{name!r} (protection of salient channels, then {m!r})" for name, (m, _) in PRESETS.items()
            )
            meant = did_you_mean(method, PRESETS)
            raise UnknownSolverError(f"{error} Here, {presets} is known as well.{meant}") from None
        self._options = replace(self._spec, name=method).make_options(options)  # for messages

    def __repr__(self) -> str:
        size = f"ratio={self.ratio:g}" if self.kept_channels is None else f"kept_channels={self.kept_channels}"
        return f"MaskProvider({self.method!r}, {size}, protect={self.protect}, weight={self.weight!r})"

    def count(self, head_dim: int) -> int:
        """Return how many of `head_dim` channels are pruned; raise if protection leaves too few.

        Raises
        ------
        ProblemError
            If k + ⌊high · d + ½⌋ > d, or if `kept_channels` is larger than `head_dim`.
        """
        most = 0 if self.protect is None else math.floor(self.protect[1] * head_dim + 0.5)
        if self.kept_channels is not None:
            k = head_dim - self.kept_channels
            setting, advice = f"kept_channels={self.kept_channels}", f"raise kept_channels to at least {most}"
            if k < 0:
                raise ProblemError(f"{setting}: the heads have {head_dim} channels; give at most {head_dim}.")
        else:
            k = prune_count(self.ratio, head_dim)
            setting = f"ratio={self.ratio:g}"
            # Rounded down: rounded up, it would be refused as well.
            advice = f"lower ratio to at most {math.floor(1000 * (head_dim - most) / head_dim) / 1000:g}"
        if k + most > head_dim:
            raise ProblemError(
                f"{setting} prunes {k} of {head_dim} channels, but up to {most} may be protected: {advice}, or the "
                f"protection bound {self.protect}."
            )
        return k

    @property
    def needs_values(self) -> bool:
        """Need of `values`, in every call."""
        return self.weight == OUTPUT

    def interactions(
        self,
        queries: Tensor,
        keys: Tensor,
        attention_mask: Tensor | None = None,
        values: Tensor | None = None,
        scaling: float | None = None,
    ) -> Tensor:
        """Return W of every KV head; the arguments are those of `__call__`."""
        q, k = to_float_tensor(queries, "queries"), to_float_tensor(keys, "keys")
        if not self.needs_values:
            return interaction_matrix(q, k, attention_mask)  # type: ignore[no-any-return]
        if values is None:
            raise ProblemError(f"weight={OUTPUT!r} needs the values: call provider(queries, keys, values=values).")
        v = to_float_tensor(values, "values")
        return output_matrix(q, k, v, attention_mask, scaling=scaling)  # type: ignore[no-any-return]

    def problem(
        self,
        queries: Tensor,
        keys: Tensor,
        attention_mask: Tensor | None = None,
        values: Tensor | None = None,
        scaling: float | None = None,
    ) -> Problem:
        """Return the instances that `__call__` solves, one per KV head: for certificates and experiments."""
        W = self.interactions(queries, keys, attention_mask, values, scaling)
        k, protected = to_float_tensor(keys, "keys"), None
        if self.protect is not None:
            protected = salient_channels(k, *self.protect, attention_mask=attention_mask)
        return Problem.of(W, self.count(k.shape[-1]), protected=protected, check=False)

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        attention_mask: Tensor | None = None,
        values: Tensor | None = None,
        scaling: float | None = None,
    ) -> ChannelMask:
        """Choose the channels to prune.

        Parameters
        ----------
        queries : Tensor (..., H_q, L_obs, d)
            Observed queries, after RoPE.
        keys : Tensor (..., H_kv, L, d)
            Cached keys, after RoPE.
        attention_mask : Tensor (..., L), optional
            True for real tokens.
        values : Tensor (..., H_kv, L, d_v), optional
            Cached values, for ``weight="output"``; other weights do not read them.
        scaling : float, optional
            By which the model multiplies the logits, for ``weight="output"``; by default 1/√d.

        Returns
        -------
        ChannelMask
            ``pruned`` has shape (..., H_kv, d). This call does not wait for the device unless the method does.
        """
        problem = self.problem(queries, keys, attention_mask, values, scaling)
        return replace(self.choose(problem), pruned_per_head=problem.k_max)

    def choose(self, problem: Problem) -> ChannelMask:
        """Solve instances that were built elsewhere, for example from the average of several W."""
        with torch.no_grad():
            mask = self._spec.solve(problem.flatten(), self._options, Run(self.seed), check=False).mask
        return ChannelMask(mask.reshape(problem.candidates.shape))
