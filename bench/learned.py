"""Learned masks: ``python -m bench.learned`` compares `learn_masks` with `calibrate` and with channels per prompt.

Masks are learned, and calibrated, on one passage of each source of `bench.passages`, from its first half. Two passages
of its second half are read, pruned with each mask at each ratio, and continued with the text's own next tokens: how far
are the next-token distributions from the dense cache's?

Masks and passages have their own files in ``--runs``; those of other texts, weights, settings or commits are made
again. Writes docs/results/learned.{json,md,png}. If they are missing, the model, SmolLM2-135M-Instruct in 4 bits, and
the texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.learned_page import CALIBRATED, CALIBRATED_GRACE, LEARNED, PROMPT, page
from bench.material import books, model_path, require_texts
from bench.passage_runs import measure_passages, passage_options
from bench.passages import later_passages, passages
from bench.provenance import is_clean, refuse, require_clean, write_json
from bench.real_model import digest, read_record
from bench.report import read_results, write_results
from grace_opt.attention.masks import ChannelMask
from grace_opt.hf import CompressedCache, attention_implementation, calibrate, capture_attention, learn_masks
from grace_opt.hf.models import disable_progress_bars, load_model
from grace_opt.hf.tools.evaluation import compare_predictions, next_token_log_probs
from grace_opt.hf.tools.filling import dense_cache, filled

ROOT = Path(__file__).parent.parent
#: Shares of the channels that are pruned.
RATIOS = (0.5, 0.6, 0.7)
Maker = Callable[[PreTrainedModel, list[Tensor], float, tuple[int, int]], ChannelMask]
#: Masks that serve every prompt.
MAKERS: Mapping[str, Maker] = {
    LEARNED: lambda model, texts, ratio, steps: learn_masks(model, texts, ratio=ratio, steps=steps),
    CALIBRATED: lambda model, texts, ratio, steps: calibrate.masks(model, texts, method="mies", ratio=ratio),
    CALIBRATED_GRACE: lambda model, texts, ratio, steps: calibrate.masks(model, texts, method="grace", ratio=ratio),
}


def made(
    model: PreTrainedModel, texts: list[Tensor], steps: tuple[int, int], runs: Path, about: dict[str, Any], keep: bool
) -> tuple[dict[str, dict[float, ChannelMask]], dict[str, dict[str, Any]]]:
    """Return the masks by name and ratio, and the record of each: its seconds, date and commit.

    Parameters
    ----------
    model : PreTrainedModel
    texts : list of Tensor
        To learn from, ``(1, L)`` each.
    steps : (int, int)
        Of learning.
    runs : Path
        Folder of the records.
    about : dict
        What records must agree on, and the date.
    keep : bool
        Whether records of earlier runs count.
    """
    masks: dict[str, dict[float, ChannelMask]] = {name: {} for name in MAKERS}
    records = {}
    for place, (name, make) in enumerate(MAKERS.items()):
        for ratio in RATIOS:
            path = runs / f"mask_{place}_{ratio:g}.json"
            file = path.with_suffix(".safetensors")
            settings = {**about["settings"], "name": name, "ratio": ratio, "steps": list(steps)}
            record = read_record(path, settings) if keep and file.exists() else None
            if record is None:
                began = time.perf_counter()
                mask = make(model, texts, ratio, steps)
                seconds = time.perf_counter() - began
                path.parent.mkdir(parents=True, exist_ok=True)
                mask.save(file)
                record = {"settings": settings, **about["origin"], "seconds": seconds}
                write_json(path, record)
            masks[name][ratio] = ChannelMask.load(file)
            records[f"{name}, {ratio:g}"] = record
            print(f"{name}, ratio {ratio:g}: {record['seconds']:.0f} s", flush=True)
    return masks, records


@torch.no_grad()
def measure(
    model: PreTrainedModel, ids: Tensor, prompt: int, masks: Mapping[str, Mapping[float, ChannelMask]]
) -> dict[str, dict[str, float]]:
    """Return the KL divergence of each choice of channels at each ratio, in nats per token.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    ids : Tensor
        ``(1, n)``.
    prompt : int
        Number of tokens that are read before.
    masks : mapping
        By name and ratio.
    """
    captured, following = capture_attention(model, ids[:, :prompt]), ids[:, prompt:]
    dense = next_token_log_probs(model, dense_cache(model, captured), following)
    found: dict[str, dict[str, float]] = {}
    for name in (*masks, PROMPT):
        for ratio in RATIOS:
            settings: dict[str, Any] = {"method": "grace", "ratio": ratio}
            if name in masks:
                settings = {"masks": masks[name][ratio]}
            log_probs = next_token_log_probs(model, filled(CompressedCache(model, **settings), captured), following)
            found.setdefault(name, {})[f"{ratio:g}"] = compare_predictions(log_probs, dense, following[0, 1:]).kl
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = passage_options("learned", __doc__)
    parser.add_argument("--learn", type=int, default=1536, help="tokens of each source to learn from (%(default)s)")
    parser.add_argument("--steps", type=int, nargs=2, default=(200, 60), help="steps of both stages (default 200 60)")
    args = parser.parse_args(given)
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    if args.prompt < 64 or args.tokens < 2 or args.learn < 128:
        raise SystemExit(
            f"--prompt {args.prompt} --tokens {args.tokens} --learn {args.learn}: give prompts of at least 64 tokens, "
            "2 tokens after them, and 128 of each source to learn from"
        )
    require_texts(args.text)
    source = require_clean(args.allow_dirty)
    disable_progress_bars()
    where = model_path(args.model)
    model, tokenizer = load_model(where)
    texts = args.text or books()
    learned_on = [each.ids for each in passages(texts, tokenizer, args.learn) if each.half == "A"]
    cut = later_passages(texts, tokenizer, args.prompt + args.tokens)[: args.passages]
    weights, keep = digest(*model.parameters()), is_clean(source)
    common = {"commit": source["commit"], "weights": weights, "learned_on": digest(*learned_on)}
    origin = {"date": source["date"], "commit": source["commit"]}
    with attention_implementation(model, "grace_sdpa"):
        about = {"settings": common, "origin": origin}
        masks, records = made(model, learned_on, tuple(args.steps), args.runs, about, keep)
        settings = {**common, "steps": list(args.steps), "prompt": args.prompt}
        found, origins = measure_passages(
            cut, args.runs, settings, source, lambda passage: measure(model, passage.ids, args.prompt, masks)
        )
    for name, record in records.items():
        origins[name] = {**source, "date": record["date"], "commit": record["commit"]}
    value = {
        "provenance": refuse(origins, args.allow_dirty),
        "model": args.name or Path(where).stem,
        "weights": weights,
        "learned_on": sum(ids.shape[1] for ids in learned_on),
        "sources": len(learned_on),
        "steps": list(args.steps),
        "prompt": args.prompt,
        "tokens": args.tokens,
        "seconds": {name: record["seconds"] for name, record in records.items()},
        "passages": found,
    }
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty))


if __name__ == "__main__":
    main()
