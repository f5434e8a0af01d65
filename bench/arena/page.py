"""docs/results/arena.md from the records of `bench.arena`: picture, three sentences, ratios, tables.

When: the script calls it, after a measurement or with ``--report-only``. Source: intervals are `grace_opt.sweep`'s
(bootstrap over passages, paired for ratios).
"""

from __future__ import annotations

from typing import Any

from bench.arena.contenders import OURS
from bench.arena.numbers import BOTH, REPORTED, best, families, interval, mean, names, told
from bench.arena.run import BOTH_HALVES
from bench.arena.tables import (
    Models,
    ablation,
    chat,
    compared,
    halves,
    kinds,
    methods,
    ratios,
    retrieval,
    sources,
    span,
    titles,
)
from bench.report import BLUE, GREEN, GREY, ORANGE, PINK, RED, Page
from grace_opt.sweep.bootstrap import RESAMPLES

#: Methods that the page shows unfolded, where they were measured.
SHOWN = BOTH_HALVES
#: Families in the picture: ours, the nearest of others, pruned channels and evicted tokens. The tables have all.
LINES = {OURS: BLUE, "RDKV": ORANGE, "Block-GTQ": GREEN, "TurboQuant": RED, "H2O": PINK, "GRACE": GREY}
BITS = (1, 1.5, 2, 3, 4, 6, 8, 12)
#: What the 95 % intervals are narrowed to if a logarithmic scale cannot show them.
LEAST = 1e-5


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, Any] = value["models"]
    kept = len({one["kind"] for of in models.values() for one in of["passages"]})
    count = span(_reported(of, "passages") for of in models.values())
    few = "This is one small model and" if len(models) == 1 else f"These are {len(models)} small models and, for each,"
    sure = (
        f"{few} {count} passages of {kept} kinds of text, on which none of our settings was chosen; peers are "
        "our implementations from their papers, untuned; 95 % intervals are over passages."
        if halves(models) == REPORTED
        else "**Half A of the passages**, on which settings were chosen: not to be reported."
    )
    if without := [f"on {label}: {', '.join(of['without'])}" for label, of in models.items() if of["without"]]:
        sure += f" **Left out** {'; '.join(without)}."
    shares = ratios(models)
    if shares:
        said = f"**KL of ours as a share of that of others**, half {halves(models)}: ratios of means over passages, "
        shares = [said + "with 95 % intervals, paired.", "", *shares, ""]
    longer = {label: of for label, of in models.items() if of["long"]}
    long = []
    if longer:
        tokens = span(of["long_tokens"] for of in longer.values())
        number = span(_reported(of, "long") for of in longer.values())
        long = [f"**{tokens} tokens**, KL in nats, {number} passages of half {halves(longer, 'long')}:", ""]
        long += compared(longer, "long")
    return Page(
        title="The arena",
        picture="KL divergence from the dense cache's next-token distributions by bits per element of the compressed "
        "tokens, both on logarithmic scales, a panel for each model and a line for each of six methods",
        headline=_headline(models),
        draw=lambda figure: _draw(figure, models),
        asked="At equal bytes, which way to a smaller cache leaves a model's next-token distributions nearest to those "
        "of a dense cache?",
        found=_found(models),
        sure=sure,
        tables=[
            *shares,
            f"**{value['tokens']:,} tokens**, KL in nats, means over {count} passages of half {halves(models)} with "
            "95 % intervals, some of the methods (all of them below). *Bits*: mean per element of the compressed "
            "tokens, everything counted; an evicted token is a compressed one of 0 bits. A method that cannot have a "
            "number of bits stands at its own.",
            "",
            *compared(models, "passages", SHOWN),
            *long,
            *retrieval(models),
            *chat(models),
        ],
        details=[
            *((f"Every method, {label}", _every(value["tokens"], of)) for label, of in models.items()),
            ("Shares of the KL of others on both halves", ratios(models, half=BOTH)),
            *([("Shares of the KL of others on long passages", ratios(longer, "long"))] if longer else []),
            ("What each part is worth", ablation(models)),
            ("What did not work", _in_vain()),
            ("By kind of text", kinds(models, SHOWN)),
            ("Sources of the methods", sources(models)),
            ("How it is counted", _counted(value)),
        ],
    )


def _reported(of: dict[str, Any], part: str) -> int:
    return sum(one["half"] == told(of, part) for one in of[part])


#: Ours, and the bits that the best of others may have.
BESIDE = (("bits-2.25", 2.2, 3.05), ("bits-3", 3, 5.1), ("bits-1", 0.9, 2.1))


def _shares(models: Models, name: str, least: float, most: float) -> dict[str, tuple[float, str]]:
    """Return the KL of ours as a share of that of the best of others, and its name, by model, the worst first."""
    found = {}
    for label, of in models.items():
        other = best(of, "passages", least, most)
        if other is not None and name in names(of, "passages"):
            found[label] = mean(of, "passages", name, "kl") / mean(of, "passages", other, "kl"), other
    return dict(sorted(found.items(), key=lambda each: -each[1][0]))


