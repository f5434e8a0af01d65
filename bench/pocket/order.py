"""Whether the demo's table has the same order on the pocket model as on a real one: ``python -m bench.pocket.order``.

Runs the demo on several texts and compares its caches, by KL, with what `bench.arena` has measured of SmolLM2
(docs/results/arena.json, half B). Two caches have the same order if the same one of them has the lower KL. Takes a
minute or two. Writes docs/results/pocket.{json,md,png}.

When: after the demo, the pocket model or the way to store bits has changed; `make results` does it after the arena.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from rich.progress import track

from bench.arena.numbers import numbers
from bench.intervals import with_ends
from bench.provenance import require_clean
from bench.report import BLACK, BLUE, RESULTS, Page, add_options, read_results, table, write_results
from grace_opt.hf.demo import run_demo
from grace_opt.hf.models import POCKET_BASIS, disable_progress_bars, load_pocket
from grace_opt.sweep import mean_interval, paired_interval

#: Rows of the demo that the arena has, by the names that they have there.
SAME = {"int4": "int4", "THINK": "think-0.5", "GRACE": "grace-0.5", "3 bits": "bits-3", "2 bits": "bits-2"}
ARENA = RESULTS / "arena.json"


def measured(texts: int, tokens: int) -> dict[str, list[dict[str, float]]]:
    """Return the demo's rows on several texts, by method."""
    model, tokenizer = load_pocket()
    found: dict[str, list[dict[str, float]]] = {}
    for seed in track(range(texts), description="texts"):
        report = run_demo(model, tokenizer, tokens=tokens, seed=seed, ratios=(), basis=POCKET_BASIS)
        for row in report.rows:
            value = {"bits": row.bits, "share": row.share, "kl": row.kl, "top1": row.top1}
            found.setdefault(row.method, []).append(value | {"right": row.right, "questions": report.questions})
    return found


def of_arena(value: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the KL of the same caches on a real model, by the demo's names."""
    return {name: numbers(dict(value), "passages", there, "kl") for name, there in SAME.items()}


def order(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names by their mean, the lowest first."""
    return sorted(found, key=lambda name: statistics.fmean(found[name]))


def disagreements(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> list[tuple[str, str]]:
    """Return the pairs of names that two tables have in another order: the first is lower in `one`.

    Examples
    --------
    >>> disagreements({"a": [1.0], "b": [2.0], "c": [3.0]}, {"a": [2.0], "b": [1.0], "c": [3.0]})
    [('a', 'b')]
    """
    first = order(one)
    place = {name: at for at, name in enumerate(order(other))}
    return [(low, high) for low, high in combinations(first, 2) if place[low] > place[high]]


def is_shown(found: Mapping[str, Sequence[float]], low: str, high: str) -> bool:
    """Whether the 95 % interval of the paired difference excludes zero."""
    difference = paired_interval(found[low], found[high])
    return not difference.low <= 0 <= difference.high


def page(value: dict[str, Any]) -> Page:
    """Make the page from its JSON."""
    pocket = {name: [row["kl"] for row in value["pocket"][name]] for name in SAME}
    real: dict[str, list[float]] = value["real"]
    differ = disagreements(pocket, real)
    pairs = len(SAME) * (len(SAME) - 1) // 2

    def shown(found: Mapping[str, Sequence[float]], low: str, high: str) -> str:
        return "yes" if is_shown(found, low, high) else "no"

    said = "; ".join(
        f"{low} is nearer to dense than {high}, on {value['model']} it is the other way round" for low, high in differ
    )
    rows = []
    for name, each in value["pocket"].items():
        kl = with_ends(mean_interval([row["kl"] for row in each]), ".2g") if name != "dense" else "–"
        there = with_ends(mean_interval(real[name]), ".2g") if name in real else "–"
        right, asked = (sum(int(row[key]) for row in each) for key in ("right", "questions"))
        bits, share = (statistics.fmean(row[key] for row in each) for key in ("bits", "share"))
        rows.append([name, f"{bits:.2f}", f"{share:.1%}", kl, there, f"{right} of {asked}"])
    apart = [[f"{low} below {high}", shown(pocket, low, high), shown(real, high, low)] for low, high in differ]
    lost = {name: sum(int(row["questions"] - row["right"]) for row in each) for name, each in value["pocket"].items()}
    losers = ", ".join(f"{name} {count}" for name, count in lost.items() if count)
    return Page(
        title="The pocket model beside a real one",
        picture="KL divergence from the dense cache, logarithmic: the pocket model's across, SmolLM2's up",
        draw=lambda figure: _draw(figure, pocket, real, value["model"]),
        asked=f"Does the demo's table have the same order on the pocket model as on {value['model']}?",
        found=f"{pairs - len(differ)} of {pairs} pairs of caches have the same order by KL. "
        + (f"Where they differ: on the pocket model {said}. " if differ else "")
        + (f"Of its passwords, these are lost: {losers}." if losers else "Every cache finds all of its passwords."),
        sure=f"Means over {value['texts']} texts and {len(real['int4'])} passages of the arena; sizes of KL "
        "cannot be compared, as the pocket model's text is a closed grammar that it predicts far better.",
        tables=[
            "Means, with 95 % intervals. *Passwords*: asked for after the cache was compressed.",
            "",
            *table(["cache", "bits", "% of 16 bits", "KL, pocket", f"KL, {value['model']}", "passwords, pocket"], rows),
            *(
                [
                    "Pairs in another order, and whether the interval of the paired difference excludes zero:",
                    "",
                    *table(["on the pocket model", "shown there", "the opposite shown on the real one"], apart),
                ]
                if apart
                else []
            ),
        ],
    )


def _draw(figure: Any, pocket: Mapping[str, Sequence[float]], real: Mapping[str, Sequence[float]], name: str) -> None:
    figure.set_size_inches(6, 4.2)
    axes = figure.subplots()
    places = {each: (statistics.fmean(pocket[each]), statistics.fmean(real[each])) for each in pocket}
    for each, (x, y) in places.items():
        axes.plot(x, y, "o", color=BLUE if each.endswith(" bits") else BLACK)
        # On the side where no other lies close by.
        left = any(x < x2 < 2 * x and y / 2 < y2 < 2 * y for x2, y2 in places.values())
        where, side = ((-6, -3), "right") if left else ((6, -3), "left")
        axes.annotate(each, (x, y), where, textcoords="offset points", ha=side)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.2)
    axes.set_xlabel("KL on the pocket model, nats")
    axes.set_ylabel(f"KL on {name}, nats")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pocket.order", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=20, help="of the demo (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of each (default %(default)s)")
    add_options(parser, "pocket")
    args = parser.parse_args(given)
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    if args.texts < 2:
        parser.error("--texts: give at least 2, as one shows no spread")
    source = require_clean(args.allow_dirty)
    disable_progress_bars()
    arena = json.loads(ARENA.read_text(encoding="utf-8"))
    value = {
        "provenance": source,
        "model": arena["model"],
        "arena": {key: arena["provenance"][key] for key in ("date", "commit")},
        "texts": args.texts,
        "tokens": args.tokens,
        "pocket": measured(args.texts, args.tokens),
        "real": of_arena(arena),
    }
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty))


if __name__ == "__main__":
    main()
