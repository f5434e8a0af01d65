"""Table 3, Needle In A Haystack: is a sentence found again in a long text, by length, depth, KV size and method?

A cell is one text with all caches. Without ``--set haystack=`` the text is the grammar of `grace_opt.hf.tools.needle`,
whose prompts end where the answer starts: this is what the pocket model knows. With it, passages of the user's texts
(public domain, say) carry the needle, the question is asked in plain words, and the answer is scored against the
needle, as in the paper. Source: GRACE (arXiv 2604.16983), Table 3; the test is Kamradt's (2023).
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiments.longbench import printed
from bench.experiments.longbench.generate import DENSE, Setting, answer, check_context, label, load
from bench.experiments.longbench.metrics import rouge_1
from bench.experiments.registry import Experiment, Settings
from grace_opt.errors import GraceError, OptionError
from grace_opt.hf.tools.needle import CITIES, make_prompt, random_answer
from grace_opt.sweep import Plot, Table

FULL = "full"
CHECKPOINT = "meta-llama/Meta-Llama-3-8B-Instruct"
COMMAND = f"python -m bench.experiments niah --size full --model {CHECKPOINT} --device cuda --set haystack=FOLDER"
#: Prompts of the pocket model's training have other seeds.
FIRST_SEED = 20_000_000
PROMPTS = 1
_BEFORE = "Here is a long text.\n\n"
_AFTER = "\n\nAnswer from the text above, in one sentence.\nQuestion: {question}\nAnswer:"


class HaystackError(GraceError, ValueError):
    """The user's texts cannot be read, or are too short for a length."""


