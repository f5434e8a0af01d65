"""How many answers of real models a smaller cache keeps: ``python -m bench.answers``.

Each prompt is a text of facts and then a question (`bench.questions`); ``model.generate`` answers greedily. An answer
counts if it contains the expected words. Smaller caches are asked only what the dense cache answers: no cache can keep
what a model cannot do. As with `attach`, the question is part of the prompt, so its queries help to choose the
channels, and the prompt is read with dense attention.

Each cache reads a text once and answers its questions from copies, so a prompt comes in two chunks. transformers'
``QuantizedCache`` would read the second chunk from quantised keys, so it reads every prompt in one; it refuses models
with sliding windows, which have no row of it. ``bits=2.25`` is calibrated on the texts that ship with grace_opt.

Each cache's answers about a text are stored in a separate file in ``--runs``. A stopped run resumes; files of other
prompts, weights, settings or commits are measured again. Writes docs/results/answers.{json,md,png}. If they are
missing, models are downloaded (`bench.material`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.answers_page import WIDTHS, page, rows
from bench.caches import calibrated
from bench.efficiency.methods import int4
from bench.provenance import digest, origin_of, recorded
from bench.questions import DEFAULT, Prompt, answered, in_common, prompts, read_questions
from bench.report import parser_of
from bench.several import publish_models
from grace_opt._util.progress import progress_bar
from grace_opt.hf import CacheConfig, CompressedCache, Quantize, attention_implementation
from grace_opt.hf.engine.layer import PrunedKeyLayer
from grace_opt.hf.stores.counting import tensors_in

#: Longer than any prompt: until a question is known, all of a text is a first chunk.
UNTIL_ASKED = 2**40
THEIRS = "transformers-4bit"


@dataclass(frozen=True)
class Setting:
    """A kind of cache: its name in the table, and the settings of ours; without them, it is transformers' own."""

    title: str
    config: CacheConfig | None = None


SETTINGS = {
    "dense": Setting("dense"),
    "bits-2.25": Setting("`bits=2.25`", CacheConfig(bits=2.25)),
    "grace-0.3": Setting("GRACE, λ = 0.3", CacheConfig(ratio=0.3)),
    "grace-0.5": Setting("GRACE, λ = 0.5", CacheConfig(ratio=0.5)),
    "grace-0.6": Setting("GRACE, λ = 0.6", CacheConfig(ratio=0.6)),
    "grace-0.7": Setting("GRACE, λ = 0.7", CacheConfig(ratio=0.7)),
    "think-0.3": Setting("THINK, λ = 0.3", CacheConfig("think", ratio=0.3)),
    "8bit": Setting(
        "K and V in 8 bits, nothing pruned",
        CacheConfig("think", ratio=0.0, quantize=Quantize(8, backend="hqq")),
    ),
    "4bit": Setting("K and V in 4 bits, nothing pruned", CacheConfig("think", ratio=0.0, quantize=Quantize(4))),
    "grace-0.3-4bit": Setting("GRACE, λ = 0.3, K and V in 4 bits", CacheConfig(ratio=0.3, quantize=Quantize(4))),
    THEIRS: Setting("transformers' `QuantizedCache`, 4 bits"),
}


