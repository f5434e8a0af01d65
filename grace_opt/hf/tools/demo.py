"""The demo: let a model read one long text, make its cache smaller in several ways, and compare what is left.

``grace-opt demo`` prints what `run_demo` returns. Each cache is filled with the text alone. Then the text goes on, and
next-token distributions are compared; and for each password in the text a copy of the cache is asked. No query of the
text had looked for them. Source: the experiments of GRACE (arXiv 2604.16983) at a small scale; metrics are those of
`grace_opt.hf.tools.evaluation`.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ... import bounds, objective
from ..._util.parameters import integer
from ...attention.provider import MaskProvider
from ...attention.weights import PROTECT_HIGH, PROTECT_LOW, interaction_matrix, prune_count
from ...errors import OptionError
from ...problem import Problem
from ..bases.at_hand import basis_for
from ..engine.cache import CompressedCache
from ..models.implementation import attention_implementation
from ..models.recording import CapturedAttention, capture_attention
from ..settings.config import CacheConfig
from ..stores.counting import DENSE_BITS, tensors_in
from .evaluation import ask, compare_predictions, next_token_log_probs, stored_bits
from .needle import filler, make_prompt, question

#: The method of the first row, with which the others are compared.
DENSE = "dense"
#: Share of the key channels that is pruned in the table of caches: the paper's smallest.
RATIO = 0.5
#: Shares in the table of solvers, which needs no further pass of the model.
RATIOS = (0.3, 0.5, 0.6)
#: Mean bits per element of the rows in which every channel of every token gets its own number of bits.
BITS = (3.0, 2.0)
#: Printed below the tables.
ADVICE = (
    "Start with attach(model, bits=2.25): on a real model it stays closer to the dense cache than int4 does, in half "
    "of the bytes (see the picture in the README)."
)
OBSERVED_QUERIES = 32
#: Tokens with which the text goes on, and sentences that have so many in any case.
LATER_TOKENS, LATER_SENTENCES = 128, 20


def providers(ratio: float) -> dict[str, MaskProvider]:
    """Return the ways to choose channels, at one ratio."""
    protect = (PROTECT_LOW, PROTECT_HIGH)
    return {
        "THINK": MaskProvider("think", ratio),
        "GRACE": MaskProvider("grace", ratio),
        "GRACE + local search": MaskProvider("local_search", ratio, protect=protect),
    }


@dataclass(frozen=True)
class DemoRow:
    """One line of the first table: one cache.

    Attributes
    ----------
    method : str
    bits : float
        Mean bits per element of what is compressed, as if the model had 16 bits.
    total_bytes : int
        Bytes of K + V after the text, everything counted, as if the model had 16 bits.
    share : float
        The same, divided by the dense cache's.
    kl : float
        KL divergence of the next-token distributions from the dense cache's, nats, mean over later tokens.
    top1 : float
        Share of these tokens after which the likeliest next token is the dense cache's.
    right : int
        Number of passwords whose every token is the likeliest after the question.
    """

    method: str
    bits: float
    total_bytes: int
    share: float
    kl: float
    top1: float
    right: int


@dataclass(frozen=True)
class SolverRow:
    """One line of the second table: one way to choose the channels of all heads.

    Attributes
    ----------
    method, ratio : str, float
    objective : float
        Σ over layers and KV heads of f(S), the squared change of the observed logits.
    gap : float
        (Σf - Σbound) / Σf, with one certified bound (without protection) for every method.
    """

    method: str
    ratio: float
    objective: float
    gap: float


@dataclass(frozen=True)
class DemoReport:
    """All that the demo shows; `to_dict` gives it for JSON."""

    model: str
    context_tokens: int
    later_tokens: int
    depth: float
    question: str
    answer: str
    questions: int
    layers: list[int]
    kv_heads: int
    head_dim: int
    rows: list[DemoRow]
    solvers: list[SolverRow]
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
    ratio: float = RATIO,
    ratios: tuple[float, ...] = RATIOS,
    bits: tuple[float, ...] = BITS,
    config: CacheConfig | None = None,
    advance: Callable[[str], None] = lambda step: None,
) -> DemoReport:
    """Read one text into a dense cache and into smaller ones, and compare predictions, answers and bytes.

    Parameters
    ----------
    model, tokenizer
        Any Llama-like causal language model.
    name : str
        Name of the model in the report.
    tokens, depth, distractors, seed
        Arguments of `grace_opt.hf.tools.needle.make_prompt`.
    ratio : float
        Share of the key channels that THINK and GRACE prune in the table of caches.
    ratios : tuple of float
        Ratios in the table of solvers.
    bits : tuple of float
        Mean bits per element of caches with ``bits=``.
    config : CacheConfig, optional
        Settings of one more row, for instance those that ``grace-opt tune`` recommends.
    advance : callable
        Called with the name of each finished step, for a progress bar.

    Returns
    -------
    DemoReport
    """
    began = time.perf_counter()
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = integer("tokens", tokens, at_least=1)
    if context is not None and tokens + LATER_TOKENS > context:
        raise OptionError(
            f"tokens={tokens} and {LATER_TOKENS} later ones are more than this model's context of {context}: "
            f"ask for at most {context - LATER_TOKENS}."
        )

    def ids_of(text: str, special: bool = False) -> Tensor:
        ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids
        return ids

    prompt = make_prompt(tokens, depth, distractors=distractors, count=lambda text: ids_of(text).shape[1], seed=seed)
    read = ids_of(prompt.context, special=True)
    rng = random.Random(f"later {seed}")
    later = ids_of("".join(f" {filler(rng)}" for _ in range(LATER_SENTENCES)))[:, :LATER_TOKENS]
    questions = [(ids_of(" " + question(city)), ids_of(" " + answer)) for city, answer in prompt.passwords]
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        probe = CompressedCache(model.config, ratio=0.0, protect=(0.0, 0.0))
        captured = [c for _, c in sorted(capture_attention(model, read, layers=probe.prunable_layers).items())]
        W = _interactions(captured)
        solvers = [row for each in ratios for row in _solved(captured, W, each)]
        advance("interaction matrices")
        run = _Run(model, read, later, questions)
        rows = [run.dense()]
        advance(DENSE)
        if bits or (config is not None and config.bits is not None):
            basis_for(model, tokenizer=tokenizer)  # for GGUF files, whose tokenizer the model does not know
        of = functools.partial(CompressedCache, model)  # not made yet, so that only one holds its tokens at a time
        caches = {
            "int4": functools.partial(of, ratio=0.0, quantize="int4"),
            **{method: functools.partial(of, provider=one) for method, one in providers(ratio).items()},
            **{f"{each:g} bits": functools.partial(of, bits=each) for each in bits},
        }
        if config is not None:
            caches["your settings"] = functools.partial(of, config=config)
        for method, new_cache in caches.items():
            rows.append(run.smaller(method, new_cache()))
            advance(method)
    return DemoReport(
        model=name,
        context_tokens=read.shape[1],
        later_tokens=later.shape[1],
        depth=depth,
        question=f"What is the password of {prompt.city}?",
        answer=prompt.answer,
        questions=len(questions),
        layers=list(probe.prunable_layers),
        kv_heads=W.shape[1],
        head_dim=W.shape[-1],
        rows=rows,
        solvers=solvers,
        interaction=W[W.shape[0] // 2, 0],
        seconds=time.perf_counter() - began,
    )


def _interactions(captured: list[CapturedAttention]) -> Tensor:
    """Return W of every prunable layer and KV head, (layers, H_kv, d, d), as the cache will see it."""
    observed = (interaction_matrix(c.queries[0, :, -OBSERVED_QUERIES:], c.keys[0]) for c in captured)
    return torch.stack(list(observed)).to(torch.float64)


def _solved(captured: list[CapturedAttention], W: Tensor, ratio: float) -> list[SolverRow]:
    """Choose the channels of all heads by each method; W is positive semidefinite, so no bound is below zero."""
    problem = Problem.of(W, prune_count(ratio, W.shape[-1])).flatten()
    bound = float(bounds.certificate(problem).clamp_min(0.0).sum())
    rows = []
    for method, provider in providers(ratio).items():
        chosen = [provider(c.queries[:, :, -OBSERVED_QUERIES:], c.keys).pruned[0] for c in captured]
        f = float(objective.evaluate(W, torch.stack(chosen)).sum())
        rows.append(SolverRow(method, ratio, f, (f - bound) / max(f, 1e-300)))
    return rows


@dataclass
class _Run:
    """What all caches of one demo share."""

    model: PreTrainedModel
    read: Tensor  #: Tokens of the text, which fill a cache.
    later: Tensor  #: Tokens with which it goes on.
    questions: list[tuple[Tensor, Tensor]]  #: Questions that may come instead, and their answers.
    reference: Tensor | None = None
    dense_bytes: int = 0

    def dense(self) -> DemoRow:
        cache = self._filled(DynamicCache(config=self.model.config))
        held = tensors_in([vars(layer) for layer in cache.layers])
        numbers = sum(tensor.numel() for tensor in held if tensor.is_floating_point())
        self.dense_bytes = numbers * DENSE_BITS // 8
        right = self._right(cache)
        self.reference = next_token_log_probs(self.model, cache, self.later)
        return DemoRow(DENSE, DENSE_BITS, self.dense_bytes, 1.0, 0.0, 1.0, right)

    def smaller(self, method: str, cache: CompressedCache) -> DemoRow:
        """Measure a cache that is still empty; `stored_bits` refuses one in which nothing was compressed."""
        if self.reference is None:
            raise RuntimeError("the dense cache runs first: it is what the others are compared to")
        size, right = stored_bits(self._filled(cache)), self._right(cache)
        predicted = next_token_log_probs(self.model, cache, self.later)
        found = compare_predictions(predicted, self.reference, self.later[0, 1:])
        return DemoRow(method, size.bits, round(size.share * self.dense_bytes), size.share, found.kl, found.top1, right)

    def _filled(self, cache: Any) -> Any:
        self.model(self.read, past_key_values=cache, logits_to_keep=1)
        return cache

    def _right(self, cache: Any) -> int:
        return sum(ask(self.model, cache, question, answer).exact for question, answer in self.questions)