def _found(models: Models) -> str:
    """Return a sentence for each of `BESIDE`: ours beside the best of others, on its worst model."""
    said = []
    for name, least, most in BESIDE:
        title, shares = f"`bits={name.removeprefix('bits-')}`", _shares(models, name, least, most)
        kl = {label: mean(of, "passages", name, "kl") for label, of in models.items() if name in names(of, "passages")}
        if shares:
            (worst, (share, other)), *rest = shares.items()
            others = ", ".join(f"{label}: {each:.2f}" for label, (each, _) in rest)
            theirs, bits = (mean(models[worst], "passages", other, part) for part in ("kl", "bits"))
            said.append(
                f"{title} has {share:.2f} times the KL of the best of others at {least:g} to {most:.0f} bits on {worst}"
                f"{f', where it does worst ({others})' if others else ''}: {kl[worst]:.4f} nats beside {theirs:.4f} of "
                f"{titles(models)[other]}, at {bits:.2f} bits."
            )
        elif kl:
            worst = max(kl, key=kl.__getitem__)
            said.append(f"{title} has a KL of {kl[worst]:.4f} on {worst}; none of the others has so few bits.")
    return " ".join(said) or "Nothing of ours was measured."


def _headline(models: Models) -> str:
    """What the picture says: on its worst model, ours beside the best of others with as many bits, or up to .8 more."""
    shares = _shares(models, *BESIDE[0])
    if not shares:
        return "Next-token KL by bits per element"
    worst, (share, other) = next(iter(shares.items()))
    title = titles(models)[other].partition(",")[0].replace("`", "")
    where = worst + f", the worst of {len(shares)} models" * (len(shares) > 1)
    if share < 1:
        less = f"{1 / share:.{int(share > 0.1)}f} times smaller"
        return f"bits=2.25 leaves a KL {less} than the best other at 2.2 to 3 bits ({title}; {where})"
    return f"{title} leaves a KL {share:.1f} times smaller than bits=2.25, at 2.2 to 3 bits ({where})"


def _draw(figure: Any, models: Models) -> None:
    """KL by bits, a panel for each model and a line for each of `LINES`, with intervals over passages."""
    figure.set_size_inches(max(8, 4 * len(models)), 4.4)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (label, of) in zip(panels, models.items(), strict=True):
        found = families(of, "passages")
        for family, colour in LINES.items():
            measured = found.get(family, [])
            x = [mean(of, "passages", name, "bits") for name in measured]
            kls = [interval(of, "passages", name, "kl") for name in measured]
            wide = 2.4 if family == OURS else 1.2
            y = [max(one.estimate, LEAST) for one in kls]
            axes.plot(x, y, "o-", color=colour, label=family.replace("`", ""), linewidth=wide, markersize=4)
            if kls and kls[0].n > 1:  # a single passage shows no spread
                low, high = ([max(getattr(one, end), LEAST) for one in kls] for end in ("low", "high"))
                axes.vlines(x, low, high, color=colour, linewidth=0.9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_xticks(BITS, [f"{tick:g}" for tick in BITS])
        axes.set_xlim(0.9, 14)
        axes.set_xlabel("bits per element of compressed tokens")
        axes.set_title(label)
    panels[0].set_ylabel("next-token KL from dense, nats")
    panels[0].legend(loc="lower right")


def _every(tokens: int, of: dict[str, Any]) -> list[str]:
    """Return all methods on one model."""
    lines = [
        f"Passages of {tokens:,} tokens. *% of 16 bits*: K and V after the prompt, all tokens, compared with a dense "
        "cache in 16 bits. *ΔNLL*: of the text's own tokens, nats per token. *Seconds*: to store the prompt; peers are "
        "written to be right, not fast.",
        "",
        *methods(of, "passages"),
    ]
    if of["long"]:
        lines += ["", f"Passages of {of['long_tokens']:,} tokens.", "", *methods(of, "long")]
    return lines


def _in_vain() -> list[str]:
    """What was tried for `bits=` and is not in it, with where its numbers are."""
    return [
        "- Shares of layers and heads by local errors, the prompt's own basis, two classes, a higher floor of token "
        "weights, attention of later queries only: all worse in [the ablation of `bits=`](bits.md). Attention of the "
        "last 32 queries only: less KL on one half of the passages, more on the other.",
        "- Channels with 0 bits that interact, as in the paper's problem: "
        "[nothing to gain](../adr/0010-dividing-a-budget.md#what-was-taken-out).",
        "- Our classes of tokens for other people's quantisers, and codes beyond scalar ones: "
        "[measured once](../adr/0012-comparing-caches.md#decision).",
    ]


def _counted(value: dict[str, Any]) -> list[str]:
    models: dict[str, Any] = value["models"]
    texts, longer = (
        "; ".join(dict.fromkeys(one["name"] for of in models.values() for one in of[part])) or "none"
        for part in ("passages", "long")
    )
    made = [of["calibration"] for of in models.values()]
    return [
        f"In float32; passages of {value['tokens']:,} tokens, of which the last {value['later']} are fed in one "
        f"forward pass on the compressed cache and stay dense. Of a prompt, the first {value['sinks']} and the last "
        f"{value['window']} tokens stay dense, unless a method has its own windows; so do layers that slide over a "
        f"window, whatever the method. Texts: {texts}. Long passages: {longer}.",
        "",
        f"- The basis is calibrated on texts that ship with grace_opt ({span(each['texts'] for each in made)} texts, "
        f"{span(each['tokens'] for each in made)} tokens, {span(round(each['seconds']) for each in made)} s); none of "
        "them is measured on.",
        "- Each text gives a passage to half A, on which settings were chosen, and one to half B.",
        "- *KL*(dense ‖ compressed), mean over the later tokens, then over passages. Intervals: bootstrap over "
        f"passages or cases, {RESAMPLES:,} resamples.",
        "- Parameters of codes have 16 bits in any model. A method that only reconstructs tensors states its count of "
        "bits; it is refused if that is no compression, or if its tensors are unchanged.",
        "- Evictions at the bytes of `bits=` keep as many tokens as fit, their positions included.",
    ]
