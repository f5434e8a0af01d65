"""Answers of a model that decodes from a pruned key cache: prompts cut in the middle, greedy, one at a time.

When: an experiment scores what a model writes. In half precision on a GPU, in float32 on the CPU; no chat template; at
least one new token. The prompt is read with dense attention, then tokens are evicted, then channels are pruned. As in
ThinK's experiments, the first token of an answer comes from the dense prompt and only the others from the pruned cache;
`held_back` prompt tokens may be decoded from it as well, which matters where answers are short.
Source: settings of ThinK (arXiv 2407.21018) and SnapKV (arXiv 2404.14469) on LongBench (arXiv 2308.14508).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from grace_opt.errors import OptionError
from grace_opt.hf import H2O, CacheConfig, SnapKV, attach
from grace_opt.hf.models import POCKET_FOLDER, ModelError, disable_progress_bars, load_model

RECENT = OBSERVED = WINDOW = 32
KERNEL = 7
EVICTIONS = ("none", "snapkv", "h2o")
#: Words for "eviction alone".
DENSE = "dense"


@dataclass(frozen=True)
class Setting:
    """One cache: which tokens it keeps, and which channels.

    Attributes
    ----------
    method : str
        "dense" or a method of `grace_opt.hf`.
    ratio : float
        Share of key channels pruned; "dense" prunes none, whatever it says.
    eviction : {"none", "snapkv", "h2o"}
    kv : int
        KV size: tokens that every head keeps, the window among them.
    """

    method: str
    ratio: float
    eviction: str = "none"
    kv: int = 0

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            raise OptionError(f"eviction {self.eviction!r}: there are {', '.join(EVICTIONS)}.")

    def check(self) -> None:
        """Raise an `OptionError` if no cache can be made of it: before a sweep starts, not in its cells."""
        CacheConfig(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """What `attach` takes."""
        evict: Any = None
        if self.eviction == "snapkv":
            evict = SnapKV(budget=self.kv, window=WINDOW, kernel=KERNEL, pooling="max")
        elif self.eviction == "h2o":
            evict = H2O(budget=self.kv, window=WINDOW, observed=OBSERVED)
        kept = {"recent_window": RECENT, "observation_window": OBSERVED, "evict": evict}
        if self.method == DENSE:
            return {"method": "think", "ratio": 0.0, **kept}
        return {"method": self.method, "ratio": self.ratio, **kept}


@functools.lru_cache(maxsize=1)
def load(model: str, device: str) -> tuple[PreTrainedModel, Any]:
    """The model, half precision unless the device is a CPU, and its tokenizer; "" is the pocket model.

    Raises
    ------
    ModelError
        If it cannot be loaded.
    """
    disable_progress_bars()
    where = model if model not in ("", "pocket") else str(POCKET_FOLDER)
    if torch.device(device).type == "cpu":
        return load_model(where)
    if where.endswith(".gguf"):
        found, tokenizer = load_model(where)
        return found.to(device=device, dtype=torch.float16), tokenizer
    try:  # straight to the device, so that the host needs no room for the weights in float32
        tokenizer = AutoTokenizer.from_pretrained(where)
        found = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float16, device_map=device)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(
            f"cannot load a model from {where!r} on {device}: give a Hub id that you have access to, or a folder. "
            f"transformers said: {str(error).splitlines()[0]}"
        ) from error
    return found.eval(), tokenizer


def label(model: str) -> str:
    """The checkpoint's name as the paper's tables have it.

    Examples
    --------
    >>> label("meta-llama/Meta-Llama-3-8B-Instruct"), label("")
    ('Llama-3-8B-Instruct', 'pocket')
    """
    return model.rstrip("/").rpartition("/")[2].removeprefix("Meta-") or "pocket"


def check_context(model: PreTrainedModel, name: str, tokens: int, what: str, advice: str) -> None:
    """Raise an `OptionError` if the model has fewer positions than `tokens`."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and tokens > context:
        raise OptionError(f"{what} is {tokens} tokens, and {label(name)} has a context of {context}: {advice}.")


def middle_truncated(ids: Tensor, limit: int) -> Tensor:
    """The first and the last half of `limit` tokens, where there are more; ids is (1, L).

    Examples
    --------
    >>> middle_truncated(torch.arange(10)[None], 5).tolist()
    [[0, 1, 7, 8, 9]]
    """
    if limit < 2:
        raise OptionError(f"max_input={limit}: give at least 2.")
    if ids.shape[1] <= limit:
        return ids
    head = limit // 2
    return torch.cat([ids[:, :head], ids[:, head - limit :]], dim=1)


def generation(model: PreTrainedModel, tokenizer: Any, length: int, new_tokens: int, newline: bool) -> GenerationConfig:
    """Greedy, at least one new token; it ends at the end of the text and, if wanted, of the line."""
    ends = {tokenizer.eos_token_id, *_list(model.generation_config.eos_token_id)} - {None}
    if newline and (line := tokenizer.encode("\n", add_special_tokens=False)):
        ends.add(line[-1])
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return GenerationConfig(
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        num_beams=1,
        max_new_tokens=new_tokens,
        min_length=length + 1,  # counts the prompt, so an answer is never empty
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
    )


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: Any,
    ids: Tensor,
    setting: Setting,
    new_tokens: int,
    *,
    newline: bool = False,
    held_back: int = 0,
) -> str:
    """What the model goes on with.

    Parameters
    ----------
    model, tokenizer
    ids : Tensor (1, L)
        The prompt.
    setting : Setting
    new_tokens : int
        Largest number of new tokens.
    newline : bool
        Stop at the end of the line.
    held_back : int
        Number of the prompt's last tokens decoded from the pruned cache.
    """
    ids = ids.to(model.device)
    length = ids.shape[1]
    if not 0 <= held_back < length:
        raise OptionError(f"held_back={held_back}: the prompt has {length} tokens; give a smaller number.")
    with attach(model, **setting.arguments()) as attached:
        cache = attached.new_cache(length - held_back)
        if held_back:
            model(ids[:, :-held_back], past_key_values=cache, logits_to_keep=1)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            generation_config=generation(model, tokenizer, length, new_tokens, newline),
        )
    return str(tokenizer.decode(output[0, length:], skip_special_tokens=True))


def _list(value: int | Sequence[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
