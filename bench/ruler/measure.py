"""Answer one case of RULER from several caches, and score it: the context is read once, compressed, asked afterwards.

When: ``python -m bench.ruler``. Source: the order is that of kvpress' evaluation: the question comes after compression.
The scores are those of RULER (Hsieh et al., arXiv 2404.06654) for synthetic tasks: case does not count, and control
characters of an answer are line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.arena.contenders import Contender, Subject
from bench.arena.prompt import Prompt
from bench.caches import sizes_of
from bench.intervals import DENSE
from bench.ruler.cases import Case

_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(answer: str) -> str:
    """Return an answer as RULER compares it."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, expected: Sequence[str]) -> float:
    """Return RULER's score of an answer: the share of the expected strings that it contains.

    Examples
    --------
    >>> string_match_all("They are ABC and xyz.", ["abc", "XYZ", "other"])
    0.666...
    """
    text = cleaned(answer).lower()
    return sum(each.lower() in text for each in expected) / len(expected)


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: Any, cache: Any, asked: Tensor, case: Case) -> str:
    """Generate greedily; end as soon as everything expected was said, as more words cannot lower the score.

    Parameters
    ----------
    model : PreTrainedModel
        With an attention that the cache can use.
    tokenizer, cache : object
    asked : Tensor
        ``(1, n)``, the question's tokens.
    case : Case
    """
    fed, said = asked, list[int]()
    text = ""
    while len(said) < case.new_tokens:
        found = int(model(fed, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())
        if found == tokenizer.eos_token_id:
            break
        said.append(found)
        fed = asked.new_tensor([[found]])
        text = tokenizer.decode(said)
        if string_match_all(text, case.expected) == 1:
            break
    return text


def measure(
    subject: Subject, tokenizer: Any, contenders: Mapping[str, Contender], case: Case
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Answer a case from a dense cache and from those of the contenders.

    Returns
    -------
    int
        Number of tokens of the context.
    dict
        For each cache: score, answer, and for smaller ones their sizes.
    """

    def ids_of(text: str, special: bool) -> Tensor:
        ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids
        return ids

    asked, prompt = ids_of(case.question, False), Prompt(subject.model, ids_of(case.context, True))
    rows: dict[str, dict[str, Any]] = {}
    for name in (DENSE, *contenders):
        size: dict[str, float] = {}
        cache: Any = prompt.dense()
        if name != DENSE:
            cache, bits = contenders[name].make(subject, prompt)
            size = sizes_of(bits)
        text = answer(subject.model, tokenizer, cache, asked, case)
        rows[name] = {"score": string_match_all(text, case.expected), "answer": text, **size}
    return ids_of(case.context, True).shape[1], rows
