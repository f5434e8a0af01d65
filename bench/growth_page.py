"""The page of `bench.growth`, made from its JSON file alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from bench.report import BLACK, BLUE, GREEN, ORANGE, Page, table

#: Bits that are asked for, number of tokens fed in one step, and of those of which a mean is reported.
BITS, STEP, WINDOW = 2.25, 32, 256
#: Windows to a line of the table.
LINE = 4


def _ends(texts: list[dict[str, Any]]) -> tuple[float, ...]:
    """Means over texts: the KL of the first tokens, of the last, and of these after a prompt with all before them."""
    found = [(one["kl"][0], one["kl"][-1], one["at_once"]) for one in texts]
    return tuple(statistics.fmean(each) for each in zip(*found, strict=True))


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, list[dict[str, Any]]] = {label: of["texts"] for label, of in value["models"].items()}
    joint = {label: [one["trellis"] for one in texts] for label, texts in models.items()}
    ends = {label: _ends(texts) for label, texts in joint.items()}
    worst = max(ends, key=lambda label: ends[label][1])
    (first, last, once), plain = ends[worst], _ends(models[worst])
    int4 = statistics.fmean(one["int4"][-1] for one in models[worst])
    others = ", ".join(f"{label}: {each:.4f}" for label, (_, each, _) in ends.items() if label != worst)
    bits = [each for texts in models.values() for one in texts for each in one["bits"]]
    rows, own = [], []
    for label, texts in models.items():
        every = [
            *((those, name) for those in (joint[label], texts) for name in ("kl", "exact")),
            *((texts, name) for name in ("int4", "bits")),
        ]
        for start in range(0, value["tokens"] // WINDOW, LINE):
            stop = min(start + LINE, value["tokens"] // WINDOW)
            parts = [[x for one in those for x in one[name][start:stop]] for those, name in every]
            means = [f"{statistics.fmean(part):.4f}" for part in parts[:-1]]
            range_of_bits = f"{min(parts[-1]):.2f} to {max(parts[-1]):.2f}"
            rows.append([label, f"{start * WINDOW:,} to {stop * WINDOW:,}", *means, range_of_bits])
        for one in texts:
            for name, of in ((one["name"], one["trellis"]), (f"{one['name']}, `trellis=False`", one)):
                numbers = (of["kl"][0], of["kl"][-1], of["exact"][-1], one["int4"][-1], of["at_once"])
                own.append([label, name, *(f"{x:.4f}" for x in numbers)])
    count = len(models)
    return Page(
        title="A long generation",
        picture="KL divergence from the dense cache's next-token distributions by tokens after the prompt, on a "
        "logarithmic scale, a panel per model: as generated, of coding alone, int4, and with all tokens as the prompt",
        headline=f"{value['tokens']:,} tokens later, bits={BITS:g} has a KL of {last:.4f}, int4 one of {int4:.4f}"
        + f" ({worst}, the worst of {count} models)" * (count > 1),
        draw=lambda figure: _draw(figure, models, value["prompt"]),
        asked=f"What becomes of `bits={BITS:g}` while {value['tokens']:,} tokens come after a prompt of "
        f"{value['prompt']:,}?",
        found=f"On {worst}, KL is {first:.4f} over the first {WINDOW} tokens and {last:.4f} over the last"
        + f", the most of {count} models ({others})" * (count > 1)
        + f"; int4 has {int4:.4f} there. After a prompt that has all but the last, it is {once:.4f}. With "
        f"`trellis=False`: {plain[0]:.4f}, {plain[1]:.4f} and {plain[2]:.4f}. With tokens that wait for their classes, "
        f"the bits are {min(bits):.2f} to {max(bits):.2f}.",
        sure=f"Measured on {count} small model{'s' * (count > 1)} and {len(models[worst])} texts{' each' * (count > 1)}"
        ", whose own tokens are fed; errors are passed on as in a generation, but not by other tokens.",
        tables=table(
            [
                *("model", "tokens after the prompt", "KL", "of coding alone"),
                *("KL, `trellis=False`", "of coding alone, `trellis=False`", "int4", "bits"),
            ],
            rows,
            2,
        ),
        details=[
            (
                "By text",
                table(
                    [
                        *("model", "text", f"KL, first {WINDOW}", f"last {WINDOW}", "of coding alone", "int4"),
                        "all but these as prompt",
                    ],
                    own,
                    2,
                ),
            ),
            (
                "How it is measured",
                [
                    f"Tokens are fed in steps of {STEP}; int4 codes them in blocks of 64. Later tokens read the "
                    "compressed cache, so their own keys and values differ from the dense cache's, and errors are "
                    "passed on; *of coding alone* is the KL of a cache that codes the dense cache's keys and values. "
                    "Newer tokens wait in more bits, fewer than 1,024 of them, until the oldest are coded: *bits* "
                    "counts them. Layers with sliding windows stay dense, and no bits count them."
                ],
            ),
        ],
    )


def _draw(figure: Figure, models: Mapping[str, list[dict[str, Any]]], prompt: int) -> None:
    figure.set_size_inches(max(8, 4 * len(models)), 4.2)
    every = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (label, texts) in zip(every, models.items(), strict=True):
        places = [(number + 0.5) * WINDOW for number in range(len(texts[0]["kl"]))]
        joint = [one["trellis"] for one in texts]
        drawn = (
            (joint, "kl", f"bits={BITS:g}", BLUE, "-"),
            (joint, "exact", "of coding alone", BLUE, "--"),
            (texts, "int4", "int4", ORANGE, "-"),
            (texts, "kl", f"bits={BITS:g}, trellis=False", GREEN, "-"),
        )
        for those, name, what, colour, line in drawn:
            for one in those:
                axes.plot(places, one[name], color=colour, linestyle=line, linewidth=0.6, alpha=0.5)
            means = [statistics.fmean(each) for each in zip(*(one[name] for one in those), strict=True)]
            axes.plot(places, means, color=colour, linestyle=line, linewidth=2, label=what)
        once = statistics.fmean(one["at_once"] for one in joint)
        axes.plot(places[-1:], [once], "o", color=BLACK, label=f"bits={BITS:g}, all as the prompt")
        axes.set_yscale("log")
        axes.set_title(label)
        axes.set_xlabel(f"tokens after a prompt of {prompt:,}")
    every[0].set_ylabel(f"KL, nats (means of {WINDOW})")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
