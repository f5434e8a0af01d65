"""How much pruned keys change the text of real models: ``python -m bench.real_model``.

Prompts are consecutive passages of a book. All but the last token of a prompt is read with dense attention; then the
cache is pruned, and the model continues greedily from the last token, so every new token comes from pruned keys. Each
cache is compared with the dense one in two ways: by the tokens that it generates (after the first difference, the texts
differ), and by its next-token distributions over the dense run's tokens, where differences cannot add up.

Every prompt is stored in a separate file in ``--runs``. A stopped run resumes; a prompt is measured again if its text,
the weights, the settings or the commit have changed. Writes docs/results/real_model.{json,md,png}.

If they are missing, models and texts are downloaded (`bench.material`); ``--text`` takes other books as plain text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.material import books, read_text
from bench.passages import beginning
from bench.provenance import digest, origin_of, recorded
from bench.real_model_page import METHODS, OBSERVED, RATIOS, RECENT, page, summary
from bench.report import parser_of
from bench.several import publish_models
from grace_opt.hf import CompressedCache, attention_implementation


def passages(texts: Sequence[Path], tokenizer: Any, prompts: int, tokens: int) -> list[tuple[str, Tensor]]:
    """``prompts`` prompts of ``tokens`` tokens: the texts take turns, each gives its consecutive passages."""
    books, begun = [], beginning(tokenizer)
    for path in texts:
        name, text = read_text(path)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        pieces = ids.split(tokens - begun.shape[1], dim=1)
        books.append((name, [torch.cat([begun, piece], dim=1) for piece in pieces]))
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

    def held(layers: Sequence[Any]) -> list[int]:
        return [sum(getattr(layer, part).nbytes for layer in layers) for part in ("keys", "values")]

    cache = prefilled(DynamicCache(config=model.config))
    sizes = held(cache.layers)
    tokens = greedy(model, copy.deepcopy(cache), last, new_tokens)
    forced = torch.cat([last, torch.tensor([tokens[:-1]], dtype=last.dtype)], dim=1)
    dense = distributions(cache)
    advance("dense")
    pruned = []
    for ratio in RATIOS:
        for name, method in METHODS.items():
            cache = prefilled(
                CompressedCache(model, method=method, ratio=ratio, recent_window=RECENT, observation_window=OBSERVED)
            )
            report = cache.memory_report()
            others = held([each for index, each in enumerate(cache.layers) if index not in cache.prunable_layers])
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
                    "key_bytes": report.key_bytes + others[0],
                    "total_bytes": report.key_bytes + report.value_bytes + sum(others),
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
    source: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Measure what is not measured yet.

    Parameters
    ----------
    model, tokenizer
        A Llama-like causal language model.
    texts : sequence of Path
        Books to take prompts from.
    runs : Path
        Folder of the model's records, one per prompt.
    prompts, tokens, new_tokens : int
        How many prompts, of how many tokens, and how many tokens to generate after each.
    source : mapping
        The provenance of now: a record of another commit counts for nothing.

    Returns
    -------
    list of dict
        The records of all prompts.
    """
    context = model.config.max_position_embeddings
    if not RECENT + 1 < tokens <= context - new_tokens:
        raise SystemExit(
            f"--tokens {tokens}: give more than {RECENT + 1}, which stay dense, and at most {context - new_tokens}, "
            f"which with {new_tokens} new ones fill the context of {runs.name}"
        )
    if min(prompts, new_tokens) < 1:
        raise SystemExit(f"--prompts {prompts} --new-tokens {new_tokens}: give at least 1 of each")
    cut = passages(texts, tokenizer, prompts, tokens)
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

            def measured(name: str = name, ids: Tensor = ids, number: int = number) -> dict[str, Any]:
                def advance(step: str) -> None:
                    bar.update(task, advance=1, description=f"{runs.name}, prompt {number + 1}: {step}")

                return {"prompt": number, "text": name, **measure(model, ids, new_tokens, advance)}

            settings = {**common, "ids": digest(ids)}
            records.append(recorded(runs / f"prompt_{number:03}.json", settings, source, measured))
            bar.update(task, completed=per_prompt * (number + 1))
    return records


def _shortened(part: Any) -> Any:
    """Records without the generated tokens and the settings, which are many lines and are read by nobody."""
    if isinstance(part, list):
        return [_shortened(item) for item in part]
    if isinstance(part, dict):
        return {name: _shortened(value) for name, value in part.items() if name not in ("tokens", "settings")}
    return part


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("real_model", __doc__, models=True)
    parser.add_argument("--prompts", type=int, default=10, help="default %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="default %(default)s")
    args = parser.parse_args(given)
    sizes = {"prompts": args.prompts, "tokens": args.tokens, "new_tokens": args.new_tokens}

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, name: str) -> tuple[Any, Any]:
        records = run(model, tokenizer, args.text or books(), args.runs / name, **sizes, source=source)
        config = model.config
        return {
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            **summary(records),
            "by prompt": _shortened(records),
        }, {f"prompt {record['prompt']}": origin_of(source, record) for record in records}

    publish_models(args, page, {**sizes, "ratios": RATIOS}, measured)


if __name__ == "__main__":
    main()
