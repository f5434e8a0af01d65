"""All operations, each with its implementations: what `explain` goes through, and the tests."""

from __future__ import annotations

from . import (
    completion,
    decode,
    enumeration,
    exchange,
    extremes,
    gather,
    greedy,
    indices,
    interaction,
    objective,
    relaxation,
    search,
    shift,
    tabu,
)

#: From a prompt's keys to a choice, what other methods search with, and what all of them need.
OPERATIONS = tuple(
    door.OPERATION
    for door in (
        *(interaction, gather, decode),
        *(greedy, completion, exchange, tabu),
        *(enumeration, search, relaxation, shift),
        *(extremes, objective, indices),
    )
)
