"""The page of `bench.reading`, made from its JSON file alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from bench.caches import SINKS, WINDOW
from bench.intervals import with_ends
from bench.report import BLACK, BLUE, GREEN, ORANGE, Page, small, table
from grace_opt.attention.provider import DEFAULT_RATIO
from grace_opt.hf import TopTokens
from grace_opt.sweep import mean_interval

#: Tokens whose unread attention is measured, of those that are fed.
TRUE = 4
#: Share of the channels that do not give scores, and a name for what ``read="channels"`` means, with the usual ratio.
RATIO, USUAL = 0.5, "channels, as usual"
#: What the issue asks for: share of the tokens, and KL.
GOAL = (0.25, 0.002)

#: The numbers of all texts of a model, by way to read and kind of number.
Numbers = Mapping[str, Mapping[str, Sequence[float]]]


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models, prompts, count = value["models"], sorted(value["prompts"]), len(value["models"])
    largest = prompts[-1]
    numbers = {
        prompt: {label: _numbers(of["texts"], prompt, value["ways"]) for label, of in models.items()}
        for prompt in prompts
    }
    texts = len(numbers[largest][next(iter(models))][USUAL]["kl"])
    tables, bounds, least = list[str](), list[str](), []
    for prompt, of_models in numbers.items():
        rows, known = [], []
        for name in value["ways"]:
            every = [own[name] for own in of_models.values()]
            pairs = [(f"{_mean(one, 'share'):.1%}", with_ends(mean_interval(one["kl"]))) for one in every]
            rows.append([name, *(cell for pair in pairs for cell in pair)])
            kinds = ("bound", "first_bound", "unread")
            known.append([name, *(" / ".join(f"{_mean(one, kind):.3f}" for kind in kinds) for one in every)])
        head = ["read", *(f"{label}: {what}" for label in models for what in ("share read", "KL, nats"))]
        tables += [f"After {prompt:,} tokens, means over {texts} texts, with 95 % intervals:", "", *table(head, rows)]
        bounds += [f"After {prompt:,} tokens:", "", *table(["read", *models], known)]
        least.append(_least(of_models, prompt))
    ratios = {label: _ratios(of["ms"]) for label, of in models.items()}
    timed, rows = list(next(iter(ratios.values()))), []
    for name in timed:
        row = [name]
        for label, of in models.items():
            low, middle, high = _quarters(ratios[label][name])
            own, whole = (statistics.median(of["ms"][name][key]) for key in ("own", "all"))
            row += [f"{own:.1f} / {whole:.1f}", f"{middle:.2f} {small(f'[{low:.2f}, {high:.2f}]')}"]
        rows.append(row)
    head = ["read", *(f"{label}: {what}" for label in models for what in ("ms / all read", "ratio, middle half"))]
    tables += [f"Whole steps after {largest:,} tokens, in turn with steps that read all:", "", *table(head, rows)]
    times = {name: _span([statistics.median(of[name]) for of in ratios.values()], ".2f") for name in timed}
    usual = [own[USUAL] for own in numbers[largest].values()]
    bound, unread = (_span([_mean(one, kind) for one in usual], ".3f") for kind in ("first_bound", "unread"))
    return Page(
        title="Reading few tokens",
        picture=f"KL divergence by the share of the tokens read, after {largest:,} tokens, a panel per model: pages, "
        "channels, channels with a share of the attention, and samples; grey lines are what was aimed at",
        headline=_headline(numbers[largest], largest),
        draw=lambda figure: _draw(figure, numbers[largest]),
        asked="How few tokens can a step read, what does it save, and what does the cache know of the rest?",
        found=f"With at most {GOAL[0]:.0%} of the tokens read, the best KL"
        + f" on the worst of {count} models" * (count > 1)
        + f" is {' and '.join(least)}. A step's time after {largest:,} tokens, as a multiple of that which reads all"
        + ", from model to model" * (count > 1)
        + f": {', '.join(f'`{name}` {each}' for name, each in times.items())}. `{USUAL}` bounds the attention on what "
        f"it did not read by {bound} there, where it was {unread}.",
        sure=f"Measured on {count} small model{'s' * (count > 1)} and {texts} texts{' each' * (count > 1)}, whose own "
        "tokens are fed.",
        tables=tables,
        details=[
            (
                "Bounds on what was not read",
                [
                    f"Bound / bound of the first {TRUE} tokens / true share unread of these. The bound is the mean "
                    "over heads, layers and steps of what the unread tokens' share of the attention can be at most.",
                    "",
                    *bounds,
                ],
            ),
            (
                "How it is measured",
                [
                    f"Sinks ({SINKS}), the last {WINDOW} tokens of the prompt and what is fed are always read and "
                    f"counted. Channels: a share {RATIO:g} of them, chosen by GRACE, gives no scores; *as usual* is "
                    f'`read="channels"`: {DEFAULT_RATIO:g}, with `top_p={TopTokens(by="channels").top_p}`. '
                    "*Sampling*: tables, and bits of a code (MagicPIG's are 150 and 10); each bound holds at "
                    f"{TopTokens(by='sampling').confidence:.0%} confidence. Layers with sliding windows read all that "
                    f"they keep, and are not counted. The aim was a KL of {GOAL[1]:g} or less with at most "
                    f"{GOAL[0]:.0%} of the tokens read."
                ],
            ),
        ],
    )


def _numbers(texts: Sequence[Mapping[str, Any]], prompt: int, ways: Sequence[str]) -> Numbers:
    every = [one["rows"] for one in texts if one["prompt"] == prompt]
    return {name: {key: [rows[name][key] for rows in every] for key in every[0][name]} for name in ways}


def _mean(numbers: Mapping[str, Sequence[float]], kind: str) -> float:
    return statistics.fmean(numbers[kind])


def _best(models: Mapping[str, Numbers]) -> dict[str, tuple[float, float, str]]:
    """Return KL, share and name of each model's nearest way to dense attention within the goal's share, worst first."""
    found = {}
    for label, numbers in models.items():
        means = [(_mean(one, "kl"), _mean(one, "share"), name) for name, one in numbers.items()]
        found[label] = min((each for each in means if each[1] <= GOAL[0]), default=(math.inf, 1.0, ""))
    return dict(sorted(found.items(), key=lambda each: -each[1][0]))


def _least(models: Mapping[str, Numbers], prompt: int) -> str:
    """Return the least KL within the goal's share on the worst model, and on the others."""
    best = _best(models)
    kl = {label: f"{each:.4f}" if name else "unknown" for label, (each, _, name) in best.items()}
    worst, *others = best
    _, share, way = best[worst]
    said = [f"{worst}, `{way}`, {share:.1%} read" if way else f"{worst}, where every way reads more"]
    said += [f"{label}: {kl[label]}" for label in others]
    return f"{kl[worst]} after {prompt:,} tokens ({'; '.join(said)})"


