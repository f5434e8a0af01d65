r"""What smaller keys do to attention, against the dense one: logits, distributions, outputs, on queries yet to come.

When: an experiment compares methods below the level of a model's text. Channels are chosen from the last `observed`
queries and all keys of the prompt, as the paper does it; what counts is later queries, which no method has seen. As in
the library's cache, the prompt's first `sinks` tokens, its last `recent` ones and all tokens after it stay dense. A
query at position t attends to the keys up to t.

For each KV head, with the stored keys K' in place of K, logits Z = Q Kᵀ and Z' = Q K'ᵀ over the visible keys:

- *logit error*: ‖Z - Z'‖² / ‖Z‖², sums over the queries of the head's group, observed or later ones;
- *attention KL*: Σ p (ln p - ln p'), nats, p = softmax(scaling Z), mean over later queries and query heads;
- *output error*: ‖p V - p' V‖ / ‖p V‖, mean over the same.

All in float64. Cost: O(H_q n L (d + d_v)) for each set of keys, n later queries. The first measure, on observed
queries and without windows, is f(S) / f(all) of GRACE (arXiv 2604.16983).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.experiments.tensors import LayerTensors, TensorError
from grace_opt import Problem, solve
from grace_opt.attention.weights import PROTECT_HIGH, PROTECT_LOW, interaction_matrix, prune_count, salient_channels
from grace_opt.solution import Status

#: Name in tables -> registered method; GRACE is MIES with salient channels protected.
SOLVERS = {
    "THINK": "think",
    "MIES": "mies",
    "GRACE": "mies",
    "local search": "local_search",
    "optimum": "branch_and_bound",
}


@dataclass(frozen=True)
class Quality:
    """Measures of one layer, each a tensor (H,) of float64.

    Attributes
    ----------
    change_observed, change_later : Tensor
        ‖Z - Z'‖² of the observed and of the later queries.
    logit_observed, logit_later : Tensor
        The same over ‖Z‖².
    kl : Tensor
        Attention KL, nats.
    output : Tensor
        Relative error of the attention output.
    """

    change_observed: Tensor
    change_later: Tensor
    logit_observed: Tensor
    logit_later: Tensor
    kl: Tensor
    output: Tensor

    #: Columns of rows that are means over heads.
    MEANS = ("logit_observed", "logit_later", "kl", "output")

    def means(self) -> dict[str, float]:
        """Means over the KV heads."""
        return {name: float(getattr(self, name).mean()) for name in self.MEANS}


class Reference:
    """Dense attention of one layer, to which stored keys are compared.

    Parameters
    ----------
    tensors : LayerTensors
        Of L tokens.
    prompt : int
        Number of them in the prompt; the others bring the later queries.
    observed : int
        Observed queries, the prompt's last ones.
    recent, sinks : int
        The prompt's last and first tokens, whose keys stay dense.
    """

    def __init__(
        self, tensors: LayerTensors, prompt: int, observed: int = 32, recent: int = 32, sinks: int = 0
    ) -> None:
        heads, length, _ = tensors.keys.shape
        if not 0 < observed <= prompt < length:
            raise TensorError(
                f"{length} tokens with a prompt of {prompt} and {observed} observed queries: give "
                "0 < observed <= prompt, and at least one token after the prompt."
            )
        if recent < 0 or sinks < 0 or recent + sinks >= prompt:
            raise TensorError(f"recent={recent} and sinks={sinks} leave nothing of a prompt of {prompt} to compress.")
        self.stored, self.prompt, self.scaling = slice(sinks, prompt - recent), prompt, tensors.scaling
        self.keys, self.values = tensors.keys.double(), tensors.values.double()
        queries = tensors.queries.double().unflatten(0, (heads, -1))
        positions = torch.arange(length, device=queries.device)
        self._observed = queries[:, :, prompt - observed : prompt]
        self._later = queries[:, :, prompt:]
        self._sees = positions <= positions[prompt:, None]
        self._saw = positions <= positions[prompt - observed : prompt, None]
        self._total_observed = _squares(self._logits(self._observed), self._saw)
        logits = self._logits(self._later)
        self._total_later = _squares(logits, self._sees)
        self._scaled = (logits * self.scaling).masked_fill(~self._sees, -torch.inf)
        self._log_sum, self._output = self._attend(self._scaled.clone())
        self._p = (self._scaled - self._log_sum[..., None]).exp()[..., self.stored]

    def _logits(self, queries: Tensor) -> Tensor:
        return queries @ self.keys[:, None].mT

    def _attend(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """ln Σ exp and the attention output, of logits that are used up."""
        most = scaled.amax(-1, keepdim=True)
        weights = scaled.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        return (most + total.log())[..., 0], (weights @ self.values[:, None]) / total

    def measure(self, keys: Tensor) -> Quality:
        """Compare with keys (H, prompt or more, d), of which those of compressed tokens count, `stored`."""
        change = (keys[:, self.stored].double() - self.keys[:, self.stored])[:, None].mT
        observed, later = self._observed @ change, self._later @ change
        scaled = self._scaled.clone()
        scaled[..., self.stored] += self.scaling * later
        log_sum, output = self._attend(scaled)
        # ln p - ln p' is the difference of the sums' logarithms, less the logit's change where there is one.
        kl = log_sum - self._log_sum - self.scaling * torch.linalg.vecdot(self._p, later)
        moved = (output - self._output).norm(dim=-1) / self._output.norm(dim=-1)
        changed = _squares(observed, self._saw[:, self.stored]), _squares(later, self._sees[:, self.stored])
        return Quality(
            *changed,
            changed[0] / self._total_observed,
            changed[1] / self._total_later,
            kl.mean((1, 2)),
            moved.mean((1, 2)),
        )

    def prune(self, pruned: Tensor) -> Quality:
        """Compare with the channels of a mask (H, d) set to zero."""
        return self.measure(self.keys.masked_fill(pruned[:, None], 0.0))


@dataclass(frozen=True)
class Choice:
    """Channels to prune in every KV head.

    Attributes
    ----------
    pruned : Tensor (H, d)
        True = pruned.
    f : Tensor (H,)
        f(S), the squared change of the observed logits over all keys of the prompt, the dense ones included.
    share : Tensor (H,)
        f(S) / f(all channels).
    proved : Tensor (H,)
        Whether S is proved to be optimal.
    """

    pruned: Tensor
    f: Tensor
    share: Tensor
    proved: Tensor


def interactions(tensors: LayerTensors, prompt: int, observed: int = 32) -> Tensor:
    """W of every KV head, (H, d, d), float64, from the prompt alone."""
    queries, keys = tensors.queries[:, prompt - observed : prompt].double(), tensors.keys[:, :prompt].double()
    W: Tensor = interaction_matrix(queries, keys)
    return W


def choose(method: str, W: Tensor, keys: Tensor, ratio: float, seed: int = 0, time_limit: float = 10.0) -> Choice:
    """Solve the instances of one layer by a method of `SOLVERS`.

    Parameters
    ----------
    method : str
    W : Tensor (H, d, d)
    keys : Tensor (H, prompt, d)
        What GRACE takes the salient channels from.
    ratio : float
        Of channels to prune.
    seed : int
    time_limit : float
        Seconds for each head, where the method is exact; what was not proved in it says so.
    """
    k = prune_count(ratio, W.shape[-1])
    protected = salient_channels(keys, PROTECT_LOW, PROTECT_HIGH) if method == "GRACE" else None
    limit = time_limit if method == "optimum" else None
    found = [
        solve(
            Problem.of(W[head], k, protected=None if protected is None else protected[head]),
            method=SOLVERS[method],
            seed=seed,
            time_limit=limit,
        )
        for head in range(len(W))
    ]
    f = torch.stack([torch.as_tensor(s.objective).double() for s in found]).to(W.device)
    return Choice(
        torch.stack([torch.as_tensor(s.mask) for s in found]).to(W.device),
        f,
        f / W.sum((-2, -1)),
        torch.tensor([bool(torch.as_tensor(s.status == Status.OPTIMAL)) for s in found]),
    )


def _squares(logits: Tensor, visible: Tensor) -> Tensor:
    """Σ of squares over a head's queries and their visible keys, (H,)."""
    return logits.square().masked_fill(~visible, 0.0).sum((1, 2, 3))
