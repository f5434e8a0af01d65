"""Measure one contender on one passage, hidden word or text of questions; a prompt that was read is kept for the next.

When: `bench.arena.run`, cell by cell, those of one prompt after each other.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.arena.contenders import Contender, Subject
from bench.arena.prompt import Prompt
from bench.caches import sizes_of
from bench.intervals import DENSE
from bench.passages import Case, Passage
from bench.provenance import digest
from bench.questions import Prompt as Question
from bench.questions import answered, in_common
from grace_opt.hf.tools.evaluation import ask, compare_predictions, next_token_log_probs


@dataclass
class Arena:
    """All that is measured, and what it is measured on.

    Attributes
    ----------
    subject : Subject
    tokenizer : object
        With a chat template, if questions are asked as in a chat.
    contenders : mapping
        By name.
    passages, long : sequences of Passage
    cases : sequence of Case
    texts : sequence of sequences of Question
        Each all about one text.
    later, new_tokens : int
        Number of tokens at the end of a passage that are fed after the prompt, and of an answer, at most.
    """

    subject: Subject
    tokenizer: Any
    contenders: Mapping[str, Contender]
    passages: Sequence[Passage]
    long: Sequence[Passage]
    cases: Sequence[Case]
    texts: Sequence[Sequence[Question]]
    later: int
    new_tokens: int
    _last: tuple[str, Prompt] | None = field(default=None, repr=False)
    _dense: Tensor | None = field(default=None, repr=False)  #: Distributions of the dense cache after that prompt.

    def measure_passage(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Compare a cache with the dense one on a passage's last tokens."""
        passage = (self.long if config["long"] else self.passages)[config["passage"]]
        fed = passage.ids[:, -self.later :]
        prompt = self._read(passage.ids[:, : -self.later])
        model = self.subject.model
        if self._dense is None:
            self._dense = next_token_log_probs(model, prompt.dense(), fed)
        began = time.perf_counter()
        cache, bits = self.contenders[config["method"]].make(self.subject, prompt)
        seconds = time.perf_counter() - began
        found = next_token_log_probs(model, cache, fed)
        differs = compare_predictions(found, self._dense, fed[0, 1:])
        return [sizes_of(bits) | asdict(differs) | {"seconds": seconds}]

    def measure_case(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask for a hidden word after the cache was compressed."""
        case = self.cases[config["case"]]
        cache, sizes = self._cache(config["method"], case.context)
        return [sizes | asdict(ask(self.subject.model, cache, case.question, case.answer))]

    def measure_text(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask questions about a text, each of a copy of the text's cache; a row for each."""
        every = self.texts[config["text"]]
        shared = in_common(every)
        text, sizes = self._cache(config["method"], torch.tensor([every[0].ids[:shared]]))
        rows = []
        for number in config["questions"]:
            question = every[number]
            said = self._answer(copy.deepcopy(text), torch.tensor([question.ids[shared:]]))
            right = answered(said, question.fact.answer)
            rows.append(sizes | {"question": number, "answer": " ".join(said.split()), "right": right})
        return rows

    @torch.no_grad()
    def _answer(self, cache: Any, token: Tensor) -> str:
        """Return the greedy continuation of a chat, up to the end of the answer."""
        model = self.subject.model
        ends = model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        found: list[int] = []
        while len(found) < self.new_tokens and not (found and found[-1] in ends):
            token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            found.append(int(token))
        return str(self.tokenizer.decode(found, skip_special_tokens=True))

    def _cache(self, method: str, ids: Tensor) -> tuple[Any, dict[str, float]]:
        prompt = self._read(ids)
        if method == DENSE:
            return prompt.dense(), {}
        cache, bits = self.contenders[method].make(self.subject, prompt)
        return cache, sizes_of(bits)

    def _read(self, ids: Tensor) -> Prompt:
        """Return a prompt, which is read only if another one was read last."""
        key = digest(ids)
        if self._last is None or self._last[0] != key:
            self._last = self._dense = None  # two long prompts at once may not fit
            self._last = key, Prompt(self.subject.model, ids)
        return self._last[1]
