"""The demo: answer one long needle prompt with a dense cache and with smaller ones, and compare memory and answers.

``grace-opt demo`` prints what `run_demo` returns. All of the prompt except its last token is prefilled, the cache is
pruned, and the last token is decoded from the pruned cache. Every token of the answer, even the first, therefore comes
from pruned keys. Source: the experiments of GRACE (arXiv 2604.16983), figures 3 and 5 and table 3, at a small scale.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .. import bounds, objective
from .._util.parameters import integer
from ..attention.provider import MaskProvider
from ..attention.weights import PROTECT_HIGH, PROTECT_LOW, interaction_matrix, prune_count
from ..errors import OptionError
from ..problem import Problem
from .bits.at_hand import basis_for
from .cache import PrunedKeyCache
from .capture import capture
from .config import PruningConfig
from .implementation import attention_implementation
from .needle import NeedlePrompt, make_prompt
from .report import MemoryReport

#: The first is the recommended start, measured on a real model by bench/answers.py; the paper's ratios are larger.
RATIOS = (0.3, 0.5, 0.6)
#: Mean bits per element of the rows in which every channel of every token gets its own number of bits.
BITS = (3.0, 2.0)
#: Printed below the table, where the pocket model finds its password at all of these ratios.
ADVICE = (
    f"Start with ratio={RATIOS[0]:g}: with a real model, larger ratios soon lose answers; 4 bits without pruning "
    f"keep about as many answers and save more (see the table in the README)."
)
OBSERVED_QUERIES = 32


def providers(ratio: float) -> dict[str, MaskProvider]:
    """Return the methods of the demo's table, at one ratio."""
    protect = (PROTECT_LOW, PROTECT_HIGH)
    return {
        "THINK": MaskProvider("think", ratio),
        "GRACE": MaskProvider("grace", ratio),
        "GRACE + local search": MaskProvider("local_search", ratio, protect=protect),
    }


@dataclass(frozen=True)
class DemoRow:
    """One line of the table: one cache.

    Attributes
    ----------
    method, ratio : str, float
    objective : float
        Σ over layers and KV heads of f(S), the squared change of the observed logits; 0 where no channel is pruned.
    gap : float
        (Σf - Σbound) / Σf, with one certified bound (without protection) for every method.
    logit_error : float
        Relative Frobenius error of the logits on the dense run's continuation.
    key_bytes, total_bytes : int
        Bytes of K (indices included), and of K + V.
    key_ratio, total_ratio : float
        The same, divided by the dense cache's.
    found : bool
        Whether the generated text contains the answer.
    text : str
        The greedily generated text.
    layer_objective : list of float
        Σ over KV heads of f(S), per prunable layer.
    bits : float or None
        Mean bits per element of what is coded, for a cache with ``bits=``.
    """

    method: str
    ratio: float
    objective: float
    gap: float
    logit_error: float
    key_bytes: int
    total_bytes: int
    key_ratio: float
    total_ratio: float
    found: bool
    text: str
    layer_objective: list[float] = field(default_factory=list)
    bits: float | None = None


@dataclass(frozen=True)
class DemoReport:
    """All that the demo shows; `to_dict` gives it for JSON."""

    model: str
    prompt_tokens: int
    depth: float
    question: str
    answer: str
    layers: list[int]
    kv_heads: int
    head_dim: int
    rows: list[DemoRow]
    interaction: Tensor
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, without the heatmap."""
        values = asdict(self)
        del values["interaction"]
        return values


def run_demo(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str = "model",
    tokens: int = 1024,
    depth: float = 0.5,
    distractors: int = 4,
    seed: int = 0,
    new_tokens: int = 8,
    ratios: tuple[float, ...] = RATIOS,
    bits: tuple[float, ...] = BITS,
    pruning: PruningConfig | None = None,
    advance: Callable[[str], None] = lambda step: None,
) -> DemoReport:
    """Answer one needle prompt with a dense cache, with pruned ones, and with channels in few bits.

    Parameters
    ----------
    model, tokenizer
        Any Llama-like causal language model.
    name : str
        Name of the model in the report.
    tokens, depth, distractors, seed
        Arguments of `grace_opt.hf.needle.make_prompt`.
    new_tokens : int
        Number of tokens to generate.
    ratios : tuple of float
        Ratios to prune at.
    bits : tuple of float
        Mean bits per element of caches with ``bits=``. The basis is that of the model, made now if there is none yet.
    pruning : PruningConfig, optional
        Settings of one more row, for instance those that ``grace-opt tune`` recommends.
    advance : callable
        Called with the name of each finished step, for a progress bar.

    Returns
    -------
    DemoReport
    """
    began = time.perf_counter()
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens, new_tokens = integer("tokens", tokens, at_least=1), integer("new_tokens", new_tokens, at_least=1)
    if context is not None and tokens + new_tokens > context:
        raise OptionError(
            f"tokens={tokens} and {new_tokens} new ones are more than this model's context of {context}: "
            f"ask for at most {context - new_tokens}."
        )
    prompt = make_prompt(
        tokens,
        depth,
        distractors=distractors,
        count=lambda text: len(tokenizer(text, add_special_tokens=False).input_ids),
        seed=seed,
    )
    ids = tokenizer(prompt.text, return_tensors="pt").input_ids
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        probe = PrunedKeyCache(model.config, ratio=0.0, protect=(0.0, 0.0))
        W = _interactions(model, ids, probe.prunable_layers)
        advance("interaction matrices")
        run = _Run(model, tokenizer, prompt, ids, new_tokens, W)
        rows = [run.dense()]
        advance("dense")
        for ratio in ratios:
            bound = _bound(W, ratio)
            for method, provider in providers(ratio).items():
                rows.append(run.pruned(method, provider, bound))
                advance(f"{method} {ratio:g}")
        if bits or (pruning is not None and pruning.is_coded):
            basis_for(model, tokenizer=tokenizer)  # for GGUF files, whose tokenizer the model does not know
        for number in bits:
            rows.append(run.coded(f"{number:g} bits", PruningConfig(bits=number)))
            advance(f"{number:g} bits")
        if pruning is not None:
            rows.append(run.coded("your settings", pruning))
            advance("your settings")
    return DemoReport(
        model=name,
        prompt_tokens=ids.shape[1],
        depth=depth,
        question=f"What is the password of {prompt.city}?",
        answer=prompt.answer,
        layers=list(probe.prunable_layers),
        kv_heads=W.shape[1],
        head_dim=W.shape[-1],
        rows=rows,
        interaction=W[W.shape[0] // 2, 0],
        seconds=time.perf_counter() - began,
    )


def _interactions(model: PreTrainedModel, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Return W of every prunable layer and KV head, (layers, H_kv, d, d), as the cache will see it."""
    captured = capture(model, ids[:, :-1], layers=layers)
    return torch.stack(
        [interaction_matrix(c.queries[0, :, -OBSERVED_QUERIES:], c.keys[0]) for _, c in sorted(captured.items())]
    ).to(torch.float64)


