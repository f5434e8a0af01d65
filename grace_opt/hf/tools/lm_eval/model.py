"""`GraceLM`: the harness's Hugging Face model, with every prompt read into one of our caches first.

When: ``grace-opt lm-eval``, or ``lm_eval.simple_evaluate(model=GraceLM(...))`` in Python. Importing this registers the
model's name, ``grace``, with the harness. Needs ``pip install ".[lm-eval]"``.

The prompt but its last token is read and compressed; what is scored or generated is predicted from the compressed cache
alone (:mod:`grace_opt.hf.tools.lm_eval.pieces` says why the last token waits). The choices of a question share its
prompt's cache. Requests whose prompt is too short to be compressed go to the harness's own code, and are counted.

Source: ``HFLM`` of lm-evaluation-harness 0.4.13, whose loading, tokens, truncation and chat templates these are.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from tqdm import tqdm

from .... import __version__
from ...._util.optional import require
from ....errors import OptionError
from ...engine.cache import CompressedCache
from ...models.implementation import attention_implementation, base_for
from .arguments import model_arguments, split_arguments
from .pieces import Piece, ScoredPrompt, Tokens, by_prompt, left_padded, piece_of
from .tally import Tally, least_tokens

require("lm_eval", "lm-eval", "grace_opt.hf.tools.lm_eval.model")
require("accelerate", "lm-eval", "lm-evaluation-harness, to load a model,")

from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

#: Where a file of the harness's ``--use_cache`` says whose answers it has.
OWNER = "grace_opt"
#: A child of the harness's logger, so that its settings hold.
LOG = logging.getLogger("lm_eval.grace_opt")


@register_model("grace")
class GraceLM(HFLM):
    """A causal language model whose prompts are read into a `CompressedCache`.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
        As in ``HFLM``; also ``pocket``, the model that ships with grace_opt, and the path of a ``.gguf`` file.
    **given
        Settings of the cache, as in `CacheConfig`, or ``config``, all of them; and all arguments of ``HFLM``.

    Attributes
    ----------
    cache_config : CacheConfig
        The settings.
    tallies : dict
        A `Tally` for each task.

    Raises
    ------
    OptionError
        If a setting is wrong, or the model is not a decoder-only one.
    CacheError
        If the model has no layer that could be compressed.
    """

    def __init__(self, pretrained: Any = None, **given: Any) -> None:
        if pretrained is None:
            raise OptionError("--model_args names no model; write pretrained=NAME, a Hub id or a folder, or pocket")
        settings, others = split_arguments(given, inspect.signature(HFLM).parameters)
        super().__init__(**model_arguments(pretrained, others))
        if self.backend != "causal":
            raise OptionError(f"{pretrained} is an encoder-decoder; only decoder-only models have a cache of ours")
        first = CompressedCache(self.model, **settings)
        self.cache_config, self._identity = first.config, first.fingerprint()
        self.tallies: dict[str, Tally] = {}
        self._tally = Tally()
        self._least = least_tokens(self.cache_config)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    # ------------------------------------------------ what the harness calls

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations of contexts; see ``HFLM``."""
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows of the model's length: the first half of each is its prompt; see ``HFLM``."""
        return self._by_task(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate from contexts; see ``HFLM``."""
        return self._by_task(super().generate_until, requests, disable_tqdm)

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes into its results; ours is under ``grace_opt``. Logs a line for each task."""
        for name, tally in self.tallies.items():
            if tally.compressed:
                LOG.info("%s: %s", name, tally)
            if tally.compressed < tally.requests:
                LOG.warning(
                    "%s: %s of %s requests have a prompt that stayed dense: fewer than %s tokens before the last one, "
                    "or too few for the bits asked for. %s",
                    name,
                    tally.requests - tally.compressed,
                    tally.requests,
                    self._least,
                    "Their results are the dense cache's." if tally.compressed else "This is the dense cache's result.",
                )
        found = {
            "version": __version__,
            "pruning": self.cache_config.to_dict(),
            "least_prompt_tokens": self._least,
            "tasks": {name: tally.summary() for name, tally in self.tallies.items()},
        }
        return {**super().get_model_info(), "grace_opt": found}

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse a file of ``--use_cache`` with other answers: the harness looks them up by their prompts alone."""
        super().set_cache_hook(cache_hook)
        answers = cache_hook.dbdict
        if answers is None:
            return
        mine = json.dumps(
            {"pruning": self.cache_config.to_dict(), "model": self._identity}, default=str, sort_keys=True
        )
        if not len(answers):
            answers[OWNER] = mine
        elif answers.get(OWNER) != mine:
            raise OptionError(
                "the file of --use_cache has the answers of another model, or of other settings of the cache; give "
                "each its own file"
            )

    # ------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        # Windows of a whole text come without a key.
        pieces = {
            place: piece_of(context, continuation, self.max_length, rolling=key is None)
            for place, (key, context, continuation) in enumerate(requests)
        }
        answers: dict[int, tuple[float, bool]] = {}
        short = [place for place, piece in pieces.items() if len(piece.prompt) < self._least]
        if short:
            found = super()._loglikelihood_tokens([requests[place] for place in short], disable_tqdm, override_bs)
            answers.update(zip(short, found, strict=True))
            for place in short:
                self._tally.count(False, tokens=len(pieces[place].targets))
        long = {place: piece for place, piece in pieces.items() if place not in answers}
        prompts = by_prompt(long)
        size = self._prompts_at_once(requests, long, override_bs) if long else 1
        quiet = disable_tqdm or self.rank != 0 or not long
        with tqdm(total=len(long), disable=quiet, desc="Scoring behind our caches") as bar:
            for start in range(0, len(prompts), size):
                found = self._scored(prompts[start : start + size], long, size)
                for place, answer in found.items():
                    if requests[place][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[place][0], answer)
                answers.update(found)
                bar.update(len(found))
        return [answers[place] for place in range(len(requests))]

    def _prompts_at_once(self, requests: Sequence[Any], long: Mapping[int, Piece], override: int | None) -> int:
        """The batch size; the harness tries one out where it is to be found, with the longest request."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        longest = max(long, key=lambda place: sum(map(len, long[place][:2])))
        return override or int(self._detect_batch_size([requests[longest]]))

    def _scored(
        self, prompts: Sequence[ScoredPrompt], pieces: Mapping[int, Piece], size: int
    ) -> dict[int, tuple[float, bool]]:
        """Read a batch of prompts, feed what belongs behind each of them, and return the answers by their places."""
        feeds = [(row, fed, places) for row, each in enumerate(prompts) for fed, places in each.fed.items()]
        within = max(pieces[place].within for _, _, places in feeds for place in places)
        both = left_padded(each.tokens for each in prompts)
        ids, mask = (torch.tensor(rows, dtype=torch.int64, device=self.device) for rows in both)
        answers = {}
        with self._our_attention():
            cache, own, compressed = self._read(ids, mask, within)
            for start in range(0, len(feeds), size):
                some = feeds[start : start + size]
                # Others need the cache as it is after the prompt.
                used = cache if start + size >= len(feeds) else copy.deepcopy(cache)
                behind = self._feed(used, mask, [row for row, _, _ in some], [fed for _, fed, _ in some])
                for (row, fed, places), logits in zip(some, behind, strict=True):
                    for place in places:
                        targets, within = pieces[place].targets, pieces[place].within
                        predicted = torch.cat([own[row, own.shape[1] - within :], logits[: len(fed)]])
                        answers[place] = self._answer(predicted, targets)
                        behind_cache = (len(targets) - within) * compressed[row]
                        self._tally.count(compressed[row], tokens=len(targets), behind=behind_cache)
        return answers

    def _read(self, ids: Tensor, mask: Tensor, wanted: int) -> tuple[CompressedCache, Tensor, list[bool]]:
        """Read prompts into a new cache; return it, their last ``wanted`` logits, and which of them are compressed."""
        cache = CompressedCache(self.model, config=self.cache_config, prompt_length=ids.shape[1])
        logits = self._forward(cache, ids, mask, wanted)
        return cache, logits, self._tally.measure(cache, mask)

    def _feed(self, cache: CompressedCache, mask: Tensor, rows: list[int], fed: Sequence[Tokens]) -> Tensor:
        """Feed tokens behind these rows of a cache, which then holds only them, and return the logits.

        Shorter ones are padded on the right, where padding changes nothing before it. Where tokens after the prompt are
        compressed too, they are fed in blocks, so that they are, as when tokens are generated.
        """
        picked = torch.tensor(rows, dtype=torch.int64, device=mask.device)
        cache.batch_select_indices(picked)
        width = max(map(len, fed))
        ids = torch.tensor(
            [[*tokens, *[0] * (width - len(tokens))] for tokens in fed], dtype=torch.int64, device=mask.device
        )
        mask, logits = mask[picked], []
        for part in torch.split(ids, self.cache_config.tail_block or width, dim=1):
            mask = torch.cat([mask, torch.ones_like(part)], dim=1)
            logits.append(self._forward(cache, part, mask, part.shape[1]))
        return torch.cat(logits, dim=1)

    @torch.no_grad()
    def _forward(self, cache: CompressedCache, ids: Tensor, mask: Tensor, wanted: int) -> Tensor:
        """Feed tokens, and return the logits after the last ``wanted`` of them."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        only = {"logits_to_keep": max(wanted, 1)} if self._keeps_logits else {}
        mixed = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
            logits: Tensor = self.model(ids, **given, **only).logits
        return logits[:, logits.shape[1] - wanted :]

    def _answer(self, logits: Tensor, targets: Tokens) -> tuple[float, bool]:
        """Return the targets' log-likelihood, and whether each of them is the likeliest."""
        likely = log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        wanted = torch.tensor(targets, dtype=torch.int64, device=likely.device)
        return float(likely.gather(1, wanted[:, None]).sum()), bool((likely.argmax(-1) == wanted).all())

    # ------------------------------------------------------------ generation

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        mask = options.setdefault("attention_mask", torch.ones_like(context))
        prompts, real = context[:, :-1], mask[:, :-1]
        if int(real.sum(-1).max()) < self._least:
            for _ in prompts:
                self._tally.count(False)
            return self._generated(context, max_length, stop, options)
        with self._our_attention():
            cache, _, compressed = self._read(prompts, real, 0)
            for row in compressed:
                self._tally.count(row)
            if (beams := options.get("num_beams") or 1) > 1:
                cache.batch_repeat_interleave(beams)
            return self._generated(context, max_length, stop, {**options, "past_key_values": cache})

    def _generated(self, context: Tensor, max_length: int, stop: list[str], options: dict[str, Any]) -> Tensor:
        found: Tensor = super()._model_generate(context, max_length, stop, **options)
        return found

    # --------------------------------------------------------------- helpers

    @contextmanager
    def _our_attention(self) -> Iterator[None]:
        with attention_implementation(self.model, f"grace_{base_for(self.model)}"):
            yield

    def _by_task(self, answer: Callable[..., list[Any]], requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Answer the requests of each task apart, so that each has its own tally."""
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.task_name or "no task", []).append(place)
        found: dict[int, Any] = {}
        for name, own in places.items():
            self._tally = self.tallies.setdefault(name, Tally())
            found.update(zip(own, answer([requests[place] for place in own], disable_tqdm=disable_tqdm), strict=True))
        return [found[place] for place in range(len(requests))]
