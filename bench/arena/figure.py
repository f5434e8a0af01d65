"""The picture of `bench.arena`: KL by bits per element, and by bytes of the whole cache; one line per family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, cycle
from typing import Any

from bench.arena.contenders import OUR_FAMILIES, OURS
from bench.arena.numbers import families, interval, is_reference, mean
from bench.report import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY

#: Ticks of both x axes: bits per element, and percentages of a dense cache.
BITS, SHARES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16), (6, 10, 15, 20, 30, 50, 75, 100)
#: What the 95 % intervals are narrowed to if a logarithmic scale cannot show them.
LEAST = 1e-5


def draw(figure: Any, value: dict[str, Any]) -> None:
    """Draw on a figure of matplotlib."""
    figure.set_size_inches(10, 7)
    left, right = figure.subplots(1, 2, sharey=True)
    looks = styles(families(value, "passages"))
    for axes, measure, scale in ((left, "bits", 1), (right, "share", 100)):
        for family, names in families(value, "passages").items():
            x = [scale * mean(value, "passages", name, measure) for name in names]
            found = [interval(value, "passages", name, "kl") for name in names]
            y = [max(one.estimate, LEAST) for one in found]
            ends = [
                [max(at - max(one.low, LEAST), 0) for at, one in zip(y, found, strict=True)],
                [max(one.high - at, 0) for at, one in zip(y, found, strict=True)],
            ]
            if len(found) and found[0].n < 2:  # a single passage shows no spread
                ends = [[0] * len(y), [0] * len(y)]
            axes.errorbar(x, y, ends, label=_words(family), elinewidth=0.7, capsize=0, **looks[family])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.minorticks_off()
    left.set_xticks(BITS, [f"{tick:g}" for tick in BITS])
    left.set_xlim(0.85, 18)
    left.set_xlabel("bits per element of compressed tokens, everything counted")
    left.set_ylabel("next-token KL from dense, nats")
    right.set_xticks(SHARES, [f"{tick:g} %" for tick in SHARES])
    right.set_xlim(5.5, 110)
    right.set_xlabel("bytes of the whole cache, of a dense one in 16 bits")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=6.5)
    figure.suptitle(f"{value['model']}, prompts of {value['tokens'] - value['later']:,} tokens", fontsize=10)


def styles(found: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return colour, marker and line of every family: ours is thick and blue, references are black and dotted.

    Variants of a family ("KIVI, own windows", "KIVI with token classes") have its colour, and lines that are not solid.
    """
    colours, markers = cycle((ORANGE, GREEN, RED, PINK, SKY, GREY)), cycle("sD^vP<Xd>ph*")
    bases: dict[str, tuple[str, Iterator[str]]] = {}
    looks: dict[str, dict[str, Any]] = {}
    for family, names in found.items():
        if family == OURS:
            looks[family] = {"color": BLUE, "marker": "o", "linewidth": 2.4, "zorder": 5, "markersize": 6}
            continue
        base = re.split(r", | with | \+ ", family)[0]
        if base not in bases:
            colour = BLACK if is_reference(names) else BLUE if family in OUR_FAMILIES else next(colours)
            first = {BLACK: [":"], BLUE: []}.get(colour, ["-"])
            bases[base] = colour, chain(first, cycle(("--", ":", "-.")))
        colour, lines = bases[base]
        marker = next(markers) if colour != BLACK else "." if base.startswith("test channel") else "x"
        looks[family] = {"color": colour, "marker": marker, "linestyle": next(lines), "linewidth": 1, "markersize": 4}
    return looks


def _words(family: str) -> str:
    return family.replace("`", "")
