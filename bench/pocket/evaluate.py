"""Needle recall of the pocket model with a dense cache, and its model card: ``python -m bench.pocket.evaluate``.

200 held-out prompts: 4 lengths × 5 depths × 10 seeds, exact match of the two-word answer, greedy. Writes recall.json
and README.md (the model card) into the model's folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from bench.provenance import caption, provenance, write_json
from grace_opt.hf.models import POCKET_FOLDER, load_model
from grace_opt.hf.tools.needle import make_prompt

LENGTHS, DEPTHS, SEEDS = (256, 512, 768, 1024), (0.0, 0.25, 0.5, 0.75, 1.0), 10
#: Training documents are drawn from other random streams; prompts of this form with these seeds were never seen.
FIRST_SEED = 10_000_000

CARD = """# The pocket model of grace_opt

A Llama-architecture language model of {parameters:,} parameters ({layers} layers, hidden size {hidden}, {heads} query
heads and {kv} KV heads of width {width}, RoPE, tied embeddings, context {context}), small enough to ship and trained to
retrieve, so that demos and tests run on trained keys without a network. It knows nothing but the closed English-like
grammar of `grace_opt.hf.tools.needle`, {vocabulary} words.

**Intended use**: demonstrating and testing key-cache pruning. **Not** for language, facts, or conclusions about large
models: what is seen on a model this small does not carry over (use `make demo MODEL=...` for a real one).

**Training**: `python -m bench.pocket.train`, {steps} steps of about 4,600 tokens, {minutes:.0f} minutes on 2 CPU cores,
seed {seed}. Synthetic documents of facts, filler and repeated facts; the loss is dominated by the repetitions. Lengths
128, 256, 512, 1152. The first layer starts with query heads that prefer the previous tokens (see `look_back` in the
script); Muon for matrices, AdamW for the rest. Weights are float16.

**Evaluation**: exact match of the two-word answer, dense cache, greedy, {count} held-out prompts. {total:.1%} in all.

| tokens | {depth_header} | mean |
|---:|{rule}---:|
{table}

{caption}

Licence: Apache-2.0, as the rest of grace_opt.
"""


def recall(model: Any, tokenizer: Any, seeds: int) -> dict[tuple[int, float], list[bool]]:
    """Whether each prompt's answer was generated exactly, by length and depth."""
    found = defaultdict(list)
    cells = [(length, depth, s) for length in LENGTHS for depth in DEPTHS for s in range(seeds)]
    for number, (length, depth, _) in enumerate(track(cells, description="needle recall")):
        prompt = make_prompt(length, depth, count=lambda text: len(tokenizer(text).input_ids), seed=FIRST_SEED + number)
        ids = tokenizer(prompt.text, return_tensors="pt").input_ids
        with torch.no_grad():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0
            )
        found[length, depth].append(tokenizer.decode(output[0, ids.shape[1] :]).strip() == prompt.answer)
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=POCKET_FOLDER)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    model, tokenizer = load_model(str(args.model))
    found = recall(model, tokenizer, args.seeds)
    total = statistics.mean(v for values in found.values() for v in values)
    rows = []
    for length in LENGTHS:
        cells = [statistics.mean(found[length, depth]) for depth in DEPTHS]
        rows.append(f"| {length} | " + " | ".join(f"{c:.0%}" for c in cells) + f" | {statistics.mean(cells):.1%} |")
    print(f"{total:.1%} of {sum(map(len, found.values()))} prompts", *rows, sep="\n")
    source, config = provenance(), model.config
    by_cell = {f"{length} {depth}": values for (length, depth), values in found.items()}
    write_json(args.model / "recall.json", {"provenance": source, "total": total, "found": by_cell})
    training = args.model / "training.json"
    if training.exists():
        trained = json.loads(training.read_text())
        (args.model / "README.md").write_text(
            CARD.format(
                parameters=sum(p.numel() for p in model.parameters()),
                layers=config.num_hidden_layers,
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv=config.num_key_value_heads,
                width=config.head_dim,
                context=config.max_position_embeddings,
                vocabulary=config.vocab_size,
                steps=trained["step"],
                minutes=trained["seconds"] / 60,
                seed=trained["seed"],
                count=sum(map(len, found.values())),
                total=total,
                depth_header=" | ".join(f"depth {d:.0%}" for d in DEPTHS),
                rule="---:|" * len(DEPTHS),
                table="\n".join(rows),
                caption=caption(source),
            )
        )


if __name__ == "__main__":
    main()
