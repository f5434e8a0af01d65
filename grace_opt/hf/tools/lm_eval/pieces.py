"""What the harness wants scored, cut into a prompt that is compressed and tokens that are fed behind it.

When: log-likelihoods. A context's last token is not part of the prompt that is compressed: fed behind it, it predicts
the first scored token from the compressed cache. Otherwise that token would be predicted by the prompt's own pass,
whose attention is dense, and answers of one token, as in many multiple-choice tasks, would never see the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Tokens = tuple[int, ...]


class Piece(NamedTuple):
    """One request: read and compress ``prompt``, feed ``fed`` behind it, and score ``targets``.

    The scored tokens are predicted by as many last tokens of prompt and fed tokens together.
    """

    prompt: Tokens
    fed: Tokens
    targets: Tokens

    @property
    def within(self) -> int:
        """Number of targets that the prompt's own, dense, pass predicts; 0 unless a text is scored as a whole."""
        return max(len(self.targets) - len(self.fed), 0)


def piece_of(context: Sequence[int], continuation: Sequence[int], max_length: int, rolling: bool = False) -> Piece:
    """Cut a context and its continuation.

    Parameters
    ----------
    context, continuation : sequence of int
        Tokens, at least one each; the continuation is what is scored.
    max_length : int
        The model's: as the harness does, tokens before the last ``max_length + 1`` are left out.
    rolling : bool
        A whole text is scored: at least half of it is the prompt.

    Examples
    --------
    >>> piece_of([1, 2, 3], [4, 5], 100)
    Piece(prompt=(1, 2), fed=(3, 4), targets=(4, 5))
    >>> piece_of([0], [1, 2, 3, 4, 5], 100, rolling=True)
    Piece(prompt=(0, 1, 2), fed=(3, 4), targets=(1, 2, 3, 4, 5))
    """
    tokens = (*context, *continuation)[-(max_length + 1) :]
    scored = len(continuation)
    end = len(tokens) - scored - 1
    if rolling:
        end = max(end, len(tokens) // 2)
    return Piece(tokens[:end], tokens[end:-1], tokens[len(tokens) - scored :])


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt, and all that is fed behind copies of its cache.

    Attributes
    ----------
    tokens : tuple of int
    fed : mapping
        From the tokens that are fed to the places of the requests that want them: one pass is enough for all choices
        of one token.
    """

    tokens: Tokens
    fed: Mapping[Tokens, Sequence[int]]


def by_prompt(pieces: Mapping[int, Piece]) -> list[ScoredPrompt]:
    """Gather requests, by their places, under their prompts, longest prompt first.

    Examples
    --------
    >>> by_prompt({0: Piece((1, 2), (3,), (4,)), 1: Piece((1, 2), (3,), (5,))})
    [ScoredPrompt(tokens=(1, 2), fed={(3,): [0, 1]})]
    """
    found: dict[Tokens, dict[Tokens, list[int]]] = {}
    for place, piece in pieces.items():
        found.setdefault(piece.prompt, {}).setdefault(piece.fed, []).append(place)
    return sorted((ScoredPrompt(tokens, fed) for tokens, fed in found.items()), key=lambda each: -len(each.tokens))


def left_padded(rows: Iterable[Tokens]) -> tuple[list[list[int]], list[list[int]]]:
    """Return rows of one length, with zeros on the left, and rows of ones and zeros that say which tokens are real.

    Examples
    --------
    >>> left_padded([(7, 8), (9,)])
    ([[7, 8], [0, 9]], [[1, 1], [0, 1]])
    """
    listed = [list(row) for row in rows]
    width = max(map(len, listed))
    return (
        [[0] * (width - len(row)) + row for row in listed],
        [[0] * (width - len(row)) + [1] * len(row) for row in listed],
    )
