"""`Window`: a piece of text to measure on: what a cache holds, what is fed afterwards, and facts to ask for.

A window's context is read and compressed; its later tokens are fed then, so that nothing of the context had looked at
them. Facts are hidden in the context and asked for at the end: what no query of the prompt looked for is lost first.

Source: retrieval follows Kamradt's needle-in-a-haystack test (2023).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import OptionError
from ..needle import CITIES, fact, question, random_answer

#: Fewest tokens of a context: fewer leave nothing to compress, as sinks, recent tokens and one block stay dense.
LEAST_CONTEXT = 128
#: Lengths of windows that are tried, longest first, if none is given; number of windows, and of tokens fed afterwards.
LENGTHS, WINDOWS, LATER = (768, 512, 384, 256), 6, 96
#: Number of facts hidden in each window, and their tokens at most, questions included.
FACTS, FACT_ROOM = 2, 160


@dataclass(frozen=True)
class Window:
    """One piece of text.

    Attributes
    ----------
    name : str
        Where it comes from.
    context, later : Tensor
        ``(1, n)`` tokens each.
    asked : tuple of (Tensor, Tensor)
        Questions and answers, ``(1, n)`` tokens each, fed one after the other behind `later`.
    """

    name: str
    context: Tensor
    later: Tensor
    asked: tuple[tuple[Tensor, Tensor], ...]

    @property
    def fed(self) -> Tensor:
        """All that is fed after the context."""
        return torch.cat([self.later, *(part for pair in self.asked for part in pair)], dim=1)

    @property
    def digest(self) -> str:
        """A digest of all tokens, and of where the context ends."""
        ids = torch.cat([self.context, self.fed], dim=1).cpu().to(torch.int64)
        lengths = [self.context.shape[1], self.later.shape[1], *(a.shape[1] for _, a in self.asked)]
        return hashlib.sha256(ids.numpy().tobytes() + repr(lengths).encode()).hexdigest()[:32]


def windows_of_texts(
    texts: Mapping[str, str], tokenizer: Any, *, count: int, tokens: int | None, later: int, seed: int, limit: int
) -> list[Window]:
    """Cut windows that do not overlap out of texts, which take turns.

    Parameters
    ----------
    texts : mapping
        Texts by name.
    tokenizer : callable
    count : int
        Number of windows.
    tokens : int or None
        Number of tokens of a window, context and later ones; None takes the longest of `LENGTHS` that fits.
    later : int
        Number of tokens of a window that are fed after its context.
    seed : int
        Decides the facts.
    limit : int
        The model's context.

    Raises
    ------
    OptionError
        If there is no text, one is empty, or they are too short for so many windows.
    """
    if not texts or not any(text.strip() for text in texts.values()):
        raise OptionError("there is no text to measure on: give at least one with some thousand tokens")
    first = _first_token(tokenizer)
    ids = {name: _ids(text, tokenizer) for name, text in texts.items()}
    most = limit - len(first) - FACT_ROOM
    least = LEAST_CONTEXT + later
    if tokens is not None and not least <= tokens <= most:
        raise OptionError(
            f"tokens={tokens}: give {least} to {most}: a window has {later} later tokens and a context of at least "
            f"{LEAST_CONTEXT}, and with questions it must fit into the model's context of {limit}"
        )
    lengths = [tokens] if tokens is not None else [n for n in LENGTHS if least <= n <= most]
    length = next((n for n in lengths if sum(_fits(one, n) for one in ids.values()) >= count), None)
    if length is None:
        held = ", ".join(f"{name}: {one.shape[1]}" for name, one in ids.items())
        wanted = lengths[-1] if lengths else least
        raise OptionError(
            f"the texts are too short for {count} windows of {wanted} tokens that do not overlap (tokens: {held}): "
            f"give longer or more texts, fewer windows, or shorter ones, of at least {least}"
        )
    shares = dict.fromkeys(ids, 0)
    while sum(shares.values()) < count:  # in turn, as long as they have room
        for name, one in ids.items():
            if sum(shares.values()) < count and shares[name] < _fits(one, length):
                shares[name] += 1
    found: list[Window] = []
    for name, number in shares.items():
        whole = ids[name]
        for turn in range(number):
            start = (2 * turn + 1) * whole.shape[1] // (2 * number) - length // 2
            start = min(max(start, turn * length), whole.shape[1] - (number - turn) * length)
            piece = whole[:, start : start + length]
            where = f"{name}, tokens {start} to {start + length}"
            found.append(_window(where, first, piece[:, :-later], piece[:, -later:], tokenizer, len(found), seed))
    return found


def windows_of_prompts(
    prompts: Sequence[Mapping[str, str]], tokenizer: Any, *, count: int, later: int, seed: int, limit: int
) -> list[Window]:
    """Make a window of each prompt: of all of it, with its answer fed afterwards, or with its own last tokens.

    Parameters
    ----------
    prompts : sequence of mapping
        Each has ``prompt``, and perhaps ``answer`` or ``completion``.
    count : int
        Of more prompts than this, so many are used, evenly spread.
    tokenizer, later, seed, limit
        As in `windows_of_texts`; of an answer, at most `later` tokens are fed.

    Raises
    ------
    OptionError
        If there are none, or one is no prompt, too short, or too long for the model.
    """
    if not prompts:
        raise OptionError('there are no prompts to measure on: give some, each {"prompt": "...", "answer": "..."}')
    places = [at * len(prompts) // min(count, len(prompts)) for at in range(min(count, len(prompts)))]
    first = _first_token(tokenizer)
    found: list[Window] = []
    for place in places:
        one, where = prompts[place], f"prompt {place + 1}"
        answer = (one.get("answer") or one.get("completion")) if isinstance(one, Mapping) else None
        if not isinstance(one, Mapping) or not isinstance(one.get("prompt"), str) or not isinstance(answer, str | None):
            raise OptionError(f'{where} is {one!r}: write {{"prompt": "...", "answer": "..."}}, the answer if you like')
        ids = _ids(one["prompt"], tokenizer)
        if answer is None:
            context, fed = ids[:, :-later], ids[:, -later:]
        else:  # the last token of the prompt predicts the first of the answer
            context, fed = ids[:, :-1], torch.cat([ids[:, -1:], _ids(answer, tokenizer)[:, :later]], dim=1)
        if context.shape[1] < LEAST_CONTEXT or fed.shape[1] < 2:
            raise OptionError(
                f"{where} has {ids.shape[1]} tokens, too few: its context needs {LEAST_CONTEXT}, as the first and last "
                f"stay dense{'' if answer is not None else f', and {later} more are fed afterwards'}"
            )
        if context.shape[1] + fed.shape[1] + len(first) + FACT_ROOM > limit:
            raise OptionError(f"{where} has {ids.shape[1]} tokens, too many: the model's context has {limit}")
        found.append(_window(where, first, context, fed, tokenizer, len(found), seed))
    return found


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Return the prompts in a file with a JSON object on each line.

    Raises
    ------
    OptionError
        If it cannot be read, or a line is no JSON; whether each is a prompt, `windows_of_prompts` checks.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null character in the name
        raise OptionError(f"the prompts in {path} cannot be read: {error}; give JSON lines in UTF-8") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise OptionError(
                    f'{path}, line {number} is no JSON ({error}): write {{"prompt": "...", "answer": "..."}}'
                ) from None
    return found


def _window(
    name: str, first: list[int], context: Tensor, later: Tensor, tokenizer: Any, number: int, seed: int
) -> Window:
    """Hide facts in a context."""
    rng = random.Random(f"{seed} {number}")
    asked = []
    for turn, city in enumerate(rng.sample(CITIES, FACTS)):
        answer = random_answer(rng)
        depth = ((number * FACTS + turn) * 0.381966 + 0.19) % 1  # spread evenly, whatever the number of windows
        place = _sentence_end(context, int(depth * context.shape[1]), tokenizer)
        hidden = _ids(f" {fact(city, answer)}", tokenizer)
        context = torch.cat([context[:, :place], hidden, context[:, place:]], dim=1)
        asked.append((_ids(f"\n\n{question(city)}", tokenizer), _ids(f" {answer}", tokenizer)))
    start = torch.tensor([first], dtype=torch.int64, device="cpu")
    return Window(name, torch.cat([start, context], dim=1), later, tuple(asked))


def _sentence_end(ids: Tensor, place: int, tokenizer: Any) -> int:
    """Return the first place from here on where a sentence or line has ended; this one if none is near."""
    for at in range(place, min(place + 64, ids.shape[1])):
        if at and tokenizer.decode(ids[0, at - 1 : at]).rstrip(" ").endswith((".", "!", "?", "\n")):
            return at
    return place


def _fits(ids: Tensor, length: int) -> int:
    return int(ids.shape[1]) // length


def _first_token(tokenizer: Any) -> list[int]:
    """Return what the tokenizer puts before every text: many models are lost without it."""
    given, plain = (tokenizer("a", add_special_tokens=wanted).input_ids for wanted in (True, False))
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and given[:1] == [bos] and plain[:1] != [bos] else []


def _ids(text: str, tokenizer: Any) -> Tensor:
    found = tokenizer(text, add_special_tokens=False).input_ids
    return torch.tensor([found], dtype=torch.int64, device="cpu")