def _headline(models: Mapping[str, Numbers], prompt: int) -> str:
    """What the picture says of its ways to read."""
    worst, (kl, share, way) = next(iter(_best(models).items()))
    of = worst + f", the worst of {len(models)} models" * (len(models) > 1)
    if not way:
        return f"No way reads {GOAL[0]:.0%} or less of {prompt:,} tokens ({of})"
    return f"{share:.0%} of {prompt:,} tokens read leave a KL of {kl:.4f} at best ({way}; {of})"


def _ratios(ms: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    return {name: [a / b for a, b in zip(of["own"], of["all"], strict=True)] for name, of in ms.items()}


def _quarters(numbers: Sequence[float]) -> Sequence[float]:
    return statistics.quantiles(numbers, n=4) if len(numbers) > 1 else [*numbers] * 3


def _span(numbers: Sequence[float], form: str) -> str:
    low, high = (f"{each(numbers):{form}}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def _draw(figure: Figure, models: Mapping[str, Numbers]) -> None:
    figure.set_size_inches(max(8, 4 * len(models)), 4)
    every = figure.subplots(1, len(models), sharex=True, sharey=True, squeeze=False)[0]
    looks = {"pages, 0": BLUE, "channels, 0": ORANGE, "channels, top_p": BLACK, "sampling": GREEN}
    for axes, (label, numbers) in zip(every, models.items(), strict=True):
        for begins, colour in looks.items():
            ways = [one for name, one in numbers.items() if name.startswith(begins)]
            points = sorted((_mean(one, "share"), _mean(one, "kl")) for one in ways)
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=begins.removesuffix(", 0"))
        axes.axvline(GOAL[0], color="0.7", linewidth=0.8)
        axes.axhline(GOAL[1], color="0.7", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_title(label)
        axes.set_xlabel("share of the tokens read")
    every[0].set_ylabel("KL, nats")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
