"""A tiny model of every causal language model of this transformers, made from the names of its settings.

`tests/hf/matrix.py` names the families that are tested in every way of generating. Here are all the others, and those
that will come: a class is found in transformers' own table, its sizes are those that its configuration knows by name,
and weights are drawn. `tests/hf/test_every_family.py` lets them generate.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from tests.hf.matrix import ENOUGH, PROMPT, SIZES, base_of, generated, long_rope, prompts

#: A model of more parameters has parts that these sizes do not reach, such as one for images.
TOO_MANY = 100_000_000
#: Sizes that only some configurations know, and who has them. Those of `SIZES` are given to all.
BY_SIZE: dict[float, str] = {
    0.3: "init_std",
    0: "first_k_dense_replace num_kv_shared_layers",
    1: (
        "mamba_n_groups moe_k moe_num_shared_experts moe_top_k moe_topk n_group n_groups n_shared_experts "
        "num_dense_layers num_experts_per_tok num_shared_experts topk_group"
    ),
    2: (
        "decoder_layers linear_num_key_heads linear_num_value_heads moe_num_experts n_layer n_layers "
        "n_routed_experts num_experts num_local_experts"
    ),
    4: "conv_kernel decoder_attention_heads mamba_n_heads mamba_num_heads n_head n_heads",
    8: "hidden_size_per_layer_input mamba_d_state qk_rope_head_dim rotary_dim ssm_state_size",
    16: (
        "kv_lora_rank linear_key_head_dim linear_value_head_dim mamba_chunk_size q_lora_rank qk_nope_head_dim "
        "query_pre_attn_scalar v_head_dim"
    ),
    32: (
        "expert_ffn_hidden_size global_head_dim mamba_d_head mamba_head_dim moe_intermediate_size "
        "shared_expert_intermediate_size shared_intermediate_size"
    ),
    64: "d_model n_embd word_embed_proj_dim",
    96: "decoder_ffn_dim ffn_dim ffn_hidden_size intermediate_size_mlp n_inner",
    97: "vocab_size_per_layer_input",
    256: "n_positions",
}
MORE = {name: size for size, names in BY_SIZE.items() for name in names.split()}
#: Lengths at which a model begins to do something else: it looks no further back, or changes its embeddings or scales.
LIMITS = (
    "attention_chunk_size attention_window_size floor_scale local_attention "
    "original_max_position_embeddings sliding_window sliding_window_size window_size"
).split()
#: Whose rotary embeddings change at such a length, and what more that takes.
LONG_ROPE: dict[str, dict[str, float]] = {"phi3": {}, "phimoe": {"short_mscale": 1.0, "long_mscale": 1.2}}
#: Crossed by the prompt, and by what is generated.
EARLY, LATE = 12, PROMPT + 4
#: What keys of multi-head latent attention are made of; each of its heads has its own.
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_UNWINDOWED = {"sliding_window": None}  # where nothing would be left to compress
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
#: What the names do not tell (... leaves a name out).
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _PLAIN_ROPE)},
    "doge": _UNWINDOWED,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gpt_neo": {
        "attention_types": [[["global"], 2]],
        "num_layers": 2,
        "num_heads": 4,
        "num_hidden_layers": ...,
        "num_attention_heads": ...,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hrm_text": {"initializer_range": 0.05},  # its layers run many times over, which magnifies every rounding
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": 1, "moe_topk": 2},
    "mamba2": {"head_dim": 32, "num_heads": 4},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": _UNWINDOWED,
    "mistral": _UNWINDOWED,
    "mixtral": _UNWINDOWED,
    "moshi": {"sliding_window": 256},
    "prophetnet": {
        "num_hidden_layers": ...,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "roc_bert": {
        "enable_shape": False,
        "enable_pronunciation": False,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
    "starcoder2": _UNWINDOWED,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
}


class NotBuiltError(Exception):
    """Says why there is no tiny model."""


def kinds() -> dict[str, str]:
    """Classes, and a ``model_type`` of each: of text alone if there is one."""
    found: dict[str, str] = {}
    for kind, name in sorted(CLASSES.items()):
        if kind in CONFIG_MAPPING and (name not in found or kind.endswith("_text")):
            found[name] = kind
    return found


def tiny(kind: str, limit: int = EARLY) -> Any:
    """Return the tiny model of a ``model_type``, always with the same weights; all its `LIMITS` are so long.

    Raises
    ------
    NotBuiltError
        If the configuration refuses these sizes, or the model has large parts that they do not reach.
    """
    config_class, model_class = CONFIG_MAPPING[kind], getattr(transformers, CLASSES[kind])
    try:
        config = config_class(**sizes_of(config_class, SPECIAL.get(kind, {}), limit))
        with torch.device("meta"):
            count = sum(each.numel() for each in model_class(config).parameters())
    except Exception as error:  # of whatever class: each configuration has its own ways
        raise NotBuiltError(f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]) from error
    if count > TOO_MANY:
        raise NotBuiltError(
            f"it has {count:,} parameters even with small sizes: those of its other parts have other names"
        )
    for seed in range(30):  # some draws say the same token again and again
        torch.manual_seed(seed)
        model = model_class(config).eval()
        if base_of(model) == "eager":
            model.set_attn_implementation("eager")
        if not is_monotonous(model):
            break
    return model


def limits_of(config: Any) -> list[str]:
    """Return which lengths a configuration limits."""
    return [name for name in LIMITS if getattr(config, name, None)]


def sizes_of(config_class: Any, special: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the settings of a tiny configuration."""
    default = config_class()
    known = set(vars(default)) | set(inspect.signature(config_class.__init__).parameters)
    known |= {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    more = MORE | dict.fromkeys(LIMITS, limit)
    sizes = {**SIZES, **{name: size for name, size in more.items() if name in known}}
    if config_class.model_type in LONG_ROPE:
        sizes |= long_rope(limit, **LONG_ROPE[config_class.model_type])
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if types and "layer_types" in known:
        count = max(2, len(types))
        sizes |= {"num_hidden_layers": count, "layer_types": [types[layer % len(types)] for layer in range(count)]}
    if "head_dim" not in known:
        del sizes["head_dim"]
    if "kv_lora_rank" in known:
        sizes |= {name: size for name, size in LATENT.items() if name in known}
    return {name: size for name, size in {**sizes, **special}.items() if size is not ...}


def is_monotonous(model: Any) -> bool:
    """Return whether a model says too little for its tokens to prove anything."""
    ids, mask = prompts()
    try:
        said = generated()(model, None, ids, mask)
    except Exception:  # as above; whoever asks for more than this will see it
        return False
    return len(set(said.flatten().tolist())) < ENOUGH
