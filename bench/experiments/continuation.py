"""What a model makes of a text's true continuation when it has read the prompt into a compressed cache.

When: `pareto` compares caches at the level of a model. The prompt but for its last token is read with dense attention,
the cache is compressed, and the continuation is fed, teacher-forced: so no difference adds up. An answer of a needle
prompt counts as found if each of its tokens is the likeliest; that is when greedy decoding would give it.
The prompts are those of `grace_opt.hf.needle`.
"""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from bench.experiments.tensors import TensorError, token_ids
from grace_opt.hf import CacheConfig, CompressedCache, attention_implementation
from grace_opt.hf.models import POCKET_FOLDER, disable_progress_bars, load_model
from grace_opt.hf.needle import filler, make_prompt, question


@dataclass(frozen=True)
class Task:
    """A prompt with its true continuation.

    Attributes
    ----------
    prompt, continuation : list of int
        Tokens.
    answers : list of (int, int)
        Where in the continuation the answers to questions stand, the prompt's own question first.
    """

    prompt: list[int]
    continuation: list[int]
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class Reading:
    """What came of it.

    Attributes
    ----------
    share : float
        Bytes of K and V beside a dense cache's.
    kl : float
        KL(dense ‖ this) of the next token, nats, mean over the continuation; 0 for dense.
    nll : float
        Negative log-likelihood of the continuation, nats per token.
    first, later : float or None
        Share of answers found: to the question that ends the prompt, and to those asked after it; None without any.
    log_p : Tensor
        Of the next token, (continuation, vocabulary).
    """

    share: float
    kl: float
    nll: float
    first: float | None
    later: float | None
    log_p: Tensor


@functools.lru_cache(maxsize=1)
def half_model(source: str, device: str) -> tuple[Any, Any]:
    """The model in 16 bits, in which caches are mostly kept, and its tokenizer."""
    disable_progress_bars()
    model, tokenizer = load_model(str(POCKET_FOLDER) if source in ("", "pocket") else source)
    kept = model.config.dtype if device != "cpu" else None  # what the checkpoint came in, where that is fast
    return model.to(device, torch.bfloat16 if kept == torch.bfloat16 else torch.float16), tokenizer


def needle_task(tokenizer: Any, tokens: int, seed: int, distractors: int = 4) -> Task:
    """A needle prompt of exactly `tokens` tokens, and a continuation that asks for the other passwords, too.

    What a method sees of the prompt ends with the first question. The others show what it did to the rest.
    """

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    rng = random.Random(seed)
    start = tokenizer("a").input_ids[:1]
    start = start if start == [tokenizer.bos_token_id] else []
    task = make_prompt(
        tokens - len(start), rng.uniform(0.1, 0.9), count=lambda t: len(encode(t)), seed=seed, distractors=distractors
    )
    body, padding = encode(task.text), list[int]()
    while len(start) + len(padding) + len(body) < tokens:
        padding += encode(filler(rng))
    body = (padding + body)[len(start) + len(padding) + len(body) - tokens :]
    facts = dict(re.findall(r"Password of (\w+): (\w+ \w+)\.", task.text))
    if facts.get(task.city) != task.answer or len(facts) != distractors + 1:
        raise TensorError(f"seed {seed}: the prompt does not state its passwords as expected.")
    continuation, answers = list[int](), list[tuple[int, int]]()
    for city in [task.city, *(c for c in facts if c != task.city)]:
        if city != task.city:
            continuation += encode(f" {question(city)}")
        answer = encode(f" {facts[city]}")
        answers.append((len(continuation), len(continuation) + len(answer)))
        continuation += [*answer, *encode(".")]
    return Task(start + body, continuation, answers)


def text_task(source: str, text: int, tokens: int, later: int, seed: int, texts: str) -> Task:
    """A passage of a text, cut into prompt and continuation."""
    ids: list[int] = token_ids(source, text, tokens + later, seed, texts)[0].tolist()
    return Task(ids[:tokens], ids[tokens:], [])


@torch.no_grad()
def read(model: Any, task: Task, config: CacheConfig | None, dense: Reading | None = None) -> Reading:
    """Read the prompt into a cache, dense if `config` is None, and the continuation from it.

    Parameters
    ----------
    model : PreTrainedModel
    task : Task
    config : CacheConfig, optional
    dense : Reading, optional
        Of the same task, to compare to.
    """
    prompt = torch.tensor([task.prompt], device=model.device)
    goal = torch.tensor(task.continuation, device=model.device)
    fed = torch.cat([prompt[:, -1:], goal[None, :-1]], dim=1)
    cache: Any = DynamicCache(config=model.config) if config is None else CompressedCache(model, config=config)
    with attention_implementation(model, "grace_sdpa"):
        model(prompt[:, :-1], past_key_values=cache, logits_to_keep=1)
        share = 1.0 if config is None else cache.memory_report().total_ratio
        log_p = model(fed, past_key_values=cache).logits[0].double().log_softmax(-1)
    right = log_p.argmax(-1) == goal
    found = [float(right[first:end].all()) for first, end in task.answers]
    later = found[1:]
    return Reading(
        share,
        0.0 if dense is None else float((dense.log_p.exp() * (dense.log_p - log_p)).sum(-1).mean()),
        float(-log_p.gather(-1, goal[:, None]).mean()),
        found[0] if found else None,
        sum(later) / len(later) if later else None,
        log_p,
    )
