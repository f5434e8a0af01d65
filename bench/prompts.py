"""A prompt that was read once: ``python -m bench.prompts``.

The beginning of a book is read by ``attach(bits=2.25)``, and stored. Then the first token that follows it and a
question is awaited: where all is read, where a `PromptStore` has the beginning, where a cache in memory has it, and
where a dense cache of transformers does, in memory or in a file. All take turns, in one process. Fifty questions are
answered from the store, and from the cache in memory that the store's file was made of.

With ``--kills``, processes store prompts of the pocket model in one folder, and remove them, and are killed, so many
times; what is left is read and answers.

Each model has its own file in ``--runs``; those of other texts, weights, settings or commits are measured again. Writes
docs/results/prompts.{json,md,png}. If they are missing, models and texts are downloaded (`bench.material`).
"""

from __future__ import annotations

import copy
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from bench.caches import calibrated
from bench.growth import of_texts
from bench.material import books
from bench.provenance import digest, origin_of, recorded
from bench.report import BLUE, GREY, Page, parser_of, table
from bench.several import publish_models
from grace_opt._util.progress import progress_bar
from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, PromptStore, attach, attention_implementation, read_prompt
from grace_opt.hf.engine.given_prompts import GivenPrompts
from grace_opt.hf.engine.kept_prompts import KeptPrompts
from grace_opt.hf.models import load_pocket

BITS = 2.25
#: Number of tokens of a question, and of an answer.
QUESTION, ANSWER = 32, 16
#: How often what takes little time is measured for each time that all is read.
TIMES = 3
#: What is awaited, as it is called on the page.
READ, STORED, TURN = "all is read", "from the store", "from a cache in memory"
DENSE, DENSE_FILE, DENSE_COPY = "all is read, dense", "from a dense file", "from a dense copy in memory"
#: What is asked for: of the time of reading, of the time of a turn, of the bytes in 16 bits, of the time of reading.
AIMS = {"read": 0.04, "turn": 2.0, "bytes": 0.17, "storing": 0.03}
#: Processes that store prompts at once, and tokens of a prompt of theirs.
PROCESSES, SHORT = 8, 300


