"""The list of all operations and their implementations, for `explain` and the tests."""

from __future__ import annotations

from . import (
    annealing,
    coded,
    coding,
    columns,
    completion,
    decode,
    enumeration,
    exchange,
    extremes,
    gather,
    greedy,
    heads,
    indices,
    interaction,
    objective,
    reading,
    received,
    relaxation,
    search,
    shift,
    sparse,
    steps,
    tabu,
)

#: In order: from a prompt's keys to a choice; the searches of other methods; what all of them need.
OPERATIONS = tuple(
    door.OPERATION
    for door in (
        *(interaction, gather, received, coding, heads, decode, coded, reading),
        *(greedy, completion, exchange, tabu, annealing, sparse, columns),
        *(enumeration, search, relaxation, shift),
        *(extremes, objective, indices, steps),
    )
)
