"""Bytes of the key-value cache of three models, by what stores it: ``python -m bench.cache_bytes``.

Ours is a formula that is checked against `CompressedCache.memory_report` of real tensors, one layer of each shape at
every length and ratio, and must equal it to the byte; all layers of a model are alike. The layouts of others are
formulas, or what their papers say. Writes docs/results/cache_bytes.{json,md,png}.

Source: ThinK (arXiv 2407.21018) and its code (github.com/SalesforceAIResearch/ThinK: ``repeat_kv`` before
``update_think``); LeanK (arXiv 2508.02215), abstract; shapes from the models' ``config.json``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.provenance import require_clean
from bench.report import BLACK, BLUE, GREY, ORANGE, PINK, Page, add_options, bars, read_results, table, write_results
from grace_opt.attention.weights import prune_count
from grace_opt.hf import CompressedCache, MemoryReport

LENGTHS, RATIOS = (8192, 32768, 131072), (0.5, 0.6, 0.7)
RECENT, ITEM, INDEX = 32, 2, 8  # dense tokens; bytes of a 16-bit number and of a kept index
#: Shares of K and of V that LeanK's paper says remain.
LEANK_K, LEANK_V = 0.30, (0.84, 0.82)
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """What a model's cache depends on."""

    models: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int


SHAPES = (
    Shape("Llama-3-8B and Mistral-7B-Instruct-v0.2", 32, 8, 32, 128),
    Shape("Qwen3-8B", 36, 8, 32, 128),
)


def dense(shape: Shape, tokens: int, heads: int | None = None) -> int:
    """Bytes of dense K, which are those of V as well.

    Parameters
    ----------
    shape : Shape
    tokens : int
    heads : int, optional
        Other than the KV heads.
    """
    return shape.layers * (heads or shape.kv_heads) * tokens * shape.head_dim * ITEM


def ours(shape: Shape, tokens: int, ratio: float) -> tuple[int, int]:
    """Bytes of K and of V in a `CompressedCache`: per KV head, ⌈λd⌉ channels fewer, kept indices included."""
    kept = shape.head_dim - prune_count(ratio, shape.head_dim)
    per_head = (tokens - RECENT) * kept * ITEM + RECENT * shape.head_dim * ITEM + kept * INDEX
    return shape.layers * shape.kv_heads * per_head, dense(shape, tokens)


def think_code(shape: Shape, tokens: int, ratio: float) -> tuple[int, int]:
    """Bytes of K and of V in ThinK's own code: per *query* head, int(λd) channels fewer, a bool per channel."""
    kept = shape.head_dim - int(ratio * shape.head_dim)
    per_head = (tokens - RECENT) * kept * ITEM + RECENT * shape.head_dim * ITEM + shape.head_dim
    return shape.layers * shape.query_heads * per_head, dense(shape, tokens, shape.query_heads)


def measured(shape: Shape, tokens: int, ratio: float, *, recent: int = RECENT) -> MemoryReport:
    """What the tensors of one layer hold after a prompt of random keys and values, pruned by GRACE.

    They take the way that a model's take: the cache's ``update``, then the attention function, which is given the last
    queries only, as nobody reads what it returns.
    """
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.query_heads * shape.head_dim,
    )
    cache = CompressedCache(config, method="grace", ratio=ratio, recent_window=recent, observation_window=RECENT)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, shape.head_dim, generator=generator, dtype=torch.bfloat16)

    keys, values = cache.update(draw(shape.kv_heads, tokens), draw(shape.kv_heads, tokens), 0)
    module = nn.Module().eval()
    module.num_key_value_groups, module.is_causal = shape.query_heads // shape.kv_heads, True
    with torch.no_grad():
        attend = ALL_ATTENTION_FUNCTIONS["grace_sdpa"]
        attend(module, draw(shape.query_heads, RECENT), keys, values, None, scaling=shape.head_dim**-0.5)
    return cache.memory_report()


def check(shape: Shape, tokens: int, ratio: float) -> None:
    """Stop unless the formula equals what one layer's tensors hold."""
    one = Shape(shape.models, 1, shape.kv_heads, shape.query_heads, shape.head_dim)
    report = measured(one, tokens, ratio)
    found, formula = (report.key_bytes, report.value_bytes, report.spare_bytes), (*ours(one, tokens, ratio), 0)
    if found != formula:
        raise SystemExit(f"{shape.models}, {tokens} tokens, λ={ratio}: measured {found}, by the formula {formula}")


def rows(shape: Shape) -> list[dict[str, Any]]:
    """Every layout of one shape: name, λ, and (K, K+V) in bytes by length; LeanK's K+V by its paper's two ends."""
    plain = {tokens: (dense(shape, tokens), 2 * dense(shape, tokens)) for tokens in LENGTHS}
    found: list[dict[str, Any]] = [{"layout": "dense", "ratio": None, "bytes": plain}]
    for name, formula in (("ours", ours), ("ThinK's code", think_code)):
        for ratio in RATIOS:
            parts = {tokens: formula(shape, tokens, ratio) for tokens in LENGTHS}
            sizes = {tokens: (key, key + value) for tokens, (key, value) in parts.items()}
            found.append({"layout": name, "ratio": ratio, "bytes": sizes})
    found.append({"layout": "zeroed channels", "ratio": None, "bytes": plain})
    claimed = {
        tokens: (round(LEANK_K * key), *(round((LEANK_K + share) * key) for share in LEANK_V))
        for tokens, (key, _) in plain.items()
    }
    found.append({"layout": "LeanK, by its paper", "ratio": None, "bytes": claimed})
    return found


