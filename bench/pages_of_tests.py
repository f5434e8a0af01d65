"""Pages of docs/results with numbers from tests: families and modes of the adapter, every family, and tests in depth.

``make test-matrix``, ``make test-families`` and ``make test-deep`` run the tests, which write the pages at the end;
``python -m bench.pages_of_tests`` makes them again from their JSON files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.report import BLUE, GREEN, ORANGE, RED, RESULTS, Page, bars, read_results, table, write_results

#: Possible results in a cell of the matrix, and their colours.
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
    slow = sum("fused=False" in row for row in marks.values())
    others = f", {slow} work{'s' * (slow == 1)} with `fused=False`" if slow else ""
    coded = [mark.split(":")[0] for row in value.get("cells_with_bits", {}).values() for mark in row.values()]
    with_bits = (
        f" With `bits=` instead of a ratio: of {len(coded)} cells, {coded.count('pass')} pass and "
        f"{coded.count('raises')} are refused, those of the same families."
        if coded
        else ""
    )
    return Page(
        title="Supported families of models and ways of generating",
        picture="Grid of families of models and ways of generating: which pass, and which are refused",
        headline=f"{len(whole)} of {len(cells)} families pass in every way of generating; {failed}",
        draw=lambda figure: draw_matrix(figure, marks, modes),
        asked=f"With which of {len(cells)} families of models, and in which of {len(modes)} ways of generating, does "
        "the pruned cache work?",
        found=f"{len(whole)} families pass everything{others}, and {len(refused)} are refused with a message that says "
        f"why; of all {sum(counts.values())} cells, {failed}.{with_bits}",
        sure="In each cell, a tiny model with random weights on a CPU must generate the right tokens (in bfloat16: "
        "the right logits). This tests the code; it says nothing about text quality, speed or GPUs.",
        tables=[
            "*fused=False*: works with a cache made with `fused=False`. *raises*: refused with a message. *not in "
            "transformers*: a dense cache cannot do it either."
        ],
        details=[
            ("As a table", table(["family", *modes], [[f, *row] for f, row in marks.items()], words=len(modes) + 1)),
            ("Messages of the refused families", messages or ["None."]),
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
    figure.legend(handles=patches, loc="outside lower center", ncols=len(used), fontsize=8)


#: What becomes of a class, and its colour.
OUTCOMES = {
    "works, with a ratio and with bits": GREEN,
    "works, with a ratio only if `fused=False`": BLUE,
    "works in part": ORANGE,
    "refused, with a message that says why": "0.8",
    "a dense cache does not work either": "0.93",
    "no tiny model was made": "white",
}


def outcome_of(found: dict[str, str]) -> str:
    """Say what became of a class, from what its tests returned."""
    works, slow, part, refused, neither, not_built = OUTCOMES
    if "not built" in found:
        return not_built
    marks = {how: said.split(":")[0] for how, said in found.items()}
    if marks.pop("limits", marks.get("ratio")) != marks.get("ratio"):
        return part
    if set(marks.values()) == {"pass"}:
        return works
    if "not in transformers" in marks.values():
        return neither
    if set(marks.values()) == {"raises"}:
        return refused
    return slow if marks == {"ratio": "fused=False", "bits": "pass"} else part


def every_family(value: dict[str, Any]) -> Page:
    """docs/results/every_family.md: every causal language model of transformers."""
    groups: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
    for name, found in sorted(value["classes"].items(), key=lambda each: each[0].lower()):
        groups[outcome_of(found)].append(name)
    whole, slow, part, refused, neither, not_built = groups.values()
    tried = len(value["classes"]) - len(not_built)
    wrong = [
        name for name, found in value["classes"].items() if any(said.startswith("fails") for said in found.values())
    ]
    limited = sum("limits" in found for found in value["classes"].values())
    messages: dict[str, list[str]] = {}
    for name in [*part, *refused, *neither, *not_built]:
        for said in value["classes"][name].values():
            if said not in ("pass", "fused=False"):
                messages.setdefault(said.split(": ", 1)[-1].replace(name, "it"), []).append(name)
                break
    return Page(
        title="Every causal language model of transformers",
        picture="Names of classes, coloured by whether they generate with a smaller cache",
        headline=f"{len(whole)} of {tried} causal language models work, with a ratio and with bits; "
        f"{len(wrong) or 'none'} give{'s' * (len(wrong) < 2)} a wrong token",
        draw=lambda figure: draw_names(figure, groups),
        asked=f"Which of the {len(value['classes'])} causal language models of transformers {value['transformers']} "
        "generate with a smaller cache?",
        found=f"Of {tried} that could be tried, {len(whole)} work, with a ratio and with bits; {len(slow)} more work "
        f"with bits, and with a ratio if it is used with `fused=False`; {len(refused)} are refused, with a message "
        f"that says why; {len(part)} work{'s' * (len(part) == 1)} in part, and {len(neither)} not with a dense cache "
        f"either. {', '.join(wrong) or 'None'} gives a wrong token.",
        sure="A tiny model of each class, with random weights, must generate the right tokens greedily, a padded row "
        "among them, and its cache must hold them. Where a configuration limits a length (a sliding window, a chunk, "
        f"the positions of the first training), as {limited} of them do, the prompt crosses that limit, and with a "
        "ratio, in a run of its own, what is generated does. [Other ways of generating](adapter_matrix.md) are tested "
        "with fewer families.",
        tables=[
            "Nothing is said of speed, or of the quality of texts. Layers with a sliding window stay as they are; "
            "where all layers may have one (Mistral, Mixtral, Phi-3, StarCoder 2 and others), it is switched off here. "
            "Phi-3 and PhiMoE read their text again at the limit of their positions, without the cache, and keep it "
            "only inside a block of `attach`; Phi-4-multimodal forgets its text there, with a dense cache too. "
            "Models with parts for images or sound are too large to be made tiny this way; their text models are tried "
            "by themselves where they have a class of their own."
        ],
        details=[
            (
                "As lists",
                [
                    f"**{outcome[0].upper()}{outcome[1:]}**: {', '.join(names)}.\n"
                    for outcome, names in groups.items()
                    if names
                ],
            ),
            (
                "What the messages say",
                [f"- {', '.join(names)}: {said}" for said, names in messages.items()] or ["None."],
            ),
        ],
    )


def draw_names(figure: Any, groups: dict[str, list[str]], columns: int = 4) -> None:
    """Every name on a field in the colour of its group, down the columns."""
    from matplotlib.patches import Patch, Rectangle

    cells = [(_short(name), OUTCOMES[outcome]) for outcome, names in groups.items() for name in names]
    rows = -(-len(cells) // columns)
    figure.set_size_inches(7.5, 0.9 + 0.155 * rows)
    axes = figure.subplots()
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.axis("off")
    for place, (name, colour) in enumerate(cells):
        column, row = divmod(place, rows)
        axes.add_patch(
            Rectangle((column + 0.01, row + 0.12), 0.05, 0.76, facecolor=colour, edgecolor="0.6", linewidth=0.4)
        )
        axes.text(column + 0.08, row + 0.5, name, fontsize=6.5, va="center")
    patches = [
        Patch(facecolor=OUTCOMES[outcome], edgecolor="0.6", label=outcome.replace("`", ""))
        for outcome, names in groups.items()
        if names
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, fontsize=8)


def _short(name: str) -> str:
    return name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").removesuffix("With")


def test_deep(value: dict[str, Any]) -> Page:
    """docs/results/test_deep.md: every method against the enumerated optimum."""
    methods = value["methods"]
    rows = []
    for name, m in methods.items():
        shares = [f"{100 * m[part] / m['instances']:.2f}" for part in ("optimal", "proved")]
        rows.append([name, f"{m['instances']:,}", *shares, f"{m['exact_off']:.2g}", f"{m['bound_above_optimum']:.2g}"])
    sizes = sorted(map(int, value["sizes"]))
    kinds = ", ".join(f"{name} {count:,}" for name, count in value["kinds"].items())
    proved = methods["branch_and_bound"]["proved"] / methods["branch_and_bound"]["instances"]
    found = methods["portfolio"]["optimal"] / methods["portfolio"]["instances"]
    optimal = "An answer is *optimal* if f is above the optimum by no more."
    return Page(
        title="Tests in depth: every method compared with enumeration",
        picture="Bars: share of instances that each method solves to the optimum, and that it proves",
        headline=f"{value['breaches'] or 'No'} claim{'s are' if value['breaches'] > 1 else ' is'} wrong on "
        f"{value['instances']:,} enumerated instances; branch and bound proves {proved:.0%} of the optima, "
        f"portfolio finds {found:.1%}",
        draw=lambda figure: draw_deep(figure, methods),
        asked=f"On {value['instances']:,} small, difficult instances, is every claim of every method right: sets, "
        "proofs of optimality and lower bounds?",
        found=f"Yes: no set, proof or bound is wrong. Branch and bound proves {proved:.0%} of the optima, and "
        f"portfolio finds {found:.1%} of them."
        if not value["breaches"]
        else f"No: {value['breaches']} claims are wrong; the run printed them.",
        sure=f"Every answer is compared with the enumerated optimum, summed exactly, for n = {sizes[0]} to "
        f"{sizes[-1]}, k and protected vertices drawn at random, and on {value['sdp_instances']:,} more instances for "
        "`sdp`; larger n are not tested this way.",
        tables=[
            "The last two columns are the worst seen, and must not be above 1 and 8.9e-16: f above the optimum where "
            "the method claims a proof, as a share of the allowed rounding; and a lower bound above the optimum, as a "
            "share of the optimum.",
            "",
            *table(
                ["method", "instances", "optimal, %", "proved optimal, %", "f above a proved optimum",
                 "bound above the optimum"],
                rows,
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    f"The run took {value['seconds']:.0f} s. The rounding allowed for a proof is "
                    f"max({value.get('rtol', 1e-9):g} |f|, 64 n eps Σ|W_ij| over the chosen entries). {optimal}",
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


PAGES = {"adapter_matrix": adapter_matrix, "every_family": every_family, "test_deep": test_deep}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pages_of_tests", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PAGES)} (default: both)")
    parser.add_argument("--allow-dirty", action="store_true", help="accept changed files; the page says so")
    args = parser.parse_args(given)
    if unknown := [name for name in args.names if name not in PAGES]:
        parser.error(f"no such page: {unknown[0]}")
    for name in args.names or PAGES:
        value = read_results(RESULTS / name)
        write_results(RESULTS / name, value, PAGES[name], allow_dirty=args.allow_dirty, measured=False)


if __name__ == "__main__":
    main()
