"""docs/results/arena.md from the records of `bench.arena`: picture, three sentences, ratios, tables.

When: the script calls it, after a measurement or with ``--report-only``. Source: intervals are `grace_opt.sweep`'s
(bootstrap over passages, paired for ratios).
"""

from __future__ import annotations

from typing import Any

from bench.arena.contenders import OURS
from bench.arena.numbers import REPORTED, best, families, interval, mean, names, numbers, told
from bench.arena.run import BOTH_HALVES
from bench.arena.tables import ablation, chat, kinds, methods, ratios, retrieval, sources
from bench.report import BLUE, GREEN, GREY, ORANGE, PINK, RED, Page
from grace_opt.sweep.bootstrap import RESAMPLES

#: Methods that the page shows unfolded, where they were measured.
SHOWN = BOTH_HALVES
#: Families in the picture: ours, the nearest of others, pruned channels and evicted tokens. The tables have all.
LINES = {OURS: BLUE, "RDKV": ORANGE, "Block-GTQ": GREEN, "TurboQuant": RED, "H2O": PINK, "GRACE": GREY}
SHARES = (6, 10, 15, 20, 30, 50, 75, 100)
#: What the 95 % intervals are narrowed to if a logarithmic scale cannot show them.
LEAST = 1e-5


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    kept = len({one["kind"] for one in value["passages"]})
    half = told(value, "passages")
    count = sum(one["half"] == half for one in value["passages"])
    sure = (
        f"This is one small model and {count} passages of {kept} kinds of text, on which none of our settings was "
        "chosen; peers are our implementations from their papers, untuned; 95 % intervals are over passages."
        if half == REPORTED
        else "**Only half A of the passages**, on which settings were chosen: not to be reported."
    )
    if value["without"]:
        sure += f" **Left out**: {', '.join(value['without'])}."
    short = [*_columns(value), "", f"**{value['tokens']:,} tokens**, some of the methods (all of them below):", ""]
    short += methods(value, "passages", SHOWN)
    long = []
    if value["long"]:
        number = sum(one["half"] == told(value, "long") for one in value["long"])
        long = [f"**{value['long_tokens']:,} tokens**, {number} passages of half {told(value, 'long')}:", ""]
        long += methods(value, "long")
    return Page(
        title="The arena",
        picture="KL divergence from the dense cache's next-token distributions by bytes of the whole cache, both on "
        "logarithmic scales, one line for each of six methods",
        headline=_headline(value),
        draw=lambda figure: _draw(figure, value),
        asked=f"At equal bytes, which way to a smaller cache leaves the next-token distributions of {value['model']} "
        "nearest to those of a dense cache?",
        found=_found(value),
        sure=sure,
        tables=[*ratios(value), *short, *long, *retrieval(value), *chat(value)],
        details=[
            (f"Every method, {value['tokens']:,} tokens", methods(value, "passages")),
            ("What each part is worth", ablation(value)),
            ("What did not work", _in_vain()),
            ("By kind of text", kinds(value)),
            ("Sources of the methods", sources(value)),
            ("How it is counted", _counted(value)),
        ],
    )


def _found(value: dict[str, Any]) -> str:
    """One sentence: ours beside the best of others of about the same bits, or of more."""
    measured, parts = names(value, "passages"), []
    for name, least, most in (("bits-3", 3, 5.1), ("bits-2.25", 2.2, 3.05), ("bits-1", 0.9, 2.1)):
        other = best(value, "passages", least, most)
        if name not in measured:
            continue
        words = f"`bits={name.removeprefix('bits-')}` {mean(value, 'passages', name, 'kl'):.4f}"
        if other is not None:
            share = mean(value, "passages", name, "kl") / mean(value, "passages", other, "kl")
            bits, kl = (mean(value, "passages", other, part) for part in ("bits", "kl"))
            words += f" (the best of others at {least:g} to {most:.0f} bits: {value['methods'][other]['title']}, "
            words += f"{kl:.4f} at {bits:.2f}; ours × {share:.2f})"
        parts.append(words)
    return f"KL in nats: {'; '.join(parts)}." if parts else "Nothing of ours was measured."