def sizes(shape: dict[str, Any]) -> list[str]:
    """One shape's table, as Markdown lines."""
    heads = [f"{part}, {tokens // 1024}k" for tokens in LENGTHS for part in ("K", "K+V")]
    reference, rows = shape["rows"][0]["bytes"][str(LENGTHS[0])], []
    for row in shape["rows"]:
        cells = [row["layout"], "–" if row["ratio"] is None else f"{row['ratio']:g}"]
        key, *total = row["bytes"][str(LENGTHS[0])]
        cells += [f"{key / reference[0]:.1%}", "–".join(f"{size / reference[1]:.1%}" for size in total)]
        for tokens in LENGTHS:
            key, *total = row["bytes"][str(tokens)]
            cells += [f"{key / GIB:.3f}", "–".join(f"{size / GIB:.3f}" for size in total)]
        rows.append(cells)
    return table(["cache", "λ", "K, % of dense", "K+V, % of dense", *(f"{head}, GiB" for head in heads)], rows)


def title(shape: dict[str, Any]) -> str:
    """Names, layers and heads of a shape."""
    return (
        f"{shape['models']}: {shape['layers']} layers, {shape['kv_heads']} KV and {shape['query_heads']} query heads "
        f"of width {shape['head_dim']}; shares at {LENGTHS[0] // 1024}k tokens"
    )


def page(value: dict[str, Any]) -> Page:
    """What docs/results/cache_bytes.md says of the numbers."""
    first, *others = value["shapes"]
    of = {(row["layout"], row["ratio"]): row["bytes"][str(LENGTHS[0])] for row in first["rows"]}
    dense_gib = of["dense", None][1] / GIB
    k, kv = (part / whole for part, whole in zip(of["ours", 0.6], of["dense", None], strict=True))
    repeated = of["ThinK's code", 0.6][1] / GIB
    return Page(
        title="Bytes of a cache",
        picture="Bars: GiB of keys and values of a cache of 8,192 tokens, by what stores it",
        draw=lambda figure: draw(figure, first),
        asked="How many bytes does a pruned cache need with larger models, and how many do other implementations need?",
        found=f"At λ = 0.6 it needs {k:.1%} of the bytes of a dense K and {kv:.1%} of K+V; ThinK's own code, which "
        f"stores keys and values for every query head, needs {repeated:.2f} GiB where a dense cache needs "
        f"{dense_gib:.2f} GiB ({first['models'].split()[0]}, {LENGTHS[0]:,} tokens).",
        sure=f"Our numbers come from a formula that equalled the bytes of one layer's real tensors in all "
        f"{value['checked']} cases checked; the others come from reading their code, or from their papers.",
        tables=[f"**{title(first)}.** λ: share of key channels pruned.", "", *sizes(first)],
        details=[
            *((title(shape), sizes(shape)) for shape in others),
            (
                "How it is counted",
                [
                    "One sequence, numbers in 16 bits; 8k, 32k and 128k are its tokens. "
                    "Only the shapes of the models count here: not all of them read prompts that long.",
                    "",
                    f"- *Ours*: GRACE prunes ⌈λd⌉ channels, keeps the last {RECENT} tokens dense and stores {INDEX} "
                    "bytes for each kept index, which count as K. At every length and λ, the formula was compared with "
                    f"`memory_report()` for one layer of {first['kv_heads']} KV heads of width {first['head_dim']}; "
                    "the table multiplies it by the number of layers.",
                    "- Keys are half of a cache: if K shrinks to 1 − λ, K+V shrinks to 1 − λ/2.",
                    "- *ThinK's code*, eager and flash, repeats keys and values for all query heads before it stores "
                    f"them. It prunes int(λd) channels, keeps the last {RECENT} tokens dense and stores a bool per "
                    "channel. With 4 query heads per KV head, this is more than transformers' dense cache. Its token "
                    "eviction is a different method and is not counted. While decoding, its flash version also fills "
                    "one layer at a time with zeros; that is not counted either.",
                    "- *Zeroed channels*: kvpress's `ThinKPress` sets channels to zero to measure accuracy, and saves "
                    "no bytes.",
                    f"- *LeanK*: not measured. It has static masks; its paper reports up to {1 - LEANK_K:.0%} less for "
                    f"K and {1 - LEANK_V[0]:.0%} to {1 - LEANK_V[1]:.0%} less for V.",
                ],
            ),
        ],
    )


def draw(figure: Any, shape: dict[str, Any]) -> None:
    """K+V of the shortest length, by layout."""
    colours = {"dense": BLACK, "ours": BLUE, "ThinK's code": ORANGE, "zeroed channels": GREY}
    names, values, drawn = [], [], []
    for row in shape["rows"]:
        names.append(row["layout"] + ("" if row["ratio"] is None else f", λ = {row['ratio']:g}"))
        values.append(row["bytes"][str(LENGTHS[0])][1] / GIB)
        drawn.append(colours.get(row["layout"], PINK))
    axes = figure.subplots()
    bars(axes, names, values, [f"{size:.2f}" for size in values], drawn)
    axes.axvline(values[0], color=BLACK, linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.1 * max(values))
    axes.set_xlabel(f"GiB of K and V, {LENGTHS[0]:,} tokens, 16 bits")
    axes.set_title(shape["models"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "cache_bytes")
    args = parser.parse_args()
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        heads = {(shape.kv_heads, shape.query_heads, shape.head_dim): shape for shape in SHAPES}  # one layer of each
        cells = [(shape, tokens, ratio) for shape in heads.values() for tokens in LENGTHS for ratio in RATIOS]
        for cell in track(cells, description="one layer, measured"):
            check(*cell)
        shapes = [{**asdict(shape), "rows": rows(shape)} for shape in SHAPES]
        value = {"provenance": source, "checked": len(cells), "shapes": shapes}
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
