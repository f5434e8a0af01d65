r"""How far gated keys move a layer's output: the objective whose gates are learned.

A gate :math:`g_{hc} \in [0, 1]` multiplies channel c of KV head h in all keys that are not dense, which is the same as
multiplying the query. A query's logits are

.. math:: z_j = \sum_c g_{hc}\, q_c k_{jc} \text{ (far tokens)}, \qquad z_j = \sum_c q_c k_{jc} \text{ (dense tokens)},

and the error is the mean squared change of the layer's attention output, after the output projection, as a share of
that output's own mean square.

When: for learning, and to compare masks on texts that no mask has seen. Source: LeanK (arXiv 2508.02215) for gates on
channels beside dense sinks and recent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerSample:
    """Queries of one layer over N windows of up to L tokens, n of each, and what they see.

    Attributes
    ----------
    queries : Tensor (N, H, G · n, d)
        Post-RoPE, times the factor of the logits; the G query heads of a KV head one after the other.
    keys, values : Tensor (N, H, L, d) and (N, H, L, d_v)
        Zero beyond a window's end.
    visible : Tensor (N, n, L), bool
        Which tokens a query attends to.
    far : Tensor (N, n, L), bool
        Which of these are pruned: neither the query's last tokens nor sinks.
    projection : Tensor (H · G · d_v, features)
        Weights of the output projection.
    softcap : float or None
        Bound of the logits.
    target : Tensor (N, H, G · n, d_v)
        What dense attention answers.
    energy : float
        Mean over queries of the squared norm of the projected target, over all windows.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor
    far: Tensor
    projection: Tensor
    softcap: float | None
    target: Tensor
    energy: float

    def of(self, windows: Tensor, asked: Tensor | None = None) -> LayerSample:
        """Return the sample of some windows, and of some queries of each, by number; the energy stays that of all."""
        names = ("queries", "keys", "values", "visible", "far", "target")
        parts = {name: getattr(self, name)[windows] for name in names}
        if asked is not None:
            count = self.visible.shape[1]
            for name in ("queries", "target"):
                by_group = parts[name].unflatten(2, (-1, count))
                parts[name] = by_group[:, :, :, asked].flatten(2, 3)
            parts |= {name: parts[name][:, asked] for name in ("visible", "far")}
        return replace(self, **parts)

    def __len__(self) -> int:
        return len(self.keys)


def sample_of(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    far: Tensor,
    projection: Tensor,
    softcap: float | None = None,
) -> LayerSample:
    """Return the sample with its target and energy; arguments as the attributes of `LayerSample`."""
    bare = LayerSample(queries, keys, values, visible, far, projection, softcap, values[:, :, :0], 1.0)
    target = attend(bare, None)
    # A layer whose output is zero has no error either.
    return replace(bare, target=target, energy=float(_squares(target, bare)) or 1.0)


def attend(sample: LayerSample, gates: Tensor | None) -> Tensor:
    """Return the attention output ``(N, H, G · n, d_v)`` with gated far keys.

    Parameters
    ----------
    sample : LayerSample
    gates : Tensor (H, d), optional
        None for dense attention.
    """
    group = sample.queries.shape[2] // sample.visible.shape[1]
    transposed = sample.keys.mT
    logits = sample.queries @ transposed
    if gates is not None:
        far = sample.far.repeat(1, group, 1)[:, None]
        logits = torch.where(far, (sample.queries * gates[:, None]) @ transposed, logits)
    if sample.softcap is not None:
        logits = sample.softcap * torch.tanh(logits / sample.softcap)
    hidden = ~sample.visible.repeat(1, group, 1)[:, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ sample.values


def output_error(sample: LayerSample, gates: Tensor) -> Tensor:
    """Return the mean squared change of the projected output over that of all windows' outputs, a number.

    Parameters
    ----------
    sample : LayerSample
    gates : Tensor (H, d)
        In [0, 1]; zeros are pruned channels.

    Examples
    --------
    >>> q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 8, 4)
    >>> places = torch.tensor([5, 6, 7])[:, None]
    >>> visible = (torch.arange(8) <= places)[None]
    >>> sample = sample_of(q, k, k, visible, visible, torch.eye(8))
    >>> float(output_error(sample, torch.ones(2, 4)))
    0.0
    """
    return _squares(attend(sample, gates) - sample.target, sample) / sample.energy


def _squares(output: Tensor, sample: LayerSample) -> Tensor:
    """Return the mean over queries of the squared norm after the output projection."""
    count, queries = sample.visible.shape[:2]
    width = output.shape[-1]
    by_query = output.reshape(count, -1, queries, width).transpose(1, 2).reshape(count * queries, -1)
    return (by_query @ sample.projection).square().sum(-1).mean()
