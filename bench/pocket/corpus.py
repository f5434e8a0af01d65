"""Training documents for the pocket model: facts, filler and dense recall targets, in the grammar of
`grace_opt.hf.tools.needle`.

Most sentences of a document state a city's password or state it again later; each repetition is a recall target of two
tokens. Dense targets make retrieval appear within minutes; a needle prompt has a single one.
"""

from __future__ import annotations

import random

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from grace_opt.hf.tools import needle

PAD = "<pad>"


def build_tokenizer() -> Tokenizer:
    """Word-level tokenizer over the closed vocabulary of the grammar; a word keeps its colon, other marks stand
    alone."""
    words = [PAD, "<unk>", *needle.vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+:?|[^\w\s]"), "removed", invert=True)
    return tokenizer


class Documents:
    """An endless seeded stream of training batches."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.unknown = tokenizer.token_to_id("<unk>")

    def _sentence(self, text: str, is_recall: bool) -> tuple[list[int], list[bool]]:
        ids = self.tokenizer.encode(text).ids
        target = [False] * len(ids)
        if is_recall:  # "... CITY: COLOUR ANIMAL ." : the two tokens before the full stop
            target[-3] = target[-2] = True
        return ids, target

    def document(self, length: int, most_filler: float) -> tuple[list[int], list[bool]]:
        """Exactly `length` token ids and a flag per token (is it a recall target?), with up to `most_filler` of
        filler."""
        rng = self.rng
        cities = rng.sample(needle.CITIES, rng.randint(4, max(6, min(len(needle.CITIES), length // 14))))
        answers = {c: needle.random_answer(rng) for c in cities}
        hay, ask = rng.uniform(0, most_filler), rng.uniform(0.4, 0.7)
        unstated, stated = list(cities), list[str]()
        ids, target = list[int](), list[bool]()
        while len(ids) < length:
            is_recall = False
            if rng.random() < hay:
                text = needle.filler(rng)
            elif stated and (not unstated or rng.random() < ask):
                city = rng.choice(stated)
                text, is_recall = needle.fact(city, answers[city]), True
                if rng.random() < 0.3:
                    text = f"{needle.question(city)} {answers[city]}."
            else:
                city = unstated.pop()
                stated.append(city)
                text = needle.fact(city, answers[city])
            more_ids, more_target = self._sentence(text, is_recall)
            ids += more_ids
            target += more_target
        if self.unknown in ids:
            raise RuntimeError("the grammar produced a word that the tokenizer does not know")
        return ids[:length], target[:length]

    def batch(self, size: int, length: int, most_filler: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (size, length) and recall flags of the same shape."""
        ids, target = zip(*(self.document(length, most_filler) for _ in range(size)), strict=True)
        return torch.tensor(ids), torch.tensor(target)
