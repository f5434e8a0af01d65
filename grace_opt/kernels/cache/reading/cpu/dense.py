"""A pair's queries, and their attention to the tokens that are always read: sinks and tail."""

from __future__ import annotations

import numpy as np

from ...._shared.jit import inlined
from ...._shared.memory import zeros
from ...decode.cpu import address, attend_region, gather, read_queries
from ...decode.forms import BY_TOKEN
from ..forms import (
    GROUP,
    HEADS,
    KEPT,
    KEPT_COUNT,
    KIND,
    MASK,
    OLD,
    OLD_VALUES,
    QUERY,
    SINK_KEYS,
    SINKS,
    TAIL,
    TAIL_KEYS,
    TAIL_VALUES,
    VALUE_WIDTH,
    WIDTH,
)
from .bounds import raise_reach

NO_FORM = (0, 0, 0, 0, 0, False)


@inlined
def queries_of(pair, places, sizes, scale, full, narrow):
    """Write a pair's queries times `scale`, and their channels as keys have them; return its sequence and KV head."""
    b, h, rows = pair // sizes[HEADS], pair % sizes[HEADS], sizes[GROUP]
    source, place = address(places[QUERY], b, h * rows), places[QUERY]
    read_queries(source, place[2], place[3], place[4], rows, 1, sizes[WIDTH], scale, full)
    gather(full, rows, sizes[WIDTH], address(places[KEPT], b, h), places[KEPT, 4], sizes[KEPT_COUNT], narrow)
    return b, h


@inlined
def attend_dense(full, places, sizes, b, h, masks, workspaces, state, reach):
    """Attend to the sinks and the tail, and raise the entries of `reach` to their keys' largest absolute numbers."""
    (logits, scaled), width = workspaces, sizes[WIDTH]
    last_columns = zeros((sizes[GROUP],), np.int64)
    for region in (SINK_KEYS, TAIL_KEYS):
        newest = region == TAIL_KEYS
        count, column = (sizes[TAIL], sizes[SINKS] + sizes[OLD]) if newest else (sizes[SINKS], 0)
        stored = TAIL_VALUES if newest else OLD_VALUES
        keys, step = address(places[region], b, h), places[region, 3]
        attend_region(
            full,
            h,
            (keys, step, BY_TOKEN, width, NO_FORM),
            (address(places[stored], b, h), places[stored, 3], False, sizes[VALUE_WIDTH], NO_FORM, 0),
            0,
            count,
            sizes[GROUP],
            (sizes[KIND], masks, places[MASK, 4], last_columns, column),
            False,
            np.float32(1),
            logits,
            scaled,
            state,
            None,
        )
        raise_reach(keys, step, count, width, reach)
