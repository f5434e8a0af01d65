"""RULER's variable tracking: a chain of assignments hidden in noise, after a short example with its answer.

Source: RULER (Hsieh et al., arXiv 2404.06654), sections 3.2 and A; its prompts, as a score depends on them.
"""

from __future__ import annotations

import itertools
import random
import string

from bench.ruler.case import NOISE, TRACKING_TOKENS, Case

#: Number of assignments from one variable to the next.
HOPS = 4


def _chain(letters: int, size: int, rng: random.Random) -> tuple[str, str, list[str]]:
    """Return noise with a chain of variables in it, the question about it, and the variables."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] * (name not in names)
    number = rng.randint(10_000, 99_998)
    steps = [f"VAR {names[0]} = {number}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names))]
    text = [NOISE] * size
    for place, step in zip(sorted(rng.sample(range(size + 1), len(steps)))[::-1], steps[::-1], strict=True):
        text.insert(place, step)
    return (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n" + "\n".join(text),
        f"\nQuestion: Find all variables that are assigned the value {number} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {HOPS + 1} variables are assgined the value {number}, "
        "they are: ",  # "assgined" is RULER's own spelling
        names,
    )


def tracking_case(size: int, rng: random.Random) -> Case:
    """Return a case with `size` lines of noise."""
    shown, asked, answer = _chain(3, HOPS + 1, rng)
    context, question, names = _chain(5, size, rng)
    example = f"{shown}{asked}{' '.join(answer)}\n\n"
    return Case("vt", example + context, question.rstrip(), tuple(names), TRACKING_TOKENS)
