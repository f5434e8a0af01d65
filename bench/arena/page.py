"""docs/results/arena.md from the records of `bench.arena`: picture, three sentences, ratios, tables.

When: the script calls it, after a measurement or with ``--report-only``. Source: intervals are `grace_opt.sweep`'s
(bootstrap over passages, paired for ratios).
"""

from __future__ import annotations

from typing import Any

from bench.arena.figure import draw
from bench.arena.numbers import REPORTED, best, mean, names, numbers, told
from bench.arena.plan import BOTH_HALVES
from bench.arena.tables import ablation, chat, kinds, methods, ratios, retrieval, sources
from bench.report import Page
from grace_opt.sweep.bootstrap import RESAMPLES

#: Methods that the page shows unfolded, where they were measured.
SHOWN = BOTH_HALVES


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
        picture="KL divergence from the dense cache's next-token distributions, on a logarithmic scale, one line per "
        "method: by bits per element of compressed tokens, and by bytes of the whole cache",
        draw=lambda figure: draw(figure, value),
        asked=f"At equal bytes, which way to a smaller cache leaves the next-token distributions of {value['model']} "
        "nearest to those of a dense cache?",
        found=_found(value),
        sure=sure,
        tables=[*ratios(value), *short, *long, *retrieval(value), *chat(value)],
        details=[
            (f"Every method, {value['tokens']:,} tokens", methods(value, "passages")),
            ("What each part is worth", ablation(value)),
            ("What did not work", _in_vain(value)),
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


def _in_vain(value: dict[str, Any]) -> list[str]:
    """What was tried for `bits=` and is not in it, with where its numbers are."""
    lines = [
        "- Shares of layers and heads by local errors, the prompt's own basis, two classes, a higher floor of token "
        "weights, attention of later queries only: all worse in [the ablation of `bits=`](bits.md). Attention of the "
        "last 32 queries only: less KL on one half of the passages, more on the other.",
        "- Channels with 0 bits that interact, as in the paper's problem: "
        "[nothing to gain](../adr/0010-dividing-a-budget.md#what-was-taken-out).",
    ]
    rows = [
        (bits, *(mean(value, "passages", name, "kl") for name in found))
        for bits in ("3", "2.25", "2", "1")
        if {*(found := (f"bits-{bits}", f"reference-entropy-{bits}", f"reference-{bits}-classes"))}
        <= {*names(value, "passages")}
    ]
    if rows:
        told_rows = "; ".join(f"{bits} bits: {ours:.4f}, {even:.4f}, {ideal:.4f}" for bits, ours, even, ideal in rows)
        lines.append(
            "- Codes beyond scalar ones, on paper. KL of `bits=`, of even steps at their entropy with the same "
            f"decisions, and of the test channel with classes: {told_rows}. The second cannot be read in place, and is "
            "no part of `bits=`."
        )
    return lines


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
