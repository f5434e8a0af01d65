"""`Case`: one case of RULER, and the numbers of tokens that its tasks generate.

Source: RULER (Hsieh et al., arXiv 2404.06654).
"""

from __future__ import annotations

from dataclasses import dataclass

from grace_opt.hf import needle

#: Tokens that are generated, as RULER does.
NEEDLE_TOKENS, TRACKING_TOKENS, COMMON_TOKENS, FREQUENT_TOKENS, QUESTION_TOKENS = 128, 30, 120, 50, 32
#: Repeated around needles and variables.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#: Words of keys and of lists. RULER takes its own from a package.
WORDS = sorted(word for word in needle.vocabulary() if word.isalpha() and len(word) > 2)


@dataclass(frozen=True)
class Case:
    """One case: an answer to `question` after `context` has to contain `expected`.

    Attributes
    ----------
    task : str
    context, question : str
        The question ends with the beginning of its answer.
    expected : tuple of str
    new_tokens : int
        Number of tokens to generate.
    any_of : bool
        Whether one of the expected strings is enough.
    """

    task: str
    context: str
    question: str
    expected: tuple[str, ...]
    new_tokens: int
    any_of: bool = False