def _headline(value: dict[str, Any]) -> str:
    """What the picture says: ours beside the best of others with as many bits, or up to .8 more."""
    other = best(value, "passages", 2.2, 3.05)
    if other is None or "bits-2.25" not in names(value, "passages"):
        return "Next-token KL by bytes of the cache"
    ours, theirs = (mean(value, "passages", name, "kl") for name in ("bits-2.25", other))
    title = value["methods"][other]["title"].partition(",")[0].replace("`", "")
    if ours < theirs:
        return f"bits=2.25 leaves a KL {theirs / ours:.0f} times smaller than the best other at 2.2 to 3 bits ({title})"
    return f"{title} leaves a KL {ours / theirs:.1f} times smaller than bits=2.25, at 2.2 to 3 bits"


def _draw(figure: Any, value: dict[str, Any]) -> None:
    """KL by bytes, a line for each of `LINES` that was measured, with intervals over passages."""
    figure.set_size_inches(8, 4.8)
    axes, found = figure.subplots(), families(value, "passages")
    for family, colour in LINES.items():
        if not (measured := found.get(family)):
            continue
        x = [100 * mean(value, "passages", name, "share") for name in measured]
        kls = [interval(value, "passages", name, "kl") for name in measured]
        y = [max(one.estimate, LEAST) for one in kls]
        low, high = [max(one.low, LEAST) for one in kls], [max(one.high, LEAST) for one in kls]
        if kls[0].n < 2:  # a single passage shows no spread
            low = high = y
        wide = 2.4 if family == OURS else 1.2
        axes.plot(x, y, "o-", color=colour, label=family.replace("`", ""), linewidth=wide, markersize=4)
        axes.vlines(x, low, high, color=colour, linewidth=0.9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(SHARES, [f"{tick:g} %" for tick in SHARES])
    axes.set_xlim(5.5, 110)
    axes.set_xlabel("bytes of the whole cache, of a dense one in 16 bits")
    axes.set_ylabel("next-token KL from dense, nats")
    axes.legend()


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


def _columns(value: dict[str, Any]) -> list[str]:
    count = len(numbers(value, "passages", names(value, "passages")[0], "kl"))
    return [
        f"Means over {count} passages, with 95 % intervals. *Bits*: mean per element of the compressed tokens, "
        "everything counted; an evicted token is a compressed one of 0 bits. *% of 16 bits*: K and V after the prompt, "
        "all tokens, compared with a dense cache in 16 bits. *ΔNLL*: of the text's own tokens, nats per token. "
        "*Seconds*: to store the prompt; peers are written to be right, not fast. A method that cannot have a number "
        "of bits stands at its own."
    ]


def _counted(value: dict[str, Any]) -> list[str]:
    texts = "; ".join(dict.fromkeys(one["name"] for one in value["passages"]))
    longer = "; ".join(dict.fromkeys(one["name"] for one in value["long"])) or "none"
    calibration = value["calibration"]
    return [
        f"{value['model']} in float32; passages of {value['tokens']:,} tokens, of which the last {value['later']} are "
        f"fed in one forward pass on the compressed cache and stay dense. Of a prompt, the first {value['sinks']} and "
        f"the last {value['window']} tokens stay dense, unless a method has its own windows. Texts: {texts}. Long "
        f"passages: {longer}.",
        "",
        f"- The basis is calibrated on texts that ship with grace_opt ({calibration['texts']} texts, "
        f"{calibration['tokens']:,} tokens, {calibration['seconds']:.0f} s); none of them is measured on.",
        "- Each text gives a passage to half A, on which settings were chosen, and one to half B.",
        "- *KL*(dense ‖ compressed), mean over the later tokens, then over passages. Intervals: bootstrap over "
        f"passages or cases, {RESAMPLES:,} resamples.",
        "- Parameters of codes have 16 bits in any model. A method that only reconstructs tensors states its count of "
        "bits; it is refused if that is no compression, or if its tensors are unchanged.",
        "- Evictions at the bytes of `bits=` keep as many tokens as fit, their positions included.",
    ]