def _bound(W: Tensor, ratio: float) -> float:
    problem = Problem.of(W, prune_count(ratio, W.shape[-1])).flatten()
    return float(bounds.certificate(problem).clamp_min(0.0).sum())  # W is positive semidefinite: f >= 0


@dataclass
class _Run:
    """The state that all caches of one demo share."""

    model: PreTrainedModel
    tokenizer: Any
    prompt: NeedlePrompt
    ids: Tensor
    new_tokens: int
    W: Tensor
    reference: Tensor | None = None
    continuation: Tensor | None = None

    def dense(self) -> DemoRow:
        cache = self._prefilled(DynamicCache(config=self.model.config))
        generated, text = self._generate(cache)
        self.continuation = torch.cat([self.ids[:, -1:], generated[:, :-1]], dim=1)
        cache = self._prefilled(DynamicCache(config=self.model.config))
        size = [sum(t.nbytes for t in pair) for pair in zip(*((x.keys, x.values) for x in cache.layers), strict=True)]
        self.reference = self.model(self.continuation, past_key_values=cache).logits
        found = self.prompt.found_in(text)
        return DemoRow("dense", 0.0, 0.0, 0.0, 0.0, size[0], sum(size), 1.0, 1.0, found, text)

    def pruned(self, method: str, provider: MaskProvider, bound: float) -> DemoRow:
        cache = self._prefilled(PrunedKeyCache(self.model.config, provider=provider))
        f = objective.evaluate(self.W, cache.channel_mask().pruned[:, 0])
        return self._row(
            method,
            cache,
            PrunedKeyCache(self.model.config, provider=provider),
            ratio=provider.ratio,
            objective=float(f.sum()),
            gap=(float(f.sum()) - bound) / max(float(f.sum()), 1e-300),
            layer_objective=f.sum(-1).tolist(),
        )

    def coded(self, name: str, pruning: PruningConfig) -> DemoRow:
        """A cache that is not compared by f: with bits, or with settings from a file."""
        caches = (PrunedKeyCache(self.model, pruning=pruning) for _ in range(2))
        cache = self._prefilled(next(caches))
        found = cache.memory_report().bits
        return self._row(name, cache, next(caches), ratio=0.0, objective=0.0, gap=0.0, bits=found)

    def _row(self, method: str, cache: PrunedKeyCache, to_generate: PrunedKeyCache, **others: Any) -> DemoRow:
        """Decode from a prefilled cache and from a second, equal one that is still empty."""
        if self.reference is None or self.continuation is None:
            raise RuntimeError("the dense cache runs first: it is what the others are compared to")
        report: MemoryReport = cache.memory_report()
        logits = self.model(self.continuation, past_key_values=cache).logits
        _, text = self._generate(self._prefilled(to_generate))
        return DemoRow(
            method=method,
            logit_error=float((logits - self.reference).norm() / self.reference.norm()),
            key_bytes=report.key_bytes,
            total_bytes=report.total_bytes - report.spare_bytes,
            key_ratio=report.key_ratio,
            total_ratio=report.total_ratio,
            found=self.prompt.found_in(text),
            text=text,
            **others,
        )

    def _prefilled(self, cache: Any) -> Any:
        self.model(self.ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        return cache

    def _generate(self, cache: Any) -> tuple[Tensor, str]:
        output = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=cache,
            max_new_tokens=self.new_tokens,
            do_sample=False,
            pad_token_id=self.model.config.pad_token_id or 0,
        )
        generated = output[:, self.ids.shape[1] :]
        return generated, " ".join(self.tokenizer.decode(generated[0], skip_special_tokens=True).split())