@dataclass(frozen=True)
class Options:
    """The grid, and the caches.

    Attributes
    ----------
    lengths : tuple of int
        Tokens of the prompt.
    depths : tuple of float
        Where the needle lies, 0 (start) to 1 (end).
    samples : int
        Texts for each length and depth, with a needle each.
    budgets : tuple of str
        KV sizes, by SnapKV; "full" evicts nothing.
    ratios, methods : tuple
        Shares of channels pruned, and by which methods; eviction alone, "dense", is always measured.
    haystack : str
        A text file, or a folder of .txt files; empty for the synthetic grammar.
    needle, question : str
        Your own, for all texts, with `haystack`; empty: passwords of cities, another one in each text.
    max_new : int
        New tokens.
    held_back : int
        Number of the prompt's last tokens decoded from the pruned cache; the paper's setting is 0.
    """

    lengths: tuple[int, ...] = (512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 2
    budgets: tuple[str, ...] = ("96", "256", "512", FULL)
    ratios: tuple[float, ...] = (0.5, 0.6, 0.8)
    methods: tuple[str, ...] = ("think", "grace")
    haystack: str = ""
    needle: str = ""
    question: str = ""
    max_new: int = 2
    held_back: int = 1


@dataclass(frozen=True)
class Prompt:
    """A text that ends where the model goes on, and what its answer is scored against."""

    text: str
    reference: str


def needs(settings: Settings) -> str:
    """The paper's size wants a checkpoint and texts."""
    if settings.size == "full" and settings.model in ("", "pocket"):
        return f"this size wants a checkpoint, a GPU and a folder of texts: {COMMAND}"
    if settings.size == "full" and not settings.options.haystack:
        return f"this size wants texts, a .txt file or a folder of them: {COMMAND}"
    return ""


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each text."""
    options: Options = settings.options
    if bool(options.needle) != bool(options.question) or (options.needle and not options.haystack):
        raise OptionError("needle and question go together, and with haystack: give all three or none of the two.")
    if bad := [depth for depth in options.depths if not 0 <= depth <= 1]:
        raise OptionError(f"depths: {bad[0]:g} does not lie in [0, 1], from the text's start to its end.")
    for setting in _settings(options.budgets, options.ratios, options.methods):
        setting.check()
    found = []
    for length in options.lengths:
        for depth in options.depths:
            for sample in range(options.samples):
                found.append(
                    {
                        "length": length,
                        "depth": depth,
                        "seed": settings.seed * options.samples + sample,
                        "budgets": list(options.budgets),
                        "ratios": list(options.ratios),
                        "methods": list(options.methods),
                        "haystack": options.haystack,
                        "digest": _digest(options.haystack) if options.haystack else "",
                        "needle": options.needle,
                        "question": options.question,
                        "max_new": options.max_new,
                        "held_back": options.held_back,
                        "model": settings.model,
                        "device": settings.device,
                        "prompts": PROMPTS,
                    }
                )
    return found


def run(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask for one needle with every cache."""
    model, tokenizer = load(config["model"], config["device"])
    length, new_tokens = config["length"], config["max_new"]
    check_context(
        model,
        config["model"],
        length + new_tokens,
        f"length={length} with {new_tokens} new tokens",
        "give shorter ones with --set lengths=...",
    )
    prompt = _prompt(config, tokenizer)
    ids = tokenizer(prompt.text, return_tensors="pt").input_ids
    rows, texts = [], dict[Setting, str]()
    for setting in _settings(config["budgets"], config["ratios"], config["methods"]):
        once = Setting(DENSE, 0.0, setting.eviction, setting.kv) if setting.method == DENSE else setting
        if once not in texts:
            texts[once] = answer(model, tokenizer, ids, once, new_tokens, held_back=config["held_back"]).strip()
        score = rouge_1(texts[once], prompt.reference)
        kv = str(setting.kv) if setting.kv else FULL
        rows.append(
            {
                "checkpoint": label(config["model"]),
                "kv": kv,
                "ratio": setting.ratio,
                "method": setting.method,
                "cache": DENSE if setting.method == DENSE else f"{setting.method}, λ = {setting.ratio:g}",
                "score": score,
                **{_column(name): score if name == kv else None for name in config["budgets"]},
                "tokens": ids.shape[1],
                "answer": texts[once],
                "reference": prompt.reference,
            }
        )
    return rows


def views(settings: Settings) -> list[Table | Plot]:
    """The table of means, and heatmaps for each KV size."""
    options: Options = settings.options
    found: list[Table | Plot] = [
        Table(
            "Mean score",
            metrics=["score"],
            rows=["checkpoint", "kv", "ratio"],
            by="method",
            baseline="think",
            pair=["length", "depth", "seed"],
            better="higher",
            paper=printed.needle(COMMAND),
            note="Scores are 0 to 1: ROUGE-1 F of the answer and the needle, or the rest of the needle if the prompt "
            "gives its start. kv: tokens that SnapKV keeps in every head; full: all of them. ratio: share of channels "
            "pruned; dense prunes none.",
        ),
        Table(
            "Mean over the KV sizes",
            metrics=["score"],
            rows=["checkpoint", "ratio"],
            by="method",
            baseline="think",
            pair=["length", "depth", "seed", "kv"],
            unit=["length", "depth", "seed"],
            better="higher",
            note="Each text counts with its mean over the KV sizes; intervals are over texts.",
        ),
    ]
    for budget in options.budgets:
        column = _column(budget)
        found.append(
            Plot(
                "heatmap",
                f"KV size {budget}",
                x="length",
                y="depth",
                value=column,
                facet="cache",
                labels={"length": "prompt (tokens)", "depth": "depth of the needle", column: "mean score"},
            )
        )
    return found


def haystack_prompt(
    text: str, length: int, depth: float, needle: str, question: str, count: Callable[[str], int], seed: int
) -> str:
    """A passage of the text, from a place that the seed chooses, with the needle between two of its sentences.

    Raises
    ------
    HaystackError
        If the text is too short for `length`.
    """
    after = _AFTER.format(question=question)
    rng = random.Random(f"{seed} {length} {depth}")
    fixed = count(f"{_BEFORE}{needle} {after}")
    if fixed >= length:
        raise OptionError(f"length={length}: the needle and the question alone are {fixed} tokens; give a longer one.")
    wanted = length - fixed
    words = re.sub(" +", " ", text).split(" ")
    if len(words) < wanted and (have := count(text)) < wanted:
        raise HaystackError(
            f"the haystack has {have} tokens, and length={length} wants {wanted}: add texts, or give shorter lengths "
            "with --set lengths=..."
        )
    size = min(len(words), wanted)  # a word is one token or more
    start = rng.randrange(len(words) - size + 1)
    low, high = 0, size
    while low < high:  # the most words whose prompt still has the length
        middle = (low + high + 1) // 2
        fits = count(_compose(words[start : start + middle], needle, depth, after)) <= length
        low, high = (middle, high) if fits else (low, middle - 1)
    return _compose(words[start : start + low], needle, depth, after)


def _compose(words: list[str], needle: str, depth: float, after: str) -> str:
    hay = " ".join(words)
    place = round(depth * len(hay))
    if 0 < place < len(hay):
        place = 1 + max(hay.rfind(end, 0, place) for end in (". ", ".\n"))  # 0 where no sentence ends before
    return f"{_BEFORE}{hay[:place].rstrip()} {needle} {hay[place:].lstrip()}{after}"


def _prompt(config: dict[str, Any], tokenizer: Any) -> Prompt:
    length, depth, seed = config["length"], config["depth"], config["seed"]
    if not config["haystack"]:
        number = random.Random(f"{seed} {length} {depth}").randrange(10_000_000)
        made = make_prompt(length, depth, count=lambda text: len(tokenizer(text).input_ids), seed=FIRST_SEED + number)
        return Prompt(made.text, made.answer)
    if _digest(config["haystack"]) != config["digest"]:
        raise HaystackError(f"{config['haystack']} has changed since the sweep started: start it again.")
    needle, question = config["needle"], config["question"]
    if not needle:
        rng = random.Random(f"needle {seed} {length} {depth}")
        city = rng.choice(CITIES)
        needle, question = f"The password of {city} is {random_answer(rng)}.", f"What is the password of {city}?"
    text = haystack_prompt(
        _text(config["haystack"]), length, depth, needle, question, lambda t: len(tokenizer(t).input_ids), seed
    )
    return Prompt(text, needle)


def _text(where: str) -> str:
    return _read(where)[0]


def _digest(where: str) -> str:
    return _read(where)[1]


def _read(where: str) -> tuple[str, str]:
    """The user's texts and their digest, read again only after a change."""
    path = Path(where)
    try:
        paths = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        text, mark = _joined(tuple((found, found.stat().st_mtime_ns, found.stat().st_size) for found in paths))
    except (OSError, UnicodeDecodeError) as error:
        raise HaystackError(f"cannot read the haystack {where}: {error}. Give a text file, or a folder.") from None
    if not text.strip():
        raise HaystackError(f"the haystack {where} holds no text: give a file, or a folder with .txt files.")
    return text, mark


@functools.lru_cache(maxsize=2)
def _joined(paths: tuple[tuple[Path, int, int], ...]) -> tuple[str, str]:
    text = "\n\n".join(path.read_text(encoding="utf-8") for path, _, _ in paths)
    return text, hashlib.sha256(text.encode()).hexdigest()[:16]


def _settings(budgets: Any, ratios: Any, methods: Any) -> list[Setting]:
    found = []
    for budget in budgets:
        if budget != FULL and not budget.isdecimal():
            raise OptionError(f'budgets: {budget!r} is no KV size; give numbers, or "full".')
        evict = ("none", 0) if budget == FULL else ("snapkv", int(budget))
        found += [Setting(method, ratio, *evict) for ratio in ratios for method in (DENSE, *methods)]
    return found


def _column(budget: str) -> str:
    return f"score at KV size {budget}"


EXPERIMENT = Experiment(
    name="niah",
    title="Needle In A Haystack",
    paper="Table 3",
    about="Does a model with a smaller cache still find a sentence that is hidden in a long text? SnapKV keeps some "
    "tokens of the prompt (their number is the KV size), then key channels are pruned. The paper's model is "
    "Llama-3-8B-Instruct; its numbers are shown beside those measured with that model. The pocket model answers with "
    "two words of its own grammar, both from the pruned cache; what it shows need not hold for large models.",
    sizes={
        "smoke": Options(lengths=(256,), depths=(0.0, 1.0), samples=1, budgets=("96", FULL), ratios=(0.6,)),
        "pocket": Options(),
        "full": Options(
            lengths=tuple(range(1000, 8000, 1000)),
            depths=tuple(at / 10 for at in range(11)),
            samples=1,
            ratios=(0.5, 0.6),
            max_new=64,
            held_back=0,
        ),
    },
    cells=cells,
    run=run,
    views=views,
    needs=needs,
)