def smaller_caches(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """The wanted settings but "dense", of those that a model can have."""
    without = {"dense", THEIRS} if any(DynamicCache(config=model.config).is_sliding) else {"dense"}
    return [name for name in SETTINGS if name in wanted and name not in without]


def new_cache(name: str, model: PreTrainedModel, basis: Path) -> Any:
    """An empty cache of a setting; `basis` is the file of the calibrated one, if there are bits."""
    if (config := SETTINGS[name].config) is not None:
        if config.bits is not None:
            config = replace(config, bits=replace(config.bits, basis=str(basis)))
        return CompressedCache(model, config=config, prompt_length=UNTIL_ASKED)
    return DynamicCache(config=model.config) if name == "dense" else int4(model, 0.0, None).cache


def stored_bytes(cache: Any, width: int) -> tuple[int, int]:
    """Bytes of K, indices included, and of V, if no floating-point number were wider than `width` bytes.

    What is stored in fewer bits and what is no floating-point number stay as they are; scales and zero points are
    numbers like keys. Without room to grow. At the width of the cache's own numbers these are the bytes of
    `memory_report()`, and at another one those of the report of such a cache (but for the units of codes, which have 32
    bits in any model): the tests check both.
    """
    keys, values = 0, 0
    for layer in cache.layers:
        ours = isinstance(layer, PrunedKeyLayer)  # but for sliding windows
        parts = layer.stored_parts() if ours else dict(vars(layer))
        if ours and layer.tail is not None:
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
    basis: Path,
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
        Largest number to generate.
    basis : Path
        The file of the calibrated one.
    advance : callable
        Called after each answer.
    shared : int, optional
        Number of first tokens read once for all questions; by default those that they have in common, and none with
        a cache that would read the rest from quantised keys.

    Returns
    -------
    list of dict
        For each question: what it asks, what was answered, whether that counts, tokens of the cache and its bytes.
    """
    if shared is None:
        shared = 0 if name == THEIRS else in_common(questions)
    text = new_cache(name, model, basis)
    if shared:
        model(torch.tensor([questions[0].ids[:shared]]), past_key_values=text, logits_to_keep=1)
    found = []
    for question in questions:
        cache, ids = copy.deepcopy(text), torch.tensor([question.ids])
        if isinstance(cache, CompressedCache):
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
    source: Mapping[str, Any],
) -> dict[str, list[dict[str, Any]]]:
    """Ask every cache the questions that it is not asked yet.

    Returns
    -------
    dict
        By setting the records, one for each text about which something was asked.
    """
    basis, coded = runs / "basis.safetensors", None
    if "bits-2.25" in names:
        made, _ = calibrated(model, tokenizer, basis, source)
        coded = digest(*made.key_rates.values(), *(each.encode for each in made.keys.values()))
    common = {"weights": digest(*model.parameters()), "new_tokens": new_tokens, "transformers": source["transformers"]}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    done, total = 0, len(names) * sum(map(len, texts))
    with attention_implementation(model, "grace_sdpa"), progress_bar(None, total) as show:
        for name, records in found.items():
            config = SETTINGS[name].config
            for number, questions in enumerate(texts):
                if not questions:
                    continue
                settings = {
                    **common,
                    "pruning": None if config is None else config.to_dict(),
                    "basis": coded if name == "bits-2.25" else None,
                    "prompts": digest(*(torch.tensor(q.ids) for q in questions)),
                    "answers": [q.fact.answer for q in questions],
                }

                def asked(
                    name: str = name, number: int = number, questions: Sequence[Prompt] = questions, done: int = done
                ) -> dict[str, Any]:
                    steps = iter(range(done + 1, done + len(questions) + 1))
                    said = f"{runs.name}, {name}, text {number + 1}"
                    rows = ask(model, tokenizer, name, questions, new_tokens, basis, lambda: show(said, next(steps)))
                    return {"text": number, "asked": rows}

                records.append(recorded(runs / f"{name}_{number:02}.json", settings, source, asked))
                done += len(questions)
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("answers", __doc__, models=True)
    parser.add_argument("--questions", type=Path, default=DEFAULT, help="TOML; default: bench/questions.toml")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--tokens", type=int, default=1950, help="of a prompt, at most (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=24, help="of an answer, at most (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default %(default)s)")
    args = parser.parse_args(given)
    if args.new_tokens < 1:
        raise SystemExit(f"--new-tokens {args.new_tokens}: give at least 1")
    sources = read_questions(args.questions)

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, label: str) -> tuple[Any, Any]:
        texts = [prompts(text, tokenizer, args.tokens, args.seed) for text in sources]
        context, longest = model.config.max_position_embeddings, max(len(p.ids) for text in texts for p in text)
        if longest + args.new_tokens > context:
            raise SystemExit(
                f"--tokens: {longest} and {args.new_tokens} new ones are more than the context of {label}: {context}"
            )
        rest = args.new_tokens, args.runs / label, source
        found = run(model, tokenizer, texts, ["dense"], *rest)
        left = [
            [question for question, one in zip(text, record["asked"], strict=True) if one["right"]]
            for text, record in zip(texts, found["dense"], strict=True)
        ]
        if any(left):
            found |= run(model, tokenizer, left, smaller_caches(model, args.settings), *rest)
        origins = {
            f"{name}, text {record['text'] + 1}": origin_of(source, record)
            for name, part in found.items()
            for record in part
        }
        answers = {
            name: [{"text": sources[record["text"]].title, "asked": record["asked"]} for record in part]
            for name, part in found.items()
        }
        return {"rows": rows(found, {name: one.title for name, one in SETTINGS.items()}), "answers": answers}, origins

    settings = {name: getattr(args, name) for name in ("tokens", "new_tokens", "seed")}
    asked = sum(len(text.facts) for text in sources)
    publish_models(args, page, {**settings, "texts": len(sources), "asked": asked}, measured)


if __name__ == "__main__":
    main()
