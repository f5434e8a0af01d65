"""What docs/results/sparse.md says of the numbers of `bench.sparse`."""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from bench.report import BLACK, BLUE, GREY, ORANGE, Page, table
from bench.sparse_graphs import DEGREE
from bench.sparse_peers import LARGEST_PENALTY, PEERS

#: Steps of the first measurement and their colours.
STEPS = {"problem": GREY, "mies": BLUE, "drop_greedy": ORANGE, "bound": BLACK}


def page(value: dict[str, Any]) -> Page:
    """Return the page."""
    sizes, parts, limit = value["sizes"], value["parts"], value["limit"]
    last = sizes[-1]
    best = [max(row["found"].values()) for row in parts]
    names = list(dict.fromkeys(name for row in parts for name in row["found"]))
    behind = {
        name: [1 - row["found"][name] / top for row, top in zip(parts, best, strict=True) if name in row["found"]]
        for name in names
    }
    mean = {name: f"{100 * statistics.fmean(each):.2f} %" for name, each in behind.items()}
    plain = "plain annealing"
    ahead = sum(row["found"]["portfolio"] >= row["found"][plain] for row in parts)
    absent = [name for name in PEERS if name not in names]
    gaps = [row["bound"] / top - 1 for row, top in zip(parts, best, strict=True)]
    return Page(
        title="Sparse graphs",
        picture="Left, seconds of each step by the number of edges, on logarithmic scales; right, how far each method "
        "stays behind the heaviest part found, in percent, for every graph",
        draw=lambda figure: _draw(figure, value, behind),
        asked=f"What does W of a million vertices take, and who finds the densest tenth of a graph in {limit:g} s?",
        found=f"With {last['n']:,} vertices and {last['edges']:,} edges, `mies` takes {last['seconds']['mies']:.1f} s "
        f"and `drop_greedy` {last['seconds']['drop_greedy']:.1f} s after {last['seconds']['problem']:.1f} s for the "
        f"problem, in {last['peak']['drop_greedy'] / 2**30:.2f} GiB, Python and the matrix as given included; "
        f"`portfolio` keeps a limit of {value['long']:g} s in {last['seconds']['portfolio']:.1f} s. In {len(parts)} "
        f"smaller graphs, `portfolio` stays {mean['portfolio']} behind the best on the mean, `annealing` "
        f"{mean['annealing']}, `tabu` {mean['tabu']}, plain annealing {mean[plain]}, a k-core peel "
        f"{mean['k-core peel (networkx)']}; `portfolio` is at least as good as plain annealing in {ahead} of "
        f"{len(parts)}.",
        sure="Generated graphs with random weights, one of each kind and size, and one run of each method; optima are "
        f"not known. The certified bound is {100 * min(gaps):.1f} % to {100 * max(gaps):.0f} % above the best found: "
        "tight where a part of the graph is densest, loose on uniform graphs."
        + (f" Not installed here, so not run: {', '.join(absent)}." if absent else ""),
        tables=[
            *table(
                ["vertices", "edges", *(f"{name}, s" for name in (*STEPS, "portfolio")), "greedy, GiB", "all, GiB"],
                [
                    [
                        f"{row['n']:,}",
                        f"{row['edges']:,}",
                        *(f"{row['seconds'][name]:.2f}" for name in (*STEPS, "portfolio")),
                        f"{row['peak']['drop_greedy'] / 2**30:.2f}",
                        f"{max(row['peak'].values()) / 2**30:.2f}",
                    ]
                    for row in sizes
                ],
            ),
            "",
            "How far behind the heaviest part found, and how far above it the certified bound is:",
            "",
            *table(
                ["graph", "vertices", "heaviest", *names, "bound"],
                [
                    [
                        row["kind"],
                        f"{row['n']:,}",
                        f"{top:.2f}",
                        *(f"{100 * (1 - row['found'][n] / top):.2f} %" if n in row["found"] else "–" for n in names),
                        f"{100 * (row['bound'] / top - 1):+.1f} %",
                    ]
                    for row, top in zip(parts, best, strict=True)
                ],
            ),
            "",
            "Seconds:",
            "",
            *table(
                ["graph", "vertices", *names],
                [
                    [
                        row["kind"],
                        f"{row['n']:,}",
                        *(f"{row['seconds'][name]:.2f}" if name in row["seconds"] else "–" for name in names),
                    ]
                    for row in parts
                ],
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"Uniform graphs in the first table, k a tenth of the vertices. In the others the mean degree is "
                    f"{DEGREE}; weights are uniform from 0 to 1. The searches get {limit:g} s each, and `portfolio` "
                    "computes its bound in that time too; greedy methods and peels end on their own, and a peel takes "
                    "the heaviest vertices of the last core that it needs. The plain annealing is thirty lines in "
                    "`bench/sparse_peers.py`, compiled, from the same start, with temperatures that suit these "
                    "weights. dwave-samplers turns the choice of k vertices into a penalty on all pairs, so it runs up "
                    f"to {LARGEST_PENALTY:,} vertices. Memory is the most that the process held."
                ],
            )
        ],
    )


def _draw(figure: Figure, value: dict[str, Any], behind: dict[str, list[float]]) -> None:
    left, right = figure.subplots(1, 2)
    for name, colour in STEPS.items():
        edges = [row["edges"] for row in value["sizes"]]
        left.plot(edges, [row["seconds"][name] for row in value["sizes"]], "o-", color=colour, label=name)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("edges")
    left.set_ylabel("seconds")
    left.legend()
    for place, each in enumerate(behind.values()):
        right.plot([100 * one for one in each], [place] * len(each), "o", color=BLUE, alpha=0.6)
    right.set_yticks(range(len(behind)), list(behind))
    right.set_xlabel("behind the heaviest part found, %")
    right.invert_yaxis()