def measure_prompt(
    model: PreTrainedModel, ids: Tensor, basis: Path, prompt: int, rounds: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Return the seconds of each way to the first token, and how many questions are answered alike.

    Parameters
    ----------
    model : PreTrainedModel
    ids : Tensor
        ``(1, n)``: the prompt, and the questions.
    basis : Path
    prompt, rounds : int
        Number of tokens of the prompt; how often each way is measured.
    advance : callable
        Called after each of `rounds` and of the questions.
    """
    settings = {"bits": BITS, "basis": basis}
    questions = [torch.cat([ids[:, :prompt], each], 1) for each in ids[:, prompt:].split(QUESTION, 1)]
    plain = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def first_token(text: Tensor, **given: Any) -> None:
        model.generate(text, max_new_tokens=1, **plain, **given)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = read_prompt(model, ids[:, :prompt], PromptStore(folder / "store"), **settings)
        (kept,) = PromptStore(folder / "store").prompts()
        dense = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :prompt], past_key_values=dense, logits_to_keep=1)
        numbers = {f"keys{number}": layer.keys.contiguous() for number, layer in enumerate(dense.layers)}
        numbers |= {f"values{number}": layer.values.contiguous() for number, layer in enumerate(dense.layers)}
        save_file(numbers, folder / "dense.safetensors")

        def from_file() -> DynamicCache:
            found, made = load_file(folder / "dense.safetensors"), DynamicCache(config=model.config)
            for number in range(len(dense.layers)):
                made.update(found[f"keys{number}"], found[f"values{number}"], number)
            return made

        def compressed(text: Tensor, prompts: Any = None, **given: Any) -> None:
            with attach(model, **settings, prompts=prompts):
                first_token(text, **given)

        slow: dict[str, Callable[[Tensor], None]] = {READ: compressed, DENSE: first_token}
        fast: dict[str, Callable[[Tensor], None]] = {
            STORED: lambda text: compressed(text, PromptStore(folder / "store")),
            DENSE_FILE: lambda text: first_token(text, past_key_values=from_file()),
            DENSE_COPY: lambda text: first_token(text, past_key_values=copy.deepcopy(dense)),
        }
        seconds: dict[str, list[float]] = {way: [] for way in (*slow, *fast, TURN, "storing")}
        for number in range(-1, rounds):  # once before it counts: loops may have to be compiled
            text = questions[max(number, 0)]
            for _ in range(TIMES):
                for way, run in fast.items():
                    seconds[way].append(_timed(run, text))
                own = copy.deepcopy(cache)  # not counted: what is asked is what the question itself takes
                seconds[TURN].append(_timed(compressed, text, past_key_values=own))
            new = KeptPrompts(PromptStore(folder / f"new {number}"), model, cache.config)
            seconds["storing"].append(_timed(new.keep, cache, GivenPrompts([ids[0, :prompt].numpy()], [0]), 0))
            if number < 0:
                seconds = {way: [] for way in seconds}
                continue
            for way, run in slow.items():
                seconds[way].append(_timed(run, text))
            advance()
        alike = 0
        for text in questions:
            answers = []
            for given in ({}, {"past_key_values": copy.deepcopy(cache)}):
                with attach(model, **settings, prompts=PromptStore(folder / "store")):
                    answers.append(model.generate(text, max_new_tokens=ANSWER, **plain, **given))
            alike += torch.equal(*answers)
            advance()
    token = sum(layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in dense.layers)
    return {
        "seconds": seconds,
        "questions": [alike, len(questions)],
        "bytes": {"file": kept.bytes, "16 bits": 2 * token * prompt},
    }


def _timed(run: Callable[..., None], *given: Any, **named: Any) -> float:
    began = time.perf_counter()
    run(*given, **named)
    return time.perf_counter() - began


def work(folder: str, seed: int) -> None:
    """Store prompts of the pocket model, and remove them, for ever: what is killed."""
    torch.set_num_threads(1)
    model, store, choice = load_pocket()[0], PromptStore(folder), random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another process may have removed a prompt while it was read
        print("ready", flush=True)
        while True:
            if choice.random() < 0.05:
                store.clear()
            read_prompt(model, _short(choice.randrange(20)), store, bits=3)


def _short(number: int) -> Tensor:
    return torch.randint(3, 97, (1, SHORT), generator=torch.Generator().manual_seed(number))


def measure_kills(kills: int, advance: Callable[[], None]) -> dict[str, int]:
    """Kill processes that share a folder, start others in their place, and look at what is left each time.

    Returns
    -------
    dict
        ``kills``; ``looked at``, prompts found after one; ``damaged`` and ``wrong``, how many of them could not be
        loaded, or hold other numbers than the same prompt read again; ``left over``, unfinished files at the end that
        a clean-up would leave.
    """
    model, choice, counts = load_pocket()[0], random.Random(0), {"looked at": 0, "damaged": 0, "wrong": 0}
    with tempfile.TemporaryDirectory() as name:
        expected = {}
        for number in range(20):
            tokens = _short(number)
            cache = read_prompt(model, tokens, PromptStore(Path(name) / "alone"), bits=3)
            expected[digest(tokens)] = _numbers(cache)
        store = PromptStore(Path(name) / "shared")
        command = [sys.executable, "-m", "bench.prompts", "--work", str(store.path)]

        def begun(seed: int) -> subprocess.Popen[bytes]:
            return subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

        running = [begun(seed) for seed in range(PROCESSES)]
        try:
            for number in range(kills):
                place = number % PROCESSES
                assert running[place].stdout is not None
                running[place].stdout.readline()  # it has begun
                time.sleep(choice.uniform(0, 4))  # some have stored prompts by then
                running[place].kill()
                running[place].wait()
                running[place] = begun(PROCESSES + number)
                for kept in store.prompts():
                    try:
                        found = CompressedCache.load(kept.path, model)
                    except CacheError:
                        counts["damaged"] += kept.path.exists()
                        continue
                    counts["looked at"] += 1
                    tokens = torch.from_numpy(load_file(kept.path)["tokens"].numpy()) if kept.path.exists() else None
                    if tokens is not None:
                        counts["wrong"] += expected[digest(tokens[None])] != _numbers(found)
                advance()
        finally:
            for each in running:
                each.kill()
                each.wait()
        store.clear()
        return {"kills": kills, **counts, "left over": sum(1 for path in store.path.rglob("*") if path.is_file())}


def _numbers(cache: CompressedCache) -> str:
    return digest(*(part for layer in cache.layers for part in layer.full_width()))


def main(given: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if given is None else given
    if given[:1] == ["--work"]:
        work(given[1], int(given[2]))
    parser = parser_of("prompts", __doc__, models=True)
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each way is measured (default %(default)s)")
    parser.add_argument("--questions", type=int, default=50, help="questions (default %(default)s)")
    parser.add_argument("--kills", type=int, default=200, help="processes that are killed (default %(default)s)")
    args = parser.parse_args(given)

    def measured(source: dict[str, Any], model: PreTrainedModel, tokenizer: Any, label: str) -> tuple[Any, Any]:
        ((name, ids),) = of_texts((args.text or books())[:1], tokenizer, args.prompt + QUESTION * args.questions)
        file = args.runs / label / "basis.safetensors"
        basis, _ = calibrated(model, tokenizer, file, source)
        about = {"weights": digest(*model.parameters()), "basis": digest(*basis.key_rates.values())}
        steps = args.rounds + args.questions
        with attention_implementation(model, "grace_sdpa"), progress_bar(None, steps) as show:
            done = iter(range(1, steps + 1))
            record = recorded(
                args.runs / label / "prompt.json",
                {**about, "prompt": args.prompt, "rounds": args.rounds, "ids": digest(ids)},
                source,
                lambda: {
                    "rows": measure_prompt(model, ids, file, args.prompt, args.rounds, lambda: show(name, next(done)))
                },
            )
        origins = {name: origin_of(source, record)}
        with progress_bar(None, args.kills) as show:
            done = iter(range(1, args.kills + 1))
            killed = recorded(
                args.runs / "kills.json",
                {"kills": args.kills},
                source,
                lambda: {"rows": measure_kills(args.kills, lambda: show("killing", next(done)))},
            )
        return {"text": name, "kills": killed["rows"], **record["rows"]}, origins

    publish_models(args, page, {"prompt": args.prompt}, measured)


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, dict[str, Any]] = value["models"]
    rows = []
    for label, of in models.items():
        seconds = {way: statistics.median(each) for way, each in of["seconds"].items()}
        for way in (READ, STORED, TURN, DENSE, DENSE_FILE, DENSE_COPY):
            rows.append([label, way, f"{seconds[way]:.2f} s", f"{seconds[way] / seconds[READ]:.3f}"])
    share = {label: _shares(of) for label, of in models.items()}
    alike, asked = (sum(of["questions"][place] for of in models.values()) for place in (0, 1))
    kills: dict[str, int] = next(iter(models.values()))["kills"]
    return Page(
        title="A prompt that was read once",
        picture="Seconds until the first token after a prompt and a question, on a logarithmic scale, a panel per "
        "model",
        headline=f"{value['prompt']:,} tokens from a store: the first token after {_span(share, 'read')} of the time "
        f"of reading them, in {_span(share, 'bytes')} of the bytes",
        draw=lambda figure: _draw(figure, models),
        asked=f"A prompt of {value['prompt']:,} tokens was stored by `attach(prompts=)`; how long does the first token "
        f"after it and a question of {QUESTION} take?",
        found=f"{_span(share, 'read')} of the time where all is read (our aim: {AIMS['read']}), and "
        f"{_span(share, 'turn')} times that of the question alone (our aim: {AIMS['turn']:g}). The file takes "
        f"{_span(share, 'bytes')} of the bytes of a cache in 16 bits (our aim: {AIMS['bytes']}), and storing "
        f"{_span(share, 'storing')} of the time of reading (our aim: {AIMS['storing']}). {alike} of {asked} questions "
        "are answered as by the cache in memory that was stored.",
        sure=f"{len(models)} model{'s' * (len(models) > 1)} in float32, one book, medians of "
        f"{len(next(iter(models.values()))['seconds'][READ])} rounds in which all ways take turns, those that take "
        f"little time {TIMES} times in each.",
        tables=table(
            ["model", "the beginning is taken", "first token after", "of the time where all is read"], rows, 2
        ),
        details=[
            *_killed(kills),
            (
                "How it is measured",
                [
                    "From the call of generate to its end, with one new token: finding, opening and checking the file "
                    "are part of it, and so is copying a dense cache; copying ours in memory is not. Files are in the "
                    "memory of the operating system, as they were just written."
                ],
            ),
        ],
    )


def _killed(kills: Mapping[str, int]) -> list[tuple[str, list[str]]]:
    """Return what is said of killed processes; nothing if there was nothing to look at."""
    if not kills["looked at"]:
        return []
    return [
        (
            "Killed processes",
            [
                f"{PROCESSES} processes stored prompts of the pocket model in one folder, and emptied it at times; "
                f"{kills['kills']} times one was killed and another one begun, and all prompts in the folder were "
                f"looked at: {kills['looked at']:,} in all, {kills['damaged']} of them damaged, {kills['wrong']} "
                f"with other numbers than the prompt has; {kills['left over']} files were left once it was cleared."
            ],
        )
    ]


def _shares(of: Mapping[str, Any]) -> dict[str, float]:
    seconds = {way: statistics.median(each) for way, each in of["seconds"].items()}
    return {
        "read": seconds[STORED] / seconds[READ],
        "turn": seconds[STORED] / seconds[TURN],
        "bytes": of["bytes"]["file"] / of["bytes"]["16 bits"],
        "storing": seconds["storing"] / seconds[READ],
    }


def _span(shares: Mapping[str, Mapping[str, float]], what: str) -> str:
    low, high = (f"{pick(each[what] for each in shares.values()):.2g}" for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _draw(figure: Figure, models: Mapping[str, dict[str, Any]]) -> None:
    ways = (READ, STORED, TURN, DENSE, DENSE_FILE, DENSE_COPY)
    figure.set_size_inches(max(7, 2 + 3 * len(models)), 3)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (label, of) in zip(panels, models.items(), strict=True):
        middle = [statistics.median(of["seconds"][way]) for way in ways]
        axes.barh(range(len(ways)), middle, color=[BLUE if way in (READ, STORED, TURN) else GREY for way in ways])
        axes.set_yticks(range(len(ways)), ways)
        axes.set_ylim(len(ways) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_title(label)
        axes.set_xlabel("seconds")


if __name__ == "__main__":
    main()
