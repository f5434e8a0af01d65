"""The page that compares the pocket model with a real one: pairs in another order, and numbers from the right place."""

from __future__ import annotations

import json

from bench.pocket import order
from bench.report import RESULTS

#: KL on the pocket model, and on the real one.
KL = {"THINK": (4.0, 9.0), "GRACE": (3.0, 8.0), "2 bits": (2.0, 3.0), "3 bits": (1.5, 1.0), "int4": (0.5, 3.5)}


def value():
    """Means of the pocket model and of the real one; each differs by a little on the second text."""
    row = {"bits": 3.0, "share": 0.2, "top1": 1.0, "right": 4, "questions": 5}
    rows = {name: [row | {"kl": kl}, row | {"kl": kl + 0.1}] for name, (kl, _) in KL.items()}
    real = {name: [there, there + 0.1] for name, (_, there) in KL.items()}
    return {"model": "Real", "texts": 2, "pocket": rows, "real": real}


def test_pairs_in_another_order_are_named():
    page = order.page(value())
    assert "8 of 10 pairs of caches have the same order by KL" in page.found
    assert "int4 is nearer to dense than 3 bits, on Real it is the other way round" in page.found
    assert "int4 2" in page.found  # a password lost on each of two texts
    assert [line for line in page.tables if line.startswith("| int4 below")] == [
        "| int4 below 3 bits | yes | yes |",
        "| int4 below 2 bits | yes | yes |",
    ]


def test_equal_orders_have_no_second_table():
    same = value()
    same["real"] = {name: [row["kl"] for row in rows] for name, rows in same["pocket"].items()}
    page = order.page(same)
    assert "10 of 10" in page.found
    assert not [line for line in page.tables if "below" in line]


def test_the_arena_has_every_row_of_the_demo():
    arena = json.loads((RESULTS / "arena.json").read_text(encoding="utf-8"))
    found = order.of_arena(arena)
    assert order.order(found)[0] == "3 bits"
    assert {len(kl) for kl in found.values()} == {8}
