"""The list of all operations and their implementations, for `explain` and the tests."""

from __future__ import annotations

from . import steps
from .cache import coded, coding, decode, gather, heads, reading, received
from .solve import (
    annealing,
    columns,
    completion,
    constrained,
    enumeration,
    exchange,
    extremes,
    greedy,
    indices,
    interaction,
    objective,
    relaxation,
    search,
    shift,
    sparse,
    tabu,
)

#: In order: from a prompt's keys to a choice; the searches of other methods; what all of them need.
OPERATIONS = tuple(
    door.OPERATION
    for door in (
        *(interaction, gather, received, coding, heads, decode, coded, reading),
        *(greedy, completion, exchange, tabu, annealing, sparse, columns),
        *(enumeration, search, relaxation, shift, constrained),
        *(extremes, objective, indices, steps),
    )
)
