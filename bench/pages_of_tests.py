"""Pages of docs/results whose numbers are those of a test: families and modes of the adapter, and the tests in depth.

``make test-matrix`` and ``make test-deep`` run the tests, which write the pages when they are done; ``python -m
bench.pages_of_tests`` forms them again from their JSON files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.report import BLUE, GREEN, ORANGE, RED, RESULTS, Page, bars, read_results, table, write_results

#: What a cell of the matrix can say, and its colour.
MARKS = {"pass": GREEN, "fused=False": BLUE, "raises": "0.8", "not in transformers": "0.93", "fails": RED}


def adapter_matrix(value: dict[str, Any]) -> Page:
    """docs/results/adapter_matrix.md: which families were tested in which ways of generating."""
    cells = value["cells"]
    modes = list(dict.fromkeys(mode for row in cells.values() for mode in row))
    marks = {family: [row.get(mode, "fails").split(":")[0] for mode in modes] for family, row in cells.items()}
    counts = {mark: sum(row.count(mark) for row in marks.values()) for mark in MARKS}
    whole = [family for family, row in marks.items() if set(row) == {"pass"}]
    refused = [family for family, row in marks.items() if set(row) == {"raises"}]
    messages = []
    for family, row in cells.items():
        said = next((text for text in row.values() if text.startswith("raises: ")), None)
        messages += [f"- {family}: {said.removeprefix('raises: ')}"] if said else []
    failed = f"{counts['fails']} fail" if counts["fails"] else "none fails"
    return Page(
        title="Families of models in every way of generating",
        picture="Families of models by ways of generating: what passes, what is refused",
        draw=lambda figure: draw_matrix(figure, marks, modes),
        asked=f"With which of {len(cells)} families of models does the pruned cache work, in {len(modes)} ways of "
        "generating?",
        found=f"{len(whole)} families pass everything, {len(refused)} are refused with a message that says why, and of "
        f"all {sum(counts.values())} cells {failed}.",
        sure="Each cell compares tokens, in bfloat16 logits, of a tiny model with random weights on a CPU: it says "
        "that the code is right, and nothing of text quality, speed or GPUs.",
        details=[
            ("As a table", table(["family", *modes], [[f, *row] for f, row in marks.items()], words=len(modes) + 1)),
            ("The messages of what is refused", messages or ["None."]),
        ],
    )


def draw_matrix(figure: Any, marks: dict[str, list[str]], modes: Sequence[str]) -> None:
    """A square for each cell."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure.set_size_inches(7.5, 1.6 + 0.19 * len(marks))
    axes = figure.subplots()
    known = list(MARKS)
    numbers = [[known.index(mark) for mark in row] for row in marks.values()]
    colours = ListedColormap(list(MARKS.values()))
    axes.pcolormesh(numbers, cmap=colours, vmin=-0.5, vmax=len(known) - 0.5, edgecolors="white", linewidth=1)
    axes.invert_yaxis()
    axes.set_yticks([place + 0.5 for place in range(len(marks))], list(marks), fontsize=7.5)
    axes.set_xticks([place + 0.5 for place in range(len(modes))], modes, rotation=35, ha="right")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    used = [mark for mark in known if any(mark in row for row in marks.values())]
    patches = [Patch(color=MARKS[mark], label=mark) for mark in used]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(used), fontsize=8)


def test_deep(value: dict[str, Any]) -> Page:
    """docs/results/test_deep.md: every method against the enumerated optimum."""
    methods = value["methods"]
    rows = []
    for name, m in methods.items():
        shares = [f"{100 * m[part] / m['instances']:.2f}" for part in ("optimal", "proved")]
        rows.append([name, f"{m['instances']:,}", *shares, f"{m['exact_off']:.1e}", f"{m['bound_above_optimum']:.1e}"])
    sizes = sorted(map(int, value["sizes"]))
    kinds = ", ".join(f"{name} {count:,}" for name, count in value["kinds"].items())
    proved = methods["branch_and_bound"]["proved"] / methods["branch_and_bound"]["instances"]
    return Page(
        title="Tests in depth: every method against enumeration",
        picture="Share of instances that each method solves to the optimum, and that it proves",
        draw=lambda figure: draw_deep(figure, methods),
        asked=f"On {value['instances']:,} small, difficult instances, does every method keep what it claims, optima "
        "and bounds, beside the enumerated optimum?",
        found=f"{value['breaches']} breaches: no set is wrong, no proof and no bound is false; branch and bound proves "
        f"{proved:.0%} of them, and portfolio is optimal on "
        f"{methods['portfolio']['optimal'] / methods['portfolio']['instances']:.1%}."
        if not value["breaches"]
        else f"{value['breaches']} breaches, which the run printed: something is wrong.",
        sure=f"Everything is compared to the enumerated optimum, exactly summed, for n = {sizes[0]} to {sizes[-1]}, "
        f"with k and protection drawn for each; {value['sdp_instances']:,} instances more for `sdp`; it says nothing "
        "of larger n.",
        tables=table(
            ["method", "instances", "optimal, %", "proved optimal, %", "f above the optimum where proved",
             "bound above the optimum"],
            rows,
        ),
        details=[
            (
                "How it is counted",
                [
                    f"{value['seconds']:.0f} s. The last two columns are the worst seen: f above the optimum as a "
                    f"share of what OPTIMAL allows, max({value.get('rtol', 1e-9):g} |f|, 64 n eps Σ|W_ij| over the "
                    "chosen entries), and a bound as a share of the optimum, of which it may be off by the last "
                    "digits, 8.9e-16. *Optimal* is to the last digits, so that an answer which OPTIMAL allows need "
                    "not be counted there.",
                    "",
                    f"Instances by kind: {kinds}. By n: "
                    + ", ".join(f"{n}: {count:,}" for n, count in value["sizes"].items())
                    + ".",
                ],
            )
        ],
    )  # fmt: skip


def draw_deep(figure: Any, methods: dict[str, Any]) -> None:
    """Optimal and proved, a bar for each method."""
    figure.set_size_inches(8, 0.8 + 0.26 * len(methods))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, part, title, colour in (
        (left, "optimal", "optimal, % of instances", BLUE),
        (right, "proved", "proved optimal, % of instances", ORANGE),
    ):
        values = [100 * m[part] / m["instances"] for m in methods.values()]
        bars(axes, list(methods), values, [f"{value:.1f}" for value in values], colour)
        axes.set_xlim(0, 118)
        axes.set_xlabel(title)
    right.tick_params(left=False)
    left.invert_yaxis()  # again: bars() turned the axis that both share twice


PAGES = {"adapter_matrix": adapter_matrix, "test_deep": test_deep}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pages_of_tests", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PAGES)} (default: both)")
    parser.add_argument("--allow-dirty", action="store_true", help="also of changed files; the page says so")
    args = parser.parse_args(given)
    if unknown := [name for name in args.names if name not in PAGES]:
        parser.error(f"no such page: {unknown[0]}")
    for name in args.names or PAGES:
        value = read_results(RESULTS / name)
        write_results(RESULTS / name, value, PAGES[name], allow_dirty=args.allow_dirty, measured=False)


if __name__ == "__main__":
    main()
