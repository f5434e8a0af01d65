"""The model that is measured: a real one, or one of a real model's shape with random weights, perhaps fewer layers.

When: times and bytes depend on shapes, not on what weights say, so that nothing need be downloaded.

Source: shapes as in `bench.machine`; longest contexts from the models' ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.machine import MODELS, Model
from bench.report import si
from grace_opt.hf.models import ModelError, load_model

TINY = Model("tiny", layers=2, kv_heads=2, query_heads=4, head_dim=16, hidden=64, intermediate=96, vocabulary=97)
#: Sizes and longest context by name.
SHAPES = {
    "llama3-8b": (MODELS["llama3-8b"], 8192),
    "mistral-7b": (MODELS["mistral-7b"], 32768),
    "smollm2-135m": (MODELS["smollm2-135m"], 8192),
    "tiny": (TINY, 8192),
}
#: Layers on a CPU unless --layers says otherwise: with all of them a run takes hours, or does not fit.
CPU_LAYERS = {"llama3-8b": 1, "mistral-7b": 1, "smollm2-135m": 8, "tiny": 2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Subject:
    """A model in memory, and what is said about it.

    Attributes
    ----------
    model : PreTrainedModel
    layers, head_dim : int
    maximum : int
        Tokens of the longest prompt that it reads.
    words : str
        Name, weights and depth, for people.
    shape : str or None
        Name of the shape, if the weights are random.
    """

    model: PreTrainedModel
    layers: int
    head_dim: int
    maximum: int
    words: str
    shape: str | None = None


def random_weights(shape: str, layers: int | None, device: str, dtype: str) -> Subject:
    """A Llama of a known shape.

    Parameters
    ----------
    shape : str
        A key of `SHAPES`.
    layers : int, optional
        How many; None is all of them, on a CPU those of `CPU_LAYERS`.
    device, dtype : str
        Where the weights lie, and a key of `DTYPES`.
    """
    full, maximum = SHAPES[shape]
    layers = layers or (CPU_LAYERS[shape] if device == "cpu" else full.layers)
    if layers > full.layers:
        raise SystemExit(f"--layers {layers}: {full.models} has {full.layers}; write at most that")
    sizes = replace(full, layers=layers)
    check_fits(sizes, device, dtype)
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=sizes.query_heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=maximum,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    depth = "all" if layers == full.layers else f"**{layers} of**"
    words = f"{full.models}'s shape, random weights, {depth} {full.layers} layers"
    return Subject(model, layers, sizes.head_dim, maximum, words, shape)


def check_fits(sizes: Model, device: str, dtype: str) -> None:
    """Stop, rather than be killed, if the weights are more than there is memory."""
    fixed, item = 2 * sizes.head_weights, DTYPES[dtype].itemsize
    memory = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().total
    weights = (fixed + sizes.layers * sizes.layer_weights) * item
    if weights > memory:
        fit = (memory // item - fixed) // sizes.layer_weights
        advice = f"--layers {fit} or fewer, " if fit > 0 else ""
        raise SystemExit(
            f"the weights of {sizes.models} in {dtype} take {si(weights, 'B')} and there are {si(memory, 'B')}: write "
            f"{advice}a smaller --dtype, or another --shape"
        )


def real_weights(where: str, device: str, dtype: str) -> Subject:
    """A Llama-like model from the Hub or a file; the arguments are those of `load_model` and of `random_weights`."""
    try:
        model, _ = load_model(where)
    except ModelError as error:
        raise SystemExit(f"--model: {error}") from None
    config = model.config.get_text_config(decoder=True)
    layers, width = config.num_hidden_layers, config.hidden_size // config.num_attention_heads
    words, longest = f"{Path(where).name}, all {layers} layers", config.max_position_embeddings
    model = model.to(device, DTYPES[dtype])
    return Subject(model, layers, getattr(config, "head_dim", None) or width, longest, words)
